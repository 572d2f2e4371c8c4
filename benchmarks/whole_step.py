"""Whole training steps of GPT-2 203 M (128 tokens, batch 1) beside DeepSpeed and plain torch.

    python benchmarks/whole_step.py --directory /mnt/nvme --deepspeed-python /path/to/python \\
        --modes state-on-nvme all-on-host all-on-nvme --update overlap sync --output results.json

It is `infinity bench step` at the size that the peers' figures are for, with transformers' GPT-2 and the
figures that are wanted. What is measured, how contestants take turns, and what a bound is:
infinity/cli/bench/step_rounds.py and step_bound.py. `--modes` are its placements. Where DeepSpeed
fails, its error is part of the result.

With an update that goes on behind the next forward (--update overlap or delayed), a turn is a burst of
steps (--burst, 4 unless told otherwise) and ends when all of it is complete, so that nobody works in
another's turn. ``seconds`` is the median step from the second on; ``seconds_with_drain`` the time of a
turn by the number of its steps.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import common

from infinity.cli.bench.step import clean
from infinity.cli.bench.step_case import CONTESTANTS, PLACEMENTS, Request
from infinity.cli.bench.step_rounds import measure
from infinity.core.config import UPDATES
from infinity.core.errors import InfinityError

PACKAGES = ("torch", "transformers", "infinity-offload")
#: By mode and update: least times as fast as a peer, and most times the bound.
WANTED: dict[tuple[str, str], dict[str, float]] = {
    ("state-on-nvme", "sync"): {"of_deepspeed": 1.5},
    ("state-on-nvme", "overlap"): {"of_deepspeed": 1.8, "of_bound": 1.15},
    ("state-on-nvme", "delayed"): {"of_bound": 1.15},
    ("all-on-nvme", "overlap"): {"of_bound": 1.25},
    ("all-on-host", "overlap"): {"of_torch": 1 / 1.25},
}


def show(mode: str, group: dict[str, Any]) -> None:
    """Print one mode."""
    print(f"\n{mode}")
    for name, row in group["table"].items():
        parts = "  ".join(f"{p} {row[p]:.3f}" for p in ("forward", "backward", "step"))
        memory = f"RSS {row['peak_rss'] / 1e9:.2f} GB, anonymous {row['peak_anonymous'] / 1e9:.2f} GB"
        moved = f"read {row['read_bytes'] / 1e9:.2f} written {row['written_bytes'] / 1e9:.2f} GB"
        print(
            f"  {name:16} {row['seconds']:.3f} s, with drain {row['seconds_with_drain']:.3f}  ({parts})  "
            f"{memory}  {moved}"
        )
    for name, ratios in group["speedups"].items():
        wanted = group["wanted"].get(name, {})
        row = group["table"][name]
        for peer, ratio in ratios.items():
            target = f"  (wanted ≥ {wanted[peer]:.2f})" if peer in wanted else ""
            print(
                f"  {name} {peer:13} {ratio['of_medians']:.3f}  "
                f"{ratio['lowest']:.3f}–{ratio['highest']:.3f}{target}"
            )
        if "bound" in row:
            target = f"  (wanted ≤ {wanted['of_bound']:.2f})" if "of_bound" in wanted else ""
            print(
                f"  {name} of its bound  {row['seconds'] / row['bound']:.3f} × {row['bound']:.3f} s{target}"
            )
    for name, error in group["errors"].items():
        print(f"  {name:16} failed: {error['error'][:160]}")


def main() -> None:
    """Measure, print tables, write the JSON."""
    parser = common.arguments(__doc__)
    parser.add_argument("--modes", nargs="+", choices=tuple(PLACEMENTS), default=["state-on-nvme"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--update", nargs="+", choices=UPDATES, default=["sync"], help="of infinity's Config")
    parser.add_argument("--burst", type=int, help="steps of a turn; 1 with --update sync, else 4")
    parser.add_argument("--config", default="{}", help="more settings of infinity.Config, as JSON")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a start or a turn")
    args = parser.parse_args()
    hardware = common.hardware(args.directory)
    request = Request(
        model=common.model_of(args),
        directory=os.path.abspath(args.directory),
        tokens=args.tokens,
        dtype=args.dtype,
        device=args.device,
        placements=tuple(args.modes),
        updates=tuple(args.update),
        contestants=tuple(args.contestants),
        rounds=args.rounds,
        warmup=args.warmup,
        burst=args.burst,
        threads=args.threads,
        deepspeed_python=args.deepspeed_python,
        settings=json.loads(args.config),
        timeout=args.timeout,
    )
    try:
        result = measure(request, lambda text: print(text, file=sys.stderr))
    except InfinityError as error:
        sys.exit(str(error))
    for mode, group in result["placements"].items():
        group["wanted"] = {
            f"infinity-{update}": WANTED[mode, update] for update in args.update if (mode, update) in WANTED
        }
        show(mode, group)
    common.publish(
        args.output,
        {
            **clean(result),
            "benchmark": f"whole_step: GPT-2, {args.tokens} tokens, {args.dtype}, {', '.join(args.update)}",
            "versions": common.versions(*PACKAGES),
            "hardware": hardware,
        },
    )
    if any(name.startswith("infinity") for g in result["placements"].values() for name in g["errors"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
