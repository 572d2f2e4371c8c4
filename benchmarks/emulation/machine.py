"""A machine with a GPU in real time on a CPU: what stands for it in torch, and the rates of its parts.

`device.cpp` has the clocks. Inside of `opened`, `torch.cuda` has streams and events of the modelled device,
which torch calls "emulated:0". The engine's own parts are replaced in `adapter.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import torch

HERE: Final = Path(__file__).resolve().parent
SOURCE: Final = HERE / "device.cpp"
BUILT: Final = HERE.parents[1] / "build" / "emulated"
NAME: Final = "emulated"
GB: Final = 1e9
#: Numbers of resources; of drive i, its reads and its writes.
H2D, D2H, DRAM = range(3)
DRIVES: Final = 8
_RESOURCES: Final = 32
_GAPS: Final = 400_000

now = time.monotonic


def read_of(drive: int) -> int:
    """Return the number of a drive's reads, as a resource."""
    return 3 + 2 * drive


def write_of(drive: int) -> int:
    """Return the number of a drive's writes, as a resource."""
    return 4 + 2 * drive


class Rates(NamedTuple):
    """What the machine can do: bytes, operations and seconds, per second where that makes sense.

    `flops` and `hbm` are the GPU's: what its matrix products reach, and its memory. `dram` is what the CPU's
    Adam reaches on all threads, `crc` what one thread does of CRC-32C. `launch` is the host's time for an
    operator, `kernel` the least time of a kernel or a copy on the device. Each of `drives` reads and writes
    at `drive`, both at once, and answers after `latency`.
    """

    flops: float = 400e12
    hbm: float = 2.5e12
    link: float = 55 * GB
    dram: float = 190 * GB
    crc: float = 20 * GB
    drive: float = 6 * GB
    drives: int = 1
    latency: float = 8e-5
    launch: float = 5e-6
    kernel: float = 2e-6
    device_memory: float = 80 * GB


class Use(NamedTuple):
    """What a resource has done: seconds in which it was busy, bytes, and calls."""

    seconds: float
    bytes: float
    uses: float

    def minus(self, before: Use) -> Use:
        """Return what it has done since `before`."""
        return Use(*(a - b for a, b in zip(self, before, strict=True)))


class Counts(NamedTuple):
    """What the machine has done: the compute stream, whose `uses` are launches; and the rest."""

    compute: Use
    resources: tuple[Use, ...]

    def minus(self, before: Counts) -> Counts:
        """Return what it has done since `before`."""
        pairs = zip(self.resources, before.resources, strict=True)
        return Counts(self.compute.minus(before.compute), tuple(a.minus(b) for a, b in pairs))

    def drives(self, of: Callable[[int], int]) -> Use:
        """Return the reads or the writes of all drives; seconds are those of the busiest."""
        each = [self.resources[of(drive)] for drive in range(DRIVES)]
        return Use(max(u.seconds for u in each), sum(u.bytes for u in each), sum(u.uses for u in each))


# -- the library --------------------------------------------------------------------------------


def build() -> Path:
    """Compile the device, unless that was done for this source, this torch and this compiler; return the
    library.

    Raises:
        subprocess.CalledProcessError: the compiler fails; it has said why.
    """
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "g++")
    library = Path(torch.__file__).parent / "lib"
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", *(f"-isystem{path}" for path in includes)]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    libraries = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch", "-ltorch_cpu", "-lc10"]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    known = [
        SOURCE.read_bytes(),
        torch.__version__.encode(),
        version,
        " ".join([*flags, *libraries]).encode(),
    ]
    target = BUILT / f"device-{hashlib.sha256(b'|'.join(known)).hexdigest()[:16]}.so"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        print("compiling the modelled device: a minute, once", file=sys.stderr, flush=True)
        try:
            command = [compiler, *flags, str(SOURCE), "-o", str(part), *libraries]
            subprocess.run(command, check=True, timeout=600)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)
    return target


