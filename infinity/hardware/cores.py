"""Cores and NUMA nodes: how many cores this process may use, which threads use them, where buffers should be.

[Note: who gets the cores] On a CPU device torch and the CPU's Adam each have a thread per core: their work
alternates or is bound by memory, and the kernel shares the cores between them. With a separate device, Adam
gets all cores less one per ring: a ring's thread sleeps most of the time but must not wait for a core when it
wakes. Without a ring, Adam leaves one core free: the thread that launches kernels must not wait either.
torch's own thread count is the user's: the engine never changes it.

[Note: near memory] On a machine with several NUMA nodes, memory that is pinned for a device, and leases that
drives read and write, prefer one node: the device's node; else the node of the drives, if they have one; else
the node of all cores of this process. They prefer it and are not bound to it (set_mempolicy(2), mbind(2)): a
full node is not an error. If the kernel does not allow or know this, the engine does without: it changes the
speed, never the result.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from infinity.core.errors import StorageError

from .probe import NumaNode, cgroups_of, drive_of, gpu_numa_node, numa_nodes, pci_address

if TYPE_CHECKING:
    import torch

#: mbind of each architecture (its unistd.h); Linux numbers it, libc has no name for it.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED: Final = 1
_WORD: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
_libc = ctypes.CDLL(None, use_errno=True)


# ---- cores ----


class Cores(NamedTuple):
    """What limits this process. `quota`: cores' worth of time that its cgroups allow, None: no limit;
    `ranks`: processes of this job on this machine (LOCAL_WORLD_SIZE)."""

    affinity: int
    quota: float | None
    ranks: int

    @property
    def mine(self) -> int:
        """Cores for this process: whole ones, since a thread that is throttled holds up all others."""
        cores = self.affinity if self.quota is None else min(self.affinity, int(self.quota))
        return max(1, cores // self.ranks)


def allowed_cpus() -> frozenset[int]:
    """Return the processors that this process may run on; all, where it may not ask."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))


def usable_cores() -> Cores:
    """Return what limits this process."""
    return Cores(len(allowed_cpus()), cpu_quota(), local_ranks(os.environ))


def local_ranks(environment: Mapping[str, str]) -> int:
    """Return the processes of this job on this machine, as torchrun says; 1 without it."""
    text = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


def cpu_quota(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores' worth of time that the tightest cgroup above this process allows (cpu.max of
    version 2, cpu.cfs_quota_us and cpu.cfs_period_us of version 1); None: no limit."""
    quotas = [_quota(folder, version) for folder, version in cgroups_of("cpu", proc, root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path, version: int) -> float | None:
    files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        words = " ".join((folder / name).read_text() for name in files).split()
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def adam_threads(cores: int, *, staged: bool, rings: int) -> int:
    """Return the threads of the CPU's Adam. See [Note: who gets the cores].

    Args:
        cores: that this process may use.
        staged: whether the device is not the CPU.
        rings: I/O threads of this process.
    """
    return max(1, cores - max(1, rings)) if staged else cores


# ---- NUMA ----


def choose_node(
    nodes: Sequence[NumaNode],
    cpus: Collection[int],
    device: int | None,
    drives: Iterable[int | None],
) -> int | None:
    """Return the node that buffers prefer, or None: as the kernel likes. See [Note: near memory].

    Args:
        nodes: of this machine.
        cpus: that this process may use.
        device: node of the device.
        drives: node of each drive; None: unknown.
    """
    known = {node.number for node in nodes if node.memory}
    if len(known) < 2:
        return None
    if device in known:
        return device
    near = set(drives)
    if len(near) == 1 and near <= known:
        return near.pop()
    mine = [node.number for node in nodes if node.cpus & frozenset(cpus)]
    return mine[0] if len(mine) == 1 and mine[0] in known else None


def node_for(device: torch.device, directories: Iterable[str]) -> int | None:
    """Return the node that buffers between `device` and the drives of `directories` prefer, or None."""
    nodes = numa_nodes()
    if len(nodes) < 2:
        return None
    own = None
    if device.type == "cuda":
        import torch

        own = gpu_numa_node(pci_address(torch.cuda.get_device_properties(device)))
    drives = []
    for directory in directories:
        try:
            drive = drive_of(directory)
        except OSError:  # whoever opens an arena there says what is wrong
            continue
        drives.append(None if drive is None else drive.numa_node)
    return choose_node(nodes, allowed_cpus(), own, drives)


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Take the future pages of a mapping from `node`, as far as the node has any.

    Args:
        address: a multiple of the page size; `nbytes` are rounded up to it.

    Returns:
        Whether the kernel took it: a container may forbid mbind(2), and a kernel may lack it.

    Raises:
        StorageError: the range or the node is wrong.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // _WORD + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD] = 1 << node % _WORD
    done = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _WORD + 1),  # the kernel takes one bit less than it is told
        ctypes.c_ulong(0),
    )
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM):
        return False
    raise StorageError(
        f"memory cannot be placed on NUMA node {node}",
        errno=code,
        expected="a node of this machine, and a mapping of this process",
        found=os.strerror(code),
        cure="report it, with what `infinity doctor` says of NUMA",
    )
