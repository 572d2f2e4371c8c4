"""How soon Ctrl-C ends a run whose drive answers no more.

    python benchmarks/interrupts.py --rounds 10 --output interrupts.json

Needs root, FUSE and what builds tests/faultfs.c. Everything of a small run is on a drive whose server is
stopped (SIGSTOP) as a forward, a backward, a `step()`, a save or a sleep begins: from then on
whoever reads, writes, opens, removes or asks anything there waits. SIGINT comes a moment later. Printed are
seconds, median and most, until the run has "said" that it was interrupted; until all of ours is "over"
(Python takes torch's modules apart then); until its main thread has "ended"; and until it is "gone".
What waits in the kernel for a block device hears no signal, so "gone" comes when the driver gives up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import hardware, publish, versions
from runner import ROOT

sys.path.insert(0, str(ROOT))

from tests.faults import FaultFS, block_drive, build, missing_means

PLACES = ("forward", "backward", "step", "save", "sleep")
KINDS = ("said", "over", "ended", "gone")
_LIMIT = 20.0  # seconds for an end
_BEGIN = 120.0  # seconds until a run is where it is to be
_DRIVE = 192 << 20  # bytes
_EXITING = 0x4  # PF_EXITING, of the flags in /proc/PID/stat

#: Says where it is, and waits for a line before it goes on, in the third round.
_GATE = """
import faulthandler, functools, signal, sys
from infinity.core.at_exit import at_end
faulthandler.register(signal.SIGUSR1, all_threads=True)
place, times = sys.argv[1], {}
at_end(lambda: sys.stderr.write("over\\n"), last=True)
def gate(name, call):
    @functools.wraps(call)
    def gated(*args, **kwargs):
        times[name] = times.get(name, 0) + 1
        if name == place and times[name] == 3:
            print("at", name, flush=True)
            sys.stdin.readline()
        return call(*args, **kwargs)
    return gated
"""
_LOOP = (
    _GATE
    + """
import contextlib, time, torch
import infinity
from torch import nn
config = infinity.Config(
    nvme=sys.argv[2], device="cpu", dtype="fp32", device_memory="2MiB", host_memory="64MiB",
    parameters="nvme", optimizer_state="nvme", gradients="nvme", chunk_elements=65536,
)
with infinity.init(config) if sys.argv[3] == "block" else contextlib.nullcontext():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
forward, backward = gate("forward", model), gate("backward", torch.Tensor.backward)
step, save = gate("step", optimizer.step), gate("save", infinity.save)
sleep = gate("sleep", lambda: time.sleep(60 * (times["sleep"] == 3)))
x = torch.randn(32, 256)
while True:
    loss = forward(x).square().mean()
    backward(loss)
    step()
    optimizer.zero_grad()
    save(optimizer, sys.argv[2] + "/checkpoints", keep_last=1)
    sleep()
"""
)


@contextlib.contextmanager
def started(place: str, drive: str, means: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run."""
    arguments = [sys.executable, "-u", "-c", _LOOP, place, drive, means]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    default = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    process = subprocess.Popen(arguments, cwd=ROOT, preexec_fn=default, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        process.kill()


def read_until(process: subprocess.Popen[bytes], words: bytes) -> None:
    """Read what it says until it says `words`."""
    assert process.stdout is not None
    assert process.stderr is not None
    said, until = b"", time.monotonic() + _BEGIN
    while words not in said:
        more = b""
        if select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            process.kill()
            raise RuntimeError(f"no {words!r}: {said[-500:]!r} {process.stderr.read()!r}")
        said += more


def is_ending(pid: int) -> bool:
    """Return whether the main thread has left Python for good."""
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return after[0] == "Z" or bool(int(after[6]) & _EXITING)


def threads(pid: int) -> list[str]:
    """Return what each thread waits for."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            at = (task / "wchan").read_text()
            found.append(f"{(task / 'comm').read_text().strip()}:{at}")
    return sorted(found)


def one(place: str, means: str, binary: Path, look: float | None) -> dict[str, Any]:
    """Interrupt one run; return the seconds that it took."""
    with (
        tempfile.TemporaryDirectory(prefix="infinity-interrupts-") as name,
        FaultFS(binary, Path(name) / "fs", capacity=2 * _DRIVE) as fs,
        block_drive(fs, Path(name), _DRIVE)
        if means == "block"
        else contextlib.nullcontext(str(fs.path)) as drive,
    ):
        try:
            with started(place, drive, means) as process:
                assert process.stdin is not None
                assert process.stderr is not None
                read_until(process, f"at {place}".encode())
                fs.stop()
                process.stdin.write(b"\n")
                process.stdin.flush()
                time.sleep(random.uniform(0.05, 0.6))
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
                took: dict[str, Any] = dict.fromkeys(KINDS)
                err, held = b"", []
                while time.monotonic() < began + _LIMIT and took["gone"] is None:
                    now = time.monotonic() - began
                    if select.select([process.stderr], [], [], 0.005)[0]:
                        err += os.read(process.stderr.fileno(), 1 << 16)
                    if took["said"] is None and (b"KeyboardInterrupt" in err):
                        took["said"] = now
                    if took["over"] is None and b"over\n" in err:
                        took["over"] = now
                    if took["ended"] is None and is_ending(process.pid):
                        took["ended"] = now
                    if process.poll() is not None:
                        took["gone"] = now
                    if took["ended"] is not None and now > took["ended"] + 2:
                        break
                    if look is not None and now > look and not held and took["ended"] is None:
                        held = threads(process.pid)
                        process.send_signal(signal.SIGUSR1)
                took["code"] = process.returncode
                took["held"] = held
                took["err"] = err.decode(errors="replace")[-12000:]
                return took
        finally:
            fs.unmount()


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--place", choices=PLACES, action="append")
    parser.add_argument("--drive", choices=("block", "fuse"), default="block", help="fuse: as a network's")
    parser.add_argument("--look", type=float, help="seconds after which a run says where its threads are")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if (missing := missing_means()) is not None:
        parser.error(missing)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="infinity-interrupts-") as name:
        binary = build(Path(name))
        for _ in range(options.rounds):
            for place in options.place or PLACES:
                found.setdefault(place, []).append(one(place, options.drive, binary, options.look))
    rows: dict[str, Any] = {}
    for case, runs in found.items():
        cells, rows[case] = [], {"runs": len(runs)}
        for key in KINDS:
            seen = [run[key] for run in runs if run[key] is not None]
            cells.append(f"{statistics.median(seen):.2f} (most {max(seen):.2f})" if seen else "-")
            cells[-1] += f" x{len(seen)}" if len(seen) < len(runs) else ""
            figures = {"median": statistics.median(seen), "most": max(seen)} if seen else {}
            rows[case][key] = {"seen": len(seen), **figures}
        told = "  ".join(f"{key} {cell:21}" for key, cell in zip(KINDS, cells, strict=True))
        sys.stdout.write(f"{case:15} {told}\n")
    result = {"benchmark": "interrupts", "hardware": hardware(), "versions": versions(), "seconds": rows}
    publish(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
