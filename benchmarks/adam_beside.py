"""The CPU's Adam by threads and size of a chunk, alone and beside a busy device.

    python benchmarks/adam_beside.py --device cuda --output results.json

A busy device multiplies bf16 matrices while the link copies both ways, each on a stream of its own. The state
of 128 Mi parameters is updated over and over, a chunk at a time: no cache holds it. The result is written
anew after each figure.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import common
import internals
import torch
from devices import LAGGING, opened

THREADS: Final = (4, 8, 12, 15)
CHUNKS: Final = (4 << 20, 16 << 20, 64 << 20)
#: Parameters, width of a matrix, bytes of a copy, seconds of a figure.
PARAMETERS, WIDTH, COPIED, SECONDS = 128 << 20, 8192, 256 << 20, 0.4


class Loop:
    """One kind of work, which a thread gives to a stream of the device until the block ends.

    Attributes:
        done: what is over, in units of `amount` for each call.
    """

    def __init__(self, name: str, call: Callable[[], object], amount: float) -> None:
        self.name, self.done = name, 0.0
        self._call, self._amount = call, amount
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._error = error

    def _work(self) -> None:
        stream = torch.cuda.Stream()
        given: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                self._call()
                given.append(torch.cuda.Event(blocking=True))  # a wait that takes no core from Adam
                given[-1].record()
                if len(given) > 2:
                    given.popleft().synchronize()
                    self.done += self._amount
        stream.synchronize()

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def busy(device: torch.device, width: int, nbytes: int) -> Iterator[list[Loop]]:
    """Keep the device and the link at work inside of this."""
    with internals.pinned(device, nbytes) as (up, down), contextlib.ExitStack() as stack:
        a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        there, back = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        torch.cuda.synchronize()
        loops = [
            Loop("flops", lambda: torch.mm(a, b, out=out), 2.0 * width**3),
            Loop("h2d_bytes", lambda: there.copy_(up, non_blocking=True), nbytes),
            Loop("d2h_bytes", lambda: down.copy_(back, non_blocking=True), nbytes),
        ]
        for loop in loops:
            stack.enter_context(loop)
        yield loops


def window(
    call: Callable[[], object], amount: float, loops: Sequence[Loop], seconds: float
) -> dict[str, float]:
    """Return per second what `call`, which does `amount`, and the loops get done."""
    done, before, began = 0.0, [loop.done for loop in loops], time.perf_counter()
    while time.perf_counter() - began < seconds:
        call()
        done += amount
    took = time.perf_counter() - began
    rates = {loop.name: (loop.done - was) / took for loop, was in zip(loops, before, strict=True)}
    return {"parameters": done / took, **rates}


def measure(args: argparse.Namespace, device: torch.device, tell: Callable[[dict[str, Any]], None]) -> None:
    """Give `tell` each row: threads, elements of a chunk, and rates alone or beside."""
    smoke = args.device == LAGGING
    chunks, total, seconds = (CHUNKS, PARAMETERS, SECONDS) if not smoke else ((1 << 16,), 1 << 17, 0.01)
    cores = len(os.sched_getaffinity(0))
    counts = [count for count in THREADS if count < cores] or [1]
    works = {chunk: internals.updates(chunk, total) for chunk in chunks}
    for work in itertools.chain(*works.values()):
        work()

    def rows(loops: Sequence[Loop]) -> None:
        for count, (chunk, work) in itertools.product(counts, works.items()):
            internals.set_threads(count)
            turn = itertools.cycle(work)
            rates = window(lambda turn=turn: next(turn)(), chunk, loops, seconds)
            tell({"threads": count, "chunk": chunk, "busy": bool(loops), "per_second": rates})

    rows([])
    width, nbytes = (WIDTH, COPIED) if not smoke else (64, 1 << 16)
    with busy(device, width, nbytes) as loops:
        time.sleep(seconds)
        tell({"threads": 0, "busy": True, "per_second": window(lambda: time.sleep(0.01), 0, loops, seconds)})
        rows(loops)


def main() -> None:
    """Measure, say and store."""
    parser = common.arguments(__doc__, directory=False)
    parser.add_argument("--device", default="cuda", help="cuda (or lagging: devices.py)")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    about = {"hardware": common.hardware(), "versions": common.versions(), "parameters": PARAMETERS}

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        common.publish(args.output, {"benchmark": "adam_beside", **about, "rows": rows})
        print(row, flush=True)

    with opened(args.device):
        measure(args, torch.device(args.device, 0), tell)


if __name__ == "__main__":
    main()
