"""When each transfer of the store may begin, and what its end means.

[Note: the order of transfers] The I/O engine promises no order between tickets; this file does.
Each slot has at most one running write; a later write begins when it is complete, and when no read of
the slot is pending. A read of a slot with a pending write begins after that write. No call
waits for this order: such a transfer begins when the last one before it is complete.

[Note: no memory for a transfer] A call that finds no memory has begun nothing and keeps nothing. If the end
of a transfer finds no memory for its work, the next caller does this work, and begins the transfers that
waited for it.
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


def _key(transfer: Transfer) -> tuple[int, str, int]:
    return transfer.piece[:3]


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
        """Begin a transfer when all that must come before it is complete.

        Raises:
            MemoryError: nothing has happened, if the transfer was not `sent`.
        """
        lease = transfer.lease
        try:
            transfer.take()
            self._submit(transfer)
        except BaseException as error:
            if not isinstance(error, MemoryError) or transfer.sent:
                self._poison(transfer, error)
            elif transfer.lease is not lease:
                self._withdraw(transfer)
            raise

    def _submit(self, transfer: Transfer) -> None:
        queue = self._queues.setdefault(_key(transfer), _SlotQueue())
        before: list[Transfer | None] = [queue.write]
        if transfer.is_write:
            before += queue.reads
        for other in before:
            if other is not None and not other.finished and other not in transfer.waits_for:
                transfer.waits_for.add(other)
                other.waited_by.append(transfer)
        self._pending[transfer] = None
        if transfer.is_write:
            queue.write = transfer  # what was there is waited for, or finished
        else:
            queue.reads.add(transfer)
        if not transfer.waits_for:
            self.begin(transfer)

    def _withdraw(self, transfer: Transfer) -> None:
        """Undo `_submit`, however far it came."""
        for other in transfer.waits_for:
            if transfer in other.waited_by:
                other.waited_by.remove(transfer)
        transfer.waits_for.clear()
        self._leave_queue(transfer)
        self._pending.pop(transfer, None)
        transfer.give_back()

    def begin(self, transfer: Transfer) -> None:
        """Begin a transfer that is `free`."""
        self._begin([transfer])

    def finish(self, transfer: Transfer, error: InfinityError | None) -> None:
        """See to the end of a transfer, and begin those that waited for it. What finds no memory is done by
        the next call, or by `sweep`."""
        with self.lock:
            try:
                self._finish(transfer, error)
                self._begin(self._freed(transfer))
            except MemoryError:
                raise
            except BaseException as interrupt:
                self._poison(transfer, interrupt)
                raise

    def _poison(self, transfer: Transfer, error: BaseException) -> None:
        """An interrupt (Ctrl-C) came in the middle, or its ring had no memory: nobody knows how far this
        transfer is, so its lease never goes home, and nothing begins any more."""
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
            try:
                error = self._start(transfer) if self.failed is None else self.failed.error
            except BaseException as interrupt:
                if transfer.sent:  # its ring may have begun it
                    self._poison(transfer, interrupt)
                raise
            transfer.waits_for.clear()
            if error is not None:
                self._finish(transfer, error)
                todo.extend(self._freed(transfer))

    def _freed(self, transfer: Transfer) -> list[Transfer]:
        return [t for t in transfer.waited_by if t.free]

    def _leave_queue(self, transfer: Transfer) -> None:
        queue = self._queues.get(_key(transfer))
        if queue is None:
            return
        queue.reads.discard(transfer)
        if queue.write is transfer:
            queue.write = None
        if queue.write is None and not queue.reads:
            del self._queues[_key(transfer)]

    def _finish(self, transfer: Transfer, error: InfinityError | None) -> None:
        """May be made again where it raised."""
        self._leave_queue(transfer)
        if error is not None:
            transfer.error = error
            self.failed = self.failed or transfer
        transfer.give_back()
        transfer.finished = True
        self._pending.pop(transfer, None)  # last: who looks for what is left to do goes by it

    def pending(self, *, writes: bool = False) -> list[Transfer]:
        """Return what is pending, oldest first; or only the writes."""
        with self.lock:
            return [t for t in self._pending if t.is_write or not writes]

    def sweep(self, *, reads: bool = False) -> None:
        """See to the end of what is complete without waiting; of reads (which takes a CRC) only
        where something waits for them, unless told."""
        for transfer in self.pending():
            if transfer.free:
                with self.lock:
                    if transfer.free:  # there was no memory to begin it
                        self.begin(transfer)
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
