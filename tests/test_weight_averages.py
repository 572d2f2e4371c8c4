"""`copy_to`, and the averages of weights that are kept with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ParameterChangedError, ParameterError, StateDictError

from .offloaded import ON_DEVICE, ON_HOST, config_for
from .ranks import all_well, run_ranks
from .small_net import build, tokens, train
from .test_ranks import HEAD, LOOP, of_stage

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES: dict[str, dict[str, Any]] = {
    **{"device": ON_DEVICE, "host": ON_HOST, "nvme": {}},
    "split": {"parameters": {"device": 0.5, "nvme": 0.5}, "optimizer_state": {"host": 0.5, "nvme": 0.5}},
}


def assert_equal(found: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    state = found.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name], value.to(state[name].dtype)), name


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The values that `unwrap` would give, by name."""
    engine = engine_of(model)
    values = engine.states.values_of(list(engine.params.values()))
    named = {n: values[engine.params[p]] for n, p in model.named_parameters(remove_duplicate=False)}
    return {**named, **dict(model.named_buffers())}


@pytest.mark.parametrize(
    ("place", "dtype", "update"),
    [
        ("device", "bf16", "delayed"),
        ("host", "fp32", "overlap"),
        ("nvme", "bf16", "delayed"),
        ("split", "fp32", "sync"),
    ],
)
def test_a_copy_has_the_newest_values(place: str, dtype: str, update: str, tmp_path: Path) -> None:
    model, adam = build()
    model.blocks[1].requires_grad_(False)
    plain, narrow = copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)
    plain.blocks[0].up.weight.data = plain.blocks[0].up.weight.data.t().contiguous().t()
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    more = {"delay_warmup_steps": 1} if update == "delayed" else {}
    config = config_for(tmp_path, dtype=dtype, update=update, **PLACES[place], **more)  # type: ignore[arg-type]
    model, optimizer = infinity.wrap(model, adam, config)
    try:
        for _ in range(2):
            train(model, optimizer, 2)
            model.scale.mul_(1.5)
            versions = [p._version for p in plain.parameters()]
            infinity.copy_to(model, plain)
            assert all(a != p._version for a, p in zip(versions, plain.parameters(), strict=True))
            assert_equal(plain, masters(model))
            infinity.copy_to(model, narrow)
            assert_equal(narrow, {n: v.to(torch.bfloat16) for n, v in model.state_dict().items()})
            assert plain.scale == model.scale
        assert not plain.blocks[1].up.weight.requires_grad
        infinity.copy_to(model.blocks[2], plain.blocks[0])  # parts
        assert torch.equal(plain.blocks[0].up.weight, masters(model)["blocks.2.up.weight"])
        with infinity.gathered(model.head.weight, write=True), torch.no_grad():
            model.head.weight.fill_(100)
        infinity.copy_to(model, plain)
        assert (plain.embed.weight == 100).all()
        assert train(model, optimizer, 1)
    finally:
        infinity.close(optimizer)


def test_a_copy_of_a_model_of_inference_to_names_that_are_not_tied(tmp_path: Path) -> None:
    plain, wanted = build(1)[0], build()[0]
    plain.head.weight = nn.Parameter(torch.zeros_like(plain.head.weight, dtype=torch.bfloat16))
    model = infinity.inference(build()[0], config_for(tmp_path))
    infinity.copy_to(model, plain)
    assert_equal(plain, wanted.state_dict())
    infinity.close(model)


def test_what_cannot_be_copied_is_refused_before_anything_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    model, optimizer = infinity.wrap(*build(), config_for(tmp_path / "a"))
    other, _ = infinity.wrap(*build(), config_for(tmp_path / "b"))
    lacking, larger, more, on_meta = (build(1)[0] for _ in range(4))
    del lacking.unused
    larger.unused = nn.Linear(3, 3)
    more.more = nn.Linear(3, 3)
    before = copy.deepcopy(larger.state_dict())
    for wrong, words in (
        (lacking, r"unused.*no such tensor"),
        (larger, r"unused.*shape \(3, 3\)"),
        (more, r"'more\.(weight|bias)'"),
        (on_meta.to("meta"), "meta device"),
        (other, "a parameter of a wrapped model"),
    ):
        with pytest.raises(StateDictError, match=rf"(?s){words}"):
            infinity.copy_to(model, wrong)
    assert all(torch.equal(v, before[n]) for n, v in larger.state_dict().items())
    with infinity.gathered(model, write=True):
        with pytest.raises(ParameterError, match="leave"):
            infinity.copy_to(model, build(1)[0])
    with pytest.raises(infinity.InfinityError, match="belongs to no wrapped model"):
        infinity.copy_to(build()[0], build(1)[0])
    plain = build(1)[0]
    handle = model.blocks[1].register_forward_hook(lambda *_: infinity.copy_to(model, plain))
    with pytest.raises(ParameterError, match="a forward under way"):
        model(tokens())
    handle.remove()
    handle = model.embed.weight.register_hook(lambda grad: infinity.copy_to(model, plain))
    with pytest.raises(ParameterError, match="a backward under way"):
        model(tokens()).backward()
    handle.remove()
    model.extra = nn.Linear(3, 3)
    with pytest.raises(ParameterChangedError, match="extra"):
        infinity.copy_to(model, build(1)[0])
    del model.extra
    assert train(model, optimizer, 1)
    infinity.close(optimizer)
    infinity.close(other)


def test_each_rank_has_the_whole(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
import copy
plain, half = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
plain.first.weight.data = plain.first.weight.data.t().contiguous().t()
"""
        + LOOP
        + """
for _ in range(2):
    step()
    infinity.copy_to(model, plain)
    wanted = model.state_dict()
    assert all(torch.equal(v, wanted[n]) for n, v in plain.state_dict().items())
    infinity.copy_to(model, half)
    assert all(torch.equal(v, wanted[n].bfloat16()) for n, v in half.state_dict().items())
if rank == 1:
    del half.last
try:
    infinity.copy_to(model, half)
except infinity.InfinityError as error:
    assert "last.weight" in str(error), error
else:
    raise AssertionError("it was copied")
step()
infinity.close(model)
"""
    )
    all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, 3)), seconds=200))
