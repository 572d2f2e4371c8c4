"""Seconds per token of a model whose parameters are on NVMe, beside accelerate's disk offload and its bound.

    python benchmarks/inference.py --directory /mnt/nvme --output results.json

GPT-2 203 M (or as the options say) in a Hugging Face directory on that drive, one prompt of --tokens tokens
in the cache of keys and values. A turn is --burst tokens, one forward each. In every round, in an order that
rotates:

infinity    `infinity.inference` of the directory with device_memory of two of its largest units; parameters
            are read in place where the dtype is that of the files
accelerate  `accelerate.disk_offload` of the same model. It reads through the page cache, which is dropped
            before each token, off the clock, where this may be done: it would else hold a model of this size,
            and no larger one
torch       the same forward in memory: the compute
drive       the rate at which the engine's ring reads from this drive

The bound is max(compute, bytes that infinity reads per token ÷ the rate). Every contestant is a process of
its own, and all must write the same tokens. --wait-policy is OpenMP's for all of them (OMP_WAIT_POLICY):
where there are few cores, threads of torch that spin while they wait for work take them from reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import common
from children import Child, forget_peak, lines, peak_memory, tell
from gpt2 import GPT2
from rates import rates

from infinity.cli.bench.io_load import Job
from infinity.cli.console import finite
from infinity.core.errors import InfinityError

WANTED = {"of_bound": 1.1, "of_accelerate": 1.3}
CONTESTANTS = ("infinity", "accelerate", "torch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What one contestant does."""

    kind: str
    model: str  # a Hugging Face directory
    folder: str  # of its own, on the drive
    tokens: int
    threads: int
    dtype: str
    device: str
    largest_unit: int
    settings: dict[str, Any]


# -- the child --------------------------------------------------------------------------------


def build(task: Task) -> Any:
    """Return the model of a contestant, ready to be used."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.dtype]
    if task.kind == "infinity":
        import infinity

        itemsize = dtype.itemsize
        config = {
            "nvme": task.folder,
            "device": task.device,
            "dtype": task.dtype,
            "parameters": "nvme",
            "device_memory": 2 * task.largest_unit * itemsize,
            "threads": task.threads,
            **task.settings,
        }
        return infinity.inference(task.model, infinity.Config(**config))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype).eval()
    if task.kind == "accelerate":
        from accelerate import disk_offload

        return disk_offload(model, task.folder, execution_device=torch.device(task.device))
    return model.to(task.device)


def drop_page_cache() -> bool:
    """Drop the page cache; return whether that may be done."""
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("1")
    except OSError:
        return False
    return True


class Writer:
    """A model, a prompt in its cache, and turns of some tokens after it."""

    def __init__(self, task: Task) -> None:
        import torch

        torch.set_num_threads(task.threads)
        self.task = task
        self.model = build(task)
        self.device = torch.device(task.device)
        random = torch.Generator().manual_seed(1)
        vocabulary = self.model.config.vocab_size
        prompt = torch.randint(0, vocabulary, (1, task.tokens), generator=random).to(self.device)
        with torch.no_grad():
            output = self.model(input_ids=prompt, use_cache=True)
        self.cache = output.past_key_values
        self.first = output.logits[:, -1:].argmax(-1)

    def bytes_read(self) -> int:
        """Return what the drives have read for infinity, so far."""
        if self.task.kind != "infinity":
            return 0
        from infinity.api.engine import engine_of

        return sum(s.bytes_read for s in engine_of(self.model).store.stats())

    def turn(self, count: int) -> dict[str, Any]:
        """Write `count` tokens after the prompt; return the seconds of each forward, and the tokens."""
        import torch

        if (written_before := self.cache.get_seq_length() - self.task.tokens) > 0:
            self.cache.crop(-written_before)
        token, written, seconds, dropped = self.first, [], [], True
        before = self.bytes_read()
        for _ in range(count):
            if self.task.kind == "accelerate":
                dropped = drop_page_cache() and dropped
            begin = time.perf_counter()
            with torch.no_grad():
                output = self.model(input_ids=token, past_key_values=self.cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            written.append(int(token))  # a device is waited for
            seconds.append(time.perf_counter() - begin)
        return {
            "seconds": seconds,
            "tokens": written,
            "bytes_read": (self.bytes_read() - before) / count,
            "dropped": dropped,
            "peak_rss": peak_memory(),
        }


def serve(task: Task) -> None:
    """Build; then write as many tokens as each line says."""
    import torch

    writer = Writer(task)
    forget_peak()
    tell({"threads": torch.get_num_threads(), "versions": common.runner.versions(*PACKAGES)})
    for line in lines():
        tell(writer.turn(int(line)))
    if task.kind == "infinity":
        import infinity

        infinity.close(writer.model)


PACKAGES = (*common.PACKAGES, "accelerate")


# -- the parent -------------------------------------------------------------------------------


def race(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Have all contestants take turns on one model; return medians, the bound, ratios and every sample."""
    gpt2, model = common.model_of(args), os.path.join(folder, "model")
    save(gpt2, model, args.dtype if args.files is None else args.files)

    def start(name: str) -> Child:
        os.mkdir(own := os.path.join(folder, name))
        task = Task(
            kind=name,
            model=model,
            folder=own,
            tokens=args.tokens,
            threads=args.threads,
            dtype=args.dtype,
            device=args.device,
            largest_unit=gpt2.largest_unit,
            settings=json.loads(args.config),
        )
        text = json.dumps(dataclasses.asdict(task))
        command = [sys.executable, "-u", os.path.abspath(__file__), "--child", text]
        path = os.pathsep.join(filter(None, (str(common.ROOT), os.environ.get("PYTHONPATH"))))
        policy = {} if args.wait_policy is None else {"OMP_WAIT_POLICY": args.wait_policy}
        return Child(name, command, env={"PYTHONPATH": path, **policy}, timeout=args.timeout)

    with rates(args.directory) as drive, common.Race({"drive": partial(drive.drive, Job("read"))}) as run:
        for name in (n for n in CONTESTANTS if n in args.contestants):
            run.start(name, partial(start, name), lambda child: child.ask(str(args.burst)))
        samples = run.run(args.warmup, args.rounds)
    rate = statistics.median(samples.pop("drive"))
    seconds = {name: [statistics.mean(s["seconds"]) for s in runs] for name, runs in samples.items()}
    table = {
        name: {
            "seconds_per_token": statistics.median(seconds[name]),
            "bytes_read_per_token": statistics.median(s["bytes_read"] for s in runs),
            "peak_rss": max(s["peak_rss"] for s in runs),
        }
        for name, runs in samples.items()
    }
    result: dict[str, Any] = {
        "table": table,
        "same_tokens": len({tuple(runs[0]["tokens"]) for runs in samples.values()}) == 1,
        "cache_dropped": all(s["dropped"] for runs in samples.values() for s in runs),
        "nvme_read_bytes_per_second": rate,
        "wanted": WANTED,
    }
    if {"infinity", "torch"} <= table.keys():
        row, compute = table["infinity"], table["torch"]["seconds_per_token"]
        reads = row["bytes_read_per_token"] / rate
        result["bound"] = {"compute": compute, "reads": reads, "seconds": max(compute, reads)}
        result["of_bound"] = row["seconds_per_token"] / max(compute, reads)
    if {"infinity", "accelerate"} <= table.keys():
        result["of_accelerate"] = common.paired(seconds["infinity"], seconds["accelerate"])
    return {**result, "errors": run.errors, "contestants": run.ready, "samples": samples}


