"""How many bytes a run takes on each tier, in closed form.

[Note: memory is a promise] The engine allocates at start-up exactly the bytes that this file computes. It
refuses a run that does not fit, with the numbers of this file. Host memory is the state placed
there plus three *quotas* of the pool:

- ``load``: leases through which compute parameters move from NVMe to the device;
- ``update``: one lease holds all that one chunk needs in the update pipeline;
- ``gradient``: leases through which gradients go to NVMe or come from a GPU, or in which they become fp32;
- ``matrix``, with Muon: one lease for the largest matrix in bf16, into which its chunks put the pieces of
  their momentum, and from which they take those of their update; with several ranks also for this rank's
  pieces of the matrices that the ranks update at the same time ([Note: rounds]);

and, with ``activations="host"``, a heap for the inputs of checkpointed layers. Only the first forward shows
their size, so the heap is a share of the remaining memory.

A pipeline takes one lease per chunk (the gradients' pipeline two) and a quota serves one pipeline, so no
pipeline can starve another. Device memory is the state placed there, the units that are needed at once, and
the gradients of two units (on a separate device also the gradient of one parameter, which autograd has just
made), and with Muon the update of the largest matrix. The rest of the budget is for prefetched
units. The default budget of a separate device is nearly all of its memory, and would leave none for the first
activation: then prefetched units get half of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infinity.core.config import Config
from infinity.core.errors import BudgetError
from infinity.core.sizes import ALIGNMENT, GiB, KiB, MiB, Tier, format_size

from .matrices import lease_nbytes, room_of, work_of
from .partition import Chunk, ParamSpec, UnitLayout
from .parts import PURPOSES, ChunkParts, Moved, update_nbytes
from .placement import spread_over_directories

#: Chunks in the pipeline of an update at once: one is read, one updated, one written.
UPDATE_DEPTH: Final = 3
#: Bytes into which the engine reads state while a backward runs, as far as the budget leaves room.
READ_AHEAD: Final = GiB
#: Bytes of units that are loaded ahead, at most: whatever fits.
AHEAD_MOST: Final = 1 << 62
#: What the load quota aims at; more hides no more of a drive's latency.
_LOAD_TARGET = 64 * MiB
#: Leases of each quota that a run cannot do without.
LEAST_BUFFERS = {"load": 1, "update": 1, "gradient": 2, "matrix": 1}
_GRADIENT_BUFFERS = 4
#: Larger chunks are taken where their least leases are no more than this share of the free host memory.
_LEASES_SHARE = 16
#: What activations get: at most this, so that a large machine starts quickly (pinned memory is taken at
#: once), and no more than this share of what the least leases leave.
ACTIVATIONS_MOST: Final = 16 * GiB
_ACTIVATIONS_SHARE = 4
#: Smaller inputs stay on the device: a copy would cost more than their memory is worth.
SMALLEST = 64 * KiB
#: What comes back of the inputs on the host before it is needed: times the largest; [Note: ahead, in bytes].
AHEAD = 2


@dataclass(frozen=True)
class Quota:
    """A share of the pinned pool: `buffers` leases of `buffer_nbytes` each."""

    buffer_nbytes: int
    buffers: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole quota."""
        return self.buffer_nbytes * self.buffers


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose on each tier, and bytes moved per step (every parameter used, one
    backward)."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    nvme: Mapping[str, int]
    quotas: Mapping[str, Quota]
    working_nbytes: int  # copies of the units that are needed at once, not resident
    gradients_nbytes: int  # device bytes for gradients on their way to their tier
    prefetch_nbytes: int  # device bytes for units loaded ahead
    nvme_read_per_step: int
    nvme_written_per_step: int
    activation_nbytes: int = 0  # host bytes for the inputs of checkpointed layers

    def total(self, tier: Tier) -> int:
        """Bytes on `tier`."""
        return sum({Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.NVME: self.nvme}[tier].values())


@dataclass(frozen=True)
class Budget:
    """Bytes that the engine of one rank may take, resolved for this machine; and how many ranks share what
    the settings name."""

    device: int
    host: int
    device_ranks: int = 1
    host_ranks: int = 1


