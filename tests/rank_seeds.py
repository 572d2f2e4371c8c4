"""What each rank runs in test_rank_seeds.py: random trainings, many in one process, with late transfers or
without, on a device with memory of its own (`lagging`, see tests/lagging) or without.

python -m tests.rank_seeds FIRST END DIRECTORY [--late] [--device lagging]      (under torchrun's environment)
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from .lagging.lane import devices
from .models import build
from .rank_training import check

TIERS = ("device", "host", "nvme", {"device": 0.3, "host": 0.3, "nvme": 0.4}, {"host": 0.5, "nvme": 0.5})


def generate(seed: int, world: int) -> dict[str, Any]:
    """Return the settings of `rank_training.train` that belong to a seed."""
    draw = random.Random(seed)
    model = draw.choice(("gpt", "gpt", "cnn", "lstm", "moe"))
    sizes: dict[str, Any] = {}
    frozen: list[str] = []
    if model == "gpt":
        sizes = {
            "width": 32,
            "layers": draw.randint(1, 3),
            "tied": draw.random() < 0.4,
            "recompute": draw.choice((None, None, "reentrant", "non-reentrant")),
        }
        frozen = draw.choice(([], [], ["blocks.0"], ["positions", "norm"]))
    config = {
        "device": "cpu",
        "dtype": draw.choice(("fp32", "bf16", "bf16", "fp16")),
        "update": draw.choice(("sync", "overlap")),
        "zero_stage": draw.choice((0, 1, 2, 3, 3, 3)),
        "threads": 1,
        "rank_timeout": 60.0,
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
    made = {
        "model": model,
        "sizes": sizes,
        "frozen": frozen,
        "groups": draw.random() < 0.5,
        "clip": draw.choice((None, 0.5)),
        "zeros": draw.random() < 0.2,
        "config": config,
        "program": [step(draw, model, sizes, config, world) for _ in range(3)],
    }
    rules = random.Random(f"rules {seed}")
    if rules.random() < 0.4:
        made["optimizer"] = rules.choice(("momentum", "adagrad", "lion", "sgd"))
    config["optimizer_state_dtype"] = rules.choice(("fp32", "fp32", "fp32", "bf16", "8bit"))
    if config["dtype"] == "bf16" and config.get("update") != "delayed":
        config["split_master"] = rules.random() < 0.4
    if config["optimizer_state_dtype"] != "fp32" and rules.random() < 0.5:
        named = build(model, **sizes).named_parameters()
        trained = [n for n, _ in named if not n.startswith(tuple(frozen))]
        patterns = [p for p in ("*.weight", "*.bias", "*") if any(fnmatchcase(n, p) for n in trained)]
        config["optimizer_state_fp32"] = [rules.choice((rules.choice(trained), *patterns))]
    if config["optimizer_state_dtype"] != "8bit" and random.Random(f"muon {seed}").random() < 0.15:
        made |= {"optimizer": "muon", "groups": False}
    return made


def step(draw: random.Random, model: str, sizes: Any, config: Any, world: int) -> dict[str, Any]:
    """Return what one step does, and what comes behind it."""
    alike = config["zero_stage"] >= 2 or config["accumulation"] is not None
    turns = draw.choice((1, 1, 2, 2, 3))
    made: dict[str, Any] = {"turns": turns, "shape": draw.choice(("apart", "apart", "sum", "together"))}
    if made["shape"] == "sum" and model == "moe" and (config["dtype"] != "fp32" or world & (world - 1)):
        # An expert's gradient arrives when no forward is left that uses it: on some ranks at the first end
        # of its unit's backward, on others at the second. What is reduced twice is rounded in between.
        made["shape"] = "together"
    if model == "gpt" and draw.random() < 0.4:
        depths = [[draw.randint(0, sizes["layers"]) for _ in range(world)] for _ in range(turns)]
        made["depths"] = [[of[0]] * world for of in depths] if alike else depths
    if draw.random() < 0.2:
        made["zeros"] = [[r for r in range(world) if draw.random() < 0.4] for _ in range(turns)]
    if draw.random() < 0.3:
        made["no_sync"] = True
    uses = ["evaluate", "module"]
    uses += ["generate"] * (model == "gpt") + ["evaluate alone"] * (not config["zero_stage"])
    made["between"] = draw.sample(uses, draw.choice((0, 0, 1, 2)))
    names = [n for n, _ in build(model, **sizes).named_parameters()]

    def factors() -> dict[str, float]:  # of one parameter, or of any number
        chosen = draw.sample(names, draw.choice((1, draw.randint(1, len(names)))))
        return {name: draw.choice((0.5, 0.75, -1.0)) for name in chosen}

    if draw.random() < 0.3:
        made["edits"] = factors()
        if config["zero_stage"] or draw.random() < 0.5:  # each has all values at stage 0, and may edit them
            made["source"] = draw.randrange(world)
    for loaded in ("loads", "masters"):
        if draw.random() < 0.15:
            made[loaded] = factors()
    return made


def main() -> None:
    """Train each case, `late` with transfers that are so by chance, others on each rank; compare all bits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--device", choices=("cpu", "lagging"), default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "no_sync", RuntimeWarning)  # does nothing from stage 2 on
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for seed in range(asked.first, asked.end):
        settings = generate(seed, world)
        folder = asked.directory / f"{seed}-{rank}"
        folder.mkdir()
        settings["config"]["nvme"] = str(folder)
        if asked.late:
            os.environ["INFINITY_DELAY_SEED"] = str(seed * world + rank)
        try:
            with devices(asked.device):
                check(settings, rank, world)
        except BaseException:
            sys.stderr.write(f"seed {seed}: {settings}\n")
            raise
    sys.stdout.write(f"{asked.end - asked.first} cases\n")


if __name__ == "__main__":
    main()
