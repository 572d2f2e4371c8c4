"""The life of a wrapped model: `wrap`, `flush`, `unwrap`, `close`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from infinity.core.config import Config
from infinity.core.errors import OptimizerTypeError, WrapError
from infinity.optim.optimizer import OffloadOptimizer

from .engine import Engine, engine_of
from .unwrap import restore

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Model = TypeVar("_Model", bound=nn.Module)
#: Models and optimizers after `unwrap`.
_PLAIN_AGAIN: weakref.WeakSet[object] = weakref.WeakSet()


def wrap(
    model: _Model, optimizer: torch.optim.Optimizer, config: Config, mesh: DeviceMesh | None = None
) -> tuple[_Model, OffloadOptimizer]:
    """Take over a model's parameters and its optimizer's state; return both.

    The model is the same object, with hooks. The optimizer is a `torch.optim.Optimizer` that
    shares the param groups of the one passed in. From here on parameters that are not placed on the
    device are there only while they are used; read or edit them inside `gathered`.

    Args:
        model: any `nn.Module` with dense floating-point parameters.
        optimizer: `torch.optim.AdamW` or `torch.optim.Adam` over its trainable parameters.
        config: budgets and placements.
        mesh: the ranks that train the model together, one dimension; None: those of the default process
            group of `torch.distributed`, which is made where ``WORLD_SIZE`` says that there are several
            (torchrun). `wrap` is called on all ranks then, with the same model and settings; the first rank's
            values count, and rank r's random numbers go on from the first rank's seed plus r. A mesh of fewer
            ranks than the job has is refused, but with ``Config(independent_replicas=True)``.

    Raises:
        WrapError: the model or the optimizer cannot be taken over.
        BudgetError: the run does not fit; nothing has been touched.
        DirectoryError: an NVMe directory cannot be used; nothing has been touched.
        DivergenceError, RankError: the ranks have not the same model or settings; one of them failed.
        ConfigError, BackendError: a device, units or an I/O backend of `config` are not there; or the mesh is
            not of one dimension, or without some ranks of the job.
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
            expected="torch.optim.AdamW or torch.optim.Adam",
            found="None",
            cure="torch.optim.AdamW(model.parameters(), ...); for a model that is only used, "
            "infinity.inference(model, config)",
        )
    with torch.inference_mode(False):  # what it makes is changed by threads that are not in that mode
        engine = Engine(model, optimizer, config, mesh=mesh)
    return model, engine.optimizer


def flush(thing: object) -> None:
    """Wait for every update of a model or optimizer. With ``update="delayed"`` the next forward uses
    the newest parameters then, as it does at the end of the warm-up.

    Raises:
        WrapError: `thing` belongs to no wrapped model.
        ParameterError: that would change parameters inside a `gathered` block.
        StorageError: an update failed.
    """
    engine = engine_of(thing)
    if engine.trains:
        engine.optimizer.flush()
    else:
        engine.phases.finish()


def unwrap(model: _Model) -> _Model:
    """Make a wrapped model a plain one again, and return it: ordinary parameters, the same objects, on the
    host, with the newest values in the dtype that they had at `wrap` (those of the fp32 masters, where they
    are more exact), and buffers there, too. Their gradients are dropped and the engine is closed.

    The state of the optimizer is not given back: save its `state_dict()` before, and load it into the
    optimizer that the next `wrap` returns. The optimizer from before `wrap` may step again, without state.
    A closed model can be unwrapped where all of its parameters are placed on the device.

    Raises:
        WrapError: `model` belongs to no wrapped model.
        BudgetError: the parameters do not fit the host memory that is free; nothing has changed.
        ClosedError: its engine was closed, and the values went with it.
        ParameterError: it is inside a `gathered` block.
        StorageError: a transfer or an update failed.
    """
    engine = engine_of(model)
    restore(engine)
    _PLAIN_AGAIN.add(model)
    if engine.trains:
        _PLAIN_AGAIN.add(engine.optimizer)
    return model


def close(thing: object) -> None:
    """Close the engine of a model or optimizer: finish, end its threads, remove its arenas. A second call
    does nothing, nor does one after `unwrap`. The values of parameters that are not placed on the device go
    with it: save `state_dict()` before, or take `unwrap`, which closes, too, and keeps them. What such a
    model is used for afterwards raises `ClosedError`.

    An update behind the last step is finished first, which takes as long as the drives take: each
    transfer has `io_deadline` seconds. In a ``finally`` that a KeyboardInterrupt passes, drives have half
    a second to finish.

    Raises:
        WrapError: `thing` belongs to no wrapped model.
        StorageError: what is on NVMe could not be finished or removed; or an update behind the last
            step failed, and no call since has said so. It names the units without their update.
    """
    try:
        engine = engine_of(thing)
    except WrapError:
        if thing in _PLAIN_AGAIN:  # `unwrap` has closed it
            return
        raise
    engine.close()
