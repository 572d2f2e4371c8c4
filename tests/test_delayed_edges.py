"""Delayed updates where a user does something out of the ordinary."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ParameterChangedError, ParameterError, StorageError
from infinity.hardware.streams import Task
from infinity.optim import update as update_module
from infinity.optim.chunk_io import ChunkIO

from .command_line import python
from .models import case
from .offloaded import ON_HOST, ON_NVME, config_for, wrap_adamw
from .small_models import CutModel, tokens, wrapped
from .test_delayed import glance, masters_of
from .test_overlap import Stack

PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": ON_NVME,
    "host": ON_HOST,
    "resident": {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"},
}
placements = pytest.mark.parametrize(
    "placement", ["nvme", "resident", pytest.param("host", marks=pytest.mark.nightly)]
)


class Chain(nn.Module):
    """Recomputed layers and nothing behind them. `x` (batch, width) requires grad."""

    def __init__(self, layers: int = 4, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x.tanh(), use_reentrant=True)
        return x


def started(folder: Path, placement: str, steps: int = 3, **settings: Any) -> tuple[Any, Any, Any]:
    """A small model after `steps` steps, of which all but the first were delayed."""
    this = case("gpt", layers=2, width=32)
    mode = {"update": "delayed", "delay_warmup_steps": 1}
    folder.mkdir(exist_ok=True)
    config = config_for(folder, **{**PLACEMENTS[placement], **mode, **settings})
    model, adam = infinity.wrap(this.model, torch.optim.AdamW(this.model.parameters(), lr=1e-2), config)
    for t in range(steps):
        step(this, adam, t)
    return this, model, adam


def step(this: Any, adam: Any, t: int) -> float:
    loss = this.loss(this.model, this.batches[t])
    loss.backward()
    adam.step()
    adam.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


@contextmanager
def closing(adam: Any) -> Iterator[None]:
    try:
        yield
    finally:
        infinity.close(adam)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [v.clone() for v in model.state_dict().values()]


def gathered_values(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for p in model.parameters():
        with infinity.gathered(p):
            found.append(p.detach().clone())
    return found


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        loss: torch.Tensor = model(tokens(7))
    model.train()
    return loss


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@placements
def test_after_an_interrupted_wait_the_update_is_still_waited_for(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, adam = started(tmp_path / "a", placement)
    with closing(adam):
        wanted = values(model)
    this, model, adam = started(tmp_path / "b", placement, steps=2)
    with closing(adam):
        this.loss(model, this.batches[2]).backward()
        monkeypatch.setenv("INFINITY_DELAY_SEED", "1")
        adam.step()
        task = engine_of(model).updater._task
        inner = Task.wait

        def interrupted(self: Task) -> None:
            if self is task:
                raise KeyboardInterrupt
            inner(self)

        monkeypatch.setattr(Task, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.state_dict()
        monkeypatch.undo()
        assert same(values(model), wanted)
        assert task is not None
        assert task.done()


def test_after_an_interrupted_release_a_load_is_still_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, adam = started(tmp_path, "nvme")
    with closing(adam):
        unit = engine_of(model).units[1]
        with infinity.gathered(unit.params[0].param):
            pass
        load = unit.last_load
        assert load is not None

        def interrupted(event: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(unit._device, "wait_on_device", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unit.reshard()
        monkeypatch.undo()
        assert unit.last_load is load
        step(this, adam, 3)


@placements
def test_an_evaluation_after_an_interrupted_forward_sees_the_newest(placement: str, tmp_path: Path) -> None:
    seen = []
    for interrupt in (False, True):
        this, model, adam = started(tmp_path / str(interrupt), placement)
        with closing(adam):
            if interrupt:

                def hook(*_: Any) -> None:
                    raise KeyboardInterrupt

                handle = model.blocks[1].norm2.register_forward_hook(hook)
                with pytest.raises(KeyboardInterrupt):
                    this.loss(model, this.batches[3])
                handle.remove()
            seen.append(glance(this))
            residency = engine_of(model).residency
            assert not any(u.users for u in residency.units)
            seen.append(step(this, adam, 3))
    assert seen[:2] == seen[2:]


@placements
@pytest.mark.parametrize("ended", ["a backward that raised", "a forward that was interrupted"])
def test_who_looks_after_what_ended_early_sees_the_newest(ended: str, placement: str, tmp_path: Path) -> None:
    """A `gathered` block, and a module that is called by itself: torch calls no hook at either end."""
    this, model, adam = started(tmp_path, placement)
    part, x = model.blocks[1], torch.randn(2, 5, 32)

    def end_early() -> None:
        error = ValueError if "raised" in ended else KeyboardInterrupt

        def hook(*_: Any) -> None:
            raise error

        method = "register_full_backward_hook" if error is ValueError else "register_forward_hook"
        handle = getattr(part.norm2, method)(hook)
        with pytest.raises(error):
            this.loss(model, this.batches[3]).backward()
        handle.remove()
        adam.zero_grad()

    with closing(adam):
        newest = values(model)
        end_early()
        assert same(values(model), newest)
        end_early()
        assert same(gathered_values(model), newest)
        end_early()
        with infinity.gathered(model):
            assert same([p.detach() for p in model.parameters()], newest)
        end_early()
        with torch.no_grad():
            shown = part.eval()(x)
        part.train()
        with infinity.gathered(part):
            wanted = {n: p.detach().clone() for n, p in part.named_parameters()}
        infinity.flush(adam)
        with torch.no_grad():
            assert torch.equal(part.eval()(x), shown)
        with infinity.gathered(part):
            assert all(torch.equal(p, wanted[n]) for n, p in part.named_parameters())


@placements
def test_a_step_inside_gathered_is_refused(placement: str, tmp_path: Path) -> None:
    this, model, adam = started(tmp_path / "a", placement)
    with closing(adam):
        infinity.flush(adam)
        this.loss(model, this.batches[3]).backward()
        with infinity.gathered(model, write=True), pytest.raises(ParameterError, match="gathered"):
            adam.step()
        adam.step()
        adam.zero_grad()
        found = masters_of(model)
    this, model, adam = started(tmp_path / "b", placement)
    with closing(adam):
        infinity.flush(adam)
        step(this, adam, 3)
        assert same(found, masters_of(model))


@placements
def test_a_training_forward_does_not_change_what_gathered_shows(placement: str, tmp_path: Path) -> None:
    this, model, adam = started(tmp_path, placement)
    with closing(adam):
        with infinity.gathered(model):
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ParameterError, match="two versions"):
                this.loss(model, this.batches[3])
            assert same(before, [p.detach() for p in model.parameters()])
            infinity.flush(adam)  # what is shown is the newest: it may be published
            this.loss(model, this.batches[3]).backward()
            assert same(before, [p.detach() for p in model.parameters()])
        adam.step()


@pytest.mark.first
@placements
@pytest.mark.parametrize("where", ["between steps", "before backward"])
@pytest.mark.parametrize("reads", [values, gathered_values, evaluated])
def test_who_looks_does_not_change_what_is_trained(
    reads: Callable[[Any], object], where: str, placement: str, tmp_path: Path
) -> None:
    """Also where a function of the user's, or a graph, takes a parameter outside of its module's forward."""
    mode = {"update": "delayed", "delay_warmup_steps": 1, **PLACEMENTS[placement]}
    losses = []
    for looks in (False, True):
        folder = tmp_path / str(looks)
        folder.mkdir()
        model, optimizer = wrapped(folder, CutModel, **mode)
        with closing(optimizer):
            found = []
            for t in range(4):
                if looks and where == "between steps":
                    reads(model)
                loss = model(tokens(t))
                if looks and where == "before backward":
                    reads(model)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach().clone())
            losses.append([*found, *values(model)])
    assert same(*losses)


@placements
def test_gathered_to_write_inside_gathered_to_read(placement: str, tmp_path: Path) -> None:
    this, model, adam = started(tmp_path, placement)
    with closing(adam):
        weight = model.head.weight
        with infinity.gathered(model):
            before = weight.detach().clone()
            with infinity.gathered(weight, write=True), torch.no_grad():
                assert torch.equal(weight, before)
                weight.mul_(2)
            assert torch.equal(weight, before * 2)
        assert torch.equal(model.state_dict()["head.weight"], before * 2)
        step(this, adam, 3)


@placements
def test_a_state_dict_keeps_its_values(placement: str, tmp_path: Path) -> None:
    this, model, adam = started(tmp_path, placement)
    with closing(adam):
        glance(this)
        saved = model.state_dict()
        before = [v.clone() for v in saved.values()]
        this.loss(model, this.batches[3])
        assert same(list(saved.values()), before)
        with infinity.gathered(model):
            assert same(list(model.state_dict(keep_vars=True).values()), before)


@placements
def test_reentrant_recomputation_after_an_evaluation(placement: str, tmp_path: Path) -> None:
    found = []
    for look in (False, True):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        torch.manual_seed(0)
        model: Any = Chain()
        mode: dict[str, Any] = {"update": "delayed", "delay_warmup_steps": 1}
        config = config_for(folder, **PLACEMENTS[placement], **mode)
        model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
        x = torch.randn(4, 48).requires_grad_()
        with closing(adam):
            for _ in range(4):
                loss = model(x).square().mean()
                if look:
                    model.eval()
                    with torch.no_grad():
                        model(x)
                    model.train()
                loss.backward()
                adam.step()
                adam.zero_grad()
            found.append(values(model))
    assert same(*found)


@pytest.mark.parametrize("call", ["gathered", "optimizer", "model"])
def test_an_edit_is_not_dropped_without_a_word(call: str, tmp_path: Path) -> None:
    _, model, adam = started(tmp_path, "resident")
    saved, state = model.state_dict(), adam.state_dict()
    with torch.no_grad():
        model.head.weight.mul_(2)
    calls = {
        "gathered": lambda: infinity.gathered(model.tokens, write=True).__enter__(),
        "optimizer": lambda: adam.load_state_dict(state),
        "model": lambda: model.tokens.load_state_dict({"weight": saved["tokens.weight"]}),
    }
    with pytest.raises(ParameterChangedError, match=r"infinity\.flush"):
        calls[call]()
    infinity.flush(adam)
    infinity.close(adam)


@pytest.mark.parametrize("update", ["overlap", "delayed"])
def test_an_edit_that_is_refused_leaves_nothing_behind(update: str, tmp_path: Path) -> None:
    this, model, adam = started(tmp_path, "nvme", update=update)
    with closing(adam):
        before = values(model)

        def edit() -> None:
            with infinity.gathered(model), torch.no_grad():
                model.tokens.weight.mul_(2)
                model.head.weight.mul_(2)

        with pytest.raises(ParameterChangedError):
            edit()
        with infinity.gathered(model):
            assert same([p.detach() for p in model.parameters()], before)
        assert not any(u.in_use for u in engine_of(model).units)
        step(this, adam, 3)


def test_close_does_not_drop_an_edit_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_DELAY_SEED", "1")
    _, model, adam = started(tmp_path, "resident")  # with an update under way
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(ParameterChangedError, match=r"infinity\.flush"):
        infinity.close(adam)


def test_a_model_that_calls_itself_is_one_forward(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor, again: int = 2) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return self(x, again - 1) if again else x

    model: Any = Twice()
    config = config_for(tmp_path, update="delayed", delay_warmup_steps=0, **ON_HOST)
    model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    depths: list[int] = []
    phases = engine_of(model).phases
    model.layers[1].register_forward_hook(lambda *_: depths.append(len(phases._roots())))
    with closing(adam):
        for _ in range(2):
            model(torch.randn(2, 8)).sum().backward()
            adam.step()
        assert depths == [1, 2, 3] * 2


@pytest.mark.parametrize("update", ["overlap", "delayed", "sync"])
def test_state_that_was_read_ahead_in_another_order_does_not_block_the_update(
    update: str, tmp_path: Path
) -> None:
    """With fewer leases than chunks: those that are read ahead first may be updated last."""
    torch.manual_seed(0)
    model: Any = Stack(6, 32)
    mode: dict[str, Any] = {"update": update, "update_depth": 1, "read_ahead_memory": 0}
    model, adam = wrap_adamw(model, config_for(tmp_path, delay_warmup_steps=1, **mode))
    x, done = torch.randn(4, 32), threading.Event()

    def train() -> None:
        for order in ((0, 1, 2), (0, 1, 2), (5, 4, 3), (2, 1, 0), (0, 1, 2), (2, 5)) * 2:
            model(x, order).square().mean().backward()
            engine_of(model).updater.wait()  # so that there is time to read ahead
            adam.step()
            adam.zero_grad()
        done.set()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert done.wait(30), "the update waits for leases that only it can give back"
    thread.join()
    infinity.close(adam)


def test_close_tells_of_an_update_whose_failure_only_a_prefetch_has_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, _, adam = started(tmp_path, "nvme", update="overlap")

    def fail(*args: Any, **mode: Any) -> None:
        raise StorageError("the drive is gone", cure="another drive")

    engine = engine_of(adam)
    this.loss(this.model, this.batches[3]).backward()
    engine.updater.wait()
    monkeypatch.setattr(update_module, "_compute", fail)
    adam.step()
    for unit in engine.units:
        if unit.last_load is not None:
            unit.last_load.issued.wait(10)
    assert any(u.last_load is not None and u.last_load.error is not None for u in engine.units)
    with pytest.raises(StorageError, match="the drive is gone"):
        infinity.close(adam)


@placements
def test_every_value_of_a_state_dict_is_the_newest(placement: str, tmp_path: Path) -> None:
    """Also the second parameter of a module; and nothing that comes later makes up for it."""
    this, model, adam = started(tmp_path, placement)
    with closing(adam):
        engine_of(model).updater.wait()
        saved = values(model)
        assert same(saved, masters_of(model))
        part = [v.clone() for v in model.blocks[0].norm1.state_dict().values()]
        assert same(part, [v for n, v in model.state_dict().items() if n.startswith("blocks.0.norm1.")])
        step(this, adam, 3)


_SCRIPT = """
import signal, sys, threading, time, os
import torch, infinity
from pathlib import Path
from infinity.optim import update
from tests.test_delayed_edges import started

