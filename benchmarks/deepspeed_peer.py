"""DeepSpeed as a contestant: GPT-2 under ZeRO-3 on the CPU accelerator, one step for each line on stdin.

Started by optimizer_step.py and whole_step.py with another interpreter (`common.deepspeed_child`), which
has DeepSpeed and need not have infinity. The optimizer is its DeepSpeedCPUAdam; on NVMe it goes through its
pipelined swapper.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import common


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's settings; as its documentation recommends for one process."""
    optimizer = {"device": args.state, "pin_memory": False}
    if args.state == "nvme":
        optimizer |= {
            "nvme_path": args.directory,
            "buffer_count": 8,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": args.sub_group,
        "offload_optimizer": optimizer,
        "stage3_param_persistence_threshold": 0,
    }
    if args.parameters != "device":
        zero["offload_param"] = {"device": args.parameters, "pin_memory": False}
        if args.parameters == "nvme":
            zero["offload_param"] |= {
                "nvme_path": args.directory,
                "buffer_size": args.buffer_size,
                "buffer_count": args.buffer_count,
                "max_in_cpu": 0,
            }
    betas = list(common.ADAMW["betas"])
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**common.ADAMW, "betas": betas}},
        "zero_optimization": zero,
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def main() -> None:
    """Build the model, then take a step for each line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", choices=("cpu", "nvme"), required=True)
    parser.add_argument("--parameters", choices=("device", "cpu", "nvme"), default="device")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--sub-group", type=int, default=100_000_000)
    parser.add_argument("--buffer-size", type=int, default=60_000_000)
    parser.add_argument("--buffer-count", type=int, default=40)
    for name in ("layers", "width", "vocabulary", "positions"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    import deepspeed

    # Not later: within zero.Init torch's constructors are others, which an import trips over.
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401

    config = configuration(args)
    deepspeed.init_distributed("gloo")
    sizes = (args.layers, args.width, args.vocabulary, args.positions)
    if args.parameters == "device":
        model = common.gpt2(*sizes)
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = common.gpt2(*sizes)
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = common.batch(args.vocabulary, args.tokens)
    common.tell(
        {
            "params": numel,
            "threads": torch.get_num_threads(),
            "versions": common.versions("torch", "transformers", "deepspeed"),
        }
    )
    for line in common.lines():
        count = int(line)
        parts = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        losses = []
        begin = time.perf_counter()
        for _ in range(count):
            start = time.perf_counter()
            loss = engine(input_ids=tokens, labels=tokens).loss
            after_forward = time.perf_counter()
            engine.backward(loss)
            after_backward = time.perf_counter()
            engine.step()
            end = time.perf_counter()
            parts["forward"] += after_forward - start
            parts["backward"] += after_backward - after_forward
            parts["step"] += end - after_backward
            losses.append(loss.item())
        seconds = time.perf_counter() - begin
        common.tell(
            {
                "seconds": seconds / count,
                **{name: value / count for name, value in parts.items()},
                "losses": losses,
                "peak_rss": common.status(os.getpid()).get("VmHWM", 0),
            }
        )


if __name__ == "__main__":
    main()
