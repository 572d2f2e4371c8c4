"""Whole parameters and gradients of a wrapped model: `gathered`, `gradient`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from infinity.autograd import saved
from infinity.core.errors import ParameterError
from infinity.grads.sharded_grad import ShardedGrad
from infinity.optim.misuse import not_for_training

from .engine import Engine, engine_of
from .ranks import check_source


@contextlib.contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False, source: int = 0
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
            that torch counts raise, of parameters that are not placed on the device; those that it does not
            (``p.data.copy_()``, numpy) are found only with ``Config(check_edits=True)``, and may be lost.
        source: the rank whose edits are kept, where there are several. The block is collective then: all
            ranks enter it, with the same parameters. What another rank does to a parameter that `source`
            edits, too, does not count.

    Raises:
        WrapError: they belong to no wrapped model.
        ParameterChangedError: they were edited without ``write=True``, or given data of another shape;
            all other edits are kept. On all ranks: one was edited on another rank than `source` alone.
        ParameterError: delayed updates, and a forward or backward under way uses an older version; or an
            edit of a model that is for inference.
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
        for engine in sorted(of, key=lambda e: e.number):
            stack.enter_context(_gathered(engine, of[engine], write, source))
        yield


def _check_one_version(engine: Engine) -> None:
    engine.updater.wait()
    if engine.store.versions.any_newer("copy"):
        raise ParameterError(
            "an edit inside a forward would be of a newer version than the forward uses",
            expected="`gathered(write=True)` outside of forwards, with delayed updates",
            found="such a block in a forward, and an update that is not published",
            cure="edit before the forward begins, or call `infinity.flush` before it",
        )


@contextlib.contextmanager
def _gathered(engine: Engine, params: list[nn.Parameter], write: bool, source: int) -> Iterator[None]:
    engine.phases.check()
    if write and not engine.trains:
        raise not_for_training("`gathered(write=True)`")
    engine.gradients.wait()
    indices = sorted({engine.params[p].unit for p in params})
    owner = object()
    if engine.comm.world > 1:
        check_source(engine.comm, source)
        engine.comm.exchange(f"gathered(write={write}, source={source}) of the units {indices}")
    if write and engine.residency.has_two_versions:
        # An edit is of the newest, and what comes after it sees it.
        if engine.phases.is_forward_here():
            _check_one_version(engine)
        else:
            engine.publish()
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine.shelter.turn.hold())
        # First how to let go, then the claim: an interrupt may come in between. Twice, which is as good as
        # once: it may also end a call before that begins, and the other one is made then.
        stack.callback(engine.residency.release, indices, owner)
        stack.callback(engine.residency.release, indices, owner)
        engine.residency.acquire(indices, owner, note=False, keep=True, newest=True)
        if write:
            for index in indices:
                named = {engine.params[p].index for p in params if engine.params[p].unit == index}
                stack.enter_context(engine.edits.editing(engine.units[index], named, owner, source))
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
    engine.phases.check()
    engine.gradients.reduce_waiting()
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, ShardedGrad):
        return grad.detach().float().cpu()
    grad.check(engine.params[param])
    return engine.gradients.full(grad)
