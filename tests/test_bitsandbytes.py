"""State dicts of bitsandbytes as those of torch's optimizers, and back: recorded ones, and, where it is
installed, bitsandbytes itself (bitsandbytes_states.py, which has recorded them)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import StateDictError
from infinity.optim import Lion, from_bitsandbytes, to_bitsandbytes
from infinity.optim.bitsandbytes import dynamic_map

from .bitsandbytes_states import NESTED, digest
from .command_line import python
from .offloaded import ON_HOST, config_for

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("bitsandbytes.json").read_text())
KINDS = {"AdamW8bit": torch.optim.AdamW, "Lion8bit": Lion}


def saved(name: str, *, nested: bool = False) -> dict[str, Any]:
    """Return a recorded state dict; `nested`: as newer versions have it."""
    states = {}
    for index, state in RECORDED[name]["state"].items():
        quantized = {}
        for key, (dtype, shape, text) in ((k, v) for k, v in state.items() if k != "step"):
            kind = getattr(torch, dtype.removeprefix("torch."))
            quantized[key] = torch.frombuffer(bytearray.fromhex(text), dtype=kind).view(shape)
            if key.startswith("absmax"):
                quantized[f"qmap{key[-1]}"] = dynamic_map(signed=key[-1] == "1")
        more = {NESTED: quantized} if nested else quantized
        states[int(index)] = {"step": state["step"], **more}
    return {"state": states, "param_groups": RECORDED[name]["param_groups"]}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found["state"][index][key], value, rtol=0, atol=0)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_recorded_states_have_their_values_and_come_back(name: str, nested: bool) -> None:
    ours = from_bitsandbytes(saved(name, nested=nested))
    assert {k: digest(v) for k, v in ours["state"][0].items() if k != "step"} == RECORDED[name]["values"]
    assert ours["state"][0]["step"] == 3
    assert_same(to_bitsandbytes(ours, min_8bit_size=7), saved(name))


@pytest.mark.parametrize("form", ["fp32", "8bit"])
@pytest.mark.parametrize("name", KINDS)
def test_a_wrapped_optimizer_goes_on_from_them(name: str, form: str, tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(5, 130)), nn.Parameter(torch.zeros(2, 3))])
    optimizer = KINDS[name](model.parameters(), lr=1.0)
    config = config_for(tmp_path, **ON_HOST, optimizer_state_dtype=form)
    _, wrapped = infinity.wrap(model, optimizer, config)
    wrapped.load_state_dict(from_bitsandbytes(saved(name)))
    loaded = wrapped.state_dict()
    infinity.close(wrapped)
    assert loaded["param_groups"][0]["lr"] == 1e-2
    if form == "fp32":
        back = to_bitsandbytes(loaded, min_8bit_size=7)["state"]
        wanted = saved(name)["state"]
        assert all(torch.equal(back[i][k], v) for i in wanted for k, v in wanted[i].items() if k != "step")
        assert name != "AdamW8bit" or all(back[i]["step"] == 3 for i in wanted)
    else:
        for index, state in from_bitsandbytes(saved(name))["state"].items():
            for key in state.keys() - {"step"}:
                apart = (loaded["state"][index][key] - state[key]).abs()
                assert apart.le(state[key].abs() / 15 + state[key].abs().max() / (1 << 15)).all()


def test_the_map_has_the_bits_of_theirs() -> None:
    maps = {name: digest(dynamic_map(signed=name == "signed")) for name in ("signed", "unsigned")}
    assert maps == RECORDED["maps"]


@pytest.mark.parametrize("block", [256, 2048, 64])
@pytest.mark.parametrize("numel", [1, 255, 257, 4096, (1 << 20) + 5])
def test_any_codes_come_back(numel: int, block: int) -> None:
    draw = torch.Generator().manual_seed(numel)
    count = -(-numel // block)
    state: dict[str, Any] = {"step": 7}
    for number, signed in ((1, True), (2, False)):
        codes = torch.randint(0, 256, (numel,), generator=draw, dtype=torch.uint8)
        # The largest of a block has the last code, or is negative and has the first.
        codes[::block] = (
            torch.randint(0, 2, (count,), generator=draw).to(torch.uint8) * 255 if signed else 255
        )
        state[f"state{number}"], state[f"qmap{number}"] = codes, dynamic_map(signed=signed)
        state[f"absmax{number}"] = torch.randn(count, generator=draw).mul(20).exp().clamp(1e-30, 1e30)
    groups = [{"params": [0], "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    theirs = {"state": {0: state}, "param_groups": groups}
    ours = from_bitsandbytes(theirs)
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        scales = state[f"absmax{number}"].repeat_interleave(block)[:numel]
        assert torch.equal(
            ours["state"][0][name], state[f"qmap{number}"][state[f"state{number}"].int()] * scales
        )
    if block == 256:
        back = to_bitsandbytes(ours, min_8bit_size=1)["state"][0]
        assert all(torch.equal(back[k], state[k]) for k in state if k.startswith("state"))
        decoded = from_bitsandbytes(to_bitsandbytes(ours, min_8bit_size=1))["state"][0]
        assert all(torch.equal(decoded[k], ours["state"][0][k]) for k in ("exp_avg", "exp_avg_sq"))


def test_other_moments_become_the_nearest_codes() -> None:
    draw = torch.Generator().manual_seed(0)
    moment = torch.randn(3000, generator=draw) * torch.randn(3000, generator=draw).mul(3).exp()
    moments = {"step": torch.tensor(2.0), "exp_avg": moment, "exp_avg_sq": moment.square()}
    theirs = to_bitsandbytes({"state": {0: moments, 1: {}}, "param_groups": []}, min_8bit_size=3000)["state"]
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        scales = theirs[0][f"absmax{number}"]
        assert torch.equal(scales, torch.stack([b.abs().max() for b in moments[name].split(256)]))
        each = scales.repeat_interleave(256)[:3000].double()
        distances = (
            theirs[0][f"qmap{number}"].double() * each[:, None] - moments[name].double()[:, None]
        ).abs()
        assert torch.equal(distances.argmin(1), theirs[0][f"state{number}"].long())
    assert theirs[0]["step"] == 2
    assert theirs[1] == {}


def theirs(**change: Any) -> dict[str, Any]:
    given = saved("AdamW8bit")
    given["state"][0] = {k: v for k, v in {**given["state"][0], **change}.items() if v is not None}
    return given


def ours(group: Any = None, **change: Any) -> dict[str, Any]:
    given = from_bitsandbytes(saved("AdamW8bit"))
    state = {k: v for k, v in {**given["state"][0], **change}.items() if v is not None}
    return {"state": {0: state}, "param_groups": [{**given["param_groups"][0], **(group or {})}]}


def of_radam() -> dict[str, Any]:
    """Its moments have the names of AdamW's."""
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.RAdam([param])
    optimizer.step()
    return optimizer.state_dict()


