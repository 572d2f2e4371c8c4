"""Two hosts on one machine: network namespaces that a cable joins (network_namespaces(7), veth(4))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .cgroup import unavailable

#: Environment of ranks that reach each other over the cable.
BETWEEN: Final = {"MASTER_ADDR": "10.213.0.1", "GLOO_SOCKET_IFNAME": "cable"}
_CLONE_NEWNET: Final = 0x40000000


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces that a cable joins: infinity-<pid>-0 is 10.213.0.1, -1 is 10.213.0.2."""
    names = [f"infinity-{os.getpid()}-{i}" for i in range(2)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    if os.geteuid() != 0:
        unavailable("network namespaces need root")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns", names[1])
            for i, name in enumerate(names):
                ip("-n", name, "addr", "add", f"10.213.0.{i + 1}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            unavailable(f"no network namespaces: {getattr(error, 'stderr', None) or error}")
        yield names
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "del", name], check=False)


def enter(name: str) -> None:
    """Be on the host called `name`: this thread, and those that it starts."""
    with open(f"/run/netns/{name}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
