"""What a user calls on a model or an optimizer that was wrapped."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from infinity.autograd import saved
from infinity.core.errors import ParameterError, WrapError
from infinity.core.sizes import GiB, Tier
from infinity.grads.sharded_grad import ShardedGrad
from infinity.optim.optimizer import OffloadOptimizer

from .engine import Engine, engine_of
from .unwrap import restore

_Model = TypeVar("_Model", bound=nn.Module)
#: Models and optimizers after `unwrap`.
_PLAIN_AGAIN: weakref.WeakSet[object] = weakref.WeakSet()


@contextlib.contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False
) -> Iterator[None]:
    """Have the values of `params` on the device inside the block.

    What is computed from them inside may be used, and its backward called, after the block. An alias
    (``p.detach()``, ``p.data``, ``.numpy()``) stays right too, but keeps its unit on the device for as
    long as it lives; ``clone()`` what is to outlive the block.

    Args:
        params: parameters, or a module for all of its parameters, of one wrapped model or several. The
            units that they are in are gathered whole.
        write: whether edits are to be kept (also in the fp32 master): in place, by ``p.data = t``, or
            through an alias. Where a value is unchanged its master keeps its low bits. Without it, edits
            that torch counts raise; those that it does not (``p.data.copy_()``, numpy) are found only
            with ``Config(check_edits=True)``, and may be lost.

    Raises:
        WrapError: they belong to no wrapped model.
        ParameterChangedError: they were edited without ``write=True``, or given data of another shape;
            all other edits are kept.
        ParameterError: delayed updates, and a forward or backward under way uses an older version.
        StorageError: a transfer or an update failed.
    """
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    elif isinstance(params, nn.Parameter):
        params = [params]
    params = list(params)
    if not params:
        yield
        return
    of: dict[Engine, list[nn.Parameter]] = {}
    for param in params:
        of.setdefault(engine_of(param), []).append(param)
    with contextlib.ExitStack() as stack:
        # In one order, whoever asks: two threads must not each have a model that the other waits for.
        for engine in sorted(of, key=id):
            stack.enter_context(_gathered(engine, of[engine], write))
        yield


def _check_one_version(engine: Engine) -> None:
    engine.updater.wait()
    if engine.copies.any_newer():
        raise ParameterError(
            "an edit inside a forward would be of a newer version than the forward uses",
            expected="`gathered(write=True)` outside of forwards, with delayed updates",
            found="such a block in a forward, and an update that is not published",
            cure="edit before the forward begins, or call `infinity.flush` before it",
        )


@contextlib.contextmanager
def _gathered(engine: Engine, params: list[nn.Parameter], write: bool) -> Iterator[None]:
    engine.check()
    engine.gradients.wait()
    indices = sorted({engine.params[p].unit for p in params})
    owner = object()
    if write and engine.copies.two:  # an edit is of the newest, and what comes after it sees it
        if engine.hooks.in_forward():
            _check_one_version(engine)
        else:
            engine.optimizer.publish()
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine.shelter.turn.span())
        # First how to let go, then the claim: an interrupt may come in between. Twice, which is as good as
        # once: it may also end a call before that begins, and the other one is made then.
        stack.callback(engine.residency.release, indices, owner)
        stack.callback(engine.residency.release, indices, owner)
        engine.residency.acquire(indices, owner, note=False, keep=True, newest=True)
        if write:
            for index in indices:
                named = {engine.params[p].index for p in params if engine.params[p].unit == index}
                stack.enter_context(engine.states.editing(engine.units[index], named, owner))
        stack.callback(saved.leave, saved.enter(owner))
        yield


def gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient of a parameter: fp32, in its shape, on the host, unscaled; None if it
    has none.

    Raises:
        WrapError: it belongs to no wrapped model.
        GradientError: `param.grad` was kept from before, or is another parameter's, and has no values.
        StorageError: a transfer or an update failed.
    """
    engine = engine_of(param)
    engine.check()
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, ShardedGrad):
        return grad.detach().float().cpu()
    grad.check(engine.params[param])
    return engine.gradients.whole(grad)


