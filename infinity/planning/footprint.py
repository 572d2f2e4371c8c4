"""How many bytes a run takes on each tier, in closed form.

[Note: memory is a promise] What is computed here is what the engine allocates at start-up; a run
that does not fit is refused with the numbers of this file. Host memory is the state placed
there plus three pools (*quotas*):

- ``fetch``: leases through which copies travel from NVMe to the device;
- ``update``: one lease holds all that one chunk needs in the update pipeline;
- ``gradient``: leases in which gradients meet what is on NVMe;

and, with ``activations="host"``, a region for the inputs of recomputed layers. How many bytes they
come to only the first forward shows, so the region is a setting, or a share of what is left.

A pipeline takes one lease per chunk and a quota serves one pipeline, so none can starve another.
Device memory is the state placed there, the units that are needed at once, the gradients of two
units, and what is left of the budget is for units fetched ahead. Where that budget was not named it is
nearly all that a device of its own has, and the first activation would find none: units fetched ahead
get half of what is left then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.core.config import Config
from infinity.core.errors import BudgetError
from infinity.core.sizes import ALIGNMENT, GiB, MiB, Tier, ceil_to, format_size

from .partition import ChunkPlan, UnitLayout

#: What the fetch quota aims at; more hides no more of a drive's latency.
_FETCH_TARGET = 64 * MiB
#: Leases of each quota that a run cannot do without.
LEAST_SLOTS = {"fetch": 1, "update": 1, "gradient": 2}
_GRADIENT_SLOTS = 4
_SPARE = "parameters being updated"
#: What activations get where nothing is said: at most this, so that a large machine starts quickly
#: (pinned memory is taken at once), and no more than this share of what the least leases leave.
_ACTIVATIONS_MOST = 16 * GiB
_ACTIVATIONS_SHARE = 4


@dataclass(frozen=True)
class Quota:
    """A share of the pinned pool: `slots` leases of `slot_nbytes` each."""

    slot_nbytes: int
    slots: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole quota."""
        return self.slot_nbytes * self.slots


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose on each tier, and bytes moved per step (every parameter used, one
    backward)."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    nvme: Mapping[str, int]
    quotas: Mapping[str, Quota]
    working_nbytes: int  # copies of the units that are needed at once, not resident
    prefetch_nbytes: int  # device bytes for units fetched ahead
    nvme_read_per_step: int
    nvme_written_per_step: int
    activation_nbytes: int = 0  # host bytes for the inputs of recomputed layers

    def total(self, tier: Tier) -> int:
        """Bytes on `tier`."""
        return sum({Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier].values())


@dataclass(frozen=True)
class Budget:
    """Bytes that the engine may take, resolved for this machine."""

    device: int
    host: int


