"""`infinity doctor`: what stands between this machine and a fast run, each finding with its cure."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from infinity.core.errors import InfinityError
from infinity.core.sizes import GiB, MiB, format_size
from infinity.hardware import cores, probe
from infinity.version import __version__

from .console import finish
from .doctor_directory import ERROR, OK, WARNING, Finding, directory, note
from .options import directories_argument, json_option

DISTRIBUTION: Final = "infinity-offload"
_PACKAGES: Final = ("torch", "numpy", "cffi", "safetensors")
_OPTIONAL: Final = (("transformers", "hf"), ("matplotlib", "plot"))
_LEAST_CONTEXTS: Final = 1024  # requests of Linux AIO that a few rings take
_LEAST_LOCKED: Final = 64 * MiB
_TORCH_CURE: Final = "pip install torch"


def versions() -> Iterator[Finding]:
    """What is installed."""
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    linux = sys.platform == "linux"
    yield Finding("system", OK if linux else ERROR, system, None if linux else "infinity runs on Linux")
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, ERROR, "not installed", f"pip install {name}")
            continue
        why = _why_not_imported(name)
        text = version if why is None else f"{version} is installed, but cannot be imported: {why}"
        cure = None if why is None else f"pip install --force-reinstall {name}"
        yield Finding(name, OK if why is None else ERROR, text, cure)
    for name, extra in _OPTIONAL:
        found = importlib.util.find_spec(name) is not None
        text = "installed" if found else f"not installed (optional: pip install '{DISTRIBUTION}[{extra}]')"
        yield note(name, text)


def _why_not_imported(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a package that is broken raises
        return f"{type(error).__name__}: {error}"
    return None


def package() -> Iterator[Finding]:
    """Whether `import infinity` is this package: the name also belongs to an unrelated one on PyPI."""
    ours = Path(__file__).resolve().parents[1]
    try:
        version = importlib.metadata.version(DISTRIBUTION)
        same = version == __version__
        yield note(
            "distribution",
            f"{DISTRIBUTION} {version}" + ("" if same else f", but the code that runs is {__version__}"),
            None if same else "pip install again, or remove the other copy",
        )
    except importlib.metadata.PackageNotFoundError:
        text = f"{DISTRIBUTION} is not installed; {__version__} runs from {ours}"
        yield note("distribution", text, "pip install . in the source directory")
    try:
        other = importlib.metadata.version("infinity")
        yield Finding(
            "name",
            ERROR,
            f"the unrelated PyPI package infinity {other} is installed, too: `import infinity` may be either",
            f"pip uninstall infinity && pip install --force-reinstall --no-deps {DISTRIBUTION}",
        )
    except importlib.metadata.PackageNotFoundError:
        yield note("name", "the unrelated PyPI package infinity is not installed")
    for other_path in shadows(ours, sys.path):
        yield note("import", f"{other_path} is imported elsewhere as infinity", "move it away")
    yield note("import", f"infinity is {ours}")


def shadows(ours: Path, path: Sequence[str]) -> list[Path]:
    """Return what else on the module search path `path` is called infinity."""
    found = []
    for entry in dict.fromkeys(os.path.abspath(p or ".") for p in path):
        for candidate in (Path(entry, "infinity", "__init__.py"), Path(entry, "infinity.py")):
            place = candidate.parent if candidate.name == "__init__.py" else candidate
            if candidate.is_file() and place.resolve() != ours:
                found.append(place)
    return found


def native() -> Iterator[Finding]:
    """The native modules, and the instruction set in use."""
    try:
        aio = importlib.import_module("infinity.hardware.aio")
        forced = os.environ.get("INFINITY_AIO")
        yield note("native I/O", f"infinity._aio{f', INFINITY_AIO={forced}' if forced else ''}")
        for name, verdict in aio.available_backends().items():
            yield note(f"backend {name}", verdict, _backend_cure(name, verdict))
    except InfinityError as error:
        yield Finding("native I/O", ERROR, str(error.found or error.what), error.cure)
    try:
        adam = importlib.import_module("infinity.hardware.cpu_adam")
        isas = adam.available_isas()
        forced = os.environ.get("INFINITY_ISA")
        text = f"{adam.isa()} of {', '.join(isas)}; {adam.threads()} threads" + (
            f", INFINITY_ISA={forced}" if forced else ""
        )
        yield note("native Adam", text, "unset INFINITY_ISA" if adam.isa() != isas[-1] else None)
    except InfinityError as error:
        yield Finding("native Adam", ERROR, str(error.found or error.what), error.cure)
    except (ImportError, OSError) as error:  # torch, or what torch loads
        yield Finding("native Adam", ERROR, f"cannot be tried: {error}", _TORCH_CURE)


def _backend_cure(name: str, verdict: str) -> str | None:
    if verdict == "ok":
        return None
    if "not installed" in verdict:
        return "apt install libaio1 (or libaio1t64), dnf install libaio"
    if "aio-max-nr" in verdict:
        return "sysctl -w fs.aio-max-nr=1048576"
    if "locked memory" in verdict:
        return "ulimit -l unlimited"
    if "seccomp" in verdict:
        calls = (
            "io_uring_setup, io_uring_enter, io_uring_register" if name == "uring" else "io_setup, io_submit"
        )
        return f"allow {calls} in the container's seccomp profile; until then I/O costs more CPU time"
    return "another backend does the work; auto takes the best that there is"


def memory() -> Iterator[Finding]:
    """Host memory, and what limits it."""
    available, limit = probe.available_host_memory(), probe.cgroup_memory_limit()
    few = "end other programs, or lower --host-memory" if available < 2 * GiB else None
    yield note("host memory", f"{format_size(available)} available", few)
    text = (
        "no limit"
        if limit is None
        else f"{format_size(limit)}, {format_size(probe.cgroup_memory_left())} left"
    )
    yield note("cgroup", text)
    locked = probe.memlock_limit()
    low = locked is not None and locked < _LEAST_LOCKED
    yield note(
        "memlock",
        "no limit" if locked is None else f"{format_size(locked)}: uring registers no more than that",
        "ulimit -l unlimited (docker: --ulimit memlock=-1)" if low else None,
    )
    contexts = probe.aio_contexts()
    if contexts is None:
        yield note("aio-max-nr", "the kernel does not say", "check that /proc/sys is mounted")
    else:
        used, most = contexts
        few = "sysctl -w fs.aio-max-nr=1048576" if most - used < _LEAST_CONTEXTS else None
        yield note("aio-max-nr", f"{used:,} of {most:,} requests are taken", few)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = huge.read_text() if huge.exists() else "[never]"
    never = "[never]" in mode
    yield note(
        "huge pages",
        "off: transfers take more CPU time" if never else mode[mode.index("[") + 1 : mode.index("]")],
        f"echo madvise > {huge}" if never else None,
    )


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
    threads = [cores.adam_threads(limits.mine, staged=staged, rings=1) for staged in (False, True)]
    yield note(
        "threads",
        f"Adam takes {threads[0]} beside torch on the CPU, {threads[1]} with a GPU and one NVMe directory "
        f"(less one for each more); torch takes {_torch_threads()} and keeps them",
    )
    nodes = probe.numa_nodes()
    if len(nodes) < 2:
        yield note("NUMA", "one node")
        return
    text = "; ".join(f"node {n.number}: {len(n.cpus)} cores, {format_size(n.memory)}" for n in nodes)
    used = [n.number for n in nodes if n.cpus & mine]
    across = len(used) > 1
    own = {f"GPU {gpu.number}": gpu.numa_node for gpu in probe.gpus()} or {"the CPU": None}
    for name, node in own.items():
        chosen = cores.choose_node(nodes, mine, node, ())
        where = "where the kernel puts them" if chosen is None else f"on node {chosen}"
        yield note("buffers", f"for {name} they are {where}, as far as there is room")
    yield note(
        "NUMA",
        f"{text}; this process may run on {', '.join(map(str, used))}",
        "numactl --cpunodebind=N --membind=N, with the node of the GPU and the drives" if across else None,
    )


def _torch_threads() -> str:
    try:
        import torch
    except (ImportError, OSError):
        return "as many as it likes, but it is not here,"
    return str(torch.get_num_threads())


def devices() -> Iterator[Finding]:
    """GPUs, and whether the engine's memory can be pinned for them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("GPU", ERROR, f"cannot be looked for: {error}", _TORCH_CURE)
        return
    if not torch.cuda.is_available():
        there = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
        text = "none that torch sees; the CPU computes"
        if there:
            built = torch.version.cuda is not None
            cure = "compare nvidia-smi and torch's CUDA" if built else "install a torch built for CUDA"
            yield Finding("GPU", ERROR, f"{text}, but there is a driver", cure)
        else:
            yield note("GPU", text)
        return
    for gpu in probe.gpus():
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


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    versions,
    package,
    native,
    memory,
    processors,
    devices,
)


