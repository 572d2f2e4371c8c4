"""Saved tensors in a unit's memory: autograd saves a reference to the parameter, not the memory.

[Note: references] During a scope's forward or a `gathered` block, hooks on saved tensors
(torch.autograd.graph.saved_tensors_hooks) receive the tensors that autograd saves. The engine packs a tensor
in a unit's memory as parameter, version, sizes, strides and offset. It unpacks it as a view of the parameter,
and loads the parameter's unit for that. So a graph holds no memory of units, and a backward may begin
anywhere: at an auxiliary loss in a side channel, in a gradient penalty, after a `gathered` block.

[Note: versions of packed tensors] Autograd does not compare the versions of tensors that hooks packed. So
the engine packs each tensor with its version and compares it itself. It keeps other tensors as detached
aliases, which share the version counter. Inside activation checkpointing torch compares no versions, and
neither does the engine: a recomputation uses the values at its time. Other hooks keep results computed from
the values at saving time, and the engine has the present values. So there, too, it compares versions.

[Note: one pair of hooks] torch applies the innermost pair of hooks only. So the engine puts its pair on top
of every other pair (a user's, activation checkpointing's), and passes on tensors that are not in a unit.
`_composed` does this where torch's own context manager is entered, so that a forward and its recomputation
see the same hooks. torch refuses to disable hooks while some are set (`torch.func.grad` disables them), so
the engine removes its hooks for that time; a graph that then holds memory directly is detected as [Note: held
units] describes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import graph
from torch.utils import checkpoint

from infinity.core.errors import PrecisionError
from infinity.core.stack import frames
from infinity.optim.edits import Block
from infinity.params.eager import eager
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit, UnitState

_graph: Any = torch._C._autograd
_plainly: Any = torch._C.DisableTorchFunctionSubclass


class Offload(Protocol):
    """Takes what is saved somewhere else (see `Activations`)."""

    def pack(self, tensor: torch.Tensor, stack: Iterator[FrameType]) -> Packed | None:
        """Return what stands for `tensor`, which the caller at the top of `stack` saves; None: keep it."""


class Packed(Protocol):
    """What stands for a saved tensor."""

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""


#: Makes a unit present, in the newest version or in the one in front.
Present = Callable[[ParamUnit, bool], None]

#: By the address of its storage: a unit whose memory may go, and what makes it present.
_UNITS: dict[int, tuple[ParamUnit, Present]] = {}


def register(unit: ParamUnit, present: Present) -> int:
    """Save tensors in the memory of `unit` as references from now on; return the key for `unregister`."""
    key: int = unit.storage._cdata
    _UNITS[key] = (unit, present)
    return key


def unregister(key: int) -> None:
    """Undo `register`."""
    entry = _UNITS.pop(key, None)
    for sharded in entry[0].params if entry is not None else ():
        sharded.let_accumulator_go()


class _Reference:
    """A part of a parameter, at a version."""

    __slots__ = (
        "__weakref__",
        "newest",
        "offset",
        "present",
        "shape",
        "sharded",
        "stride",
        "unit",
        "version",
    )

    def __init__(
        self, tensor: torch.Tensor, unit: ParamUnit, sharded: ShardedParam, present: Present
    ) -> None:
        self.unit = unit
        self.sharded = sharded
        self.present = present
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset()
        self.newest = unit.newest
        with _plainly():
            self.version: int | None = sharded.param._version
        if unit.references is not None:
            unit.references.add(self)

    def unpack(self) -> torch.Tensor:
        unit, param = self.unit, self.sharded.param
        with _plainly():
            if self.version is not None and param._version != self.version:
                check_version(param._version, self.version, param, self.shape)
        stays = unit.users or unit.persistent
        if not stays or unit.state is not UnitState.UNSHARDED or unit.newest is not self.newest:
            self.present(unit, self.newest)
        with _plainly():
            tensor = param.detach().as_strided(self.shape, self.stride, self.offset)
        if torch.is_grad_enabled():
            # A graph of this backward is being made. torch drops these with the node that asked.
            _push_on_top()
        return tensor


class _Theirs(NamedTuple):
    """What the hooks of somebody else made of a tensor."""

    packed: Any
    hook: Callable[[Any], torch.Tensor]


class Forwards:
    """The forwards of a model, which set hooks. An interrupt may end one without a word; what it has left
    goes when the next begins, or when there will be no more."""

    __slots__ = ("are_over",)

    def __init__(self) -> None:
        self.are_over = False

    def end(self) -> None:
        """There are no more: take off what they have left in this thread. No thread takes off what is
        another's; there, and beneath what somebody else has set, the next tensor that is saved does."""
        self.are_over = True
        _leave_over()


