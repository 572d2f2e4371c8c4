"""The end of an engine: by `close`, by the garbage collector in any thread, by the end of the program."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity.api import closing
from infinity.api.engine import engine_of
from infinity.hardware import streams
from infinity.hardware.device import CudaDevice

from . import inner
from .command_line import python
from .quick import quick
from .small_net import build, tokens, train

TIMEOUT = 60.0


def config_of(directory: Path, **settings: Any) -> infinity.Config:
    defaults = {
        "device": "cpu",
        "dtype": "fp32",
        "device_memory": "8MiB",
        "host_memory": "16MiB",
        "chunk_elements": 65536,
        "optimizer_state": "nvme",
    }
    return inner.config(nvme=directory, **{**defaults, **settings})


# -- close ----------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["overlap", "delayed"])
def test_close_waits_for_an_update_as_long_as_its_drive_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """The drive takes more than a minute by the clock of the streams, which runs a hundred times as fast."""
    clock = SimpleNamespace(monotonic=lambda: 100 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(streams, "time", clock)
    reference, torch_optimizer = build()
    train(reference, torch_optimizer, 1)
    config = config_of(tmp_path, update=update, delay_warmup_steps=0)
    model, optimizer = infinity.wrap(*build(), config)
    engine = engine_of(model)
    ring = engine.store._rings[0]
    model(tokens(0)).backward()
    engine.updater.drop_ahead()
    ring.hold()
    optimizer.step()
    assert engine.updates.busy()
    slow = threading.Timer(0.8, ring.hold, [False])
    slow.start()
    infinity.close(model)
    slow.join()
    assert not engine.updates.busy(), "chunks without their update"
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


# -- dropped without close --------------------------------------------------------------------

_DROPPED = """
import faulthandler, gc, os, sys, threading, time, warnings
from pathlib import Path
import infinity
from infinity.api.engine import engine_of
from tests.small_net import build, tokens, train
from tests.test_closing import config_of
faulthandler.dump_traceback_later(100, exit=True)
warnings.filterwarnings("ignore", "activations=")  # nothing is recomputed here
folder = Path(sys.argv[1])

def threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("infinity"))

def files():
    held = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{n}")]
    return [h for h in held if str(folder) in h]

def drop(where):
    model, optimizer = infinity.wrap(*build(), config_of(folder, activations="host"))
    train(model, optimizer, 1)
    engine = engine_of(model)
    streams = {"update": engine.updater._stream, "gradient": engine.gradients.chunks._stream,
               "h2d": engine.device._h2d, "d2h": engine.device._d2h}
    held, go, over = [model, optimizer], threading.Event(), threading.Event()
    def last():
        go.wait(30)
        held.clear()
        gc.collect()  # the finalizer of the engine runs in here
        over.set()
    if where == "load":
        calls = [last]
        engine.loader._worker._start_copies = lambda: calls.pop()() if calls else None
    else:
        streams[where].submit(last)
    return go, over

gc.disable()
for where in sys.argv[2:]:
    assert threads() == [] and files() == [], (where, files())
    go, over = drop(where)
    assert threads() and files()
    go.set()
    assert over.wait(30), "the finalizer waits"
    until = time.monotonic() + 30
    while (threads() or files()) and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() == [], threads()
    assert files() == [], files()
    infinity.close(infinity.wrap(*build(), config_of(folder))[0])
    print(where)
"""


def test_a_model_whose_last_reference_goes_in_one_of_its_own_threads(tmp_path: Path) -> None:
    places = ["update", "gradient", "h2d", "d2h", "load"]
    done = python("-c", _DROPPED, str(tmp_path), *places, timeout=TIMEOUT)
    assert done.stdout.split() == places, done.stderr
    assert not done.stderr


def test_a_finalizer_only_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that drops a model does not wait for drives; the next `wrap` does, and says nothing."""
    gc.collect()
    model, optimizer = infinity.wrap(*build(), config_of(tmp_path))
    model(tokens(0)).backward()
    engine = engine_of(model)
    ring, gone = engine.store._rings[0], weakref.ref(engine)
    engine.updater.drop_ahead()
    ring.hold()
    optimizer.step()
    assert engine.updates.busy()
    reaper = engine._reaper._thread
    del model, optimizer, engine
    gc.collect()
    assert gone() is None
    assert reaper.is_alive()
    threading.Timer(0.3, ring.hold, [False]).start()
    other, _ = infinity.wrap(*build(), config_of(tmp_path))
    assert not reaper.is_alive()
    infinity.close(other)
    assert not [r for r in closing._reapers if not r._thread.is_alive()]


