"""The work of the gradients' thread, one chunk after the other: it moves gradients that leave the device to
their place, erases, clamps and reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from infinity.core.spans import Recorder, now
from infinity.hardware.device import Event
from infinity.planning.partition import Chunk, Segment

from .buffer import Leaving
from .gradient_chunks import ChunkGradients, GradientIO


class ChunkWork:
    """Works on the gradients of chunks. All is called on the worker's thread."""

    def __init__(self, chunks: ChunkGradients, recorder: Recorder) -> None:
        self._chunks = chunks
        self._recorder = recorder

    def take(self, leaving: Leaving) -> Event | None:
        """Take a buffer's chunks to their tier; return an event of what the device has to do for that."""
        begin, nbytes = now(), leaving.nbytes
        try:
            works: deque[GradientIO] = deque()
            try:
                self._issue(leaving, works)
                while works:
                    self._finish(works.popleft(), leaving)
            finally:
                for work in works:  # only after an error is anything left
                    work.close()
        finally:
            self._let_go(leaving)
        if (log := self._recorder.log) is not None:
            log.add("reduce", begin, now(), unit=leaving.unit, nbytes=nbytes)
        by_device = any(self._chunks.by_device(chunk) for chunk in leaving.chunks)
        return self._chunks.device.mark() if by_device else None

    def _issue(self, leaving: Leaving, works: deque[GradientIO]) -> None:
        """Start what can be started: all chunks at once, as far as there are leases."""
        left = True
        for chunk in leaving.chunks:
            while (work := self._chunks.take(chunk, leaving, alone=not works)) is None:
                self._finish(works.popleft(), leaving)
            if work.ready:
                self._finish(work, leaving)
                continue
            works.append(work)
            left = left and work.has_left
        if left:
            self._let_go(leaving)

    def _let_go(self, leaving: Leaving) -> None:
        """Nothing needs the buffer any more but what the device has been given: copies, and work on chunks
        that it keeps."""
        if leaving.issued.is_open:
            return
        try:
            if any(map(self._chunks.by_device, leaving.chunks)):
                self._chunks.device.wait_on_device(leaving.copied)
                leaving.copied = self._chunks.device.mark()
        finally:
            leaving.issued.open()

    def _finish(self, work: GradientIO, leaving: Leaving) -> None:
        """Put the gradients that arrived for a chunk in their place, and compute their squares."""
        chunk, arrivals = work.chunk, leaving.arrivals
        entry = self._chunks.entries[chunk.id]
        with work:
            if entry.dtype is None:
                entry.dtype = torch.float32 if leaving.is_wide else chunk.dtype
                target = work.buffer(entry.dtype)
                work.replace(target)
            else:
                held = set(entry.present)
                if self._chunks.widens(chunk, leaving):
                    work.widen()
                target = work.buffer(entry.dtype)
                for segment in chunk.segments:
                    arrival = arrivals.get(segment.param)
                    if arrival is None:
                        continue
                    part = target[segment.start : segment.start + segment.numel]
                    if arrival.zero:
                        part.zero_()
                    elif arrival.fresh or segment.param not in held:
                        work.put(part, work.arrived(segment))
                    else:
                        if arrival.factor != 1.0:
                            part.mul_(arrival.factor)
                        work.add(part, work.arrived(segment))
            entry.present.update(s.param for s in chunk.segments if s.param in arrivals)
            work.store(target)

    def erase(self, chunk: Chunk, segments: Sequence[Segment]) -> None:
        """Make segments of a chunk zero, and absent."""
        entry = self._chunks.entries[chunk.id]
        with self._chunks.open(chunk) as work:
            target = work.buffer(entry.dtype or chunk.dtype)
            for segment in segments:
                target[segment.start : segment.start + segment.numel].zero_()
                entry.present.discard(segment.param)
            work.store(target)

    def clamp(self, chunk: Chunk, segments: Sequence[Segment], low: float, high: float) -> None:
        """Limit the elements of segments of a chunk to `low` … `high`."""
        entry = self._chunks.entries[chunk.id]
        with self._chunks.open(chunk) as work:
            target = work.buffer(entry.dtype or chunk.dtype)
            for segment in segments:
                target[segment.start : segment.start + segment.numel].clamp_(low, high)
            work.store(target)

    def read(self, chunk: Chunk, segment: Segment, out: torch.Tensor) -> None:
        """Put a segment of a chunk into `out`, fp32."""
        entry = self._chunks.entries[chunk.id]
        if entry.dtype is not None:
            with self._chunks.open(chunk) as work:
                buffer = work.buffer(entry.dtype)
                out.copy_(buffer[segment.start : segment.start + segment.numel])
