"""The work of `unwrap`: it turns the values of a wrapped model into ordinary parameters."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from infinity.autograd.phases import Phases
from infinity.core.commits import Commits
from infinity.core.errors import BudgetError, ClosedError, ParameterError
from infinity.core.sizes import format_size
from infinity.hardware.probe import available_host_memory
from infinity.optim.edits import Edits
from infinity.optim.state_io import States
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit


class _UnwrapEngine(Protocol):
    params: dict[nn.Parameter, ShardedParam]
    units: list[ParamUnit]
    states: States
    edits: Edits
    commits: Commits
    phases: Phases

    def model(self) -> nn.Module | None: ...
    def publish(self) -> None: ...
    def close(self) -> None: ...
    def let_go(self) -> None: ...


def restore(engine: _UnwrapEngine) -> None:
    """Turn the parameters of an engine's model into ordinary ones with the newest values; close the
    engine."""
    if engine.phases.closed:
        _check_closed(engine)
    else:
        engine.phases.check()  # ends blocks whose own end failed
        _check_blocks(engine)
        engine.edits.check_unseen(unwraps=True)
        engine.publish()
        engine.edits.adopt_all()
    _check_room(engine)
    params = list(engine.params.values())
    if engine.phases.closed:
        values = {s: s.param.detach().to("cpu", s.given_dtype, copy=True) for s in params}
    else:
        values = engine.states.values_of(params)
    engine.commits.run(lambda: _give_back(engine, values))
    engine.close()


def _give_back(engine: _UnwrapEngine, values: dict[ShardedParam, torch.Tensor]) -> None:
    engine.let_go()
    model = engine.model()
    for sharded, value in values.items():
        sharded.give_back(value)
    for module in model.modules() if model is not None else ():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("cpu")


def _check_blocks(engine: _UnwrapEngine) -> None:
    if any(unit.keepers for unit in engine.units):
        raise ParameterError(
            "`infinity.unwrap` cannot unwrap the model inside a `gathered` block",
            expected="unwrap() outside of such blocks",
            found="a block that is still open",
            cure="leave `with infinity.gathered(...)` first",
        )


def _check_closed(engine: _UnwrapEngine) -> None:
    gone = [u.layout.name for u in engine.units if not u.on_device]
    if gone:
        raise ClosedError(
            f"the engine of this model is closed, and the values of {len(gone)} units ({gone[0]!r} is the "
            "first) are gone",
            expected="`infinity.unwrap(model)` before `infinity.close(model)`",
            found=engine.phases.closed,
            cure="build the model again and load a checkpoint or state dict; to keep the values the next "
            "time, call `infinity.unwrap(model)` in place of close()",
        )


def _check_room(engine: _UnwrapEngine) -> None:
    needed = sum(s.spec.numel * s.given_dtype.itemsize for s in engine.params.values())
    room = available_host_memory() * 9 // 10
    if needed > room:
        raise BudgetError(
            "the parameters do not fit the free host memory",
            expected=f"{format_size(needed)} ({needed} bytes)",
            found=f"{format_size(room)} ({room} bytes), nine tenths of the free memory",
            cure="write them with `infinity.export(model, path)`; then build the model again inside "
            "`with infinity.init(config):` (with transformers: `from_pretrained(path)`) and load them",
        )
