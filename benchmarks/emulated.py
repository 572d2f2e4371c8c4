"""Steps of Llama-3.1-8B on a modelled machine with a GPU, by placement and update mode, beside peers.

    python benchmarks/emulated.py --output benchmarks/results/emulated.json
    python benchmarks/emulated.py --quick

The engine runs for real: hooks, threads, locks, streams, events, leases, loops. What it runs on takes
modelled time: the GPU's kernels, copy engines, the CPU's Adam, CRC-32C and drives (`emulation/`). Kernels
give no values. So a step has the engine's own schedule and its own Python, without a GPU. For each case this
prints

step       seconds, and the share of the bound: the longest of compute, Adam, the link and the drives
T∞         seconds with infinitely fast Python. The clock of the machine runs 1, 2 and 8 times slower than
           ours (4 with 32K tokens), so that Python is as many times faster to it; T∞ and `Python` are from
           the fit T(D) = T∞ + Python ÷ D
idle       seconds in which the GPU had nothing to do, and most of it by cause: that of one step more, which
           is traced

First it tests itself: torch with all on the GPU takes its compute (98 %), and the clocks of the machine move
by bytes ÷ rate exactly. It measures this machine's Python: so it refuses where others work beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import common
from children import Child
from emulation.cases import CASES, Case, Traffic
from emulation.machine import BUILT, Rates, build
from emulation.models import SHAPES
from runner import ROOT

TOKENS: Final = (4096, 16384, 32768)
QUICK: Final = ("overlap", "zero-offload")
#: Tokens of a step times dilation, at most: a step may last so long.
MOST_DILATED: Final = 8 * 16384
#: The load average at the start, and the cores of others then and while this measures, that do no harm.
MOST_LOAD: Final = 0.5
MOST_OTHERS: Final = 0.2
#: Of its compute, what torch reaches with all on the GPU.
PLAIN_SHARE: Final = 0.98
_SELF_TEST: Final = "overlap"


def start(args: argparse.Namespace) -> Child:
    """Start a child that measures."""
    command = [sys.executable, "-u", "-m", "emulation.measure", args.shape, str(args.scale)]
    env = {"PYTHONPATH": str(ROOT / "benchmarks"), "OMP_NUM_THREADS": "1"}
    return Child("emulation", [*command, str(args.directory)], env=env, timeout=args.timeout)


def ask(child: Child, what: str, **more: Any) -> dict[str, Any]:
    """Have a child do something; return its answer."""
    answer = child.ask(json.dumps({"do": what, **more}))
    for name in ("read_bytes", "written_bytes"):  # of real drives, which nothing here uses
        del answer[name]
    return answer


# -- before ---------------------------------------------------------------------------------------


def load() -> tuple[float, float]:
    """Return the load average, and the cores that are used by others over two seconds."""

    def used() -> float:
        numbers = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        return sum(int(numbers[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(2)
    return os.getloadavg()[0], (used() - before) / 2


def refuse(average: float, cores: float) -> str | None:
    """Return why this machine is too loaded, or None."""
    if average <= MOST_LOAD and cores <= MOST_OTHERS:
        return None
    return (
        f"this machine has a load of {average:.2f}, and others use {cores:.2f} of its cores now, where at "
        f"most {MOST_LOAD} and {MOST_OTHERS} do no harm. Wait for their end, or give --loaded: then the "
        "result says so"
    )


def self_test(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the machine says of itself.

    Raises:
        SystemExit: it is wrong.
    """
    with start(args) as child:
        ask(child, "open", case="plain")
        found = ask(child, "measure", tokens=max(args.tokens), dilation=1, steps=1, warm=1)
        about = ask(child, "open", case=_SELF_TEST)
        counts = ask(child, "count", tokens=min(args.tokens))
    wrong = wrong_clocks(CASES[_SELF_TEST], about, counts)
    share = found["bounds"]["compute"] / found["seconds"]
    if share < PLAIN_SHARE and not args.loaded:
        wrong.append(
            f"torch with all on the GPU reaches {share:.1%} of its compute, and not {PLAIN_SHARE:.0%}"
        )
    if wrong:
        sys.exit("the modelled machine is wrong: " + "; ".join(wrong))
    print(f"self-test: torch with all on the GPU reaches {share:.1%} of its compute; clocks = bytes ÷ rate")
    return {"plain_share_of_compute": share, "counts": counts}


