"""Runs a script as N ranks: processes with torchrun's environment, forked from one that has imported torch.

Importing torch and the engine costs each process seconds of a core. So one process, a server without
threads, imports them once for all tests, and forks the ranks. A rank is a whole interpreter all the same: its
uncaught exception goes through `sys.excepthook`, and it ends by the interpreter's own exit, not by
`os._exit`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
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

Result = tuple[int, str, str]
#: The device of ranks for which no other is named (`devices` in lagging/lane.py): that of `pytest --device`.
DEVICE = "cpu"
_server: subprocess.Popen[str] | None = None


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
    `imports`: modules that all ranks forked from now on have imported. `device`: what "cpu" means in
    `Config(device=…)`, see `devices` in lagging/lane.py.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        request = {
            "world": world,
            "script": script,
            "arguments": arguments,
            "seconds": seconds,
            "environment": dict(environment or {}),
            "imports": imports,
            "device": device or DEVICE,
            "lagging": DEVICE == "lagging",  # all that this process starts may know that device
            "folder": folder,
        }
        server = _started()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks the ranks has ended")
        said = [[Path(folder, f"{name}{r}").read_text() for name in ("out", "err")] for r in range(world)]
        return [(code, out, err) for code, (out, err) in zip(json.loads(answer), said, strict=True)]


def all_well(results: list[Result]) -> list[str]:
    """Return what the ranks printed; fail if one did not exit with 0."""
    for rank, (code, out, err) in enumerate(results):
        assert code == 0, f"rank {rank} exited with {code}:\n{out}\n{err}"
    return [out for _, out, _ in results]


def _started() -> subprocess.Popen[str]:
    global _server
    if _server is None or _server.poll() is not None:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        _server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        atexit.register(_end, _server)
    return _server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def _serve() -> dict[str, object] | None:
    """Fork ranks for each request on stdin. Return the request in a rank, None at the end of requests."""
    _prepare()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        for name in request["imports"]:
            importlib.import_module(name)
        if request["lagging"]:  # torch is told of that device once, and not by each rank
            importlib.import_module("tests.lagging.cuda").make_known()
        gc.freeze()  # or each rank's collector would copy every page
        port = free_port()
        pids = []
        for rank in range(request["world"]):
            pid = os.fork()
            if pid == 0:
                requests.close()
                answers.close()
                _become(rank, port, request)
                return dict(request)
            pids.append(pid)
        print(json.dumps(_codes(pids, request["seconds"])), file=answers, flush=True)
    return None


def _prepare() -> None:
    """Import what ranks use, and start no thread."""
    import torch.distributed
    from torch import nn

    import infinity
    from infinity.hardware import comm  # noqa: F401
    from tests import inner  # noqa: F401

    for name in infinity.__all__:  # their modules are imported when they are first used
        getattr(infinity, name)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # the first optimizer imports torch's compiler


def free_port() -> int:
    """Return a port that nobody listens on; and that no connection of another test gets meanwhile as its own
    end: not of those that the kernel gives out (ip(7), ip_local_port_range)."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(first, 20_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _become(rank: int, port: int, request: dict[str, object]) -> None:
    """Make this process a rank."""
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{request['folder']}/{name}{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["", *request["arguments"]]  # type: ignore[misc]
    names = {"RANK": rank, "WORLD_SIZE": request["world"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": request["world"]}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= request["environment"]  # type: ignore[arg-type]


def _codes(pids: list[int], seconds: float) -> list[int]:
    """Wait for all; return their exit codes."""
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    deadline = time.monotonic() + seconds
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            if len(codes) + len(stopped) == len(pids) or time.monotonic() > deadline:
                for left in set(pids) - set(codes):
                    os.kill(left, signal.SIGKILL)
            time.sleep(0.005)
        elif os.WIFSTOPPED(status):
            stopped.add(pid)
        else:
            codes[pid] = os.waitstatus_to_exitcode(status)
            stopped.discard(pid)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    if (request := _serve()) is not None:
        code = compile(str(request["script"]), "<rank>", "exec")
        if request["device"] == "cpu":
            exec(code, {"__name__": "__main__"})
        else:
            from tests.lagging.lane import devices

            names = {"__name__": "__main__"}
            with devices(str(request["device"])):
                exec(code, names)
                names.clear()  # what the script leaves closes on its device
