"""An update that finds no memory stops where nothing is changed, says so, and goes on: nothing is lost."""

from __future__ import annotations

import functools
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.core.errors import OutOfMemoryError
from infinity.hardware import cpu_adam
from infinity.optim import chunk_io, update
from infinity.storage import pinned

from .command_line import python
from .offloaded import config_for
from .small_net import build, same, tokens

#: What needs memory before a chunk is changed, in the order of an update.
POINTS: dict[str, tuple[Any, str]] = {
    "open": (update, "try_open_chunk"),
    "wait for a lease": (update, "open_chunk"),
    "lease": (pinned, "Lease"),
    "io": (chunk_io, "ChunkIO"),
    "read": (chunk_io.ChunkIO, "read"),
    "wait": (chunk_io.ChunkIO, "wait"),
    "compute": (update, "_compute"),
    "gradient": (chunk_io.ChunkIO, "grad"),
    "kernel": (cpu_adam, "update_segments"),
}


def torchs() -> RuntimeError:
    """What torch raises where the host has no memory."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


class Shortage:
    """The update's thread has no memory once, at the second call of a function: before the function is
    called, or `after` it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        point: str,
        *,
        after: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.at, self.left = 2, 1
        where, name = POINTS[point]
        inner = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            raises = self._is_now()
            if raises and not after:
                raise error or MemoryError
            result = inner(*args, **kwargs)
            if raises:
                raise error or MemoryError
            return result

        monkeypatch.setattr(where, name, call)

    def _is_now(self) -> bool:
        if threading.current_thread().name != "infinity-update":
            return False
        self.at -= 1
        if self.at > 0 or not self.left:
            return False
        self.left -= 1
        return True


class Done(NamedTuple):
    losses: list[float]
    values: dict[str, torch.Tensor]
    state: dict[str, Any]
    steps: int
    told: list[OutOfMemoryError]


class Again:
    """Makes a call again where it finds no memory, as its error says."""

    def __init__(self) -> None:
        self.told: list[OutOfMemoryError] = []

    def __call__(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except OutOfMemoryError as error:
                assert len(self.told) < 50
                self.told.append(error)


#: With clipping it is refused.
IN_BACKWARD = {"update": "backward", "accumulation": 1, "max_grad_norm": None}


def wrapped(folder: Path, place: str, mode: str, **settings: Any) -> tuple[Any, Any, Engine]:
    folder.mkdir(exist_ok=True)
    places = {"parameters": place, "optimizer_state": place, "gradients": place}
    settings = {"delay_warmup_steps": 1, "max_grad_norm": 0.5, **settings}
    settings |= IN_BACKWARD if mode == "backward" else {"update": mode}
    config = config_for(folder, **places, **settings)
    model, optimizer = infinity.wrap(*build(), config)
    return model, optimizer, engine_of(model)


def train(
    folder: Path,
    place: str,
    mode: str,
    shortage: Callable[[int], Any] = lambda number: None,
    **settings: Any,
) -> Done:
    """Train; `shortage` is called before each step."""
    model, optimizer, engine = wrapped(folder, place, mode, **settings)
    again, losses = Again(), []
    try:
        for number in range(len(POINTS) + 2):
            loss = again(lambda number=number: model(tokens(number)))
            losses.append(loss.item())
            if mode == "backward":  # its update is under way when that returns
                shortage(number)
            loss.backward()
            if mode != "backward":
                shortage(number)
            again(optimizer.step)
            optimizer.zero_grad()
        state = again(optimizer.state_dict)
        values = {name: value.clone() for name, value in again(model.state_dict).items()}
        assert place != "nvme" or engine.pool.stats()["update"].in_use == 0
        return Done(losses, values, state, optimizer.steps, again.told)
    finally:
        infinity.close(optimizer)


def assert_same(found: Done, wanted: Done) -> None:
    assert found.losses == wanted.losses
    assert same(found.values, wanted.values)
    assert found.steps == wanted.steps
    a, b = found.state["state"], wanted.state["state"]
    assert a.keys() == b.keys()
    for index in b:
        assert same(a[index], b[index]), index


@functools.cache
def undisturbed(place: str, mode: str) -> Done:
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), place, mode)


