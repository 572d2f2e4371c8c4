"""What each rank runs in test_rank_seeds.py: random trainings, many in one process, with late transfers or
without.

python -m tests.rank_seeds FIRST END DIRECTORY [late]      (under torchrun's environment)
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from .rank_training import compare, reference, train

TIERS = ("device", "host", "nvme", {"device": 0.3, "host": 0.3, "nvme": 0.4}, {"host": 0.5, "nvme": 0.5})


def generate(seed: int) -> dict[str, Any]:
    """Return the settings of `rank_training.train` that belong to a seed."""
    draw = random.Random(seed)
    model = draw.choice(("gpt", "gpt", "cnn", "lstm", "moe"))
    sizes: dict[str, Any] = {}
    frozen = ["-"]
    if model == "gpt":
        sizes = {
            "width": 32,
            "layers": draw.randint(1, 3),
            "tied": draw.random() < 0.4,
            "recompute": draw.choice((None, None, "reentrant", "non-reentrant")),
        }
        frozen = draw.choice((["-"], ["-"], ["blocks.0"], ["positions", "norm"]))
    config = {
        "device": "cpu",
        "dtype": draw.choice(("fp32", "bf16", "bf16", "fp16")),
        "update": draw.choice(("sync", "overlap")),
        "zero_stage": draw.choice((0, 1, 2, 3, 3, 3)),
        "threads": 1,
        "device_memory": "64MiB",
        "host_memory": "512MiB",
        "prefetch_memory": draw.choice((0, "1MiB", "8MiB")),
        "chunk_elements": 65536 * draw.choice((1, 4)),
        **{name: draw.choice(TIERS) for name in ("parameters", "optimizer_state", "gradients")},
    }
    if config["zero_stage"] < 3:
        config["parameters"] = "device"
    if config["zero_stage"] < 2:
        config |= {"gradients": None, "accumulation": draw.choice((None, None, 1, 2))}
    elif model == "gpt" and config["zero_stage"] == 3:
        config["device_memory"] = draw.choice(("64MiB", "2MiB"))
    return {
        "model": model,
        "sizes": sizes,
        "frozen": frozen,
        "steps": 3,
        "accumulate": draw.choice((1, 1, 2)),
        "groups": draw.random() < 0.5,
        "clip": draw.choice((None, 0.5)),
        "evaluates": draw.random() < 0.3,
        "zeros": draw.random() < 0.2,
        "config": config,
    }


def main() -> None:
    """Train each case, `late` with transfers that are so by chance, others on each rank; compare all bits."""
    torch.set_num_threads(1)
    first, end = int(sys.argv[1]), int(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for seed in range(first, end):
        settings = generate(seed)
        folder = Path(sys.argv[3], f"{seed}-{rank}")
        folder.mkdir()
        settings["config"]["nvme"] = str(folder)
        if "late" in sys.argv:
            os.environ["INFINITY_DELAY_SEED"] = str(seed * world + rank)
        try:
            found, norms = train(settings, rank, world)
            compare(found, reference(settings, world, norms)[rank])
        except BaseException:
            sys.stderr.write(f"seed {seed}: {settings}\n")
            raise
    sys.stdout.write(f"{end - first} cases\n")


if __name__ == "__main__":
    main()
