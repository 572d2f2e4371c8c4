"""One contestant of the timing of a GPU's step (speed.py), in a process of its own.

    python benchmarks/gpu_step.py '{"kind": "torch", …}'

It builds its model once. Each line that it is sent is a point: how many sequences of how many tokens, steps
to warm up, steps that count. With DeepSpeed nothing of infinity that needs a native module is imported.

Each step ends with a mark on the stream of the computation. Nothing waits for the device between the steps:
what an engine does behind the next forward stays there, and losses are read when all steps are over.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import runner
import torch
from children import forget_peak, lines, peak_memory, tell
from devices import opened
from llama import Llama, Task
from steps import ADAMW

#: Of `infinity.metrics`: what a step waited for, and how much the link and the drives gave.
METRICS: Final = ("stall/", "efficiency", "time_metrics/", "io/", "grad_norm", "fetch/")
#: Operators and kernels of a profile that are kept.
ROWS: Final = 25


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A model that takes steps.

    Attributes:
        step: `step()` and `zero_grad()` of its optimizer.
        settle: waits for what goes on behind the last step.
        figures: what it says itself of its last step.
    """

    model: Any
    device: torch.device
    step: Callable[[], None]
    backward: Callable[[Any], Any] = torch.Tensor.backward
    settle: Callable[[], None] = lambda: None
    figures: Callable[[], dict[str, float]] = dict
    close: Callable[[], None] = lambda: None


# -- who takes steps ----------------------------------------------------------------------------


def with_infinity(task: Task, device: str) -> Contestant:
    """Return a model that the engine offloads; `device` is what the engine calls the one of `task`."""
    from internals import threads, updated_in_backward

    import infinity

    settings = {"device": device, "nvme": task.directory, "dtype": "bf16", "max_grad_norm": task.clip}
    if task.reserve:
        settings["device_memory"] = torch.cuda.mem_get_info()[0] - task.reserve
    config = infinity.Config(**settings, **task.settings)
    with infinity.init(config):
        model = task.model.build()
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), **ADAMW), config)
    optimizer.delayed_from = 0  # delayed from the first step on, not after a warm-up
    inside = updated_in_backward(optimizer)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def figures() -> dict[str, float]:
        told = {k: v for k, v in infinity.metrics(optimizer).items() if k.startswith(METRICS)}
        return {**told, "units_updated_in_backward": inside(), "adam_threads": threads()}

    return Contestant(
        model=model,
        device=next(model.buffers()).device,
        step=step,
        settle=functools.partial(infinity.flush, optimizer),
        figures=figures,
        close=functools.partial(infinity.close, optimizer),
    )


def with_torch(task: Task, device: str) -> Contestant:
    """Return a model in plain torch, all of it on the device, with fp32 masters and fused AdamW."""
    model = task.model.build().to(task.device)
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    for master in masters:
        master.grad = torch.empty_like(master)
    grads = [master.grad for master in masters]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(grads, [p.grad for p in parameters])
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, task.clip)
        optimizer.step()
        torch._foreach_copy_(parameters, masters)
        model.zero_grad()

    return Contestant(model=model, device=parameters[0].device, step=step)


def with_deepspeed(task: Task, device: str) -> Contestant:
    """Return DeepSpeed's engine, with its own defaults for all that `task` does not name."""
    import deepspeed

    optimizer = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": task.clip or 0.0,
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "zero_optimization": task.settings,
    }
    deepspeed.init_distributed()
    model = task.model.build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Contestant(model=engine, device=engine.device, step=engine.step, backward=engine.backward)


KINDS: Final = {"infinity": with_infinity, "torch": with_torch, "deepspeed": with_deepspeed}


# -- steps --------------------------------------------------------------------------------------


class Marks:
    """Moments of the device: events on the stream of the computation; without CUDA, of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def add(self) -> None:
        """Mark that everything so far is computed."""
        if self._is_cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the seconds between marks, when the device has reached the last one."""
        pairs = itertools.pairwise(self._marks)
        return [a.elapsed_time(b) / 1e3 if self._is_cuda else b - a for a, b in pairs]


