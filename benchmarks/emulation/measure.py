"""A child of `emulated.py`: one case on the modelled machine. Answers what it is asked, a line of JSON each.

python -m emulation.measure CASE SHAPE SCALE DIRECTORY
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this tree's infinity is measured

import torch
from children import lines, tell

from emulation import adapter, models
from emulation.cases import CASES, ON_DEVICE, Case
from emulation.machine import D2H, DRAM, H2D, Counts, Machine, Rates, lib, now, opened, read_of, write_of
from emulation.tracing import Span, causes, waits_of_engine

#: Of the real machine: far more than the models take.
HOST_MEMORY: Final = 256 << 30


class Contestant:
    """A model with what steps it.

    Attributes:
        step: an optimizer of the engine, or a peer.
    """

    def __init__(self, case: Case, machine: Machine, shape: models.Shape, directory: Path) -> None:
        self.machine, self.case = machine, case
        self.work = models.Work(machine.scale, machine.rates.flops, [1])
        model = models.Llama(shape, self.work)
        self.sizes = models.sizes_of(model, machine.scale)
        self.model: Any = model
        self.is_engine = case.settings is not None
        self._directory = directory
        if case.peer is not None:
            self.optimizer: Any = case.peer(model, machine)
            self.about: dict[str, Any] = {}
        else:
            self._wrap(model)
        self.ids = torch.zeros(1, 4, dtype=torch.long).to(machine.device)
        self.phases: list[Span] = []

    def _wrap(self, model: models.Llama) -> None:
        import infinity

        assert self.case.settings is not None
        scale = self.machine.scale
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "bf16",
            "host_memory": HOST_MEMORY // scale,
            **self.case.settings,
        }
        if settings.get("parameters") == "host":
            settings["device_memory"] = int(self.sizes.parameters / scale * 2 * ON_DEVICE)
        if settings.get("optimizer_state") == "nvme":
            drives = [self._directory / f"drive{number}" for number in range(self.case.drives)]
            for drive in drives:
                drive.mkdir()
            settings["nvme"] = [str(drive) for drive in drives]
        config = infinity.Config(**settings)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
        self.model, self.optimizer = infinity.wrap(model, adam, config)
        self.optimizer.delayed_from = 0
        named = {name: value for name, value in settings.items() if name != "nvme"}
        self.about = {"settings": named, "chunk_elements": adapter.largest_chunk(self.optimizer) * scale}

    def step(self) -> None:
        """Make a step, and note when each phase of it was."""
        times = [now()]
        loss = self.model(self.ids)
        times.append(now())
        loss.backward()
        times.append(now())
        self.optimizer.step()
        times.append(now())
        self.optimizer.zero_grad()
        times.append(now())
        names = ("forward", "backward", "step()", "zero_grad()")
        self.phases += [(times[i], times[i + 1], name) for i, name in enumerate(names)]

    def flush(self) -> None:
        """Wait until nothing is under way."""
        if self.is_engine:
            import infinity

            infinity.flush(self.optimizer)
        else:
            self.optimizer.flush()
        self.machine.synchronize()

    def close(self) -> None:
        """End it."""
        self.machine.live = False
        if self.is_engine:
            import infinity

            infinity.close(self.optimizer)
        else:
            self.optimizer.close()


def others() -> float:
    """Return the seconds of the CPUs that other processes have had since the machine started, or that a host
    took from it."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    )
    used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return used - time.process_time()


def measure(of: Contestant, *, tokens: int, dilation: float, steps: int, warm: int) -> dict[str, Any]:
    """Return the seconds of a step, and what the machine did in it, in the modelled machine's time."""
    machine = of.machine
    of.work.tokens[0] = tokens
    for _ in range(warm):
        of.step()
    machine.dilate(dilation)
    gc.collect()  # of what was made before, in nobody's step
    before, cpu, foreign = machine.counts(), time.process_time(), others()
    begin, durations = max(now(), lib.end(0)), []
    for _ in range(steps):
        at = now()
        of.step()
        durations.append((now() - at) / dilation)
    end = max(now(), lib.end(0))
    took, foreign, cpu = end - begin, others() - foreign, time.process_time() - cpu
    counts = machine.counts().minus(before)
    machine.dilate(1.0)
    return {
        "tokens": tokens,
        "dilation": dilation,
        "steps": steps,
        "seconds": took / steps / dilation,
        "steps_took": durations,
        "bounds": of.case.bounds(of.sizes, tokens, machine.rates),
        "busy": _busy(counts, steps),
        "cpu_seconds": cpu / steps,
        "cores_of_others": max(0.0, foreign / took),
    }


