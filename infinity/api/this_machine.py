"""The memory, drives and threads of this machine that a run of a config may use."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.core.config import Config
from infinity.core.errors import DirectoryError
from infinity.core.sizes import Tier
from infinity.hardware.cores import adam_threads, usable_cores
from infinity.hardware.probe import available_host_memory, mount_of, nameless_file
from infinity.hardware.tuned import bandwidths
from infinity.planning.footprint import Budget
from infinity.planning.machine import Drive, Machine, budget_of

if TYPE_CHECKING:  # what a plan asks of this machine needs no torch
    from infinity.hardware.device import Device
    from infinity.hardware.ranks import Comm


def machine_here(config: Config, device_memory: int | None, *, unnamed: bool = False) -> Machine:
    """Return the resources of this machine for a run of `config`. `device_memory`: the free memory of a
    device with its own memory; `unnamed`: its one directory is a placeholder.

    Raises:
        DirectoryError: an NVMe directory is missing, not a directory, or not writable.
    """
    directories = config.directories
    if unnamed:
        drives = [Drive(directory=d, free=0, system=d) for d in directories]
    else:
        weights = (bandwidths(directories) if len(directories) > 1 else None) or [1.0] * len(directories)
        drives = [drive_here(d, w) for d, w in zip(directories, weights, strict=True)]
    return Machine(
        host_memory=available_host_memory(),
        device_memory=device_memory,
        drives=tuple(drives),
        temporary=drive_here(temporary_directory()) if not drives or unnamed else None,
    )


def refused(directory: str, error: OSError) -> DirectoryError:
    """Return what to say of a directory in which the system lets this user make no file."""
    return DirectoryError(
        f"the directory {directory!r} cannot be used: no file can be made in it",
        errno=error.errno,
        path=directory,
        expected="a directory that this user may write to",
        found=os.strerror(error.errno or 0),
        cure=cure_of(directory, error.errno),
    )


def cure_of(directory: str, number: int | None) -> str:
    """Return what to change where no file can be made in `directory`, with this error number."""
    name, there = shlex.quote(directory), os.path.lexists(directory)
    if number == errno.ENOTDIR and there:
        return f"name a directory, such as {os.path.dirname(directory)}"
    if number == errno.ENOENT and there and not os.path.islink(directory):  # such as /proc
        return "name a directory on a drive"
    if number == errno.ENOENT and not there:
        return f"mkdir -p {name}"
    mount = mount_of(directory) if number == errno.EROFS else None
    cures = {
        errno.EROFS: f"mount -o remount,rw {shlex.quote(mount.point) if mount else name}",
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there"),
        **dict.fromkeys((errno.EACCES, errno.EPERM), f"chown or chmod {name}"),
    }
    return ", or ".join(filter(None, (cures.get(number or 0), "name another directory")))


def check_directory(directory: str) -> None:
    """Raise DirectoryError unless `directory` is one in which this user can make files."""
    try:
        os.close(nameless_file(directory))
    except OSError as error:
        raise refused(directory, error) from error


def drive_here(directory: str, weight: float = 1.0) -> Drive:
    """Return the drive of a directory of this machine.

    Raises:
        DirectoryError: it is missing, not a directory, or not writable.
    """
    check_directory(directory)
    system, found = os.statvfs(directory), os.stat(directory)
    # A file system that does not know its size (ramfs, some network ones) does not know what is free.
    free = system.f_bavail * system.f_frsize if system.f_blocks else None
    return Drive(directory=directory, free=free, system=found.st_dev, weight=weight)


def temporary_directory() -> str:
    """Return $TMPDIR, or /var/tmp (which is on a disk where /tmp may be memory), or Python's."""
    if not os.environ.get("TMPDIR"):
        persistent = Path("/var/tmp")
        if persistent.is_dir() and os.access(persistent, os.W_OK):
            return str(persistent)
    return tempfile.gettempdir()


def budget_here(config: Config, device: Device, comm: Comm) -> Budget:
    """Return the budgets of this rank in bytes. A budget that is not set is nine tenths of the free memory.
    Ranks of one machine share its memory, and all ranks have the budgets of the poorest: evictions must not
    depend on the rank."""
    on_device = device.memory_free() if device.staged else None
    own = budget_of(config, available_host_memory(), on_device, comm.local_world)
    form = struct.Struct("<2q")
    mine = form.pack(own.device, own.host)
    told = comm.exchange("the budgets", mine) if comm.world > 1 else [mine]
    device_least, host_least = map(min, zip(*map(form.unpack, told), strict=True))
    return dataclasses.replace(own, device=device_least, host=host_least)


def threads_of(config: Config, *, staged: bool) -> int:
    """Return the number of threads of the CPU's Adam: the setting, or as [Note: who gets the cores] says."""
    if config.threads is not None:
        return config.threads
    on_nvme = any(place.get(Tier.NVME) for place in config.placements.values())
    rings = len(config.directories) if on_nvme else 0
    return adam_threads(usable_cores().mine, staged=staged, rings=rings)
