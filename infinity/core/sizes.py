"""Sizes, dtypes and tiers: the words that every other file shares.

Sizes are in bytes. ``KiB`` … ``TiB`` are powers of 1024; a parsed ``KB`` … ``TB`` is a power of 1000.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from typing import TYPE_CHECKING, Final

from .errors import ConfigError

if TYPE_CHECKING:  # `infinity doctor` reads this where there is no torch, and a plan needs none
    import torch

KiB: Final = 1 << 10
MiB: Final = 1 << 20
GiB: Final = 1 << 30
TiB: Final = 1 << 40

#: Alignment of every section on NVMe and of every buffer that meets it, in bytes, on any device.
ALIGNMENT: Final = 4096
#: Elements whose squares are summed as one tree in a norm (see [Note: norms]).
NORM_BLOCK: Final = 65_536
#: Every parameter begins on a multiple of this many elements, so that kernels find it aligned.
SEGMENT_ELEMENTS: Final = 64
#: Elements of a parameter that share a scale, where moments are kept in 8 bits.
MOMENT_BLOCK: Final = 256


class Tier(str, enum.Enum):
    """Where bytes live."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"

    def __str__(self) -> str:
        return self.value


#: Compute dtypes, and torch's names for them.
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Bytes of an element, by the short name of the dtype; ``8bit`` is one of moments alone.
ITEMSIZES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "8bit": 1}
_ALIASES: Final[dict[str, str]] = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1 << (10 * k) for k, p in enumerate("kmgtp", 1)},
    **{f"{p}b": 1000**k for k, p in enumerate("kmgtp", 1)},
}


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the short name (``fp32``, ``bf16``, ``fp16``) of a compute dtype, or of one of these names."""
    word = str(dtype).removeprefix("torch.")
    return _ALIASES.get(word, word)


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a short name."""
    import torch

    dtype: torch.dtype = getattr(torch, {**_DTYPES, "8bit": "uint8"}[name])
    return dtype


def parse_precision(value: str | torch.dtype, name: str = "dtype") -> str:
    """Return the short name for ``fp32``, ``bf16`` or ``fp16`` (or torch's own names, or its dtype). `name`
    is the name of the setting.

    Raises:
        ConfigError: `value` names no supported compute dtype.
    """
    word = dtype_name(str(value).removeprefix("torch.").lower())
    if word in _DTYPES:
        return word
    raise ConfigError(
        f"unknown {'compute dtype' if name == 'dtype' else name}",
        expected=", ".join(_DTYPES),
        found=repr(value),
        cure=f'{name}="fp32", "bf16" or "fp16"',
    )


def parse_dtype(value: str | torch.dtype, name: str = "dtype") -> torch.dtype:
    """Return torch's dtype for every value that `parse_precision` takes. Raises the same errors."""
    return torch_dtype(parse_precision(value, name))


def parse_size(value: int | str, name: str = "size") -> int:
    """Return a size in bytes from ``1234``, ``"20GiB"``, ``"1.5 GB"`` …

    Raises:
        ConfigError: `value` is negative or not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    raise ConfigError(
        f"{name} is not a size",
        expected='a number of bytes, or a number with a unit such as "20GiB"',
        found=repr(value),
        cure=f'{name}="20GiB"',
    )


def format_size(nbytes: float) -> str:
    """Return `nbytes` in a readable form: ``512 B``, ``1.50 GiB``."""
    sign = "-" if nbytes < 0 else ""
    size = abs(nbytes)
    if size < KiB:
        return f"{sign}{size:.0f} B"
    power = min(int(math.log2(size)) // 10, 5)
    return f"{sign}{size / (1 << (10 * power)):.2f} {'KMGTP'[power - 1]}iB"


def ceil_to(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple
