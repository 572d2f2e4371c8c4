"""The stages of gpu.py that time a GPU's step: `speed`, `large`, and what `checks` has of it.

A contestant is one process (gpu_step.py), and no other is alive beside it. It builds its model once and takes
the points one after the other, from few tokens to many. The JSON of the stage is written after each point.

The lists here are in the order of what users ask first, and a stage goes through them in this order. When
time is short, it leaves out the end: a contestant that would not get through its start, and the points of a
contestant that would take longer than what is left.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import runner
from children import Child, ChildError
from llama import Llama, Task

if TYPE_CHECKING:
    from gpu import Stage

#: A contestant; not imported here, since torch takes seconds.
SCRIPT: Final = str(Path(__file__).with_name("gpu_step.py"))
#: A model that fits the device as a whole, one that does not, and the smallest, for the double.
SMALL: Final = Llama()
LARGE: Final = Llama(layers=32, width=4096, mlp=14336, heads=32, kv_heads=8, vocabulary=128_256)
SMALLEST: Final = Llama(layers=2, width=64, mlp=128, heads=2, kv_heads=1, vocabulary=300)
#: Points: sequences, and tokens of each.
POINTS: Final = ((1, 4096), (4, 4096), (8, 4096))
WARMUP, STEPS = 2, 6
CLIP: Final = 1.0
#: Device memory that 16K tokens of `LARGE` take beside what the engine has: logits of 128,256 words in bf16
#: and fp32, with their gradients and softmax (34 GB), the blocks' inputs, one block that is computed again.
ACTIVATIONS: Final = 44 << 30
#: Seconds that a contestant of either model needs until it can take its first point.
SMALL_START, LARGE_START = 30.0, 90.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contestant; see `Task`. `beside`: the one in plain torch that does the same work."""

    kind: str = "infinity"
    settings: dict[str, Any] = field(default_factory=dict)
    clip: float | None = CLIP
    beside: str = "torch"
    reserve: int = 0


_ON_HOST: Final = {"parameters": "device", "gradients": "host", "optimizer_state": "host"}
_ON_DEVICE: Final = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "device")
_BACKWARD: Final = {"update": "backward", "accumulation": 1}
_PINNED: Final = {"device": "cpu", "pin_memory": True}
_ZERO2: Final = {
    "stage": 2,
    "offload_optimizer": _PINNED,
    "overlap_comm": True,
    "contiguous_gradients": True,
}
_REFLOW: Final = {"stage": 3, "offload_optimizer": _PINNED, "overlap_comm": True, "reflow": {}}
#: Of `speed`, by what is left out last.
ENTRIES: Final = {
    "torch": Entry(kind="torch"),
    "overlap": Entry(settings={**_ON_HOST, "update": "overlap"}),
    "backward": Entry(settings={**_ON_HOST, **_BACKWARD}, clip=None, beside="torch-unclipped"),
    "torch-unclipped": Entry(kind="torch", clip=None, beside="torch-unclipped"),
    "zero-offload": Entry(kind="deepspeed", settings=_ZERO2),
    "reflow": Entry(kind="deepspeed", settings=_REFLOW),
    "overlap-16mi": Entry(settings={**_ON_HOST, "update": "overlap", "chunk_elements": 16 << 20}),
    "delayed": Entry(settings={**_ON_HOST, "update": "delayed"}),
    "zero-offload-unclipped": Entry(kind="deepspeed", settings=_ZERO2, clip=None, beside="torch-unclipped"),
    "reflow-unclipped": Entry(kind="deepspeed", settings=_REFLOW, clip=None, beside="torch-unclipped"),
    "on-device": Entry(settings=_ON_DEVICE),
}
#: Of those, on the double: the others are the same with other settings.
SMOKE: Final = ("torch", "overlap", "backward", "zero-offload")
_LARGE: Final = {
    "parameters": "host",
    "gradients": "host",
    "optimizer_state": {"device": 0.3, "host": 0.7},
    "split_master": True,
}
#: Of `large`.
LARGE_ENTRIES: Final = {
    "overlap": Entry(settings={**_LARGE, "update": "overlap"}, reserve=ACTIVATIONS),
    "backward": Entry(settings={**_LARGE, **_BACKWARD}, clip=None, reserve=ACTIVATIONS),
}
#: Of `checks`: state in 8 bits on the drive, with split masters.
ON_DRIVE: Final = Entry(
    settings={**_ON_HOST, "optimizer_state": "nvme", "optimizer_state_dtype": "8bit", "split_master": True}
)


# -- contestants --------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What one contestant of a stage does: at the `points`, and last, if `profiled`, at the last of them."""

    model: Llama
    points: Sequence[tuple[int, int]]
    warmup: int = WARMUP
    steps: int = STEPS
    profiled: bool = False


def plan_of(stage: Stage, model: Llama, points: Sequence[tuple[int, int]], **more: Any) -> Plan:
    """Return a plan; on the double the smallest one."""
    if stage.smoke:
        return Plan(SMALLEST, [(1, 16), (2, 16)][: len(points)], warmup=1, steps=2, **more)
    return Plan(model, points, **more)


