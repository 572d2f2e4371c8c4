"""Gradients that leave the device: one worker sends them, unit by unit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from infinity.core.spans import Recorder
from infinity.hardware.device import Device, Event, HostStream, Task
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates
from infinity.planning.partition import Chunk
from infinity.storage.store import Slot
from infinity.storage.versions import Versions

from .buffer import Leaving, UnitBuffer
from .chunk_work import ChunkWork
from .gradient_chunks import ChunkGradients


class Sending:
    """Sends units' gradients to their tier. Used by the user's thread.

    Attributes:
        leaving: buffers that are on their way.
    """

    def __init__(
        self,
        chunks: ChunkGradients,
        work: ChunkWork,
        versions: Versions,
        updates: Updates,
        device: Device,
        recorder: Recorder,
    ) -> None:
        self.leaving: deque[Leaving] = deque()
        self._chunks = chunks
        self._entries = chunks.entries
        self._work = work
        self._versions = versions
        self._updates = updates
        self._device = device
        self._recorder = recorder
        self._stream = HostStream("gradients", there=device.worker)
        self._tasks: deque[tuple[int, Task]] = deque()  # unit, and what sends it
        self._last: dict[int, Task] = {}  # unit → what has sent it last
        self._reserved: dict[int, Slot] = {}  # chunk → the version that its update reads

    def send(self, unit: ParamUnit, buffer: UnitBuffer) -> None:
        """Start to send what has arrived of a unit, of which nothing else is on its way."""
        arrivals = buffer.arrivals
        written = []
        for chunk in unit.layout.trainable_chunks:
            entry = self._entries[chunk.id]
            several = {s.param for s in chunk.segments if s.param in arrivals}
            if entry.dtype is None and all(arrivals[i].zero for i in several):
                entry.present.update(several)  # zeros beside zeros
            elif several:
                written.append(chunk)
        if not written:
            return
        self.keep_clear(unit, written)
        self._device.trim()
        self._device.wait_on_device(buffer.mark())
        leaving = Leaving(buffer, written, self._device.mark())
        task = self._last[unit.index] = self._stream.submit(lambda: self._work.take(leaving))
        self.leaving.append(leaving)  # not before: a worker that is closed would never issue it
        self._tasks.append((unit.index, task))

    def last(self, unit: ParamUnit) -> Task | None:
        """Return what has sent a unit's gradients last; its result is an event of the device."""
        return self._last.get(unit.index)

    def keep_clear(self, unit: ParamUnit, chunks: Iterable[Chunk]) -> None:
        """Keep clear of what an update still reads: put it into the back, or wait for it."""
        for chunk in chunks:
            front = self._versions.slot(chunk.id, "gradient")
            if self._reserved.get(chunk.id) != front or not self._updates.has_chunk(chunk.id):
                continue
            if self._entries[chunk.id].dtype is None and self._versions.has_two("gradient"):
                self._versions.flip(chunk.id, "gradient")
            else:
                self._updates.wait_unit(unit.index)

    def reserve(self, slots: Iterable[tuple[int, Slot]]) -> None:
        """Note which version of which chunk the update that was posted reads."""
        self._reserved = dict(slots)

    def let_go(self) -> None:
        """Return the memory of gradients that are leaving to the device: the host waits until the copies are
        issued, and the device's compute until they are done."""
        while self.leaving:
            leaving = self.leaving[0]
            wait = self._recorder.waits()
            leaving.issued.wait()
            if leaving.buffer is not None:
                with leaving.buffer.there():
                    self._device.wait_on_device(leaving.copied)
            self.leaving.popleft()
            leaving.buffer = None
            self._recorder.waited(wait, ("reduce", 0))

    def wait(self, unit: int | None = None) -> None:
        """Wait for what sends a unit, or for all; raise what went wrong in any that is over."""
        while self._tasks:
            task = self._tasks[0][1]
            if unit is not None and not task.is_over and all(i != unit for i, _ in self._tasks):
                return
            wait = self._recorder.waits()
            try:
                task.wait()
            except Exception:  # but not an interrupt, after which it is still under way
                self._tasks.popleft()
                raise
            self._tasks.popleft()
            self._recorder.waited(wait, ("reduce", 0))

    def run(self, call: Callable[[], None]) -> None:
        """Wait until the worker has done `call`; the device's compute waits for what it has put there."""

        def work() -> Event | None:
            call()
            return self._device.mark()

        self._device.wait_on_device(self._stream.submit(work).result())

    def sum_squares(self) -> None:
        """Compute the squares of all gradients, which are complete."""
        if not self._chunks.are_summed:
            task = self._stream.submit(self._chunks.sum_squares)
            wait = self._recorder.waits()
            task.wait()
            self._recorder.waited(wait, ("reduce", 0))

    def finish_writes(self) -> None:
        """Wait until what was sent is on its tier."""
        task = self._stream.submit(self._chunks.finish_writes)
        wait = self._recorder.waits()
        task.wait()
        self._recorder.waited(wait, ("nvme", 0))

    def close(self) -> None:
        """Finish and end the worker."""
        self._stream.close()
