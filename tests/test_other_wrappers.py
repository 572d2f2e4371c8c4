"""Lazy modules, optimizers from before `wrap`, and wrappers of torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import ReleasedParameterError, WrapError

from .offloaded import config_for
from .small_models import HeadModel, built, tokens, train, trained, values, wrapped
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


def test_lazy_modules_are_refused_and_the_cure_works(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(WrapError, match=r"model\(batch\)"):
        infinity.wrap(model, optimizer, config_for(tmp_path))
    batch = torch.randn(2, 3)
    with torch.no_grad():
        model(batch)
    model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path))  # type: ignore[assignment]
    model(batch).sum().backward()
    optimizer.step()
    infinity.close(model)


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_the_optimizer_from_before_wrap_says_which_to_use(parameters: str, tmp_path: Path) -> None:
    model, old = built(HeadModel)
    model, optimizer = infinity.wrap(model, old, config_for(tmp_path, parameters=parameters))
    model(tokens(0)).backward()
    for other in (old, torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=1.0)):
        with pytest.raises(WrapError, match=r"`offloaded\(Trainer\)` of infinity"):
            other.step()
    for call in (old.state_dict, lambda: old.load_state_dict(optimizer.state_dict())):
        with pytest.raises(WrapError, match="the optimizer that `wrap` returned"):
            call()
    for set_to_none in (False, True):  # means the same
        old.zero_grad(set_to_none)
        for p in model.parameters():
            assert (p.grad is None) == set_to_none
            assert set_to_none or not infinity.gradient(p).any()
    assert_close([*train(model, optimizer), *values(model)], [*train(*built(HeadModel)), *trained()])
    infinity.close(model)


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    address = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=address)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_distributed_wrappers_are_refused_on_either_side(
    parameters: str, process_group: Any, tmp_path: Path
) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    config = config_for(tmp_path, parameters=parameters)
    model, optimizer = built(HeadModel)
    around: Any = DistributedDataParallel(model)
    with pytest.raises(WrapError, match=r"model\.module; for several ranks .* Config\(zero_stage=0\)"):
        infinity.wrap(around, optimizer, config)
    model, optimizer = infinity.wrap(around.module, optimizer, config)  # the cure
    with pytest.raises(WrapError, match="DistributedDataParallel does not support a wrapped model"):
        DistributedDataParallel(model)
    assert_close([*train(model, optimizer), *values(model)], [*train(*built(HeadModel)), *trained()])
    infinity.close(model)

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded, _ = built(HeadModel)
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(WrapError, match="DTensor"):
        infinity.wrap(sharded, torch.optim.AdamW(sharded.parameters()), config)
    if parameters == "nvme":
        model, _ = wrapped(tmp_path)
        with pytest.raises(ReleasedParameterError, match="is released") as caught:
            fully_shard(model, mesh=mesh)
        assert "to the model that `infinity.unwrap(model)` returns" in str(caught.value.cure)
        infinity.close(model)
        model, _ = wrapped(tmp_path)
        assert isinstance(fully_shard(infinity.unwrap(model), mesh=mesh), FSDPModule)  # the cure
        infinity.close(model)