def save(model: GPT2, directory: str, dtype: str) -> None:
    """Save a model as transformers does."""
    import torch

    built = model.build().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    built.config.use_cache = True
    built.save_pretrained(directory)


def show(result: dict[str, Any]) -> None:
    """Print it."""
    for name, row in result["table"].items():
        read = f"  read {row['bytes_read_per_token'] / 1e9:.3f} GB" if name == "infinity" else ""
        rss = f"RSS {row['peak_rss'] / 1e9:.2f} GB"
        print(f"  {name:11} {row['seconds_per_token']:.4f} s per token  {rss}{read}")
    if "bound" in result:
        bound = result["bound"]
        print(
            f"  of its bound {result['of_bound']:.3f} × {bound['seconds']:.4f} s "
            f"(wanted ≤ {WANTED['of_bound']}): compute {bound['compute']:.4f}, reads {bound['reads']:.4f}"
        )
    if "of_accelerate" in result:
        print(f"  of accelerate {common.ratio_text(result['of_accelerate'], WANTED['of_accelerate'])}")
    if not result["same_tokens"]:
        print("  NOT the same tokens")
    if not result["cache_dropped"]:
        print("  the page cache could not be dropped: accelerate may read memory")


def main() -> None:
    """Measure, print, write the JSON."""
    if sys.argv[1:2] == ["--child"]:
        serve(Task(**json.loads(sys.argv[2])))
        return
    parser = common.step_arguments(__doc__)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--files", choices=("fp32", "bf16"), help="dtype of the files; default: that of --dtype"
    )
    parser.add_argument("--wait-policy", choices=("ACTIVE", "PASSIVE"), help="OMP_WAIT_POLICY of contestants")
    parser.add_argument("--burst", type=int, default=8, help="tokens of a turn")
    args = parser.parse_args()
    if "accelerate" in args.contestants and importlib.util.find_spec("accelerate") is None:
        args.contestants.remove("accelerate")
    if args.tokens + args.burst > args.positions:
        parser.error("--tokens and --burst are more than --positions")
    hardware = common.hardware(args.directory)
    try:
        with common.scratch(os.path.abspath(args.directory)) as folder:
            found = race(folder, args)
    except InfinityError as error:
        sys.exit(str(error))
    show(found)
    model = common.model_of(args)
    result = {
        "benchmark": f"inference: GPT-2, {args.dtype}, parameters on NVMe, two units on the device",
        "model": {**dataclasses.asdict(model), "heads": model.heads, "parameters": model.parameters},
        **{name: getattr(args, name) for name in ("tokens", "dtype", "device", "rounds", "burst", "threads")},
        "wait_policy": args.wait_policy,
        "warmup_rounds": args.warmup,
        **found,
        "versions": common.versions(),
        "hardware": hardware,
    }
    common.publish(args.output, finite(result))
    if "infinity" in found["errors"] or not found["same_tokens"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