_KINDS: Final = {"d": ctypes.c_double, "i": ctypes.c_int, "l": ctypes.c_long, "p": ctypes.c_void_p, "": None}
#: Of each function: what it returns, and takes.
_FUNCTIONS: Final = {
    "begin": ("", ""),
    "configure": ("", "ddddd"),
    "rate": ("", "id"),
    "dilate": ("", "d"),
    "new_stream": ("i", ""),
    "current": ("i", ""),
    "set_current": ("", "i"),
    "end": ("d", "i"),
    "block": ("", "idi"),
    "sleep_until": ("", "d"),
    "work": ("", "id"),
    "compute": ("", "d"),
    "transfer": ("d", "id"),
    "counts": ("", "p"),
    "trace": ("", "i"),
    "gaps": ("l", "pl"),
}
#: Those that sleep, and release the GIL. The others are quick, and keep it.
_SLEEPING: Final = ("sleep_until", "work", "compute")


class _Library:
    """The functions of device.cpp, without ``emulated_``; none before `load`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"device.cpp has no {name!r}, or `load` was not called")


lib: Any = _Library()


def load() -> None:
    """Load the device, and make it known to torch. Once in a process."""
    if vars(lib):
        return
    path = str(build())
    torch.utils.rename_privateuse1_backend(NAME)
    without, within = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL), ctypes.PyDLL(path)
    for name, (returns, takes) in _FUNCTIONS.items():
        call = getattr(without if name in _SLEEPING else within, f"emulated_{name}")
        call.restype, call.argtypes = _KINDS[returns], [_KINDS[kind] for kind in takes]
        setattr(lib, name, call)
    lib.begin()
    torch._register_device_module(NAME, _device_module())


def _device_module() -> types.ModuleType:
    """Return what torch calls `torch.emulated`."""
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=0: torch.get_rng_state(),
        set_rng_state=lambda state, device=0: None,
        device=lambda device: contextlib.nullcontext(),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module


# -- torch.cuda ---------------------------------------------------------------------------------


class Stream:
    """As `torch.cuda.Stream`."""

    __slots__ = ("device", "number")

    def __init__(self, device: object = None, priority: int = 0, *, number: int | None = None) -> None:
        self.number = lib.new_stream() if number is None else number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_event(self, event: Event) -> None:
        if event.time:
            lib.block(self.number, event.time, event.number)

    def wait_stream(self, other: Stream) -> None:
        lib.block(self.number, lib.end(other.number), other.number)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        lib.sleep_until(lib.end(self.number))

    def query(self) -> bool:
        return bool(now() >= lib.end(self.number))


class Event:
    """As `torch.cuda.Event`. `time`: when its stream gets there; 0.0: it was not recorded."""

    __slots__ = ("number", "time")

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.time, self.number = 0.0, 0

    def record(self, stream: Stream | None = None) -> None:
        self.number = lib.current() if stream is None else stream.number
        self.time = max(now(), lib.end(self.number))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return now() >= self.time

    def synchronize(self) -> None:
        if now() < self.time:
            lib.sleep_until(self.time)

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1e3


def current_stream(device: object = None) -> Stream:
    """As `torch.cuda.current_stream`."""
    return Stream(number=lib.current())


class stream:
    """As `torch.cuda.stream`."""

    __slots__ = ("_before", "_wanted")

    def __init__(self, wanted: Stream | None) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        if self._wanted is not None:
            self._before = lib.current()
            lib.set_current(self._wanted.number)

    def __exit__(self, *_: object) -> None:
        if self._wanted is not None:
            lib.set_current(self._before)


class _Runtime:
    """What `torch.cuda.cudart()` returns."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


