"""`infinity bench adam`: how fast the CPU's Adam is, beside what memory allows.

One update of n parameters reads a bf16 gradient, the fp32 master and the moments, and writes the master,
the moments and a bf16 copy: with fp32 moments 14 B each way, with bf16 ones 10 B. The ceiling is the same
loads and stores without the arithmetic, through the caches and past them, the better of the two, with the
same threads.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, get_args

import click
import torch

from infinity.cli.console import finish, table_of, wide_console
from infinity.cli.options import json_option, words_option
from infinity.core.config import Config, StateDtype
from infinity.core.errors import BudgetError
from infinity.core.sizes import MiB, ceil_to, format_size
from infinity.hardware import cpu_adam
from infinity.hardware.probe import available_host_memory
from infinity.planning.parts import ADAM, Moment, moments_of, update_nbytes
from infinity.storage.memory import HostMapping

#: Forms of the moments.
MOMENTS: Final[tuple[StateDtype, ...]] = get_args(StateDtype)
_BF16: Final = 1  # as the native module numbers dtypes
_ADAMW: Final = cpu_adam.Adam(0.9, 0.999, 1e-8)
_SCALARS: Final = (1e-3, 0.01, 1.0)  # lr, weight_decay, grad_scale
_native: Final[Any] = vars(cpu_adam)["_native"]  # hardware alone imports native modules


def check_memory(what: str, need: int, have: int, cure: str, where: str = "host memory") -> None:
    """Raise BudgetError if `what` needs more bytes than there are."""
    if need > have:
        raise BudgetError(
            f"{what} does not fit {where}",
            expected=f"about {format_size(need)}",
            found=f"{format_size(have)} available",
            cure=cure,
        )


class AdamWork:
    """State, gradient and copy of `numel` parameters, and updates of them; `moments`: in which form.

    Attributes:
        moved: bytes that are read and written of one parameter.

    Raises:
        BudgetError: it does not fit host memory.
    """

    def __init__(self, numel: int, moments: StateDtype = "fp32", *, split_master: bool = False) -> None:
        kept = moments_of(ADAM, Config(optimizer_state_dtype=moments))
        self.moved = update_nbytes(numel, kept, 2, 0 if split_master else 2) / numel
        half = Moment("", "bf16")
        master = half if split_master else Moment("master", "fp32")
        tensors = [master, *kept, half, half]  # then gradient and copy
        nbytes, free = sum(each.nbytes(numel) for each in tensors), available_host_memory() * 9 // 10
        most = free // 2 * numel // nbytes
        check_memory("the state of so many parameters", nbytes, free, f"--params {most}")
        self.numel, self._is_coded = numel, moments == "8bit"
        self._mapping = HostMapping(nbytes + len(tensors) * 2 * MiB, populate=True)
        at = 0
        self._tensors: list[torch.Tensor] = []
        for each in tensors:
            self._tensors.append(self._mapping.tensor(at, each.nbytes(numel), each.dtype))
            at += ceil_to(each.nbytes(numel), 4096)
        if split_master:
            self._tensors[0] = self._tensors[0].view(torch.int16)
        self.reset()

    def reset(self) -> None:
        """Put plausible values there, as before the first update."""
        master, *moments, grad, copy = self._tensors
        grad.normal_(generator=torch.Generator().manual_seed(0))
        copy.copy_(grad)
        if master.dtype is torch.int16:
            master.zero_()
        else:
            master.copy_(grad)
        if self._is_coded:  # the first update makes the codes
            for moment in moments:
                moment.zero_()
        else:
            moments[0].copy_(grad).mul_(0.1)
            moments[1].copy_(moments[0]).square_()
        self._step = 0

    def update(self) -> None:
        """Update all of it once."""
        self._step += 1
        master, *moments, grad, copy = self._tensors
        key = cpu_adam.rounding_key("", self._step)
        segment = cpu_adam.Segment(0, self.numel, 0, key, self._step, *_SCALARS, False, _ADAMW)
        cpu_adam.update_segments(master, moments, grad, copy, (segment,))

    def traffic(self, *, past_caches: bool) -> None:
        """Move the bytes of an update without its arithmetic; not of moments in 8 bits, nor of a split
        master. The values become meaningless."""
        *state, grad, copy = (tensor.data_ptr() for tensor in self._tensors)
        kind = int(self._tensors[1].dtype is torch.bfloat16)
        _native.measure(*state, kind, grad, _BF16, copy, _BF16, self.numel, past_caches)

    @contextlib.contextmanager
    def beside(self) -> Iterator[Callable[[], float]]:
        """Update on a thread for as long as a block lasts, as a step does beside its I/O; lend what says the
        parameters updated per second so far."""
        stop, updates, seconds = threading.Event(), 0, 0.0

        def run() -> None:
            nonlocal updates, seconds
            start = time.perf_counter()
            while not stop.is_set():
                self.update()
                updates, seconds = updates + 1, time.perf_counter() - start

        with ThreadPoolExecutor(1, "infinity-bench-adam") as pool:
            running = pool.submit(run)
            try:
                yield lambda: updates * self.numel / seconds if seconds else 0.0
            finally:
                stop.set()
        running.result()


def rate(call: Callable[[], Any], amount: int, repeats: int) -> list[float]:
    """Return `amount` per second of each of `repeats` calls, after one that warms up."""
    rates = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        rates.append(amount / (time.perf_counter() - start))
    return rates[1:]


def spread(values: Sequence[float]) -> float:
    """Return (most − least) / median."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """After a block, give the kernel its threads and instruction set back, and torch its threads."""
    isa, threads, of_torch = cpu_adam.isa(), cpu_adam.threads(), torch.get_num_threads()
    try:
        yield
    finally:
        cpu_adam.set_isa(isa)
        cpu_adam.set_threads(threads)
        torch.set_num_threads(of_torch)


@as_before()
def measure(
    numel: int,
    moments: StateDtype,
    isas: Sequence[str],
    threads: Sequence[int],
    repeats: int,
    *,
    split_master: bool = False,
) -> list[dict[str, Any]]:
    """Return one row of figures for each instruction set and number of threads. Of moments in 8 bits, and of
    a split master, there is no ceiling: None."""
    work = AdamWork(numel, moments, split_master=split_master)
    ways = [functools.partial(work.traffic, past_caches=past) for past in (False, True)]
    rows = []
    for count in threads:
        cpu_adam.set_threads(count)
        cpu_adam.set_isa(cpu_adam.available_isas()[-1])
        coded = moments == "8bit" or split_master
        ceiling = None if coded else max(statistics.median(rate(way, numel, repeats)) for way in ways)
        for isa in isas:
            cpu_adam.set_isa(isa)
            work.reset()
            rates = rate(work.update, numel, repeats)
            middle = statistics.median(rates)
            rows.append(
                {
                    "isa": isa,
                    "threads": count,
                    "parameters_per_second": middle,
                    "spread": spread(rates),
                    "gb_per_s": middle * work.moved / 1e9,
                    "ceiling_gb_per_s": ceiling and ceiling * work.moved / 1e9,
                    "of_ceiling": ceiling and middle / ceiling,
                }
            )
    return rows


@click.command("adam")
@click.option("--params", type=click.IntRange(min=1), default=16 * MiB, show_default=True, help="Parameters.")
@click.option("--moments", type=click.Choice(MOMENTS), default="fp32", show_default=True, help="Their form.")
@click.option("--split-master", is_flag=True, help="The master is the bf16 copy and its lower 16 bits.")
@words_option(
    *("--isa", "isas", cpu_adam.available_isas()[::-1], "Instruction set; may be given again. Default: all."),
    what="this machine has no such instruction set",
)
@click.option("--threads", type=click.IntRange(min=1), multiple=True, help="Default: 1 and all cores.")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@json_option
def adam_command(
    params: int,
    moments: StateDtype,
    split_master: bool,
    isas: tuple[str, ...],
    threads: tuple[int, ...],
    repeats: int,
    as_json: bool,
) -> None:
    """Measure the CPU's Adam for each instruction set, beside what memory allows."""
    counts = threads or tuple(sorted({1, cpu_adam.threads()}))
    chosen = isas or cpu_adam.available_isas()
    rows = measure(params, moments, chosen, counts, repeats, split_master=split_master)
    result = {
        "benchmark": "adam",
        "parameters": params,
        "moments": moments,
        "split_master": split_master,
        "repeats": repeats,
        "rows": rows,
    }
    finish(result, show, as_json=as_json)


def show(result: Mapping[str, Any]) -> None:
    """Print the result for a person."""
    table = table_of(
        *("ISA", "threads", "Mparam/s", "spread", "GB/s", "ceiling", "of ceiling"),
        title=f"CPU Adam, {result['parameters']:,} parameters: bf16 gradient → "
        f"{'split' if result['split_master'] else 'fp32'} master, {result['moments']} moments → bf16 copy",
    )
    for row in result["rows"]:
        most, share = row["ceiling_gb_per_s"], row["of_ceiling"]
        table.add_row(
            *(row["isa"], str(row["threads"]), f"{row['parameters_per_second'] / 1e6:,.0f}"),
            *(f"{row['spread']:.0%}", f"{row['gb_per_s']:.1f}"),
            *("–" if most is None else f"{most:.1f} GB/s", "–" if share is None else f"{share:.0%}"),
        )
    wide_console().print(table)
