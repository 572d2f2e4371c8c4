"""Which calls a thread is in, by its Python frames.

[Note: looks at the stack] torch calls no hook when a KeyboardInterrupt ends a forward, when an error ends a
backward, or when a state dict's own hooks raise. It does not tell a saved-tensor hook which code saves. The
engine finds these facts on the stack, and only through this file.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final


def frames(ident: int | None = None) -> Iterator[FrameType]:
    """Return the Python frames of a thread (None: this one, from the caller's on), innermost first."""
    return _from(sys._getframe(1) if ident in (None, threading.get_ident()) else _current().get(ident or 0))


def _from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_place() -> str:
    """Return where the main thread is: the innermost line outside of libraries, if there is one."""
    found = list(frames(threading.main_thread().ident))
    outside = (f for f in found if not f.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")))
    frame = next((f for f in outside if "-packages/" not in f.f_code.co_filename), next(iter(found), None))
    return "no Python code" if frame is None else f"`{frame.f_code.co_name}` at {_line_of(frame)}"


def _line_of(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    for root in (_BEGUN_IN, *_LIBRARIES):
        path = path.removeprefix(root + os.sep)
    return f"{path.rpartition('-packages/')[2]}:{frame.f_lineno}"


_BEGUN_IN = os.path.abspath(os.curdir) if os.path.isdir(os.curdir) else os.sep
#: Where nothing is a user's: Python's library, and this package.
_LIBRARIES = (sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(__file__)))


#: The modules of torch that have the functions below.
_MODULES: Final = "torch.nn.modules.module"
_GRAPH: Final = "torch.autograd.graph"
_DISTRIBUTED: Final = "torch.distributed.checkpoint.state_dict"
_ACCELERATE: Final = "accelerate.accelerator"


def _is_of(frame: FrameType, home: str, name: str) -> bool:
    """Return whether a frame is one of torch's own functions, of the module `home`, with `name` in its name.
    A user's function may have any name. Code that Dynamo makes of a function stays in its module, with a
    longer name (`torch_dynamo_resume_in__call_impl_at_…`)."""
    return name in frame.f_code.co_name and frame.f_globals.get("__name__") == home


def is_backward(frame: FrameType) -> bool:
    """Return whether a frame is torch's function that runs a backward."""
    return _is_of(frame, _GRAPH, "_engine_run_backward")


def is_state_dict(frame: FrameType) -> bool:
    """Return whether a frame is a function of torch that makes or loads the state dict of a module."""
    return _is_of(frame, _MODULES, "state_dict")


def is_for_checkpoint() -> bool:
    """Return whether torch's functions for distributed checkpoints (`get_optimizer_state_dict`,
    `get_state_dict`, and what they call in a load) make a state dict of an optimizer on this thread."""
    return any(_is_of(frame, _DISTRIBUTED, "_get_optim_state_dict") for frame in frames())


def is_prepared_now() -> bool:
    """Return whether accelerate prepares an optimizer on this thread."""
    return any(_is_of(frame, _ACCELERATE, "prepare_optimizer") for frame in frames())


def broadcast_has_model() -> bool | None:
    """Return whether torch's `set_state_dict`, which this thread is in with ``broadcast_from_rank0=True``, is
    going to load the model: torch does so where the model's state dict of this rank is not empty. None: this
    thread is in no such call."""
    for frame in frames():
        if _is_of(frame, _DISTRIBUTED, "set_state_dict"):
            info = frame.f_locals.get("info")
            if getattr(info, "broadcast_from_rank0", False):
                return bool(getattr(info, "handle_model", True))
    return None


def calls_of(module: object) -> int:
    """Return how many calls of a module are on this thread's stack."""
    calls = (f for f in frames() if f.f_code.co_name == "_call_impl" and _is_of(f, _MODULES, "_call_impl"))
    return sum(f.f_locals.get("self") is module for f in calls)


def is_called(ident: int | None = None) -> bool:
    """Return whether a thread (None: this one) is in a call of any module."""
    return any(_is_of(frame, _MODULES, "_call_impl") for frame in frames(ident))


def is_inside(ident: int | None = None) -> bool:
    """Return whether a thread (None: this one) is in a forward, a backward or a state dict."""
    return is_called(ident) or any(is_backward(f) or is_state_dict(f) for f in frames(ident))


def is_any_in_backward() -> bool:
    """Return whether any thread is in a backward."""
    return any(is_backward(frame) for top in _current().values() for frame in _from(top))


def _current() -> dict[int, FrameType]:
    # CPython has a lock while it makes these, which whoever starts a thread waits for. A garbage collection
    # within may wait for that thread (torch gives tensors back without the GIL): CPython's issue 106883.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
