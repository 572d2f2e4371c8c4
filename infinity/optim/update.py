"""The update: read chunk c+1 ‖ update c ‖ write c−1.

One pass of the kernel unscales, clips, decays, updates and writes the compute-dtype copy. It
runs where the state is: on the CPU for `host` and `nvme`, on the device for `device`, with the
same bits ([Note: one rounding per operation]).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from infinity.core.sizes import SPAN, ceil_to
from infinity.core.spans import Recorder, now
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.device import Event, HostStream, Task
from infinity.params.fetch import Fetcher
from infinity.params.pending import Pending
from infinity.planning.partition import Chunk

from .visit import ChunkVisit, Places
from .visit import visit as enter


class ParamUpdate(NamedTuple):
    """The scalars of one parameter's update, as they were when `step()` was called."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float
    decoupled: bool
    maximize: bool


class ChunkUpdate(NamedTuple):
    """A chunk and what is to be done to its segments, by parameter index; others stay.

    `grad_dtype` is that of the chunk's gradient when `step()` was called, None: it is zero; and
    `grad_slot` is where it is. What happens to `p.grad` afterwards is the next step's.
    """

    chunk: Chunk
    params: dict[int, ParamUpdate]
    grad_dtype: torch.dtype | None
    grad_slot: int = 0


class Updater:
    """Runs updates, at once or behind the user's back, and reads state ahead for them."""

    def __init__(self, places: Places, pending: Pending, fetcher: Fetcher, recorder: Recorder) -> None:
        self._places = places
        self._recorder = recorder
        self._pending = pending
        self._fetcher = fetcher
        self._stream: HostStream | None = None
        self._ahead: deque[ChunkVisit] = deque()
        self._task: Task | None = None
        self._unwritten: set[int] = set()  # chunks posted whose state the store does not know of yet
        self.drift = Drift()

    def post(self, work: Sequence[ChunkUpdate], *, delayed: bool = False) -> None:
        """Start the same on the worker; `wait`, or `Pending` for one unit, tells when. `delayed`: the
        copies that are made are for the forward after the next; all that are newer are published."""
        if self._stream is None:
            self._stream = HostStream("update")
        ahead = self._take_ahead()
        after = self._places.device.mark()  # the user's stream may still make what the update reads
        self._pending.post((u.chunk for u in work), gate=not delayed)
        self._unwritten = {u.chunk.id for u in work}
        self._places.gradients.reserve((u.chunk.id, u.grad_slot) for u in work)
        self._task = self._stream.submit(lambda: self._work(work, ahead, after, delayed))

    def wait(self) -> None:
        """Block until what was posted is complete on its tier; raise what went wrong."""
        task = self._task
        if task is not None:
            wait = self._recorder.waits()
            try:
                task.wait()
            except BaseException as error:
                if error is task.error:
                    self._task = None
                    self._pending.mark_reported()
                raise  # after an interrupt it is still under way, and the next call waits
            self._task = None
            # When the last kernel has run, what is left are writes.
            self._recorder.waited(wait, ("update", self._pending.finished_at), ("nvme", 0))
        self._pending.check()

    def read_ahead(self, chunks: Iterable[Chunk]) -> None:
        """Start reading the state of `chunks`, in order, as far as there are leases and as the update
        before has handed its writes to the store, which has reads come after them. Then it is exact:
        only an update changes state."""
        if self._ahead:
            return
        for chunk in chunks:
            nbytes = self._places.lease_nbytes(chunk)
            if not nbytes or chunk.id in self._unwritten:
                return
            visit = _enter(self._places, chunk)
            if visit is None:
                return
            self._ahead.append(visit)
            visit.read_state(early=True)

    @property
    def ahead(self) -> int:
        """Chunks whose state was read ahead."""
        return len(self._ahead)

    def drop_ahead(self) -> None:
        """Give up what was read ahead: somebody is about to change state, or needs the leases."""
        for visit in self._take_ahead():
            visit.leave()

    def close(self) -> None:
        """Finish what was posted and end the worker."""
        for visit in self._take_ahead():
            _abandon(visit)
        if self._stream is not None:
            self._stream.close()

    def _take_ahead(self) -> deque[ChunkVisit]:
        ahead, self._ahead = self._ahead, deque()
        return ahead

    def _work(
        self, work: Sequence[ChunkUpdate], ahead: deque[ChunkVisit], after: Event | None, delayed: bool
    ) -> None:
        drift = Drift() if delayed else None
        try:
            self._places.device.wait_on_device(after)
            finish = self._finish_delayed if delayed else self._finish
            _run(self._places, work, ahead, finish, self._unwritten, drift, self._recorder)
            self.drift = drift or self.drift
        except BaseException as error:
            self._pending.fail(error)
            raise

    def _finish(self, chunk: Chunk, visit: ChunkVisit) -> None:
        fetch = self._places.units[chunk.unit].fetch
        lease = visit.copy_lease
        if fetch is not None and lease is not None:
            self._fetcher.supply(fetch, chunk, *lease)
        visit.arrive()
        self._pending.finish(chunk)

    def _finish_delayed(self, chunk: Chunk, visit: ChunkVisit) -> None:
        visit.arrive()
        self._places.copies.updated(chunk.id)
        self._pending.finish(chunk)


