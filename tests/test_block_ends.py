"""The end of a `gathered` block that an error meets: the block is over all the same, and no edit is lost."""

from __future__ import annotations

import contextlib
import functools
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.params.uses import UseKind

from .command_line import python
from .interrupts import Interrupt, Tracer
from .offloaded import ON_HOST, config_for, wrap_adamw
from .shortage import Shortage

PLACES: dict[str, dict[str, Any]] = {
    "device": {"parameters": "device", "optimizer_state": "host", "gradients": "host"},
    "nvme": {},
    "delayed": {**ON_HOST, "update": "delayed", "delay_warmup_steps": 0},
}


class Loop:
    """A model in training, with and without the engine's troubles: steps, and edits before them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        folder.mkdir()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.model, self.adam = wrap_adamw(net, config_for(folder, **settings), lr=1e-2)
        self.engine = engine_of(self.model)

    def block(self, number: int, write: bool) -> Iterator[None]:
        """Edit, in the ways that there are, in a block that ends when this goes on."""
        with infinity.gathered(self.model, write=write):
            with torch.no_grad():
                if write:
                    self.model[0].weight.data = torch.full((8, 8), number / 100).t()
                    self.model[0].bias.add_(0.25)
                    self.model[1].weight.data.mul_(0.5)
                    self.model[1].bias.numpy()[:] = number
            yield

    def loss(self, number: int) -> torch.Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        return self.model(x).square().mean()  # type: ignore[no-any-return]

    def backward(self, number: int) -> None:
        self.loss(number).backward()

    def step(self) -> None:
        self.adam.step()
        self.adam.zero_grad()

    def values(self) -> list[torch.Tensor]:
        with infinity.gathered(self.model):
            return [p.detach().clone() for p in self.model.parameters()]

    def is_clean(self) -> bool:
        return not any(u.keepers or u.writers for u in self.engine.units)


@contextlib.contextmanager
def pair(folder: Path, place: str) -> Iterator[tuple[Loop, Loop]]:
    loops = [Loop(folder / name, PLACES[place]) for name in ("one", "other")]
    yield loops[0], loops[1]
    for loop in loops:
        infinity.close(loop.adam)


def compare(one: Loop, other: Loop, number: int, write: bool, end: Callable[[Iterator[None]], None]) -> bool:
    """Make a round in both, with `end` in `one` as the end of the block, which may fail; return whether the
    block was left and had not ended then."""
    for loop in (one, other):
        loop.backward(number)
        block = loop.block(number, write)
        next(block)
        if loop is one:
            end(block)
            del block
            broken = loop.engine.residency.uses.has(UseKind.BLOCK)
            assert torch.is_grad_enabled()
        else:
            next(block, None)
        loop.step()
    assert one.is_clean()
    assert all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True)), number
    return broken


def depth() -> int:
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1  # type: ignore[assignment]
    return count


def deep(down: int, call: Callable[[], object]) -> None:
    if down:
        deep(down - 1, call)
    else:
        call()


def near_the_limit(left: int, call: Callable[[], object]) -> None:
    """Make a call where so many more are possible within it, which may be too few."""
    with contextlib.suppress(RecursionError):
        deep(sys.getrecursionlimit() - depth() - left, call)


def on_thread(call: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(100)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


@pytest.mark.first
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_block_whose_end_meets_the_recursion_limit(
    where: str, place: str, write: bool, tmp_path: Path
) -> None:
    broken = []

    def end(block: Iterator[None]) -> None:
        near_the_limit(left, lambda: next(block, None))

    with pair(tmp_path, place) as (one, other):

        def rounds() -> None:
            nonlocal left
            for left in range(2, 50, 2) if where == "main" else range(2, 230, 4):
                broken.append(compare(one, other, left, write, end))

        left = 0
        (on_thread if where == "thread" else lambda call: call())(rounds)
    assert any(broken)
    assert not all(broken)


@pytest.mark.first
@pytest.mark.filterwarnings("ignore:module forward hook")  # torch's, of one that met the limit, too
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_loop_that_meets_the_recursion_limit_goes_on(where: str, tmp_path: Path) -> None:
    made = set()

    def rounds() -> None:
        for left in range(2, 50, 2) if where == "main" else range(2, 230, 2):
            near_the_limit(left, one.loss(-1).backward)
            near_the_limit(left, lambda: one.backward(-1))
            near_the_limit(left, one.values)
            one.adam.zero_grad()
            one.backward(left)
            steps = one.adam.steps
            near_the_limit(left, one.adam.step)
            made.add(one.adam.steps > steps)
            if one.adam.steps == steps:
                one.adam.step()
            one.adam.zero_grad()
            other.backward(left)
            other.step()
            assert one.is_clean()
            assert all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True)), left

    with pair(tmp_path, "nvme") as (one, other):
        (on_thread if where == "thread" else lambda call: call())(rounds)
    assert made == {False, True}


@pytest.mark.first
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("error", [Interrupt, MemoryError])
def test_a_block_whose_end_an_error_ends_at_any_point(
    error: type[BaseException], write: bool, tmp_path: Path
) -> None:
    broken = []
    with pair(tmp_path, "nvme") as (one, other):
        for at in range(0, 2000, 4):
            tracer = Tracer(at, error=error)
            broken.append(compare(one, other, at, write, functools.partial(traced, tracer)))
            if not tracer.fired:
                break
    assert not tracer.fired
    assert any(broken)


@pytest.mark.filterwarnings("ignore:.*stay on the device")  # the error has frames that refer to them
def test_edits_whose_adoption_finds_no_memory_are_kept_by_the_next_call(tmp_path: Path) -> None:
    """Wherever that is: between the edits and their tiers, after a transfer has taken its lease, at its end.
    On a thread that the calls are made on, so that it is the one that is traced."""

    def end(block: Iterator[None]) -> None:
        with shortage.here():
            next(block, None)

    def rounds() -> None:
        nonlocal shortage
        for at in range(0, 2000, 3):
            shortage = Shortage(at, "optim", "storage")
            compare(one, other, at % 100, True, end)
            one.engine.updater.drop_ahead()
            infinity.flush(one.adam)
            one.engine.store._order.sweep(reads=True)
            assert not any(q.in_use or q.quarantined for q in one.engine.pool.stats().values()), (
                shortage.fired
            )
            assert not one.engine.store.unfinished, shortage.fired
            if not shortage.fired:
                break

    shortage = Shortage(0)
    with pair(tmp_path, "nvme") as (one, other):
        on_thread(rounds)
    assert not shortage.fired


def traced(tracer: Tracer, block: Iterator[None]) -> None:
    tracer.start()
    with contextlib.suppress(Interrupt, MemoryError):
        next(block, None)
    tracer.stop()


PROGRAM = """
    import os, sys, torch, infinity
    from torch import nn

    held = []

    def block(place, write):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
        folder = os.path.join(sys.argv[1], f"{place}-{write}")
        os.mkdir(folder)
        config = infinity.Config(nvme=folder, device="cpu", dtype="fp32", device_memory="8MiB",
            host_memory="64MiB", parameters=place, optimizer_state="host", gradients="host")
        model, adam = infinity.wrap(net, adam, config)
        with infinity.gathered(model, write=write):
            if write:
                model[0].weight.data.fill_(0.5)
                model[1].weight.data = torch.ones(8, 8)
            yield model[0].weight * 2

    for place in ("nvme", "device"):
        for write in (False, True):
            held.append(block(place, write))
            next(held[-1])
"""


def test_a_program_that_ends_with_blocks_open_prints_nothing(tmp_path: Path) -> None:
    done = python("-c", textwrap.dedent(PROGRAM), str(tmp_path), timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
