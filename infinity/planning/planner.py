"""The plan of a run, before anything is built: bytes, traffic, wear and bounds on time.

It follows from the shapes of the parameters and the configuration. The engine allocates by the same
footprint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from infinity.core.config import Config
from infinity.core.sizes import Tier, format_size

from .footprint import Budget, Demand, Footprint, demand, within
from .machine import Machine, Standing, on_drives
from .partition import ParamSpec, UnitLayout, partition
from .parts import ADAM, alignment_of, is_made_once, kept_of, moments_of, plan_chunks
from .placement import assign

#: More than any machine has: with it a footprint is what a run would like, not what it may have.
_UNLIMITED = 1 << 60
KINDS = ("parameters", "optimizer_state", "gradients")


@dataclass(frozen=True)
class Model:
    """What planning knows of a model.

    Attributes:
        units: (name, parameters) of each unit, in the order in which the engine finds them.
        working_sets: indices of the units that are needed at the same time.
        again: indices of units that further modules need, once for each (a tied head).
        idle: parameters that a token does not pass (of experts that are not chosen).
        moments: names of what the optimizer keeps of each element.
    """

    units: Sequence[tuple[str, Sequence[ParamSpec]]]
    working_sets: Sequence[Sequence[int]]
    idle: int = 0
    again: Sequence[int] = ()
    moments: Sequence[str] = ADAM

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel for _, params in self.units for p in params)

    @functools.cached_property
    def trainable(self) -> int:
        """Number of parameters that are updated."""
        return sum(p.numel for _, params in self.units for p in params if p.trainable)


@dataclass(frozen=True)
class Problem:
    """Something that does not fit: `what` it is. Sizes in bytes; `cure`: settings with which everything
    fits, or what there would have to be."""

    tier: Tier
    needed: int
    available: int
    what: str
    cure: str = ""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step of a rank moves at most. `link` is between host and device, both ways; `host` is
    what the CPU's Adam reads and writes of host memory; `sent` goes to other ranks."""

    nvme_read: int
    nvme_written: int
    link: int
    host: int
    sent: int = 0


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
    """What the hardware does for one rank: GB/s (1e9 bytes), and TFLOP/s. None: not known."""

    nvme_read: float | None = None
    nvme_write: float | None = None
    link: float | None = None
    dram: float | None = None
    tflops: float | None = None
    network: float | None = None


@dataclass(frozen=True)
class Plan:
    """What a run takes, of one rank where there are several. `footprint` is what the engine would allocate
    within the budgets, or, where it does not fit, what it would like to have."""

    parameters: int
    trainable: int
    active: int  # parameters that a token passes
    largest_unit: tuple[str, int]  # name, bytes of its copy
    units: int
    chunks: int
    footprint: Footprint
    traffic: Traffic
    problems: tuple[Problem, ...]
    activations: int  # bytes on the device, beside what the engine places there
    least: Budget  # the smallest with which it can begin, as settings name them: of all ranks of a machine
    room: Budget  # what the machine leaves the engine for each, beside all else, in the same way
    standing: tuple[Standing, ...]  # on drives
    matrix: str = ""  # a whole parameter, whose update takes the most device memory
    matrix_flops: int = 0  # of all updates of whole parameters, on the rank that has the most

    @property
    def fits(self) -> bool:
        """Whether the run can begin."""
        return not self.problems


