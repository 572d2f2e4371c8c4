"""What the benchmarks share: children that take turns, what a machine is, results as JSON.

A contestant is a child process that prints ``@@ {json}`` once when it is ready and once after each
line that it is sent; anything else that it prints is kept as its log. Contestants take turns, so a
slow moment of the machine meets all of them, and nobody's memory is counted as another's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

MARK = "@@ "
ROOT = Path(__file__).resolve().parent.parent
#: GPT-2 with 203 M parameters, the size that the peers' figures are for.
GPT2 = {"layers": 12, "width": 1024, "vocabulary": 50257, "positions": 256}
#: One AdamW for everybody.
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class ChildError(RuntimeError):
    """A contestant ended, or did not answer in time. `log` is the end of what it printed."""

    def __init__(self, what: str, code: int | None, log: str) -> None:
        said = [line for line in log.splitlines() if line.strip()]
        self.reason = next((x for x in reversed(said) if "Error" in x), said[-1] if said else "").strip()
        if code is not None and code < 0:
            self.reason = f"ended by {signal.Signals(-code).name}: is there enough memory?"
        super().__init__(f"{what}: {self.reason} (exit status {code})\n{log}")
        self.code = code
        self.log = log


class Child:
    """One contestant. `command` is a whole command line; `timeout` is for each answer, in seconds."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: dict[str, str] | None = None, timeout: float = 300
    ) -> None:
        self.name = name
        self.timeout = timeout
        self._log: deque[str] = deque(maxlen=400)
        self._answers: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env={**os.environ, **(env or {})},
        )
        with contextlib.suppress(OSError):  # if memory runs out, this and nobody else's work is to end
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")
        threading.Thread(target=self._listen, name=f"{name}-output", daemon=True).start()
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process, for /proc."""
        return self._process.pid

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line; return the answer, with what the process took of memory and drive.

        Raises:
            ChildError: it ended or is too slow.
        """
        before = io_bytes(self.pid)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, which _answer says with its log
        answer = self._answer()
        after = io_bytes(self.pid)
        answer["read_bytes"], answer["written_bytes"] = (a - b for a, b in zip(after, before, strict=True))
        return answer

    def close(self) -> None:
        """Ask it to end; after 20 s kill it."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)

    def log(self) -> str:
        """Return the end of what it printed."""
        return "".join(self._log)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                if line.startswith(MARK):
                    self._answers.append(json.loads(line[len(MARK) :]))
                else:
                    self._log.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _answer(self) -> dict[str, Any]:
        until = time.monotonic() + self.timeout
        with self._changed:
            while not self._answers:
                if self._ended:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.5))
            if self._answers:
                return self._answers.popleft()
            ended = self._ended
        if not ended:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        what = "ended" if ended else f"did not answer in {self.timeout:.0f} s"
        raise ChildError(f"{self.name} {what}", self._process.returncode, self.log()[-6000:])


def tell(answer: dict[str, Any]) -> None:
    """Answer the parent (in a child)."""
    print(MARK + json.dumps(answer), flush=True)


def lines() -> Iterator[str]:
    """Yield what the parent asks, until it asks no more (in a child)."""
    for line in sys.stdin:
        yield line.strip()


class Watch(threading.Thread):
    """Looks at the anonymous memory of processes, from outside of them, every 20 ms."""

    def __init__(self, pids: dict[str, int]) -> None:
        super().__init__(name="watch", daemon=True)
        self._pids = pids
        self._done = threading.Event()
        self.anonymous = dict.fromkeys(pids, 0)

    def run(self) -> None:
        """Look until `stop`."""
        while not self._done.wait(0.02):
            for name, pid in self._pids.items():
                self.anonymous[name] = max(self.anonymous[name], status(pid).get("RssAnon", 0))

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self.join()


def status(pid: int) -> dict[str, int]:
    """Return the sizes in /proc/PID/status, in bytes; empty when the process is gone."""
    found = {}
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


def available_memory() -> int:
    """Return the bytes of memory that could still be taken (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def io_bytes(pid: int) -> tuple[int, int]:
    """Return the bytes that a process made the drive read and write, so far."""
    try:
        pairs = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (OSError, ValueError):
        return 0, 0
    return int(pairs["read_bytes"]), int(pairs["write_bytes"])


def forget_peak(pid: int | str = "self") -> None:
    """Make VmHWM count from here on."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def deepspeed_child(python: str, arguments: Sequence[str], *, timeout: float) -> Child:
    """Start deepspeed_peer.py with an interpreter that has DeepSpeed; the first start compiles."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not resolve(): a virtual environment's python is a link, and ninja stands beside the link.
    beside = str(Path(python).absolute().parent)
    env = {
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "PATH": beside + os.pathsep + os.environ.get("PATH", ""),
    }
    script = str(Path(__file__).with_name("deepspeed_peer.py"))
    return Child("deepspeed", [python, "-u", script, *arguments], env=env, timeout=timeout)


# -- what is measured on ----------------------------------------------------------------------


def drive(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what is known of the drive under `directory`."""
    number = os.stat(directory).st_dev
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == f"{os.major(number)}:{os.minor(number)}":
                found["file_system"] = after.split()[0]
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    with contextlib.suppress(OSError):
        block = block.resolve(strict=True)
        if (block / "partition").exists():
            block = block.parent
        found["device"] = block.name
        for key, path in (
            ("model", "device/model"),
            ("rotational", "queue/rotational"),
            ("scheduler", "queue/scheduler"),
            ("max_request_kb", "queue/max_sectors_kb"),
            ("blocks_of_512", "size"),
        ):
            with contextlib.suppress(OSError):
                found[key] = (block / path).read_text().strip()
    found["free_bytes"] = shutil.disk_usage(directory).free
    return found


def hardware(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return what this machine is."""
    cpu = platform.processor() or "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "transparent_hugepage": huge.read_text().strip() if huge.exists() else None,
        "load_average_at_start": os.getloadavg()[0],
    }
    if directory is not None:
        found["drive"] = drive(directory)
    return found


def versions(*packages: str) -> dict[str, str | None]:
    """Return versions of this interpreter, of infinity's commit and of `packages`."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    git = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    found["commit"] = git.stdout.strip() or None
    return found


# -- results ----------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    """Return the median, or nan of nothing."""
    return statistics.median(values) if values else float("nan")


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return how many times as fast the first is: ratio of the medians, median of the ratios of the
    rounds, and the lowest and highest of those."""
    ratios = [t / o for o, t in zip(ours, theirs, strict=True)]
    return {
        "of_medians": round(median(theirs) / median(ours), 4),
        "median_of_rounds": round(median(ratios), 4),
        "lowest": round(min(ratios), 4),
        "highest": round(max(ratios), 4),
    }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    # So that a benchmark that is told to end takes its files and children along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default=".", help="on the drive to measure; a folder is made in it")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (a median needs 7)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("DEEPSPEED_PYTHON"),
        help="an interpreter that has DeepSpeed and transformers",
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    for name in ("layers", "width", "vocabulary", "positions"):
        parser.add_argument(f"--{name}", type=int, default=GPT2[name])
    parser.add_argument("--tokens", type=int, default=128, help="per step, in one sequence")
    return parser


@contextlib.contextmanager
def scratch(directory: str) -> Iterator[str]:
    """Lend a folder on the drive that is measured; remove it afterwards, whatever it holds."""
    path = os.path.join(os.path.abspath(directory), f"infinity-benchmark-{os.getpid()}")
    os.makedirs(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result with the command and the time; without a path only what was printed stays."""
    if path is None:
        return
    result = {
        "benchmark": result.pop("benchmark"),
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *_public(sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _public(words: Sequence[str]) -> list[str]:
    """Return the command line without the paths of this machine."""
    return [os.path.basename(w.rstrip("/")) if w.startswith("/") else w for w in words]


# -- the model --------------------------------------------------------------------------------


def gpt2(layers: int, width: int, vocabulary: int, positions: int) -> Any:
    """Return `transformers`' GPT-2, without dropout, with the values of seed 0."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=max(1, width // 64),
            vocab_size=vocabulary,
            n_positions=positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def batch(vocabulary: int, tokens: int) -> Any:
    """Return the one batch of every step: (1, tokens) int64."""
    import torch

    return torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
