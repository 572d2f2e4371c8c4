"""`metrics`: figures of the last step and of memory."""

from __future__ import annotations

import math
from typing import Any

from infinity.core.sizes import GiB, Tier

from .engine import engine_of


def metrics(thing: object) -> dict[str, Any]:
    """Return figures of the last step and of memory, under torchtitan's key names where it has them.

    `thing` is a wrapped model or its optimizer. A step lasts from the end of one `step()` to the end of the
    next. For a model of `inference`, it lasts from the end of one forward to the end of the next. These
    figures describe the last step:

    - ``grad_norm``: 2-norm before clipping, unscaled; ``loss_scale``: 1.0 unless fp16.
    - ``time_metrics/end_to_end(s)``, ``time_metrics/update(s)``: time of the step, and of `step()` alone, in
      seconds.
    - ``stall/h2d(%)``, ``stall/nvme(%)``, ``stall/update(%)``, ``stall/reduce(%)``: time that the user's
      thread waited (for copies to the device, drives, the update, gradients on their way), in % of the step.
    - ``io/read(GB/s)``, ``io/write(GB/s)``: bytes that the drives moved, divided by the time of the whole
      step.
    - ``efficiency(%)``: the share of the step in which the busiest resource was busy: compute (time that is
      neither a stall nor in `step()`), a drive, or the update.
    - ``bound``: one sentence, a str, with these shares: what bounded the step. All other values are floats.
    - ``delayed/drift``: how far the last delayed update moved the parameters, relative to their 2-norm. The
      engine measures it in the first chunk of each unit, in 65,536 elements. 0.0 if no update was delayed.

    The optimizer's state dict saves and restores ``steps`` and ``skipped_steps``: those whose
    gradients were not finite, with fp16 or `Config.skip_nonfinite`.

    These figures count since `wrap`: ``nvme/read(GiB)``, ``nvme/written(GiB)``,
    ``fetch/units`` (units loaded to the device), ``fetch/hits`` (uses of units that were on the device, or on
    their way), ``activations/kept`` (inputs of checkpointed layers that did not fit on the host).

    ``memory/held_units`` counts units that stay on the device because something outside of the engine refers
    to them (an alias of a parameter). ``memory/held(GiB)`` is their memory.

    Planned memory: ``memory/device(GiB)``, ``memory/host(GiB)``, ``memory/nvme(GiB)``. Peak memory so far:
    ``memory/device_units_peak(GiB)``, ``memory/host_leases_peak(GiB)``, ``activations/host(GiB)``.

    Raises:
        WrapError: `thing` belongs to no wrapped model.
    """
    engine = engine_of(thing)
    optimizer = engine.optimizer if engine.trains else None
    stats = engine.store.stats()
    pool = engine.pool.stats()
    activations = engine.activations
    held = engine.residency.held()
    values = {
        "grad_norm": math.nan if optimizer is None or optimizer.grad_norm is None else optimizer.grad_norm,
        "loss_scale": optimizer.loss_scale if optimizer is not None else 1.0,
        "steps": float(optimizer.steps if optimizer is not None else 0),
        "skipped_steps": float(optimizer.skipped_steps if optimizer is not None else 0),
        "time_metrics/end_to_end(s)": engine.phases.times["step"],
        "time_metrics/update(s)": engine.phases.times["update"],
        "memory/device(GiB)": (engine.footprint.total(Tier.DEVICE)) / GiB,
        "memory/device_units_peak(GiB)": engine.residency.cache.peak / GiB,
        "memory/held_units": float(len(held)),
        "memory/held(GiB)": sum(u.layout.gathered_nbytes for u in held) / GiB,
        "memory/host(GiB)": engine.footprint.total(Tier.HOST) / GiB,
        "memory/host_leases_peak(GiB)": sum(q.peak for q in pool.values()) / GiB,
        "memory/nvme(GiB)": engine.footprint.total(Tier.NVME) / GiB,
        "nvme/read(GiB)": sum(s.bytes_read for s in stats) / GiB,
        "nvme/written(GiB)": sum(s.bytes_written for s in stats) / GiB,
        "delayed/drift": engine.updater.drift.value,
        "fetch/units": float(engine.residency.cache.loads),
        "fetch/hits": float(engine.residency.hits),
        **engine.recorder.figures,
        "bound": engine.recorder.bound(),
        "activations/host(GiB)": activations.peak / GiB if activations is not None else 0.0,
        "activations/kept": float(activations.kept) if activations is not None else 0.0,
    }
    return values
