"""Runs a script as N ranks: forks of the server of `children.py`, with the environment of torchrun."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .children import Child

Result = tuple[int, str, str]
#: The device of ranks for which no other is named (`devices` in lagging/lane.py): that of `pytest --device`.
DEVICE = "cpu"


def run_ranks(
    world: int,
    script: str,
    *arguments: str,
    seconds: float = 60,
    environment: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
    device: str | None = None,
) -> list[Result]:
    """Run Python code as `world` ranks of one node; return (exit code, stdout, stderr) of each, by rank.

    The exit code is negative for a signal, as of `subprocess`. All are killed after `seconds`; and so is a
    stopped one when no other runs. `arguments` are `sys.argv[1:]`; `environment` is added to each rank's;
    `imports`: modules that the server has imported from now on. `device`: what "cpu" means in
    `Config(device=…)`, see `devices` in lagging/lane.py.
    """
    # All that a process of the late device starts may know that device.
    of = {"device": device or DEVICE, "lagging": DEVICE == "lagging"}
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, contextlib.ExitStack() as at_end:
        for rank in range(world):
            names = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            with open(f"{folder}/out{rank}", "wb") as out, open(f"{folder}/err{rank}", "wb") as err:
                child = Child(
                    [sys.executable, "-c", script, *arguments],
                    **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err},
                    **{"imports": imports, "rank": of, "start_new_session": True},
                    env={**os.environ, **names, **(environment or {})},
                )
            ranks.append(child)
            at_end.callback(_end, child)
        _wait(ranks, time.monotonic() + seconds)
        said = [[Path(folder, f"{name}{r}").read_text() for name in ("out", "err")] for r in range(world)]
    return [(child.returncode, out, err) for child, (out, err) in zip(ranks, said, strict=True)]


def _wait(ranks: Sequence[Child], deadline: float) -> None:
    while left := [child for child in ranks if child.poll() is None]:
        if time.monotonic() > deadline or all(map(_is_stopped, left)):
            for child in left:
                child.kill()
                child.wait()
        time.sleep(0.005)


def _is_stopped(child: Child) -> bool:
    state = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return state is not None and state.si_code == os.CLD_STOPPED


def _end(child: Child) -> None:
    """Kill a rank with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()  # one that has no group yet
    child.wait()


def all_well(results: list[Result]) -> list[str]:
    """Return what the ranks printed; fail if one did not exit with 0."""
    for rank, (code, out, err) in enumerate(results):
        assert code == 0, f"rank {rank} exited with {code}:\n{out}\n{err}"
    return [out for _, out, _ in results]


def free_port() -> int:
    """Return a port that nobody listens on; and that no connection of another test gets meanwhile as its own
    end: not of those that the kernel gives out (ip(7), ip_local_port_range)."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(first, 20_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
