"""infinity: trains PyTorch models whose state does not fit on the device or in host memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api.export import export
    from .api.gathered import gathered, gradient
    from .api.inference import inference
    from .api.init import init
    from .api.load import load
    from .api.metrics import metrics
    from .api.save import save
    from .api.trace import trace
    from .api.wrap import close, flush, unwrap, wrap
    from .core.config import Config
    from .core.errors import InfinityError

__all__ = [
    "Config",
    "InfinityError",
    "__version__",
    "close",
    "export",
    "flush",
    "gathered",
    "gradient",
    "inference",
    "init",
    "load",
    "metrics",
    "save",
    "trace",
    "unwrap",
    "wrap",
]

# Imported when first used: `infinity doctor` must start where a native module does not, and
# `infinity --help` without torch.
_HOMES = {
    "Config": "core.config",
    "InfinityError": "core.errors",
    "inference": "api.inference",
    "init": "api.init",
    "trace": "api.trace",
    "metrics": "api.metrics",
    **dict.fromkeys(("gathered", "gradient"), "api.gathered"),
    "export": "api.export",
    "load": "api.load",
    "save": "api.save",
    **dict.fromkeys(("wrap", "flush", "unwrap", "close"), "api.wrap"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
