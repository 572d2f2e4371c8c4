"""When each transfer of the store may begin, and what its end means.

[Note: the order of transfers] The I/O engine promises no order between tickets; this file does.
Of each part at most one write is under way; a later one begins when it is complete. A read of a
part with a write pending begins after that write. A slot is written only when no read of it is
pending. Nobody waits at the call for any of this: such a transfer begins when the last one before
it is complete.

[Note: a slot flips as a whole] With two slots a write of a newer generation goes to the slot that
is not in use, for all versioned parts of a chunk alike, and the chunk's bit flips when the last of
them is complete; until then the slot in use stays whole. A part that is read meanwhile is read from
where it was written last. A generation may be written again until a newer one is begun; that goes
to the same slot. A newer one may not begin while parts of the last are missing. With one slot
every write is in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from infinity.core.errors import InfinityError, StorageError
from infinity.core.locks import lock
from infinity.core.sizes import Tier
from infinity.core.spans import Recorder

from .layout import Layout
from .table import NEVER, ChunkTable
from .transfer import Transfer, copy_error

#: Gives a transfer to its ring; returns the error if the ring refuses it.
Start = Callable[[Transfer], "InfinityError | None"]


@dataclass(eq=False)
class Version:
    """A generation of one chunk whose slot is not in use yet."""

    generation: int
    slot: int
    missing: set[str]  # versioned parts without a write of this generation
    zero: bool  # nothing was ever written to the slot
    after: tuple[Transfer, ...] = ()  # all writes of the generation before, if it is pending
    pending: set[Transfer] = field(default_factory=set)


class _PartQueue:
    """What is pending for one part of one chunk: the last write, and reads by slot."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Transfer | None = None
        self.reads: tuple[set[Transfer], set[Transfer]] = (set(), set())


class Order:
    """The pending transfers of a store. `lock` guards them and the table.

    Attributes:
        failed: the first transfer that failed. Nothing begins after that.
    """

    def __init__(self, layout: Layout, table: ChunkTable, start: Start, recorder: Recorder) -> None:
        self.lock = lock("store", reentrant=True)
        self.recorder = recorder
        self.failed: Transfer | None = None
        self._layout = layout
        self._table = table
        self._start = start
        self._queues: dict[tuple[int, str], _PartQueue] = {}
        self._versions: dict[int, Version] = {}
        self._version_of: dict[Transfer, Version] = {}  # of pending writes
        self._pending: dict[Transfer, None] = {}  # in the order of the calls

    # The caller of the next five holds the lock.

    def newest_slot(self, chunk: int, part: str) -> int:
        """Return the slot that holds what was written to the part last."""
        if self._layout.slots == 1 or not self._layout.chunks[chunk][part].versioned:
            return 0
        version = self._versions.get(chunk)
        if version is None:
            return int(self._table.slot[chunk])
        return 1 - version.slot if part in version.missing else version.slot

    def slot_to_write(self, chunk: int, part: str, generation: int, *, whole: bool) -> int:
        """Return the slot for a write of a versioned part; begin a version where one is due.

        Raises:
            StorageError: a newer generation begins while parts of the last are missing.
            ValueError: the generation is older, or only some sections of the part are to be
                written (not `whole`) to a slot that lacks the others.
        """
        newest = self._versions.get(chunk)
        written = int(self._table.generation[chunk])
        current = written if newest is None else newest.generation
        if generation < max(current, 0):
            raise ValueError(f"generation {generation} of chunk {chunk} is older than {current}")
        if self._layout.slots == 1:
            self._table.generation[chunk] = generation
            return 0
        if generation == current:
            if newest is None:
                return int(self._table.slot[chunk])
            version = newest
        else:
            if newest is not None and newest.missing:
                raise _incomplete(chunk, newest)
            version = Version(
                generation,
                slot=1 - (int(self._table.slot[chunk]) if newest is None else newest.slot),
                missing={
                    name
                    for name, spec in self._layout.chunks[chunk].items()
                    if spec.versioned and spec.tier is Tier.NVME
                },
                zero=newest is None and written == NEVER,
            )
        if part in version.missing and not whole and not version.zero:
            raise ValueError(f"some sections of part {part!r} for a slot that lacks the others")
        if version is not newest:
            # Until the last generation has flipped, the slot is the one in use.
            version.after = tuple(newest.pending) if newest is not None else ()
            self._versions[chunk] = version
        return version.slot

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer when all that must come before it is complete."""
        try:
            self._submit(transfer)
        except BaseException as error:
            self._poison(transfer, error)
            raise

    def _submit(self, transfer: Transfer) -> None:
        queue = self._queues.setdefault((transfer.chunk, transfer.part), _PartQueue())
        before: list[Transfer | None] = [queue.write]
        if transfer.is_write:
            before += queue.reads[transfer.slot]
            queue.write = transfer
            version = self._versions.get(transfer.chunk)
            if version is not None and self._layout.chunks[transfer.chunk][transfer.part].versioned:
                before += version.after
                version.missing.discard(transfer.part)
                version.pending.add(transfer)
                self._version_of[transfer] = version
        else:
            queue.reads[transfer.slot].add(transfer)
        self._pending[transfer] = None
        transfer.take()
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
        key = transfer.chunk, transfer.part
        queue = self._queues[key]
        if not transfer.is_write:
            queue.reads[transfer.slot].discard(transfer)
        elif queue.write is transfer:
            queue.write = None
        if queue.write is None and not any(queue.reads):
            del self._queues[key]
        del self._pending[transfer]
        if error is not None:
            transfer.error = error
            self.failed = self.failed or transfer
        elif transfer.is_write:
            self._flip(transfer)
        transfer.give_back()
        transfer.finished = True

    def _flip(self, transfer: Transfer) -> None:
        """Put the slot of a generation to use with its last write; see
        [Note: a slot flips as a whole]."""
        version = self._version_of.pop(transfer, None)
        if version is None:
            return
        version.pending.discard(transfer)
        if not version.missing and not version.pending:
            self._table.slot[transfer.chunk] = version.slot
            self._table.generation[transfer.chunk] = version.generation
            if self._versions.get(transfer.chunk) is version:
                del self._versions[transfer.chunk]

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

    def raise_incomplete(self) -> None:
        """Raise if parts of a generation were never written."""
        with self.lock:
            for chunk, version in self._versions.items():
                if version.missing:
                    raise _incomplete(chunk, version)


def _incomplete(chunk: int, version: Version) -> StorageError:
    return StorageError(
        f"generation {version.generation} of chunk {chunk} is not whole",
        expected="all versioned parts of a chunk, written for each generation",
        found=f"no write of {', '.join(sorted(version.missing))}",
        cure="write these parts too",
    )
