"""Whole training steps of GPT-2 203 M (128 tokens, batch 1) beside DeepSpeed and plain torch.

    python benchmarks/whole_step.py --directory /mnt/nvme --deepspeed-python /path/to/python \\
        --modes state-on-nvme all-on-host all-on-nvme --output results.json

Every contestant is a process of its own; in every round each takes one turn, in an order that rotates.
A turn is forward, backward, `step()` and `zero_grad()`.

mode            infinity                                          DeepSpeed, ZeRO-3
state-on-nvme   state on NVMe, parameters on the device           optimizer offloaded to nvme
all-on-host     parameters, gradients and state on the host       optimizer offloaded to cpu
all-on-nvme     parameters, gradients and state on NVMe           optimizer and parameters to nvme
state-on-host   state on the host, parameters on the device       optimizer offloaded to cpu
in-memory       everything on the device                          optimizer offloaded to cpu

The third contestant is plain torch, all in memory, with its fused AdamW. Where DeepSpeed fails, its error
is part of the result.

With an update that goes on behind the next forward (--update overlap or delayed), a turn is a burst of
steps (--burst, 4 unless told otherwise) and ends when all of it is complete, so that nobody works in
another's turn; the figure is the time of the turn by the number of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

PACKAGES = ("torch", "transformers", "infinity-offload")
MODES: dict[str, dict[str, dict[str, str]]] = {
    "state-on-nvme": {
        "infinity": {"parameters": "device", "gradients": "host", "optimizer_state": "nvme"},
        "deepspeed": {"state": "nvme", "parameters": "device"},
    },
    "all-on-host": {
        "infinity": {"parameters": "host", "gradients": "host", "optimizer_state": "host"},
        "deepspeed": {"state": "cpu", "parameters": "device"},
    },
    "all-on-nvme": {
        "infinity": {
            "parameters": "nvme",
            "gradients": "nvme",
            "optimizer_state": "nvme",
            "device_memory": "1GiB",
            "host_memory": "1GiB",
        },
        "deepspeed": {"state": "nvme", "parameters": "nvme"},
    },
    "state-on-host": {
        "infinity": {"parameters": "device", "gradients": "host", "optimizer_state": "host"},
        "deepspeed": {"state": "cpu", "parameters": "device"},
    },
    "in-memory": {
        "infinity": {"parameters": "device", "gradients": "device", "optimizer_state": "device"},
        "deepspeed": {"state": "cpu", "parameters": "device"},
    },
}
TARGETS = {"state-on-nvme": {"of_deepspeed": 1.5}}
#: Host memory that a contestant takes at its peak with everything on a CPU, in bytes per parameter, and
#: beside the model. Measured, rounded up: all contestants of a mode are alive at once.
MEMORY = {"infinity": (16, 1 << 30), "torch": (16, 1 << 30), "deepspeed": (50, 1 << 30)}


# -- the children -----------------------------------------------------------------------------------


def build_infinity(args: argparse.Namespace) -> tuple[Any, Any, Callable[[], None]]:
    """Return the wrapped model, its optimizer, and what waits for everything that goes on behind."""
    import torch

    import infinity
    from infinity.hardware import cpu_adam
    from infinity.surface.engine import engine_of

    cpu_adam.set_threads(args.threads)
    config = infinity.Config(
        nvme=args.directory,
        device=args.device,
        dtype=args.dtype,
        update=args.update,
        **{**MODES[args.mode]["infinity"], **json.loads(args.config)},
    )
    with infinity.init(config):
        model = common.gpt2(args.layers, args.width, args.vocabulary, args.positions)
    optimizer = torch.optim.AdamW(model.parameters(), **common.ADAMW)
    model, optimizer = infinity.wrap(model, optimizer, config)
    last = list(model.parameters())[-1]
    engine = engine_of(model)

    def drain() -> None:
        if args.update != "sync":
            with infinity.gathered(last):  # the last unit that is updated
                pass
            engine.store.flush()

    return model, optimizer, drain


def build_torch(args: argparse.Namespace) -> tuple[Any, Any, Callable[[], None]]:
    """Return the model on the device and torch's fused AdamW."""
    import torch

    model = common.gpt2(args.layers, args.width, args.vocabulary, args.positions).to(args.device)
    if args.dtype == "bf16":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **common.ADAMW)
    return model, optimizer, lambda: None


