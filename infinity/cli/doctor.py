"""`infinity doctor`: what stands between this machine and a fast run, each finding with its cure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple

import click
from rich.console import Console
from rich.text import Text

from infinity.api.this_machine import cure_of
from infinity.core.errors import ConfigError, DataError, InfinityError
from infinity.core.optional import optional
from infinity.core.sizes import ALIGNMENT, GiB, MiB, format_size
from infinity.hardware import cores, probe
from infinity.version import __version__

from .console import finish, lines_of, sizes
from .medium import MEMORY, NETWORK, describe_directory
from .options import directories_argument, json_option

OK, WARNING, ERROR = "ok", "warning", "error"
DISTRIBUTION: Final = "infinity-offload"
_PACKAGES: Final = ("torch", "numpy", "cffi", "safetensors")
#: With the extra of ours that installs each ("": none does), and what of it is imported only when it is used.
_OPTIONAL: Final = (
    ("transformers", "hf", ("AutoModelForCausalLM", "AutoTokenizer", "PreTrainedModel")),
    ("matplotlib", "plot", ()),
    ("torchvision", "", ()),  # a broken one breaks transformers
)
_LEAST_CONTEXTS: Final = 1024  # requests of Linux AIO that a few rings take
_LEAST_LOCKED: Final = 64 * MiB
_LEAST_FREE: Final = GiB
_TORCH_CURE: Final = "pip install torch"
#: Names of arenas of older versions, in the subdirectory `infinity` of a directory.
_OLD_ARENA: Final = re.compile(r"rank\d+\.arena")
_CAP_IPC_LOCK: Final = 14


class Finding(NamedTuple):
    """One line. `status` is ok, warning or error; `cure` what to change, if anything."""

    name: str
    status: str
    found: str
    cure: str | None = None


def note(name: str, found: str, cure: str | None = None) -> Finding:
    """Return a warning where there is something to change, else that it is well."""
    return Finding(name, OK if cure is None else WARNING, found, cure)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    """What is installed."""
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    linux = sys.platform == "linux"
    yield Finding("system", OK if linux else ERROR, system, None if linux else "infinity runs on Linux")
    for name in _PACKAGES:
        if (version := _version(name)) is None:
            yield Finding(name, ERROR, "not installed", f"pip install {name}")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package that is broken raises
            text = f"{version} is installed, but cannot be imported: {type(error).__name__}: {error}"
            yield Finding(name, ERROR, text, f"pip install --force-reinstall {name}")
        else:
            yield note(name, version)
    for name, extra, inside in _OPTIONAL:
        if importlib.util.find_spec(name) is None:
            if extra:
                yield note(name, f"not installed (optional: pip install '{DISTRIBUTION}[{extra}]')")
            continue
        try:
            optional(name, extra, *inside)
        except DataError as error:
            yield Finding(name, ERROR, f"{error.what}: {error.found}", error.cure)
        else:
            yield note(name, _version(name) or "installed")


def package() -> Iterator[Finding]:
    """Which copy of this package runs."""
    ours = Path(__file__).resolve().parents[1]
    version = _version(DISTRIBUTION)
    if version is None:
        text = f"{DISTRIBUTION} is not installed; {__version__} runs from {ours}"
        yield note("distribution", text, "pip install . in the source directory")
    elif version != __version__:
        text = f"{DISTRIBUTION} {version}, but the code that runs is {__version__}"
        yield note("distribution", text, "pip install again, or remove the other copy")
    else:
        yield note("distribution", f"{DISTRIBUTION} {version}")
    yield note("import", f"infinity is {ours}")


def native() -> Iterator[Finding]:
    """The native modules, and the instruction set in use."""
    try:
        aio = importlib.import_module("infinity.hardware.aio")
        forced = os.environ.get("INFINITY_AIO")
        yield note("native I/O", f"infinity._aio{f', INFINITY_AIO={forced}' if forced else ''}")
        for name, verdict in aio.available_backends().items():
            yield note(f"backend {name}", verdict, _backend_cure(name, verdict))
    except InfinityError as error:
        yield _failed("native I/O", error)
    try:
        adam = importlib.import_module("infinity.hardware.cpu_adam")
        isas = adam.available_isas()
        forced = os.environ.get("INFINITY_ISA")
        text = f"{adam.isa()} of {', '.join(isas)}; {adam.threads()} threads" + (
            f", INFINITY_ISA={forced}" if forced else ""
        )
        yield note("native Adam", text, "unset INFINITY_ISA" if adam.isa() != isas[-1] else None)
    except InfinityError as error:
        yield _failed("native Adam", error)
    except (ImportError, OSError) as error:  # torch, or what torch loads
        yield Finding("native Adam", ERROR, f"cannot be tried: {error}", _TORCH_CURE)


def _failed(name: str, error: InfinityError) -> Finding:
    return Finding(name, ERROR, str(error.found or error.what), error.cure)


def _backend_cure(name: str, verdict: str) -> str | None:
    if verdict == "ok":
        return None
    uring = "io_uring_setup, io_uring_enter, io_uring_register"
    calls = uring if name == "uring" else "io_setup, io_submit"
    cures = {
        "not installed": "apt install libaio1 (or libaio1t64), dnf install libaio",
        "aio-max-nr": "sysctl -w fs.aio-max-nr=1048576",
        "locked memory": "ulimit -l unlimited",
        "seccomp": f"allow {calls} in the container's seccomp profile; until then I/O costs more CPU time",
        "": "another backend does the work; auto takes the best that there is",
    }
    return next(cure for word, cure in cures.items() if word in verdict)


def memlock_limit() -> int | None:
    """Return the bytes that this process may lock (`ulimit -l`); None: as many as it likes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None  # the limit does not bind whoever has CAP_IPC_LOCK
    return soft


