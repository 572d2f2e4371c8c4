"""`CudaDevice` over the lagging device: what torch.cuda and the CUDA runtime would answer."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import subprocess
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import cpp_extension

from infinity.core import locks
from infinity.core.spans import Recorder
from infinity.core.waiting import Bell, Latch
from infinity.hardware import cpu_adam
from infinity.hardware.cuda_device import CudaDevice
from infinity.hardware.streams import Task
from infinity.params.updates import Updates
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.transfer import Transfer

from .. import lock_order
from . import operators
from .world import Finding, Point, World, where
from .world import Stream as Queue

_HERE = Path(__file__).parent
_world: World | None = None
_keep: list[Any] = []  # what C++ calls, and the memory of worlds: tensors may outlive them
_events: dict[int, Point] = {}


def world() -> World:
    assert _world is not None, "the lagging device is used outside of lagging_cuda()"
    return _world


# -- the device, once per process -----------------------------------------------------------


def _built() -> Path:
    """Return the compiled device.cpp; compile it the first time."""
    source = (_HERE / "device.cpp").read_bytes()
    name = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    path = Path(torch.__file__).parents[4] / "lagging" / f"device-{name}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        made = path.with_suffix(f".{threading.get_native_id()}")
        lib = Path(torch.__file__).parent / "lib"
        command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", str(_HERE / "device.cpp"), "-o", str(made)]
        command += [f"-I{p}" for p in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True, timeout=280, capture_output=True)
        made.rename(path)
    return path


class _Calls(ctypes.Structure):
    _fields_ = (
        ("allocate", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)),
        ("free", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("current_stream", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)),
        ("set_stream", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)),
        ("record", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)),
        ("block", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)),
        ("query", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)),
        ("synchronize", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("forget", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("use", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)),
    )


def _record(stream: int) -> int:
    point = world().record(world().streams[stream])
    number = id(point)
    _events[number] = point
    return number


def _operator(op: Any, *args: Any, **kwargs: Any) -> Any:
    return operators.run(world(), op, args, kwargs)


def _convolution_backward(grad: Any, x: Any, weight: Any, *more: Any) -> Any:
    of, mask = more[:-1], more[-1]
    sizes = [weight.shape[0]] if mask[2] else None
    made = _operator(torch.ops.aten.convolution_backward.default, grad, x, weight, sizes, *of, mask)
    return tuple(grad.new_empty(0) if each is None else each for each in made)  # nobody looks at those


def _lstm(
    x: Any, state: Any, weights: Any, biased: bool, layers: int, dropout: float, *more: bool
) -> tuple[Any, ...]:
    """`torch.lstm` as the CPU does it, bit by bit: for devices torch has another kernel."""
    train, bidirectional, batch_first = more
    assert biased
    assert not (dropout and train)
    assert not bidirectional
    inputs, hidden, cells = x.transpose(0, 1) if batch_first else x, [], []
    for n, (h, c) in enumerate(zip(*state, strict=True)):
        of_x, of_h, *bias = weights[4 * n : 4 * n + 4]
        outputs = []
        for gates in F.linear(inputs, of_x, bias[0]).unbind(0):
            enter, forget, new, leave = F.linear(h, of_h, bias[1]).add_(gates).chunk(4, 1)
            c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
            h = leave.sigmoid() * c.tanh()
            outputs.append(h)
        inputs = torch.stack(outputs)
        hidden.append(h)
        cells.append(c)
    out = inputs.transpose(0, 1) if batch_first else inputs
    return out, torch.stack(hidden), torch.stack(cells)


def _free(address: int) -> None:
    if _world is not None:
        _world.free(address)


def make_known() -> None:
    """Make the device known to torch."""
    if _keep:
        return
    torch.utils.rename_privateuse1_backend("lagging")
    library = ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL)
    given = {
        "allocate": lambda nbytes, device: world().allocate(nbytes, device),
        "free": _free,
        "current_stream": lambda device: world().current(device).number if _world is not None else device,
        "set_stream": lambda device, stream: world().set_current(world().streams[stream]),
        "record": _record,
        "block": lambda event, stream: world().block(world().streams[stream], _events[event]),
        "query": lambda event: int(world().query(_events[event])),
        "synchronize": lambda stream: world().synchronize(world().streams[stream]),
        "forget": lambda event: _events.pop(event, None) and None,
        "use": lambda address, stream: world().record_use(address, world().streams[stream]),
    }
    calls = _Calls(**{name: kind(given[name]) for name, kind in _Calls._fields_})
    library.lagging_begin(ctypes.byref(calls), 2)
    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_operator, "PrivateUse1")
    for name in operators.kernels_of_the_cpu():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, functools.partial(_operator, op), "PrivateUse1")
    convolution = functools.partial(_operator, torch.ops.aten.convolution.default)
    aten.impl("convolution_overrideable", convolution, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        aten.impl("lstm.input", _lstm, key)
    module = types.ModuleType("torch.lagging")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 2  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    module.get_rng_state = lambda device=0: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=0: torch.set_rng_state(state)  # type: ignore[attr-defined]
    module.device = lambda device: contextlib.nullcontext()  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]
    torch._register_device_module("lagging", module)
    _keep.extend([library, calls, given, fallback, aten])


# -- torch.cuda -----------------------------------------------------------------------------


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, *, queue: Queue | None = None) -> None:
        self.queue = queue or world().new_stream(_index(device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue.number)

    def wait_event(self, event: Event) -> None:
        if event.point is not None:
            world().block(self.queue, event.point)

    def wait_stream(self, other: Stream) -> None:
        world().block(self.queue, world().record(other.queue))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        world().synchronize(self.queue)

    def query(self) -> bool:
        return world().query(world().record(self.queue))


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.point = world().record((stream or current_stream()).queue)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.point is None or world().query(self.point)

    def synchronize(self) -> None:
        if self.point is not None:
            world().wait(self.point)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


_current = threading.local()  # the number of each thread's device


def _index(device: Any) -> int:
    if device is None:
        return getattr(_current, "index", 0)
    return (device if isinstance(device, int) else torch.device(device).index) or 0


def current_stream(device: Any = None) -> Stream:
    return Stream(queue=world().current(_index(device)))


@contextlib.contextmanager
def _device(wanted: Any) -> Iterator[None]:
    """torch.cuda.device."""
    before, _current.index = _index(None), _index(wanted)
    try:
        yield
    finally:
        _current.index = before


@contextlib.contextmanager
def stream(wanted: Stream | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    here = wanted.queue.world  # a worker's thread ends when its world may be over
    before = here.current(wanted.queue.device)
    here.set_current(wanted.queue)
    try:
        yield
    finally:
        here.set_current(before)


class _Runtime:
    """What `torch.cuda.cudart()` returns."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return world().register(address, nbytes)

    def cudaHostUnregister(self, address: int) -> int:
        # An engine that its test has dropped may close when that test is over.
        worlds = (each for each in reversed(_keep) if isinstance(each, World))
        next((w for w in worlds if w.has_registered(address)), world()).unregister(address)
        return 0