def synchronize(device: torch.device) -> None:
    """Wait for all that the device was given."""
    if device.type != "cpu":
        torch.cuda.synchronize()


def take(who: Contestant, loss_of: Callable[[Any], Any]) -> torch.Tensor:
    """Take a step; return its loss, which the device may yet have to compute."""
    loss = loss_of(who.model)
    who.backward(loss)
    who.step()
    return loss.detach()


def measured(who: Contestant, model: Llama, job: dict[str, int]) -> dict[str, Any]:
    """Take the steps of a point; return what they took."""
    batch, sequence = job["batch"], job["sequence"]
    loss_of = model.loss_of(batch, sequence, who.device)
    if who.device.type != "cpu":
        torch.cuda.empty_cache()  # what other sizes have left
        torch.cuda.reset_peak_memory_stats()
    retries = _retries()
    losses = [take(who, loss_of) for _ in range(job["warmup"])]
    synchronize(who.device)
    marks, told = Marks(who.device), []
    began = time.perf_counter()
    marks.add()
    for _ in range(job["steps"]):
        losses.append(take(who, loss_of))
        marks.add()
        told.append(who.figures())
    who.settle()
    synchronize(who.device)
    seconds = (time.perf_counter() - began) / job["steps"]
    intervals = marks.intervals()
    middle = statistics.median(intervals)
    flops = model.flops(batch, sequence)
    return {
        "tokens": batch * sequence,
        "seconds": middle,
        "quantiles": _quantiles(intervals),
        "intervals": intervals,
        "seconds_with_drain": seconds,
        "tokens_per_second": batch * sequence / middle,
        "tflops_of_model": flops["model"] / middle / 1e12,
        "tflops_of_device": flops["device"] / middle / 1e12,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "num_alloc_retries": _retries() - retries,
        "peak_rss": peak_memory(),
        "losses": [float(loss) for loss in losses],
        "figures": {name: statistics.median(each[name] for each in told) for name in told[0]},
    }


def _retries() -> int:
    """Return how often the allocator has given back what it had cached, and asked again."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"least": min(values), "0.1": cuts[0], "0.5": cuts[4], "0.9": cuts[8], "most": max(values)}


def profiled(who: Contestant, model: Llama, job: dict[str, Any]) -> dict[str, Any]:
    """Return where the time of steps goes, by torch's profiler, and by the engine's trace, which stays in the
    file ``trace``."""
    import infinity

    loss_of = model.loss_of(job["batch"], job["sequence"], who.device)
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as seen:
        for _ in range(job["steps"]):
            take(who, loss_of)
        synchronize(who.device)
    rows = [
        {
            "name": event.key[:80],
            "count": event.count,
            "device_ms": round(event.self_device_time_total / 1e3, 3),
            "host_ms": round(event.self_cpu_time_total / 1e3, 3),
        }
        for event in seen.key_averages()
    ]
    with infinity.trace(who.model, job["trace"]):
        for _ in range(job["steps"] + 1):  # the first one's beginning is not in it
            take(who, loss_of)
    return {
        "steps": job["steps"],
        **{by: sorted(rows, key=lambda row: -row[f"{by}_ms"])[:ROWS] for by in ("device", "host")},
        "bound": infinity.metrics(who.model)["bound"],
    }


def serve(task: Task, device: str) -> None:
    """Build; then do what each line says."""
    began = time.perf_counter()
    who = KINDS[task.kind](task, device)
    synchronize(who.device)
    about = {"parameters": task.model.parameters, "torch_threads": torch.get_num_threads()}
    tell({**about, "built_seconds": time.perf_counter() - began, "versions": runner.versions("deepspeed")})
    forget_peak()
    for line in lines():
        job = json.loads(line)
        tell((profiled if "trace" in job else measured)(who, task.model, job))
    who.close()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    wanted = Task(**{**given, "model": Llama(**given["model"])})
    with opened(wanted.device) as named:
        serve(wanted, named)
