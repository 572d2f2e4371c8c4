"""One read or write of the store, from the call that began it to its end.

No thread exists only to wait for transfers. The first caller that notices the end of a transfer completes it:
its own `wait`, a later call of the store, or a thread that waits for the pool and so for the leases of
transfers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from infinity.core.errors import ClosedError, CorruptionError, DeadlineError, InfinityError, StorageError
from infinity.core.sizes import ALIGNMENT
from infinity.core.spans import Recorder, now
from infinity.core.waiting import POLL, Bell
from infinity.hardware.aio import DirectFile, Priority, Ticket, crc32c

from .layout import Extent
from .pinned import Lease


class TransferOwner(Protocol):
    """What decides when transfers begin; see [Note: the order of transfers]."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards `Transfer.waits_for` and `Transfer.waited_by`."""

    @property
    def recorder(self) -> Recorder:
        """Is told of what is complete."""

    def begin(self, transfer: Transfer) -> None:
        """Begin a transfer that is `free`; the caller holds the lock."""

    def finish(self, transfer: Transfer, error: InfinityError | None) -> None:
        """See to the end of a transfer whose ticket is complete; can be made again after a MemoryError."""

    def sweep(self) -> None:
        """See to the end of what is complete, and so begin what waited for it."""


class Piece(NamedTuple):
    """Neighbouring sections of one slot of a part of a chunk. `sizes`: valid bytes of each of `sections`."""

    chunk: int
    part: str
    slot: int
    sections: range
    sizes: Sequence[int]


