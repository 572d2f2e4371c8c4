"""When the backward of a scope is over.

[Note: the end of a scope's backward] Autograd numbers the nodes that a thread creates, and runs the newest
first: in one backward the numbers of a thread's nodes only fall. So a scope's backward is over
when a node runs that is older than the scope's first computation. The engine reads the number of the running
node wherever a backward calls it: at a scope's inputs (by hooks on the tensors themselves, so that the scope
gets the tensors that its caller passed), at other scopes' outputs, at a recomputation, and when autograd
unpacks a tensor of a unit that is not on the device. So the end is never too early; a scope that is left is
over when the backward that began it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .containers import tensors_in


def watch(args: Any, kwargs: Any, end: Callable[[torch.Tensor], None]) -> None:
    """Register `end`, which a backward calls when the node of one of the inputs is about to run."""
    seen: set[int] = set()
    for value in (*args, *kwargs.values()):
        for tensor in (value,) if type(value) is torch.Tensor else tensors_in(value, objects=False):
            # What a scope does to a view in place gives its base a new node, and may leave the view's out.
            for watched in (tensor, tensor._base):
                if watched is not None and watched.grad_fn is not None and id(watched) not in seen:
                    seen.add(id(watched))
                    watched.register_hook(end)
