"""`Config(split_master=True)`: a master is the bf16 copy and its lower 16 bits, and loses nothing.
test_optimizers.py has its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ConfigError, ParameterError
from infinity.core.sizes import Tier
from infinity.hardware import adam_reference, cpu_adam, halves
from infinity.hardware.cpu_adam import SGD, Adam, Options

from .device_bits import same, values
from .models import case
from .offloaded import ON_NVME, RESIDENT, config_for, wrap_adamw
from .test_optimizers import PLACES, State, assert_equal, go_on, state_of
from .test_rules import ISAS, RULE_OPTIONS, segment
from .whole import ALL_OPTIMIZERS

BF16: dict[str, Any] = {"dtype": "bf16", "split_master": True}
SPLIT_PLACES = {**PLACES, "resident": RESIDENT}
pytestmark = pytest.mark.usefixtures("kernel_as_before")


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy = torch.empty(master.numel(), dtype=torch.bfloat16)
    low = torch.empty(master.numel(), dtype=torch.int16)
    halves.split(master, copy, low)
    return copy, low


def join(copy: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return halves.join(copy, low, torch.empty(low.numel()))


def check_lossless(upper: range, at_once: int) -> None:
    """Each fp32 value whose upper 16 bits are in `upper` comes back, in plain torch and through each kernel,
    whose update of it by nothing changes nothing."""
    grad = torch.zeros(at_once << 16, dtype=torch.bfloat16)
    for begin in range(upper.start, upper.stop, at_once * upper.step):
        highs = torch.arange(begin, min(begin + at_once * upper.step, upper.stop), upper.step)
        wide = (highs[:, None] << 16) + torch.arange(1 << 16)
        bits = torch.where(wide >= 1 << 31, wide - (1 << 32), wide).int().flatten()
        given, nan = bits.view(torch.float32), bits.view(torch.float32).isnan()
        wanted = torch.where(nan, 0x7FC00000, bits)
        copy, low = split(given)
        away = ((wanted + 0x8000) >> 16).to(torch.int16)
        assert torch.equal(copy.view(torch.int16), away)
        assert torch.equal(copy.isnan(), nan)
        assert torch.equal(join(copy, low).view(torch.int32), wanted)
        for isa in ISAS:
            cpu_adam.set_isa(isa)
            mine, lower = copy.clone(), low.clone()
            still = segment(given.numel(), SGD(0.0, 0.0, False), 1, lr=0.0, weight_decay=0.0)
            cpu_adam.update_segments(lower, (), grad[: given.numel()], mine, [still])
            assert torch.equal(mine.view(torch.int16), copy.view(torch.int16)), isa
            assert torch.equal(lower, low), isa


def test_a_value_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_SLICE", 1000)
    check_lossless(range(0, 1 << 16, 509), 8)
    monkeypatch.undo()
    for edge in (0x0000, 0x007F, 0x7F7E, 0x7FFE, 0x8000, 0xFF7F, 0xFFFE):
        check_lossless(range(edge, edge + 2), 2)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize(("options", "count"), RULE_OPTIONS, ids=str)
def test_an_update_is_that_of_the_whole_master(options: Options, count: int, moments: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}[moments]
    if isinstance(options, Adam) and moments == "8bit":  # 0 / 0: a NaN with another sign has another code
        options = options._replace(eps=1e-8)
    for n in (1, 256, 2_007):
        master = values(n)
        if n > 7 and moments != "8bit":  # there NaNs with another sign have another code
            master[:4] = torch.tensor([float("inf"), float("nan"), -0.0, 1e-42])
        copy, low = split(master)
        kept = [torch.zeros(n, dtype=dtype) for _ in range(count)]
        kept += [torch.zeros(-(-n // 256)) for _ in range(count) if moments == "8bit"]
        states = {i: (low.clone(), copy.clone(), [k.clone() for k in kept]) for i in ("torch", *ISAS)}
        whole = master.clone(), [k.clone() for k in kept]
        for step in (1, 2, 9):
            grad = values(n, 20 + step).to(torch.bfloat16 if step > 1 else torch.float32)
            cuts = [segment(n, options, step)]
            adam_reference.reference_segments(*whole, grad, None, cuts)
            copy, low = split(whole[0])
            whole[0].copy_(join(copy, low))  # one NaN for all
            for isa, (mine, out, mines) in states.items():
                call: Any = adam_reference.reference_segments
                if isa != "torch":
                    cpu_adam.set_isa(isa)
                    call = cpu_adam.update_segments
                call(mine, mines, grad, out, cuts)
                assert torch.equal(mine, low), (isa, n, step)
                assert torch.equal(out.view(torch.int16), copy.view(torch.int16)), (isa, n, step)
                for a, b in zip(mines, whole[1], strict=True):
                    assert same(a, b), (isa, n, step)


def test_a_split_master_needs_its_copy() -> None:
    low, grad = torch.zeros(8, dtype=torch.int16), torch.zeros(8)
    for out in (None, torch.zeros(8), torch.zeros(8, dtype=torch.float16)):
        with pytest.raises(ParameterError, match="no upper halves"):
            cpu_adam.update_segments(low, (), grad, out, [segment(8, SGD(0.0, 0.0, False), 1)])


class Given(nn.Module):
    """Its gradients are given: they do not depend on its parameters, nor on how these are rounded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(300, 250)
        self.second = nn.Linear(250, 333)

    def forward(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for number, param in enumerate(self.parameters()):
            draw = torch.Generator().manual_seed(100 * step + number)
            weights = torch.randn(param.shape, generator=draw).to(param.dtype)
            total = total + (param * weights).sum(dtype=torch.float32)
        return total


@pytest.mark.parametrize(
    ("name", "dtype", "place"),
    [
        *(("adamw", "fp32", "host"), ("adamw", "bf16", "nvme"), ("adamw", "8bit", "resident")),
        *(("sgd", "fp32", "device"), ("muon", "fp32", "split"), ("adamw", "8bit", "backward")),
    ],
)
def test_masters_are_those_of_a_whole_one(name: str, dtype: str, place: str, tmp_path: Path) -> None:
    found: list[State] = []
    for number, whole in enumerate((True, False)):
        more = {"dtype": "bf16", "split_master": not whole, "optimizer_state_dtype": dtype}
        more |= SPLIT_PLACES[place]
        (tmp_path / f"{number}").mkdir()
        model = Given()
        config = config_for(tmp_path / f"{number}", **more)
        model, optimizer = infinity.wrap(model, ALL_OPTIMIZERS[name](model.parameters()), config)
        for step in range(2 if name == "muon" else 4):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(state_of(model))
        infinity.close(optimizer)
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("place", ["device", "nvme", "resident"])
def test_an_edit_keeps_the_lower_bits_and_a_load_has_none(place: str, tmp_path: Path) -> None:
    model, optimizer = wrap_adamw(case("gpt").model, config_for(tmp_path, **BF16, **SPLIT_PLACES[place]))
    go_on(model, optimizer, 0, 2)
    before = state_of(model)
    name, param = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)
    with infinity.gathered([param], write=True):
        param.data[0].fill_(0.75)
    after = state_of(model)
    for other, kinds in before.items():
        if other == name:
            assert torch.equal(after[other]["value"][1:], kinds["value"][1:])
        else:
            assert torch.equal(after[other]["value"], kinds["value"])
    edited = after[name]["value"][0]
    assert (edited - 0.75).abs().max() <= 2**-9
    assert (edited.bfloat16() == 0.75).all()
    values = {n: torch.randn(v.shape).bfloat16() for n, v in model.state_dict().items() if v.dim() == 2}
    model.load_state_dict(values, strict=False)
    loaded = state_of(model)
    for other, kinds in after.items():
        value = values[other].float() if other in values else kinds["value"]
        kept = split(kinds["value"].reshape(-1))[0].view(value.shape).float() == value
        wanted = torch.where(kept, kinds["value"], value)
        assert torch.equal(loaded[other]["value"], wanted), other
    with infinity.gathered([param], write=True):
        param.data[0, :3] = torch.tensor([0.0, -0.0, float("inf")])
    exact = state_of(model)[name]["value"][0, :3]
    assert exact.tolist() == [0.0, 0.0, float("inf")]
    go_on(model, optimizer, 2, 3)
    infinity.close(optimizer)