class Transfer:
    """A read into a lease, or a write from one.

    The store holds the lease until the transfer is complete; the caller keeps its own handle, and
    does not touch the bytes, until `wait` has returned.

    Args:
        piece: what is moved.
        extent, file: from where, or where to; no file: there is nothing to move, and it is finished.
        lease, offset: where in memory.
        first: of a file that is not ours: CRCs as first read, by chunk and section.

    Attributes:
        nbytes: valid bytes that are moved; on the way they are padded to a multiple of 4096.
        waits_for: transfers that must be finished before this one may begin (the store's lock); none when it
            has begun.
        waited_by: those that wait for this one.
        sent: whether its ring was asked to begin.
    """

    __slots__ = (
        "_freed",
        "_order",
        "_reaper",
        "crcs",
        "error",
        "extent",
        "file",
        "finished",
        "first",
        "is_write",
        "lease",
        "nbytes",
        "offset",
        "piece",
        "priority",
        "seen",
        "sent",
        "ticket",
        "waited_by",
        "waits_for",
    )

    def __init__(
        self,
        *,
        is_write: bool,
        piece: Piece,
        extent: Extent,
        file: DirectFile | None,
        lease: Lease,
        offset: int,
        priority: Priority,
        order: TransferOwner,
        first: dict[tuple[int, int], int] | None = None,
    ) -> None:
        self.is_write = is_write
        self.piece = piece
        self.nbytes = sum(piece.sizes)
        self.crcs: Sequence[int] = ()  # of each section, as it must be when it was read
        self.extent = extent
        self.file = file
        self.first = first
        self.lease = lease
        self.offset = offset
        self.priority = priority
        self._order = order
        self._reaper: dict[str, object] = {}  # "": the one that completes it
        self._freed = Bell()
        self.sent = False
        self.ticket: Ticket | None = None
        self.waits_for: set[Transfer] = set()
        self.waited_by: list[Transfer] = []
        self.finished = file is None or extent.nbytes == 0
        self.error: InfinityError | None = None
        self.seen = False  # whether somebody was told of the error

    def __repr__(self) -> str:
        state = "finished" if self.finished else "under way" if self.ticket else "waiting"
        return f"<Transfer: {self.name}, {self.nbytes} bytes, {state}>"

    @property
    def name(self) -> str:
        """What it is, for messages."""
        chunk, part = self.piece[:2]
        return f"{'write' if self.is_write else 'read'} of part {part!r} of chunk {chunk}"

    @property
    def path(self) -> str:
        """Of its file; empty, if it has none."""
        return "" if self.file is None else self.file.path

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting for a drive."""
        if self.ticket is None and not self.finished:
            self._order.sweep()
        return self.finished or (self.ticket is not None and self.ticket.done)

    def wait(self, timeout: float | None = None) -> None:
        """Block until all bytes are moved; check those that were read.

        Raises:
            CorruptionError: bytes read are not those written; names chunk, part and section.
            TransferError: the system reported an error.
            DeadlineError: it is not complete within `timeout` seconds (it goes on, and may be
                waited for again), or not within the ring's deadline (it failed).
        """
        if not self.complete(timeout):
            raise DeadlineError(
                f"the {self.name} is not complete",
                path=self.path,
                offset=self.extent.offset,
                nbytes=self.extent.nbytes,
                expected=f"{timeout} s at most",
                found="still under way",
                cure="wait longer",
            )
        if self.error is not None:
            self.seen = True
            raise copy_error(self.error)

    def take(self) -> None:
        """Hold the lease for the time of the transfer, or raise and do not; see [Note: one owner]."""
        lease = self.lease.retain()
        try:
            lease.begin_io(self.offset, self.extent.nbytes, into=not self.is_write)
        except BaseException:
            lease.release()
            raise
        self.lease = lease

    def give_back(self) -> None:
        """Undo `take`, once; what a transfer may still reach never goes home."""
        if self.lease.released:
            return
        if self.ticket is not None and self.ticket.quarantined:
            self.lease.quarantine()
        else:
            self.lease.end_io(self.offset, self.extent.nbytes, into=not self.is_write)
        self.lease.release()

    @property
    def free(self) -> bool:
        """Whether it may begin, and has not."""
        return not (self.sent or self.finished) and all(t.finished for t in self.waits_for)

    def complete(self, timeout: float | None) -> bool:
        """Wait for the end, and see to it. Return whether it was reached within `timeout`."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.finished:
            with self._order.lock:
                first = self
                while before := [t for t in first.waits_for if not t.finished]:
                    first = before[0]
                if first.free:  # there was no memory to begin it
                    self._order.begin(first)
            left = None if until is None else max(0.0, until - time.monotonic())
            if not first.reap(left):
                return False
        return True

    def reap(self, timeout: float | None, *, blocking: bool = True) -> bool:
        """See to the end of this transfer, which was started; return whether it was reached."""
        if self.finished:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        me = object()
        try:  # not a lock: what an interrupt leaves between taking it and `try` nobody would give back
            while self._reaper.setdefault("", me) is not me:
                left = POLL if until is None else min(POLL, until - time.monotonic())
                if not blocking or left <= 0:
                    return self.finished
                self._freed.wait(lambda: not self._reaper, left)
            if self.finished:
                return True
            ticket = self.ticket
            if ticket is None:
                raise StorageError(f"the {self.name} was never begun")
            error: InfinityError | None = None
            if until is not None:
                with contextlib.suppress(InfinityError):  # our timeout, or what the next wait raises too
                    ticket.wait(max(0.0, until - time.monotonic()))
                if not ticket.done:
                    return False
            try:
                ticket.wait()
            except InfinityError as found:
                error = with_transfer(found, self)
            if self._order.recorder.log is not None:
                self._record(ticket)
            if error is None and not self.is_write and not self.lease.released:  # else it was checked
                begin = now()
                error = self._check()
                if (log := self._order.recorder.log) is not None:
                    chunk, part = self.piece[:2]
                    log.add("crc", begin, now(), detail=part, chunk=chunk, nbytes=self.nbytes)
            self._order.finish(self, error)
            return True
        finally:
            if self._reaper.get("") is me:
                self._reaper.clear()
                self._freed.ring()

    def _record(self, ticket: Ticket) -> None:
        log = self._order.recorder.log
        _, started, finished = ticket.times
        if log is not None and started and finished:
            log.add(
                "write" if self.is_write else "read",
                started,
                finished,
                detail=self.piece.part,
                chunk=self.piece.chunk,
                directory=self.extent.directory,
                nbytes=self.extent.nbytes,
            )

    def _compare(self, first: dict[tuple[int, int], int], found: int) -> CorruptionError | None:
        """Hold a window of somebody else's file to what it was when it was first read."""
        expected = first.setdefault((self.piece.chunk, self.piece.sections.start), found)
        if found == expected:
            return None
        return CorruptionError(
            f"{self.path} has changed since it was first read",
            path=self.path,
            offset=self.extent.offset,
            nbytes=self.nbytes,
            expected=f"CRC32C {expected:08x} for {self.nbytes} bytes at offset {self.extent.offset}",
            found=f"{found:08x}",
            cure="do not change the files of a model while you use it, and check the drive (smartctl, "
            "dmesg); start again",
        )

    def _check(self) -> CorruptionError | None:
        """Compare what was read with the table; see [Note: every read is checked]."""
        address = self.lease.io_address + self.offset
        at = self.extent.offset
        chunk, part, _, sections, sizes = self.piece
        if self.first is not None:
            return self._compare(self.first, crc32c(address, self.nbytes))
        for section, size, expected in zip(sections, sizes, self.crcs, strict=True):
            found = crc32c(address, size)
            if found != expected:
                return CorruptionError(
                    f"section {section} of part {part!r} of chunk {chunk} is not what was written",
                    path=self.path,
                    offset=at,
                    nbytes=size,
                    expected=f"CRC32C {expected:08x} for {size} bytes at offset {at} of {self.path}",
                    found=f"{found:08x}",
                    cure="check the drive (smartctl, dmesg); start again from a checkpoint",
                )
            address += size
            at += size
        return None


