"""A directory's file system, the drive below overlays, loop devices and mapped devices, and the drive's wear.

/proc and /sys tell the drive. Only the drive itself knows its wear: the kernel reports it for eMMC. For other
drives this file asks smartctl or nvme, if it is installed and this user may run it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

from infinity.core.errors import BuildError
from infinity.hardware.probe import (
    BlockDevice,
    Mount,
    drive_of,
    make_direct,
    mount_of,
    nameless_file,
    text_of,
    unescape,
)

MEMORY, NETWORK, DRIVE, UNKNOWN = "memory", "network", "drive", "unknown"
_SYS: Final = Path("/sys/class/block")
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
_OVER_NETWORK: Final = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
    *("orangefs", "panfs", "smb3", "smbfs", "wekafs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.glusterfs"),
    *("fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
)
_DEEPEST: Final = 8
_PATIENCE: Final = 10.0  # seconds that smartctl or nvme may take


class Medium(NamedTuple):
    """What a directory stands on. `layers`: each in words, from the top; `kind`: of the lowest."""

    kind: str
    layers: tuple[str, ...]
    loop: bool
    rotational: bool | None  #: None: not known, or a virtual disk, which cannot know
    drives: tuple[str, ...]  #: names of the lowest devices


class DriveWear(NamedTuple):
    """The share of a drive's rated endurance that is used, or None and why it is not known."""

    used: float | None
    why: str = ""


class DirectoryFacts(NamedTuple):
    """What a directory stands on. Sizes in bytes."""

    path: str
    mount: Mount | None
    drive: BlockDevice | None  #: None: no block device of its own (memory, network, a pool of drives)
    free: int  #: for this user
    total: int
    writable: bool
    direct: bool | None  #: whether files there take O_DIRECT; None: no file can be made
    alignment: int | None  #: of O_DIRECT's offsets; 0: none; None: the kernel does not say
    refusal: int | None = None  #: the error number with which a file cannot be made there


def describe_directory(path: str) -> DirectoryFacts:
    """Return what `path` stands on.

    Raises:
        OSError: it is missing, not a directory, or closed to this user.
    """
    with os.scandir(path):  # the errors that a user should see
        pass
    system = os.statvfs(path)
    direct: bool | None = None
    alignment: int | None = None
    refusal: int | None = None
    try:
        fd = nameless_file(path)
    except OSError as error:
        refusal = error.errno
    else:
        try:
            direct = make_direct(fd)
            alignment = _alignment(fd)
        finally:
            os.close(fd)
    return DirectoryFacts(
        path=os.path.abspath(path),
        mount=mount_of(path),
        drive=drive_of(path),
        free=system.f_bavail * system.f_frsize,
        total=system.f_blocks * system.f_frsize,
        writable=direct is not None,
        direct=direct,
        alignment=alignment,
        refusal=refusal,
    )


def _alignment(fd: int) -> int | None:
    try:
        from infinity.hardware.direct_file import dio_offset_align
    except BuildError:  # whoever wants to know what is wrong here asks without the native part, too
        return None
    return dio_offset_align(fd)


def medium_of(path: str) -> Medium:
    """Return what `path` stands on.

    Raises:
        OSError: there is nothing at `path`.
    """
    layers: list[str] = []
    loop = False
    while len(layers) < _DEEPEST:
        mount = mount_of(path)
        filesystem = mount.filesystem if mount is not None else "an unknown file system"
        layers.append(filesystem)
        if mount is not None and filesystem == "overlay":
            upper = _option(mount, "upperdir")
            if upper is not None and os.path.isdir(upper):
                path = upper
                continue
            layers.append("a layer that cannot be seen from here" if upper else "a layer that is only read")
            break
        for kind, known in ((MEMORY, _IN_MEMORY), (NETWORK, _OVER_NETWORK)):
            if filesystem in known:
                return Medium(kind, tuple(layers), loop, None, ())
        drive = drive_of(path)
        if drive is None:
            break
        layers[-1] += f" on {drive.name}"
        file = text_of(_SYS / drive.name / "loop" / "backing_file")
        if file is not None:
            loop = True
            layers[-1] += f", a loop device over {file}"
            if os.path.exists(file):
                path = file
                continue
            break
        drives = _below(drive.name)
        if drives != [drive.name]:
            layers.append(" and ".join(drives))
        kinds = {_kind(name) for name in drives}
        turning = [_rotational(name) for name in drives]
        rotational = True if True in turning else None if None in turning else False
        kind = next((kind for kind in (NETWORK, MEMORY) if kind in kinds), DRIVE)
        return Medium(kind, tuple(layers), loop, rotational, tuple(drives))
    return Medium(UNKNOWN, tuple(layers), loop, None, ())


