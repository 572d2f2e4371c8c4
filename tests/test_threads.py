"""Several threads on one model: each finds nothing half done; [Note: the engine lock]."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.engine_lock import EngineLock
from infinity.core.errors import ThreadError

from .command_line import python
from .models import case
from .offloaded import config_for, wrap_adamw
from .quick import quick

NVME = {"parameters": "nvme", "optimizer_state": "nvme", "gradients": "nvme"}


def test_a_thread_that_python_has_not_started_keeps_its_turn() -> None:
    """As those of an embedding program: no object of Python's says that they live."""
    turn, begun, go, found = EngineLock(limit=60), threading.Event(), threading.Event(), []

    def foreign() -> None:
        with turn.hold():
            begun.set()
            go.wait(30)
            found.append("it")

    def other() -> None:
        with turn.hold():
            found.append("the other")

    _thread.start_new_thread(foreign, ())
    assert begun.wait(30)
    waits = threading.Thread(target=other)
    waits.start()
    time.sleep(0.5)
    go.set()
    waits.join(30)
    assert found == ["it", "the other"]


def test_who_waits_in_a_backward_of_its_own_waits_for_no_thread_that_has_ended() -> None:
    turn = EngineLock(limit=5)
    ended = threading.Thread(target=turn.enter, args=["a backward that raised"])
    ended.start()
    ended.join(30)

    def _engine_run_backward() -> None:
        with turn.hold():
            pass

    _in_torch(_engine_run_backward, torch.autograd.graph)()


def _in_torch(function: Callable[[], None], module: types.ModuleType) -> Callable[[], None]:
    """Return a function as if it stood in a module of torch."""
    return types.FunctionType(function.__code__, vars(module), closure=function.__closure__)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("_call_impl", torch.nn.modules.module),
        ("torch_dynamo_resume_in__call_impl_at_1784", torch.nn.modules.module),
        ("state_dict", torch.nn.modules.module),
        ("_engine_run_backward", torch.autograd.graph),
    ],
)
def test_only_torchs_own_functions_keep_the_lock(name: str, home: types.ModuleType) -> None:
    """A function of the user's has any name: `restore_state_dict_and_retry`, after a backward that raised."""

    def within() -> None:
        lock = EngineLock(limit=2)
        lock.enter("a backward that raised")
        other = threading.Thread(target=waits, args=[lock], daemon=True)
        other.start()
        other.join(30)

    def waits(lock: EngineLock) -> None:
        try:
            with lock.hold():
                found.append("it went on")
        except ThreadError as error:
            found.append(error.found)

    found: list[str] = []
    for mine in (name, f"restore_{name}_and_retry"):
        within.__code__ = within.__code__.replace(co_name=mine)
        within()
    assert found == ["it went on", "it went on"]
    found.clear()

    def torchs() -> None:
        within()

    torchs.__code__ = torchs.__code__.replace(co_name=name)
    _in_torch(torchs, home)()
    assert ["is inside" in what for what in found] == [True]


def test_a_retry_by_any_name_holds_up_no_other_thread(tmp_path: Path) -> None:
    this = case("gpt")
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path))
    engine_of(model).deferral.lock._limit = 5.0
    losses: list[float] = []

    def stop(gradient: torch.Tensor) -> None:
        raise RuntimeError("a backward that raises")

    def evaluate() -> None:
        with torch.no_grad():
            losses.append(this.loss(model, this.batches[0]).item())

    def restore_state_dict_and_retry() -> None:
        loss = this.loss(model, this.batches[0])
        loss.register_hook(stop)
        with pytest.raises(RuntimeError, match="a backward that raises"):
            loss.backward()
        beside = threading.Thread(target=evaluate, daemon=True)
        beside.start()
        beside.join(60)

    restore_state_dict_and_retry()
    assert len(losses) == 1
    infinity.close(optimizer)


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


@pytest.mark.parametrize(
    ("name", "update"),
    quick(itertools.product(BESIDE, ["sync", "overlap"]), [(name, "overlap") for name in BESIDE]),
)
def test_a_thread_beside_the_one_that_trains(name: str, update: str, tmp_path: Path) -> None:
    found = []
    for beside in (True, False):
        folder = tmp_path / str(beside)
        folder.mkdir()
        this = case("gpt")
        model, optimizer = wrap_adamw(this.model, config_for(folder, update=update, **NVME), lr=1e-2)
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
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path, **NVME), lr=1e-2)
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
    turn, inside, done = EngineLock(limit=0.3), threading.Event(), threading.Event()

    def hold() -> None:
        with turn.hold():
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
    turn = EngineLock(limit=60)
    thread = threading.Thread(target=lambda: turn.enter("forever"))
    thread.start()
    thread.join(60)
    turn.enter("mine")
    assert turn.mine
    turn.leave("mine")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_forward_or_a_backward_that_raised_holds_up_no_other_thread(where: str, tmp_path: Path) -> None:
    this = case("gpt")
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path, **NVME), lr=1e-2)
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


