"""The tensors in the inputs and outputs of a module, in nested containers of any kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any, *, objects: bool = True) -> list[torch.Tensor]:
    """Return the tensors in containers, and with `objects` also in dataclasses and plain objects."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    left = [value]  # the first comes last
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
            continue
        kind = type(value)
        if value is None or kind in _NOTHING or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is tuple or kind is list:
            left.extend(reversed(value))
        elif kind is dict or isinstance(value, Mapping):
            left.extend(reversed([*value.values()]))
        elif isinstance(value, (list, tuple, set)):
            left.extend(reversed([*value]))
        elif isinstance(value, (str, bytes, int, float, type)):
            continue
        elif objects and not (isinstance(value, nn.Module) or callable(value)) and hasattr(value, "__dict__"):
            left.extend(reversed([*vars(value).values()]))
    return found


#: Classes of values without tensors.
_NOTHING = (bool, int, float, str, bytes)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating tensors in `dtype`; see `mapped`."""
    return mapped(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with each tensor as `change` returns it. A container in which nothing changes is the one
    that was given, so that what is put into it arrives; others are copies of their class. Containers of
    unknown kinds stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {k: new for k, v in value.items() if (new := mapped(v, change)) is not v}
        return _with_items(value, changed) if changed else value
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_make")):
        items = [mapped(v, change) for v in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _with_items(value: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a dict with some items changed; itself where its class takes no items."""
    if type(value) is dict:
        return {**value, **changed}
    try:  # ordered dicts, Hugging Face's ModelOutput
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
    except Exception:
        return value
    return result
