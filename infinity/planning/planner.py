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
    inputs: int = 0,
    nvme_free: int | None = None,
) -> Plan:
    """Plan a run.

    Args:
        budget: bytes that the engine may take on the device and of host memory.
        staged: whether the device has a memory of its own.
        accumulation: backwards per step.
        inputs: bytes of the inputs of recomputed layers in one forward.
        nvme_free: bytes free in the NVMe directories; None: not known, not checked.
    """
    layouts = partition(model.units, config.chunk_elements)
    plans = _placed(layouts, config)
    args = (layouts, plans, model.working_sets, config)
    problems: list[Problem] = []
    try:
        taken = footprint(*args, budget, staged=staged)
    except BudgetError:
        taken = footprint(*args, Budget(device=_UNLIMITED, host=_UNLIMITED), staged=staged)
        problems = _Search(model, config, staged, taken).problems(budget)
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
        traffic=_traffic(layouts, plans, taken, accumulation, inputs),
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


def _traffic(
    layouts: Sequence[UnitLayout],
    plans: Sequence[ChunkPlan],
    taken: Footprint,
    accumulation: int,
    inputs: int,
) -> Traffic:
    """Return the bytes of a step of `accumulation` backwards.

    The first backward is the footprint's. Each further one fetches the copies twice more, and
    reads and writes the gradients in fp32, where they accumulate.
    """
    further = accumulation - 1
    read, written = taken.nvme_read_per_step, taken.nvme_written_per_step
    link = 2 * accumulation * min(inputs, taken.activation_nbytes)
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


class _Search:
    """Looks for the least budgets and the fewest changes with which a run fits."""

    def __init__(self, model: Model, config: Config, staged: bool, largest: Footprint) -> None:
        self._model = model
        self._config = config
        self._staged = staged
        self._largest = largest  # what the run would like to have
        self._layouts = {config.chunk_elements: partition(model.units, config.chunk_elements)}

    def problems(self, budget: Budget) -> list[Problem]:
        """Return what does not fit `budget`, with what to change."""
        available = {Tier.HOST: budget.host, Tier.DEVICE: budget.device}
        least = {tier: self._least(tier) for tier in available}
        problems = []
        for tier, nbytes in available.items():
            if least[tier] <= nbytes:
                continue
            # Best is a change after which everything fits; else one after which this tier does,
            # when the other one is given its least.
            given = {t: n if t is tier else max(n, least[t]) for t, n in available.items()}
            change = self._change(budget) or self._change(
                Budget(device=given[Tier.DEVICE], host=given[Tier.HOST])
            )
            setting = f"--{tier}-memory {_rounded_up(least[tier])}"
            cure = f"{setting}, or {change}" if change else setting
            problems.append(Problem(tier, least[tier], nbytes, cure))
        return problems

    def _fits(self, config: Config, budget: Budget) -> bool:
        size = config.chunk_elements
        if size not in self._layouts:
            self._layouts[size] = partition(self._model.units, size)
        layouts = self._layouts[size]
        plans = _placed(layouts, config)
        try:
            footprint(layouts, plans, self._model.working_sets, config, budget, staged=self._staged)
        except BudgetError:
            return False
        return True

    def _least(self, tier: Tier) -> int:
        """Return the smallest budget of `tier`, to 4096 bytes, with which the run can begin."""
        layouts = self._layouts[self._config.chunk_elements]
        plans = _placed(layouts, self._config)
        low, high = 0, -(-self._largest.total(tier) >> 12) + 1
        while low < high:
            middle = (low + high) // 2
            nbytes = middle << 12
            budget = Budget(
                device=nbytes if tier is Tier.DEVICE else _UNLIMITED,
                host=nbytes if tier is Tier.HOST else _UNLIMITED,
            )
            try:
                footprint(layouts, plans, self._model.working_sets, self._config, budget, staged=self._staged)
                high = middle
            except BudgetError:
                low = middle + 1
        return low << 12

    def _change(self, budget: Budget) -> str | None:
        """Return the fewest settings that make the run fit, faster tiers preferred."""
        tiers = list(Tier)
        options = []
        for chosen in itertools.product(tiers, repeat=len(_KINDS)):
            changed = {
                kind: tier
                for kind, tier in zip(_KINDS, chosen, strict=True)
                if dict(self._config.placements[kind]) != {tier: 1.0}
            }
            options.append((len(changed), sum(tiers.index(t) for t in changed.values()), changed))
        options.sort(key=lambda option: option[:2])
        # Many small chunks are slow to plan: with them only the two ends are tried.
        attempts = [(changed, self._config.chunk_elements) for _, _, changed in options]
        for size in self._smaller_chunks(budget):
            attempts += [({}, size), (dict.fromkeys(_KINDS, Tier.NVME), size)]
        for changed, size in attempts:
            found = self._try(changed, size, budget)
            if found is not None:
                return found
        return None

    def _try(self, changed: Mapping[str, Tier], chunk_elements: int, budget: Budget) -> str | None:
        needs_directory = Tier.NVME in changed.values() and not self._config.directories
        config = self._config.replace(
            **{kind: tier.value for kind, tier in changed.items()},
            chunk_elements=chunk_elements,
            nvme=self._config.directories or (("(a directory)",) if needs_directory else None),
        )
        if not self._fits(config, budget):
            return None
        words = [f"--{kind.replace('_', '-')} {tier}" for kind, tier in changed.items()]
        if needs_directory:
            words.append("--nvme DIR")
        if chunk_elements != self._config.chunk_elements:
            words.append(f"--chunk-elements {chunk_elements}")
        return " ".join(words)

    def _smaller_chunks(self, budget: Budget) -> list[int]:
        """Return the largest chunk whose leases the host budget would hold, if there is one."""
        leases = sum(q.slot_nbytes * q.slots for q in self._largest.quotas.values())
        placed = self._largest.total(Tier.HOST) - leases
        if self._config.activation_memory is None:  # activations take only what is left
            placed -= self._largest.activation_nbytes
        room = budget.host - placed
        size = self._config.chunk_elements // 2 // SPAN * SPAN
        while size >= SPAN:
            # The least leases are at most half of those that the run would like.
            if leases * size // self._config.chunk_elements // 2 <= room:
                return [size]
            size = size // 2 // SPAN * SPAN
        return [SPAN] if room > 0 and self._config.chunk_elements > SPAN else []


def _placed(layouts: Sequence[UnitLayout], config: Config) -> tuple[ChunkPlan, ...]:
    assignment = assign(layouts, *(config.placements[kind] for kind in _KINDS))
    return plan_chunks(layouts, assignment, delayed=config.update == "delayed")


def _rounded_up(nbytes: int) -> str:
    mebibytes = -(-nbytes // (1 << 20))
    return f"{mebibytes}MiB" if mebibytes < 10_240 else f"{-(-mebibytes // 1024)}GiB"
