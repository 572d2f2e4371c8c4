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
from typing import NamedTuple

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
        self.chunks = deque(chunks)
        self.slots = slots  # by chunk id; that they flip before it is read changes nothing
        self.after = after
        self.here = here or {}  # copies that are on the device already, elsewhere (uint8, by chunk id)
        self.started = False
        self.place = 0  # among the loads that wait, the first at the lowest
        self.issued = Latch()
        self.event: Event | None = None
        self.error: BaseException | None = None
        self.supplies: deque[tuple[Chunk, Lease, int]] = deque()  # from the update, with their offset
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


class _Flight(NamedTuple):
    load: Load
    chunk: Chunk
    lease: Lease | None
    transfer: Transfer | Reads | None
    offset: int = 0  # of the copy in the lease


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

    def supply(self, load: Load, chunk: Chunk, lease: Lease, offset: int) -> None:
        """Take a chunk's copy from the update's lease, at byte `offset`, instead of reading it.

        [Note: no round trip] The lease goes home when the copy is on the device. Supplies are
        taken before anything else, so an update never waits for a load that waits for it.
        """
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
        self._supplied: deque[Load] = deque()
        self._stopped = False
        self._flights: deque[_Flight] = deque()

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
            load.supplies.append((chunk, lease.retain(), offset))
            self._supplied.append(load)
            load.updated = now()
        self._bell.ring()

    def stop(self) -> None:
        # Also by a finalizer, in any thread: no lock. Who adds under the lock after this is refused,
        # and who added before it is served.
        self._stopped = True
        self._bell.ring()

    def run(self) -> None:
        while True:
            self._start_copies()
            if self._flights:
                self._copy_oldest()
                continue
            with self._lock:
                if self._stopped and not (self._waiting or self._blocked):
                    return
            self._bell.wait(self._is_needed)

    def _start_copies(self) -> None:
        """Start as many reads as there are leases."""
        while (found := self._next()) is not None:
            load, chunk = found
            plan = self._plans[chunk.id]
            lease = transfer = None
            try:
                if self._is_blocked(load, chunk.id):
                    continue
                if plan.load_lease:
                    lease = self._pool.try_lease("load", plan.load_lease)
                    if lease is None:
                        if self._flights:
                            self._put_back(load)
                            return
                        lease = self._pool.lease("load", plan.load_lease)  # or its error
                with self._lock:
                    supplied = chunk not in load.chunks  # meanwhile
                    if not supplied:
                        load.chunks.remove(chunk)
                self._put_back(load)
                if supplied:
                    if lease is not None:
                        lease.release()
                    continue
                if lease is not None:
                    transfer = self._store.read(chunk.id, "copy", lease, version=load.slots[chunk.id])
            except BaseException as error:
                if lease is not None:
                    lease.release()
                self._fail(load, error)
                continue
            self._flights.append(_Flight(load, chunk, lease, transfer))

    def _next(self) -> tuple[Load, Chunk] | None:
        """Take what updates have supplied; take the first load out of those that wait, and return it with its
        next chunk."""
        with self._lock:
            while self._supplied:
                load = self._supplied.popleft()
                while load.supplies:
                    chunk, supplied, offset = load.supplies.popleft()
                    self._flights.append(_Flight(load, chunk, supplied, None, offset))
            while self._updated:
                updated = self._updated.popleft()
                for blocked in [*self._blocked] if updated is None else [updated]:
                    if (freed := self._blocked.pop(blocked, None)) is not None:
                        freed.behind_update, freed.updated = False, now()
                        heapq.heappush(self._waiting, (freed.place, freed))
            while self._waiting:
                _, load = heapq.heappop(self._waiting)
                if load.chunks:
                    return load, load.chunks[0]
        return None

    def _put_back(self, load: Load) -> None:
        with self._lock:
            if load.chunks:
                heapq.heappush(self._waiting, (load.place, load))

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

    def _is_needed(self) -> bool:
        """Return whether `_start_copies` would find something to do, or nothing will come any more."""
        with self._lock:
            waits = bool(self._waiting or self._updated or self._supplied)
            return waits or (self._stopped and not self._blocked)

    def _copy_oldest(self) -> None:
        """Take the oldest read to the device."""
        load, chunk, lease, transfer, offset = self._flights.popleft()
        try:
            if transfer is not None:
                transfer.wait()
                load.read = now()
            if load.error is None:
                self._copy(load, chunk, lease, offset)
        except BaseException as error:
            self._fail(load, error)
        finally:
            if lease is not None:
                lease.release(load.event)  # the last on the copy stream: all of its copies come before
        with self._lock:
            last = not load.chunks and not load.supplies and not any(f.load is load for f in self._flights)
        if last and not load.issued.is_open:
            if load.error is not None and load.event is not None:
                wait_over(load.event)
            load.finish()

    def _copy(self, load: Load, chunk: Chunk, lease: Lease | None, offset: int) -> None:
        """Put a chunk's copies on the copy stream; the load's `event` is that of the last one."""
        target = load.target[chunk.copy_offset : chunk.copy_offset + chunk.copy_nbytes]
        place = self._plans[chunk.id].place
        if lease is None and chunk.id in load.here:
            source = load.here[chunk.id]
            if source.data_ptr() == target.data_ptr():  # it is in its place already
                source, target = source[:0], target[:0]
        elif lease is None:
            version = load.slots[chunk.id]
            source = self._store.view(chunk.id, "copy", numel=chunk.copy_nbytes, version=version)
        elif place is None:
            source = lease.tensor(torch.uint8, offset, chunk.copy_nbytes)
        else:
            for at, begin, nbytes in place.stretches:
                source = lease.tensor(torch.uint8, offset + at, nbytes)
                load.event = self._device.h2d(
                    target[begin : begin + nbytes], source, load.after, chunk=chunk.id
                )
            return
        load.event = self._device.h2d(target, source, load.after, chunk=chunk.id)

    def _fail(self, load: Load, error: BaseException) -> None:
        with self._lock:
            load.chunks.clear()
            while load.supplies:
                load.supplies.popleft()[1].release()
            load.error = load.error or error
        if not any(f.load is load for f in self._flights):
            if load.event is not None:
                wait_over(load.event)
            load.finish()