def contestant(
    stage: Stage, name: str, entry: Entry, plan: Plan, start: Callable[..., Any] = runner.start
) -> Callable[[dict[str, Any]], bool]:
    """Return a part that is one contestant. `start` starts its process."""

    def call(found: dict[str, Any]) -> bool:
        found |= {"clip": entry.clip, "settings": entry.settings, "points": {}}
        directory = os.path.join(stage.args.directory, name)
        task = Task(
            kind=entry.kind,
            model=plan.model,
            directory=directory,
            device=stage.args.device,
            clip=entry.clip,
            reserve=0 if stage.smoke else entry.reserve,
            settings=entry.settings,
        )
        try:
            with start(name, task, timeout=max(1.0, stage.left()), script=SCRIPT) as child:
                found |= child.ready
                return _points(stage, child, plan, found)
        except ChildError as error:
            found |= {"error": error.reason, "exit_status": error.code, "log": error.said[-25:]}
            if entry.kind == "deepspeed":  # a peer that fails says nothing about us
                found["verdict"] = f"left out: {error.reason[:200]}"
            elif error.code is None:
                found["verdict"] = "timed out"
            return False
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    return call


def _points(stage: Stage, child: Child, plan: Plan, found: dict[str, Any]) -> bool:
    """Have a child take the points, as long as there is time."""
    took, before = 0.0, 0
    for batch, sequence in plan.points:
        tokens = batch * sequence
        least = took * tokens / before if before else 0.0
        if not _has_time(stage, found, f"{tokens} tokens", least):
            return bool(found["points"])
        job = {"batch": batch, "sequence": sequence, "warmup": plan.warmup, "steps": plan.steps}
        began = time.monotonic()
        found["points"][str(tokens)] = _asked(stage, child, job)
        took, before = time.monotonic() - began, tokens
        stage.save()
    if plan.profiled and _has_time(stage, found, "profile", 2 * took):
        trace = str((stage.args.logs / f"{stage.name}-{child.name}-trace.json").absolute())
        found["profile"] = _asked(
            stage, child, {"batch": batch, "sequence": sequence, "steps": 2, "trace": trace}
        )
    return True


def _has_time(stage: Stage, found: dict[str, Any], what: str, least: float) -> bool:
    """Return whether there is time for what takes `least` seconds; say so if not."""
    if stage.smoke or stage.left() > least:
        return True
    found.setdefault("left_out", []).append(f"{what}: {stage.left():.0f} s are left, it takes {least:.0f}")
    return False


def _asked(stage: Stage, child: Child, job: dict[str, Any]) -> dict[str, Any]:
    child.timeout = max(1.0, stage.left())
    return child.ask(json.dumps(job))


def shares(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the headline: by contestant and tokens, tokens per second; and, where that was measured, as a
    share of those of plain torch that does the same work."""
    rates = {
        name: {tokens: point["tokens_per_second"] for tokens, point in part["points"].items()}
        for name, part in parts.items()
        if part.get("points")
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, of in rates.items():
        beside = rates.get(ENTRIES[name].beside, {}) if name in ENTRIES else {}
        found[name] = {
            tokens: {
                "tokens_per_second": round(rate, 1),
                "last_loss": parts[name]["points"][tokens]["losses"][-1],
                **({"of_torch": round(rate / beside[tokens], 4)} if tokens in beside else {}),
            }
            for tokens, rate in of.items()
        }
    return found


# -- DeepSpeed ----------------------------------------------------------------------------------


def missing_for_deepspeed() -> str | None:
    """Return why DeepSpeed cannot run here, if that is so."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        return "DeepSpeed needs nvcc"
    return None if cpp_extension.is_ninja_available() else "DeepSpeed needs ninja"


def deepspeed(args: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed compiles its CPU Adam, outside of every clock; whether it has Reflow."""
    import deepspeed as peer
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    CPUAdamBuilder().load()
    return {
        "passed": True,
        "deepspeed": peer.__version__,
        "reflow": "reflow" in DeepSpeedZeroConfig.model_fields,
    }


# -- the stages ---------------------------------------------------------------------------------


def speed(stage: Stage) -> None:
    """The CPU's Adam; 1.4 B at 4K, 16K and 32K tokens: the engine beside plain torch and DeepSpeed."""
    adam = ["adam_beside.py", "--device", stage.args.device]
    stage.part("adam", 30, stage.script("adam", adam, 60))
    for name, entry in ENTRIES.items():
        if stage.smoke and name not in SMOKE:
            continue
        if entry.kind == "deepspeed":
            if "deepspeed" not in stage.parts:
                stage.part("deepspeed", 60, lambda found: _prepared(stage, found))
            if (why := _unable(stage.parts["deepspeed"], entry)) is not None:
                stage.parts[name] = {"verdict": f"left out: {why}"}
                continue
        stage.part(name, SMALL_START, contestant(stage, name, entry, plan_of(stage, SMALL, POINTS)))


def _prepared(stage: Stage, found: dict[str, Any]) -> bool:
    if (why := missing_for_deepspeed()) is not None:
        found["verdict"] = f"left out: {why}"
        return False
    good = stage.task("deepspeed", 120)(found)
    if not good:
        found["verdict"] = "left out: DeepSpeed's CPU Adam was not compiled"
    return good


def _unable(prepared: dict[str, Any], entry: Entry) -> str | None:
    """Return why a contestant of DeepSpeed does not take part, if that is so."""
    if prepared["verdict"] != "passed":
        return "see deepspeed"
    if "reflow" in entry.settings and not prepared["reflow"]:
        return f"DeepSpeed {prepared['deepspeed']} has no reflow"
    return None


def large(stage: Stage) -> None:
    """8 B at 16K tokens, state on device and host, parameters on the host; profile and trace of both."""
    for name, entry in LARGE_ENTRIES.items():
        if stage.smoke and name not in SMOKE[:2]:
            continue
        plan = plan_of(stage, LARGE, POINTS[1:2], profiled=True)
        stage.part(name, LARGE_START, contestant(stage, name, entry, plan))