def metrics(optimizer: OffloadOptimizer) -> dict[str, float]:
    """Return figures of the last step and of memory, under torchtitan's key names where it has them.

    A step is from the end of one `step()` to the end of the next. Of the last one:

    - ``grad_norm``: 2-norm before clipping, unscaled; ``loss_scale``: 1.0 unless fp16.
    - ``time_metrics/end_to_end(s)``, ``time_metrics/update(s)``: the step, and `step()` alone, in seconds.
    - ``stall/h2d(%)``, ``stall/nvme(%)``, ``stall/update(%)``, ``stall/reduce(%)``: what the user's thread
      waited for (copies to the device, drives, the update, gradients on their way), in % of the step.
    - ``io/read(GB/s)``, ``io/write(GB/s)``: what the drives moved, by the whole step.
    - ``efficiency(%)``: the share in which the busiest was at work: compute (what is neither a stall nor in
      `step()`), a drive, or the update. A trace has it from bandwidths.
    - ``delayed/drift``: how far the last delayed update moved the parameters, relative to their 2-norm;
      0.0 where none was delayed.

    ``steps`` and ``skipped_steps`` (fp16 overflows) go with the optimizer's state dict.

    Since `wrap`: ``nvme/read(GiB)``, ``nvme/written(TB)``,
    ``fetch/units`` (units brought to the device), ``fetch/hits`` (of these, those that were on their way
    when they were needed), ``activations/kept`` (inputs of recomputed layers that found no room on the
    host).

    Memory that somebody else holds: ``memory/held_units``, units that stay on the device because
    something outside of the engine refers to them (an alias of a parameter), ``memory/held(GiB)``.

    Memory: planned, ``memory/device(GiB)``, ``memory/host(GiB)``, ``memory/nvme(GiB)``; highest so far,
    ``memory/device_units_peak(GiB)``, ``memory/host_leases_peak(GiB)``, ``activations/host(GiB)``.

    Raises:
        WrapError: `optimizer` belongs to no wrapped model.
    """
    engine = engine_of(optimizer)
    stats = engine.store.stats()
    pool = engine.pool.stats()
    activations = engine.activations
    held = engine.residency.held()
    values = {
        "grad_norm": optimizer.grad_norm if optimizer.grad_norm is not None else float("nan"),
        "loss_scale": optimizer.loss_scale,
        "steps": float(optimizer.steps),
        "skipped_steps": float(optimizer.skipped_steps),
        "time_metrics/end_to_end(s)": engine.times["step"],
        "time_metrics/update(s)": engine.times["update"],
        "memory/device(GiB)": (engine.footprint.total(Tier.DEVICE)) / GiB,
        "memory/device_units_peak(GiB)": engine.residency.peak / GiB,
        "memory/held_units": float(len(held)),
        "memory/held(GiB)": sum(u.layout.copy_nbytes for u in held) / GiB,
        "memory/host(GiB)": engine.footprint.total(Tier.HOST) / GiB,
        "memory/host_leases_peak(GiB)": sum(q.peak for q in pool.values()) / GiB,
        "memory/nvme(GiB)": engine.footprint.total(Tier.NVME) / GiB,
        "nvme/read(GiB)": sum(s.bytes_read for s in stats) / GiB,
        "nvme/written(TB)": sum(s.bytes_written for s in stats) / 1e12,
        "delayed/drift": engine.updater.drift.value,
        "fetch/units": float(engine.residency.fetches),
        "fetch/hits": float(engine.residency.hits),
        **engine.recorder.figures,
        "activations/host(GiB)": activations.peak / GiB if activations is not None else 0.0,
        "activations/kept": float(activations.kept) if activations is not None else 0.0,
    }
    return values


def flush(thing: object) -> None:
    """Wait for every update of a model or optimizer. With ``update="delayed"`` the next forward uses
    the newest parameters then, as it does at the end of the warm-up.

    Raises:
        WrapError: `thing` belongs to no wrapped model.
        ParameterError: that would change parameters inside a `gathered` block.
        StorageError: an update failed.
    """
    engine_of(thing).optimizer.flush()


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
    optimizer = engine.optimizer
    restore(engine)
    _PLAIN_AGAIN.update((model, optimizer))
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