class Drift:
    """How far a delayed update moves the parameters away from those that the forward beside it uses:
    ‖θ_t − θ_{t−1}‖ / ‖θ_t‖ over one span of each chunk (fp32 masters, 2-norms)."""

    def __init__(self) -> None:
        self._moved = self._whole = 0.0

    def before(self, master: torch.Tensor) -> torch.Tensor:
        """Return what `after` compares with."""
        return master[:SPAN].clone()

    def after(self, before: torch.Tensor, master: torch.Tensor) -> None:
        """Add one chunk."""
        now = master[:SPAN]
        squares = cpu_adam.sum_of_squares if now.is_cpu else adam_reference.sum_of_squares_reference
        self._whole += float(squares(now).sum())
        self._moved += float(squares(before.sub_(now)).sum())

    @property
    def value(self) -> float:
        """The figure; 0.0 where nothing was delayed."""
        return math.sqrt(self._moved / self._whole) if self._whole else 0.0


def _run(
    places: Places,
    work: Sequence[ChunkUpdate],
    ahead: deque[ChunkVisit],
    finished: Callable[[Chunk, ChunkVisit], None] | None,
    unwritten: set[int] | None,
    drift: Drift | None,
    recorder: Recorder,
) -> None:
    todo = deque(work)
    reading: deque[tuple[ChunkUpdate, ChunkVisit]] = deque()
    writing: deque[ChunkVisit] = deque()
    early = {v.chunk.id: v for v in ahead}
    try:
        for number in set(early) - {u.chunk.id for u in work}:
            early.pop(number).leave()  # it is not updated in this step
        while todo or reading:
            while writing and writing[0].done():
                writing.popleft().leave()
            while todo:
                chunk = todo[0].chunk
                visit = early.pop(chunk.id, None) or _enter(places, chunk)
                if visit is None:
                    if reading:
                        break
                    if writing:
                        writing.popleft().leave()
                        continue
                    if early:  # read ahead in another order than this one: its leases are all there are
                        early.popitem()[1].leave()
                        continue
                    visit = enter(places, chunk)
                update = todo.popleft()
                reading.append((update, visit))
                if drift is not None:
                    visit.delay()
                visit.read(gradient=update.grad_dtype, slot=update.grad_slot)
                if len(reading) > 2 and not places.lease_nbytes(chunk):
                    break  # nothing is read ahead of what is at hand already
            update, visit = reading.popleft()
            writing.append(visit)
            visit.wait()
            if drift is not None:
                places.copies.wait_published(update.chunk.id)
            begin = now()
            if drift is not None:
                visit.carry_over()
                before = drift.before(visit.master)
                _compute(places, update, visit, delayed=True)
                drift.after(before, visit.master)
            else:
                _compute(places, update, visit)
            visit.write(state=False, copy=True)
            if finished is not None:
                finished(update.chunk, visit)
            # Who waits for the copy does not wait for the CRCs of the state.
            visit.write(state=True, copy=False)
            if unwritten is not None:
                unwritten.discard(update.chunk.id)
            end = now()  # with the CRC of what it made
            recorder.updating += end - begin
            if (log := recorder.log) is not None:
                log.add("update", begin, end, chunk=update.chunk.id, nbytes=_moved(update, visit))
        while writing:
            writing.popleft().leave()
    finally:
        # Only after an error is anything left; leases go home when their transfers are over.
        for visit in [*writing, *(v for _, v in reading), *early.values()]:
            _abandon(visit)


def _enter(places: Places, chunk: Chunk) -> ChunkVisit | None:
    nbytes = ceil_to(places.lease_nbytes(chunk), 4096)
    if not nbytes:
        return ChunkVisit(places, chunk, None)
    lease = places.pool.try_lease("update", nbytes)
    return None if lease is None else ChunkVisit(places, chunk, lease)


def _abandon(visit: ChunkVisit) -> None:
    try:
        visit.leave()
    except Exception:
        return  # the first error is on its way to the user; the store keeps the rest


def _moved(update: ChunkUpdate, visit: ChunkVisit) -> int:
    """Return the bytes of memory that the kernel reads and writes: state, gradient and copy."""
    chunk = update.chunk
    grad = update.grad_dtype or chunk.dtype
    copy = 0 if visit.copy_is_master else chunk.dtype.itemsize
    return chunk.numel * (2 * 3 * 4 + grad.itemsize + copy)


def _compute(places: Places, update: ChunkUpdate, visit: ChunkVisit, *, delayed: bool = False) -> None:
    segments = [
        cpu_adam.Segment(s.start, s.numel, **update.params[s.param]._asdict())
        for s in update.chunk.segments
        if s.param in update.params
    ]
    master = visit.master
    exp_avg, exp_avg_sq = visit.moments
    grad = visit.grad(update.grad_dtype)
    out = None if visit.copy_is_master else visit.copy
    grad = grad.to(master.device)
    if master.is_cpu:
        if out is not None and len(segments) < len(update.chunk.segments):
            # The copy of a segment that this update skips is its master, rounded.
            cpu_adam.convert(out, master)
        cpu_adam.adamw_update_segments(master, exp_avg, exp_avg_sq, grad, out, segments)
        return
    adam_reference.adamw_reference_segments(master, exp_avg, exp_avg_sq, grad, None, segments)
    if out is not None:
        resident = places.units[update.chunk.unit].resident and not delayed
        (visit.device_copy if resident else out).copy_(master)