class _Data:
    """`tensor.data`, which may go from the CPU to the device and back, as it may to CUDA's."""

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return torch._C.TensorBase.data.__get__(tensor, owner)

    def __set__(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if tensor.device.type == value.device.type:
            torch._C.TensorBase.data.__set__(tensor, value)
        else:
            torch.ops.emulated.set_data(tensor, value)


# -- the machine --------------------------------------------------------------------------------


class Machine:
    """The modelled machine.

    Args:
        rates: what it can do.
        scale: how many elements of the real model one element of this one stands for.

    Attributes:
        live: whether work takes time: the CPU's kernels and the drives take none before the first step.
        dilation: how many times slower its clock runs than ours.
    """

    def __init__(self, rates: Rates, scale: int) -> None:
        self.rates, self.scale = rates, scale
        self.live = False
        self.device = torch.device(NAME, 0)
        lib.configure(scale, rates.hbm, rates.launch, rates.kernel, rates.latency)
        given = {H2D: rates.link, D2H: rates.link, DRAM: rates.dram}
        for drive in range(DRIVES):
            given |= {read_of(drive): rates.drive, write_of(drive): rates.drive}
        for resource, rate in given.items():
            lib.rate(resource, rate)
        self.dilate(1.0)

    def dilate(self, dilation: float) -> None:
        """Make the clock so many times slower, and wait until the device has nothing to do before that."""
        self.synchronize()
        self.dilation = dilation
        lib.dilate(dilation)
        sys.setswitchinterval(_SWITCH * dilation)

    def synchronize(self) -> None:
        """Block until the compute stream has done all that it was given."""
        lib.sleep_until(lib.end(0))

    def dram(self, nbytes: float) -> None:
        """Read and write so many bytes of the CPU's memory, as this machine counts them (1/scale of the real
        ones); returns when that is over."""
        if self.live:
            lib.work(DRAM, nbytes * self.scale)

    def crc(self, nbytes: int) -> None:
        """Compute a CRC-32C of so many bytes (1/scale of the real ones) on the calling thread."""
        if self.live:
            lib.compute(nbytes * self.scale / self.rates.crc)

    def transfer(self, drive: int, nbytes: int, *, write: bool) -> float:
        """Move so many bytes (1/scale of the real ones); return when that is over."""
        if not self.live:
            return 0.0
        end: float = lib.transfer(write_of(drive) if write else read_of(drive), float(nbytes * self.scale))
        return end

    def counts(self) -> Counts:
        """Return what it has done so far."""
        numbers = (ctypes.c_double * (2 + 3 * _RESOURCES))()
        lib.counts(numbers)
        seconds, launches, *rest = numbers
        resources = tuple(Use(*rest[at : at + 3]) for at in range(0, len(rest), 3))
        return Counts(Use(seconds, 0.0, launches), resources)

    def gaps(self) -> list[tuple[float, float, int]]:
        """Return when the compute stream had nothing to do since `trace(True)`: begin, end (of our clock),
        and the stream for whose event it waited; -1: for the host."""
        numbers = (ctypes.c_double * (3 * _GAPS))()
        count = lib.gaps(numbers, _GAPS)
        if count > _GAPS:
            raise RuntimeError(f"{count} gaps of the compute stream; there is room for {_GAPS}")
        return [(numbers[3 * i], numbers[3 * i + 1], int(numbers[3 * i + 2])) for i in range(count)]

    def trace(self, on: bool) -> None:
        """Note gaps of the compute stream from now on, or no more."""
        lib.trace(int(on))


_SWITCH: Final = sys.getswitchinterval()


@contextlib.contextmanager
def opened(rates: Rates, scale: int) -> Iterator[Machine]:
    """Have `torch.cuda` be the modelled device inside of this."""
    load()
    machine = Machine(rates, scale)
    room = int(rates.device_memory / scale)
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "device": lambda wanted: contextlib.nullcontext(),
        "cudart": _Runtime,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (room, room),
        "synchronize": lambda device=None: machine.synchronize(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", return_value=None))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", _Data(), create=True))
        yield machine