def idle(of: Contestant, *, tokens: int) -> dict[str, Any]:
    """Return the seconds in which the GPU was idle in one step, by cause. The engine's trace is on."""
    of.work.tokens[0] = tokens
    machine, path = of.machine, of._directory / "trace.json"
    machine.synchronize()
    of.phases.clear()
    with contextlib.ExitStack() as stack:
        if of.is_engine:
            import infinity

            stack.enter_context(infinity.trace(of.optimizer, path, limit=1_000_000))
        else:
            of.optimizer.waits.spans.clear()
        begin = max(now(), lib.end(0))
        machine.trace(True)
        of.step()
        last = lib.end(0)
        end = max(now(), last)
        machine.trace(False)
        step_end = of.phases[-2][1]
    waits = waits_of_engine(path, step_end) if of.is_engine else of.optimizer.waits.spans
    # A gap is noted when it ends: the first may have begun before this step, and the last ends after it.
    gaps = [(max(first, begin), until, cause) for first, until, cause in machine.gaps() if until > begin]
    gaps += [(max(last, begin), end, -1)] if end > max(last, begin) else []
    return {"tokens": tokens, "step": end - begin, "idle": causes(gaps, waits, of.phases)}


def count(of: Contestant, *, tokens: int, native: adapter.Native) -> dict[str, Any]:
    """Return what exactly one step does, with nothing under way before and after."""
    of.work.tokens[0] = tokens
    machine = of.machine
    of.step()
    of.flush()
    before, updates = machine.counts(), native.updates
    of.step()
    of.flush()
    counts = machine.counts().minus(before)
    parts = {
        "h2d": counts.resources[H2D],
        "d2h": counts.resources[D2H],
        "dram": counts.resources[DRAM],
        "read": counts.drives(read_of),
        "write": counts.drives(write_of),
    }
    return {
        "launches": counts.compute.uses,
        "compute": counts.compute.seconds,
        "updates": native.updates - updates,
        "parts": {name: part._asdict() for name, part in parts.items()},
    }


def _busy(counts: Counts, steps: int) -> dict[str, float]:
    seconds = {
        "gpu": counts.compute.seconds,
        "h2d": counts.resources[H2D].seconds,
        "d2h": counts.resources[D2H].seconds,
        "dram": counts.resources[DRAM].seconds,
        "read": counts.drives(read_of).seconds,
        "write": counts.drives(write_of).seconds,
    }
    return {name: value / steps for name, value in seconds.items()}


@contextlib.contextmanager
def contestant(
    name: str, shape: str, scale: int, directory: Path
) -> Iterator[tuple[Contestant, adapter.Native]]:
    """Have a case ready to step inside of this."""
    case = CASES[name]
    rates = Rates(drives=case.drives)
    with opened(rates, scale) as machine, adapter.replaced(machine) as native:
        of = Contestant(case, machine, models.SHAPES[shape], directory)
        machine.live = True
        try:
            yield of, native
        finally:
            of.close()


def main() -> None:
    """Answer what is asked, until nothing is asked any more. ``open`` comes first, and ends another case."""
    shape, scale, directory = sys.argv[1:]
    tell({})
    with contextlib.ExitStack() as stack:
        for line in lines():
            asked = json.loads(line)
            what = asked.pop("do")
            if what == "open":
                stack.close()
                opening = tempfile.TemporaryDirectory(prefix="emulated-", dir=directory)
                folder = Path(stack.enter_context(opening))
                of, native = stack.enter_context(contestant(asked["case"], shape, int(scale), folder))
                tell({"sizes": of.sizes._asdict(), "rates": of.machine.rates._asdict(), **of.about})
            elif what == "measure":
                tell(measure(of, **asked))
            elif what == "idle":
                tell(idle(of, **asked))
            else:
                tell(count(of, native=native, **asked))


if __name__ == "__main__":
    adapter.scale_sizes(int(sys.argv[2]))  # before anything imports the engine
    torch.set_num_threads(1)
    main()
