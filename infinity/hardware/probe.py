"""What this machine has: memory within the cgroup's limit."""

from __future__ import annotations

from pathlib import Path

_NO_LIMIT = 1 << 60


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
    left = _NO_LIMIT
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root = Path("/sys/fs/cgroup/memory")
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif controllers == "":
            root = Path("/sys/fs/cgroup")
            limit, used = "memory.max", "memory.current"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            left = min(left, _left(folder, limit, used))
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return left


def _left(folder: Path, limit: str, used: str) -> int:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= _NO_LIMIT:
            return _NO_LIMIT
        now = int((folder / used).read_text())
        cache = 0
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("inactive_file", "active_file", "total_inactive_file", "total_active_file"):
                cache = max(cache, int(value)) if name.startswith("total") else cache + int(value)
        return max(0, int(most) - max(0, now - cache))
    except (OSError, ValueError):
        return _NO_LIMIT
