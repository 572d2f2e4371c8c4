"""Parameters of users' classes: what they are while their values are away has the methods of both."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

from torch import nn


@functools.cache
def variant(base: type, cls: type) -> Any:
    """Return the class that derives from `base`, a class of ours, and from `cls`, a parameter's own, which
    it has as `plain`; `base` itself for an ordinary parameter."""
    if cls is nn.Parameter:
        return base
    name = base.__name__.removesuffix("Parameter") + cls.__name__
    names = {"plain": cls, "__module__": base.__module__}
    return types.new_class(name, (base, cls), {}, lambda space: space.update(names))


def why_not(param: nn.Parameter, bases: Sequence[type]) -> str:
    """Return what keeps `param` from being of the variants of `bases`; "" if nothing does."""
    cls = type(param)
    try:
        for base in bases:
            param.__class__ = variant(base, cls)
            param.__class__ = cls
    except Exception as error:  # whatever the class does where it is derived from
        return f"{type(error).__name__}: {error}"
    return ""
