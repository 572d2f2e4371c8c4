"""Settings, schedulers and checkpoints of DeepSpeed. Nothing else in the package imports this, and DeepSpeed
itself is not needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .schedulers import scheduler_from
    from .settings import config_from

__all__ = ["config_from", "scheduler_from"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "schedulers" if name == "scheduler_from" else "settings"  # `infinity plan` needs no torch
    return getattr(importlib.import_module(f".{home}", __name__), name)
