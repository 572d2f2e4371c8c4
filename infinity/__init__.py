"""infinity: trains PyTorch models whose state does not fit on the device or in host memory."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from .core.installed import check_installed
from .version import __version__

if TYPE_CHECKING:
    from . import optim as optim
    from .api.copies import copy_to
    from .api.export import export
    from .api.gathered import gathered, gradient
    from .api.inference import inference
    from .api.init import init
    from .api.load import load
    from .api.metrics import metrics
    from .api.run import Run
    from .api.save import save
    from .api.trace import trace
    from .api.wrap import close, flush, unwrap, wrap
    from .core.config import Config
    from .core.errors import InfinityError

__all__ = [
    "Config",
    "InfinityError",
    "Run",
    "__version__",
    "close",
    "copy_to",
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
    "Run": "api.run",
    **dict.fromkeys(("gathered", "gradient"), "api.gathered"),
    "copy_to": "api.copies",
    "export": "api.export",
    "load": "api.load",
    "save": "api.save",
    **dict.fromkeys(("wrap", "flush", "unwrap", "close"), "api.wrap"),
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module(".optim", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


_inherited = False


def _joined() -> bool:
    """Return whether this process has a process group."""
    return bool(getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)())


def _after_fork() -> None:
    global _inherited
    _inherited = _joined()  # its parent is the rank


def _at_exit() -> None:
    """Tell the other ranks where an exception ends this one, wherever it came from; where it ends otherwise,
    if it has joined their process group."""
    several = "WORLD_SIZE" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ
    joined = _joined() and not _inherited
    if several and "torch" in sys.modules and (hasattr(sys, "last_value") or joined):
        importlib.import_module(".hardware.comm", __name__).tell_early_end()


os.register_at_fork(after_in_child=_after_fork)
# Here, and not where ranks connect: a rank may fail before it uses anything of this package.
atexit.register(_at_exit)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


check_installed()