def wrong_clocks(case: Case, about: dict[str, Any], counts: dict[str, Any]) -> list[str]:
    """Return what does not agree: bytes with what a step has to move, and clocks with bytes ÷ rate."""
    rates, n, wrong = Rates(**about["rates"]), about["sizes"]["parameters"], []
    of = {"h2d": rates.link, "d2h": rates.link, "dram": rates.dram, "read": rates.drive, "write": rates.drive}
    traffic = Traffic(0, 0, 0) if case.traffic is None else case.traffic
    for (name, rate), each in zip(of.items(), traffic[:5], strict=True):
        part, wanted = counts["parts"][name], each * n
        few = 1e-4 * n  # beside parameters and gradients some flags and figures cross the link
        more = wanted / 100  # sections on drives are padded, and `delayed` computes its drift
        if part["bytes"] < wanted - few or (traffic.exact and part["bytes"] > wanted + few + more):
            wrong.append(f"{name} moves {part['bytes']:.5g} bytes, and not {wanted:.5g}")
        clock = part["bytes"] / rate
        if name in ("h2d", "d2h"):
            clock += part["uses"] * rates.kernel
        # Of several drives the busiest counts, which has its share.
        shared = name in ("read", "write") and case.drives > 1
        if not shared and not math.isclose(part["seconds"], clock, rel_tol=1e-9, abs_tol=1e-9):
            wrong.append(f"{name} is busy for {part['seconds']:.6g} s, and not for {clock:.6g}")
    if case.settings is not None and counts["updates"] < n / about["chunk_elements"]:
        wrong.append(f"{counts['updates']} chunks of {about['chunk_elements']} elements were updated, of {n}")
    return wrong


# -- cases ----------------------------------------------------------------------------------------


def fit(seconds: dict[float, float]) -> dict[str, float] | None:
    """Return T∞ and Python's seconds of least squares over T(D) = T∞ + Python ÷ D, and by how much the fit is
    off at most; None: there is one dilation alone."""
    if len(seconds) < 2:
        return None
    xs, ys = [1 / d for d in seconds], list(seconds.values())
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    python = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
    rest = y - python * x
    off = max(abs(rest + python * a - b) for a, b in zip(xs, ys, strict=True))
    return {"infinitely_fast": rest, "python": python, "off_by": off}


