"""Adafactor: its own code updates whole parameters, and it keeps factors of them. What it shares with others
that run by their own code is in test_own_code.py; several ranks are in test_rank_muon.py."""

from __future__ import annotations

import copy
import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import (
    BudgetError,
    ConfigError,
    CorruptionError,
    OptimizerTypeError,
    OutOfMemoryError,
    StateDictError,
)
from infinity.hardware.aio import crc32c
from infinity.optim.own_code import Code
from infinity.storage.checkpoints import INDEX

from . import ranks
from .offloaded import ON_HOST, config_for
from .test_muon import Net, loss_of_net, run_net
from .test_optimizers import PLACES, assert_equal, assert_near, state_of
from .whole import OWN

pytestmark = pytest.mark.filterwarnings("ignore:.*runs by its own code:RuntimeWarning")
STEPS = 4
adafactor = OWN["adafactor"]


class Shapes(nn.Module):
    """A scalar, vectors, a kernel of four dimensions, and parameters with one row, one column and nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.convolution = nn.Conv2d(3, 7, 3)
        self.row = nn.Parameter(torch.randn(1, 50))
        self.column = nn.Parameter(torch.randn(50, 1))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x).mean() * self.scale + (self.row @ self.column).sum() + self.empty.sum()


def loss_of_shapes(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))) ** 2
    return loss


@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_that_chunks_cut_is_one(place: str, tmp_path: Path) -> None:
    plain = Net()
    theirs = torch.optim.Adafactor(plain.parameters(), lr=0.1, weight_decay=0.05, d=1.5, maximize=True)
    ours = torch.optim.Adafactor(
        (model := Net()).parameters(), lr=0.1, weight_decay=0.05, d=1.5, maximize=True
    )
    settings = {"units": ["Net"], "device_memory": "16MiB", **PLACES[place], "chunk_elements": 65536}
    wrapped, optimizer = infinity.wrap(model, ours, config_for(tmp_path, **settings))
    run_net(plain, theirs, range(STEPS))
    run_net(wrapped, optimizer, range(STEPS))
    if place == "device" and ranks.DEVICE != "cpu":
        assert_near(state_of(wrapped), plain)  # by operators of the device, whose sums are rounded otherwise
        infinity.close(optimizer)
        return
    assert_equal(state_of(wrapped), {n: {"value": p.detach()} for n, p in plain.named_parameters()})
    saved, wanted = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    for index, state in wanted.items():
        assert saved[index].keys() == state.keys()
        assert all(torch.equal(saved[index][kind], value) for kind, value in state.items()), index
    infinity.close(optimizer)


def test_parameters_of_any_shape_are_updated(tmp_path: Path) -> None:
    plain = Shapes()
    theirs = torch.optim.Adafactor([p for p in plain.parameters() if p.numel()], lr=0.1)
    model = Shapes()
    wrapped, optimizer = infinity.wrap(
        model, torch.optim.Adafactor(model.parameters(), lr=0.1), config_for(tmp_path)
    )
    for step in range(STEPS):
        for each, made in ((plain, theirs), (wrapped, optimizer)):
            loss_of_shapes(each, step).backward()
            made.step()
            made.zero_grad()
    assert all(
        torch.equal(p, q)
        for p, q in zip(wrapped.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    infinity.close(optimizer)


@pytest.mark.parametrize("settings", [{}, {"split_master": True}], ids=str)
def test_bf16_has_the_same_bits_on_every_tier(settings: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for place in ("host", "nvme", "split", *(["device"] if ranks.DEVICE == "cpu" else [])):
        (tmp_path / place).mkdir()
        given = {**PLACES[place], "chunk_elements": 65536, "dtype": "bf16", **settings}
        model = Net()
        wrapped, optimizer = infinity.wrap(
            model, adafactor(model.parameters()), config_for(tmp_path / place, **given)
        )
        run_net_bf16(wrapped, optimizer, range(STEPS))
        found.append(state_of(wrapped))
        infinity.close(optimizer)
    for each in found[1:]:
        assert_equal(each, found[0])


def run_net_bf16(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        model(torch.randn(16, 192, generator=draw).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_an_update_without_memory_goes_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code has changed what it was given, and its state, when it has no memory."""
    plain = Net()
    theirs = adafactor(plain.parameters())
    run_net(plain, theirs, range(STEPS))
    model, config = Net(), config_for(tmp_path, **{**PLACES[place], "update": "sync"})
    wrapped, optimizer = infinity.wrap(model, adafactor(model.parameters()), config)
    inner, failed = Code._run, []

    def short(self: Any, values: torch.Tensor, *given: Any) -> Any:
        made = inner(self, values, *given)
        if values.numel() > 64 and len(failed) in (0, 5):
            failed.append("")
            raise MemoryError
        failed.append("")
        return made

    monkeypatch.setattr(Code, "_run", short)
    stopped = 0
    for step in range(STEPS):
        loss_of_net(wrapped, step).backward()
        try:
            optimizer.step()
        except OutOfMemoryError:
            stopped += 1
            optimizer.step()
        optimizer.zero_grad()
    assert stopped >= 1
    assert_equal(state_of(wrapped), {n: {"value": p.detach()} for n, p in plain.named_parameters()})
    infinity.close(optimizer)


