"""`state_dict` and `load_state_dict` of a wrapped model, in torch's own format.

torch walks the modules and calls `detach` on each parameter, or `copy_` when it loads. During this
walk, a released parameter serves these two calls from its shards. Each tensor has a storage of its own, as in
torch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.autograd.hooks import Hooks
from infinity.autograd.phases import Phases
from infinity.core.commits import Commits
from infinity.core.errors import ParameterChangedError, ReleasedParameterError
from infinity.core.stack import frames
from infinity.hardware.ranks import Comm
from infinity.optim.edits import Edits
from infinity.optim.misuse import not_for_training
from infinity.optim.state_io import States
from infinity.optim.whole import agree_on_values
from infinity.params.given import own as own_storage
from infinity.params.param import ReleasedParameter, ShardedParam
from infinity.params.residency import Residency


class _StateDictEngine(Protocol):
    comm: Comm
    params: dict[nn.Parameter, ShardedParam]
    states: States
    edits: Edits
    residency: Residency
    phases: Phases
    commits: Commits
    hooks: Hooks

    def model(self) -> nn.Module | None: ...
    def publish(self) -> None: ...

    def check_not_resumed(self) -> None: ...


def install(model: nn.Module, engine: _StateDictEngine) -> list[RemovableHandle]:
    """Let `state_dict` and `load_state_dict` of the model and its submodules reach released
    parameters, in torch's own form. Return the hooks that do it."""

    def own(module: nn.Module) -> list[ShardedParam]:
        return [engine.params[p] for p in module._parameters.values() if p is not None and p in engine.params]

    def changes(sharded: ShardedParam, *, soon: bool) -> bool:
        """Whether the storage of a parameter on the device has values from before the last step (with delayed
        updates); or, `soon`, will have them again."""
        unit = engine.residency.units[sharded.unit]
        return unit.on_device and engine.residency.differs(unit) and (soon or not unit.newest)

    lock = engine.commits  # of a module from its first hook to its last: [Note: the engine lock]
    modules = {id(m) for m in model.modules()}
    given: dict[ShardedParam, weakref.ref[torch.Tensor]] = {}  # by the state dict that is being made
    memory: dict[ShardedParam, torch.Tensor] = {}  # for copies to come
    copies: dict[ShardedParam, torch.Tensor] = {}  # of the module that torch is going through

    def answers(sharded: ShardedParam, keep_vars: bool) -> bool:
        # A copy of what changes: in torch a state dict, which refers to the storage, is never older.
        return isinstance(sharded.param, ReleasedParameter) or changes(sharded, soon=not keep_vars)

    def save_begins(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        engine.phases.check()
        if engine.phases.backward_update is not None:
            engine.phases.backward_update.check_outside("`state_dict()`")
        lock.enter(module)
        try:
            engine.phases.reset_abandoned()  # what a backward that raised was using shows an older version
            lock.enter(module)  # that ended what this thread had begun
            prepare(module, prefix, keep_vars)
        except BaseException:
            lock.leave(module)
            raise

    def prepare(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars and not _is_inside(module, modules):
            engine.residency.use_all()
            engine.edits.given.check()
            given.clear()
            memory.clear()
            known = [engine.params.get(p) for p in module.parameters()]
            if None in known and (model := engine.model()) is not None:
                engine.hooks.guard.check_added(model)
            memory.update(engine.states.make_room([s for s in known if s and answers(s, keep_vars)]))
        sharded = [s for s in own(module) if answers(s, keep_vars)]
        if not sharded:
            return
        if keep_vars:
            raise ReleasedParameterError(
                "state_dict(keep_vars=True) cannot return parameters that are released",
                expected="keep_vars=False",
                found="keep_vars=True",
                cure="call it inside `with infinity.gathered(model):`, or without keep_vars",
            )
        for s in sharded:
            s.on_detach = functools.partial(_copy, s, sharded)
            if not isinstance(s.param, ReleasedParameter):
                engine.residency.renew_classes(engine.residency.units[s.unit])

    def _copy(sharded: ShardedParam, beside: Sequence[ShardedParam]) -> torch.Tensor:
        """Return a copy of a parameter: one for all its names, as in torch, where tied ones share storage.
        Those `beside` it, of one module, are read in the same pass: no hook of a user comes in between."""
        if not _frames_of(None):  # a hook that raised has left us set: what was read then may be old
            copies.clear()
            return engine.states.copies_of([sharded])[sharded]
        before = _known(sharded)
        if before is not None:
            return before.detach()
        if sharded not in copies:
            together = [s for s in beside if s.on_detach is not None and _known(s) is None]
            copies.clear()
            copies.update(engine.states.copies_of(together, memory))
        copy = copies.pop(sharded)
        memory.pop(sharded, None)
        engine.edits.given.add(sharded, copy)
        given[sharded] = weakref.ref(copy)
        return copy

    def _known(sharded: ShardedParam) -> torch.Tensor | None:
        known = given.get(sharded)
        return known() if known is not None else None

    def _separate(sharded: ShardedParam, value: object) -> None:
        """Give a view of a unit that is on the device a storage of its own; an edit counts as before."""
        unit = engine.residency.units[sharded.unit].storage
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == unit._cdata:
            before = _known(sharded)
            value.data = own_storage(value) if before is None else before
            given[sharded] = weakref.ref(value)

    def save_ends(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        copies.clear()
        for s in own(module) if _frames_of(module) < 2 else ():  # an outer one of the same module goes on
            s.on_detach = None
            engine.residency.renew_classes(engine.residency.units[s.unit])
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if param is not None and value is not param and param in engine.params:
                _separate(engine.params[param], value)
        lock.leave(module)

    def load_begins(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        # torch leaves this mark in the state dict, where the next load, of whichever kind, finds it.
        if metadata.pop("assign_to_params_buffers", False) and _assigns():
            raise ParameterChangedError(
                "load_state_dict(assign=True) of a wrapped model would replace its parameters",
                expected="assign=False, which copies the values into the parameters",
                found="assign=True",
                cure="leave assign out, or load before `wrap`",
            )
        engine.phases.check()
        if not engine.phases.trains:
            raise not_for_training("load_state_dict()")
        if torch.__future__.get_swap_module_params_on_conversion():
            raise ParameterChangedError(
                "load_state_dict of a wrapped model would exchange its parameters",
                expected="parameters that stay the same objects",
                found="torch.__future__.get_swap_module_params_on_conversion() is True",
                cure="torch.__future__.set_swap_module_params_on_conversion(False)",
            )
        engine.check_not_resumed()
        engine.publish()
        loaded = {n: p for n, p in module._parameters.items() if p in engine.params and prefix + n in state}
        values = {prefix + n: state[prefix + n] for n in loaded}
        if own(module):
            engine.commits.run(lambda: agree_on_values(engine.comm, "load_state_dict", values))
        lock.enter(module)
        engine.edits.given.forget(engine.params[p] for p in loaded.values())
        # What stays gathered between its uses goes; in a `gathered` block it is edited where it is.
        stay = (s.unit for s in own(module) if not engine.residency.units[s.unit].keepers)
        engine.residency.reshard_all({i for i in stay if engine.residency.units[i].persistent})
        for name, p in loaded.items():
            value, s = state[prefix + name], engine.params[p]
            fits = isinstance(value, torch.Tensor) and value.shape == s.spec.shape
            if fits and s.spec.trainable and engine.residency.units[s.unit].on_device:
                engine.states.before_load(s, value)
        released = [s for s in own(module) if isinstance(s.param, ReleasedParameter)]
        engine.residency.reshard_all({s.unit for s in released})
        for s in released:
            s.on_copy = _writer(s)

    def _writer(sharded: ShardedParam) -> Callable[[torch.Tensor], None]:
        def write(values: torch.Tensor) -> None:
            engine.residency.reshard_all({sharded.unit})  # a hook of a user may have looked at it since
            engine.states.set_copy(sharded, values)

        return write

    def load_ends(module: nn.Module, incompatible: Any) -> None:
        for s in own(module):
            s.on_copy = None
        # What was loaded on the device counts from now on, as it does elsewhere, and not from the next step.
        engine.edits.adopt_all({engine.residency.units[s.unit] for s in own(module)})
        engine.residency.refresh()
        lock.leave(module)

    handles = []
    for module in model.modules():
        if next(module.parameters(), None) is None:
            continue
        handles += [
            module.register_state_dict_pre_hook(save_begins),
            module.register_state_dict_post_hook(save_ends),
            module.register_load_state_dict_pre_hook(load_begins),
            module.register_load_state_dict_post_hook(load_ends),
        ]
    return handles


def _is_inside(module: nn.Module, modules: Collection[int]) -> bool:
    """Return whether the state dict of `module` is being made for that of another one of `modules`."""
    owners = (f.f_locals.get("self") for f in frames() if f.f_code is _STATE_DICT)
    return any(owner is not module and id(owner) in modules for owner in owners)


def _frames_of(module: nn.Module | None) -> int:
    """Return how many state dicts of `module`, or of any, this thread is making, one inside another."""
    return sum(f.f_code is _STATE_DICT and module in (None, f.f_locals.get("self")) for f in frames())


def _assigns() -> bool:
    """Return whether the `load_state_dict` that is under way was called with ``assign=True``."""
    found = (f.f_locals.get("assign") for f in frames() if f.f_code is _LOAD_STATE_DICT)
    return bool(next(found, False))


_LOAD_STATE_DICT = nn.Module.load_state_dict.__code__
_STATE_DICT = nn.Module.state_dict.__code__