def examine(directories: Sequence[str]) -> list[Finding]:
    """Return all findings. A check that breaks is itself a finding, and the others go on."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [(check.__name__, check) for check in CHECKS]
    checks += [(path, lambda path=path: directory(path)) for path in directories]  # type: ignore[misc]
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
    statuses = {finding.status for finding in findings}
    return next((status for status in (ERROR, WARNING) if status in statuses), OK)


@click.command("doctor")
@directories_argument(required=False)
@json_option
def doctor_command(directories: tuple[str, ...], as_json: bool) -> int:
    """Look over this machine and, if named, directories on NVMe drives; say what to change.

    Exit code 0: everything works, warnings or not; 1: something does not work.
    """
    findings = examine(directories)
    status = worst(findings)
    result = {"status": status, "findings": [f._asdict() for f in findings]}
    return finish(result, lambda _: show(findings), as_json=as_json, failed=status == ERROR)


def show(findings: Sequence[Finding]) -> None:
    """Print findings for a person."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    styles = {OK: "green", WARNING: "yellow", ERROR: "bold red"}
    for finding in findings:
        line = Text(f"{finding.status:8}", style=styles[finding.status])
        line.append(f"{finding.name}: ", style="bold").append(finding.found, style="none")
        console.print(line)
        if finding.cure is not None:
            console.print(Text(f"        to change: {finding.cure}"))
    counts = {status: sum(f.status == status for f in findings) for status in (OK, WARNING, ERROR)}
    console.print(f"{counts[OK]} ok, {counts[WARNING]} warnings, {counts[ERROR]} errors")
