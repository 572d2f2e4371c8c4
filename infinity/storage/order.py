"""When each transfer of the store may begin, and what its end means.

[Note: the order of transfers] The I/O engine promises no order between tickets; this file does.
Of each slot at most one write is under way; a later one begins when it is complete, and when no read of
the slot is pending. A read of a slot with a write pending begins after that write. Nobody waits at the
call for any of this: such a transfer begins when the last one before it is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from infinity.core.errors import InfinityError, StorageError
from infinity.core.locks import lock
from infinity.core.spans import Recorder

from .transfer import Transfer, copy_error

#: Gives a transfer to its ring; returns the error if the ring refuses it.
Start = Callable[[Transfer], "InfinityError | None"]


class _SlotQueue:
    """What is pending for one slot of one part of one chunk: the last write, and the reads."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Transfer | None = None
        self.reads: set[Transfer] = set()


class Order:
    """The pending transfers of a store. `lock` guards them and the table.

    Attributes:
        failed: the first transfer that failed. Nothing begins after that.
    """

    def __init__(self, start: Start, recorder: Recorder) -> None:
        self.lock = lock("store", reentrant=True)
        self.recorder = recorder
        self.failed: Transfer | None = None
        self._start = start
        self._queues: dict[tuple[int, str, int], _SlotQueue] = {}
        self._pending: dict[Transfer, None] = {}  # in the order of the calls

    # The caller of the next holds the lock.

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer when all that must come before it is complete."""
        lease = transfer.lease
        try:
            self._submit(transfer)
        except BaseException as error:
            if transfer.lease is lease and isinstance(error, MemoryError):
                raise  # nothing has happened: the first thing is to take the lease
            self._poison(transfer, error)
            raise

    def _submit(self, transfer: Transfer) -> None:
        transfer.take()
        queue = self._queues.setdefault((transfer.chunk, transfer.part, transfer.slot), _SlotQueue())
        before: list[Transfer | None] = [queue.write]
        if transfer.is_write:
            before += queue.reads
            queue.write = transfer
        else:
            queue.reads.add(transfer)
        self._pending[transfer] = None
        for other in before:
            if other is not None and not other.finished and other not in transfer.waits_for:
                transfer.waits_for.add(other)
                other.waited_by.append(transfer)
        if not transfer.waits_for:
            self._begin([transfer])

    def finish(self, transfer: Transfer, error: InfinityError | None) -> None:
        """See to the end of a transfer, and begin those that waited for it."""
        with self.lock:
            try:
                self._finish(transfer, error)
                self._begin(self._freed(transfer))
            except BaseException as interrupt:
                self._poison(transfer, interrupt)
                raise

    def _poison(self, transfer: Transfer, error: BaseException) -> None:
        """An interrupt (Ctrl-C) came in the middle: nobody knows how far this transfer is, so its
        lease never goes home, and nothing begins any more."""
        if not transfer.finished:
            transfer.error = StorageError(
                f"the {transfer.name} was interrupted", found=repr(error), cure="start again"
            )
            self.failed = self.failed or transfer
            transfer.lease.quarantine()
            self._pending.pop(transfer, None)
            transfer.finished = True
        self._begin(self._freed(transfer))

    def _begin(self, transfers: Iterable[Transfer]) -> None:
        todo = deque(transfers)
        while todo:
            transfer = todo.popleft()
            error = self._start(transfer) if self.failed is None else self.failed.error
            if error is not None:
                self._finish(transfer, error)
                todo.extend(self._freed(transfer))

    def _freed(self, transfer: Transfer) -> list[Transfer]:
        for later in transfer.waited_by:
            later.waits_for.discard(transfer)
        return [t for t in transfer.waited_by if not t.waits_for and t.ticket is None and not t.finished]

    def _finish(self, transfer: Transfer, error: InfinityError | None) -> None:
        key = transfer.chunk, transfer.part, transfer.slot
        queue = self._queues[key]
        if not transfer.is_write:
            queue.reads.discard(transfer)
        elif queue.write is transfer:
            queue.write = None
        if queue.write is None and not queue.reads:
            del self._queues[key]
        del self._pending[transfer]
        if error is not None:
            transfer.error = error
            self.failed = self.failed or transfer
        transfer.give_back()
        transfer.finished = True

    def pending(self, *, writes: bool = False) -> list[Transfer]:
        """Return what is pending, oldest first; or only the writes."""
        with self.lock:
            return [t for t in self._pending if t.is_write or not writes]

    def sweep(self, *, reads: bool = False) -> None:
        """See to the end of what is complete without waiting; of reads (which takes a CRC) only
        where something waits for them, unless told."""
        for transfer in self.pending():
            ticket = transfer.ticket
            if (transfer.is_write or reads or transfer.waited_by) and ticket is not None and ticket.done:
                transfer.reap(None, blocking=False)

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