def aio_contexts() -> tuple[int, int] | None:
    """Return (requests that contexts of Linux AIO hold now, how many they may): fs.aio-nr and
    fs.aio-max-nr. None: the kernel has no Linux AIO, or does not say."""
    now, most = (probe.text_of(Path("/proc/sys/fs", name)) for name in ("aio-nr", "aio-max-nr"))
    return None if now is None or most is None else (int(now), int(most))


class Gpu(NamedTuple):
    """One CUDA device. Memory in bytes."""

    number: int
    name: str
    total: int
    free: int
    pci: str | None
    numa_node: int | None


def gpus() -> tuple[Gpu, ...]:
    """Return the CUDA devices that torch sees; none, where there is no torch."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library that torch loads
        return ()
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        pci = probe.pci_address(facts)
        found.append(Gpu(index, facts.name, total, free, pci, probe.gpu_numa_node(pci)))
    return tuple(found)


def memory() -> Iterator[Finding]:
    """Host memory, and what limits it."""
    available, limit = probe.available_host_memory(), probe.cgroup_memory_limit()
    cure = None
    if available < 2 * GiB:
        of_job = probe.cgroup_memory_left() <= available
        cure = (
            "raise the memory limit of this job or container (--mem, MemoryMax=)"
            if of_job
            else "end other programs, or lower host_memory"
        )
    yield note("host memory", f"{format_size(available)} available", cure)
    text = "no limit"
    if limit is not None:
        text = f"{format_size(limit)}, {format_size(probe.cgroup_memory_left())} left"
    yield note("cgroup", text)
    locked = memlock_limit()
    text = "no limit" if locked is None else f"{format_size(locked)}: uring registers no more than that"
    low = locked is not None and locked < _LEAST_LOCKED
    yield note("memlock", text, "ulimit -l unlimited (docker: --ulimit memlock=-1)" if low else None)
    if (contexts := aio_contexts()) is None:
        yield note("aio-max-nr", "the kernel does not say", "check that /proc/sys is mounted")
    else:
        used, most = contexts
        few = "sysctl -w fs.aio-max-nr=1048576" if most - used < _LEAST_CONTEXTS else None
        yield note("aio-max-nr", f"{used:,} of {most:,} requests are taken", few)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = huge.read_text() if huge.exists() else "[never]"
    never = "[never]" in mode
    text = "off: transfers take more CPU time" if never else mode[mode.index("[") + 1 : mode.index("]")]
    yield note("huge pages", text, f"echo madvise > {huge}" if never else None)


def processors() -> Iterator[Finding]:
    """Cores, who gets them, and NUMA nodes."""
    mine = cores.allowed_cpus()
    total = os.cpu_count() or len(mine)
    limits = cores.usable_cores()
    text = f"{len(mine)} of {total} may be used by this process"
    if limits.quota is not None:
        text += f", its cgroup allows the time of {limits.quota:g}"
    if limits.ranks > 1:
        text += f", shared by {limits.ranks} ranks"
    low = limits.quota is not None and limits.quota < 1
    yield note("cores", text, "raise the cgroup's cpu quota" if low else None)
    nodes = probe.numa_nodes()
    if len(nodes) < 2:
        yield note("NUMA", "one node")
        return
    text = "; ".join(f"node {n.number}: {len(n.cpus)} cores, {format_size(n.memory)}" for n in nodes)
    used = [n.number for n in nodes if n.cpus & mine]
    across = len(used) > 1
    yield note(
        "NUMA",
        f"{text}; this process may run on {', '.join(map(str, used))}",
        "numactl --cpunodebind=N --membind=N, with the node of the GPU and the drives" if across else None,
    )


def devices() -> Iterator[Finding]:
    """GPUs, and whether the engine's memory can be pinned for them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("GPU", ERROR, f"cannot be looked for: {error}", _TORCH_CURE)
        return
    if not torch.cuda.is_available():
        text = "none that torch sees; the CPU computes"
        if not any(os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidia0")):
            yield note("GPU", text)
            return
        built = torch.version.cuda is not None
        cure = "compare nvidia-smi and torch's CUDA" if built else "install a torch built for CUDA"
        yield Finding("GPU", ERROR, f"{text}, but there is a driver", cure)
        return
    for gpu in gpus():
        node = "unknown" if gpu.numa_node is None else str(gpu.numa_node)
        memory_text = f"{format_size(gpu.free)} of {format_size(gpu.total)} free"
        yield note(f"GPU {gpu.number}", f"{gpu.name}, {memory_text}, {gpu.pci}, NUMA node {node}")
    from infinity.hardware.device import open_device
    from infinity.storage.memory import HostMapping

    device = open_device("cuda")
    mapping = HostMapping(_LEAST_LOCKED, populate=True)
    try:
        device.register(mapping.address, mapping.nbytes)
        device.unregister(mapping.address, mapping.nbytes)
        yield note("pinning", f"{format_size(mapping.nbytes)} of the engine's memory can be pinned")
    except InfinityError as error:
        yield Finding("pinning", ERROR, str(error.found), error.cure)


# ---- a directory ----


def directory(path: str, *, clean: bool = False) -> Iterator[Finding]:
    """One directory: its file system, its drive, its room, and what I/O the engine would use there."""
    try:
        facts = describe_directory(path)
    except OSError as error:
        yield Finding(path, ERROR, os.strerror(error.errno or 0), cure_of(path, error.errno))
        return
    drive, text = facts.drive, facts.filesystem
    if drive is not None:
        text += f" on {drive.name}" + (f" ({drive.model})" if drive.model else "")
        text += "" if drive.numa_node is None else f", NUMA node {drive.numa_node}"
    yield note(path, text)
    for unfit, name, found, where in (
        (facts.kind == MEMORY, "tier", "it is memory, not a drive", "on a drive"),
        (
            facts.kind == NETWORK,
            "tier",
            "it is behind a network: slower than a drive, and shared",
            "on a local drive",
        ),
        (
            facts.rotational,
            "rotational",
            "a disk that reads and writes a few hundred MB/s at most",
            "on an SSD",
        ),
    ):
        if unfit:
            yield note(f"{path}: {name}", found, f"name a directory {where}")
    yield from _old_arenas(path, clean=clean)
    if not facts.writable:
        said = {errno.EROFS: "the file system is read-only", errno.ENOSPC: "the file system is full"}
        text = said.get(facts.refusal or 0, f"no file can be made: {os.strerror(facts.refusal or 0)}")
        yield Finding(f"{path}: access", ERROR, text, cure_of(path, facts.refusal))
        return
    few = facts.free < _LEAST_FREE
    text = f"{format_size(facts.free)} of {format_size(facts.total)}"
    yield note(f"{path}: free", text, "free space, or another drive" if few else None)
    aligned = facts.alignment is None or 0 < facts.alignment <= 4096
    says = "" if facts.alignment is None else f", alignment {facts.alignment} B"
    direct = bool(facts.direct) and aligned
    yield note(
        f"{path}: O_DIRECT",
        f"works{says}" if direct else f"does not work{says}: every byte passes through the page cache",
        None if direct else "use ext4 or XFS on a drive with blocks of at most 4096 bytes",
    )
    yield from _backends_of(path)
    placed = [gpu for gpu in gpus() if gpu.numa_node is not None]
    if drive is not None and drive.numa_node is not None and placed:
        near = [gpu.number for gpu in placed if gpu.numa_node == drive.numa_node]
        text = f"the drive's node {drive.numa_node} has " + (f"GPU {near}" if near else "no GPU")
        yield note(f"{path}: NUMA", text, None if near else "a drive near the GPU")


def _old_arenas(path: str, *, clean: bool) -> Iterator[Finding]:
    """Files that killed runs of older versions left: these had names. `clean`: remove them."""
    folder = os.path.join(path, "infinity")
    try:
        names = sorted(filter(_OLD_ARENA.fullmatch, os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        names, reason = [], os.strerror(error.errno or 0)
        yield note(f"{path}: leftover", f"{folder} cannot be read: {reason}", cure_of(folder, error.errno))
    for name in names:
        file = os.path.join(folder, name)
        try:
            size = format_size(os.lstat(file).st_blocks * 512)
            state = _old_arena(file, clean=clean)
        except FileNotFoundError:  # its run has just ended
            continue
        except OSError as error:
            text = f"{file} cannot be looked at or removed: {os.strerror(error.errno or 0)}"
            yield note(f"{path}: leftover", text, cure_of(folder, error.errno))
            continue
        if state == "removed":
            yield note(f"{path}: leftover", f"{file}, {size}: removed; a killed run had left it")
            with contextlib.suppress(OSError):  # another file is in it
                os.rmdir(folder)
        elif state == "left":
            text = f"{file}, {size}: a killed run of an older version has left it"
            yield note(f"{path}: leftover", text, f"infinity doctor --clean {quote(path)}")
        elif state == "live":
            yield note(f"{path}: in use", f"{file}, {size}: a run of an older version has it")


def _old_arena(file: str, *, clean: bool) -> str:
    """Return "live" if a run has locked the file, "left" if nobody has, or "removed"; "" if it is no arena.
    An arena is empty or has its mark on its last page, and has one name."""
    with contextlib.ExitStack() as stack:
        try:
            flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_RDWR if clean else os.O_RDONLY)
            fd = os.open(file, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                return ""
            raise
        stack.callback(os.close, fd)
        held = os.fstat(fd)
        if not stat.S_ISREG(held.st_mode) or held.st_nlink != 1:
            return ""
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if clean else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return "live"
        held, there = os.fstat(fd), os.lstat(file)
        if (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            return "live"  # its run has ended and removed it, and another one has begun
        nbytes = held.st_size - ALIGNMENT
        mark = (b"infinity arena 1\n%d\n" % nbytes).ljust(ALIGNMENT, b"\0")
        if held.st_size and (nbytes <= 0 or os.pread(fd, ALIGNMENT, nbytes) != mark):
            return ""
        if clean:
            os.unlink(file)
    return "removed" if clean else "left"


def _backends_of(path: str) -> Iterator[Finding]:
    try:
        from infinity.hardware.aio import available_backends, open_ring
        from infinity.hardware.tuned import tuned

        with open_ring("doctor", path) as ring:  # as a run does
            chosen, reason = ring.backend, ring.reason
            shape = sizes(ring)
        verdicts = available_backends(path).items()
        refused = [f"{n}: {v}" for n, v in verdicts if v != "ok" and v not in reason and reason not in v]
        text = f"auto takes {chosen}, {shape} ({reason})" + (f"; {'; '.join(refused)}" if refused else "")
        slower = chosen == "threads" and not reason.startswith(("asked for", "as infinity tune"))
        cure = "a local file system with O_DIRECT, or allow Linux AIO" if slower else None
        yield note(f"{path}: backend", text, cure)
        found = tuned(path)
        never = f"infinity tune {path} finds the settings for this drive (never run)"
        text = never if found is None else f"{found.backend}, {sizes(found)}"
        yield note(f"{path}: tuned", text)
    except InfinityError as error:
        yield Finding(f"{path}: backend", ERROR, f"{error.what}: {error.found}", error.cure)


# ---- the command ----

_Check = Callable[[], Iterator[Finding]]
CHECKS: Final[tuple[_Check, ...]] = (versions, package, native, memory, processors, devices)


def examine(directories: Sequence[str], *, clean: bool = False) -> list[Finding]:
    """Return all findings. A check that breaks is itself a finding, and the others go on. `clean`: remove
    what killed runs of older versions left."""
    checks: list[tuple[str, _Check]] = [(check.__name__, check) for check in CHECKS]
    checks += [(path, functools.partial(directory, path, clean=clean)) for path in directories]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:
            text = f"this check broke: {type(error).__name__}: {error}"
            findings.append(Finding(name, ERROR, text, "report it, with this line"))
    return findings


def worst(findings: Sequence[Finding]) -> str:
    """Return the worst status of all."""
    return max((finding.status for finding in findings), key=(OK, WARNING, ERROR).index, default=OK)


@click.command("doctor")
@directories_argument(required=False)
@click.option("--clean", is_flag=True, help="Remove what killed runs of older versions left in each DIR.")
@json_option
def doctor_command(directories: tuple[str, ...], clean: bool, as_json: bool) -> int:
    """Look over this machine and, if named, directories on NVMe drives; say what to change.

    Exit code 0: everything works, warnings or not; 1: something does not work.
    """
    if clean and not directories:
        raise ConfigError(
            "`--clean` needs a directory",
            expected="the directories in which runs of older versions were killed",
            found="none",
            cure="infinity doctor --clean DIR",
        )
    findings = examine(directories, clean=clean)
    status = worst(findings)
    result = {"status": status, "findings": [f._asdict() for f in findings]}
    return finish(result, lambda _: show(findings), as_json=as_json, failed=status == ERROR)


def show(findings: Sequence[Finding]) -> None:
    """Print findings for a person."""
    console = Console(highlight=False, soft_wrap=True)
    styles = {OK: "green", WARNING: "yellow", ERROR: "bold red"}
    for finding in findings:
        head = f"{finding.status:8}{finding.name}: "
        found = " ".join(finding.found.split())
        line = Text(lines_of(head + found, hang=10))
        line.stylize(styles[finding.status], 0, 8)
        line.stylize("bold", 8, len(head) - 1)
        console.print(line)
        if finding.cure is not None:  # on one line: it is there to be copied
            console.print(Text(f"        to change: {finding.cure}"))
    counts = {status: sum(f.status == status for f in findings) for status in (OK, WARNING, ERROR)}
    console.print(f"{counts[OK]} ok, {counts[WARNING]} warnings, {counts[ERROR]} errors")
