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
from infinity.api.engine import engine_of
from infinity.hardware import streams

from . import inner
from .command_line import python
from .small_net import build, tokens, train

TIMEOUT = 120.0


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


def test_an_optimizer_keeps_its_engine(config: infinity.Config) -> None:
    """A trainer may hold the model in a wrapper of its own, or not any more."""
    model, optimizer = infinity.wrap(*build(), config)
    train(model, optimizer, 1)
    del model
    gc.collect()
    assert infinity.metrics(optimizer)
    assert optimizer.state_dict()["state"]
    infinity.close(optimizer)


def test_close_waits_for_an_update_as_long_as_its_drive_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive takes more than a minute by the clock of the streams, which runs a hundred times as fast."""
    clock = SimpleNamespace(monotonic=lambda: 100 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(streams, "time", clock)
    reference, torch_optimizer = build()
    train(reference, torch_optimizer, 1)
    config = config_of(tmp_path, update="delayed", delay_warmup_steps=0)
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


@pytest.mark.parametrize("inside", ["nothing", "forward", "backward"])
def test_a_forgotten_model_gives_back_its_threads_and_its_arena(
    inside: str, config: infinity.Config, tmp_path: Path
) -> None:
    """Whatever an interrupt or an error has ended in the middle."""

    def raises(*_: Any) -> None:
        raise KeyboardInterrupt

    def use() -> weakref.ref[Any]:
        model, optimizer = infinity.wrap(*build(), config)
        train(model, optimizer, 1)
        block = model.blocks[1]
        if inside == "forward":
            block.up.register_forward_hook(raises)
        elif inside == "backward":
            block.up.register_forward_hook(lambda module, args, output: output.register_hook(raises) and None)
        if inside != "nothing":
            with pytest.raises(KeyboardInterrupt):
                model(tokens()).backward()
        return weakref.ref(engine_of(model))

    before = threading.active_count()
    engine = use()
    gc.collect()
    assert engine() is None
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
    infinity.close(infinity.wrap(*build(), config)[1])  # the directory is free again


#: Argument: a folder.
_DROPPED = """
import gc, os, sys, threading, time, warnings
from pathlib import Path
import torch
from torch import nn
import infinity
from infinity.api.engine import engine_of
from tests.small_net import build, tokens, train
from tests.test_closing import config_of
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
        engine.loader._worker._is_needed = lambda: calls.pop()() if calls else True
    else:
        streams[where].submit(last)
    return go, over

gc.disable()
for where in ("update", "gradient", "h2d", "d2h", "load"):
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

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def run(tier, closes):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    tiers = dict.fromkeys(("parameters", "optimizer_state", "gradients"), tier)
    given = {"device_memory": "256MiB", "host_memory": "1GiB", "nvme": folder}
    config = infinity.Config(device="cpu", **given, **tiers)
    model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    model(torch.ones(2, 1024)).square().mean().backward()
    adam.step()
    if closes:
        infinity.close(model)

for tier in ("host", "nvme", "device"):
    for closes in (True, False):
        run(tier, closes)
        run(tier, closes)  # beside what is left of the one before
        before = resident()
        for _ in range(2):  # a model and its state are 96 MiB
            run(tier, closes)
        assert resident() - before < 32 << 20, (tier, closes, resident() - before)
print("over")
"""


@pytest.mark.integration
@pytest.mark.processes
def test_what_a_dropped_model_had_is_free_for_the_next(tmp_path: Path) -> None:
    """Threads, files, host memory and the directory: also where its last reference goes in one of its own
    threads, and though no collector of cycles runs by itself; closed, or lost with an error, say."""
    done = python("-c", _DROPPED, str(tmp_path), timeout=TIMEOUT)
    assert (done.returncode, done.stdout.split()) == (0, ["over"]), done.stderr
    assert not done.stderr


# -- the end of the program ---------------------------------------------------------------------

#: Arguments: a folder, how it ends.
_ENDS = """
import atexit, faulthandler, sys, time
from pathlib import Path
faulthandler.dump_traceback_later(100, exit=True)
folder, how = Path(sys.argv[1]), sys.argv[2]

def save(when):
    train(model, optimizer, 1)
    model.state_dict()
    infinity.save(optimizer, folder / when)

import infinity
from infinity.optim import update
from tests.small_net import build, tokens, train
from tests.test_closing import config_of
if how == "interrupted":
    atexit.register(save, "after-import")
(folder / "nvme").mkdir()
mode = "delayed" if how == "interrupted" else "overlap"
model, optimizer = infinity.wrap(*build(), config_of(folder / "nvme", update=mode, delay_warmup_steps=0))
train(model, optimizer, 1)

def block():
    with infinity.gathered(model, write=True):
        model.embed.weight.data.fill_(0.5)
        yield

inner = update._compute

def slowly(*args, **mode):
    time.sleep(0.05)
    inner(*args, **mode)

update._compute = slowly
model(tokens()).backward()
optimizer.step()
if how == "interrupted":
    atexit.register(save, "after-wrap")
    raise KeyboardInterrupt
opened = block()
next(opened)
"""


@pytest.mark.integration
@pytest.mark.processes
def test_handlers_at_exit_find_the_engine_open(tmp_path: Path) -> None:
    """Whether they were registered before `wrap` or after it; with an update under way."""
    done = python("-c", _ENDS, str(tmp_path), "interrupted", timeout=TIMEOUT, cold=True)
    assert "Exception ignored" not in done.stderr, done.stderr
    assert "KeyboardInterrupt" in done.stderr
    for when in ("after-import", "after-wrap"):
        assert list((tmp_path / when).glob("step-*/*.json")), (when, done.stderr)
    assert not [p for p in (tmp_path / "nvme").rglob("*") if p.is_file()]


@pytest.mark.integration
@pytest.mark.processes
def test_a_program_that_ends_in_the_middle_prints_nothing(tmp_path: Path) -> None:
    """With a `gathered` block open."""
    done = python("-c", _ENDS, str(tmp_path), "", timeout=TIMEOUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not [p for p in (tmp_path / "nvme").rglob("*") if p.is_file()]