@dataclass(frozen=True)
class Demand:
    """What a run takes whatever its budgets are. Bytes, unless it says otherwise.

    Attributes:
        placed: by tier and purpose: the state, with the versions that a chunk has there.
        least, most: the leases that a run cannot do without, and the buffers that are of use.
        working: copies of the units that are needed at once; `away`: of all that are not resident.
        gradients: buffers of those in flight on the device; `arriving`: what autograd has made of one and is
            not in its buffer yet.
        read, written: NVMe, in a step of one backward; `again`: (read, written) of each further one.
        link: between host and device: of each backward, and of each step.
        sent: from this rank to others, at most: of each backward with its forward, of each step, and of each
            step of several backwards.
        updated: host memory that updates on the CPU read and write in a step, with gradients and compute
            parameters of two bytes.
        arenas: of each directory.
        largest: name of the largest unit, and bytes of its copy.
        matrix: name of the whole parameter whose update takes the most, and what that takes on the device.
        flops: of the updates of whole parameters in a step, on the rank that has the most.
    """

    placed: Mapping[Tier, Mapping[str, int]]
    least: Mapping[str, Quota]
    most: Mapping[str, int]
    working: int
    away: int
    gradients: int
    arriving: int
    read: int
    written: int
    again: tuple[int, int]
    link: tuple[int, int]
    sent: tuple[int, int, int]
    updated: int
    arenas: tuple[int, ...]
    largest: tuple[str, int]
    units: int
    chunks: int
    matrix: tuple[str, int] = ("", 0)
    flops: int = 0

    def least_budget(self) -> Budget:
        """Return the smallest budgets with which the run can begin; neither depends on the other."""
        return Budget(
            device=sum(self._on_device().values()),
            host=sum(self.placed[Tier.HOST].values()) + sum(q.nbytes for q in self.least.values()),
        )

    def leaves_room(self, budget: Budget) -> bool:
        """Return whether the run can begin within `budget`, and its leases are small beside what that leaves:
        what else takes host memory (activations, state dicts, state that is read ahead) misses nothing."""
        least, leases = self.least_budget(), sum(q.nbytes for q in self.least.values())
        left = budget.host - (least.host - leases)
        return least.device <= budget.device and leases * _LEASES_SHARE <= left

    def _on_device(self) -> dict[str, int]:
        more = {
            "units in use": self.working,
            "gradients in flight": self.gradients + self.arriving,
            "the update of a matrix": self.matrix[1],
        }
        return {**self.placed[Tier.DEVICE], **{k: v for k, v in more.items() if v}}

    def check(self, budget: Budget) -> None:
        """Raise `BudgetError` if the run cannot begin within `budget`: it names the bytes needed and had,
        and every budget that is too small as it must be."""
        least = self.least_budget()
        short = [t for t in (Tier.HOST, Tier.DEVICE) if getattr(least, t) > getattr(budget, t)]
        if not short:
            return
        needed, given = getattr(least, short[0]), getattr(budget, short[0])
        if short[0] is Tier.HOST:
            parts = dict(self.placed[Tier.HOST])
            parts.update({f"{k} leases": q.nbytes for k, q in self.least.items() if q.nbytes})
        else:
            parts = self._on_device()
        named = ", ".join(f"{k} {format_size(v)}" for k, v in parts.items())
        if short[0] is Tier.DEVICE and self.working:
            named += f" (the largest unit is {self.largest[0]!r}, {format_size(self.largest[1])})"
        if self.matrix[1]:
            named += f" (the largest matrix is {self.matrix[0]!r})"
        raise BudgetError(
            f"the run does not fit the {short[0]} memory that it may use",
            expected=f"{short[0]}_memory of at least {format_size(needed)} ({needed} bytes): {named}",
            found=f"{format_size(given)} ({given} bytes)"
            + (f" for each of {ranks} ranks" if (ranks := getattr(budget, f"{short[0]}_ranks")) > 1 else ""),
            cure=", ".join(
                f'{t}_memory="{whole_mebibytes(getattr(least, t) * getattr(budget, f"{t}_ranks"))}"'
                for t in short
            ),
        )


def whole_mebibytes(nbytes: int) -> str:
    """Return a size as a setting says it: whole MiB, no fewer than `nbytes`."""
    return f"{-(-nbytes // MiB)}MiB"


def room(nbytes: int) -> str:
    """Return a size for a person who has to make room: whole GiB from ten on, no fewer than `nbytes`."""
    return whole_mebibytes(nbytes) if nbytes < 10 * GiB else f"{-(-nbytes // GiB)}GiB"