ADEMAMIX = {
    **saved("AdamW8bit"),
    "param_groups": [{"params": [0, 1], "betas": (0.9, 0.99, 0.9), "alpha": 5.0}],
}


@pytest.mark.parametrize(
    ("convert", "given", "found"),
    [
        (from_bitsandbytes, {"model": {}}, "no state dict of an optimizer"),
        (to_bitsandbytes, [], "no state dict of an optimizer"),
        (from_bitsandbytes, ADEMAMIX, "alpha=5.0"),
        (from_bitsandbytes, ours(), "not of bitsandbytes"),
        (from_bitsandbytes, theirs(absmax1=None), "without absmax of parameter 0"),
        (from_bitsandbytes, theirs(qmap2=None), "without qmap"),
        (from_bitsandbytes, theirs(state1=torch.zeros(5, 130, dtype=torch.int8)), "torch.int8"),
        (from_bitsandbytes, theirs(absmax1=torch.ones(4)), "650 codes.* 4 blocks"),
        (from_bitsandbytes, theirs(absmax1=torch.ones(0)), "650 codes.* 0 blocks"),
        (from_bitsandbytes, theirs(qmap1=torch.ones(16)), "16 values"),
        (from_bitsandbytes, theirs(state1=torch.zeros(130, 5, dtype=torch.uint8).t()), r"stride \(1, 5\)"),
        (from_bitsandbytes, theirs(gnorm_vec=torch.zeros(100)), "percentile_clipping=100"),
        (from_bitsandbytes, theirs(unorm_vec=torch.zeros(1)), "max_unorm=0"),
        (to_bitsandbytes, saved("AdamW8bit"), "no state of AdamW or Lion"),
        (to_bitsandbytes, ours(step=None), "no state of AdamW or Lion"),
        (to_bitsandbytes, ours(max_exp_avg_sq=torch.zeros(5, 130)), "no state of AdamW or Lion"),
        (to_bitsandbytes, ours(exp_avg=torch.full((5, 130), torch.inf)), "exp_avg of parameter 0"),
        (to_bitsandbytes, ours({"maximize": True}), "maximize=True in param group 0"),
        (to_bitsandbytes, of_radam(), "capturable=False"),
        (to_bitsandbytes, ours(mu_product=torch.tensor(0.9)), "no state of AdamW or Lion"),
        (to_bitsandbytes, ours(exp_avg_sq=None, exp_inf=torch.ones(5, 130)), "no state of AdamW or Lion"),
        (to_bitsandbytes, ours({"decoupled_weight_decay": False}), "weight_decay=0.1"),
    ],
)
def test_what_is_not_understood_is_refused(convert: Callable[[Any], Any], given: Any, found: str) -> None:
    with pytest.raises(StateDictError, match=found):
        convert(given)


@pytest.mark.processes
@pytest.mark.ecosystem
def test_bitsandbytes_resumes_with_the_same_bits() -> None:
    path = [Path(sys.prefix) / "heads", *map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not any((place / "bitsandbytes").is_dir() for place in path) and not os.environ.get("CI"):
        pytest.skip("needs bitsandbytes: `make test-all` installs it")
    done = python("-m", "tests.bitsandbytes_states", env={"PYTHONPATH": os.pathsep.join(map(str, path))})
    assert (done.returncode, done.stdout) == (0, "7 optimizers\n"), done.stderr[-4000:]
