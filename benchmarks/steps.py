"""Models that take steps, offloaded by the engine or in plain torch with everything in memory, and what a
step of theirs must take at least.

[Note: the bound of a step] F, B: forward and backward of the same model in plain torch, all in memory. A:
the update by the engine's kernel, or torch's optimizer where the state is on the device. N: the bytes that
the step moved to and from NVMe, at the rate of the engine's own mixed reads and writes on that directory.
All are measured in the run that they are compared with, right after it or in turns with it. H: the part of
N that a backward can hide, which is at most B: state read ahead (`READ_AHEAD`), copies that the
backward itself reads, gradients that it writes. C: copies that the forward itself reads, at most F.

    sync      F + B + max(N − H − C, A)      nothing else of the update can be hidden
    overlap   B + max(F, N − H, A)           the update stands behind the next forward
    delayed   max(F + B, N, A)               it stands behind a whole step
    backward  F + max(B, N − C, A)           it runs beside the backward that makes its gradients

The link between host and device is not in it, and cores that Adam and the forward share count as if each
had its own: the bound is low rather than high. efficiency = bound ÷ measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from infinity.core.sizes import GiB, Tier

#: One AdamW for everybody.
ADAMW: Final[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Placement(NamedTuple):
    """Where infinity keeps things, as `infinity.Config` has it."""

    parameters: str
    gradients: str
    optimizer_state: str


PLACEMENTS: Final[dict[str, Placement]] = {
    "in-memory": Placement("device", "device", "device"),
    "state-on-host": Placement("device", "host", "host"),
    "all-on-host": Placement("host", "host", "host"),
    "state-on-nvme": Placement("device", "host", "nvme"),
    "state-and-gradients-on-nvme": Placement("device", "nvme", "nvme"),
    "all-on-nvme": Placement("nvme", "nvme", "nvme"),
}


def settings_of(placement: str, update: str, largest_unit: int) -> dict[str, Any]:
    """Return the settings of `infinity.Config` for one case; `largest_unit` in parameters."""
    settings: dict[str, Any] = {**PLACEMENTS[placement]._asdict(), "update": update}
    if update == "backward":
        settings["accumulation"] = 1
    if settings["parameters"] == "nvme":  # else everything would be loaded ahead into what is free
        settings |= dict.fromkeys(("device_memory", "host_memory"), max(GiB, 32 * largest_unit))
    return settings


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """A model that can take steps.

    Attributes:
        step: `step()` and `zero_grad()` of its optimizer.
        settle: waits for what goes on behind the last step.
        moved: bytes that its store has read and written so far.
        memory: bytes that the engine has on the device and on the host.
    """

    model: Any
    device: torch.device
    step: Callable[[], None]
    backward: Callable[[Any], None] = torch.Tensor.backward
    settle: Callable[[], None] = lambda: None
    moved: Callable[[], tuple[int, int]] = lambda: (0, 0)
    memory: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None

    def turn(self, loss_of: Callable[[Any], Any], count: int, *, apart: bool = False) -> dict[str, Any]:
        """Take `count` steps (forward, backward, `step`); return what they took, in seconds and bytes.

        ``intervals`` are from the end of one `step` to the end of the next: from the second on, each has
        the update of the step before behind it. ``seconds`` is the turn by its number of steps, what goes
        on behind the last step included: it is waited for, so that nobody works in another's turn.

        Args:
            apart: wait for a device after forward and backward, so that their times are their own. That
                would undo an overlap, so only torch is measured so.
        """
        cuda = self.device.type != "cpu"
        wait: Callable[[], Any] = torch.cuda.synchronize if cuda and apart else (lambda: None)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        losses: list[float] = []
        moved, marks = self.moved(), [time.perf_counter()]

        def mark() -> None:
            wait()
            marks.append(time.perf_counter())

        for _ in range(count):
            loss = loss_of(self.model)
            mark()
            self.backward(loss)
            mark()
            self.step()
            losses.append(loss.item())
            mark()
            del loss
        self.settle()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - marks[0]
        read, written = ((b - a) / count for a, b in zip(moved, self.moved(), strict=True))
        parts = [b - a for a, b in itertools.pairwise(marks)]
        return {
            "seconds": seconds / count,
            "intervals": [sum(parts[at : at + 3]) for at in range(0, len(parts), 3)],
            **{name: sum(parts[at::3]) / count for at, name in enumerate(("forward", "backward", "step"))},
            "losses": losses,
            "read": read,
            "written": written,
            "device_peak": torch.cuda.max_memory_allocated() if cuda else 0,
        }


def offloaded(build: Callable[[], nn.Module], **settings: Any) -> Stepper:
    """Return a model wrapped by the engine. `settings` are of `infinity.Config`.

    Raises:
        InfinityError: it does not fit, or the settings contradict each other.
    """
    # Not at the top: an interpreter without the native modules can step plain models.
    from infinity import Config, close, init, wrap
    from infinity.api.engine import engine_of

    config = Config(**settings)
    with init(config):
        model = build()
    model, optimizer = wrap(model, torch.optim.AdamW(model.parameters(), **ADAMW), config)
    optimizer.delayed_from = 0  # delayed from the first step on, not after a warm-up
    engine = engine_of(model)

    def settle() -> None:
        engine.states.quiesce()
        engine.store.wait_written()

    def moved() -> tuple[int, int]:
        stats = engine.store.stats()
        return sum(s.bytes_read for s in stats), sum(s.bytes_written for s in stats)

    return Stepper(
        model=model,
        device=engine.device.torch_device,
        step=_both(optimizer),
        settle=settle,
        moved=moved,
        memory=lambda: engine.footprint.total(Tier.DEVICE) + engine.footprint.total(Tier.HOST),
        close=lambda: close(optimizer),
    )


def in_memory(build: Callable[[], nn.Module], *, device: str, dtype: torch.dtype) -> Stepper:
    """Return a model in plain torch on `device`, with torch's fused AdamW."""
    model = build().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return Stepper(model=model, device=torch.device(device), step=_both(optimizer))


