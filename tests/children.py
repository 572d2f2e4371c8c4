"""Child processes that need not import torch: forks of one process that has.

Importing torch and the engine costs a process seconds of a core. So one server without threads imports them
once for all tests of a worker. `Child` is a `subprocess.Popen`: a command line of this interpreter whose
environment changes nothing that a process reads at its start becomes a fork of the server, and any other a
process as usual. The ranks of `ranks.py` are forks of it whatever their environment. A fork is a whole
interpreter all the same: its uncaught exception goes through `sys.excepthook`, and it ends by the
interpreter's own exit.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[1])
#: Libraries read these as they are loaded, and the interpreter as it starts.
_AT_THE_START = (
    "ATEN_",
    "CUDA",
    "GLIBC",
    "HF_",
    "INFINITY_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "TORCH",
)
#: But not these: `_become` sees to the first, and conftest.py and torch's compiler set the others in tests.
_OTHERWISE = {"OMP_NUM_THREADS", "INFINITY_INSIDE_OF_A_TEST", "TORCHINDUCTOR_CACHE_DIR"}
#: Tests change the environment; the server has that of the beginning.
_ENVIRONMENT = dict(os.environ)
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Child(subprocess.Popen[Any]):
    """A process as of `subprocess.Popen`.

    Args:
        cold: begin a new interpreter, whatever the command line.
        imports: modules that the server has imported from now on.
        rank: makes the process a fork of the server in any environment. It says what `_serve` and `_do` know
            of ranks.
    """

    def __init__(
        self,
        args: list[str],
        *,
        cold: bool = False,
        imports: Sequence[str] = (),
        rank: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self._of_server = {"imports": list(imports), "rank": rank}
        self._cold = cold or bool(set(more) & {"preexec_fn", "executable", "shell", "umask", "user", "group"})
        self._new_session = bool(more.get("start_new_session"))
        super().__init__(args, **more)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """Called by `Popen` with the pipes that it has made."""
        cwd, env = rest[4], rest[5]
        parsed = None if self._cold else _parsed(args)
        environment = dict(os.environ if env is None else env)
        if parsed is None or (self._of_server["rank"] is None and not _is_of_the_server(environment)):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        fds = [0 if p2cread == -1 else p2cread, 1 if c2pwrite == -1 else c2pwrite]
        fds.append(2 if errwrite == -1 else errwrite)
        request = {
            **parsed,
            **self._of_server,
            "cwd": os.fspath(cwd or os.getcwd()),
            "environment": environment,
            "session": self._new_session,
        }
        self.pid = _server().fork(request, fds)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    args: list[str], *, timeout: float, check: bool = False, cold: bool = False, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, with a `Child`, whose output is captured."""
    with Child(args, cold=cold, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except BaseException:
            child.kill()
            raise
        done = subprocess.CompletedProcess(args, child.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _parsed(args: Any) -> dict[str, Any] | None:
    """Return what a command line of this interpreter runs; None for any other command."""
    if not isinstance(args, (list, tuple)) or os.fspath(args[0]) != sys.executable:
        return None
    left = [os.fspath(arg) for arg in args[1:]]
    options: dict[str, Any] = {"unbuffered": False, "quiet": False}
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option == "-u":
            options["unbuffered"] = True
        elif option == "-W":
            if left.pop(0) != "ignore":
                return None
            options["quiet"] = True
        elif option in ("-c", "-m"):
            return {**options, "kind": option, "what": left[0], "arguments": left[1:]}
        else:
            return None
    return {**options, "kind": "file", "what": left[0], "arguments": left[1:]} if left else None


def _is_of_the_server(environment: Mapping[str, str]) -> bool:
    names = {*_ENVIRONMENT, *environment} - _OTHERWISE
    differ = {name for name in names if _ENVIRONMENT.get(name) != environment.get(name)}
    return not any(name.startswith(_AT_THE_START) for name in differ)


class _Server:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join(filter(None, [ROOT, _ENVIRONMENT.get("PYTHONPATH")]))
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**_ENVIRONMENT, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
            )
        self._socket, self._turn = ours, threading.Lock()
        atexit.register(self._end)

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """Return the process number of a fork that does `request`. It becomes a child of this process: the
        kernel gives what loses its parent to the nearest ancestor that asks for it, prctl(2)."""
        with (
            self._turn,
            os.fdopen(os.memfd_create("request"), "wb") as file,
        ):  # a packet is too small for some
            file.write(json.dumps(request).encode())
            file.flush()
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [b"fork"], [*fds, file.fileno()])
                answer = self._socket.recv(64)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the process that forks children has ended")
        return int(answer)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait(timeout=30)


_SERVER: _Server | None = None


def _server() -> _Server:
    global _SERVER
    if _SERVER is None:
        _SERVER = _Server()
    return _SERVER


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request. Return the request and its three files in the fork, None at the end."""
    _prepare()
    while True:
        said, fds, _, _ = socket.recv_fds(connection, 16, 4)
        if not said:
            return None
        *files, file = fds
        with os.fdopen(file, "rb") as wanted:
            wanted.seek(0)
            request = json.load(wanted)
        for name in request["imports"]:
            importlib.import_module(name)
        if (rank := request["rank"]) and rank["lagging"]:  # torch is told of that device once
            importlib.import_module("tests.lagging.cuda").make_known()
        gc.freeze()  # or the collector of each child would copy every page
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid:
                os.write(writing, str(pid).encode())
                os._exit(0)
            for fd in (reading, writing, connection.detach()):
                os.close(fd)
            return request, files
        os.close(writing)
        os.waitpid(middle, 0)  # from now on the fork is the child of the test
        with os.fdopen(reading, "rb") as answer:
            connection.send(answer.read())
        for fd in files:
            os.close(fd)


def _prepare() -> None:
    """Import what children use, and start no thread."""
    import torch.distributed
    from torch import nn

    import infinity
    import infinity.cli.main
    from infinity.hardware import comm  # noqa: F401
    from tests import inner  # noqa: F401

    for name in infinity.__all__:  # their modules are imported when they are first used
        getattr(infinity, name)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # the first optimizer imports torch's compiler
    gc.collect()


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Make this process what begins with the command line of `request`."""
    import torch

    if request["session"]:
        os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
        os.close(fd)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    if request["quiet"]:
        sys.warnoptions.append("ignore")
        warnings.simplefilter("ignore")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    unbuffered = request["unbuffered"]
    for number, name in ((1, "stdout"), (2, "stderr")):
        binary = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        errors = "strict" if number == 1 else "backslashreplace"
        stream = io.TextIOWrapper(binary, errors=errors, write_through=unbuffered, line_buffering=number == 2)
        setattr(sys, name, stream)


def _do(request: dict[str, Any]) -> None:
    what = request["what"]
    sys.argv = ["-c" if request["kind"] == "-c" else what, *request["arguments"]]
    if request["kind"] == "-m":
        sys.path[0] = os.getcwd()
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    if request["rank"]:
        code = compile(what, "<rank>", "exec")
        names = {"__name__": "__main__"}
        if request["rank"]["device"] == "cpu":
            exec(code, names)
            return
        from tests.lagging.lane import devices

        with devices(request["rank"]["device"]):
            exec(code, names)
            names.clear()  # what the script leaves closes on its device
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if request["kind"] == "-c":
        sys.path[0] = ""
        code = compile(what, "<string>", "exec")
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(what))
        main.__file__ = what
        code = compile(Path(what).read_bytes(), what, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__" and (found := _serve(socket.socket(fileno=int(sys.argv[1])))):
    _become(*found)
    _do(found[0])
