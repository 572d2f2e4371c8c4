"""The update: read chunk c+1 ‖ update c ‖ write c−1.

One pass of the kernel unscales, clips, decays, updates and writes the compute-dtype copy. It
runs where the state is: on the CPU for `host` and `nvme`, on the device for `device`, with the
same bits ([Note: one rounding per operation]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from infinity.core.sizes import ceil_to
from infinity.hardware import adam_reference, cpu_adam
from infinity.planning.partition import Chunk

from .visit import ChunkVisit, Places


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
    """A chunk and what is to be done to its segments, by parameter index; others stay."""

    chunk: Chunk
    params: dict[int, ParamUpdate]


def run(places: Places, work: Sequence[ChunkUpdate], finished: Callable[[Chunk], None] | None = None) -> None:
    """Update the chunks of `work`, in order; return when all of it is complete on its tier."""
    todo = deque(work)
    reading: deque[tuple[ChunkUpdate, ChunkVisit]] = deque()
    writing: deque[ChunkVisit] = deque()
    try:
        while todo or reading:
            while writing and writing[0].done():
                _leave(writing)
            while todo:
                visit = _enter(places, todo[0].chunk)
                if visit is None:
                    if reading or not writing:
                        break
                    _leave(writing)
                    continue
                reading.append((todo.popleft(), visit))
                visit.read(gradient=True, copy=False)
                if len(reading) > 2 and not places.lease_nbytes(visit.chunk):
                    break  # nothing is read ahead of what is at hand already
            if not reading:
                continue
            update, visit = reading.popleft()
            writing.append(visit)
            visit.wait()
            _compute(places, update, visit)
            visit.write(state=True, copy=True)
            if finished is not None:
                finished(update.chunk)
        while writing:
            _leave(writing)
    finally:
        # Only after an error is anything left; leases go home when their transfers are over.
        for visit in [*writing, *(v for _, v in reading)]:
            _abandon(visit)


def _enter(places: Places, chunk: Chunk) -> ChunkVisit | None:
    nbytes = ceil_to(places.lease_nbytes(chunk), 4096)
    if not nbytes:
        return ChunkVisit(places, chunk, None)
    lease = places.pool.try_lease("update", nbytes)
    return None if lease is None else ChunkVisit(places, chunk, lease)


def _leave(writing: deque[ChunkVisit]) -> None:
    visit = writing.popleft()
    visit.leave()


def _abandon(visit: ChunkVisit) -> None:
    try:
        visit.leave()
    except Exception:
        return  # the first error is on its way to the user; the store keeps the rest


def _compute(places: Places, update: ChunkUpdate, visit: ChunkVisit) -> None:
    segments = [
        cpu_adam.Segment(s.start, s.numel, **update.params[s.param]._asdict())
        for s in update.chunk.segments
        if s.param in update.params
    ]
    master = visit.master
    exp_avg, exp_avg_sq = visit.moments
    grad = visit.grad
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
        resident = places.units[update.chunk.unit].resident
        (visit.device_copy if resident else out).copy_(master)


def chunks_with_gradient(places: Places, chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the chunks in which at least one parameter has a gradient."""
    return [c for c in chunks if places.gradients.entries[c.id].present]
