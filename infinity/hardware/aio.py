"""Asynchronous I/O between host memory and files: rings, tickets, checksums.

A `Ring` is one native I/O thread with its kernel queue, for one directory. `read` and `write` give
a `Ticket` at once. The ring cuts the transfer into blocks, keeps at most `queue_depth` of them in the kernel,
and retries blocks where a retry can help. It promises no order between tickets. The native part is
csrc/aio. All other files import from here.
"""

from __future__ import annotations

import contextlib
import errno as numbers
import os
import time
import weakref
import zlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from infinity.core.config import BLOCK_BYTES, QUEUE_DEPTH
from infinity.core.errors import (
    BackendError,
    ClosedError,
    ConfigError,
    DeadlineError,
    TransferError,
)

from .aio_native import ALIGNMENT, CURES, POLL_MS, ffi, lib
from .aio_probe import BACKENDS, available_backends, choose_backend, ring_options
from .direct_file import DirectFile
from .ticket import Priority, Ticket
from .tuned import tuned

__all__ = [
    "ALIGNMENT",
    "BACKENDS",
    "DirectFile",
    "Priority",
    "Ring",
    "RingStats",
    "Ticket",
    "available_backends",
    "crc32c",
    "crc32c_combine",
    "crc32c_zeros",
    "crcs_of",
    "open_ring",
]

#: Seconds that one request to a drive may take.
IO_DEADLINE: Final = 120.0


class RingStats(NamedTuple):
    """What a ring has done since it was opened."""

    bytes_read: int
    bytes_written: int
    reads: int  #: blocks
    writes: int  #: blocks
    retries: int  #: blocks submitted again (short, EIO, EINTR, EAGAIN)
    short_transfers: int  #: results that moved less than asked
    busy: int  #: times the kernel took none of the blocks offered
    failed_tickets: int
    expired_tickets: int  #: past their deadline; their buffers are quarantined
    submits: int  #: submit calls
    submit_max_seconds: float
    submit_histogram: tuple[int, ...]  #: element i: calls that took less than 2^i µs, not less than half
    cpu_seconds: float  #: of the ring's thread and its workers
    active_seconds: float  #: in which there were blocks in the kernel
    queued_tickets: int  #: with bytes not yet given to the kernel
    blocks_in_flight: int
    failed: bool  #: a deadline was missed; the ring takes no more tickets