class Reads:
    """Reads of one copy, from several places of files."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers
        self.nbytes = sum(t.nbytes for t in transfers)

    @property
    def done(self) -> bool:
        """As `Transfer.done`, of all of them."""
        return all(t.done for t in self._transfers)

    def wait(self, timeout: float | None = None) -> None:
        """As `Transfer.wait`, for each of them."""
        for transfer in self._transfers:
            transfer.wait(timeout)


def check_room(lease: Lease, offset: int, nbytes: int) -> None:
    """Raise ValueError if a transfer of `nbytes` at byte `offset` does not fit the lease."""
    if lease.released:
        raise ClosedError("this lease was released", cure="hold it until the transfer is complete")
    if offset < 0 or offset % ALIGNMENT or offset + nbytes > lease.room:
        raise ValueError(f"{nbytes} bytes at {offset} do not fit a lease with room for {lease.room}")


def crcs_of(address: int, sizes: Sequence[int]) -> list[int]:
    """Return the CRC32C of each of neighbouring pieces of memory; `sizes` in bytes."""
    result = []
    for size in sizes:
        result.append(crc32c(address, size))
        address += size
    return result


def with_transfer(error: InfinityError, transfer: Transfer) -> InfinityError:
    """Return an error of the I/O engine with the name of the transfer that it happened to."""
    result = copy_error(error, f"the {transfer.name} failed: {error.what}")
    if isinstance(result, StorageError):
        result.path = result.path or transfer.path
        if result.offset is None:
            result.offset, result.nbytes = transfer.extent.offset, transfer.extent.nbytes
    return result


def copy_error(error: InfinityError, what: str | None = None) -> InfinityError:
    """Return a copy of an error, to be raised once more with a traceback of its own."""
    if not isinstance(error, StorageError):
        return type(error)(what or error.what, expected=error.expected, found=error.found, cure=error.cure)
    return type(error)(
        what or error.what,
        errno=error.errno,
        path=error.path,
        offset=error.offset,
        nbytes=error.nbytes,
        expected=error.expected,
        found=error.found,
        cure=error.cure,
    )