class _Frame:
    """One pair of our hooks, and who set it: the `Forwards` of a model, a `gathered` block, or somebody's own
    hooks."""

    __slots__ = ("forwards", "hooks", "owner")

    def __init__(self, beneath: Any, offload: Offload | None, owner: object) -> None:
        self.hooks = (functools.partial(_pack, beneath, offload), _unpack)
        self.owner = owner
        self.forwards = owner if isinstance(owner, Forwards) else None


class _Frames(threading.local):
    def __init__(self) -> None:
        self.list: list[_Frame] = []


_frames = _Frames()  # that are set in this thread


@eager
def _pack(beneath: Any, offload: Offload | None, tensor: torch.Tensor) -> Any:
    pairs = _frames.list
    if pairs and (last := pairs[-1].forwards) is not None and last.are_over and _leave_over():
        return tensor.detach(), tensor._version
    if torch.is_autocast_enabled(tensor.device.type) and _UNITS:
        raise autocast_error("a forward", tensor.device.type)
    entry = None
    if tensor.layout is torch.strided:
        try:
            entry = _UNITS.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a wrapper without storage
            entry = None
    if entry is not None:
        unit, present = entry
        at = int(tensor.storage_offset()) * tensor.element_size()
        sharded = unit.first.get(at) or unit.param_at(at)
        if tensor.dtype is sharded.spec.dtype:  # else other elements over the bytes: held, as by any alias
            found = _Reference(tensor, unit, sharded, present)
            if beneath is not None and beneath[0].__module__ == checkpoint.__name__:
                found.version = None
            return found
    if beneath is not None:
        return _Theirs(beneath[0](tensor), beneath[1])
    if offload is not None:
        packed = offload.pack(tensor, frames())
        if packed is not None:
            return packed
    return tensor.detach(), tensor._version


@eager
def _unpack(packed: Any) -> torch.Tensor:
    if type(packed) is tuple:
        tensor, version = packed
        if tensor._version != version:
            check_version(tensor._version, version, tensor, tensor.shape)
        return tensor  # type: ignore[no-any-return]
    if type(packed) is _Theirs:
        return packed.hook(packed.packed)
    return packed.unpack()  # type: ignore[no-any-return]


def autocast_error(where: str, device_type: str) -> PrecisionError:
    """Return the error of a forward under torch.autocast."""
    return PrecisionError(
        "torch.autocast does not support offloaded parameters",
        expected=f"{where} outside of torch.autocast",
        found=f"autocast({device_type!r}) is on: it keeps its own copies of the weights",
        cure='set the compute dtype with Config(dtype="bf16"); turn mixed precision off in accelerate or in '
        "the Trainer",
    )


def check_version(found: int, expected: int, tensor: torch.Tensor, shape: torch.Size) -> None:
    """Raise what autograd raises for a saved tensor that has changed; see [Note: versions of packed
    tensors]."""
    if found != expected:
        with torch._C.DisableTorchFunctionSubclass():
            kind = f"torch.{tensor.device.type} {tensor.dtype}"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{kind} {list(shape)}] is at version {found}; expected version {expected} instead."
        )


# -- setting and taking off -----------------------------------------------------------------


def enter(owner: object, offload: Offload | None = None) -> object:
    """Set our hooks in this thread, unless they are the innermost already; return what `leave` takes."""
    if not _UNITS and offload is None:
        return None
    if not _graph._saved_tensors_hooks_is_enabled():
        return None  # inside torch.func.grad: [Note: held units]
    pairs = _frames.list
    if pairs and (last := pairs[-1].forwards) is not None and last.are_over:
        _leave_over()
    top = _top()
    if top is None or top[1] is not _unpack:
        return _push(top, offload, owner)
    if offload is None or top[0].args != (None, None):
        return None
    return _push(None, offload, owner)