def footprint(
    layouts: Sequence[UnitLayout],
    plans: Sequence[ChunkPlan],
    working_sets: Sequence[Sequence[int]],
    config: Config,
    budget: Budget,
    *,
    staged: bool,
    slots: int = 1,
) -> Footprint:
    """Return what a run takes.

    Args:
        working_sets: indices of the units that are needed at the same time, one entry for each
            moment of the schedule.
        staged: whether what moves between host and device needs pinned leases (a device of its
            own), or is copied directly (device memory is host memory).
        slots: versions of a chunk on NVMe.

    Raises:
        BudgetError: the run cannot fit; names the tier, the bytes needed and had, and the cure.
    """
    by_tier: dict[Tier, dict[str, int]] = {t: {} for t in Tier}

    def add(tier: Tier | None, purpose: str, nbytes: int) -> None:
        if tier is not None and nbytes:
            by_tier[tier][purpose] = by_tier[tier].get(purpose, 0) + nbytes

    read = written = 0
    fetch_slot = update_slot = gradient_slot = chunks_on_nvme = trainable_chunks = 0
    for unit in layouts:
        for chunk in unit.chunks:
            plan = plans[chunk.id]
            state_nbytes = sum(plan.state_sections)
            versions = slots if chunk.trainable else 1
            nvme = Tier.NVME
            add(plan.copy_tier, "parameters", plan.copy_nbytes * (versions if plan.copy_tier is nvme else 1))
            add(
                plan.state_tier,
                "optimizer state",
                state_nbytes * (versions if plan.state_tier is nvme else 1),
            )
            add(plan.spare_tier, _SPARE, plan.copy_nbytes)
            add(plan.gradient_tier, "gradients", plan.gradient_nbytes * plan.gradient_slots)
            if plan.copy_tier is nvme:
                chunks_on_nvme += 1
                fetch_slot = max(fetch_slot, plan.copy_nbytes)
                read += 2 * plan.copy_nbytes
            if not chunk.trainable:
                continue
            trainable_chunks += 1
            need = lease_nbytes(plan, staged=staged)
            update_slot = max(update_slot, need)
            if plan.copy_tier is nvme:
                written += plan.copy_nbytes
                read += plan.copy_nbytes if plan.copy_is_master else 0
            if plan.state_tier is nvme:
                read += state_nbytes
                written += state_nbytes
            if plan.gradient_tier is nvme:
                read += chunk.copy_nbytes
                written += chunk.copy_nbytes
            if plan.gradient_tier is nvme or staged or chunk.dtype is not torch.float32:
                gradient_slot = max(gradient_slot, plan.gradient_nbytes)

    fixed = sum(by_tier[Tier.HOST].values())
    least = {
        name: Quota(slot, LEAST_SLOTS[name] if slot else 0)
        for name, slot in (("fetch", fetch_slot), ("update", update_slot), ("gradient", gradient_slot))
    }
    most = {
        "fetch": min(chunks_on_nvme, max(2, _FETCH_TARGET // fetch_slot)) if fetch_slot else 0,
        "update": _update_slots(config, update_slot, trainable_chunks),
        "gradient": _GRADIENT_SLOTS if gradient_slot else 0,
    }
    activations = ceil_to(int(config.activation_memory or 0), ALIGNMENT)
    needed = fixed + sum(q.nbytes for q in least.values()) + activations
    if needed > budget.host:
        raise BudgetError(
            "the run does not fit the host memory that it was given",
            expected=f"host_memory of at least {format_size(needed)} ({needed} bytes): "
            + ", ".join(
                [f"{k} {format_size(v)}" for k, v in by_tier[Tier.HOST].items()]
                + [f"{k} leases {format_size(q.nbytes)}" for k, q in least.items() if q.nbytes]
                + ([f"activations {format_size(activations)}"] if activations else [])
            ),
            found=f"{format_size(budget.host)} ({budget.host} bytes)",
            cure="raise host_memory, or lower activation_memory"
            if needed - activations <= budget.host
            else _host_cure(by_tier[Tier.HOST], fixed > budget.host),
        )
    room = budget.host - needed
    if config.activations == "host" and config.activation_memory is None:
        activations = min(_ACTIVATIONS_MOST, room // _ACTIVATIONS_SHARE) // ALIGNMENT * ALIGNMENT
        room -= activations
    if activations:
        by_tier[Tier.HOST]["activations"] = activations
    quotas = _grow(least, most, room)
    for name, quota in quotas.items():
        if quota.nbytes:
            by_tier[Tier.HOST][f"{name} leases"] = quota.nbytes

    resident = {u.index for u in layouts if u.copy_nbytes and plans[u.chunks[0].id].copy_tier is Tier.DEVICE}
    working = max(
        (sum(layouts[u].copy_nbytes for u in set(s) if u not in resident) for s in working_sets),
        default=0,
    )
    # One unit's gradients are on their way while the next one's arrive.
    gradients = sum(sorted(u.gradient_nbytes for u in layouts)[-2:])
    device = by_tier[Tier.DEVICE]
    if working:
        device["units in use"] = working
    if gradients:
        device["gradients in flight"] = gradients
    needed = sum(device.values())
    if needed > budget.device:
        raise BudgetError(
            "the run does not fit the device memory that it was given",
            expected=f"device_memory of at least {format_size(needed)} ({needed} bytes): "
            + ", ".join(f"{k} {format_size(v)}" for k, v in device.items()),
            found=f"{format_size(budget.device)} ({budget.device} bytes)",
            cure=_device_cure(device, layouts, working, budget.device),
        )
    away = sum(u.copy_nbytes for u in layouts if u.index not in resident)
    left = budget.device - needed
    if staged and config.device_memory is None and config.prefetch_memory is None:
        left //= 2  # activations come on top, and there is no more than this budget
    prefetch = min(left, max(0, away - working))
    if config.prefetch_memory is not None:
        prefetch = min(prefetch, int(config.prefetch_memory))
    if prefetch:
        device["units fetched ahead"] = prefetch
    return Footprint(
        device=device,
        host=by_tier[Tier.HOST],
        nvme=by_tier[Tier.NVME],
        quotas={n: q for n, q in quotas.items() if q.nbytes},
        working_nbytes=working,
        prefetch_nbytes=prefetch,
        nvme_read_per_step=read,
        nvme_written_per_step=written,
        activation_nbytes=activations,
    )


def _update_slots(config: Config, slot: int, chunks: int) -> int:
    """Leases of the update: those of its pipeline, and those that state is read ahead into."""
    if not slot:
        return 0
    return min(chunks, max(config.update_depth, int(config.read_ahead_memory) // slot))


def lease_nbytes(plan: ChunkPlan, *, staged: bool) -> int:
    """Return the bytes of pool that the update of one chunk needs."""
    staged = staged and plan.state_tier is not Tier.DEVICE  # else it is updated there
    total = 0
    if plan.state_tier is Tier.NVME:
        total += sum(plan.state_sections)
    if plan.gradient_tier is Tier.NVME or (staged and plan.gradient_tier is Tier.DEVICE):
        total += plan.gradient_nbytes
    if plan.copy_tier is Tier.NVME or (staged and plan.copy_tier is Tier.DEVICE):
        total += plan.copy_nbytes
    return total


def _grow(least: Mapping[str, Quota], most: Mapping[str, int], room: int) -> dict[str, Quota]:
    """Add slots, one quota after the other, until `room` or the useful maximum is reached."""
    slots = {n: q.slots for n, q in least.items()}
    growing = True
    while growing:
        growing = False
        for name, quota in least.items():
            if slots[name] < most[name] and quota.slot_nbytes <= room:
                slots[name] += 1
                room -= quota.slot_nbytes
                growing = True
    return {n: Quota(q.slot_nbytes, slots[n]) for n, q in least.items()}


def _host_cure(host: Mapping[str, int], state_alone: bool) -> str:
    if state_alone:
        largest = max(host, key=lambda k: host[k])
        if largest == _SPARE:
            return 'raise host_memory, or take update="overlap", which needs no second copy'
        setting = largest.replace(" ", "_")
        return f'raise host_memory, or place more elsewhere: {setting}="nvme"'
    return "raise host_memory, or lower chunk_elements (the leases are a few chunks each)"


def _device_cure(device: Mapping[str, int], layouts: Sequence[UnitLayout], working: int, budget: int) -> str:
    placed = {k: v for k, v in device.items() if k in ("parameters", "optimizer state", "gradients")}
    if placed:
        largest = max(placed, key=lambda k: placed[k])
        return f'raise device_memory, or place {largest} elsewhere: {largest.replace(" ", "_")}="host"'
    big = max(layouts, key=lambda u: u.copy_nbytes)
    return (
        f"raise device_memory, or cut the largest unit ({big.name!r}, {format_size(big.copy_nbytes)}) "
        "into smaller ones with units=[...]"
    )