def demand(
    layouts: Sequence[UnitLayout],
    plans: Sequence[ChunkParts],
    working_sets: Sequence[Sequence[int]],
    config: Config,
    *,
    staged: bool,
    weights: Sequence[float] = (),
    again: Sequence[int] = (),
) -> Demand:
    """Return what a run takes whatever its budgets are. See `plan_chunks` for `staged`.

    Args:
        working_sets: indices of the units that are needed at the same time, one entry for each
            moment of the schedule.
        weights: of the NVMe directories, as the store spreads chunks over them.
        again: indices of the units that further modules need, once for each.
    """
    by_tier: dict[Tier, dict[str, int]] = {t: {} for t in Tier}
    moved = [0] * len(Moved._fields)
    load_buffer = update_buffer = gradient_buffer = chunks_on_nvme = trainable_chunks = updated = 0
    # Nearly all chunks are alike: each kind is looked at once.
    kinds = Counter((id(plans[c.id]), c.numel, c.trainable) for u in layouts for c in u.chunks)
    by_id = {id(p): p for p in plans}
    for (kind, numel, trainable), count in kinds.items():
        plan = by_id[kind]
        for name, part in plan.parts.items():
            for tier, purpose in zip(part.tiers, PURPOSES[name], strict=False):
                if part.in_place:
                    continue  # it takes no room of ours
                placed = by_tier[tier]
                placed[purpose] = placed.get(purpose, 0) + part.nbytes * count
        moved = [total + of_one * count for total, of_one in zip(moved, plan.moved, strict=True)]
        load_buffer = max(load_buffer, plan.load_lease)
        gradient_buffer = max(gradient_buffer, plan.gradient_lease)
        chunks_on_nvme += count if plan.load_lease else 0
        if trainable:
            update_buffer = max(update_buffer, plan.update_lease)
            trainable_chunks += count
            if plan.state_tier is not Tier.DEVICE:
                updated += update_nbytes(numel, plan.moments, 2, 0 if plan.is_split else 2) * count
    work = work_of(layouts)
    flops, sent_for_matrices, crossing = (max(each) for each in zip(*work, strict=True))
    visits = _second_visits(layouts, plans)
    moved = [a + b for a, b in zip(moved, visits, strict=True)]
    total = Moved(*moved)

    arenas: tuple[int, ...] = (sum(by_tier[Tier.NVME].values()),)
    if len(weights) > 1:
        of_kind = {kind: p.nvme_nbytes for kind, p in by_id.items()}
        sizes = [of_kind[id(p)] for p in plans]
        given = [0] * len(weights)
        for directory, size in zip(spread_over_directories(sizes, weights), sizes, strict=True):
            given[directory] += size
        arenas = tuple(given)
    # With several ranks what is placed on the device is a shard; the whole is there while it is used.
    placed_here = (u for u in layouts if u.whole)
    resident = {u.index for u in placed_here if plans[u.chunks[0].id].copy_tier is Tier.DEVICE}
    # Below stage 3 what was gathered stays until the step.
    stays = config.zero_stage < 3 and not all(u.whole for u in layouts)
    at_once = [range(len(layouts))] if stays else working_sets
    if stays:  # this rank's slices lie in what was gathered
        by_tier[Tier.DEVICE].pop("parameters", None)
    waits = config.zero_stage < 2 and any(u.world > 1 for u in layouts)
    reducing = max((u.reduction_nbytes(wide=waits) for u in layouts), default=0)
    if waits:  # a rank's whole gradients, which make way for the sums of all, unit by unit
        by_tier[Tier.DEVICE]["gradients"] = sum(u.accumulated_nbytes for u in layouts)
    big = max(layouts, key=lambda u: u.gathered_nbytes)
    matrices = [p for u in layouts for p in u.params if p.matrix]
    through_host = not staged or any(not u.whole for u in layouts)  # [Note: whole at its owner]
    through_host |= any(plans[c.id].state_tier is not Tier.DEVICE for c in _of_matrices(layouts))
    matrix_buffer = lease_nbytes(*room_of(layouts)) if through_host else 0
    working = ((_at_work(p, staged=staged), p.name) for p in matrices)
    most_of_matrix, name_of_matrix = max(working, default=(0, ""))
    return Demand(
        placed=by_tier,
        least={
            name: Quota(buffer, LEAST_BUFFERS[name] if buffer else 0)
            for name, buffer in (
                ("load", load_buffer),
                ("update", update_buffer),
                ("gradient", gradient_buffer),
                ("matrix", matrix_buffer),
            )
        },
        most={
            "load": min(chunks_on_nvme, max(2, _LOAD_TARGET // load_buffer)) if load_buffer else 0,
            "update": _update_buffers(update_buffer, trainable_chunks),
            "gradient": _GRADIENT_BUFFERS if gradient_buffer else 0,
            "matrix": LEAST_BUFFERS["matrix"] if matrix_buffer else 0,
        },
        working=max(
            (sum(layouts[u].gathered_nbytes for u in set(s) if u not in resident) for s in at_once),
            default=0,
        ),
        away=sum(u.gathered_nbytes for u in layouts if u.index not in resident),
        # One unit's gradients are on their way while the next one's arrive.
        gradients=sum(sorted(u.gradient_nbytes for u in layouts)[-2:]) + reducing,
        arriving=max((p.nbytes for u in layouts for p in u.params if p.trainable), default=0)
        if staged
        else 0,
        read=total.read,
        written=total.written,
        again=(total.read_again, total.written_again),
        link=(total.link_each, total.link_once + (crossing if staged and through_host else 0)),
        sent=_sent(config.zero_stage, layouts, again, sent_for_matrices),
        updated=updated,
        arenas=arenas,
        largest=(big.name, big.gathered_nbytes),
        units=len(layouts),
        chunks=len(plans),
        matrix=(name_of_matrix, most_of_matrix),
        flops=flops,
    )


def _of_matrices(layouts: Sequence[UnitLayout]) -> Iterator[Chunk]:
    return (chunk for unit in layouts for chunk in unit.trainable_chunks if chunk.matrix)


def _second_visits(layouts: Sequence[UnitLayout], plans: Sequence[ChunkParts]) -> Moved:
    """Return what the second visits of chunks of matrices move again, of what is on NVMe ([Note: two visits],
    `optim/matrices.py`)."""
    read = written = 0
    for unit in layouts:
        chunks = [c for c in unit.trainable_chunks if c.matrix and c.segments]
        of = Counter(c.segments[0].param for c in chunks)
        for chunk in chunks:
            plan = plans[chunk.id]
            if plan.state_tier is Tier.NVME and not (unit.whole and of[chunk.segments[0].param] == 1):
                nbytes = plan.parts["state"].nbytes
                read += nbytes + (plan.copy.nvme_nbytes if plan.begins_with_copy else 0)
                written += nbytes
    return Moved(read=read, written=written)


def _at_work(spec: ParamSpec, *, staged: bool) -> int:
    """Return the bytes on the device of the update of a matrix, beside its lease, which on a CPU is where it
    comes. Of one Newton–Schulz iteration, all bf16: the matrix before and after it, and two squares of its
    smaller side; and the matrix as it came."""
    small = min(spec.shape)
    return 2 * ((3 if staged else 2) * spec.numel + 2 * small * small)


def _sent(
    stage: int, layouts: Sequence[UnitLayout], again: Sequence[int], of_matrices: int
) -> tuple[int, int, int]:
    """Return what `Demand` calls `sent`. What several backwards have added up is fp32. `of_matrices`: in each
    step, for their update."""
    each, wide = (
        sum(r.sent_nbytes(wide=w) for u in layouts for r in u.runs if r.trainable) for w in (False, True)
    )
    if stage == 3:
        used = (*layouts, *(layouts[i] for i in again))
        return each + 2 * sum(r.sent_nbytes() for u in used for r in u.runs), of_matrices, of_matrices
    updated = of_matrices + sum(r.sent_nbytes() for u in layouts if u.trainable_chunks for r in u.runs)
    if stage == 2:
        return each, updated, updated
    return (0, each + updated, wide + updated) if stage else (0, 2 * each, 2 * wide)


def within(wanted: Demand, config: Config, budget: Budget, *, staged: bool) -> Footprint:
    """Return what a run takes within `budget`.

    Raises:
        BudgetError: see `Demand.check`.
    """
    wanted.check(budget)
    room = budget.host - wanted.least_budget().host
    host = dict(wanted.placed[Tier.HOST])
    activations = 0
    if config.activations == "host":
        activations = min(ACTIVATIONS_MOST, room // _ACTIVATIONS_SHARE) // ALIGNMENT * ALIGNMENT
        room -= activations
    if activations:
        host["activations"] = activations
    quotas = _grow(wanted.least, wanted.most, room)
    for name, quota in quotas.items():
        if quota.nbytes:
            host[f"{name} leases"] = quota.nbytes

    device = wanted._on_device()
    left = budget.device - sum(device.values())
    if staged and config.device_memory is None:
        left //= 2  # activations come on top, and there is no more than this budget
    prefetch = min(left, max(0, wanted.away - wanted.working), AHEAD_MOST)
    if prefetch:
        device["units loaded ahead"] = prefetch
    return Footprint(
        device=device,
        host=host,
        nvme=wanted.placed[Tier.NVME],
        quotas={n: q for n, q in quotas.items() if q.nbytes},
        working_nbytes=wanted.working,
        gradients_nbytes=wanted.gradients,
        prefetch_nbytes=prefetch,
        nvme_read_per_step=wanted.read,
        nvme_written_per_step=wanted.written,
        activation_nbytes=activations,
    )


def _update_buffers(buffer: int, chunks: int) -> int:
    """Leases of the update: those of its pipeline, and those that state is read ahead into."""
    if not buffer:
        return 0
    return min(chunks, max(UPDATE_DEPTH, READ_AHEAD // buffer))


def _grow(least: Mapping[str, Quota], most: Mapping[str, int], room: int) -> dict[str, Quota]:
    """Add buffers, one quota after the other, until `room` or the useful maximum is reached."""
    buffers = {n: q.buffers for n, q in least.items()}
    growing = True
    while growing:
        growing = False
        for name, quota in least.items():
            if buffers[name] < most[name] and quota.buffer_nbytes <= room:
                buffers[name] += 1
                room -= quota.buffer_nbytes
                growing = True
    return {n: Quota(q.buffer_nbytes, buffers[n]) for n, q in least.items()}
