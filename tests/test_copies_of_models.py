"""Casts, moves and copies of a wrapped model, several models at once, and what others wrap around one."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader

import infinity
from infinity.core.errors import (
    GradientError,
    ParameterChangedError,
    ParameterError,
    ReleasedParameterError,
    WrapError,
)

from .offloaded import config_for
from .small_models import HeadModel, HolderModel, built, tokens, train, trained, values, wrapped
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_casts_and_moves_that_change_nothing_work(parameters: str, tmp_path: Path) -> None:
    """What Lightning's teardown calls; others are refused, and training goes on."""
    model, optimizer = wrapped(tmp_path, parameters=parameters)
    model(tokens(0)).backward()
    for same in (
        *(model.cpu, model.float, lambda: model.to("cpu"), lambda: model.to(torch.float32)),
        *(lambda: model.type(torch.float32), lambda: model.to(tokens(0).float())),
        lambda: model.type("torch.FloatTensor"),
    ):
        assert same() is model
    with pytest.raises((ParameterChangedError, GradientError)):
        model.share_memory()
    if parameters != "device":
        for other in (model.half, model.double, lambda: model.to(torch.float16), lambda: model.to("meta")):
            with pytest.raises(ParameterChangedError, match="after `wrap`"):
                other()
    optimizer.step()
    wanted, plain = built(HeadModel)
    train(wanted, plain, 1)
    assert_close(values(model), [p.detach() for p in wanted.parameters()])
    infinity.close(model)


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_copies_of_a_wrapped_model_say_what_to_do_instead(parameters: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, parameters=parameters)
    train(model, optimizer)
    state = model.state_dict()
    for copy_of in (copy.deepcopy, pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
        for thing in (model, model.blocks, model.head, optimizer):
            if parameters == "device" and copy_of is copy.deepcopy and thing is not optimizer:
                continue  # the values are there
            with pytest.raises(ParameterError, match="state_dict"):
                copy_of(thing)
    plain, _ = built(HeadModel)
    plain.load_state_dict(state)  # the first cure
    assert_close([p.detach() for p in plain.parameters()], values(model))
    found = values(model)
    infinity.unwrap(model)  # the second
    infinity.close(model)  # as in a `finally`
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert_close([p.detach() for p in copied.parameters()], found)
        train(copied, torch.optim.AdamW(copied.parameters()))


class Collate:
    """A collator that holds something, as those of transformers hold a model."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) + len(list(self.held.parameters()))


@pytest.mark.integration
def test_a_collator_that_holds_the_model(tmp_path: Path) -> None:
    """With workers that get it pickled, as they do by default from Python 3.14 on."""
    model, optimizer = wrapped(tmp_path, parameters="host")

    def batches(held: Any, workers: int = 1) -> list[torch.Tensor]:
        context = "forkserver" if workers else None
        loader = DataLoader(
            torch.ones(2, 3), collate_fn=Collate(held), num_workers=workers, multiprocessing_context=context
        )
        return list(loader)

    for held in (model, model.head, model.head.weight, optimizer):
        with pytest.raises(ReleasedParameterError) as caught:
            batches(held)
        cure = str(caught.value.cure)
        assert "num_workers=0" in cure
        assert "without values" in cure
        assert not re.search("EMA|copy_to", cure)
    wanted = batches(model, 0)
    with torch.device("meta"):
        empty, _ = built(HeadModel)
    assert torch.equal(batches(empty)[0], wanted[0])
    with pytest.raises(ReleasedParameterError, match=r"save its `state_dict\(\)`") as caught:
        pickle.dumps(model)
    assert "EMA" not in str(caught.value.cure)
    infinity.close(optimizer)


def test_gathered_takes_parameters_of_several_models(tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
    student, _ = wrapped(tmp_path / "student")
    teacher, _ = wrapped(tmp_path / "teacher", HolderModel)
    pairs = list(zip(student.blocks.parameters(), teacher.blocks.parameters(), strict=True))
    with infinity.gathered([p for pair in pairs for p in pair], write=True), torch.no_grad():
        for p, q in pairs:
            p.add_(1)
            q.lerp_(p, 0.5)
    for p, q in pairs:
        with infinity.gathered([p, q]):
            p.detach(), q.detach()
    one, two = built(HeadModel)[0], built(HolderModel)[0]
    for p, q in zip(one.blocks.parameters(), two.blocks.parameters(), strict=True):
        p.data.add_(1)
        q.data.lerp_(p.data, 0.5)
    assert_close(values(student), [p.detach() for p in one.parameters()])
    assert_close(values(teacher), [p.detach() for p in two.parameters()])
    infinity.close(student)
    infinity.close(teacher)


# -- other wrappers -------------------------------------------------------------------------------


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


def test_the_optimizer_from_before_wrap_says_which_to_use(tmp_path: Path) -> None:
    model, old = built(HeadModel)
    model, optimizer = infinity.wrap(model, old, config_for(tmp_path))
    model(tokens(0)).backward()
    for other in (old, torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=1.0)):
        with pytest.raises(WrapError, match=r"`offloaded\(Trainer\)` of infinity"):
            other.step()
    for call in (old.state_dict, lambda: old.load_state_dict(optimizer.state_dict())):
        with pytest.raises(WrapError, match="the optimizer that `wrap` returned"):
            call()
    with pytest.raises(WrapError, match="has taken over the state"):
        get_optimizer_state_dict(model, old)
    for set_to_none in (False, True):  # means the same
        old.zero_grad(set_to_none)
        for p in model.parameters():
            assert (p.grad is None) == set_to_none
            assert set_to_none or not infinity.gradient(p).any()
    assert_close([*train(model, optimizer), *values(model)], [*train(*built(HeadModel)), *trained()])
    infinity.close(model)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    address = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=address)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_wrappers_are_refused_on_either_side(process_group: None, tmp_path: Path) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    config = config_for(tmp_path)
    model, optimizer = built(HeadModel)
    around: Any = DistributedDataParallel(model)
    with pytest.raises(WrapError, match=r"model\.module; for several ranks .* Config\(zero_stage=0\)"):
        infinity.wrap(around, optimizer, config)
    model, optimizer = infinity.wrap(around.module, optimizer, config)  # the cure
    with pytest.raises(WrapError, match="DistributedDataParallel does not support a wrapped model"):
        DistributedDataParallel(model)
    train(model, optimizer, 1)
    infinity.close(model)

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded, _ = built(HeadModel)
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(WrapError, match="DTensor"):
        infinity.wrap(sharded, torch.optim.AdamW(sharded.parameters()), config)
    model, _ = wrapped(tmp_path)
    with pytest.raises(ReleasedParameterError, match="is released") as caught:
        fully_shard(model, mesh=mesh)
    assert "to the model that `infinity.unwrap(model)` returns" in str(caught.value.cure)
    infinity.close(model)
    model, _ = wrapped(tmp_path)
    assert isinstance(fully_shard(infinity.unwrap(model), mesh=mesh), FSDPModule)  # the cure
    infinity.close(model)