@pytest.mark.parametrize("ends", quick(["model = None", "sys.exit(0)", "raise KeyError"], ["raise KeyError"]))
def test_the_end_of_the_program_closes_what_is_open(tmp_path: Path, ends: str) -> None:
    script = f"""
import faulthandler, sys
from pathlib import Path
import infinity
from tests.small_net import build, train
from tests.test_closing import config_of
faulthandler.dump_traceback_later(50, exit=True)
model, optimizer = infinity.wrap(*build(), config_of(Path(sys.argv[1])))
train(model, optimizer, 1)
{ends}
"""
    done = python("-c", script, str(tmp_path), timeout=TIMEOUT)
    assert "Exception ignored" not in done.stderr
    assert done.returncode == ("raise" in ends), done.stderr
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("ends", "update"),
    quick(
        [(e, u) for e in ("", "sys.exit(0)", "raise KeyboardInterrupt") for u in ("overlap", "delayed")],
        [("raise KeyboardInterrupt", "overlap")],
    ),
)
def test_handlers_at_exit_find_the_engine_open(tmp_path: Path, ends: str, update: str) -> None:
    """Whenever they were registered: before infinity was imported, after that, and after `wrap`."""
    script = f"""
import atexit, faulthandler, sys, weakref
from pathlib import Path
faulthandler.dump_traceback_later(50, exit=True)
folder = Path(sys.argv[1])

class Owner: pass
owner = Owner()

def save(when):
    train(model, optimizer, 1)
    model.state_dict()
    infinity.save(optimizer, folder / when)

atexit.register(save, "before-import")
import infinity
from tests.small_net import build, train
from tests.test_closing import config_of
atexit.register(save, "after-import")
weakref.finalize(owner, save, "finalizer")
(folder / "nvme").mkdir()
model, optimizer = infinity.wrap(*build(), config_of(folder / "nvme", update="{update}"))
train(model, optimizer, 1)
atexit.register(save, "after-wrap")
{ends}
"""
    done = python("-c", script, str(tmp_path), timeout=TIMEOUT)
    assert "Exception ignored" not in done.stderr, done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == ("raise" in ends), done.stderr
    for when in ("before-import", "after-import", "finalizer", "after-wrap"):
        assert list((tmp_path / when).glob("step-*/*.json")), (when, done.stderr)
    assert not [p for p in (tmp_path / "nvme").rglob("*") if p.is_file()]


# -- pinned memory ------------------------------------------------------------------------------


def test_a_cuda_device_finishes_its_copies_when_it_is_closed() -> None:
    waited: list[str] = []
    device = object.__new__(CudaDevice)
    for name in ("_h2d", "_d2h", "_aside"):
        stream = SimpleNamespace(synchronize=lambda name=name: waited.append(name))
        setattr(device, name, stream)
    device.close()
    assert sorted(waited) == ["_aside", "_d2h", "_h2d"]


_RELEASED = """
import gc, sys
import torch
from torch import nn
import infinity
gc.disable()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def run(closes):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    adam = torch.optim.AdamW(model.parameters())
    tiers = dict.fromkeys(("parameters", "optimizer_state", "gradients"), sys.argv[2])
    given = {"device_memory": "256MiB", "host_memory": "1GiB", "nvme": sys.argv[1]}
    model, adam = infinity.wrap(model, adam, infinity.Config(device="cpu", **given, **tiers))
    model(torch.ones(2, 1024)).square().mean().backward()
    adam.step()
    if closes:
        infinity.close(model)

for closes in (True, False):
    run(closes)
    run(closes)  # beside what is left of the one before
    before = resident()
    for _ in range(4):  # a model and its state are 96 MiB
        run(closes)
    assert resident() - before < 32 << 20, (closes, resident() - before)
"""


@pytest.mark.first
@pytest.mark.processes
@pytest.mark.parametrize("tier", ["host", "nvme", "device"])
def test_memory_and_directories_of_models_that_are_gone_are_free_for_the_next(
    tier: str, tmp_path: Path
) -> None:
    """Though no collector of cycles runs by itself; closed, or lost with an error, say."""
    done = python("-c", _RELEASED, str(tmp_path), tier, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
