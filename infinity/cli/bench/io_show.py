"""What `bench io` shows: a table and a plot."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.cli.console import figure_in, gigabytes, show_warnings, table_of, wide_console
from infinity.core.sizes import format_size


def label(case: Mapping[str, Any]) -> str:
    """Return what a case does, for a person."""
    return f"{case['pattern']}{' + Adam' if case['adam_beside'] else ''}, {case['order']}"


def how(case: Mapping[str, Any], *, name: bool = False) -> str:
    """Return at which settings it does it; `name`: and in which directory."""
    threads = f" ({case['threads']} threads)" if case["backend"] == "threads" else ""
    several = f", {len(case['directories'])} directories" if len(case["directories"]) > 1 else ""
    if name and not several:
        several = f", {case['directories'][0]}"
    return f"{case['backend']} {format_size(case['block_bytes'])} × {case['queue_depth']}{threads}{several}"


def sustained_text(found: dict[str, Any]) -> str:
    """Return what a sustained run shows, in a sentence or two."""
    first, last = (found[f"{when}_bytes_per_second"] / 1e9 for when in ("first", "last"))
    moved = f"{format_size(found['bytes_written'])} were written"
    if found["bytes_read"]:
        moved = f"{format_size(found['bytes_read'])} were read and {moved}"
    wrote = f"{moved} in {found['seconds']:.0f} s: first {first:.2f} GB/s, last {last:.2f} GB/s."
    if found["fell_after_bytes"] is None:
        return f"{wrote} The rate did not fall for good."
    after = format_size(found["fell_after_bytes"])
    return f"{wrote} The rate fell for good after {after}: a write cache was full. Plan with the last figure."


def show(result: Mapping[str, Any]) -> None:
    """Print the result of `bench io` for a person."""
    console = wide_console()
    for place in result["directories"]:
        parts = (place["path"], place["filesystem"], place["drive"], "" if place["direct"] else "no O_DIRECT")
        console.print(", ".join(part for part in parts if part), markup=False)
    cases = result["cases"]
    if cases:
        peers = any(case["fio"] for case in cases)
        console.print(_table(cases, peers=peers))
        if peers:
            console.print(
                "fio as it comes has its buffers in ordinary pages. The engine's are in huge pages, as fio's "
                "are in the last two columns."
            )
        _submits(console, cases)
    if rates := [rate / 1e6 for case in cases if (rate := case["adam_parameters_per_second"])]:
        several = " to ".join(f"{rate:,.0f}" for rate in sorted({min(rates), max(rates)}))
        alone = result["adam_alone_parameters_per_second"] / 1e6
        console.print(f"CPU Adam updated {several} Mparam/s beside the I/O, {alone:,.0f} alone.")
    if result["sustained"]:
        found = result["sustained"]
        console.print(sustained_text(found))
        top = max(found["buckets"]) or 1.0
        for index, rate in enumerate(found["buckets"]):
            at = index * found["bucket_seconds"]
            console.print(f"{at:7.1f} s {gigabytes(rate):>7} GB/s {'█' * round(40 * rate / top)}")
    if result["verified_bytes"]:
        console.print(f"{format_size(result['verified_bytes'])} were read back and are what was written.")
    show_warnings(console, result["warnings"])


def _table(cases: Sequence[Mapping[str, Any]], *, peers: bool) -> Table:
    name = len({tuple(case["directories"]) for case in cases}) > 1
    hows = list(dict.fromkeys(how(case, name=name) for case in cases))
    names = ["what", *(["how"] if len(hows) > 1 else []), "GB/s", "spread", "ms: p50, p99, p99.9", "CPU s/GB"]
    names += ["fio GB/s", "of fio", "fio CPU", "fio, huge pages", "of that"] if peers else []
    table = table_of(*names, title=hows[0] if len(hows) == 1 else None, left=1 + (len(hows) > 1))
    for case in cases:
        latency, fio = case["latency_seconds"], case["fio"]
        row = [label(case), *([how(case, name=name)] if len(hows) > 1 else [])]
        row += [gigabytes(case["bytes_per_second"]), f"{case['spread']:.0%}"]
        row.append("  ".join(f"{latency[name] * 1e3:.2f}" for name in ("p50", "p99", "p99.9")))
        row.append(f"{case['cpu_seconds_per_gb']:.3f}")
        if fio is not None:
            row += [f"{gigabytes(fio['bytes_per_second'])} {fio['engine']}"]
            row += [f"{fio['percent']:.0f} %", f"{fio['cpu_seconds_per_gb']:.3f}"]
        if (huge := case["fio_huge"]) is not None:
            row += [] if fio is not None else ["–"] * 3
            row += [f"{gigabytes(huge['bytes_per_second'])} {huge['engine']}", f"{huge['percent']:.0f} %"]
        table.add_row(*row)
    return table


def _submits(console: Console, cases: Sequence[Mapping[str, Any]]) -> None:
    """One line about all submit calls: a submission that blocks holds up everything behind it."""
    columns = zip(*(case["submit"]["less_than_2_to_the_i_microseconds"] for case in cases), strict=True)
    seen = list(itertools.accumulate(sum(column) for column in columns))
    most = max(case["submit"]["max_seconds"] for case in cases)
    if total := seen[-1]:
        power = next(power for power, count in enumerate(seen) if count >= 0.99 * total)
        text = f"99 % of {total:,} submissions took less than {1 << power:,} µs"
        console.print(f"{text}, the longest {most * 1e3:.2f} ms.")


def plot(result: Mapping[str, Any], path: str) -> None:
    """Draw the result into a file; its ending says in which format.

    Raises:
        ConfigError: matplotlib does not know the format.
    """
    cases, over_time = result["cases"], result["sustained"]  # one of them is there
    with figure_in(path, 9, max(3.0, 0.42 * len(cases) + 1.5)) as figure:
        axis = figure.subplots()
        if over_time:
            _draw_over_time(axis, over_time["bucket_seconds"], over_time["buckets"])
        else:
            _draw_cases(axis, cases)


def _draw_cases(axis: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    middle = [case["bytes_per_second"] / 1e9 for case in cases]
    low = [m - min(case["repeats"]) / 1e9 for m, case in zip(middle, cases, strict=True)]
    high = [max(case["repeats"]) / 1e9 - m for m, case in zip(middle, cases, strict=True)]
    axis.barh(
        range(len(cases)), middle, xerr=[low, high], color="#4878a8", ecolor="#222222", label="infinity"
    )
    for key, mark, name in (("fio", "D", "fio as it comes"), ("fio_huge", "s", "fio with huge pages")):
        peers = [(case[key]["bytes_per_second"] / 1e9, at) for at, case in enumerate(cases) if case[key]]
        if peers:
            axis.plot(*zip(*peers, strict=True), mark, color="#d1802a", label=name)
    axis.set_yticks(range(len(cases)), [f"{label(case)}\n{how(case)}" for case in cases], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("GB/s (median; lines: least and most)")
    axis.legend(loc="lower right")


def _draw_over_time(axis: Any, width: float, buckets: Sequence[float]) -> None:
    rates = [rate / 1e9 for rate in buckets]
    axis.step([width * at for at in range(len(rates))], rates, where="post", color="#4878a8")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel("GB/s")
