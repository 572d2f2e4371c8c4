"""When the backward of a scope has come to its inputs.

A scope's inputs are replaced by aliases of them, made before all that the scope computes: autograd, which
runs what was made last first, comes to an alias when nothing of the scope is left to run. (Were the end to
wait for all of them, the hooks would have to know each other's nodes, and graphs that know themselves are
never freed.)

[Note: inputs edited in place] An operator that edits an alias (`nn.ReLU(inplace=True)` first in a block,
`x += …`) gives the tensor beneath it, which is the caller's, a new node, as in torch; the alias's own is then
left out of the graph unless something used it before. So the first such node stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .containers import map_tensors


class Alias(NamedTuple):
    """An input as the scope gets it, and what was there before the scope computed anything."""

    tensor: torch.Tensor
    version: int
    node: Any  # of the alias
    beneath: Any  # of the tensor that it is a view of


def watch(args: Any, kwargs: Any, end: Callable[[], None]) -> tuple[Any, list[Alias]]:
    """Have `end` called in a backward when the gradient of an input is there; return the inputs, and what
    `watch_edited` takes; None and nothing where none has a gradient."""
    aliases: list[Alias] = []

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            tensor = tensor.view_as(tensor)
            tensor.register_hook(lambda grad: end())
            base: Any = tensor._base
            beneath = base.grad_fn if base is not None else None
            aliases.append(Alias(tensor, tensor._version, tensor.grad_fn, beneath))
        return tensor

    inputs = map_tensors((args, kwargs), alias)
    return (inputs if aliases else None), aliases


def watch_edited(aliases: Sequence[Alias], end: Callable[[], None]) -> None:
    """After a scope's forward: see to inputs that it has edited in place."""
    for tensor, version, own, beneath in aliases:
        if tensor._version == version or beneath is None:
            continue
        first, node = None, tensor._base.grad_fn  # type: ignore[union-attr]
        while node is not None and node is not beneath:
            first, node = node, node.next_functions[0][0] if node.next_functions else None
        if first is not None and node is not None:
            first.register_hook(_unless_run(own, end))


def _unless_run(own: Any, end: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls `end`, unless the backward under way comes to the node `own` later."""

    def ends(*grads: Any) -> None:
        if not torch._C._will_engine_execute_node(own):
            end()

    return ends