this, model, adam = started(Path(sys.argv[1]), sys.argv[2])
inner = update._compute

def slowly(*args, **mode):
    time.sleep(0.1)
    inner(*args, **mode)

update._compute = slowly
this.loss(model, this.batches[3]).backward()
adam.step()
if sys.argv[3] == "raise":
    raise KeyError("mine")
if sys.argv[3] == "interrupt":
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    infinity.flush(adam)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "placement"),
    [
        ("interrupt", "nvme"),
        *(
            pytest.param(how, placement, marks=pytest.mark.nightly)
            for how, placement in itertools.product(("end", "raise"), ("nvme", "resident"))
        ),
        pytest.param("interrupt", "resident", marks=pytest.mark.nightly),
    ],
)
def test_the_interpreter_ends_with_a_delayed_update_under_way(
    how: str, placement: str, tmp_path: Path
) -> None:
    done = python("-c", _SCRIPT, str(tmp_path), placement, how, timeout=60)
    assert (done.returncode == 0) == (how == "end"), done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (how == "interrupt"), done.stderr
    assert "Exception ignored" not in done.stderr


@placements
def test_a_delayed_update_that_fails_is_told_at_the_next_call(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, adam = started(tmp_path, placement)
    this.loss(model, this.batches[3]).backward()
    engine_of(model).updater.wait()
    inner, calls = update_module._compute, []

    def fail(*args: Any, **mode: Any) -> None:
        calls.append(args)
        if len(calls) > 2:  # after some units
            raise StorageError("the drive is gone", cure="another drive")
        inner(*args, **mode)

    monkeypatch.setattr(update_module, "_compute", fail)
    adam.step()
    adam.zero_grad()
    for use in (
        adam.step,
        lambda: step(this, adam, 4),
        lambda: glance(this),
        lambda: infinity.flush(adam),
        model.state_dict,
        adam.state_dict,
        lambda: infinity.gathered(model).__enter__(),
        lambda: model.load_state_dict({}, strict=False),
    ):
        with pytest.raises(StorageError, match="the drive is gone"):
            use()
    monkeypatch.undo()
    infinity.close(adam)


@pytest.mark.first
@pytest.mark.parametrize("update", ["overlap", "delayed"])
def test_state_is_not_read_ahead_before_the_store_knows_of_its_write(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit may be used while the CRCs of its state are made; a backward that begins then does not read
    the state from before the update."""
    found = []
    for slow in (False, True):
        this, model, adam = started(tmp_path / str(slow), "nvme", steps=1, update=update)
        with closing(adam):
            inner = ChunkIO.write

            def write(self: ChunkIO, *, state: bool, copy: bool, inner: Any = inner, **more: Any) -> None:
                if state and not copy:
                    time.sleep(0.05)
                inner(self, state=state, copy=copy, **more)

            if slow:
                monkeypatch.setattr(ChunkIO, "write", write)
            for t in range(1, 5):
                loss = this.loss(model, this.batches[t])
                glance(this)  # waits until all is updated
                loss.backward()
                adam.step()
                adam.zero_grad()
            monkeypatch.undo()
            found.append(masters_of(model))
    assert same(*found)


@placements
@pytest.mark.parametrize("warm", [True, False])
def test_an_edit_inside_a_forward(warm: bool, placement: str, tmp_path: Path) -> None:
    """With one version it is as in torch; with two it is refused, and the forward goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    reference = copy.deepcopy(model)
    adam = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    settings = {"update": "delayed", "delay_warmup_steps": 40 if warm else 1, **PLACEMENTS[placement]}
    config = config_for(tmp_path, **settings)
    model, optimizer = wrap_adamw(model, config, lr=1e-2, eps=1e-3)
    refused: list[ParameterError] = []

    def edit(layer: Any, offloaded: bool) -> None:
        try:
            with (
                torch.no_grad(),
                infinity.gathered(layer, write=True) if offloaded else contextlib.nullcontext(),
            ):
                layer.weight.mul_(1.5)
        except ParameterError as error:
            refused.append(error)

    found = []
    with closing(optimizer):
        for step in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            for trained, updates in ((reference, adam), (model, optimizer)):
                later = trained[3] if step % 2 else trained[1]
                hook = trained[1].register_forward_pre_hook(
                    lambda *_, at=later, o=trained is model: edit(at, o)
                )
                loss = trained(x).square().mean()
                hook.remove()
                loss.backward()
                updates.step()
                updates.zero_grad()
                found.append(loss.item())
        assert len(refused) == (0 if warm else 2), refused
        if warm:
            assert found[1::2] == pytest.approx(found[::2], rel=1e-5)
        else:
            assert "infinity.flush" in str(refused[0])
            infinity.flush(optimizer)  # what it says
            hook = model[1].register_forward_pre_hook(lambda *_: edit(model[2], True))
            model(x).mean().backward()
            hook.remove()
            assert len(refused) == 2