def leave(frame: object) -> None:
    """Take off what `enter` set, and what was left on top of it."""
    if frame in _frames.list:
        _pop_to(frame)


def leave_all_of(owner: object) -> None:
    """Take off what `owner` has set in this thread, and what was left on top of it."""
    frame = next((frame for frame in reversed(_frames.list) if frame.owner is owner), None)
    if frame is not None:
        _pop_to(frame)


def leave_left() -> None:
    """Take off what `gathered` blocks that were left have set in this thread, and what is on top of it."""
    for frame in _frames.list:
        if isinstance(frame.owner, Block) and frame.owner.is_left:
            return _pop_to(frame)


def reset(owner: object) -> None:
    """Take off what forwards of `owner` that were interrupted have left: torch calls no hook after a
    KeyboardInterrupt."""
    while _frames.list and _frames.list[-1].owner is owner:
        _pop()


def _leave_over() -> bool:
    """Take off, innermost first, what forwards that are over have left in this thread, if nobody else's is on
    top of it; return whether anything was."""
    pairs, taken = _frames.list, False
    while pairs and (last := pairs[-1].forwards) is not None and last.are_over and _is_top(pairs[-1]):
        _pop()
        taken = True
    return taken


def _push(beneath: Any, offload: Offload | None, owner: object) -> _Frame:
    frame = _Frame(beneath, offload, owner)
    _frames.list.append(frame)
    _graph._push_saved_tensors_default_hooks(*frame.hooks)
    return frame


def _pop_to(frame: object) -> None:
    while _frames.list:
        last = _frames.list[-1]
        _pop()
        if last is frame:
            return


def _pop() -> None:
    if _is_top(_frames.list[-1]):
        try:
            _graph._pop_saved_tensors_default_hooks()
        except RuntimeError:  # none is set: an interrupt came between the two lines of `_push`
            _frames.list.pop()
            return
    _frames.list.pop()  # last: what an interrupt leaves here is dropped, or popped, by the next `_pop`


def _push_on_top() -> None:
    top = _top()
    if top is None or top[1] is not _unpack:
        _graph._push_saved_tensors_default_hooks(functools.partial(_pack, top, None), _unpack)


def _newest() -> Any:
    return _frames.list[-1].hooks if _frames.list else None


#: Returns the innermost hooks; None if there are none. Before 2.8 torch does not tell: then those are known
#: that were set by torch's own context manager.
_top: Callable[[], Any] = (
    functools.partial(top, True)
    if (top := getattr(_graph, "_top_saved_tensors_default_hooks", None))
    else _newest
)


def _is_top(frame: _Frame) -> bool:
    """Whether nobody has set hooks after these."""
    top = _top()
    return top is None or top[0] is frame.hooks[0]


def _composed() -> None:
    """Put the engine's hooks on top of hooks that others set, and remove them while hooks are disabled. Done
    once; has no effect while there is no unit whose memory may be freed."""
    manager: Any = graph.saved_tensors_hooks
    their_enter, their_exit, disable = manager.__enter__, manager.__exit__, graph.disable_saved_tensors_hooks

    @functools.wraps(their_enter)
    def enter_both(self: Any) -> Any:
        result = their_enter(self)
        try:
            if _UNITS:
                _push((self.pack_hook, self.unpack_hook), None, self)
        except BaseException:  # an interrupt: nobody will exit what was not entered
            exit_both(self, None, None, None)
            raise
        return result

    @functools.wraps(their_exit)
    def exit_both(self: Any, *args: object) -> Any:
        try:
            leave_all_of(self)
        finally:
            their_exit(self, *args)

    @contextlib.contextmanager
    @functools.wraps(disable)
    def disable_without_ours(error_message: str) -> Iterator[None]:
        taken = []
        while _frames.list and not _has_theirs(_frames.list[-1]):
            taken.append(_frames.list[-1])
            _pop()
        try:
            with disable(error_message):
                yield
        finally:
            for frame in reversed(taken):
                _frames.list.append(frame)
                _graph._push_saved_tensors_default_hooks(*frame.hooks)

    manager.__enter__, manager.__exit__ = enter_both, exit_both
    graph.disable_saved_tensors_hooks = disable_without_ours


def _has_theirs(frame: _Frame) -> bool:
    return frame.hooks[0].args[0] is not None


_composed()
