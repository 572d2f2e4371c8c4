"""The life of a wrapped model: `wrap`, `flush`, `unwrap`, `close`."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from infinity.core.commits import Commits
from infinity.core.config import Config
from infinity.core.errors import OptimizerTypeError, WrapError
from infinity.optim.optimizer import OffloadOptimizer
from infinity.optim.rules import EXAMPLE, EXPECTED

from .engine import Engine, engine_of, model_of
from .unwrap import restore

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Model = TypeVar("_Model", bound=nn.Module)
#: Models and optimizers after `unwrap`.
_PLAIN_AGAIN: weakref.WeakSet[object] = weakref.WeakSet()


def wrap(
    model: _Model,
    optimizer: torch.optim.Optimizer,
    config: Config,
    mesh: DeviceMesh | None = None,
) -> tuple[_Model, OffloadOptimizer]:
    """Take over a model's parameters and its optimizer's state; return both.

    The model stays the same object, with hooks. The optimizer is a `torch.optim.Optimizer` that
    shares the param groups of the one passed in. From here on, parameters that are not placed on the
    device are on it only while the model uses them; read or edit them inside `gathered`.

    Args:
        model: any `nn.Module` with dense floating-point parameters.
        optimizer: `torch.optim.AdamW`, `Adam`, `SGD`, `Adagrad`, a Lion (`infinity.optim.Lion`, or that of
            timm, bitsandbytes or lion_pytorch), or `infinity.optim.Muon`, over its trainable parameters.
        config: budgets and placements.
        mesh: the ranks that train the model together, in one dimension. None: the ranks of the default
            process group of `torch.distributed`; `wrap` creates it if ``WORLD_SIZE`` names several ranks
            (torchrun). With several ranks, call `wrap` on all of them, with the same model and settings. All
            ranks take the first rank's values, and rank r continues its random numbers from the first rank's
            seed plus r. A mesh of fewer ranks than the job is an error.

    Raises:
        WrapError: `wrap` does not support the model or the optimizer.
        BudgetError: the run does not fit; nothing has changed.
        DirectoryError: an NVMe directory cannot be used; nothing has changed.
        DivergenceError, RankError: the ranks do not have the same model or settings; or one of them failed.
        ConfigError, BackendError: a device, a unit or an I/O backend of `config` does not exist; or the mesh
            has more than one dimension, or leaves out ranks of the job.
    """
    if not isinstance(config, Config):
        raise WrapError(
            "wrap takes a Config",
            expected="infinity.Config(...)",
            found=type(config).__name__,
            cure="wrap(model, optimizer, infinity.Config(...))",
        )
    if optimizer is None:
        raise OptimizerTypeError(
            "wrap takes an optimizer",
            expected=EXPECTED,
            found="None",
            cure=f"{EXAMPLE}; for a model that is only used, infinity.inference(model, config)",
        )
    engine: Engine | None = None
    try:
        with torch.inference_mode(False):  # what it makes is changed by threads that are not in that mode
            with contextlib.closing(Commits()) as commits, commits:
                engine = Engine(model, optimizer, config, mesh=mesh)
    except BaseException:
        if engine is not None:  # an interrupt came meanwhile, and nobody gets it
            restore(engine)
        raise
    return model, engine.optimizer


def flush(thing: object) -> None:
    """Wait for every update of a model or optimizer. With ``update="delayed"`` the next forward then uses
    the newest parameters, as it does at the end of the warm-up.

    Raises:
        WrapError: `thing` belongs to no wrapped model.
        ParameterError: the call would change parameters inside a `gathered` block.
        StorageError: an update failed.
    """
    engine = engine_of(thing)
    if engine.trains:
        engine.optimizer.flush()
    else:
        engine.phases.finish()


@overload
def unwrap(model: _Model) -> _Model: ...
@overload
def unwrap(model: torch.optim.Optimizer) -> nn.Module: ...
def unwrap(model: Any) -> Any:
    """Turn a wrapped model into a plain one again, and return it. `model` is the model or its optimizer.

    The parameters are the same objects, and ordinary parameters again. Parameters and buffers are on the
    host. The parameters have the newest values in the dtype that they had at `wrap` (the values of the fp32
    masters, if these are more exact). `unwrap` drops the gradients and closes the engine.

    `unwrap` does not return the state of the optimizer: save its `state_dict()` before, and load it into the
    optimizer that the next `wrap` returns. The optimizer from before `wrap` may step again, without state.
    You can unwrap a closed model if all of its parameters are placed on the device.

    Raises:
        WrapError: `model` belongs to no wrapped model.
        BudgetError: the parameters do not fit the free host memory; nothing has changed.
        ClosedError: the engine was closed, and the values are gone.
        ParameterError: the call is inside a `gathered` block.
        StorageError: a transfer or an update failed.
    """
    engine, model = engine_of(model), model_of(model)
    restore(engine)
    _PLAIN_AGAIN.add(model)
    if engine.trains:
        _PLAIN_AGAIN.add(engine.optimizer)
    return model


def close(thing: object) -> None:
    """Close the engine of a model or optimizer: finish its work, end its threads, free its space on NVMe.

    A second call does nothing, and neither does a call after `unwrap`. Parameters that are not placed on the
    device lose their values: save `state_dict()` before, or call `unwrap` instead, which closes the engine
    and keeps the values. Every later use of the closed model raises `ClosedError`.

    `close` first finishes the update of the last step. That takes as long as the drives take: each transfer
    has 120 seconds. If a KeyboardInterrupt passes a ``finally`` that calls `close`, the drives have
    half a second to finish.

    Raises:
        WrapError: `thing` belongs to no wrapped model.
        StorageError: a transfer did not finish; or the update of the last step failed, and no call since has
            raised it. The error names the units that were not updated.
    """
    try:
        engine = engine_of(thing)
    except WrapError:
        if thing in _PLAIN_AGAIN:  # `unwrap` has closed it
            return
        raise
    engine.close()