def figures(measured: Sequence[dict[str, Any]], traced: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures of one case with one number of tokens."""
    first = measured[0]
    by, bound = max(first["bounds"].items(), key=lambda item: item[1])
    return {
        "seconds": first["seconds"],
        "bound": bound,
        "bound_by": by,
        "share": bound / first["seconds"],
        "fit": fit({m["dilation"]: m["seconds"] for m in measured}),
        "idle": max(0.0, first["seconds"] - first["busy"]["gpu"]),
        "cores_of_others": max(m["cores_of_others"] for m in measured),
        "traced": traced,
        "measured": list(measured),
    }


def run_case(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a case, by tokens."""
    case = CASES[name]
    begin = time.monotonic()
    middle = sorted(args.tokens)[len(args.tokens) // 2]
    with start(args) as child:
        about = ask(child, "open", case=name)
        result: dict[str, Any] = {"what": case.what, **about, "tokens": {}}
        for number, tokens in enumerate(args.tokens):
            measured: list[dict[str, Any]] = []
            for dilation in case.dilations:
                if measured and dilation > args.most_dilation:
                    continue
                # The engine learns the order of units in the first step, and follows it from the second on.
                more = {"warm": 2 if number == 0 and not measured else 0}
                more["steps"] = case.steps if not measured else 1
                slower = min(dilation, max(1.0, MOST_DILATED / tokens))
                measured.append(ask(child, "measure", tokens=tokens, dilation=slower, **more))
            traced = ask(child, "idle", tokens=tokens) if case.traces or tokens == middle else None
            result["tokens"][tokens] = figures(measured, traced)
            print(f"{name}, {tokens} tokens: {line(result['tokens'][tokens])}", file=sys.stderr, flush=True)
    result["took"] = time.monotonic() - begin
    return result


# -- results --------------------------------------------------------------------------------------


def line(of: dict[str, Any]) -> str:
    """Return figures in a line."""
    return f"{of['seconds']:.2f} s, {of['share']:.0%} of the bound ({of['bound']:.2f} s, {of['bound_by']})"


def table(cases: dict[str, Any], tokens: Sequence[int]) -> str:
    """Return a table in Markdown."""
    rows = ["| case | tokens | step, s | of the bound | T∞, s | Python, s | GPU idle, s: most of it |"]
    rows.append("|---" * 7 + "|")
    for case in cases.values():
        for number in tokens:
            if (of := case["tokens"].get(number)) is None:
                continue
            fitted = of["fit"]
            split = (f"{fitted['infinitely_fast']:.2f}", f"{fitted['python']:.2f}") if fitted else ("–", "–")
            causes = list(of["traced"]["idle"].items())[:2] if of["traced"] else []
            named = ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in causes if seconds >= 0.005)
            share = f"{of['share']:.0%} of {of['bound']:.2f} ({of['bound_by']})"
            cells = (case["what"], f"{number // 1024}K", f"{of['seconds']:.2f}", share, *split)
            rows.append("| " + " | ".join((*cells, f"{of['idle']:.2f}" + (named and f": {named}"))) + " |")
    return "\n".join(rows)


def options() -> argparse.Namespace:
    """Return what was asked for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end, too
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of a step")
    parser.add_argument("--most-dilation", type=float, default=8.0, help="how many times slower at most")
    parser.add_argument("--quick", action="store_true", help="two cases, 4K tokens, without D = 8")
    parser.add_argument("--loaded", action="store_true", help="measure beside others; the result says so")
    parser.add_argument(
        "--check", action="store_true", help="count one step of each case, and measure nothing"
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--scale", type=int, default=64, help="elements for which one stands; a square")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a start or an answer")
    parser.add_argument(
        "--directory", type=Path, default=BUILT, help="for arenas, of 2 GB; nothing is written"
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    if args.quick:
        args.cases, args.tokens, args.most_dilation = list(QUICK), [min(TOKENS)], 2.0
    return args


def check(args: argparse.Namespace) -> None:
    """Print what one step of each case does; end with an error if it is not what it should be."""
    found, wrong = {}, []
    with start(args) as child:
        for name in args.cases:
            about = ask(child, "open", case=name)
            counts = ask(child, "count", tokens=args.tokens[0])
            found[name] = {"about": about, **counts}
            wrong += [f"{name}: {what}" for what in wrong_clocks(CASES[name], about, counts)]
    print(json.dumps(found))
    if wrong:
        sys.exit("; ".join(wrong))


def main() -> None:
    """Measure, print, write."""
    args = options()
    average, cores = load()
    build()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.check:
        check(args)
        return
    reason = refuse(average, cores)
    if reason is not None and not args.loaded:
        sys.exit(reason)
    hardware, begin = common.hardware(), time.monotonic()
    result: dict[str, Any] = {
        "hardware": {**hardware, "load_average_at_start": average, "cores_of_others_at_start": cores},
        "versions": common.versions(),
        "loaded": reason is not None,
        "model": {"shape": args.shape, **SHAPES[args.shape]._asdict(), "scale": args.scale},
        "self_test": self_test(args),
        "cases": {},
    }
    cases = result["cases"]
    for name in args.cases:
        cases[name] = run_case(name, args)
        others = max(of["cores_of_others"] for of in cases[name]["tokens"].values())
        result["loaded"] = result["loaded"] or others > MOST_OTHERS
        result["took"] = time.monotonic() - begin
        common.publish(args.output, {"benchmark": "emulated", **result})
    print(table(cases, args.tokens))
    if result["loaded"]:
        print("\nothers worked beside it: these figures say little")


if __name__ == "__main__":
    main()
