"""What a run would take, before anything is built: bytes, traffic, wear and bounds on time.

All of it follows from the shapes of the parameters and the configuration; the footprint is the
very one that the engine allocates by.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infinity.core.config import Config
from infinity.core.errors import BudgetError
from infinity.core.sizes import SPAN, Tier, format_size

from .footprint import Budget, Footprint, footprint
from .partition import ChunkPlan, ParamSpec, UnitLayout, assign, partition, plan_chunks

#: More than any machine has: with it a footprint is what a run would like, not what it may have.
_UNLIMITED = 1 << 60
_KINDS = ("parameters", "optimizer_state", "gradients")


@dataclass(frozen=True)
class Model:
    """What planning knows of a model.

    Attributes:
        units: (name, parameters) of each unit, in the order in which the engine finds them.
        working_sets: indices of the units that are needed at the same time.
    """

    units: Sequence[tuple[str, Sequence[ParamSpec]]]
    working_sets: Sequence[Sequence[int]]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel for _, params in self.units for p in params)


@dataclass(frozen=True)
class Problem:
    """Something that does not fit. Sizes in bytes; `cure` names the setting to change."""

    tier: Tier
    needed: int
    available: int
    cure: str


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step moves at most. `link` is between host and device, both ways."""

    nvme_read: int
    nvme_written: int
    link: int


@dataclass(frozen=True)
class Wear:
    """What the writes of a run mean for its drives.

    `rated_bytes` is what all drives together are rated for, `run_bytes` what the run writes,
    `steps_rated` the steps after which the rating is used up (None: nothing is written).
    """

    rated_bytes: float
    run_bytes: float
    steps_rated: float | None

    @property
    def share(self) -> float:
        """The share of the drives' rated life that the run takes."""
        return self.run_bytes / self.rated_bytes


@dataclass(frozen=True)
class Bandwidths:
    """What the hardware does: GB/s (1e9 bytes), and TFLOP/s. None: not known."""

    nvme_read: float | None = None
    nvme_write: float | None = None
    link: float | None = None
    dram: float | None = None
    tflops: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a run takes. `footprint` is what the engine would allocate within the budgets, or,
    where it does not fit, what it would like to have."""

    parameters: int
    trainable: int
    largest_unit: tuple[str, int]  # name, bytes of its copy
    units: int
    chunks: int
    footprint: Footprint
    durable_nvme: Mapping[str, int]  # bytes on NVMe by purpose with two slots for each chunk
    traffic: Traffic
    problems: tuple[Problem, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the run can begin."""
        return not self.problems

    def check(self) -> None:
        """Raise `BudgetError` for the first problem."""
        if not self.problems:
            return
        first = self.problems[0]
        where = {Tier.NVME: "the NVMe directories have"}.get(first.tier, f"{first.tier}_memory gives")
        raise BudgetError(
            f"the run does not fit the {first.tier} tier",
            expected=f"at least {format_size(first.needed)} ({first.needed} bytes)",
            found=f"{where} {format_size(first.available)} ({first.available} bytes)",
            cure=first.cure,
        )


def make_plan(
    model: Model,
    config: Config,
    budget: Budget,
    *,
    staged: bool,
    accumulation: int = 1,
    nvme_free: int | None = None,
) -> Plan:
    """Plan a run.

    Args:
        budget: bytes that the engine may take on the device and of host memory.
        staged: whether the device has a memory of its own.
        accumulation: backwards per step.
        nvme_free: bytes free in the NVMe directories; None: not known, not checked.
    """
    layouts, plans = _cut(model, config)
    args = (layouts, plans, model.working_sets, config)
    try:
        taken = footprint(*args, budget, staged=staged)
        problems = []
    except BudgetError:
        taken = footprint(*args, Budget(device=_UNLIMITED, host=_UNLIMITED), staged=staged)
        problems = _memory_problems(model, config, budget, staged)
    # One unlimited budget is enough: what is on NVMe does not depend on it.
    durable = footprint(*args, Budget(device=_UNLIMITED, host=_UNLIMITED), staged=staged, slots=2)
    on_nvme = taken.total(Tier.NVME)
    if nvme_free is not None and on_nvme > nvme_free:
        largest = max(taken.nvme, key=lambda k: taken.nvme[k])
        problems.append(
            Problem(
                Tier.NVME,
                on_nvme,
                nvme_free,
                f"free space, name one more directory with --nvme, or place {largest} elsewhere: "
                f"--{largest.replace(' ', '-')} host",
            )
        )
    big = max(layouts, key=lambda u: u.copy_nbytes)
    return Plan(
        parameters=model.parameters,
        trainable=sum(p.numel for _, params in model.units for p in params if p.trainable),
        largest_unit=(big.name, big.copy_nbytes),
        units=len(layouts),
        chunks=len(plans),
        footprint=taken,
        durable_nvme=durable.nvme,
        traffic=_traffic(layouts, plans, taken, accumulation),
        problems=tuple(problems),
    )


def wear(traffic: Traffic, *, steps: int, tbw: float, drives: int) -> Wear:
    """Return what `steps` steps mean for `drives` drives, each rated for `tbw` TB (1e12 bytes)."""
    rated = tbw * 1e12 * max(drives, 1)
    written = traffic.nvme_written
    return Wear(rated, float(written) * steps, rated / written if written else None)


