"""Several threads on one model: each finds nothing half done; [Note: the engine lock]."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ThreadError

from .models import case
from .offloaded import ON_NVME, config_for, wrap_adamw


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _gathered(this: Any, model: Any, optimizer: Any) -> None:
    with infinity.gathered(model):
        sum(p.sum() for p in model.parameters())


BESIDE: dict[str, Callable[[Any, Any, Any], object]] = {
    "gathered": _gathered,
    "gradient": lambda this, model, optimizer: infinity.gradient(model.head.weight),
    "flush": lambda this, model, optimizer: infinity.flush(optimizer),
    "state_dict": lambda this, model, optimizer: {n: v.clone() for n, v in model.state_dict().items()},
    "optimizer_state_dict": lambda this, model, optimizer: optimizer.state_dict(),
    "metrics": lambda this, model, optimizer: infinity.metrics(optimizer),
    "look": lambda this, model, optimizer: model.head.weight.sum(),
}


def trained(
    folder: Path, place: str, calls: Callable[[Any, Any, Any], object] | None = None
) -> dict[str, torch.Tensor]:
    """Train while another thread makes calls, if there are any; return the values."""
    this = case("gpt", layers=2, width=32)
    config = config_for(folder, **{**ON_NVME, "parameters": place})
    model, optimizer = wrap_adamw(this.model, config, lr=1e-2)
    over, errors = threading.Event(), []

    def look() -> None:
        try:
            while calls is not None and not over.is_set():
                calls(this, model, optimizer)
                time.sleep(0.001)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    for step in range(5):
        this.loss(model, this.batches[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []
    found = {n: v.clone() for n, v in model.state_dict().items()}
    infinity.close(optimizer)
    return found


@functools.cache
def trained_alone(place: str) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return trained(Path(folder), place)


@pytest.mark.parametrize("name", BESIDE)
def test_a_thread_beside_the_one_that_trains(name: str, tmp_path: Path) -> None:
    place = "device" if name in ("look", "state_dict") else "nvme"
    found = trained(tmp_path, place, BESIDE[name])
    assert all(torch.equal(found[n], v) for n, v in trained_alone(place).items())


def run_threads(calls: Iterable[Callable[[], None]]) -> None:
    """Make each call on a thread of its own, and raise what one of them raised."""
    pool = ThreadPoolExecutor()
    for made in [pool.submit(call) for call in calls]:
        made.result(60)
    pool.shutdown()


def test_a_thread_beside_a_forward(tmp_path: Path) -> None:
    """One that calls a module gets an error at once, and so does one that reads a parameter off the device; a
    call of the engine waits, and after its limit says for whom."""
    config = config_for(tmp_path, **ON_NVME)
    model, optimizer = wrap_adamw(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config)
    inside, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        done.wait(60)

    hook = model[0].register_forward_hook(wait)
    made: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: made.append(model(torch.ones(2, 8))), name="the-other", daemon=True
    )
    thread.start()
    assert inside.wait(60)
    hook.remove()

    def end_nothing() -> None:
        with contextlib.suppress(ThreadError):  # after the limit below
            optimizer.zero_grad()

    waits = threading.Thread(target=end_nothing, daemon=True)
    waits.start()
    for call in (lambda: model(torch.ones(2, 8)), lambda: model[1](torch.ones(2, 8)), model[1].weight.sum):
        begin = time.monotonic()
        with pytest.raises(ThreadError, match="the-other"):
            call()
        assert time.monotonic() - begin < 60  # of the limit of 300
    engine_of(model).commits._limit = 0.3
    with pytest.raises(ThreadError, match="the-other"):
        optimizer.state_dict()
    done.set()
    for each in (thread, waits):
        each.join(60)
        assert not each.is_alive()
    assert torch.equal(model(torch.ones(2, 8)), made[0])
    infinity.close(optimizer)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("retries", ["later", "meanwhile"])
def test_a_forward_or_a_backward_that_raised_holds_up_no_other_thread(
    where: str, retries: str, tmp_path: Path
) -> None:
    """Neither once it is over, nor where the thread that it raised in goes on in some function."""
    this = case("gpt", layers=2, width=32)
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path), lr=1e-2)
    engine_of(model).commits._limit = 60.0
    module = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
    failed: list[BaseException] = []

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt  # torch calls no hook at the end of a forward that this ends

    def work() -> None:
        try:
            this.loss(model, this.batches[0]).backward()
        except BaseException as error:
            failed.append(error)

    def restore_state_dict_and_retry() -> None:
        if where == "forward":
            handle = module.register_forward_pre_hook(stop)
        else:
            handle = module.weight.register_post_accumulate_grad_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            this.loss(model, this.batches[0]).backward()
        handle.remove()
        if retries == "meanwhile":
            run_threads([work])

    restore_state_dict_and_retry()
    optimizer.zero_grad()
    run_threads([work])
    assert failed == []
    optimizer.step()
    infinity.close(optimizer)


def test_two_threads_with_two_models(tmp_path: Path) -> None:
    """`gathered` takes both in one order, whatever the order they are given in."""
    models: list[Any] = []
    for name in "ab":
        (tmp_path / name).mkdir()
        models.append(wrap_adamw(nn.Sequential(nn.Linear(8, 8)), config_for(tmp_path / name))[0])
    weights = [model[0].weight for model in models]

    def gather(params: list[nn.Parameter]) -> None:
        for _ in range(50):
            with infinity.gathered(params):
                pass

    run_threads([functools.partial(gather, weights), functools.partial(gather, weights[::-1])])
    for model in models:
        infinity.close(model)