class Planner:
    """Plans runs of one model. What does not depend on budgets is computed once for each placement.

    Args:
        model: what planning knows of the model, in the dtype of the runs.
        scratch: bytes of each parameter as `init` builds it, in that order; (): not built by `init`.
    """

    def __init__(self, model: Model, scratch: Sequence[int] = ()) -> None:
        self.model = model
        self._scratch = tuple(scratch)
        self._layouts: dict[tuple[int, int, bool, int], tuple[UnitLayout, ...]] = {}
        self._demands: dict[Hashable, Demand] = {}

    def demand(self, config: Config, machine: Machine, size: int) -> Demand:
        """Return what a run of `config` takes with chunks of `size`, whatever its budgets are."""
        placed = tuple(tuple(config.placements[kind].items()) for kind in KINDS)
        weights = machine.weights if len(machine.drives) > 1 else ()
        stage = config.zero_stage
        cut = size, machine.ranks, stage == 0, alignment_of(config)
        key = (
            placed,
            config.optimizer_state_dtype,
            cut,
            config.update,
            once := is_made_once(config, machine.ranks),
            machine.staged,
            weights,
            stage,
        )
        if key not in self._demands:
            if cut not in self._layouts:  # a plan is of the first rank: padded as they are, all are alike
                self._layouts[cut] = partition(
                    self.model.units, size, world=cut[1], replicated=cut[2], alignment=cut[3]
                )
            layouts = self._layouts[cut]
            assignment = assign(layouts, *(config.placements[kind] for kind in KINDS))
            plans = plan_chunks(
                layouts,
                assignment,
                moments_of(self.model.moments, config),
                staged=machine.staged,
                delayed=config.update == "delayed",
                split=config.split_master,
                once=once,
            )
            sets, staged = self.model.working_sets, machine.staged
            self._demands[key] = demand(
                layouts, plans, sets, config, staged=staged, weights=weights, again=self.model.again
            )
        return self._demands[key]

    def plan(
        self,
        config: Config,
        machine: Machine,
        *,
        accumulation: int = 1,
        inputs: int = 0,
        activations: Callable[[int], int] = lambda _: 0,
    ) -> Plan:
        """Plan a run. See [Note: one verdict].

        Args:
            machine: what there is; its drives are those of `config`, in that order.
            accumulation: backwards per step.
            inputs: bytes of the inputs of checkpointed layers in one forward.
            activations: returns the bytes of activations on the device, given those that may wait on
                the host.
        """
        budget = machine.budget(config)
        *larger, least_size = config.chunk_sizes(staged=machine.staged)
        demands = (self.demand(config, machine, size) for size in larger)
        wanted = next((each for each in demands if each.leaves_room(budget)), None)
        if wanted is None:
            wanted = self.demand(config, machine, least_size)
        needs = wanted.least_budget()
        here, sharing = budget.host_ranks, budget.device_ranks
        least = Budget(needs.device * sharing, needs.host * here)
        problems = [
            Problem(tier, needed * ranks, given * ranks, f"what cannot be done without within {tier}_memory")
            for tier, needed, given, ranks in (
                (Tier.HOST, needs.host, budget.host, here),
                (Tier.DEVICE, needs.device, budget.device, sharing),
            )
            if needed > given
        ]
        if problems:  # what it would like to have
            unlimited = Budget(_UNLIMITED, _UNLIMITED)
            taken = within(wanted, config, unlimited, staged=machine.staged)
        else:
            taken = within(wanted, config, budget, staged=machine.staged)
        beside = activations(taken.activation_nbytes)
        device, host = taken.total(Tier.DEVICE), taken.total(Tier.HOST)
        if machine.device_memory is None:
            whole = here * (host + device + beside)
            memories = [(Tier.HOST, whole, machine.host_memory, "device, host and activations")]
            left = machine.host_memory - here * beside
            room = Budget(left - here * host, left - here * device)
        else:
            memories = [
                (Tier.HOST, here * host, machine.host_memory, "what is placed there, and leases"),
                (
                    Tier.DEVICE,
                    device + beside,
                    machine.device_memory,
                    "what is placed there, and activations",
                ),
            ]
            room = Budget(machine.device_memory - beside, machine.host_memory)
        if not problems:
            problems = [Problem(t, n, a, what) for t, n, a, what in memories if n > a]
        standing = on_drives(machine, wanted.arenas, self._scratch)
        problems += [
            Problem(
                Tier.NVME,
                there.needed,
                there.free,
                f"in {there.directory}, {_standing(there)}",
            )
            for there in standing
            if there.free is not None and there.needed > there.free
        ]
        further = accumulation - 1
        return Plan(
            parameters=self.model.parameters,
            trainable=self.model.trainable,
            active=self.model.parameters - self.model.idle,
            largest_unit=wanted.largest,
            units=wanted.units,
            chunks=wanted.chunks,
            footprint=taken,
            # The first backward is the footprint's. Each further one loads the copies twice more.
            traffic=Traffic(
                wanted.read + further * wanted.again[0],
                wanted.written + further * wanted.again[1],
                wanted.link[1] + accumulation * (wanted.link[0] + 2 * min(inputs, taken.activation_nbytes)),
                wanted.updated,
                wanted.sent[1 if accumulation == 1 else 2] + accumulation * wanted.sent[0],
            ),
            problems=tuple(problems),
            activations=beside,
            least=least,
            room=room,
            standing=tuple(standing),
            matrix=wanted.matrix[0],
            matrix_flops=wanted.flops,
        )


def _standing(there: Standing) -> str:
    named = ("arenas", there.arenas), ("the model as it is built", there.scratch)
    return " and ".join(f"{name} {format_size(nbytes)}" for name, nbytes in named if nbytes)


def checkpoint_nbytes(model: Model, config: Config) -> int:
    """Return the bytes of a checkpoint's parameters and moments, with both versions where there are two."""
    saved, moments = 0, moments_of(model.moments, config)
    for param in (p for _, params in model.units for p in params):
        if param.trainable:
            saved += 4 * param.numel + sum(m.nbytes(param.numel) for m in kept_of(param, moments))
        saved += param.nbytes if not param.trainable or config.update == "delayed" else 0
    return saved


def wear(traffic: Traffic, *, steps: int, tbw: float, drives: int, ranks: int = 1) -> Wear:
    """Return what `steps` steps of `ranks` ranks, each with that `traffic`, mean for `drives` drives, each
    rated for `tbw` TB (1e12 bytes)."""
    rated = tbw * 1e12 * max(drives, 1)
    written = traffic.nvme_written * ranks
    return Wear(rated, float(written) * steps, rated / written if written else None)


def step_bounds(plan: Plan, bandwidths: Bandwidths, *, tokens: int, recompute: bool) -> dict[str, float]:
    """Return the least seconds of a step that each known resource allows.

    A step takes at best the largest of them. Compute is 6 FLOP per parameter and token, 8 with
    recomputation (Kaplan et al., 2001.08361, without attention), of those that a token passes, and the
    updates of whole parameters; host memory is what the update moves of each parameter that the CPU updates:
    state and gradient.
    """
    flop = (8 if recompute else 6) * plan.active * tokens + plan.matrix_flops
    amounts = {
        "compute": (flop, None if bandwidths.tflops is None else bandwidths.tflops * 1e12),
        "nvme read": (plan.traffic.nvme_read, _rate(bandwidths.nvme_read)),
        "nvme write": (plan.traffic.nvme_written, _rate(bandwidths.nvme_write)),
        "link": (plan.traffic.link, _rate(bandwidths.link)),
        "host memory": (plan.traffic.host, _rate(bandwidths.dram)),
        "network": (plan.traffic.sent, _rate(bandwidths.network)),
    }
    return {name: amount / rate for name, (amount, rate) in amounts.items() if rate}


def _rate(gigabytes: float | None) -> float | None:
    return None if gigabytes is None else gigabytes * 1e9
