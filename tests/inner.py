"""Constants of the engine that are no settings, and that a test may change: what comes after 40 steps, after
120 seconds or beyond 1 GiB then comes at once. A test names them beside the settings:
`inner.config(update="delayed", delay_warmup_steps=1)`. They count until the next `inner.config`, or until
the test ends."""

from __future__ import annotations

from typing import Any

import infinity
from infinity.core.sizes import parse_size
from infinity.hardware import aio
from infinity.optim import optimizer
from infinity.planning import footprint

#: By name: the module, and its constant.
CONSTANTS: dict[str, tuple[Any, str]] = {
    "io_deadline": (aio, "IO_DEADLINE"),
    "delay_warmup_steps": (optimizer, "DELAY_WARMUP_STEPS"),
    "loss_scale_window": (optimizer, "LOSS_SCALE_WINDOW"),
    "update_depth": (footprint, "UPDATE_DEPTH"),
    "read_ahead_memory": (footprint, "READ_AHEAD"),
    "prefetch_memory": (footprint, "AHEAD_MOST"),
    "activation_memory": (footprint, "ACTIVATIONS_MOST"),
}
_DEFAULTS = {name: getattr(*at) for name, at in CONSTANTS.items()}


def config(**given: Any) -> infinity.Config:
    """Set the constants to those in `given`, the others to their defaults; the rest are settings."""
    for name, (module, constant) in CONSTANTS.items():
        value = given.pop(name, _DEFAULTS[name])
        setattr(module, constant, parse_size(value, name) if isinstance(value, str) else value)
    return infinity.Config(**given)


def reset() -> None:
    """Set all of the constants to their defaults."""
    config()
