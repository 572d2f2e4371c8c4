"""From the tier to new values. `Lion` is for users, everything else for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lion import Lion

__all__ = ["Lion"]


def __getattr__(name: str) -> Any:
    if name != "Lion":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .lion import Lion

    return Lion
