"""The slots of the store, and the reads and writes of them: their order, their checks, their ends.

[Note: the order of transfers] The I/O engine promises no order between tickets; this file does.
Each slot has at most one running write; a later write begins when it is complete, and when no read of
the slot is pending. A read of a slot with a pending write begins after that write. No call
waits for this order: such a transfer begins when the last one before it is complete.

[Note: every read is checked] For each slot there is its length and one CRC32C per section, in memory, and
nothing in the payload. So transfers stay aligned, and a write that was lost, torn, stale or misdirected shows
as a mismatch at the next read. A fresh arena reads as zeros, so a slot begins with the CRCs of zeros, and the
engine need not write anything first.

No thread exists only to wait for transfers. The first caller that notices the end of a transfer completes it:
its own `wait`, a later call of the store, or a thread that waits for the pool and so for the leases of
transfers.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from infinity.core import waiting
from infinity.core.errors import (
    OF_A_FORK,
    ClosedError,
    CorruptionError,
    DeadlineError,
    InfinityError,
    StorageError,
)
from infinity.core.locks import lock
from infinity.core.sizes import ALIGNMENT
from infinity.core.spans import Recorder, now
from infinity.core.waiting import POLL
from infinity.hardware.aio import DirectFile, Priority, Ticket, crcs_of

from .layout import Extent
from .pinned import Lease

#: Gives a transfer to its ring, which may refuse it.
Start: TypeAlias = "Callable[[Transfer], None]"


class SlotState:
    """What one slot holds, or one window of a file that is not ours, and what is under way for it.

    Attributes:
        chunk, part: whose it is.
        extent: where it lies.
        file: that it is in, if that is not ours; None: an arena.
        sizes: bytes that each section holds: all, or fewer where fewer were written.
        crcs: of each section; None: the first read says.
        write, reads: what is pending: the last write, and the reads.
    """

    __slots__ = ("chunk", "crcs", "extent", "file", "part", "reads", "sizes", "write")

    def __init__(
        self,
        chunk: int,
        part: str,
        sizes: Sequence[int],
        extent: Extent,
        crcs: Sequence[int | None],
        file: DirectFile | None = None,
    ) -> None:
        self.chunk, self.part, self.extent, self.file = chunk, part, extent, file
        self.sizes, self.crcs = sizes, crcs
        self.write: Transfer | None = None
        self.reads: set[Transfer] = set()


class Transfer:
    """A read into a lease, or a write from one.

    The store holds the lease until the transfer is complete; the caller keeps its own handle, and
    does not touch the bytes, until `wait` has returned.

    Args:
        slot: what is moved to or from.
        sizes: the valid bytes of each section.
        extent: of the file.
        lease, offset: where in memory.

    Attributes:
        nbytes: valid bytes that are moved; on the way they are padded to a multiple of 4096.
        waits_for: transfers that must be finished before this one may begin (the store's lock).
        waited_by: those that wait for this one.
    """

    __slots__ = (
        *("_busy", "_crcs", "_order", "error", "extent", "finished", "is_write", "lease", "nbytes"),
        *("offset", "priority", "seen", "sizes", "slot", "ticket", "waited_by", "waits_for"),
    )

    def __init__(
        self,
        order: Order,
        slot: SlotState,
        sizes: Sequence[int],
        extent: Extent,
        lease: Lease,
        offset: int,
        priority: Priority,
        *,
        is_write: bool = False,
    ) -> None:
        self._order = order
        self.slot, self.sizes = slot, sizes
        self._crcs = slot.crcs  # as those of a read must be
        self.nbytes = sum(sizes)
        self.extent = extent
        self.lease, self.offset = lease, offset
        self.priority, self.is_write = priority, is_write
        self._busy = _thread.allocate_lock()  # of who completes it
        self.ticket: Ticket | None = None
        self.waits_for: set[Transfer] = set()
        self.waited_by: list[Transfer] = []
        self.finished = not extent.nbytes
        self.error: InfinityError | None = None
        self.seen = False  # whether somebody was told of the error

    def __repr__(self) -> str:
        state = "finished" if self.finished else "under way" if self.ticket else "waiting"
        return f"<Transfer: {self.name}, {self.nbytes} bytes, {state}>"

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return f"{'write' if self.is_write else 'read'} of part {self.slot.part!r} of chunk {self.slot.chunk}"

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
        if self.ticket is not None and timeout is None and self._busy.acquire(blocking=False):
            try:  # nearly always
                self._end()
            finally:
                self._busy.release()
        if not (self.finished or self.complete(timeout)):
            raise DeadlineError(
                f"the {self.name} is not complete",
                path=self._order.path_of(self),
                offset=self.extent.offset,
                nbytes=self.extent.nbytes,
                expected=f"{timeout} s at most",
                found="still under way",
                cure="wait longer",
            )
        if self.error is not None:
            self.seen = True
            raise copy_error(self.error)

    def complete(self, timeout: float | None = None) -> bool:
        """Wait for the end, and see to it. Return whether it was reached within `timeout`."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.finished:
            first = self
            if self.ticket is None:
                with self._order.lock:
                    while first.waits_for:
                        first = next(iter(first.waits_for))
            if not first._reap(until):
                return False
        return True

    def _reap(self, until: float | None) -> bool:
        """See to the end of this transfer, which was begun; return whether it was reached."""
        left = POLL
        while not self._busy.acquire(timeout=left):
            left = POLL if until is None else max(0.0, min(POLL, until - time.monotonic()))
            if not left:
                return self.finished
            self._order.check_process()
            if waiting.hear is not None:
                waiting.hear()
        try:
            return self._end(until)
        finally:
            self._busy.release()

    def _end(self, until: float | None = None) -> bool:
        """See to the end of this transfer; one thread at a time does."""
        ticket = self.ticket
        if self.finished or ticket is None:
            return self.finished
        if until is not None:
            with contextlib.suppress(InfinityError):  # our timeout, or what the next wait raises too
                ticket.wait(max(0.0, until - time.monotonic()))
            if not ticket.done:
                return False
        error: InfinityError | None = None
        try:
            ticket.wait()
        except InfinityError as found:
            error = self._order.with_transfer(found, self)
        if (log := self._order.recorder.log) is not None:
            self._record(ticket)
        if error is None and not self.is_write:
            begin = now()
            error = self._check()
            if log is not None:
                slot = self.slot
                log.add("crc", begin, now(), detail=slot.part, chunk=slot.chunk, nbytes=self.nbytes)
        self._order.finish(self, error)
        return True

    def end_if_done(self) -> None:
        """See to the end of this transfer if that needs no wait, and no other thread does."""
        if self.ticket is not None and self.ticket.done and self._busy.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._busy.release()

    def _record(self, ticket: Ticket) -> None:
        log, extent = self._order.recorder.log, self.extent
        _, started, finished = ticket.times
        if log is not None and started and finished:
            log.add(
                "write" if self.is_write else "read",
                started,
                finished,
                detail=self.slot.part,
                chunk=self.slot.chunk,
                directory=extent.directory,
                nbytes=extent.nbytes,
            )

    def _check(self) -> CorruptionError | None:
        """Compare what was read with what the slot holds; see [Note: every read is checked]."""
        slot, at = self.slot, self.extent.offset
        crcs = crcs_of(self.lease.io_address + self.offset, self.sizes)
        if None in self._crcs:
            with self._order.lock:
                if None in slot.crcs:
                    slot.crcs = crcs
            self._crcs = slot.crcs
        for number, (size, found, expected) in enumerate(zip(self.sizes, crcs, self._crcs, strict=True)):
            if found != expected:
                path, foreign = self._order.path_of(self), slot.file is not None
                what = f"section {number} of part {slot.part!r} of chunk {slot.chunk} is not what was written"
                return CorruptionError(
                    f"{path} has changed since it was first read" if foreign else what,
                    path=path,
                    offset=at,
                    nbytes=size,
                    expected=f"CRC32C {expected:08x} for {size} bytes at offset {at} of {path}",
                    found=f"{found:08x}",
                    cure=_FOREIGN
                    if foreign
                    else "check the drive (smartctl, dmesg); start again from a checkpoint",
                )
            at += size
        return None


_FOREIGN: Final = (
    "do not change the files of a model while you use it, and check the drive (smartctl, dmesg); start again"
)


class Order:
    """The pending transfers of a store. `lock` guards them and what the slots hold.

    `path`: returns that of the file of a transfer.

    Attributes:
        failed: the first transfer that failed. Nothing begins after that.
        waiting: how many transfers wait for others.
    """

    def __init__(self, start: Start, path_of: Callable[[Transfer], str], recorder: Recorder) -> None:
        self.lock = lock("store", reentrant=True)
        self.recorder = recorder
        self.path_of = path_of
        self.failed: Transfer | None = None
        self._start = start
        self._pending: dict[Transfer, None] = {}  # in the order of the calls
        self.waiting = 0
        self._pid = os.getpid()

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer when all that must come before it is complete. The caller holds the lock. What has
        no handle of its own on the lease yet has changed nothing where this raises."""
        slot, extent, lease = transfer.slot, transfer.extent, transfer.lease
        try:
            transfer.lease = lease.retain()
            if lease.is_guarded:
                transfer.lease.begin_io(transfer.offset, extent.nbytes, into=not transfer.is_write)
            before = [] if slot.write is None else [slot.write]
            if transfer.is_write:
                before += slot.reads
                slot.write = transfer
            else:
                slot.reads.add(transfer)
            self._pending[transfer] = None
            if before:
                transfer.waits_for.update(before)
                self.waiting += 1
                for other in before:
                    other.waited_by.append(transfer)
            else:
                self._begin(transfer)
        except BaseException as error:
            if transfer.lease is not lease:
                self._poison(transfer, error)
            raise

    def finish(self, transfer: Transfer, error: InfinityError | None) -> None:
        """See to the end of a transfer, and begin those that waited for it."""
        with self.lock:
            try:
                self._finish(transfer, error)
            except BaseException as interrupt:
                self._poison(transfer, interrupt)
                raise

    def _finish(self, transfer: Transfer, error: InfinityError | None) -> None:
        if error is not None:
            transfer.error = error
            self.failed = self.failed or transfer
        lease, extent = transfer.lease, transfer.extent
        if error is not None and transfer.ticket is not None and transfer.ticket.quarantined:
            lease.quarantine()
        elif lease.is_guarded:
            lease.end_io(transfer.offset, extent.nbytes, into=not transfer.is_write)
        lease.release()
        self._leave(transfer)

    def _leave(self, transfer: Transfer) -> None:
        slot = transfer.slot
        slot.reads.discard(transfer)
        if slot.write is transfer:
            slot.write = None
        transfer.finished = True
        self._pending.pop(transfer, None)
        if transfer.waited_by:
            self._begin_waiting(transfer)

    def _begin_waiting(self, transfer: Transfer) -> None:
        """Begin what waited for a transfer alone."""
        interrupt: BaseException | None = None
        for other in transfer.waited_by:
            other.waits_for.discard(transfer)
            if not (other.waits_for or other.finished or other.ticket is not None):
                self.waiting -= 1
                try:
                    self._begin(other)
                except BaseException as error:
                    interrupt = error
                    self._poison(other, error)
        if interrupt is not None:
            raise interrupt

    def _begin(self, transfer: Transfer) -> None:
        if self.failed is not None:
            self._finish(transfer, self.failed.error)
            return
        try:
            self._start(transfer)
        except InfinityError as error:
            self._finish(transfer, self.with_transfer(error, transfer))

    def _poison(self, transfer: Transfer, error: BaseException) -> None:
        """Something came in the middle, such as an interrupt (Ctrl-C), or a lack of memory: nobody knows how
        far this transfer is, so its lease never goes home, and nothing begins any more."""
        if not transfer.finished:
            what = f"the {transfer.name} was interrupted"
            transfer.error = StorageError(what, found=repr(error), cure="start again")
            self.failed = self.failed or transfer
            if not transfer.lease.released:
                transfer.lease.quarantine()
            self._leave(transfer)
        elif transfer.waited_by:
            self._begin_waiting(transfer)

    def check_process(self) -> None:
        """Raise `ClosedError` in a process that is not the one that made the transfers."""
        if self._pid != os.getpid():
            raise ClosedError(
                "the store belongs to the process that created it",
                found=f"process {os.getpid()}, a child of {self._pid}",
                cure=OF_A_FORK,
            )

    def pending(self, *, writes: bool = False) -> list[Transfer]:
        """Return what is pending, oldest first; or only the writes."""
        with self.lock:
            return [t for t in self._pending if t.is_write or not writes]

    def sweep(self, *, reads: bool = False) -> None:
        """See to the end of what is complete without waiting; of reads (which takes a CRC) only
        where something waits for them, unless told."""
        for transfer in self.pending():
            if transfer.is_write or reads or transfer.waited_by:
                transfer.end_if_done()

    def reclaim(self, timeout: float) -> bool:
        """Return leases that are done with; wait up to `timeout` seconds for the oldest write.

        Raises:
            StorageError: a transfer failed: its lease, and those of transfers that nobody will
                wait for now, may never come home.
        """
        # A read that is complete is checked by whoever wants it, one at a time; here only in need.
        self.sweep(reads=timeout > 0)
        if self.failed is not None and self.failed.error is not None:
            self.failed.seen = True
            raise copy_error(self.failed.error)
        writes = self.pending(writes=True)
        if writes and timeout > 0:
            writes[0].complete(timeout)
        return bool(writes)

    def with_transfer(self, error: InfinityError, transfer: Transfer) -> InfinityError:
        """Return an error of the I/O engine with the name of the transfer that it happened to."""
        result = copy_error(error, f"the {transfer.name} failed: {error.what}")
        if isinstance(result, StorageError):
            result.path = result.path or self.path_of(transfer)
            if result.offset is None:
                result.offset, result.nbytes = transfer.extent[1:]
        return result


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
