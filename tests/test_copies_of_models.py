"""Casts, moves and copies of a wrapped model, and several models at once."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import infinity
from infinity.core.errors import GradientError, ParameterChangedError, ParameterError, ReleasedParameterError

from .offloaded import config_for, wrap_adamw
from .small_models import HeadModel, HolderModel, built, tokens, train, values, wrapped
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
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
    optimizer.step()
    optimizer.zero_grad()
    if parameters != "device":
        for other in (model.half, model.double, model.bfloat16, lambda: model.to(torch.float16)):
            with pytest.raises(ParameterChangedError, match="after `wrap`"):
                other()
    wanted, plain = built(HeadModel)
    train(wanted, plain, 1)
    model(tokens(1)).backward()
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


@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
def test_a_collator_that_holds_the_model(kind: str, tmp_path: Path) -> None:
    """With workers that get it pickled, as they do by default from Python 3.14 on."""
    model, optimizer = wrapped(tmp_path, parameters="host")

    def batches(held: Any, workers: int = 1) -> list[torch.Tensor]:
        context = kind if workers else None
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


def test_a_copy_of_gathered_modules_has_their_values(tmp_path: Path) -> None:
    """Such as one that is kept as an average."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = wrap_adamw(model, config_for(tmp_path), lr=1e-2)
    try:
        with infinity.gathered(model):
            average, whole = copy.deepcopy(model[1]), copy.deepcopy(model)
        with pytest.raises(ReleasedParameterError, match="state_dict"):
            copy.deepcopy(model[1])
        wanted = model.state_dict()
        assert torch.equal(average.weight, wanted["1.weight"])
        assert torch.equal(average.bias, wanted["1.bias"])
        assert torch.equal(whole(torch.ones(2, 8)), model(torch.ones(2, 8)))
        assert all(torch.equal(v, wanted[n]) for n, v in whole.state_dict().items())
    finally:
        infinity.close(optimizer)
