"""Muon: the bits of `torch.optim.Muon` for whole matrices, wherever their pieces are.

test_optimizers.py has it in a language model."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import BudgetError, ConfigError, OptimizerTypeError, WrapError

from .models import case
from .offloaded import ON_HOST, config_for
from .test_optimizers import PLACES, assert_equal, state_of
from .whole import Make, muon, train_whole

STEPS = 2
WIDTH = 128
LIMIT = 0.01  # of a norm, much below that of a gradient


class Net(nn.Module):
    """Matrices of several chunks of 65,536 elements each, tall and wide, a tied one, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 640)
        self.down = nn.Linear(640, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(x + self.tied(self.down(torch.relu(self.up(x)))))


def loss_of_net(model: nn.Module, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    return model(torch.randn(16, WIDTH, generator=draw)).square().mean()


def run_net(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of_net(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def in_torch(nesterov: bool) -> tuple[Make, dict[str, dict[str, torch.Tensor]]]:
    """The optimizer, and what plain torch makes of the net with it."""
    make = functools.partial(muon, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    return make, train_whole(Net(), make, loss_of_net, steps=STEPS)


@pytest.mark.parametrize(
    ("place", "nesterov"), [(place, place not in ("device", "backward")) for place in PLACES]
)
def test_a_matrix_that_chunks_cut_is_one(place: str, nesterov: bool, tmp_path: Path) -> None:
    make, wanted = in_torch(nesterov)
    model = Net()
    settings = {"units": ["Net"], **PLACES[place], "chunk_elements": 65536}
    model, optimizer = infinity.wrap(model, make(model.parameters()), config_for(tmp_path, **settings))
    run_net(model, optimizer, range(STEPS))
    assert_equal(state_of(model), wanted)
    infinity.close(optimizer)


def only_matrices() -> tuple[Net, torch.optim.Optimizer]:
    """Return a net without vectors and a `torch.optim.Muon`, whose order is not the model's."""
    model = Net()
    model.up.bias = None  # type: ignore[assignment]
    return model, torch.optim.Muon([*model.parameters()][::-1], lr=0.05)


def test_accumulation_clipping_and_state_dicts_are_those_of_torch(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Any, steps: range, clip: Any) -> None:
        for step in steps:
            for part in range(2):
                (loss_of_net(model, 2 * step + part) / 2).backward()
            clip(step)
            optimizer.step()
            optimizer.zero_grad()

    clips: list[tuple[float, float]] = []

    def clip_ours(_: int) -> None:
        norm = float(optimizer.clip_grad_norm_(LIMIT))  # type: ignore[attr-defined]
        clips.append((norm, model.up.weight.grad.factor))  # type: ignore[union-attr]

    model, optimizer = only_matrices()
    config = config_for(tmp_path, units=["Net"], chunk_elements=65536)
    model, optimizer = infinity.wrap(model, optimizer, config)
    run(model, optimizer, range(2), clip_ours)
    plain, theirs = only_matrices()

    def clip(step: int) -> None:
        """By the factor of the run above: one from the norm that it returns, in fp32, may round otherwise."""
        norm, factor = clips[step]
        assert float(nn.utils.clip_grad_norm_(plain.parameters(), math.inf)) == pytest.approx(norm, rel=1e-5)
        assert factor == pytest.approx(LIMIT / (norm + 1e-6), rel=1e-6)
        for param in plain.parameters():
            assert param.grad is not None
            param.grad.mul_(factor)

    run(plain, theirs, range(2), clip)
    found = state_of(model)
    for name, param in plain.named_parameters():
        assert torch.equal(found[name]["value"], param.detach()), name
        assert torch.equal(found[name]["momentum_buffer"], theirs.state[param]["momentum_buffer"]), name
    saved = optimizer.state_dict()
    theirs.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    run(plain, theirs, range(2, 4), lambda _: None)
    run(model, optimizer, range(2, 4), lambda _: None)
    found = state_of(model)
    assert all(torch.equal(found[name]["value"], p.detach()) for name, p in plain.named_parameters())
    optimizer.load_state_dict(theirs.state_dict())
    infinity.close(optimizer)


def test_what_is_not_available_is_refused(tmp_path: Path) -> None:
    model = Net()
    theirs = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(WrapError, match=r"infinity\.optim\.Muon"):  # it lacks parameters
        infinity.wrap(model, theirs, config_for(tmp_path))
    with pytest.raises(BudgetError, match="the update of a matrix"):
        infinity.wrap(model, muon(model.parameters()), config_for(tmp_path, device_memory="1MiB"))
    for settings in ({"update": "delayed"}, {"optimizer_state_dtype": "8bit"}):
        with pytest.raises(ConfigError, match="Muon is not available"):
            infinity.wrap(model, muon(model.parameters()), config_for(tmp_path, **settings))


def two_matrices(count: int) -> tuple[nn.Module, Any]:
    """Return a model of two matrices, of which Muon updates `count`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    params = [*model.parameters()]
    first = {"params": params[:count], "use_muon": True}
    second = {"params": params[count:], "use_muon": False, "lr": 0.01, "weight_decay": 0.0}
    return model, infinity.optim.Muon([group for group in (first, second) if group["params"]])


def test_a_group_that_has_changed_use_muon_is_refused(tmp_path: Path) -> None:
    model, optimizer = infinity.wrap(*two_matrices(1), config_for(tmp_path, **ON_HOST))
    for index in range(2):
        group = optimizer.param_groups[index]
        group["use_muon"] = not group["use_muon"]
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(OptimizerTypeError, match="has changed use_muon"):
            optimizer.step()
        group["use_muon"] = not group["use_muon"]
    optimizer.step()


def test_a_muon_of_torch_and_ours_load_each_other(tmp_path: Path) -> None:
    model, ours = two_matrices(2)
    theirs = torch.optim.Muon(model.parameters())
    for first, second in ((theirs, ours), (ours, theirs)):
        model, optimizer = infinity.wrap(model, first, config_for(tmp_path, **ON_HOST))
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        model, optimizer = infinity.wrap(infinity.unwrap(model), second, config_for(tmp_path, **ON_HOST))
        optimizer.load_state_dict(saved)
        infinity.unwrap(model)


@pytest.mark.parametrize("tied", [False, True])
def test_the_groups_of_a_language_model(tied: bool) -> None:
    model: Any = case("gpt", tied=tied).model
    model.blocks[0].requires_grad_(False)
    with pytest.raises(ConfigError, match="does not say which layer is its head") as raised:
        infinity.optim.muon_groups(model)
    assert "head=model.head" in str(raised.value)
    groups = infinity.optim.muon_groups(model, head=model.head)
    names = {id(p): name for name, p in model.named_parameters()}
    inner, others = ({names[id(p)] for p in group["params"]} for group in groups)
    assert [group["use_muon"] for group in groups] == [True, False]
    assert inner | others == {name for name, p in model.named_parameters() if p.requires_grad}
    matrices = {n for n, p in model.named_parameters() if p.ndim == 2}
    assert inner == {n for n in matrices if n.startswith(("blocks.1.", "blocks.2."))}
    infinity.optim.Muon(groups).step()
    for param in groups[0]["params"]:
        param.requires_grad_(False)
    assert [len(g["params"]) > 0 for g in infinity.optim.muon_groups(model, head=model.head)] == [False, True]


def test_the_head_of_a_model_of_transformers_is_found() -> None:
    model = case("llama").model
    inner, others = infinity.optim.muon_groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(".layers." in names[id(p)] for p in inner["params"])
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {names[id(p)] for p in others["params"]}
