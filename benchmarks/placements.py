"""Every placement of a small model on the device, three steps each, against the CPU: bit for bit.

[Note: the same bits on a CPU and a GPU] The order of a sum is another on each device, so products of matrices
have other bits. The model here has no sum: it multiplies and adds element by element, each of which IEEE 754
rounds in one way, and the gradient of the sum that is its loss is one everywhere. Sums of the engine's own
(norms) have one order on all devices. So what the engine makes of it is the same on both, to the last bit,
and what differs is a fault.

Each case is a process of its own: one that hangs or crashes is a row like the others.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from devices import opened
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity.cli.verify import tensors_of
from infinity.core.config import UPDATES
from infinity.core.sizes import NORM_BLOCK, Tier

STEPS: Final = 3
BACKWARDS: Final = 2  # of a step
ELEMENTS: Final = 2 * NORM_BLOCK + 1000  # of a parameter: it has several chunks, and ends within one
UNITS: Final = 4
DTYPES: Final = ("fp32", "bf16", "fp16")
#: Of what differs, so many names are kept.
_NAMED: Final = 8


class Case(NamedTuple):
    """Where things are, and how they are updated."""

    parameters: str
    optimizer_state: str
    gradients: str
    update: str
    dtype: str

    @property
    def reference(self) -> Case:
        """What gives the same bits: a delayed update has bits of its own, by design, and one behind the
        backward does not clip."""
        update = self.update if self.update in ("delayed", "backward") else "sync"
        return Case("host", "host", "host", update, self.dtype)


def cases() -> list[Case]:
    """Return all, first some of which any two settings occur together: time may end before they do."""
    from tests.quick import cover  # not at the top: it needs pytest

    tiers = [tier.value for tier in Tier]
    every = [Case(*each) for each in itertools.product(tiers, tiers, tiers, UPDATES, DTYPES)]
    # What skips steps is not updated behind the backward.
    every = [case for case in every if (case.update, case.dtype) != ("backward", "fp16")]
    first = [every[at] for at in cover([each._asdict() for each in every], 2)]
    return first + [each for each in every if each not in first]


class Scale(nn.Module):
    """Multiplies and adds, element by element."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(elements))
        self.bias = nn.Parameter(0.1 * torch.randn(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


def train(
    case: Case, device: str, nvme: str, *, rows: int = 1, first: Callable[[Any, Any], None] | None = None
) -> dict[str, torch.Tensor]:
    """Return norms and loss scales of the steps, and all that the engine keeps, by name.

    Args:
        rows: of a batch. With several their gradients are summed, in an order that is the device's own.
        first: called in each step before its first backward, with the optimizer and that backward.
    """
    torch.set_num_threads(1)
    with opened(device) as named:
        config = infinity.Config(
            **case._asdict(),
            device=named,
            nvme=nvme,
            threads=1,
            units=["Scale"],
            chunk_elements=NORM_BLOCK,
            # Little, where nothing stays there: units come and go.
            device_memory="64MiB" if "device" in case else "4MiB",
            host_memory="128MiB",
            max_grad_norm=1.0 if case.update != "backward" else None,
            accumulation=BACKWARDS if case.update == "backward" else None,
            loss_scale=2.0**21,  # the first step of fp16 overflows with it
        )
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Scale(ELEMENTS) for _ in range(UNITS)))
        model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
        optimizer.delayed_from = 1
        found: dict[str, torch.Tensor] = {}
        try:
            for step in range(STEPS):
                for turn in range(BACKWARDS):
                    x, wanted = (torch.randn(rows, ELEMENTS).squeeze(0).to(device) for _ in range(2))

                    def backward(x: torch.Tensor = x, wanted: torch.Tensor = wanted) -> None:
                        loss = (model(x).float() * (wanted / 256)).sum()
                        optimizer.scale(loss).backward()

                    if first is not None and not turn:
                        first(optimizer, backward)
                    backward()
                scale = optimizer.loss_scale
                optimizer.step()
                optimizer.zero_grad()
                norm = infinity.metrics(optimizer)["grad_norm"]
                found[f"step {step}"] = torch.tensor([norm, scale], dtype=torch.float64)
            return found | tensors_of(model, optimizer)
        finally:
            infinity.close(optimizer)


# -- processes --------------------------------------------------------------------------------


def _child(case: Case, device: str, folder: str, answer: Connection) -> None:
    """Train a case; tell how it compares with the reference, or keep it as one where there is none."""
    reference = Path(folder, f"{'-'.join(case.reference)}.safetensors")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as nvme:
            found = train(case, device, nvme)
        if not reference.exists():
            kept = {name: value.contiguous().clone() for name, value in found.items()}
            save_file(kept, reference)
            answer.send({"verdict": "reference"})
            return
        wanted = load_file(reference)
        differ = [name for name, value in wanted.items() if not same(found[name], value)]
        row: dict[str, Any] = {"verdict": "differs" if differ else "same"}
        if differ:
            row |= {"differ": len(differ), "of": len(wanted), "names": differ[:_NAMED]}
        answer.send(row)
    except BaseException as error:
        answer.send({"verdict": "error", "error": f"{type(error).__name__}: {error}"[:1500]})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[other.dtype.itemsize]
    return one.dtype == other.dtype and torch.equal(one.view(integer), other.view(integer))


class _Running(NamedTuple):
    process: Any
    answer: Connection
    began: float


def rows_of(
    wanted: Sequence[Case],
    device: str,
    folder: str,
    *,
    at_once: int,
    seconds: float,
    left: Callable[[], float],
) -> Iterator[dict[str, Any]]:
    """Run cases, each in a process of its own; yield a row for each that was begun.

    Args:
        at_once: processes at the same time.
        seconds: that one may take.
        left: says how much time there is for all.
    """
    context = multiprocessing.get_context("forkserver")  # its children have imported all, and no device yet
    context.set_forkserver_preload([__name__])
    todo, running = list(reversed(wanted)), dict[Case, _Running]()
    try:
        while running or (todo and left() > 0):
            while todo and len(running) < at_once and left() > 0:
                case = todo.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(case, device, folder, theirs))
                process.start()
                theirs.close()
                running[case] = _Running(process, ours, time.monotonic())
            wait([one.answer for one in running.values()], timeout=0.2)
            for case, one in list(running.items()):
                row = _row(one, min(seconds, time.monotonic() - one.began + left()))
                if row is not None:
                    del running[case]
                    yield {"case": "-".join(case), **row, "seconds": round(time.monotonic() - one.began, 2)}
    finally:
        for one in running.values():
            one.process.kill()


def _row(one: _Running, most: float) -> dict[str, Any] | None:
    """Return what came of a process; None: it is under way."""
    row: dict[str, Any] | None = None
    if one.answer.poll():
        try:
            row = one.answer.recv()
        except EOFError:
            one.process.join(5)
            code = one.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            row = {"verdict": "error", "error": f"the process ended without a word: {how}"}
    elif time.monotonic() - one.began > most:
        row = {"verdict": "timed out"}
    if row is not None:
        one.process.join(5 if row["verdict"] != "timed out" else 0)  # it closes what it has
        one.process.kill()
        one.answer.close()
    return row


def compare(
    chosen: Sequence[Case], device: str, directory: str, *, left: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case that there was time for; the first ones are the CPU's own."""
    at_once = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        limits: dict[str, Any] = {"at_once": at_once, "seconds": 120, "left": left}
        for row in rows_of(sorted({case.reference for case in chosen}), "cpu", folder, **limits):
            yield {**row, "case": f"cpu {row['case']}"}
        yield from rows_of(chosen, device, folder, **limits)
