"""Loads: compute parameters to the device, `read` → lease → `h2d`, on a thread of its own.

The loader keeps as many reads running as its quota has leases, across the boundaries of units,
and passes each chunk to the device's copy stream as soon as its bytes are checked. It waits for no copy: a
lease returns to the pool with the event of the copy that reads it.

[Note: load and gather] A load is local: it brings this rank's slice of a unit to its place in the unit's
storage. It starts when there is room, and may take any time. A gather combines the slices of all ranks. It
runs where the program uses a unit, so its order is the program's order on every rank. The units that are
evicted for it depend on the schedule and on bytes, never on the order of arrival. With one rank the slice is
the whole unit.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from infinity.core.errors import ClosedError
from infinity.core.locks import lock
from infinity.core.spans import now
from infinity.core.threads import start
from infinity.core.waiting import POLL, Bell, Latch
from infinity.hardware.device import Device, Event
from infinity.hardware.streams import wait_over
from infinity.planning.partition import Chunk
from infinity.planning.parts import ChunkParts
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.pipeline import pipeline
from infinity.storage.store import Reads, Slot, Store, Transfer

from .updates import Updates


class Load:
    """One unit on its way: the copies of `chunks` into `target` (uint8, as long as the unit's copy), after
    `after`, of the version that `slots` names for each chunk's id. Nothing happens before `Loader.start`.

    `issued` opens when all its copies are on the copy stream (then `event` tells when they are done) or
    when it failed.
    """

    def __init__(
        self,
        target: torch.Tensor,
        chunks: Sequence[Chunk],
        slots: Mapping[int, Slot],
        after: Event | None,
        here: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.target = target  # uint8, the unit's storage
        self.chunks = deque(chunks)  # that nobody has begun to bring
        self.left = len(chunks)  # whose copies are not on the stream
        self.slots = slots  # by chunk id; that they flip before it is read changes nothing
        self.after = after
        self.here = here or {}  # copies that are on the device already, elsewhere (uint8, by chunk id)
        self.started = False
        self.place = 0  # among the loads that wait, the first at the lowest
        self.issued = Latch()
        self.event: Event | None = None
        self.error: BaseException | None = None
        # For traces: when it was started, when its last chunk was updated and read (0: none was).
        self.began, self.updated, self.read = now(), 0, 0
        self.behind_update = False

    def finish(self) -> None:
        """Let go of the unit's storage and tell that all copies are on the stream, or that it failed."""
        self.target = torch.empty(0, dtype=torch.uint8)
        self.here = {}
        self.issued.open()

    def wait(self) -> None:
        """Block until the copies are on the stream, or it failed."""
        self.issued.wait()

    def wait_issued(self) -> Event | None:
        """`wait`, then return the event of the last copy; raise its error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self.event

    def causes(self) -> tuple[tuple[str, int], ...]:
        """Return what a wait that ends now was for, with when each of these was over."""
        updated = now() if self.behind_update else self.updated
        return ("update", updated), ("nvme", self.read), ("h2d", 0)

    def is_over(self) -> bool:
        """Return whether nothing of it is under way (done or failed), without blocking."""
        if not self.issued.is_open:
            return False
        return self.error is not None or self.event is None or self.event.done()


class _Flight:
    """A chunk on its way: in a lease from byte `offset` on, when `transfer` is complete."""

    __slots__ = ("chunk", "lease", "load", "offset", "transfer")

    def __init__(self, load: Load, chunk: Chunk, lease: Lease | None, offset: int = 0) -> None:
        self.load, self.chunk, self.lease, self.offset = load, chunk, lease, offset
        self.transfer: Transfer | Reads | None = None

    def close(self, *, wait: bool = True) -> bool:
        """Give the lease back."""
        if self.lease is not None:
            self.lease.release(self.load.event)  # the last on the copy stream: all of its copies come before
            self.lease = None
        return True


class Loader:
    """Runs loads in the order in which they are started. While the next chunk of a load waits for its update,
    the others go first."""

    def __init__(
        self,
        store: Store,
        pool: PinnedPool,
        device: Device,
        plans: Sequence[ChunkParts],
        updates: Updates,
    ) -> None:
        self._updates = updates
        self._worker = _Worker(store, pool, device, plans, updates)
        updates.listen(self._worker.wake)
        self._thread = threading.Thread(target=self._worker.run, name="infinity-load", daemon=True)
        start(self._thread)
        self._finalizer = weakref.finalize(self, self._worker.stop)
        self._finalizer.atexit = False  # the user's own handlers may save

    def start(self, load: Load, *, urgent: bool = False) -> None:
        """Queue a load; an urgent one goes before those that are only expected to be needed. A second
        call does nothing: who was interrupted here calls again.

        Raises:
            ClosedError: the loader was closed.
        """
        self._worker.add(load, urgent)

    def supply(self, load: Load | None, chunk: Chunk, lease: Lease, offset: int) -> None:
        """Take a chunk's copy from the update's lease, at byte `offset`, instead of reading it, if `load` is
        to bring it.

        [Note: no round trip] The lease goes home when the copy is on the device. Supplies are
        taken before anything else, so an update never waits for a load that waits for it.
        """
        if load is not None:
            self._worker.supply(load, chunk, lease, offset)

    def close(self) -> None:
        """Finish what is under way and end the thread."""
        self._finalizer.detach()
        self._worker.stop()
        while self._thread.is_alive():
            self._thread.join(POLL)


class _Worker:
    def __init__(
        self,
        store: Store,
        pool: PinnedPool,
        device: Device,
        plans: Sequence[ChunkParts],
        updates: Updates,
    ) -> None:
        self._updates = updates
        self._store = store
        self._pool = pool
        self._device = device
        self._plans = plans
        # Guards what is waiting. No finalizer takes it, and nothing under it runs Python that could
        # be interrupted halfway through a change.
        self._lock = lock("loader")
        self._bell = Bell()
        self._places = itertools.count(1)
        self._waiting: list[tuple[int, Load]] = []  # a heap
        self._blocked: dict[int, Load] = {}  # by the chunk whose update each of them waits for
        self._updated: deque[int | None] = deque()  # chunks that were, or are never to be (None: no more are)
        self._supplied: deque[_Flight] = deque()
        self._stopped = False

    def add(self, load: Load, urgent: bool) -> None:
        with self._lock:
            if load.started:
                return
            if self._stopped:
                raise ClosedError(
                    "the engine is closed",
                    expected="an open engine",
                    found="a load after close()",
                    cure="wrap the model again",
                )
            place = next(self._places)
            load.place = -place if urgent else place
            load.started = True  # no handler runs between this and the next line
            heapq.heappush(self._waiting, (load.place, load))
        self._bell.ring()

    def wake(self, chunk: int | None) -> None:
        """A chunk was updated; None: no more are. Most have no load behind them, and the kernel needs the
        cores."""
        if chunk is None or chunk in self._blocked:
            self._updated.append(chunk)
            self._bell.ring()

    def supply(self, load: Load, chunk: Chunk, lease: Lease, offset: int) -> None:
        with self._lock:
            if load.issued.is_open or chunk not in load.chunks:
                return  # it failed, or read the chunk already
            load.chunks.remove(chunk)
            self._supplied.append(_Flight(load, chunk, lease.retain(), offset))
            load.updated = now()
        self._bell.ring()

    def stop(self) -> None:
        # Also by a finalizer, in any thread: no lock. Who adds under the lock after this is refused,
        # and who added before it is served.
        self._stopped = True
        self._bell.ring()

    def run(self) -> None:
        for flight, _ in pipeline(self._take, lambda flight, _wait: flight):
            self._land(flight)

    def _take(self, wait: bool) -> _Flight | None:
        """Return the next chunk, with its read begun, what updates have supplied first; None: there is none,
        or no lease for it. `wait`: until there is one, or nothing will come any more."""
        while True:
            with self._lock:
                while self._updated:
                    updated = self._updated.popleft()
                    for number in [*self._blocked] if updated is None else [updated]:
                        if (freed := self._blocked.pop(number, None)) is not None:
                            freed.behind_update, freed.updated = False, now()
                            heapq.heappush(self._waiting, (freed.place, freed))
                if self._supplied:
                    return self._supplied.popleft()
                load = heapq.heappop(self._waiting)[1] if self._waiting else None
                if load is None and (not wait or (self._stopped and not self._blocked)):
                    return None
                chunk = load.chunks[0] if load is not None and load.chunks else None
            if load is None:
                self._bell.wait(self._is_needed)
            elif chunk is not None:
                lease = None
                try:
                    if self._is_blocked(load, chunk.id):
                        continue
                    if nbytes := self._plans[chunk.id].load_lease:
                        lease = (self._pool.lease if wait else self._pool.try_lease)("load", nbytes)
                except BaseException as error:
                    self._fail(load, error)
                    continue
                is_free = not nbytes or lease is not None
                with self._lock:
                    takes = is_free and chunk in load.chunks  # no update has supplied it meanwhile
                    if takes:
                        load.chunks.remove(chunk)
                    if load.chunks:
                        heapq.heappush(self._waiting, (load.place, load))
                if takes:
                    flight = _Flight(load, chunk, lease)
                    if lease is not None:
                        self._read(flight, lease)
                    return flight
                if not is_free:
                    return None
                if lease is not None:
                    lease.release()

    def _is_blocked(self, load: Load, chunk: int) -> bool:
        """Return whether `load` has to wait for the update of `chunk`. Then `wake` brings it back."""
        if not self._updates.blocks_load(chunk):
            return False
        load.behind_update = True
        self._blocked[chunk] = load
        blocks = False
        try:
            blocks = self._updates.blocks_load(chunk)  # who updates it looks for the load after that
        finally:
            if not blocks:
                load.behind_update, load.updated = False, now()
                self._blocked.pop(chunk, None)
        return blocks

    def _read(self, flight: _Flight, lease: Lease) -> None:
        load, chunk = flight.load, flight.chunk
        try:
            flight.transfer = self._store.read(chunk.id, "copy", lease, version=load.slots[chunk.id])
        except BaseException as error:
            self._fail(load, error)

    def _is_needed(self) -> bool:
        """Return whether `_take` would find something to do, or nothing will come any more."""
        with self._lock:
            waits = bool(self._waiting or self._updated or self._supplied)
            return waits or (self._stopped and not self._blocked)

    def _land(self, flight: _Flight) -> None:
        """Take a chunk to the device, when it is read."""
        load = flight.load
        try:
            if flight.transfer is not None:
                flight.transfer.wait()
                load.read = now()
            if load.error is None:
                self._copy(load, flight.chunk, flight.lease, flight.offset)
        except BaseException as error:
            self._fail(load, error)
        flight.close()
        self._count(load, 1)

    def _copy(self, load: Load, chunk: Chunk, lease: Lease | None, offset: int) -> None:
        """Put a chunk's copies on the copy stream; the load's `event` is that of the last one."""
        nbytes, version = chunk.copy_nbytes, load.slots[chunk.id]
        target = load.target[chunk.copy_offset : chunk.copy_offset + nbytes]
        place = self._plans[chunk.id].place
        if lease is None and chunk.id in load.here:
            source = load.here[chunk.id]
            if source.data_ptr() == target.data_ptr():  # it is in its place already
                source, target = source[:0], target[:0]
        elif lease is None:
            source = self._store.view(chunk.id, "copy", numel=nbytes, version=version)
        elif place is None:
            source = lease.tensor(torch.uint8, offset, nbytes)
        else:
            for at, begin, size in place.stretches:
                source = lease.tensor(torch.uint8, offset + at, size)
                load.event = self._device.h2d(
                    target[begin : begin + size], source, load.after, chunk=chunk.id
                )
            return
        load.event = self._device.h2d(target, source, load.after, chunk=chunk.id)

    def _fail(self, load: Load, error: BaseException) -> None:
        with self._lock:
            load.error = load.error or error
            left = len(load.chunks)
            load.chunks.clear()
        if left:
            self._count(load, left)

    def _count(self, load: Load, chunks: int) -> None:
        """So many chunks of a load are on the stream, or never will be."""
        with self._lock:
            load.left -= chunks
            if load.left:
                return
        if load.error is not None and load.event is not None:
            wait_over(load.event)
        load.finish()
