"""A device with CUDA's control flow over the CPU's memory: what that flow does wrong shows without a GPU.

- Copies run on a thread for each direction, later than they are asked for, after the events that they are
  given.
- `mark` is an event that becomes done later than it is made: the host runs ahead of the device. Each worker
  of the engine has a compute stream of its own; all other threads share the user's.
- What a worker gives to `compute` runs on its stream, behind what that still has to do.
- A unit's storage has size 0 while it is empty. What is given out holds NaNs, in every dtype, and so does
  what a copy is to fill, from when the copy is asked for; what is given back holds them before it goes.
- Copies go between memory of the device and host memory that is registered, as CUDA's asynchronous ones do,
  or from one place of the device to another.
- A lease of pinned memory holds NaNs when it is handed out, in every dtype: what nobody fills shows.

A `Fault` is raised, and noted in `faults` because a background thread may have met it, when

- a copy touches host memory that is not registered, or that is unregistered before the copy is done;
- a copy goes into an inference tensor, outside of that mode;
- a copy comes after nothing, or only after marks from before the unit's storage was given its memory;
- memory is given back, or let go by its last owner, while a copy of it is under way;
- a kernel of the CPU is given memory of the device.

What this cannot show: operators of torch run on the CPU where they are called, the user's and those that the
engine does not give to `compute`, so they never lag behind the host. `wait_on_device` therefore blocks the
host, which is the compute. An operator of torch that takes a tensor of the device and one of the host does
not fail, as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch

from infinity.core.spans import Moment, Recorder, now
from infinity.hardware import cpu_adam
from infinity.hardware.device import Event, HostStream, Task
from infinity.hardware.probe import available_host_memory
from infinity.storage.pinned import Lease, PinnedPool

#: The threads of the engine that have a compute stream of their own on this device.
WORKERS = ("infinity-update", "infinity-gradients", "infinity-load")
#: The stream of what goes beside the caller's compute.
ASIDE = "compute-aside"


class Fault(AssertionError):
    """What CUDA would answer with wrong numbers, an error or a wait of the whole device."""


class Range(NamedTuple):
    """Addresses from `begin` on, before `end`."""

    begin: int
    end: int

    def meets(self, other: Range) -> bool:
        return self.begin < other.end and other.begin < self.end

    def holds(self, other: Range) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def range_of(tensor: torch.Tensor) -> Range:
    return Range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


class Mark:
    """A compute stream as it stood; `number` tells it from what came before and after."""

    def __init__(self, task: Task, number: int) -> None:
        self._task = task
        self.number = number

    def done(self) -> bool:
        return self._task.done()

    def wait(self) -> None:
        self._task.wait()


class Memory:
    """The storage of one unit, as `ResizedMemory` has it."""

    def __init__(self, nbytes: int, device: Staged) -> None:
        self.storage = torch.UntypedStorage(0)
        self._nbytes = nbytes
        self._device = device

    def fill(self) -> None:
        if not self.storage.nbytes():
            self.storage.resize_(self._nbytes)
            self._device.give(self._poison())

    def used(self) -> None:
        pass

    def drop(self) -> None:
        self._device.take_back(self._poison())
        self.storage.resize_(0)

    def _poison(self) -> Range:
        begin = self.storage.data_ptr()
        ctypes.memset(begin, 0xFF, self._nbytes)
        return Range(begin, begin + self._nbytes)


class Staged:
    """See above. `calls` notes by thread what was asked of it."""

    staged = True

    def __init__(self, torch_device: torch.device, recorder: Recorder | None = None, seed: int = 0) -> None:
        self.torch_device = torch_device
        self.trim_above = 0
        self.calls: list[tuple[str, str, Any]] = []
        self.faults: list[str] = []
        self._recorder = recorder or Recorder()
        self._seed = seed
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._lags: dict[str, random.Random] = {}
        self._streams: dict[str, HostStream] = {}
        self._chosen = threading.local()  # by `carry` and `aside`: the stream of this thread's compute
        self._h2d, self._d2h = self._stream("h2d"), self._stream("d2h")
        self._registered: set[Range] = set()
        self._memory: dict[Range, int] = {}  # of the device, and the number of when it was given out
        self._flying: dict[int, tuple[Range, Range]] = {}  # copies under way: between what

    # -- what devices have ------------------------------------------------------------------

    def h2d(self, target: torch.Tensor, source: torch.Tensor, *after: Event | None, chunk: int = -1) -> Event:
        return self._copy("h2d", target, source, after, chunk, owned=target)

    def d2h(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *after: Event | None,
        chunk: int = -1,
        kept: bool = False,
    ) -> Event:
        return self._copy("d2h", target, source, after, chunk, owned=source if kept else None)

    def start_clock(self) -> Callable[[], Moment] | None:
        return None

    def memory(self, nbytes: int) -> Memory:
        return Memory(nbytes, self)

    def reuse(self, nbytes: int, flat: int = 0) -> None:
        pass

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def zeros(self, nbytes: int) -> torch.Tensor:
        made = torch.zeros(nbytes, dtype=torch.uint8)
        self.give(range_of(made))
        return made

    def compute(self, call: Callable[[], None]) -> None:
        if threading.current_thread().name in WORKERS:
            self._submit(self._here(), lambda: self._checked(call))
        else:  # the host is the user's stream
            call()

    def mark(self) -> Event | None:
        return Mark(self._submit(self._here(), lambda: None), next(self._numbers))

    def current(self) -> object:
        return self._here()

    def carry(self) -> Callable[[], AbstractContextManager[Any]]:
        return functools.partial(self._on, self._here())

    def worker(self) -> AbstractContextManager[Any]:
        """Return what a worker's thread computes in: nothing of its own."""
        return contextlib.nullcontext()

    def aside(self) -> AbstractContextManager[Any]:
        return self._on(ASIDE)

    def uses(self, tensor: torch.Tensor) -> None:
        """The caller's stream uses `tensor`."""

    def wait_on_device(self, event: Event | None) -> None:
        self.note("wait", event)
        if event is not None:
            event.wait()

    def trim(self) -> None:
        return

    def register(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._registered.add(Range(address, address + nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        self.note("unregister", nbytes)
        memory = Range(address, address + nbytes)
        with self._lock:
            under_way = any(host.meets(memory) for host, _ in self._flying.values())
            known = memory in self._registered
            self._registered.discard(memory)
        if under_way:
            self.fault("host memory is unregistered under a copy")
        if not known:
            self.fault("what is unregistered was not registered")

    def synchronize(self) -> None:
        for name in ("h2d", "d2h"):
            self._submit(name, lambda: None).wait()

    def memory_free(self) -> int:
        return available_host_memory()

    def close(self) -> None:
        self.note("close", None)
        self.synchronize()
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()
        with self._lock:
            self._memory.clear()  # the engine is over; what it leaves to the user is not looked at

    # -- what tests ask ---------------------------------------------------------------------

    @property
    def registered(self) -> int:
        """Bytes of host memory that are registered."""
        return sum(end - begin for begin, end in self._registered)

    def has(self, begin: int, nbytes: int) -> bool:
        """Return whether any of these bytes is memory of the device."""
        with self._lock:
            return any(Range(begin, begin + nbytes).meets(memory) for memory in self._memory)

    def note(self, call: str, what: Any) -> None:
        self.calls.append((threading.current_thread().name, call, what))

    def fault(self, what: str) -> None:
        self.faults.append(f"{what} ({threading.current_thread().name})")
        raise Fault(what)

    # -- memory -----------------------------------------------------------------------------

    def give(self, memory: Range) -> None:
        with self._lock:
            self._memory[memory] = next(self._numbers)

    def take_back(self, memory: Range) -> None:
        with self._lock:
            self._memory.pop(memory, None)
            under_way = any(side.meets(memory) for sides in self._flying.values() for side in sides)
        if under_way:
            self.synchronize()  # or the copy would meet memory that is somebody else's
            self.fault("memory of the device goes under a copy")

    # -- streams ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before = getattr(self._chosen, "stream", None)
        self._chosen.stream = stream
        try:
            yield
        finally:
            self._chosen.stream = before

    def _here(self) -> str:
        if (chosen := getattr(self._chosen, "stream", None)) is not None:
            return str(chosen)
        name = threading.current_thread().name
        return name.replace("infinity", "compute") if name in WORKERS else "compute"

    def _stream(self, name: str) -> HostStream:
        with self._lock:
            if name not in self._streams:
                self._streams[name] = HostStream(f"staged-{name}")
                self._lags[name] = random.Random(f"{name}{self._seed}")
            return self._streams[name]

    def _submit(self, name: str, call: Callable[[], Any]) -> Task:
        stream = self._stream(name)
        with self._lock:
            lag = self._lags[name]
            late = lag.random() * 0.001 if lag.random() < 0.3 else 0.0

        def run() -> None:
            time.sleep(late)
            call()

        return stream.submit(run)

    def _checked(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # nobody waits for this task
            self.faults.append(f"{error!r} (in compute)")
            raise

    def _copy(
        self,
        way: str,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Event | None],
        chunk: int,
        owned: torch.Tensor | None,
    ) -> Event:
        self.note(way, (target.data_ptr(), source.data_ptr(), source.nbytes))
        host, device = (range_of(t) for t in ((source, target) if way == "h2d" else (target, source)))
        if target.is_inference() and not torch.is_inference_mode_enabled():
            self.fault(f"{way} into an inference tensor")
        self._check_order(way, device, [e for e in after if e is not None])
        self._check_registered(way, host)
        with self._lock:
            key = next(self._numbers)
            self._flying[key] = host, device
        if way == "h2d":  # whoever looks before the copy is done sees that
            ctypes.memset(device.begin, 0xFF, device.end - device.begin)
        # Aliases: then the storage tells whether the caller still has a tensor of it.
        to, from_ = target.detach(), source.detach()
        own = to if owned is target else from_ if owned is source else None
        del target, source, owned

        def copy() -> None:
            try:
                for event in after:
                    if event is not None:
                        event.wait()
                self._check_registered(way, host)
                begin = now()
                to.copy_(from_)
                if own is not None and all(n <= m for n, m in zip(_owners(own), _ALONE, strict=True)):
                    self.fault(f"the caller of {way} did not keep its memory of the device")
                if (log := self._recorder.log) is not None:
                    log.add(way, begin, now(), chunk=chunk, nbytes=from_.nbytes)
            finally:
                with self._lock:
                    del self._flying[key]

        return self._submit(way, copy)

    def _check_registered(self, way: str, host: Range) -> None:
        with self._lock:
            pinned = any(memory.holds(host) for memory in self._registered)
        if not pinned and host.begin != host.end and not self.has(host.begin, host.end - host.begin):
            self.fault(f"{way} of host memory that is not registered")

    def _check_order(self, way: str, device: Range, after: Sequence[Event]) -> None:
        if not after:
            self.fault(f"{way} comes after nothing")
        with self._lock:
            given = max((n for m, n in self._memory.items() if m.holds(device)), default=-1)
        marks = [event.number for event in after if isinstance(event, Mark)]
        if marks and max(marks) < given:
            self.fault(f"{way} comes after marks from before the memory was given out")


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many own a tensor's memory. The object of Python that is a storage, by which a unit has its
    memory, is one owner, however many refer to it: so those count, too."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


#: The owners of memory of which there is one tensor.
_ALONE = _owners(torch.empty(1))


@contextlib.contextmanager
def staged_devices() -> Iterator[list[Staged]]:
    """Engines have a `Staged` for the CPU inside of this: yields them. Raises `Fault` if one was met."""
    made: list[Staged] = []

    def open_device(name: str | None, recorder: Recorder | None = None) -> Staged:
        assert name == "cpu"
        made.append(Staged(torch.device("cpu"), recorder, seed=len(made)))
        return made[-1]

    def refuse(name: str, begin: int, nbytes: int) -> None:
        for device in made:
            if device.has(begin, nbytes):
                device.fault(f"a kernel of the CPU is given memory of the device: {name}")

    check, update, copy = cpu_adam._check, cpu_adam.adamw_update_segments, cpu_adam.copy_bytes

    def checked(name: str, tensor: torch.Tensor, *args: Any, cpu: bool = False, **kwargs: Any) -> None:
        check(name, tensor, *args, cpu=cpu, **kwargs)
        if cpu:
            refuse(name, tensor.data_ptr(), tensor.nbytes)

    def updated(*args: Any) -> None:
        for tensor in args[:5]:
            if tensor is not None:
                refuse("adamw_update_segments", tensor.data_ptr(), tensor.nbytes)
        update(*args)

    def copied(target: int, source: int, nbytes: int) -> None:
        for address in (target, source):
            refuse("copy_bytes", address, nbytes)
        copy(target, source, nbytes)

    take = PinnedPool._take

    def taken(*args: Any) -> Lease | None:
        lease = take(*args)
        if lease is not None:
            ctypes.memset(lease.address, 0xFF, lease.room)
        return lease

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinity.api.engine.open_device", open_device)
        patch.setattr(PinnedPool, "_take", taken)
        patch.setattr(cpu_adam, "_check", checked)
        patch.setattr(cpu_adam, "adamw_update_segments", updated)
        patch.setattr(cpu_adam, "copy_bytes", copied)
        try:
            yield made
        finally:
            if faults := [fault for device in made for fault in device.faults]:
                raise Fault("; ".join(faults))


def devices(name: str) -> AbstractContextManager[Any]:
    """Return what engines have the device `name` inside of, where they are told "cpu": "cpu", "staged", or
    "lagging"."""
    if name == "lagging":
        from .lagging.lane import lagging_lane  # needs a compiler

        return lagging_lane()
    return staged_devices() if name == "staged" else contextlib.nullcontext()


@pytest.fixture
def staged() -> Iterator[list[Staged]]:
    """The devices of the engines that the test makes; their faults fail it."""
    with staged_devices() as made:
        yield made