def _option(mount: Mount, name: str) -> str | None:
    found = (each.partition("=") for each in mount.options)
    return next((unescape(value) for key, _, value in found if key == name), None)


def _below(name: str) -> list[str]:
    """Return the lowest devices below a block device: those of which a mapped one is made."""
    folder = (_SYS / name).resolve()
    if (folder / "partition").exists():
        return _below(folder.parent.name)
    try:
        parts = sorted(os.listdir(folder / "slaves"))
    except OSError:
        parts = []
    return sorted({leaf for part in parts for leaf in _below(part)}) or [name]


def _kind(name: str) -> str:
    if name.startswith(("ram", "zram")):
        return MEMORY
    folder = (_SYS / name).resolve()
    iscsi = any(part.startswith("session") and part[7:].isdigit() for part in folder.parts)
    transports = [folder / "device" / "transport", *folder.glob("device/nvme*/transport")]
    fabric = any(text_of(file) in ("tcp", "rdma", "fc") for file in transports)
    if iscsi or fabric or name.startswith(("nbd", "rbd", "drbd")):
        return NETWORK
    return DRIVE


def _rotational(name: str) -> bool | None:
    said = text_of(_SYS / name / "queue" / "rotational")
    if said is None or name.startswith(("vd", "xvd")):  # what a virtual disk says is the default
        return None
    return said != "0"


# ---- wear ----


def wear_of(name: str) -> DriveWear:
    """Return how much of a drive's rated endurance is used. Never raises."""
    life = text_of(_SYS / name / "device" / "life_time")  # eMMC: two estimates, in tenths
    if life is not None:
        try:
            return DriveWear(max(int(part, 16) for part in life.split()) / 10)
        except ValueError:
            return DriveWear(None, f"the kernel says {life!r}")
    whys = []
    for command, find in (
        (["smartctl", "--json", "--all"], _smartctl),
        (["nvme", "smart-log", "--output-format=json"], _nvme),
    ):
        if command[0] == "nvme" and not name.startswith("nvme"):
            continue
        said, why = _ask([*command, f"/dev/{name}"])
        used = find(said)
        if isinstance(used, (int, float)) and 0 <= used <= 1000:
            return DriveWear(used / 100)
        whys.append(why or _message(said) or f"{command[0]} does not say")
    return DriveWear(None, "; ".join(whys))


def _ask(command: list[str]) -> tuple[dict[str, Any], str]:
    """Return what a program prints as JSON, or why there is nothing."""
    if shutil.which(command[0]) is None:
        return {}, f"{command[0]} is not installed"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False
        )
        said = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {}, f"{command[0]} did not end in {_PATIENCE:.0f} s"
    except (OSError, ValueError, RecursionError) as error:
        last = error.strerror if isinstance(error, OSError) else done.stderr.decode(errors="replace").strip()
        return {}, f"{command[0]}: {last or 'no answer'}"
    return (said, "") if isinstance(said, dict) else ({}, f"{command[0]}: no answer")


def _inside(said: Any, *names: str) -> Any:
    for name in names:
        said = said.get(name) if isinstance(said, dict) else None
    return said


def _smartctl(said: dict[str, Any]) -> Any:
    used = _inside(said, "endurance_used", "current_percent")
    return used if used is not None else _inside(said, "nvme_smart_health_information_log", "percentage_used")


def _nvme(said: dict[str, Any]) -> Any:
    return said.get("percent_used", said.get("percentage_used"))


def _message(said: dict[str, Any]) -> str:
    messages = _inside(said, "smartctl", "messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    text = _inside(first, "string")
    return f"smartctl: {text}" if isinstance(text, str) else ""
