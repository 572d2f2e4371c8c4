"""What moments in bf16 and 8 bits cost in quality: a small GPT on Python's standard library, several seeds.

    python benchmarks/moments.py --output benchmarks/results/moments.json

Each seed trains the same model on the same bytes with moments in fp32, in bf16 and in 8 bits, by
`infinity.wrap`. What counts is the loss on text that was held out. Two seeds of fp32 differ by chance alone:
the difference of a dtype from fp32, the mean over the seeds, should lie within the standard deviation of fp32
over the seeds.
"""

from __future__ import annotations

import glob
import math
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from gpt2 import GPT2

import infinity

CONTEXT, BATCH, LR = 64, 8, 3e-3
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}


def text() -> torch.Tensor:
    """Return the bytes of some modules of the standard library."""
    files = sorted(glob.glob(sysconfig.get_paths()["stdlib"] + "/*.py"))[:120]
    return torch.tensor(list(b"\n".join(Path(f).read_bytes() for f in files)), dtype=torch.long)


def batch(data: torch.Tensor, count: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` windows and what comes next in each."""
    begins = torch.randint(0, len(data) - CONTEXT - 1, (count,), generator=draw)
    windows = torch.stack([data[i : i + CONTEXT + 1] for i in begins.tolist()])
    return windows[:, :-1], windows[:, 1:]


def train(data: torch.Tensor, dtype: str, seed: int, steps: int) -> float:
    """Train, and return the loss on the last tenth of the text."""
    split = len(data) * 9 // 10
    model = GPT2(layers=2, width=128, vocabulary=256, positions=CONTEXT).build()
    torch.manual_seed(seed)
    model.apply(model._init_weights)
    adam = torch.optim.AdamW(model.parameters(), lr=LR, **ADAMW)
    config = infinity.Config(
        device="cpu",
        optimizer_state_dtype=dtype,
        max_grad_norm=1.0,
        device_memory="256MiB",
        host_memory="256MiB",
    )
    model, optimizer = infinity.wrap(model, adam, config)
    draw = torch.Generator().manual_seed(1000 + seed)

    def loss_of(windows: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        out = model(windows)
        logits = getattr(out, "logits", out)
        return F.cross_entropy(logits.reshape(-1, 256), following.reshape(-1))

    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = LR * min(1.0, step / 50) * cosine
        loss_of(*batch(data[:split], BATCH, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out = torch.Generator().manual_seed(5)
    with torch.no_grad():
        losses = [float(loss_of(*batch(data[split:], 32, held_out))) for _ in range(6)]
    infinity.close(optimizer)
    return statistics.mean(losses)


def main() -> None:
    """Train, print, write the JSON."""
    parser = common.arguments((__doc__ or "").split("\n\n")[0], directory=False)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data, start = text(), time.perf_counter()
    losses: dict[str, list[float]] = {"fp32": [], "bf16": [], "8bit": []}
    for seed in range(args.seeds):
        for dtype, found in losses.items():
            found.append(train(data, dtype, seed, args.steps))
            print(f"seed {seed}, {dtype}: {found[-1]:.4f}", flush=True)
    means = {dtype: statistics.mean(found) for dtype, found in losses.items()}
    spread = statistics.stdev(losses["fp32"])
    apart = {dtype: mean - means["fp32"] for dtype, mean in means.items() if dtype != "fp32"}
    for dtype, difference in apart.items():
        print(f"{dtype} − fp32: {difference:+.4f}; fp32 over seeds: {spread:.4f}")
    common.publish(
        args.output,
        {
            "benchmark": "moments: held-out loss of a small GPT with moments in fp32, bf16 and 8 bits",
            "steps": args.steps,
            "losses": losses,
            "minus_fp32": apart,
            "standard_deviation_of_fp32": spread,
            "seconds": round(time.perf_counter() - start, 1),
            "versions": common.versions(),
            "hardware": common.hardware(),
        },
    )


if __name__ == "__main__":
    main()
