"""What happens on a device that is late, and which of it nothing orders.

Streams are queues. What is put on one has its effect when somebody must wait for it, or, by the schedule,
earlier; until then its memory holds NaNs. Every access to memory of the device, and to host memory that is
registered, is dated by a vector clock (Lamport 1978; Fidge 1988) of the stream or the thread that makes it.
Two accesses to one place, one of them a write, are a finding if no chain of events, waits, tasks, latches and
locks leads from the one to the other, whatever the timing was.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import itertools
import mmap
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

Clock = dict[Any, int]
Span = tuple[int, int]

#: Accesses are kept by pages of so many bytes.
PAGE = 1 << 16


class NotYet(Exception):
    """What a stream has to do next waits for another rank."""


class Finding(AssertionError):
    """What CUDA would answer with wrong numbers, with an error, or with a wait of the whole device."""


def join(clock: Clock, other: Clock) -> None:
    """Have `clock` come after `other`."""
    for actor, count in other.items():
        if count > clock.get(actor, 0):
            clock[actor] = count


def where() -> str:
    """Return the nearest lines of the engine that lead here, innermost first; "user" where there are none."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(names) < 4:
        _, within, path = frame.f_code.co_filename.rpartition("/infinity/")
        if within:
            names.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(names) or "user"


@dataclass
class Access:
    """One access to a range of memory."""

    span: Span
    writes: bool
    actor: Any
    count: int
    what: str


class Stream:
    """A queue of what the device has to do, in order. `done`: how many of them have been done."""

    def __init__(self, world: World, number: int, device: int, name: str) -> None:
        self.world = world
        self.number = number
        self.device = device
        self.name = name
        self.queue: list[tuple[Callable[[], None] | None, Point | None]] = []
        self.done = 0
        self.clock: Clock = {}


@dataclass
class Point:
    """A place in a stream's queue, with what comes before it."""

    stream: Stream
    end: int
    clock: Clock
    asked: float = field(default=0.0)

    @property
    def is_past(self) -> bool:
        return self.stream.done >= self.end


@dataclass
class Block:
    """Memory of the device. `users`: other streams that the allocator was told of."""

    begin: int
    nbytes: int
    stream: Stream
    users: set[int] = field(default_factory=set)