def _both(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- figures and bounds ----


def steady(turn: Mapping[str, Any]) -> float:
    """Return the median step of a turn in its steady state: from the second on, or the only one."""
    intervals = turn["intervals"]
    return float(statistics.median(intervals[1:] or intervals))


def figures(turns: Sequence[Mapping[str, Any]], params: int) -> dict[str, Any]:
    """Return medians of turns (see `Stepper.turn`); seconds and bytes of a step."""
    row = {
        "seconds": statistics.median(steady(turn) for turn in turns),
        "seconds_with_drain": statistics.median(turn["seconds"] for turn in turns),
        **{part: statistics.median(t[part] for t in turns) for part in ("forward", "backward", "step")},
        "read_bytes": statistics.median(turn["read"] for turn in turns),
        "written_bytes": statistics.median(turn["written"] for turn in turns),
        "device_peak": max(turn["device_peak"] for turn in turns),
        "last_loss": turns[-1]["losses"][-1],
    }
    row["bytes_per_parameter"] = (row["read_bytes"] + row["written_bytes"]) / params
    return row


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a bound is made of: seconds, and bytes of one step. See [Note: the bound of a step].

    `nvme_rate` is in bytes per second; None where nothing is on NVMe. `read_ahead`, `copies` and
    `gradients` are the bytes on NVMe of the state that may be read ahead, of one reading of all copies,
    and of the gradients as the backward writes them.
    """

    forward: float
    backward: float
    adam: float
    moved: float = 0.0
    nvme_rate: float | None = None
    read_ahead: float = 0.0
    copies: float = 0.0
    gradients: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return what the drive needs for `nbytes`."""
        return nbytes / self.nvme_rate if self.nvme_rate else 0.0

    @property
    def nvme(self) -> float:
        """N."""
        return self.seconds(self.moved)


def bound(update: str, found: Measured) -> float:
    """Return the seconds that a step takes at least. See [Note: the bound of a step]."""
    nvme, compute = found.nvme, found.forward + found.backward
    behind = min(found.moved, found.read_ahead + found.copies + found.gradients)
    hidden = min(found.backward, found.seconds(behind))
    loaded = min(found.forward, found.seconds(found.copies))
    if update == "backward":
        return found.forward + max(found.backward, nvme - loaded, found.adam)
    if update == "sync":
        return compute + max(nvme - hidden - loaded, found.adam, 0.0)
    if update == "overlap":
        return found.backward + max(found.forward, nvme - hidden, found.adam)
    return max(compute, nvme, found.adam)