def step_bounds(plan: Plan, bandwidths: Bandwidths, *, tokens: int, recompute: bool) -> dict[str, float]:
    """Return the least seconds of a step that each known resource allows.

    A step takes at best the largest of them. Compute is 6 FLOP per parameter and token, 8 with
    recomputation (Kaplan et al., 2001.08361, without attention); host memory is 28 bytes per
    parameter that the CPU updates.
    """
    flop = (8 if recompute else 6) * plan.parameters * tokens
    amounts = {
        "compute": (flop, None if bandwidths.tflops is None else bandwidths.tflops * 1e12),
        "nvme read": (plan.traffic.nvme_read, _rate(bandwidths.nvme_read)),
        "nvme write": (plan.traffic.nvme_written, _rate(bandwidths.nvme_write)),
        "link": (plan.traffic.link, _rate(bandwidths.link)),
        "host memory": (28 * plan.trainable, _rate(bandwidths.dram)),
    }
    return {name: amount / rate for name, (amount, rate) in amounts.items() if rate}


def _rate(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * 1e9


def _cut(model: Model, config: Config) -> tuple[tuple[UnitLayout, ...], tuple[ChunkPlan, ...]]:
    layouts = partition(model.units, config.chunk_elements)
    places = config.placements
    chosen = assign(layouts, *(places[kind] for kind in _KINDS))
    return layouts, plan_chunks(layouts, chosen)


def _traffic(
    layouts: Sequence[UnitLayout], plans: Sequence[ChunkPlan], taken: Footprint, accumulation: int
) -> Traffic:
    """Return the bytes of a step of `accumulation` backwards.

    The first backward is the footprint's. Each further one fetches the copies twice more, and
    reads and writes the gradients in fp32, where they accumulate.
    """
    further = accumulation - 1
    read, written, link = taken.nvme_read_per_step, taken.nvme_written_per_step, 0
    for unit in layouts:
        for chunk in unit.chunks:
            plan = plans[chunk.id]
            if plan.copy_tier is Tier.NVME:
                read += 2 * further * plan.copy_nbytes
            if plan.copy_tier is not Tier.DEVICE:
                link += 2 * accumulation * plan.copy_nbytes
            if chunk.trainable:
                if plan.gradient_tier is Tier.NVME:
                    read += further * plan.gradient_nbytes
                    written += further * plan.gradient_nbytes
                if plan.gradient_tier is not Tier.DEVICE:
                    link += accumulation * chunk.copy_nbytes
                if plan.copy_tier is Tier.DEVICE and plan.state_tier is not Tier.DEVICE:
                    link += chunk.copy_nbytes
    return Traffic(read, written, link)


# -- what does not fit, and what to change ---------------------------------------------------


def _memory_problems(model: Model, config: Config, budget: Budget, staged: bool) -> list[Problem]:
    problems = []
    alone = {
        Tier.HOST: Budget(device=_UNLIMITED, host=budget.host),
        Tier.DEVICE: Budget(device=budget.device, host=_UNLIMITED),
    }
    for tier, available in ((Tier.HOST, budget.host), (Tier.DEVICE, budget.device)):
        needed = _least(model, config, tier, staged)
        if needed > available:
            # Best a change after which everything fits, else one after which this tier does.
            change = _smallest_change(model, config, budget, staged)
            change = change or _smallest_change(model, config, alone[tier], staged)
            setting = f"--{tier}-memory {_rounded_up(needed)}"
            problems.append(
                Problem(tier, needed, available, f"{setting}, or {change}" if change else setting)
            )
    return problems


def _rounded_up(nbytes: int) -> str:
    mebibytes = -(-nbytes // (1 << 20))
    return f"{mebibytes}MiB" if mebibytes < 10_240 else f"{-(-mebibytes // 1024)}GiB"


def _fits(model: Model, config: Config, budget: Budget, staged: bool) -> bool:
    layouts, plans = _cut(model, config)
    try:
        footprint(layouts, plans, model.working_sets, config, budget, staged=staged)
    except BudgetError:
        return False
    return True


def _least(model: Model, config: Config, tier: Tier, staged: bool) -> int:
    """Return the smallest budget of `tier`, to 4096 bytes, with which the run can begin."""
    layouts, plans = _cut(model, config)
    low, high = 0, _UNLIMITED >> 12
    while low < high:
        middle = (low + high) // 2
        nbytes = middle << 12
        budget = (
            Budget(device=_UNLIMITED, host=nbytes)
            if tier is Tier.HOST
            else Budget(device=nbytes, host=_UNLIMITED)
        )
        try:
            footprint(layouts, plans, model.working_sets, config, budget, staged=staged)
            high = middle
        except BudgetError:
            low = middle + 1
    return low << 12


def _smallest_change(model: Model, config: Config, budget: Budget, staged: bool) -> str | None:
    """Return the fewest settings that make the run fit within `budget`, faster tiers preferred."""
    tiers = list(Tier)
    options = []
    for chosen in itertools.product(tiers, repeat=len(_KINDS)):
        changed = {
            kind: tier
            for kind, tier in zip(_KINDS, chosen, strict=True)
            if dict(config.placements[kind]) != {tier: 1.0}
        }
        options.append((len(changed), sum(tiers.index(t) for t in changed.values()), changed))
    options.sort(key=lambda o: o[:2])
    for chunk_elements in (config.chunk_elements, SPAN):
        for _, _, changed in options:
            needs_directory = Tier.NVME in changed.values() and not config.directories
            try_config = config.replace(
                **{k: t.value for k, t in changed.items()},
                chunk_elements=chunk_elements,
                nvme=config.directories or (("(a directory)",) if needs_directory else None),
            )
            if not _fits(model, try_config, budget, staged):
                continue
            words = [f"--{k.replace('_', '-')} {t}" for k, t in changed.items()]
            if needs_directory:
                words.append("--nvme DIR")
            if chunk_elements != config.chunk_elements:
                words.append(f"--chunk-elements {chunk_elements}")
            return " ".join(words)
    return None
