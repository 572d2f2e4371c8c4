"""What torch.compile stays out of: our hooks, which look at what is there now, at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


# torch.compile prints this as its reason, where a graph may not break.
_REASON = (
    "the engine looks at what is there now, at every call. With fullgraph=True: if a parameter of another "
    "module is given to the function, call it inside `with infinity.gathered(parameter):`; else leave "
    "fullgraph out. torch.export takes what infinity.unwrap(model) returns"
)


def eager(function: _F) -> _F:
    """Keep torch.compile out of `function` and of all that it calls, also where torch's C++ calls it from a
    frame that is compiled. (It would take a version counter, say, for a constant.) What
    torch.compiler.disable does, but without its import of the compiler, which costs a run that never
    compiles seconds and megabytes."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):  # before 2.7
        return torch.compiler.disable(function)  # type: ignore[no-any-return]
    skip = frames._FrameAction.SKIP
    code = function.__code__
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function
