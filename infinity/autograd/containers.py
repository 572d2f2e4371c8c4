"""The tensors in what a module takes and returns: containers of any kind that users nest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output: containers, dataclasses and plain objects are looked into."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, type)) or id(value) in seen:
        return
    seen.add(id(value))
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    elif not isinstance(value, nn.Module) and hasattr(value, "__dict__") and not callable(value):
        items = vars(value).values()
    for item in items:
        yield from tensors_in(item, seen)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with its tensors changed; containers of unknown kinds stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is dict:
        return {k: map_tensors(v, change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(v, change) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, change) for v in value))
    if isinstance(value, dict):  # ordered dicts, Hugging Face's ModelOutput: same class, in place
        for key in list(value):
            new = map_tensors(value[key], change)
            if new is not value[key]:
                value[key] = new
    return value


def cast(value: Any, dtype: torch.dtype) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    return map_tensors(value, change)
