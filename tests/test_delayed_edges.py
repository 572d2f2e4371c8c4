"""Delayed updates where a user does something out of the ordinary."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ParameterChangedError, ParameterError

from .models import case
from .offloaded import ON_NVME, config_for, wrap_adamw
from .test_cache import Layers
from .test_delayed import equal, glance, masters_of

PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": ON_NVME,
    "resident": {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"},
}
placements = pytest.mark.parametrize("placement", PLACEMENTS)


def started(folder: Path, placement: str, steps: int = 3, **settings: Any) -> tuple[Any, Any, Any]:
    """A small model after `steps` steps, of which all but the first were delayed."""
    this = case("gpt", layers=2, width=32)
    mode = {"update": "delayed", "delay_warmup_steps": 1}
    folder.mkdir(exist_ok=True)
    config = config_for(folder, **{**PLACEMENTS[placement], **mode, **settings})
    model, adam = wrap_adamw(this.model, config, lr=1e-2)
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


def test_a_step_inside_gathered_is_refused(tmp_path: Path) -> None:
    found = []
    for inside in (True, False):
        this, model, adam = started(tmp_path / str(inside), "resident")
        with closing(adam):
            infinity.flush(adam)
            this.loss(model, this.batches[3]).backward()
            if inside:
                with infinity.gathered(model, write=True), pytest.raises(ParameterError, match="gathered"):
                    adam.step()
            adam.step()
            found.append(masters_of(model))
    assert equal(*found)


@placements
def test_a_forward_without_a_graph_and_a_step_without_gradients(placement: str, tmp_path: Path) -> None:
    """In training mode a forward uses the older values, in `eval()` the newest: that of a part, too."""
    this, model, adam = started(tmp_path, placement, 2)
    with closing(adam), torch.no_grad():
        older = model.state_dict()["head.weight"].clone()
        with torch.enable_grad():
            step(this, adam, 2)
        newest, x = model.state_dict()["head.weight"], torch.randn(2, older.shape[1])
        assert not torch.equal(older, newest)
        for training, weight in ((True, older), (False, newest)):
            assert torch.equal(model.head.train(training)(x), nn.functional.linear(x, weight))
        seen = this.loss(model.train(), this.batches[0]).item()
        assert seen != glance(this)
        assert not any(unit.keepers for unit in engine_of(model).units)
        with torch.enable_grad():
            assert step(this, adam, 0) == seen
        adam.step()  # nothing is updated, and the newest values are all that there is
        assert this.loss(model.train(), this.batches[0]).item() == glance(this)


@placements
def test_what_gathered_and_a_state_dict_show_stays(placement: str, tmp_path: Path) -> None:
    this, model, adam = started(tmp_path, placement)
    with closing(adam):
        glance(this)
        saved = model.state_dict()
        before = [v.clone() for v in saved.values()]
        this.loss(model, this.batches[3])
        assert equal(list(saved.values()), before)
        with infinity.gathered(model):
            assert equal(list(model.state_dict(keep_vars=True).values()), before)
            with pytest.raises(ParameterError, match="two versions"):
                this.loss(model, this.batches[3])
            assert equal([p.detach() for p in model.parameters()], before)
            infinity.flush(adam)  # what is shown is the newest: it may be published
            this.loss(model, this.batches[3]).backward()
            assert equal([p.detach() for p in model.parameters()], before)
        adam.step()
        adam.zero_grad()
        weight = model.head.weight
        with infinity.gathered(model):
            shown = weight.detach().clone()
            with infinity.gathered(weight, write=True), torch.no_grad():
                assert torch.equal(weight, shown)
                weight.mul_(2)
            assert torch.equal(weight, shown * 2)
        assert torch.equal(model.state_dict()["head.weight"], shown * 2)
        step(this, adam, 4)


def test_an_edit_is_not_dropped_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_DELAY_SEED", "1")
    this, model, adam = started(tmp_path, "resident")
    saved, state = model.state_dict(), adam.state_dict()
    calls = (
        lambda: infinity.gathered(model.tokens, write=True).__enter__(),
        lambda: adam.load_state_dict(state),
        lambda: model.tokens.load_state_dict({"weight": saved["tokens.weight"]}),
        lambda: infinity.close(adam),  # with an update under way
    )
    for number, call in enumerate(calls):
        if number:
            step(this, adam, number)
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(ParameterChangedError, match=r"infinity\.flush"):
            call()
        if number < 3:
            infinity.flush(adam)


@pytest.mark.parametrize("update", ["overlap", "delayed"])
def test_state_that_was_read_ahead_in_another_order_does_not_block_the_update(
    update: str, tmp_path: Path
) -> None:
    """With fewer leases than chunks: those that are read ahead first may be updated last."""
    torch.manual_seed(0)
    mode: dict[str, Any] = {"update": update, "update_depth": 1, "read_ahead_memory": 0}
    model, adam = wrap_adamw(Layers(6), config_for(tmp_path, delay_warmup_steps=1, **mode))
    x, done = torch.randn(4, 64), threading.Event()

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


@pytest.mark.parametrize(("warm", "placement"), [(True, "nvme"), (False, "nvme"), (False, "resident")])
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