class Branches(nn.Module):
    """Each block's two halves are computed by threads that the forward starts."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def half(self, block: nn.Sequential, x: torch.Tensor, number: int, graph: bool) -> torch.Tensor:
        rows = slice(4 * number, 4 * number + 4)
        with torch.set_grad_enabled(graph):
            match self.way:
                case "weight":
                    return nn.functional.linear(x, block[0].weight[rows])
                case "part of a block":
                    return block[0](x)[:, rows]  # type: ignore[no-any-return]
                case _:
                    return block(x)[:, rows]  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        graph = torch.is_grad_enabled()
        with ThreadPoolExecutor(2) as pool:
            for block in self.blocks:
                halves = pool.map(lambda i: self.half(block, x, i, graph), range(2))  # noqa: B023
                x = x + torch.cat(list(halves), 1)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("way", "parameters", "update"),
    [
        *((way, "nvme", "overlap") for way in ("weight", "part of a block", "block")),
        *(("weight", "device", update) for update in ("sync", "overlap", "delayed")),
    ],
)
def test_threads_that_a_forward_starts_use_what_they_need(
    way: str, parameters: str, update: str, tmp_path: Path
) -> None:
    settings = {**NVME, "parameters": parameters, "update": update, "delay_warmup_steps": 4}
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Branches(way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        if offloaded:
            model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path, **settings))
        for step in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({n: v.clone() for n, v in model.state_dict().items()})
    infinity.close(model)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


_LOOKS = """
import gc, threading
import torch
from infinity.core.engine_lock import is_inside

def look(who):
    while not over.is_set():
        circle = [torch.ones(2)]  # whoever collects it gives up the GIL
        circle.append(circle)
        is_inside(who)

gc.set_threshold(1)
over = threading.Event()
looks = threading.Thread(target=look, args=[threading.get_ident()])
looks.start()
for _ in range(1000):
    other = threading.Thread(target=int)
    other.start()
    other.join()
over.set()
looks.join()
"""


def test_a_look_at_another_threads_stack_holds_up_no_thread_that_starts() -> None:
    done = python("-c", _LOOKS, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_guest_that_was_ended_is_none_when_it_comes_back(tmp_path: Path) -> None:
    """torch calls no hook after a SystemExit; the thread of a pool lives on."""
    torch.manual_seed(0)
    model = Branches("block")
    inner = model.blocks[0][0]
    model = wrap_adamw(model, config_for(tmp_path, **NVME))[0]
    turn = engine_of(model).deferral.lock
    x = torch.randn(4, 8)
    inside, stop = threading.Event(), threading.Event()

    def leave(*_: Any) -> None:
        raise SystemExit

    def wait(*_: Any) -> None:
        inside.set()
        stop.wait(20)

    def visit(*_: Any) -> None:
        assert isinstance(pool.submit(model.blocks[0], x).exception(20), SystemExit)

    with ThreadPoolExecutor(1) as pool:
        gone = inner.register_forward_hook(leave)
        within = model.register_forward_pre_hook(visit)
        with torch.no_grad(), contextlib.suppress(SystemExit):
            model(x)
        gone.remove()
        within.remove()
        waits = model.head.register_forward_hook(wait)
        training = threading.Thread(target=lambda: model(x), daemon=True)
        training.start()
        assert inside.wait(20)
        # That thread again, from outside of any forward: it waits, as any other does.
        evaluated = pool.submit(lambda: infinity.gradient(model.head.weight))
        with pytest.raises(TimeoutError):
            evaluated.result(0.3)
        stop.set()
        waits.remove()
        assert evaluated.result(20) is None
        training.join(20)
    assert turn.holder == 0
    infinity.close(model)


def two_models(folder: Path) -> list[Any]:
    models = []
    for name in "ab":
        (folder / name).mkdir()
        model = Branches("block")
        models.append(wrap_adamw(model, config_for(folder / name, **NVME))[0])
    return models


def test_two_threads_gather_two_models_in_either_order(tmp_path: Path) -> None:
    models = two_models(tmp_path)
    weights = [model.head.weight for model in models]
    errors: list[BaseException] = []

    def gather(params: list[nn.Parameter]) -> None:
        try:
            for _ in range(100):
                with infinity.gathered(params):
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=gather, args=(p,), daemon=True) for p in (weights, weights[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    for model in models:
        infinity.close(model)