@pytest.mark.first
@pytest.mark.parametrize(
    ("place", "mode"),
    [("nvme", "overlap"), ("host", "sync"), ("device", "delayed"), ("nvme", "backward")],
)
def test_an_update_that_finds_no_memory_goes_on_where_it_stopped(
    place: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each point of an update, in one step after the other. Each time the next call says so, and the one
    after that has it go on; a backward, which cannot be made again, says nothing."""
    points, made = [*POINTS], []

    def shortage(number: int) -> None:
        if 0 < number <= len(points):
            point = points[number - 1]
            error = torchs() if point == "gradient" else None
            made.append((point, Shortage(monkeypatch, point, error=error)))

    found = train(tmp_path, place, mode, shortage, read_ahead_memory=0)
    monkeypatch.undo()
    # What works on chunks where they lie asks for no lease; nor is there ever none that is free.
    never = {"wait for a lease"} if place == "nvme" else {"wait for a lease", "lease"}
    assert {point for point, each in made if each.left} == never
    most = len(POINTS) - len(never)
    assert len(found.told) == most or (mode == "delayed" and 0 < len(found.told) < most)
    for each in found.told:
        assert isinstance(each, MemoryError)
        assert "the update of unit '" in each.what
        assert "nothing is lost" in each.what
    assert_same(found, undisturbed(place, mode))


@pytest.mark.first
@pytest.mark.parametrize(("place", "mode"), [("nvme", "delayed"), ("host", "overlap"), ("device", "sync")])
def test_a_chunk_that_was_changed_ends_the_run_with_a_checkpoint_to_load(
    place: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, engine = wrapped(tmp_path, place, mode, delay_warmup_steps=0)
    model(tokens()).backward()
    Shortage(monkeypatch, "compute", after=True)
    for _ in range(3):
        with pytest.raises(OutOfMemoryError, match=r"the update of unit '.*changed a part") as raised:
            _step(optimizer)
        assert "load the last checkpoint" in str(raised.value)
    with pytest.raises(OutOfMemoryError, match="changed a part"):
        model(tokens())
    assert engine.updates.units
    infinity.close(optimizer)


def _step(optimizer: Any) -> None:
    """Make a step, and wait for it."""
    optimizer.step()
    optimizer.flush()


@contextmanager
def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> Iterator[tuple[Any, Any]]:
    """A model whose first update has stopped, and somebody was told."""
    model, optimizer, _ = wrapped(folder, "nvme", mode)
    optimizer.scale(model(tokens())).backward()
    Shortage(monkeypatch, "read")
    with pytest.raises(OutOfMemoryError):
        _step(optimizer)
    try:
        yield model, optimizer
    finally:
        infinity.close(optimizer)


USES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "forward": lambda model, optimizer, folder: model(tokens()),
    "save": lambda model, optimizer, folder: infinity.save(optimizer, folder / "saved"),
    "state_dict": lambda model, optimizer, folder: model.state_dict(),
    "clip": lambda model, optimizer, folder: optimizer.clip_grad_norm_(1.0),
    "zero_grad": lambda model, optimizer, folder: optimizer.zero_grad(),
}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The values after one step."""
    model, optimizer, _ = wrapped(tmp_path_factory.mktemp("one"), "nvme", "sync")
    model(tokens()).backward()
    optimizer.step()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    infinity.close(optimizer)
    return values


@pytest.mark.first
@pytest.mark.parametrize(("use", "mode"), [*((use, "sync") for use in USES), ("unwrap", "delayed")])
def test_any_call_has_it_go_on(
    use: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_step: dict[str, torch.Tensor]
) -> None:
    with stopped(tmp_path / "a", monkeypatch, mode) as (model, optimizer):
        if use == "unwrap":
            infinity.unwrap(model)
        else:
            USES[use](model, optimizer, tmp_path)
            assert optimizer.steps == 1
        assert same(model.state_dict(), one_step)


def test_a_new_gradient_makes_a_new_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the step that raised is not called again, for it was made."""
    with stopped(tmp_path, monkeypatch, "sync") as (model, optimizer):
        optimizer.zero_grad()
        model(tokens(1)).backward()
        optimizer.step()
        assert optimizer.steps == optimizer.state_dict()["state"][0]["step"] == 2


#: trains twice, the second time without memory for 48 KiB while an update is under way
STARVED = """
import json, resource, sys, torch, infinity
from pathlib import Path
from tests.small_net import tokens
from tests.test_update_memory import wrapped

def fill():
    eaten = []
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096, resource.RLIM_INFINITY))
    try:
        while True:
            eaten.append(torch.empty(12288))
    except RuntimeError as error:
        assert "DefaultCPUAllocator" in str(error)
    return eaten

for starved in (False, True):
    model, optimizer, engine = wrapped(Path(sys.argv[1]), "host", "delayed", delay_warmup_steps=0)
    told, losses, eaten = [], [], []
    for number in range(4):
        loss = model(tokens(number))
        losses.append(loss.item())
        loss.backward()
        if starved and number == 1:
            engine.updater.wait()
            eaten = fill()
        optimizer.step()
        try:
            if eaten:
                engine.updates.wait_all()
        except MemoryError as error:
            eaten.clear()
            told.append(str(error))
        eaten.clear()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        optimizer.zero_grad()
    optimizer.flush()
    values = [v.double().sum().item().hex() for v in model.state_dict().values()]
    print(json.dumps([told, losses, values]))
    infinity.close(optimizer)
"""


@pytest.mark.processes
def test_a_process_without_memory_goes_on_when_there_is_some(tmp_path: Path) -> None:
    """The fault itself: an address space that is full."""
    done = python("-c", STARVED, str(tmp_path), env={"MALLOC_ARENA_MAX": "1"}, timeout=60)
    assert done.returncode == 0, done.stderr
    wanted, found = (json.loads(line) for line in done.stdout.splitlines())
    assert wanted[0] == []
    assert len(found[0]) == 1
    assert "DefaultCPUAllocator" in found[0][0]
    assert found[1:] == wanted[1:]
