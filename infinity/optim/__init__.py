"""From the tier to new values. The names below are for users, everything else is for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lion import Lion
    from .muon import Muon, muon_groups

__all__ = ["Lion", "Muon", "muon_groups"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import lion, muon

    return getattr(lion if name == "Lion" else muon, name)