def serve(args: argparse.Namespace) -> None:
    """Build one contestant; then run as many steps as each line says."""
    import torch

    torch.set_num_threads(args.threads)
    cuda = args.device.startswith("cuda")
    imports = common.status(os.getpid())
    build = {"infinity": build_infinity, "torch": build_torch}[args.serve]
    model, optimizer, drain = build(args)
    tokens = common.batch(args.vocabulary, args.tokens).to(args.device)
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    common.tell(
        {
            "params": sum(p.numel() for p in model.parameters()),
            "anonymous_at_imports": imports.get("RssAnon", 0),
            "versions": common.versions(*PACKAGES),
        }
    )
    # Not what building took, which is freed by now: what steps take.
    common.forget_peak()
    for line in common.lines():
        count = int(line)
        parts = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        losses = []
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(count):
            start = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            wait()
            after_forward = time.perf_counter()
            loss.backward()
            wait()
            after_backward = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            wait()
            end = time.perf_counter()
            parts["forward"] += after_forward - start
            parts["backward"] += after_backward - after_forward
            parts["step"] += end - after_backward
            losses.append(loss.item())
            del loss
        drain()
        wait()
        seconds = time.perf_counter() - begin
        common.tell(
            {
                "seconds": seconds / count,
                **{name: value / count for name, value in parts.items()},
                "losses": losses,
                "peak_rss": common.status(os.getpid()).get("VmHWM", 0),
                "device_peak": torch.cuda.max_memory_allocated() if cuda else 0,
            }
        )
    if args.serve == "infinity":
        import infinity

        infinity.close(optimizer)


# -- the parent ---------------------------------------------------------------------------------------


def check_memory(args: argparse.Namespace) -> None:
    """Exit if the contestants do not fit this machine's memory together: the kernel would end one."""
    names = [n for n in args.contestants if n != "deepspeed" or args.deepspeed_python]
    params = (12 * args.layers * args.width + args.vocabulary + args.positions) * args.width
    need = sum(MEMORY[n][0] * params + MEMORY[n][1] for n in names)
    if not args.device.startswith("cuda") and need > common.available_memory():
        sys.exit(
            f"{', '.join(names)} together need about {need / 1e9:.1f} GB of memory, "
            f"{common.available_memory() / 1e9:.1f} are available: name fewer with --contestants"
        )


