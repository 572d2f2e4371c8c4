"""Several threads on one model: each finds nothing half done; [Note: turns]."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.core.errors import ThreadError
from infinity.core.turn import Turn

from .models import case
from .offloaded import config_for

NVME = {"parameters": "nvme", "optimizer_state": "nvme", "gradients": "nvme"}


def _gathered(this: Any, model: Any, optimizer: Any) -> None:
    with infinity.gathered(model):
        sum(p.sum() for p in model.parameters())


def _evaluates(this: Any, model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        this.loss(model, this.batches[0])


BESIDE: dict[str, Callable[[Any, Any, Any], object]] = {
    "gathered": _gathered,
    "gradient": lambda this, model, optimizer: infinity.gradient(model.head.weight),
    "flush": lambda this, model, optimizer: infinity.flush(optimizer),
    "state_dict": lambda this, model, optimizer: {n: v.clone() for n, v in model.state_dict().items()},
    "optimizer_state_dict": lambda this, model, optimizer: optimizer.state_dict(),
    "metrics": lambda this, model, optimizer: infinity.metrics(optimizer),
    "evaluation": _evaluates,
    "forward_with_a_graph": lambda this, model, optimizer: this.loss(model, this.batches[0]),
}


def _look(name: str, things: tuple[Any, ...], trained: threading.Event, errors: list[Any]) -> None:
    try:
        while not trained.is_set():
            BESIDE[name](*things)
            time.sleep(0.001)
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("update", ["sync", "overlap"])
@pytest.mark.parametrize("name", BESIDE)
def test_a_thread_beside_the_one_that_trains(name: str, update: str, tmp_path: Path) -> None:
    found = []
    for beside in (True, False):
        folder = tmp_path / str(beside)
        folder.mkdir()
        this = case("gpt")
        adam = torch.optim.AdamW(this.model.parameters(), lr=1e-2)
        model, optimizer = infinity.wrap(this.model, adam, config_for(folder, update=update, **NVME))
        trained, errors = threading.Event(), []
        things = (this, model, optimizer)
        thread = threading.Thread(target=_look, args=(name, things, trained, errors), daemon=True)
        if beside:
            thread.start()
        for step in range(6):
            this.loss(model, this.batches[step % len(this.batches)]).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.set()
        if beside:
            thread.join(60)
            assert not thread.is_alive()
        assert errors == []
        found.append({n: v.clone() for n, v in model.state_dict().items()})
        infinity.close(optimizer)
    assert all(torch.equal(found[0][n], v) for n, v in found[1].items())


def test_two_threads_evaluate_one_model(tmp_path: Path) -> None:
    this = case("gpt")
    adam = torch.optim.AdamW(this.model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap(this.model, adam, config_for(tmp_path, **NVME))
    with torch.no_grad():
        wanted = [this.loss(model, batch).item() for batch in this.batches]
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        with torch.no_grad():
            found[number] = [this.loss(model, batch).item() for batch in this.batches]

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(range(4), wanted)
    infinity.close(optimizer)


def test_who_waits_too_long_is_told_who_has_the_turn() -> None:
    turn, inside, done = Turn(limit=0.3), threading.Event(), threading.Event()

    def hold() -> None:
        with turn.span():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=hold, name="the-other", daemon=True)
    thread.start()
    inside.wait(60)
    with pytest.raises(ThreadError, match="the-other"):
        turn.enter("mine")
    done.set()
    thread.join(60)
    turn.enter("mine")
    turn.leave("mine")


def test_the_turn_of_a_thread_that_has_ended_is_free() -> None:
    turn = Turn(limit=60)
    thread = threading.Thread(target=lambda: turn.enter("forever"))
    thread.start()
    thread.join(60)
    turn.enter("mine")
    assert turn.mine
    turn.leave("mine")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_forward_or_a_backward_that_raised_holds_up_no_other_thread(where: str, tmp_path: Path) -> None:
    this = case("gpt")
    adam = torch.optim.AdamW(this.model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap(this.model, adam, config_for(tmp_path, **NVME))
    module = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt  # torch calls no hook at the end of a forward that this ends

    if where == "forward":
        handle = module.register_forward_pre_hook(stop)
    else:
        handle = module.weight.register_post_accumulate_grad_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        this.loss(model, this.batches[0]).backward()
    handle.remove()
    optimizer.zero_grad()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            this.loss(model, this.batches[0]).backward()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert failed == []
    optimizer.step()
    infinity.close(optimizer)
