"""Declares `infinity._aio` to cffi (API mode): what Python may call, and from which C files.

Used by `setup.py` (cffi_modules). No header of libaio or liburing is needed.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent if "__file__" in globals() else Path("csrc/aio").resolve()
SOURCES = ("ring", "ticket", "system", "crc32c", "backend_libaio", "backend_uring", "backend_threads")
# aio.h is the one declaration of the interface; from here on it is the backends' own.
_END = "/* ---- backends"


def declarations() -> str:
    """Return what of aio.h Python sees: without preprocessor lines, constants with their values."""
    text = (HERE / "aio.h").read_text(encoding="utf-8")
    text = text[: text.index(_END)]
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    constants = dict(re.findall(r"^#define (AIO_\w+) +(\d+)u?\s*$", text, flags=re.M))
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    for name, value in constants.items():
        text = re.sub(rf"\[{name}\]", f"[{value}]", text)
    return text + "".join(f"\n#define {name} {value}" for name, value in constants.items())


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "infinity._aio",
    '#include "aio.h"',
    sources=[f"csrc/aio/{name}.c" for name in SOURCES],
    depends=["csrc/aio/aio.h", "csrc/aio/ring.h"],
    include_dirs=["csrc/aio"],
    define_macros=[("_GNU_SOURCE", "1")],
    extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread", "-ldl"],
)