def start(name: str, mode: str, folder: str, args: argparse.Namespace) -> common.Child:
    """Start one contestant."""
    own = os.path.join(folder, f"{mode}-{name}")
    os.makedirs(own)
    options = [
        *(f"--{n}={getattr(args, n)}" for n in ("layers", "width", "vocabulary", "positions", "tokens")),
        f"--threads={args.threads}",
        f"--dtype={args.dtype}",
        f"--directory={own}",
    ]
    if name == "deepspeed":
        settings = [f"--{k}={v}" for k, v in MODES[mode]["deepspeed"].items()]
        return common.deepspeed_child(args.deepspeed_python, [*options, *settings], timeout=args.timeout)
    options += [
        f"--serve={name}",
        f"--mode={mode}",
        f"--device={args.device}",
        f"--update={args.update}",
        f"--config={args.config}",
    ]
    env = {"PYTHONPATH": os.pathsep.join([str(common.ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-u", str(Path(__file__).resolve()), *options]
    return common.Child(name, command, env=env, timeout=args.timeout)


def measure(mode: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what each contestant took in one mode, and the errors of those that failed."""
    children: dict[str, common.Child] = {}
    errors: dict[str, Any] = {}
    ready: dict[str, Any] = {}
    samples: dict[str, list[dict[str, Any]]] = {}

    def failed(name: str, error: common.ChildError) -> None:
        child = children.pop(name, None)
        if child is not None:
            child.close()
        said = [line for line in error.log.splitlines() if line.strip()]
        errors[name] = {"error": error.reason, "exit_status": error.code, "log": said[-25:]}
        samples.pop(name, None)
        print(f"{mode}: {name} failed: {error.reason[:200]}", file=sys.stderr)
        if name == "infinity":
            print("\n".join(said), file=sys.stderr)

    try:
        for name in args.contestants:
            if name == "deepspeed" and not args.deepspeed_python:
                continue
            try:
                children[name] = start(name, mode, folder, args)
                ready[name] = children[name].ready
                samples[name] = []
            except common.ChildError as error:
                failed(name, error)
        watch = common.Watch({name: child.pid for name, child in children.items()})
        watch.start()
        names = list(children)
        for turn in range(args.warmup + args.rounds):
            at = turn % max(1, len(names))
            for name in names[at:] + names[:at]:
                if name not in children:
                    continue
                try:
                    answer = children[name].ask(str(args.burst))
                except common.ChildError as error:
                    failed(name, error)
                    continue
                if turn >= args.warmup:
                    samples[name].append(answer)
        watch.stop()
    finally:
        for child in children.values():
            child.close()
    return summary(mode, samples, ready, errors, watch.anonymous)


def summary(
    mode: str,
    samples: dict[str, list[dict[str, Any]]],
    ready: dict[str, Any],
    errors: dict[str, Any],
    anonymous: dict[str, int],
) -> dict[str, Any]:
    """Return medians, peaks and ratios."""
    table: dict[str, dict[str, float]] = {}
    for name, runs in samples.items():
        row: dict[str, float] = {
            f"{part}_s": round(common.median([r[part] for r in runs]), 4)
            for part in ("seconds", "forward", "backward", "step")
        }
        row["peak_rss"] = max((r["peak_rss"] for r in runs), default=0)
        row["peak_anonymous"] = anonymous[name]
        row["peak_anonymous_over_imports"] = anonymous[name] - ready[name].get("anonymous_at_imports", 0)
        row["device_peak"] = max((r.get("device_peak", 0) for r in runs), default=0)
        row["read_bytes"] = common.median([r["read_bytes"] for r in runs])
        row["written_bytes"] = common.median([r["written_bytes"] for r in runs])
        row["last_loss"] = runs[-1]["losses"][-1] if runs else float("nan")
        table[name] = row
    ratios = {}
    if "infinity" in samples:
        ours = [s["seconds"] for s in samples["infinity"]]
        for name, runs in samples.items():
            if name != "infinity":
                ratios[f"of_{name}"] = common.paired(ours, [s["seconds"] for s in runs])
    return {
        "placement": MODES[mode],
        "table": table,
        "speedups": ratios,
        "targets": TARGETS.get(mode, {}),
        "errors": errors,
        "contestants": ready,
        "samples": samples,
    }


def show(mode: str, result: dict[str, Any]) -> None:
    """Print one mode."""
    print(f"\n{mode}")
    for name, row in result["table"].items():
        parts = "  ".join(f"{p} {row[f'{p}_s']:.3f}" for p in ("forward", "backward", "step"))
        memory = f"RSS {row['peak_rss'] / 1e9:.2f} GB, anonymous {row['peak_anonymous'] / 1e9:.2f} GB"
        moved = f"read {row['read_bytes'] / 1e9:.2f} written {row['written_bytes'] / 1e9:.2f} GB"
        print(f"  {name:10} {row['seconds_s']:.3f} s  ({parts})  {memory}  {moved}")
    for name, ratio in result["speedups"].items():
        target = result["targets"].get(name)
        wanted = f"  (target {target})" if target else ""
        print(f"  {name:14} {ratio['of_medians']:.3f}  {ratio['lowest']:.3f}–{ratio['highest']:.3f}{wanted}")
    for name, error in result["errors"].items():
        print(f"  {name:10} failed: {error['error'][:160]}")


def main() -> None:
    """Measure, print tables, write the JSON."""
    parser = common.arguments(__doc__)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=["state-on-nvme"])
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=("infinity", "deepspeed", "torch"),
        default=["infinity", "deepspeed", "torch"],
    )
    parser.add_argument("--device", default="cpu", help="of infinity and torch: cpu, cuda")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--update", default="sync", help="infinity's Config(update=...)")
    parser.add_argument("--burst", type=int, help="steps of a turn; 1 with --update sync, else 4")
    parser.add_argument("--config", default="{}", help="more settings of infinity.Config, as JSON")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a start or a turn")
    parser.add_argument("--serve", choices=("infinity", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=tuple(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    check_memory(args)
    if args.burst is None:
        args.burst = 1 if args.update == "sync" else 4
    hardware = common.hardware(args.directory)
    results = {}
    for mode in args.modes:
        with common.scratch(args.directory) as folder:
            results[mode] = measure(mode, folder, args)
        show(mode, results[mode])
    common.publish(
        args.output,
        {
            "benchmark": f"whole_step: GPT-2, {args.tokens} tokens, {args.dtype}, update={args.update!r}",
            "rounds": args.rounds,
            "warmup_rounds": args.warmup,
            "burst": args.burst,
            "threads": args.threads,
            "model": {n: getattr(args, n) for n in ("layers", "width", "vocabulary", "positions")},
            "modes": results,
            "hardware": hardware,
        },
    )
    if any("infinity" in result["errors"] for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