class Ring:
    """One I/O thread with its kernel queue, for one directory. Safe for any number of threads.

    Args:
        name: for messages.
        path: the directory that it serves: probed for what its file system can do.
        backend: ``"auto"`` or one of `BACKENDS`; INFINITY_AIO outweighs it.
        block_bytes: largest single request, a multiple of 4096, at most 1 GiB.
        queue_depth: requests in the kernel at once.
        deadline: seconds that one request may take before its ticket fails for good. None: `IO_DEADLINE`.
        threads: of the backend ``threads``.
        delay_seed: not None: random delays, for tests ([Note: random delays] in csrc/aio/ring.c).
            Default: the environment variable INFINITY_DELAY_SEED, if it is set.

    Attributes:
        backend, reason: which backend was taken, and why.
        block_bytes, queue_depth, threads: as given.

    Raises:
        BackendError: the backend is unknown or does not work here.
        ConfigError: a size is out of range.
        DirectoryError: `path` is not a directory in which a file can be made.
    """

    def __init__(
        self,
        name: str,
        *,
        path: str | None = None,
        backend: str = "auto",
        block_bytes: int = BLOCK_BYTES,
        queue_depth: int = QUEUE_DEPTH,
        deadline: float | None = None,
        threads: int = 4,
        delay_seed: int | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self.deadline = deadline = IO_DEADLINE if deadline is None else deadline
        self.block_bytes, self.queue_depth, self.threads = block_bytes, queue_depth, threads
        self._pid = os.getpid()
        self._closed = False
        self._handle: Any = None
        self.backend, self.reason = choose_backend(backend, path)
        if delay_seed is None and os.environ.get("INFINITY_DELAY_SEED"):
            delay_seed = zlib.crc32(f"{os.environ['INFINITY_DELAY_SEED']} {name}".encode())
        # Odd multiples of an odd number: never 0, which means no delays.
        seed = 0 if delay_seed is None else (2 * delay_seed + 1) * 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
        out = ffi.new("aio_ring **")
        try:
            options = ring_options(block_bytes, queue_depth, threads, deadline, seed)
            error = lib.aio_ring_open(self.backend.encode(), options, out)
        except OverflowError:
            error = -numbers.EINVAL
        if error == -numbers.EINVAL:
            raise ConfigError(
                f"ring {name!r} cannot be opened with these sizes",
                expected="block_bytes a multiple of 4096 up to 1 GiB, queue_depth and threads from 1 to "
                f"{lib.AIO_MAX_DEPTH}, deadline > 0",
                found=f"{block_bytes=}, {queue_depth=}, {threads=}, {deadline=}",
                cure="block_bytes=1048576, queue_depth=32",
            )
        if error < 0:
            raise TransferError(
                f"ring {name!r} cannot be opened with backend {self.backend}",
                errno=-error,
                path=path,
                found=os.strerror(-error),
                cure="a smaller queue_depth, or INFINITY_AIO=threads",
            )
        self._handle = ffi.gc(out[0], lib.aio_ring_release)
        _open_rings.add(self)

    def read(
        self,
        file: DirectFile,
        offset: int,
        address: int,
        nbytes: int,
        *,
        priority: Priority = Priority.NORMAL,
    ) -> Ticket:
        """Start to read `nbytes` at `offset` of `file` into memory at `address`.

        The memory must stay mapped and unused until the ticket is done, and for good if it is
        quarantined.

        Raises:
            ClosedError: the ring or the file is closed, or belongs to another process.
            TransferError: the ring has failed (an earlier transfer missed its deadline).
            ValueError: offset, address or length is out of range.
        """
        return self._submit(0, file, offset, address, nbytes, priority)

    def write(
        self,
        file: DirectFile,
        offset: int,
        address: int,
        nbytes: int,
        *,
        priority: Priority = Priority.NORMAL,
    ) -> Ticket:
        """Start to write `nbytes` of memory at `address` to `offset` of `file`; see `read`."""
        return self._submit(1, file, offset, address, nbytes, priority)

    def _submit(
        self, write: int, file: DirectFile, offset: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        if self._closed:
            raise self.foreign()
        out = ffi.new("aio_ticket **")
        if min(offset, address, nbytes) < 0:
            raise ValueError(f"offset, address and nbytes must be ≥ 0, not {offset}, {address}, {nbytes}")
        error = lib.aio_submit(
            self._handle, write, file.fd, file.plain_fd, offset, address, nbytes, priority, out
        )
        if error == 0:
            handle = ffi.gc(out[0], lib.aio_ticket_release)
            return Ticket(self, handle, file.path, offset, nbytes, bool(write))
        if error == -numbers.ECHILD:
            raise self.foreign()
        if error == -numbers.EBADF:
            file.check()
        if error == -numbers.EINVAL:
            raise ValueError(f"out of range: {offset=}, {address=:#x}, {nbytes=}, {priority=}")
        raise TransferError(
            f"{self._label} accepts no more transfers",
            errno=-error,
            path=file.path,
            offset=offset,
            nbytes=nbytes,
            expected="a ring that works",
            found="an earlier transfer missed its deadline"
            if error == -numbers.ESHUTDOWN
            else os.strerror(-error),
            cure=CURES.get(-error, "free memory"),
        )

    @property
    def _label(self) -> str:
        return f"the I/O ring {self.name!r}" + (f" of {self.path}" if self.path else "")

    def foreign(self) -> ClosedError:
        """Return the error for a use after `close`, or in a fork."""
        forked = self._pid != os.getpid()
        return ClosedError(
            f"{self._label} " + ("belongs to the parent of this process" if forked else "is closed"),
            expected="an open ring of this process",
            found="a fork" if forked else "a closed ring",
            cure="open a ring in this process" if forked else "do not use it after close()",
        )

    def _check(self, result: int) -> int:
        if result == -numbers.ECHILD:
            raise self.foreign()
        return result

    def register_buffer(self, address: int, nbytes: int) -> bool:
        """Tell the kernel of a buffer in advance; return whether that was of use.

        Its memory must stay mapped until the ring is closed.
        """
        return self._check(lib.aio_ring_buffer(self._handle, address, nbytes, 1)) > 0

    def register_file(self, file: DirectFile) -> bool:
        """Tell the kernel of a file in advance; return whether that was of use.

        Closing the file forgets it.
        """
        taken = self._check(lib.aio_ring_file(self._handle, file.fd, 1)) > 0
        if taken:
            file.on_close(self.forget_file)
        return taken

    def forget_file(self, fd: int) -> None:
        """Take back `register_file` for this descriptor."""
        self._check(lib.aio_ring_file(self._handle, fd, 0))

    def hold(self, hold: bool = True) -> None:
        """While held, submit nothing: for a batch, or to see an order in a test."""
        self._check(lib.aio_ring_hold(self._handle, int(hold)))

    def stats(self) -> RingStats:
        """Return the counters. Also after `close`."""
        raw = ffi.new("aio_stats *")
        self._check(lib.aio_ring_stats(self._handle, raw))
        return RingStats(
            bytes_read=int(raw.bytes_read),
            bytes_written=int(raw.bytes_written),
            reads=int(raw.reads),
            writes=int(raw.writes),
            retries=int(raw.retries),
            short_transfers=int(raw.short_transfers),
            busy=int(raw.busy),
            failed_tickets=int(raw.failed_tickets),
            expired_tickets=int(raw.expired_tickets),
            submits=int(raw.submits),
            submit_max_seconds=int(raw.submit_max_ns) * 1e-9,
            submit_histogram=tuple(int(n) for n in raw.submit_histogram),
            cpu_seconds=int(raw.cpu_ns) * 1e-9,
            active_seconds=int(raw.active_ns) * 1e-9,
            queued_tickets=int(raw.queued_tickets),
            blocks_in_flight=int(raw.blocks_in_flight),
            failed=bool(raw.failed),
        )

    def close(self, timeout: float | None = None) -> None:
        """Finish every ticket, then end the thread. Closing again does nothing.

        Args:
            timeout: seconds; what is not complete by then is given up: queued tickets fail, and
                those in the kernel are past their deadline. None: until all is complete (the
                ring's deadline bounds that).

        Raises:
            DeadlineError: transfers missed their deadline, now or before: their buffers are
                quarantined.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        until = float("inf") if timeout is None else time.monotonic() + timeout
        stuck_until = float("inf")
        while (result := lib.aio_ring_shutdown(self._handle, POLL_MS)) == -numbers.EINPROGRESS:
            now = time.monotonic()
            if now >= until:
                lib.aio_ring_abandon(self._handle)
                until = float("inf")
            if stuck_until == float("inf") and self.stats().failed:
                # Its thread may sit in a system call that does not return.
                stuck_until = now + (1.0 if timeout is None else 0.3)
            if now >= stuck_until:
                break
        _open_rings.discard(self)
        if result != 0:
            raise DeadlineError(
                f"{self._label} was closed with {self.stats().expired_tickets} transfers past their deadline",
                errno=numbers.ETIMEDOUT,
                path=self.path,
                expected=f"all transfers complete within {self.deadline if timeout is None else timeout} s",
                found="buffers in quarantine: the kernel may still touch them",
                cure=CURES[numbers.ETIMEDOUT],
            )

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ring({self.name!r}, path={self.path!r}, backend={self.backend!r})"


_open_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _close_in_child() -> None:
    """After a fork: close the inherited descriptors ([Note: what a fork may do] in aio.h)."""
    for ring in list(_open_rings):
        lib.aio_ring_forked(ring._handle)
        ring._closed = True


os.register_at_fork(after_in_child=_close_in_child)


def crc32c(address: int, nbytes: int, crc: int = 0) -> int:
    """Return the CRC-32C of `nbytes` at `address`; `crc` is that of what precedes. Without the GIL."""
    return int(lib.aio_crc32c(address, nbytes, crc))


def crcs_of(address: int, sizes: Iterable[int]) -> list[int]:
    """Return the CRC-32C of each of neighbouring pieces of memory; `sizes` in bytes."""
    found = []
    for size in sizes:
        found.append(int(lib.aio_crc32c(address, size, 0)))
        address += size
    return found


def crc32c_zeros(nbytes: int) -> int:
    """Return the CRC-32C of `nbytes` zeros, in closed form."""
    return int(lib.aio_crc32c_zeros(nbytes))


def crc32c_combine(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32C of two pieces, from theirs and the length of the second, in bytes."""
    return int(lib.aio_crc32c_combine(first, second, nbytes))


class RingSettings(NamedTuple):
    """How rings work: see `Ring`. What is ``auto`` or None is what `infinity tune` found for the drive, else
    a default."""

    backend: str = "auto"
    block_bytes: int | None = None
    queue_depth: int | None = None
    deadline: float | None = None
    delay_seed: int | None = None


USUAL: Final = RingSettings()


def open_ring(name: str, folder: str, settings: RingSettings = USUAL, *, writable: bool = True) -> Ring:
    """Return the ring of `folder`. What worked when it was measured may be forbidden here, or may never have
    worked: then it is as if nothing was found. `writable`: whether a file may be made there, to try it
    out."""
    backend, block_bytes, queue_depth, deadline, delay_seed = settings
    found = tuned(folder)
    path = folder if writable else None
    if found is not None:
        free = backend == "auto" and not os.environ.get("INFINITY_AIO")
        with contextlib.suppress(BackendError, ConfigError, TransferError):
            ring = Ring(
                name,
                path=path,
                backend=found.backend if free else backend,
                block_bytes=block_bytes or found.block_bytes,
                queue_depth=queue_depth or found.queue_depth,
                deadline=deadline,
                threads=found.threads,
                delay_seed=delay_seed,
            )
            if free:
                ring.reason = "as infinity tune found"
            return ring
    return Ring(
        name,
        path=path,
        backend=backend,
        block_bytes=block_bytes or BLOCK_BYTES,
        queue_depth=queue_depth or QUEUE_DEPTH,
        deadline=deadline,
        delay_seed=delay_seed,
    )
