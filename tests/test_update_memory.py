"""An update that finds no memory ends the run: each later call says so, and `close` gives everything back."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

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
from .small_net import build, tokens

#: What needs memory before a chunk is changed, in the order of an update.
POINTS: dict[str, tuple[Any, str]] = {
    "open": (update, "open_chunk"),
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
    """The update's thread has no memory, `times` times, from the `at`th call of a function on; before the
    function is called, or `after` it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        point: str,
        *,
        at: int = 2,
        times: int = 1,
        after: bool = False,
        error: BaseException | None = None,
    ) -> None:
        self.at, self.left = at, times
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


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("nvme", "overlap"),
        *(
            pytest.param(*row, marks=pytest.mark.integration)
            for row in [("host", "sync"), ("device", "delayed"), ("nvme", "backward")]
        ),
    ],
)
def test_an_update_that_finds_no_memory_ends_the_run(
    place: str, mode: str, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an update, at each of its points; nothing hangs, and every lease comes home."""
    if point in ("lease", "read", "wait") and place != "nvme":
        pytest.skip("this update takes no lease there")
    settings = {"delay_warmup_steps": 0, "read_ahead_memory": 0}
    model, optimizer, engine = wrapped(tmp_path, place, mode, **settings)
    infinity.save(optimizer, tmp_path / "saved")
    loss = model(tokens())
    shortage = Shortage(monkeypatch, point, error=torchs() if point == "gradient" else None)
    calls = (loss.backward, optimizer.step, optimizer.flush, lambda: model(tokens()), optimizer.state_dict)
    told = []
    for call in calls:
        try:
            call()
        except OutOfMemoryError as error:
            told.append(error)
    assert not shortage.left
    assert len(told) >= 3
    for error in told:
        assert "the update of unit '" in error.what
        assert "load the last checkpoint" in str(error)
    monkeypatch.undo()
    assert engine.updates.units
    infinity.close(optimizer)
    other, again, _ = wrapped(tmp_path, place, mode)
    infinity.load(again, tmp_path / "saved")
    other(tokens()).backward()
    again.step()
    infinity.close(again)


#: trains, without memory for 48 KiB while an update is under way
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

model, optimizer, engine = wrapped(Path(sys.argv[1]), "host", "delayed", delay_warmup_steps=0)
told = []
for number in range(3):
    eaten = []
    try:
        model(tokens(number)).backward()
        if number == 1:
            engine.updater.wait()
            eaten = fill()
        optimizer.step()
        if eaten:
            engine.updates.wait_all()
    except MemoryError as error:
        eaten.clear()
        told.append(str(error))
    eaten.clear()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print(json.dumps(told))
infinity.close(optimizer)
"""


@pytest.mark.integration
@pytest.mark.processes
def test_a_process_without_memory_is_told(tmp_path: Path) -> None:
    """The fault itself: an address space that is full."""
    done = python("-c", STARVED, str(tmp_path), env={"MALLOC_ARENA_MAX": "1"}, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told) == 2
    assert all("DefaultCPUAllocator" in each for each in told)
