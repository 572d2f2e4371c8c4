"""What a model's state dict shares, and what its copies are charged for."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ParameterChangedError
from infinity.core.sizes import Tier

from .offloaded import config_for
from .small_models import HeadModel, TiedFusedModel, built, tokens, train, values, wrapped
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("parameters", "update"), [("device", "delayed"), ("host", "overlap"), ("nvme", "delayed")]
)
def test_tied_parameters_share_storage_in_a_state_dict(update: str, parameters: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(
        tmp_path, TiedFusedModel, parameters=parameters, update=update, delay_warmup_steps=0
    )
    train(model, optimizer)
    state, again = model.state_dict(), model.state_dict()
    tied, other = state["wte.weight"], state["lm_head.weight"]
    assert tied.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert_close([tied, again["wte.weight"]], [values(model)[0]] * 2)
    if parameters != "device":
        tied.zero_()  # a copy
        assert not other.any()
        assert again["lm_head.weight"].any()
        with pytest.raises(ParameterChangedError, match=r"'wte\.weight'"):
            model.state_dict()
        assert model.state_dict()["lm_head.weight"].any()
    assert set(model.lm_head.state_dict()) == {"weight"}
    infinity.close(model)


def test_leases_that_nobody_needs_give_way_to_a_state_dict(tmp_path: Path) -> None:
    """At a budget that leases fill: what read-ahead and pipelines do without is lent for as long as the
    copies live, in whatever form; training goes on beside them with the same values."""
    config = config_for(tmp_path, parameters="nvme", optimizer_state="nvme", gradients="nvme")
    model, _ = infinity.wrap(*built(HeadModel), config)
    most = engine_of(model).footprint.total(Tier.HOST)
    infinity.close(model)
    model, optimizer = infinity.wrap(*built(HeadModel), config.replace(host_memory=most))
    pool = engine_of(model).pool
    assert engine_of(model).states.room == 0
    train(model, optimizer)
    model(tokens(7)).backward()  # reads ahead
    state = model.state_dict()
    part, copied = state["head.weight"][1:].view(-1), {n: v.clone() for n, v in state.items()}
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in state.values())
    used = sum(q.in_use for q in pool.stats().values())
    assert used >= sum(v.nbytes for v in state.values())
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    assert all(torch.equal(state[n], v) for n, v in copied.items())
    leaf = model.blocks[0].norm.state_dict()
    assert_close(list(leaf.values()), [p for p in values(model.blocks[0].norm)])
    del state, leaf
    train(model, optimizer)  # takes them home, but one
    assert torch.equal(part, copied["head.weight"][1:].view(-1))
    del part
    found = [*train(model, optimizer), *values(model)]
    pool.stats()  # takes home what came back since
    assert not any(q.borrowed for q in pool._quotas.values())
    infinity.close(model)

    model, optimizer = built(HeadModel)
    train(model, optimizer)
    model(tokens(7)).backward()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    train(model, optimizer)
    assert_close(found, [*train(model, optimizer), *(p.detach() for p in model.parameters())])


def test_a_state_dict_outlives_its_engine(tmp_path: Path) -> None:
    model, _ = wrapped(tmp_path)
    most = engine_of(model).footprint.total(Tier.HOST)
    infinity.close(model)
    model, _ = wrapped(tmp_path, host_memory=most)
    state = model.state_dict()
    infinity.close(model)
    del model
    gc.collect()
    assert_close(list(state.values()), [p.detach() for p in built(HeadModel)[0].parameters()])
