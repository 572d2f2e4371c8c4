"""What the engine asks this machine for: memory within its limits, drives, file systems, NUMA nodes.

Everything comes from /proc, /sys and the system calls for this purpose. A value that the kernel does not
report is None.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any, Final, NamedTuple

_NO_LIMIT: Final = 1 << 60
_SYS_BLOCK: Final = "/sys/dev/block"


# ---- memory ----


def available_host_memory() -> int:
    """Return bytes of host memory that this process could still take: the kernel's MemAvailable
    (proc_meminfo(5)), or what its memory cgroup (v1 or v2) leaves, whichever is less."""
    return min(_mem_available(), cgroup_memory_left())


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def cgroup_memory_left() -> int:
    """Return the bytes that the tightest memory cgroup above this process leaves; page cache
    that belongs to it counts as free, since the kernel reclaims it first."""
    return min((_left(*place) for place in _cgroups()), default=_NO_LIMIT)


def cgroup_memory_limit() -> int | None:
    """Return the bytes of the tightest memory limit of the cgroups above this process, or None."""
    limits = [_limit(folder / name) for folder, name, _ in _cgroups()]
    tightest = min(limits, default=_NO_LIMIT)
    return tightest if tightest < _NO_LIMIT else None


def _cgroups() -> list[tuple[Path, str, str]]:
    """Return (folder, file of the limit, file of the use) of each memory cgroup, inside out."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    return [(folder, *names[version]) for folder, version in cgroups_of("memory")]


def cgroups_of(
    controller: str, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[Path, int]]:
    """Return (folder, version 1 or 2) of each cgroup of this process that has `controller`, and of
    those above it, inside out (cgroups(7))."""
    places = []
    for line in (text_of(proc) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top, version = root / controllers, 1
            if not top.exists():  # mounted together with others, with a link for each, or alone
                top = root / controller
        elif controllers == "":
            top, version = root, 2
        else:
            continue
        folder = top / path.lstrip("/")
        while True:
            places.append((folder, version))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return places


def _limit(file: Path) -> int:
    try:
        most = file.read_text().strip()
        return _NO_LIMIT if most == "max" else min(int(most), _NO_LIMIT)
    except (OSError, ValueError):
        return _NO_LIMIT


def _left(folder: Path, limit: str, used: str) -> int:
    most = _limit(folder / limit)
    if most >= _NO_LIMIT:
        return _NO_LIMIT
    try:
        now = int((folder / used).read_text())
        cache = 0
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("inactive_file", "active_file", "total_inactive_file", "total_active_file"):
                cache = max(cache, int(value)) if name.startswith("total") else cache + int(value)
        return max(0, most - max(0, now - cache))
    except (OSError, ValueError):
        return _NO_LIMIT


# ---- NUMA ----


class NumaNode(NamedTuple):
    """One node: its number, the cores of it, bytes of its memory."""

    number: int
    cpus: frozenset[int]
    memory: int


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes of this machine; one node, or none, is a machine without NUMA."""
    nodes = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        found = re.search(r"MemTotal:\s+(\d+) kB", text_of(folder / "meminfo") or "")
        memory = int(found[1]) * 1024 if found else 0
        nodes.append(NumaNode(int(folder.name[4:]), parse_cpus(text_of(folder / "cpulist") or ""), memory))
    return tuple(nodes)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers in a list of cores as /sys writes it: ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def numa_node_of(folder: Path) -> int | None:
    """Return the NUMA node of a device's folder in /sys, from it or the nearest above that has one."""
    for place in (folder, *folder.parents):
        number = text_of(place / "numa_node")
        if number is not None:
            return int(number) if int(number) >= 0 else None
    return None


# ---- file systems and drives ----


class Mount(NamedTuple):
    """Where a directory is mounted from (proc_pid_mountinfo(5))."""

    point: str
    filesystem: str
    source: str


class BlockDevice(NamedTuple):
    """The block device below a file system. What /sys does not say is None."""

    name: str  #: of the whole device in /sys/block, such as nvme0n1
    number: str  #: major:minor of what is mounted
    model: str | None
    serial: str | None
    rotational: bool | None
    numa_node: int | None


def nameless_file(directory: str) -> int:
    """Return a descriptor of a new, empty file in `directory` that no path names.

    It is gone when it is closed, however the process ends. Without O_TMPFILE it has a name for the moment in
    which it is opened.

    Raises:
        OSError: no file can be made there.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    name = os.path.join(directory, f".infinity-{secrets.token_hex(8)}")
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_direct(fd: int) -> bool:
    """Give an open file O_DIRECT; return whether its file system takes that.

    Raises:
        OSError: the system reported another error.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def mount_of(path: str) -> Mount | None:
    """Return the mount that `path` is on: the innermost, and of those at one point the last."""
    path = os.path.realpath(path)
    best: Mount | None = None
    for line in (text_of(Path("/proc/self/mountinfo")) or "").splitlines():
        left, _, right = line.partition(" - ")
        point = _unescape(left.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            kind, source, *_ = right.split()
            best = Mount(point, kind, _unescape(source))
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text).replace("\\,", ",")


def drive_of(path: str) -> BlockDevice | None:
    """Return the block device below `path`, or None.

    A file system with a device number of its own (btrfs) is found by what it is mounted from.
    """
    number = os.stat(path).st_dev
    if os.major(number) == 0:
        mount = mount_of(path)
        try:
            found = os.stat(mount.source) if mount is not None else None
        except OSError:
            return None
        if found is None or not stat.S_ISBLK(found.st_mode):
            return None
        number = found.st_rdev
    name = f"{os.major(number)}:{os.minor(number)}"
    folder = Path(_SYS_BLOCK, name).resolve()
    if not folder.exists():
        return None
    if (folder / "partition").exists():
        folder = folder.parent
    places = ("serial", "device/serial", "device/wwid", "wwid", "dm/uuid", "md/uuid", "device/vpd_pg80")
    rotational = text_of(folder / "queue" / "rotational")
    return BlockDevice(
        name=folder.name,
        number=name,
        model=text_of(folder / "device" / "model") or text_of(folder / "dm" / "name"),
        serial=next(filter(None, (text_of(folder / place) for place in places)), None),
        rotational=None if rotational is None else rotational != "0",
        numa_node=numa_node_of(folder),
    )


# ---- GPUs ----


def pci_address(facts: Any) -> str | None:
    """Return the PCI address in a CUDA device's properties, as /sys writes it; None: torch has none."""
    if not hasattr(facts, "pci_bus_id"):
        return None
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


def gpu_numa_node(pci: str | None, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of the device at a PCI address, or None."""
    folder = root / (pci or "none")
    return numa_node_of(folder.resolve()) if folder.exists() else None


def text_of(file: Path) -> str | None:
    """Return what a file of /proc or /sys says, without spaces around; None if it does not."""
    try:
        return os.fsdecode(file.read_bytes()).strip("\0 \t\n") or None
    except OSError:
        return None
