"""infinity: trains PyTorch models whose state does not fit on the device or in host memory."""

from .core.config import Config
from .core.errors import InfinityError
from .surface.engine import close, gathered, gradient, metrics, wrap
from .surface.init import init
from .version import __version__

__all__ = [
    "Config",
    "InfinityError",
    "__version__",
    "close",
    "gathered",
    "gradient",
    "init",
    "metrics",
    "wrap",
]