class World:
    """The device's memory and streams, and who has seen what.

    Args:
        schedule: "late", "eager" or "random".
        seed: of the random one.
        nbytes: of memory on each device.
    """

    def __init__(
        self, schedule: str = "late", seed: int = 0, nbytes: int = 1 << 30, devices: int = 2
    ) -> None:
        self.lock = threading.RLock()
        self.threads = torch.get_num_threads()
        self.schedule = schedule
        self.random = random.Random(seed)
        self.patience = 0.003  # seconds that a look at an event goes on to say no
        self.findings: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.devices = devices
        self.streams = [Stream(self, n, n, f"default {n}") for n in range(devices)]
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
        self._view = (ctypes.c_char * nbytes).from_buffer(self._map)
        self.begin = ctypes.addressof(self._view)
        self.end = self.begin + nbytes
        self._top = self.begin
        self.blocks: dict[int, Block] = {}
        #: by stream and size: addresses, with what has used the memory on other streams
        self._free: dict[tuple[int, int], list[tuple[int, Clock]]] = collections.defaultdict(list)
        self._freed: collections.deque[tuple[int, list[tuple[Stream, int]]]] = collections.deque()
        self._waiting: list[tuple[Block, list[Point]]] = []
        self._current: dict[tuple[int, int], Stream] = {}  # by thread and device
        self._clocks: dict[Any, Clock] = {}
        self._actors: dict[int, Any] = {}  # of threads, by their identity
        self._numbers = itertools.count(1)
        self._given: dict[int, tuple[Any, Clock]] = {}
        self._log: dict[int, list[Access]] = collections.defaultdict(list)
        self.registered: list[Span] = []
        self._io: dict[Any, Clock] = {}
        self._backward: Clock = {}
        self._autograd: dict[Any, Clock] = {}
        self.fails: int | None = None  # the number of the allocation that finds no memory
        self.refuses: int | None = None  # the number of the registration that is refused
        self.captures = False  # whether the current stream records a graph
        self.latched = False  # whether the next launch meets an error that is not its own

    # -- clocks -----------------------------------------------------------------------------

    def actor(self) -> Any:
        me = threading.get_ident()
        if me not in self._actors:
            self._actors[me] = f"{threading.current_thread().name} {next(self._numbers)}"
        return self._actors[me]

    def begin_thread(self, clock: Clock) -> None:
        """A new thread begins, which comes after `clock`."""
        with self.lock:
            self._actors.pop(threading.get_ident(), None)
            join(self.host(), clock)

    def host(self) -> Clock:
        """Return the clock of this thread, one further."""
        actor = self.actor()
        clock = self._clocks.setdefault(actor, {})
        clock[actor] = clock.get(actor, 0) + 1
        if isinstance(threading.current_thread(), threading._DummyThread):  # autograd's
            self._autograd[actor] = clock
            join(clock, self._backward)
        return clock

    def begin_backward(self) -> None:
        """Autograd's threads come after this one from here on."""
        with self.lock:
            join(self._backward, self.host())

    def end_backward(self) -> None:
        """This thread comes after what autograd's have done."""
        with self.lock:
            for clock in self._autograd.values():
                join(self.host(), clock)

    def snapshot(self) -> Clock:
        with self.lock:
            return dict(self.host())

    def give(self, thing: Any) -> None:
        """Who `take`s the thing later comes after this."""
        with self.lock:
            kept = self._given.setdefault(id(thing), (thing, {}))
            join(kept[1], self.host())

    def take(self, thing: Any, *, last: bool = False) -> None:
        """Come after all who gave it. `last`: nobody takes it again, and it need not be kept: a task has
        results, whose memory the device may give to somebody else when nobody looks at them any more."""
        with self.lock:
            kept = self._given.pop(id(thing), None) if last else self._given.get(id(thing))
            if kept is not None:
                join(self.host(), kept[1])

    # -- accesses ---------------------------------------------------------------------------

    def find(self, what: str) -> None:
        with self.lock:
            self.findings[what] += 1

    def access(
        self, actor: Any, clock: Clock, reads: Iterable[Span], writes: Iterable[Span], what: str
    ) -> None:
        now = clock[actor]
        for span, is_write in [*((s, False) for s in reads), *((s, True) for s in writes)]:
            begin, end = span
            if begin >= end:
                continue
            for page in range(begin // PAGE, (end - 1) // PAGE + 1):
                kept = []
                for each in self._log[page]:
                    meets = each.span[0] < end and begin < each.span[1]
                    before = each.actor == actor or each.count <= clock.get(each.actor, 0)
                    if meets and (is_write or each.writes) and not before:
                        mine = f"{'write' if is_write else 'read'} by {what}"
                        other = f"{'write' if each.writes else 'read'} by {each.what}"
                        self.findings[f"nothing orders: {mine}\n    and: {other}"] += 1
                    hidden = before and is_write and begin <= each.span[0] and each.span[1] <= end
                    if not hidden and not (
                        each.actor == actor and each.span == span and each.writes == is_write
                    ):
                        kept.append(each)
                kept.append(Access(span, is_write, actor, now, what))
                self._log[page] = kept[-256:]

    def host_access(self, reads: Iterable[Span], writes: Iterable[Span], what: str) -> None:
        """This thread reads and writes host memory."""
        with self.lock:
            clock = self.host()
            reads, writes = (
                [s for s in reads if self.is_registered(s)],
                [s for s in writes if self.is_registered(s)],
            )
            if reads or writes:
                self.access(self.actor(), clock, reads, writes, f"[{self.actor()}] {what}")

    def is_registered(self, span: Span) -> bool:
        return any(begin <= span[0] and span[1] <= end for begin, end in self.registered)

    def is_device(self, address: int) -> bool:
        return self.begin <= address < self.end

    def register(self, begin: int, nbytes: int) -> int:
        with self.lock:
            self.counts["registrations"] += 1
            if self.refuses is not None and self.counts["registrations"] > self.refuses:
                self.refuses, self.latched = None, True
                return 2  # cudaErrorMemoryAllocation
            self.registered.append((begin, begin + nbytes))
            return 0

    def has_registered(self, begin: int) -> bool:
        return any(span[0] == begin for span in tuple(self.registered))

    def unregister(self, begin: int) -> None:
        with self.lock:
            found = next((s for s in self.registered if s[0] == begin), None)
            if found is None:
                self.find(f"what is unregistered was not registered  {where()}")
                return
            self.host_access([], [found], f"cudaHostUnregister {where()}")
            self.registered.remove(found)
            for page in range(found[0] // PAGE, (found[1] - 1) // PAGE + 1):
                self._log.pop(page, None)

    def begin_io(self, key: Any, span: Span, into: bool) -> None:
        """The kernel gets a range of host memory: an actor of its own, that comes after this thread."""
        with self.lock:
            actor = f"io {next(self._numbers)}"
            clock = {**self.host(), actor: 1}
            self._io[key] = clock
            if self.is_registered(span):
                spans = ([], [span]) if into else ([span], [])
                self.access(actor, clock, *spans, f"[I/O] {where()}")

    def end_io(self, key: Any) -> None:
        with self.lock:
            if clock := self._io.pop(key, None):
                join(self.host(), clock)

    # -- streams ----------------------------------------------------------------------------

    def new_stream(self, device: int, name: str = "") -> Stream:
        with self.lock:
            stream = Stream(self, len(self.streams), device, name or f"stream {len(self.streams)} {where()}")
            self.streams.append(stream)
            return stream

    def current(self, device: int = 0) -> Stream:
        return self._current.get((threading.get_ident(), device), self.streams[device])

    def set_current(self, stream: Stream) -> None:
        self._current[threading.get_ident(), stream.device] = stream

    def record(self, stream: Stream) -> Point:
        with self.lock:
            join(stream.clock, self.host())
            self.counts["events"] += 1
            return Point(stream, len(stream.queue), dict(stream.clock))

    def block(self, stream: Stream, point: Point) -> None:
        """What is put on `stream` from now on comes after `point`."""
        with self.lock:
            join(stream.clock, point.clock)
            self.counts["stream waits"] += 1
            if point.stream is not stream:
                stream.queue.append((None, point))

    def query(self, point: Point) -> bool:
        """Return whether a point is past. One that is asked for again and again gets there."""
        with self.lock:
            if not point.is_past:
                now = time.monotonic()
                point.asked = point.asked or now
                if now - point.asked < self.patience:
                    return False
                try:
                    self.force(point.stream, point.end)
                except NotYet:
                    return False
                self.counts[f"looks that found it done: {threading.current_thread().name}"] += 1
            join(self.host(), point.clock)
            return True

    def wait(self, point: Point) -> None:
        self._reach(point.stream, point.end)
        with self.lock:
            self.counts[f"host waits: {threading.current_thread().name}"] += 1
            join(self.host(), point.clock)

    def synchronize(self, stream: Stream) -> None:
        with self.lock:
            point = Point(stream, len(stream.queue), dict(stream.clock))
        self.wait(point)

    def _reach(self, stream: Stream, end: int) -> None:
        """Wait until a stream is at `end`. Other threads go on while that waits for another rank."""
        while True:
            with self.lock, contextlib.suppress(NotYet):
                self.force(stream, end)
                return
            time.sleep(1e-4)

    def synchronize_all(self) -> None:
        """This thread comes after all that the device has been given."""
        for stream in tuple(self.streams):
            self.synchronize(stream)

    def launch(self) -> None:
        """A kernel is about to be launched: raise what a call before it has left."""
        if self.latched:
            self.latched = False
            raise RuntimeError("CUDA error: out of memory, of a call before this launch")

    def put(
        self,
        stream: Stream,
        call: Callable[[], None],
        reads: Iterable[Span],
        writes: Iterable[Span],
        what: str,
    ) -> None:
        """Put `call` on a stream."""
        with self.lock:
            self._take_freed()
            join(stream.clock, self.host())
            stream.clock[stream] = stream.clock.get(stream, 0) + 1
            self.access(stream, stream.clock, reads, writes, f"[{stream.name}] {what}")
            stream.queue.append((call, None))
            self.counts["launches"] += 1
            with contextlib.suppress(NotYet):
                if self.schedule == "eager":
                    self.force(stream, len(stream.queue))
                elif self.schedule == "random" and self.random.random() < 0.3:
                    other = self.random.choice(self.streams)
                    if other.done < len(other.queue):
                        self.force(other, self.random.randint(other.done + 1, len(other.queue)))

    def force(self, stream: Stream, end: int) -> None:
        """Do what a stream has to do, up to `end`, and first what that comes after."""
        while stream.done < end:
            call, point = stream.queue[stream.done]
            if point is not None and not point.is_past:
                self.force(point.stream, point.end)
                continue
            stream.queue[stream.done] = (None, None)
            stream.done += 1
            if call is not None:
                if torch.get_num_threads() != self.threads:  # OpenMP counts for each thread
                    torch.set_num_threads(self.threads)
                try:
                    call()
                except NotYet:
                    stream.done -= 1
                    stream.queue[stream.done] = (call, None)
                    raise

    # -- memory -----------------------------------------------------------------------------

    def allocate(self, nbytes: int, device: int = 0) -> int:
        """Return the address of memory for the current stream; 0: there is none. Memory that the stream
        itself gave back is taken at once, as by torch's caching allocator."""
        with self.lock:
            self._take_freed()
            self.counts["allocations"] += 1
            if self.fails is not None and self.counts["allocations"] > self.fails:
                self.fails = None
                return 0
            size = -(-nbytes // 512) * 512
            stream = self.current(device)
            for entry in [e for e in self._waiting if all(p.is_past for p in e[1])]:
                self._waiting.remove(entry)
                used: Clock = {}
                for point in entry[1]:
                    join(used, point.clock)
                self._free[entry[0].stream.number, entry[0].nbytes].append((entry[0].begin, used))
            free = self._free[stream.number, size]
            if free:
                begin, used = free.pop()
                join(self.host(), used)  # the allocator has looked: on this thread, or in its lock on another
            else:
                begin, self._top = self._top, self._top + size
                if self._top > self.end:
                    return 0
            self.blocks[begin] = Block(begin, size, stream)
            self.put(
                stream, lambda: _poison(begin, size), [], [(begin, begin + size)], f"allocation {where()}"
            )
            return begin

    def limit(self, share: float) -> None:
        """The device has this share of its memory: with less than all the next allocation finds none."""
        self.fails = self.counts["allocations"] if share < 1 else None

    def free(self, begin: int) -> None:
        """Give memory back. Finalizers call this, in any thread: no lock."""
        block = self.blocks.get(begin)
        if block is not None:
            ends = [(self.streams[n], len(self.streams[n].queue)) for n in tuple(block.users)]
            self._freed.append((begin, ends))

    def record_use(self, address: int, stream: Stream) -> None:
        """Memory is not given to anybody before `stream` has done what it has to do when it is freed."""
        with self.lock:
            block = self._block_of(address)
            if block is not None and stream is not block.stream:
                block.users.add(stream.number)

    def _block_of(self, address: int) -> Block | None:
        begins = sorted(self.blocks)
        at = bisect.bisect_right(begins, address) - 1
        block = self.blocks[begins[at]] if at >= 0 else None
        return block if block is not None and address < block.begin + block.nbytes else None

    def _take_freed(self) -> None:
        while self._freed:
            begin, ends = self._freed.popleft()
            block = self.blocks.pop(begin, None)
            if block is None:
                continue
            points = [Point(s, end, dict(s.clock)) for s, end in ends]
            if points:
                self._waiting.append((block, points))
            else:
                self._free[block.stream.number, block.nbytes].append((begin, {}))

    # -- the end ----------------------------------------------------------------------------

    def finish(self) -> Iterator[str]:
        """Do everything that is left, and yield what was found."""
        for stream in self.streams:
            self._reach(stream, len(stream.queue))
        for what, times in self.findings.items():
            yield f"{what}  ({times} times)"


def _poison(begin: int, nbytes: int) -> None:
    ctypes.memset(begin, 0xFF, nbytes)