def test_the_state_on_nvme_is_the_master_alone(tmp_path: Path) -> None:
    """A parameter that is one chunk is read once and written once, another one is read twice."""
    for cut, factor in ((1 << 20, 1), (1 << 16, 2)):
        model = nn.Linear(512, 512, bias=False)
        (folder := tmp_path / str(cut)).mkdir()
        config = config_for(folder, **{**ON_HOST, "optimizer_state": "nvme"}, chunk_elements=cut)
        model, optimizer = infinity.wrap(model, adafactor(model.parameters()), config)
        moved = []
        for _ in range(3):
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            infinity.flush(optimizer)
            stats = engine_of(optimizer).store.stats()
            moved.append([sum(s.bytes_read for s in stats), sum(s.bytes_written for s in stats)])
        assert moved[2][0] - moved[1][0] == factor * 4 * 512 * 512
        assert moved[2][1] - moved[1][1] == 4 * 512 * 512
        infinity.close(optimizer)


# -- what is refused --------------------------------------------------------------------------


def test_what_is_not_available_is_refused(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(ConfigError, match="Adafactor is not available with update"):
        infinity.wrap(model, adafactor(model.parameters()), config_for(tmp_path, update="delayed"))
    with pytest.raises(OptimizerTypeError, match="fp32"):
        infinity.wrap(
            model, adafactor(model.parameters()), config_for(tmp_path, optimizer_state_dtype="bf16")
        )
    with pytest.raises(BudgetError, match="the update of a matrix"):
        infinity.wrap(model, adafactor(model.parameters()), config_for(tmp_path, device_memory="1MiB"))
    wrapped, optimizer = infinity.wrap(model, adafactor(model.parameters()), config_for(tmp_path))
    run_net(wrapped, optimizer, range(1))
    infinity.close(optimizer)


WRONG: dict[str, Any] = {"row_var": [1.0], "step": -1.0, "col_var": torch.zeros(3)}


@pytest.mark.parametrize("wrong", ["lacks a factor", "another shape", "of AdamW", *WRONG])
def test_another_state_dict_is_refused(wrong: str, tmp_path: Path) -> None:
    model = Net()
    wrapped, optimizer = infinity.wrap(model, adafactor(model.parameters()), config_for(tmp_path))
    run_net(wrapped, optimizer, range(2))
    good = optimizer.state_dict()
    bad = copy.deepcopy(good)
    if wrong == "of AdamW":
        other = Net()
        adamw = torch.optim.AdamW(other.parameters())
        run_net(other, adamw, range(1))
        bad = adamw.state_dict()
    elif wrong == "another shape":
        bad["state"][0]["row_var"] = bad["state"][0]["row_var"].T
    elif wrong in WRONG:
        bad["state"][0][wrong] = WRONG[wrong]
    else:
        del bad["state"][0]["col_var"]
    with pytest.raises(StateDictError):
        optimizer.load_state_dict(bad)
    run_net(wrapped, optimizer, range(2, 3))
    wanted = state_of(wrapped)
    wrapped.load_state_dict(wrapped.state_dict())
    optimizer.load_state_dict(good)  # what was refused changed nothing
    assert all(
        torch.equal(a, b)
        for a, b in zip(good["state"][0].values(), optimizer.state_dict()["state"][0].values(), strict=True)
    )
    assert wanted.keys() == state_of(wrapped).keys()
    infinity.close(optimizer)


def test_a_wrong_option_is_named_and_may_be_corrected(tmp_path: Path) -> None:
    plain = Net()
    theirs = adafactor(plain.parameters())
    run_net(plain, theirs, range(2))
    model = Net()
    wrapped, optimizer = infinity.wrap(model, adafactor(model.parameters()), config_for(tmp_path))
    run_net(wrapped, optimizer, range(1))
    loss_of_net(wrapped, 1).backward()
    good, optimizer.param_groups[0]["eps"] = optimizer.param_groups[0]["eps"], 1e-3
    with pytest.raises(OptimizerTypeError, match=r"(?s)eps=0\.001.*TypeError.*correct the option"):
        optimizer.step()
    optimizer.param_groups[0]["eps"] = good
    optimizer.step()
    assert_equal(state_of(wrapped), {n: {"value": p.detach()} for n, p in plain.named_parameters()})
    infinity.close(optimizer)


def test_a_checkpoint_of_another_optimizer_begins_anew(tmp_path: Path) -> None:
    def wrapped(name: str, make: Any) -> Any:
        (tmp_path / name).mkdir()
        model = Net()
        return infinity.wrap(model, make(model.parameters()), config_for(tmp_path / name, **ON_HOST))

    model, optimizer = wrapped("a", torch.optim.AdamW)
    run_net(model, optimizer, range(2))
    infinity.save(optimizer, tmp_path / "saved")
    values = {k: v.clone() for k, v in model.state_dict().items()}
    infinity.close(optimizer)
    model, optimizer = wrapped("b", adafactor)
    run_net(model, optimizer, range(1))
    with pytest.raises(StateDictError, match="another optimizer"):
        infinity.load(optimizer, tmp_path / "saved")
    infinity.load(optimizer, tmp_path / "saved", strict=False)
    plain = Net()
    plain.load_state_dict(values)
    theirs = adafactor(plain.parameters())
    run_net(plain, theirs, range(2, 4))
    run_net(model, optimizer, range(2, 4))
    assert_equal(state_of(model), {n: {"value": p.detach()} for n, p in plain.named_parameters()})
    infinity.close(optimizer)


def test_a_checkpoint_that_lacks_factors_is_refused(tmp_path: Path) -> None:
    model = Net()
    wrapped, optimizer = infinity.wrap(model, adafactor(model.parameters()), config_for(tmp_path))
    run_net(wrapped, optimizer, range(1))
    path = Path(infinity.save(optimizer, tmp_path / "saved"))
    index = path / INDEX
    content = json.loads(index.read_bytes())["index"]
    del content["parameters"]["up.weight"]["factors"]["row_var"]
    inner = json.dumps(content).encode()
    crc = f"{crc32c(ctypes.addressof((ctypes.c_char * len(inner)).from_buffer_copy(inner)), len(inner)):08x}"
    index.write_bytes(b'{"crc32c":"' + crc.encode() + b'","index":' + inner + b"}\n")
    with pytest.raises(CorruptionError):
        infinity.load(optimizer, tmp_path / "saved")
    infinity.close(optimizer)
