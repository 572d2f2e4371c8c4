"""What `infinity doctor` says of one directory: what it stands on, its room and its I/O."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from shlex import quote
from typing import Final, NamedTuple

from infinity.core.errors import InfinityError
from infinity.core.sizes import GiB, format_size
from infinity.hardware import cores, probe
from infinity.hardware.medium import MEMORY, NETWORK, Medium, medium_of, wear_of
from infinity.storage.leftovers import arenas

OK, WARNING, ERROR = "ok", "warning", "error"
_LEAST_FREE: Final = GiB
_WORN: Final = 0.8  # of a drive's rated endurance


class Finding(NamedTuple):
    """One line. `status` is ok, warning or error; `cure` what to change, if anything."""

    name: str
    status: str
    found: str
    cure: str | None = None


def note(name: str, found: str, cure: str | None = None) -> Finding:
    """Return a warning where there is something to change, else that it is well."""
    return Finding(name, OK if cure is None else WARNING, found, cure)


def directory(path: str) -> Iterator[Finding]:
    """One directory: its file system, its drive, its room, and what I/O the engine would use there."""
    try:
        facts = probe.describe_directory(path)
    except OSError as error:
        yield Finding(path, ERROR, os.strerror(error.errno or 0), _cure_of_path(path, error.errno))
        return
    drive, medium = facts.drive, medium_of(path)
    text = ", over ".join(medium.layers)
    if drive is not None:
        text += f" ({drive.model})" if drive.model else ""
        text += "" if drive.numa_node is None else f", NUMA node {drive.numa_node}"
    yield note(path, text)
    yield from _medium(path, medium)
    yield from _leftovers(path)
    if not facts.writable:
        yield Finding(f"{path}: access", ERROR, *_refusal(facts))
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
    gpus = [gpu for gpu in probe.gpus() if gpu.numa_node is not None]
    if not gpus and drive is not None:
        chosen = cores.choose_node(probe.numa_nodes(), cores.allowed_cpus(), None, (drive.numa_node,))
        if chosen is not None:
            yield note(f"{path}: buffers", f"those of a run with this drive prefer node {chosen}")
    if drive is not None and drive.numa_node is not None and gpus:
        near = [gpu.number for gpu in gpus if gpu.numa_node == drive.numa_node]
        text = f"the drive's node {drive.numa_node} has " + (f"GPU {near}" if near else "no GPU")
        yield note(f"{path}: NUMA", text, None if near else "a drive near the GPU")


def _cure_of_path(path: str, number: int | None) -> str:
    if number == errno.ENOENT and not os.path.islink(path):
        return f"create it (mkdir -p {quote(path)}), or name another directory"
    if number == errno.ENOTDIR and os.path.lexists(path):
        return f"name a directory, such as {os.path.dirname(path)}"
    if number in (errno.EACCES, errno.EPERM):
        return f"chown or chmod {quote(path)}, or name another directory"
    return "name another directory"


def _refusal(facts: probe.DirectoryFacts) -> tuple[str, str]:
    """Return why no file can be made in a directory, and what to change."""
    if facts.refusal == errno.EROFS:
        point = quote(facts.mount.point if facts.mount is not None else facts.path)
        return "the file system is read-only", f"mount -o remount,rw {point}, or name another directory"
    if facts.refusal in (errno.ENOSPC, errno.EDQUOT):
        return "no file can be made: the file system is full", "free space, or name another directory"
    reason = os.strerror(facts.refusal or 0)
    cure = f"chown or chmod {quote(facts.path)}, or name a directory that you may write to"
    return f"no file can be made: {reason}", cure


def _medium(path: str, medium: Medium) -> Iterator[Finding]:
    """What makes a directory unfit for state, though files can be made there."""
    if medium.kind == MEMORY:
        yield note(f"{path}: tier", "it is memory, not a drive", "name a directory on a drive")
    elif medium.kind == NETWORK:
        yield note(
            f"{path}: tier",
            "it is behind a network: slower than a drive, and others share it",
            "name a directory on a local drive",
        )
    if medium.loop:
        yield note(
            f"{path}: loop device",
            "a file plays the drive: every byte passes two file systems",
            "name a directory on the drive that holds the file",
        )
    if medium.rotational:
        names = ", ".join(medium.drives)
        yield note(
            f"{path}: rotational",
            f"{names}: a rotational disk reads and writes a few hundred MB/s at most",
            "name a directory on an SSD",
        )
    for name in medium.drives:
        wear = wear_of(name)
        if wear.used is None:
            yield note(f"{path}: wear", f"{name}: unknown ({wear.why})")
        else:
            text = f"{name}: {wear.used:.0%} of the endurance that it is rated for is used"
            worn = "another drive; infinity plan says what a run writes"
            yield note(f"{path}: wear", text, worn if wear.used >= _WORN else None)


def _leftovers(path: str) -> Iterator[Finding]:
    """What killed runs have left, and what stands where an arena belongs."""
    try:
        found = arenas(path)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        cure = "look at it as the user who ran there, or name another directory"
        yield note(f"{path}: leftovers", f"its subdirectory cannot be looked at: {reason}", cure)
        return
    for each in found:
        size = format_size(each.nbytes)
        if each.state == "dead":
            text = f"{each.path}, {size}: a killed run has left it; the next run there takes its space"
            yield note(f"{path}: leftover", text, f"infinity clean {quote(path)}")
        elif each.state == "foreign":
            text = f"{each.path}, {size}: {each.why}; no run can begin there"
            yield note(f"{path}: leftover", text, f"move {quote(each.path)} away")
        else:
            yield note(f"{path}: in use", f"{each.path}, {size}: of a run that is under way")


def _backends_of(path: str) -> Iterator[Finding]:
    try:
        from infinity.hardware.aio import available_backends, open_ring
        from infinity.hardware.tuned import tuned

        with open_ring("doctor", path, "auto", None, None, 120.0, None) as ring:  # as a run does
            chosen, reason = ring.backend, ring.reason
            shape = f"{format_size(ring.block_bytes)} × {ring.queue_depth}"
        verdicts = available_backends(path).items()
        refused = [f"{n}: {v}" for n, v in verdicts if v != "ok" and v not in reason and reason not in v]
        text = f"auto takes {chosen}, {shape} ({reason})" + (f"; {'; '.join(refused)}" if refused else "")
        slower = chosen == "threads" and not reason.startswith(("asked for", "as infinity tune"))
        cure = "a local file system with O_DIRECT, or allow Linux AIO" if slower else None
        yield note(f"{path}: backend", text, cure)
        found = tuned(path)
        text = f"infinity tune {path} finds the settings for this drive (never run)"
        if found is not None:
            text = f"{found.backend}, {format_size(found.block_bytes)} × {found.queue_depth}"
        yield note(f"{path}: tuned", text)
    except InfinityError as error:
        yield Finding(f"{path}: backend", ERROR, f"{error.what}: {error.found}", error.cure)
