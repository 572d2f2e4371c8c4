"""Whole parameters and gradients of a wrapped model: `gathered`, `gradient`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

import torch
from torch import nn

from infinity.autograd import saved
from infinity.core.errors import ParameterError
from infinity.core.turn import Use
from infinity.grads.sharded_grad import ShardedGrad
from infinity.optim.misuse import not_for_training

from .engine import Engine, engine_of
from .ranks import check_source

_Params = nn.Module | nn.Parameter | Iterable[nn.Parameter]


def gathered(
    params: _Params, *, write: bool = False, source: int = 0
) -> contextlib.AbstractContextManager[None]:
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
            Two parameters that are given one tensor's memory have a copy of it each.
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
    return _Gathered(params, write, source)


class _Gathered(contextlib.ContextDecorator, contextlib.AbstractContextManager[None]):
    """What `gathered` returns. See [Note: the end of a block]."""

    # At the end of a program the names of a module go before a block that a generator has open.
    _is_too_late = staticmethod(sys.is_finalizing)

    def __init__(self, params: _Params, write: bool, source: int) -> None:
        self._params, self._write, self._source = params, write, source
        self._use: Use | None = None  # nothing else refers to it
        self._engines: list[Engine] = []

    def _recreate_cm(self) -> _Gathered:
        return _Gathered(self._params, self._write, self._source)

    def __enter__(self) -> None:
        if self._use is not None:
            raise ParameterError(
                "one `gathered` block is entered twice",
                expected="`with infinity.gathered(...)`, anew for each block",
                found="an object that was entered and not left yet",
                cure="call `infinity.gathered` again for the inner block",
            )
        params = self._params
        if isinstance(params, nn.Module):
            params = list(params.parameters())
        elif isinstance(params, nn.Parameter):
            params = [params]
        of: dict[Engine, list[nn.Parameter]] = {}
        for param in params:
            of.setdefault(engine_of(param), []).append(param)
        # In one order, whoever asks: two threads must not each have a model that the other waits for.
        self._engines = sorted(of, key=lambda e: e.number)
        self._use = Use()
        try:
            for engine in self._engines:
                self._claim(engine, of[engine])
        except BaseException:
            for engine in self._engines:
                if engine.shelter.turn.mine:
                    engine.shelter.turn.leave(self._use)
            self._use = None
            self._end()
            raise

    def _claim(self, engine: Engine, params: list[nn.Parameter]) -> None:
        engine.phases.check()
        if self._write and not engine.trains:
            raise not_for_training("`gathered(write=True)`")
        assert self._use is not None
        engine.shelter.turn.enter(self._use)
        engine.phases.reset_abandoned()  # what a backward that raised was using shows an older version
        engine.gradients.wait()
        named: dict[int, set[int]] = {unit: set() for unit in sorted({engine.params[p].unit for p in params})}
        for param in params:
            named[engine.params[param].unit].add(engine.params[param].index)
        if engine.comm.world > 1:
            check_source(engine.comm, self._source)
            engine.comm.exchange(
                f"gathered(write={self._write}, source={self._source}) of the units {[*named]}"
            )
        if self._write and engine.residency.has_two_versions:
            # An edit is of the newest, and what comes after it sees it.
            if engine.phases.is_forward_here():
                _check_one_version(engine)
            else:
                engine.publish()
        saved.enter(engine.phases.blocks.begin(self._use, named, write=self._write, source=self._source))
        engine.comm.finish()  # what the block shows may be saved in it

    def __exit__(self, *error: object) -> None:
        self._use = None  # before all else: the block is left, whatever becomes of the rest
        if not self._is_too_late():
            self._end()

    def _end(self) -> None:
        saved.leave_left()
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.callback(engine.phases.blocks.end_left)


def _check_one_version(engine: Engine) -> None:
    engine.updater.wait()
    if engine.store.versions.any_newer("copy"):
        raise ParameterError(
            "an edit inside a forward would be of a newer version than the forward uses",
            expected="`gathered(write=True)` outside of forwards, with delayed updates",
            found="such a block in a forward, and an update that is not published",
            cure="edit before the forward begins, or call `infinity.flush` before it",
        )


def gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient of a parameter: fp32, in its shape, on the host, unscaled; None if it
    has none.

    Raises:
        WrapError: it belongs to no wrapped model.
        GradientError: `param.grad` was kept from before, or is another parameter's, and has no values.
        StorageError: a transfer or an update failed.
    """
    engine = engine_of(param)
    engine.phases.check(looks=True)
    engine.gradients.reduce_waiting()
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, ShardedGrad):
        return grad.detach().float().cpu()
    grad.check(engine.params[param])
    return engine.gradients.full(grad)
