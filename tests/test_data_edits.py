"""Edits of parameters on the device outside of `gathered`, in place and by `p.data = t`: the next update
takes them over, or raises an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ParameterChangedError

from .offloaded import config_for, wrap_adamw
from .ranks import all_well, run_ranks

WIDTH = 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)  # of an odd number of elements

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def wrapped(folder: Path, seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    given = {"parameters": "device", "optimizer_state": "host", "gradients": "host"}
    folder.mkdir(exist_ok=True)
    return wrap_adamw(model, config_for(folder, **{**given, **settings}), lr=1e-3)


def step(model: Any, optimizer: Any, between: Callable[[], None] = lambda: None) -> None:
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    x = x.to(engine_of(model).device.torch_device)
    model(x).float().square().mean().backward()
    between()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def doubled(param: Any) -> None:
    param.mul_(-2)


@torch.no_grad()
def one_element(param: Any) -> None:
    param.view(-1)[-1] = 7.0


@torch.no_grad()
def exchanged(param: Any) -> None:
    param.copy_(param.flip(0))


@torch.no_grad()
def filled(param: Any, value: float) -> None:
    param.fill_(value)


@pytest.mark.parametrize(
    ("when", "state", "update", "dtype", "edit"),
    [
        ("before a forward", "host", "sync", "fp32", doubled),
        ("before step", "nvme", "overlap", "bf16", one_element),
        ("before a forward", "device", "delayed", "bf16", one_element),
        ("before step", "host", "delayed", "fp32", exchanged),
    ],
)
def test_an_edit_is_kept_as_one_in_a_block_is(
    when: str, state: str, update: str, dtype: str, edit: Any, tmp_path: Path
) -> None:
    """Bit for bit as if it had been made in a block."""
    found = []
    for block in (False, True):
        model, optimizer = wrapped(
            tmp_path / str(block), optimizer_state=state, update=update, dtype=dtype, delay_warmup_steps=9
        )
        for number in range(4):

            def change(model: Any = model, block: bool = block) -> None:
                for param in (model.blocks[1].weight, model.head.bias):
                    if block:
                        with infinity.gathered(param, write=True):
                            edit(param)
                    else:
                        edit(param)

            if number == 2 and when == "before a forward":
                change()
            step(model, optimizer, change if number == 2 and when == "before step" else lambda: None)
        found.append((model.state_dict(), optimizer.state_dict()["state"]))
    assert all(torch.equal(v, found[1][0][n]) for n, v in found[0][0].items())
    assert all(torch.equal(v, found[1][1][i][k]) for i, s in found[0][1].items() for k, v in s.items())
    model.state_dict()


def test_an_edit_of_values_that_are_about_to_be_replaced_is_told(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, update="delayed", delay_warmup_steps=1, dtype="bf16")
    for _ in range(3):
        step(model, optimizer)
    with pytest.raises(ParameterChangedError, match=r"'head.bias' was edited") as error:
        step(model, optimizer, lambda: doubled(model.head.bias))
    assert "flush" in str(error.value.cure)
    infinity.flush(optimizer)
    filled(model.head.bias, 3)  # there is one version now
    optimizer.step()
    optimizer.zero_grad()
    infinity.flush(optimizer)
    assert float((model.head.bias.detach() - 3).abs().max()) < 0.1
    infinity.close(model)


def test_it_is_in_what_is_saved_and_given_out(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, dtype="bf16")
    step(model, optimizer)
    filled(model.head.bias, 5)
    assert torch.equal(optimizer.state_dict()["state"][7]["master"], torch.full((5,), 5.0))
    filled(model.head.bias, 6)
    path = infinity.save(optimizer, tmp_path / "saved")
    filled(model.head.bias, 7)
    infinity.export(model, tmp_path / "out", dtype="fp32")
    filled(model.head.bias, 8)
    infinity.unwrap(model)
    assert torch.equal(model.head.bias, torch.full((5,), 8.0))
    other, again = wrapped(tmp_path, 1, dtype="bf16")
    infinity.load(again, path)
    assert torch.equal(other.head.bias.detach().float(), torch.full((5,), 6.0))
    infinity.close(other)


def test_other_data_are_told(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, dtype="bf16")
    step(model, optimizer)
    data = model.head.bias.data
    model.head.bias.data = torch.zeros_like(data)
    model.head.bias.data = data  # what is swapped back was no edit
    step(model, optimizer)

    def swap() -> None:
        model.head.bias.data = torch.full_like(model.head.bias.data, 3)

    with pytest.raises(ParameterChangedError, match=r"head\.bias") as error:
        step(model, optimizer, swap)
    refused = (lambda: infinity.save(optimizer, tmp_path / "saved"), optimizer.state_dict)
    for call in (*refused, lambda: infinity.unwrap(model)):
        with pytest.raises(ParameterChangedError, match=r"head\.bias"):
            call()
    assert "gathered(params, write=True)" in str(error.value.cure)
    with infinity.gathered(model.head.bias, write=True):
        pass
    optimizer.step()
    optimizer.zero_grad()
    assert float((model.head.bias.detach() - 3).abs().max()) < 0.1
    infinity.close(model)


RANKS = """
import sys
from pathlib import Path
import torch
import infinity
from infinity.core.errors import ParameterChangedError
from tests.test_data_edits import filled, step, wrapped
torch.set_num_threads(1)
model, optimizer = wrapped(Path(sys.argv[1]), dtype="bf16", zero_stage=1, threads=1, gradients=None)
step(model, optimizer)
try:
    step(model, optimizer, lambda: filled(model.head.bias, 3))
    print(float((model.head.bias.detach() - 3).abs().max()) < 0.1)
except ParameterChangedError as error:
    print("head.bias" in str(error))
"""


def test_with_several_ranks_too(tmp_path: Path) -> None:
    results = run_ranks(2, RANKS, str(tmp_path), seconds=200)
    assert all_well(results) == ["True\n"] * 2


def swapped(model: nn.Module) -> None:
    model.head.bias.data = torch.ones(5)


@pytest.mark.parametrize(
    ("edit", "then"),
    [(swapped, "train"), (lambda m: m.double().float(), "unwrap"), (lambda m: m.half(), "train")],
)
def test_an_empty_block_keeps_what_a_model_was_given_outside(
    edit: Callable[[nn.Module], object], then: str, tmp_path: Path
) -> None:
    """As the error says."""
    torch.manual_seed(0)
    plain = Net()
    edit(plain)
    model, optimizer = wrapped(tmp_path, dtype="fp32")
    edit(model)
    for call in (lambda: step(model, optimizer), lambda: infinity.unwrap(model)):
        with pytest.raises(ParameterChangedError, match="pass` keeps its current values"):
            call()
    with infinity.gathered(model, write=True):
        pass
    if then == "train":
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name].float()), name
        step(model, optimizer)
    infinity.unwrap(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if then == "unwrap":
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name].float()), name
