"""Users' hooks of state dicts: what they see, edit, call and raise, beside plain torch."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

from .test_state_dict_rules import Net, places, train, wrapped


def values_of(number: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, number) for name, value in Net().state_dict().items()}


@pytest.mark.parametrize(
    ("place", "where"), [("nvme", ""), ("host", "layers"), ("device", "layers.1"), ("nvme", "layers.0")]
)
def test_an_edit_by_a_hook_is_in_the_state_dict(where: str, place: str, tmp_path: Path) -> None:
    with wrapped(tmp_path, place, dtype="fp32") as (model, optimizer):
        train(model, optimizer, range(1))

        def merge(*_: Any) -> None:
            with infinity.gathered(model.layers[1].weight, write=True), torch.no_grad():
                model.layers[1].weight.fill_(1)

        model.get_submodule(where).register_state_dict_pre_hook(merge)
        assert model.state_dict()["layers.1.weight"].eq(1).all()


@places
def test_a_hook_that_raises_leaves_no_copies(place: str, tmp_path: Path) -> None:
    """And what the model shows afterwards are its present values."""
    with wrapped(tmp_path, place, dtype="fp32") as (model, optimizer):
        train(model, optimizer, range(1))
        made: list[weakref.ref[torch.Tensor]] = []

        def note(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
            made.extend(weakref.ref(value) for value in state.values())

        def fail(*_: Any) -> None:
            raise KeyError("mine")

        handles = [model.layers[0].register_state_dict_post_hook(note)]
        handles.append(model.layers[1].register_state_dict_pre_hook(fail))
        with contextlib.suppress(KeyError):  # it would be kept, with the frames that hold the copies
            model.state_dict()
        gc.collect()
        assert made
        assert not any(ref() is not None for ref in made)
        for handle in handles:
            handle.remove()
        with contextlib.suppress(infinity.InfinityError):  # where it is released
            assert model.layers[1].weight.detach().numel()
        train(model, optimizer, range(1, 2))
        state = model.state_dict()
        with contextlib.suppress(infinity.InfinityError):
            assert torch.equal(model.layers[1].bias.detach(), state["layers.1.bias"])
        with infinity.gathered(model):
            assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())


LOOKS: dict[str, Callable[[Any], object]] = {
    "gathered": lambda model: _gather(model, write=False),
    "gathered to write": lambda model: _gather(model, write=True),
    "a forward": lambda model: model(torch.ones(2, 40)),
    "a state dict": lambda model: model.state_dict(),
}


def _gather(model: nn.Module, *, write: bool) -> None:
    with infinity.gathered(model, write=write):
        assert next(model.parameters()).numel()


@pytest.mark.parametrize("place", ["nvme", "device"])
@pytest.mark.parametrize(("look", "where"), zip(LOOKS, 2 * ["layers.1", "layers"], strict=True))
def test_a_look_by_a_load_hook_keeps_no_old_values(where: str, look: str, place: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    plain.load_state_dict(values_of(0.1))
    with wrapped(tmp_path, place, dtype="fp32") as (model, optimizer):
        train(model, optimizer, range(1))

        def hook(*_: Any) -> None:
            with torch.no_grad():
                LOOKS[look](model)

        model.get_submodule(where).register_load_state_dict_pre_hook(hook)
        model.load_state_dict(values_of(0.1))
        x = torch.ones(2, 40)
        torch.testing.assert_close(model(x).detach(), plain(x).detach(), rtol=1e-6, atol=1e-6)