class _Data:
    """`tensor.data`, which may go from the CPU to the device and back, as it may to CUDA's."""

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return torch._C.TensorBase.data.__get__(tensor, owner)

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if tensor.device.type == value.device.type:
            torch._C.TensorBase.data.__set__(tensor, value)
        else:
            torch.ops.lagging.set_data(tensor, value)


# -- what orders threads --------------------------------------------------------------------


def _before(patch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[[Any], None]) -> None:
    inner = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        call(self)
        return inner(self, *args, **kwargs)

    patch.setattr(owner, name, wrapped)


def _after(patch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[[Any], None]) -> None:
    inner = getattr(owner, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = inner(self, *args, **kwargs)
        call(self)
        return value

    patch.setattr(owner, name, wrapped)


def _edges(patch: pytest.MonkeyPatch, here: World) -> None:
    give, take = here.give, here.take

    def is_open(latch: Latch) -> bool:
        value = latch._open
        if value:
            take(latch)
        return value

    _before(patch, Latch, "open", give)
    _after(patch, Latch, "wait", lambda latch: take(latch) if latch._open else None)
    patch.setattr(Latch, "is_open", property(is_open))
    _before(patch, Bell, "ring", give)
    _after(patch, Bell, "wait", take)
    _after(patch, Task, "__init__", give)
    _before(patch, Task, "run", functools.partial(take, last=True))
    patch.setattr(locks, "check", lock_order.Checked)
    _after(patch, lock_order.Checked, "__enter__", lambda lock: take(lock.plain))
    _before(patch, lock_order.Checked, "__exit__", lambda lock: give(lock.plain))
    for name in ("finish", "post"):
        _before(patch, Updates, name, give)
    for name in ("wait_unit", "has_unit", "has_chunk", "blocks_load", "busy"):
        _after(patch, Updates, name, take)

    flag: Any = Transfer.finished

    def is_finished(transfer: Transfer) -> bool:
        value: bool = flag.__get__(transfer)
        if value:
            take(transfer)
        return value

    def finish(transfer: Transfer, value: bool) -> None:
        if value:
            give(transfer)
        flag.__set__(transfer, value)

    patch.setattr(Transfer, "finished", property(is_finished, finish))

    start, run = threading.Thread.start, threading.Thread.run
    clocks: dict[int, Any] = {}

    def started(self: threading.Thread) -> None:
        clocks[id(self)] = here.snapshot()
        start(self)

    def running(self: threading.Thread) -> None:
        here.begin_thread(clocks.pop(id(self), {}))
        try:
            run(self)
        finally:
            give(self)

    patch.setattr(threading.Thread, "start", started)
    patch.setattr(threading.Thread, "run", running)
    is_alive = threading.Thread.is_alive

    def alive(self: threading.Thread) -> bool:
        value = is_alive(self)
        if not value:
            take(self)
        return value

    patch.setattr(threading.Thread, "is_alive", alive)
    _after(patch, threading.Thread, "join", threading.Thread.is_alive)

    def span(lease: Lease, offset: int, nbytes: int | None) -> tuple[int, int]:
        begin = lease.address + offset
        return begin, begin + (lease.room - offset if nbytes is None else nbytes)

    _after(
        patch, Lease, "__init__", lambda lease: setattr(lease, "is_guarded", True)
    )  # or nobody calls these
    begin_io, end_io = Lease.begin_io, Lease.end_io

    def begun(self: Lease, offset: int = 0, nbytes: int | None = None, *, into: bool) -> None:
        here.begin_io((id(self), offset, nbytes, into), span(self, offset, nbytes), into)
        begin_io(self, offset, nbytes, into=into)

    def ended(self: Lease, offset: int = 0, nbytes: int | None = None, *, into: bool) -> None:
        end_io(self, offset, nbytes, into=into)
        here.end_io((id(self), offset, nbytes, into))

    patch.setattr(Lease, "begin_io", begun)
    patch.setattr(Lease, "end_io", ended)
    lend = PinnedPool._take

    def lent(*given: Any) -> Lease | None:
        lease = lend(*given)
        if lease is not None:  # NaNs, in every dtype: what nobody fills shows
            ctypes.memset(lease.address, 0xFF, lease.room)
        return lease

    patch.setattr(PinnedPool, "_take", lent)

    backward = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        here.begin_backward()
        try:
            return backward(*args, **kwargs)
        finally:
            here.end_backward()

    patch.setattr(torch.autograd.graph, "_engine_run_backward", run_backward)
    patch.setattr(torch.autograd, "_engine_run_backward", run_backward)


def _kernels(patch: pytest.MonkeyPatch, here: World) -> None:
    """The CPU's kernels read and write host memory; that of the device they cannot reach."""

    def refuse(name: str) -> None:
        what = f"a kernel of the CPU is given memory of the device: {name}  {where()}"
        here.find(what)  # also where nobody sees the error
        raise Finding(what)

    def watch(name: str, reads: tuple[int, ...], writes: tuple[int, ...], *, late: bool = False) -> None:
        inner = getattr(cpu_adam, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if late:
                time.sleep(0.003)

            def spans(places: tuple[int, ...]) -> list[tuple[int, int]]:
                given = [args[at] for at in places if at < len(args) and args[at] is not None]
                tensors = [t for each in given for t in (each if isinstance(each, tuple | list) else (each,))]
                if any(operators.is_device(tensor) for tensor in tensors):
                    refuse(name)
                return [operators.span_of(tensor) for tensor in tensors]

            here.host_access(spans(reads), spans(writes), f"{name}  {where()}")
            return inner(*args, **kwargs)

        patch.setattr(cpu_adam, name, called)

    # Who does not wait for an update that is late, too, sees the values of before it.
    watch("update_segments", (2,), (0, 1, 3), late=here.schedule == "late")
    watch("sum_of_squares", (0,), ())
    watch("convert", (1,), (0,))
    watch("accumulate", (1,), (0,))
    inner = cpu_adam.copy_bytes

    def copy_bytes(target: int, source: int, nbytes: int) -> None:
        if here.is_device(target) or here.is_device(source):
            refuse("copy_bytes")
        here.host_access([(source, source + nbytes)], [(target, target + nbytes)], f"copy_bytes  {where()}")
        inner(target, source, nbytes)

    patch.setattr(cpu_adam, "copy_bytes", copy_bytes)


@contextlib.contextmanager
def lagging_cuda(schedule: str = "late", seed: int = 0, index: int = 0) -> Iterator[World]:
    """Engines have a `CudaDevice` for the CPU inside of this, of that number. Raises `Finding` for what was
    found."""
    global _world
    make_known()
    here = World(schedule, seed)
    _keep.append(here)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("Stream", Stream),
            ("Event", Event),
            ("stream", stream),
            ("current_stream", current_stream),
            ("device", _device),
            ("cudart", _Runtime),
            ("is_current_stream_capturing", lambda: here.captures),
            ("mem_get_info", lambda device=None: (1 << 30, 1 << 30)),
            ("synchronize", lambda device=None: here.synchronize_all()),
            ("_sleep", lambda cycles: None),
            ("empty_cache", lambda: None),
            ("reset_peak_memory_stats", lambda device=None: None),
            ("max_memory_allocated", lambda device=None: 0),
            ("memory_allocated", lambda device=None: 0),
            ("set_per_process_memory_fraction", lambda share, device=None: here.limit(share)),
        ):
            patch.setattr(torch.cuda, name, value)

        def record_stream(tensor: torch.Tensor, used: Stream) -> None:
            here.record_use(tensor.untyped_storage().data_ptr(), used.queue)

        patch.setattr(torch.Tensor, "record_stream", record_stream)
        patch.setattr(torch.Tensor, "data", _Data(), raising=False)

        def open_device(name: str | None, recorder: Recorder | None = None) -> CudaDevice:
            return CudaDevice(torch.device("lagging", index), recorder)

        patch.setattr("infinity.api.engine.open_device", open_device)
        before, _world = _world, here
        _edges(patch, here)
        _kernels(patch, here)
        try:
            yield here
        finally:
            found = list(here.finish())
            _world = before
    if found:
        raise Finding("\n".join(found))
