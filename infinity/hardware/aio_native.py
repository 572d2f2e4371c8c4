"""The native I/O module, or the error that explains its absence; and what to do about each error number."""

from __future__ import annotations

import errno as numbers
from typing import Final

from infinity.core.errors import BuildError

try:
    from infinity._aio import ffi, lib
except ImportError as error:  # pragma: no cover - only without the native part
    raise BuildError(
        "the native I/O engine is missing or was built for another Python",
        expected="infinity._aio",
        found=str(error),
        cure="pip install . (or: python setup.py build_ext --inplace)",
    ) from error

__all__ = ["ALIGNMENT", "CURES", "POLL_MS", "ffi", "lib"]

#: What offset, length and address of a direct block are multiples of, in bytes.
ALIGNMENT: Final = int(lib.AIO_ALIGN)
#: Longest single wait in the native part, in ms.
POLL_MS: Final = int(lib.AIO_MAX_WAIT_MS)
#: What to do about an error, by errno.
CURES: Final = {
    numbers.EIO: "the drive reports an I/O error: check dmesg and smartctl, and use another drive",
    numbers.ENOSPC: "free space on that drive, or name a larger one",
    numbers.EDQUOT: "raise the quota, or name a directory without one",
    numbers.EFBIG: "raise the limit on file sizes (ulimit -f)",
    numbers.EROFS: "mount the file system for writing",
    numbers.EBADF: "keep the file open, for this direction, until its transfers are complete",
    numbers.EFAULT: "keep the buffer mapped until its transfers are complete",
    numbers.EINVAL: "set INFINITY_AIO=threads to see whether direct I/O fails; or use another file system",
    numbers.ENODATA: "make sure that nothing truncates the file: it is shorter than the request, or full",
    numbers.ESHUTDOWN: "see the first error of this directory; its drive did not answer in time",
    numbers.ETIMEDOUT: "check dmesg, and use another drive",
}