@pytest.mark.parametrize("place", ["device", "nvme", "resident"])
def test_a_load_in_either_order_keeps_the_lower_bits(place: str, tmp_path: Path) -> None:
    model, optimizer = wrap_adamw(
        case("gpt").model, config_for(tmp_path, **BF16, **SPLIT_PLACES[place]), lr=1e-4
    )
    go_on(model, optimizer, 0, 3)
    wanted, state = state_of(model), optimizer.state_dict()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values)
    assert_equal(state_of(model), wanted)
    go_on(model, optimizer, 3, 5)
    optimizer.load_state_dict(state)
    model.load_state_dict(values)
    assert_equal(state_of(model), wanted)
    infinity.close(optimizer)


def test_the_bytes_of_a_step(tmp_path: Path) -> None:
    """6 + 6 bytes for each parameter on NVMe with moments in bf16, and 4.03 + 4.03 with 8 bits; the copy is
    read by forward, backward and update, and written once; gradients are on the host."""
    places = {**ON_NVME, "gradients": "host"}
    for dtype, state in (("fp32", 10), ("bf16", 6), ("8bit", 4 + 8 / 256)):
        more = {**BF16, "optimizer_state_dtype": dtype, **places}
        model, optimizer = wrap_adamw(nn.Linear(512, 512, bias=False), config_for(tmp_path, **more))
        footprint, numel = engine_of(model).footprint, 512 * 512
        assert footprint.nvme["optimizer state"] == state * numel or dtype == "8bit"
        slack = 4096 * 4 * 4
        assert footprint.nvme_read_per_step - (2 * 2 + 2 + state) * numel <= slack
        assert footprint.nvme_written_per_step - (2 + state) * numel <= slack
        infinity.close(optimizer)


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    for settings in ({"dtype": "fp32"}, {"dtype": "fp16"}, {"dtype": "bf16", "update": "delayed"}):
        with pytest.raises(ConfigError, match="split_master=True cannot be used") as caught:
            config_for(tmp_path, split_master=True, **settings)
        assert "leave split_master out" in str(caught.value)
    with pytest.raises(ConfigError, match="split_master=True cannot be used"):
        wrap_adamw(nn.Linear(8, 8), config_for(tmp_path, split_master=True, dtype=None))
    model, optimizer = wrap_adamw(
        nn.Linear(8, 8).bfloat16(), config_for(tmp_path, split_master=True, dtype=None)
    )
    assert engine_of(model).tiers.plans[0].is_split
    assert engine_of(model).tiers.plans[0].state_tier is Tier.NVME
    infinity.close(optimizer)
