"""Whole parameters and gradients of a wrapped model: `gathered`, `gradient`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

import torch
from torch import nn

from infinity.autograd import saved
from infinity.core.commits import Hold
from infinity.core.errors import ParameterError
from infinity.grads.sharded_grad import ShardedGrad
from infinity.optim.misuse import not_for_training

from .engine import Engine, engine_of
from .ranks import check_source

_Params = nn.Module | nn.Parameter | Iterable[nn.Parameter]


def gathered(
    params: _Params, *, write: bool = False, source: int = 0
) -> contextlib.AbstractContextManager[None]:
    """Gather the values of `params` on the device for the block.

    After the block you may use results that you computed inside it, and call their backward. An alias
    (``p.detach()``, ``p.data``, ``.numpy()``) also stays valid, but keeps its unit on the device for as
    long as it lives; ``clone()`` values that you need after the block.

    Args:
        params: parameters of one or several wrapped models; or a module, for all of its parameters. The
            block gathers each unit that contains one of them, as a whole.
        write: whether the engine keeps edits (also in the fp32 master): in place, by ``p.data = t``, or
            through an alias. If a value does not change, its master keeps its low bits. Without ``write``, an
            edit that torch counts raises an error for parameters that are not placed on the device. An edit
            that torch does not count (``p.data.copy_()``, numpy) may be lost. If two parameters get the
            memory of one tensor, each gets its own copy of it.
        source: with several ranks, the rank whose edits the engine keeps. Then the block is a collective: all
            ranks enter it, with the same parameters. If another rank edits a parameter that `source` edits
            too, the engine ignores the edit of the other rank.

    Raises:
        WrapError: a parameter belongs to no wrapped model.
        ParameterChangedError: the block edited a parameter without ``write=True``, or gave it data of another
            shape; the engine keeps all other edits. With several ranks, all of them raise it if a rank other
            than `source` edited a parameter that `source` did not edit.
        ParameterError: updates are delayed, and a forward or backward that has begun uses an older version;
            or the block edits a model for inference.
        StorageError: a transfer or an update failed.
    """
    return _Gathered(params, write, source)


class _Gathered(contextlib.ContextDecorator, contextlib.AbstractContextManager[None]):
    """What `gathered` returns. See [Note: the end of a block]."""

    # At the end of a program the names of a module go before a block that a generator has open.
    _is_too_late = staticmethod(sys.is_finalizing)

    def __init__(self, params: _Params, write: bool, source: int) -> None:
        self._params, self._write, self._source = params, write, source
        self._hold: Hold | None = None  # nothing else refers to it
        self._engines: list[Engine] = []

    def _recreate_cm(self) -> _Gathered:
        return _Gathered(self._params, self._write, self._source)

    def __enter__(self) -> None:
        if self._hold is not None:
            raise ParameterError(
                "one `gathered` block is entered twice",
                expected="a new `with infinity.gathered(...)` for each block",
                found="a block object that is still open",
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
        self._hold = Hold()
        try:
            for engine in self._engines:
                self._claim(engine, of[engine])
        except BaseException:
            for engine in self._engines:
                if engine.commits.mine:
                    engine.commits.leave(self._hold)
            self._hold = None
            self._end()
            raise

    def _claim(self, engine: Engine, params: list[nn.Parameter]) -> None:
        engine.phases.check()
        if self._write and not engine.trains:
            raise not_for_training("`gathered(write=True)`")
        assert self._hold is not None
        engine.commits.enter(self._hold)
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
        saved.enter(engine.phases.blocks.begin(self._hold, named, write=self._write, source=self._source))
        engine.comm.finish()  # what the block shows may be saved in it

    def __exit__(self, *error: object) -> None:
        self._hold = None  # before all else: the block is left, whatever becomes of the rest
        if not self._is_too_late():
            self._end()

    def _end(self) -> None:
        saved.leave_left()
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.callback(engine.phases.end_blocks)


def _check_one_version(engine: Engine) -> None:
    engine.updater.wait()
    if engine.store.versions.any_newer("copy"):
        raise ParameterError(
            "an edit inside a forward would change a newer version of the parameters than the forward uses",
            expected="with delayed updates, `gathered(write=True)` outside of forwards",
            found="such a block in a forward, and an update that is not published",
            cure="edit before the forward begins, or call `infinity.flush` before it",
        )


def gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient of a parameter: fp32, in the shape of the parameter, on the host, unscaled.
    Return None if the parameter has no gradient.

    Raises:
        WrapError: `param` belongs to no wrapped model.
        GradientError: `param.grad` is from an earlier backward, or from another parameter, and has no values.
        StorageError: a transfer or an update failed.
    """
    engine = engine_of(param)
    engine.phases.check(reads_only=True)
    engine.gradients.reduce_waiting()
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, ShardedGrad):
        return grad.detach().float().cpu()
    grad.check(engine.params[param])
    return engine.gradients.full(grad)
