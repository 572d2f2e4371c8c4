"""A run and the machine that it is planned for: its plan, what to change where it does not fit, and the
placement with which it would be fastest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from infinity.api.ranks import check_matrices, check_ranks, check_stage
from infinity.core.config import Config
from infinity.core.errors import ConfigError
from infinity.core.sizes import NORM_BLOCK, Tier, parse_size
from infinity.hardware.launch import RankPlace
from infinity.planning.cures import (
    DIRECTORY,
    Change,
    Judge,
    as_options,
    complete,
    cure,
    of_config,
)
from infinity.planning.footprint import AHEAD, SMALLEST, whole_mebibytes
from infinity.planning.machine import Drive, Machine
from infinity.planning.planner import Bandwidths, Plan, Planner, step_bounds

from .machine import among, described, here
from .settings import MOMENTS, RunSettings, TrainSettings
from .shape import Activations
from .workload import workload_of

T = TypeVar("T")
#: With more chunks than this a plan takes seconds: no cure cuts a model into so many.
_MOST_CHUNKS: Final = 100_000
_TENTHS: Final = 10


_ALONE: Final = RankPlace()


class Case:
    """A run on a machine, as one rank has it.

    Args:
        machine: of a description; None: the one that this runs on.
        at: which rank.

    Raises:
        ConfigError: the run contradicts itself, or the machine has no such device or drive; or it is not
            available with several ranks.
        DataError: the model cannot be read.
        DirectoryError: an NVMe directory cannot be used.
    """

    def __init__(
        self,
        run: RunSettings,
        machine: Machine | None = None,
        *,
        at: RankPlace = _ALONE,
    ) -> None:
        self.run = run
        self.described = machine
        self.at = at
        self.workload = workload_of(run)
        settings, self.unnamed = _config(run)

        def seen(config: Config) -> Machine:
            if machine is None:
                return here(config, unnamed=self.unnamed)
            return described(machine, config, unnamed=self.unnamed)

        self.config = self._of_rank(settings)
        first = at.rank - at.local_rank
        self.machine = among(seen, settings, first, at.local_world, at.local_rank)
        self.machine = dataclasses.replace(self.machine, ranks=at.world, local_ranks=at.local_world)
        # The job's first rank alone builds the model: on its machine.
        scratch = self.workload.scratch() if at.rank == at.local_rank else ()
        model = self.workload.planned(self.config)
        moments = MOMENTS[run.train.optimizer]
        self.planner = Planner(dataclasses.replace(model, moments=moments), scratch)

    def _of_rank(self, config: Config) -> Config:
        """Return the settings of this rank.

        Raises:
            ConfigError: they are not available with several ranks, or with Muon.
        """
        if self.run.train.optimizer == "muon":
            check_matrices(config)
        if self.at.world > 1:
            check_ranks(self.at.world, config, trains=True)
            check_stage(self.at.world, config)
        return config.for_rank(self.at.rank, self.at.local_rank)

    # -- one plan ---------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the plan of the run; where it does not fit, with what to change."""
        plan = self._plan(self.run, self.config, self.machine)
        if plan.fits:
            return plan
        text = cure(plan.problems, self._changes(), self.judge, as_options, self._room_needed)
        if self.unnamed:
            where = f"in {DIRECTORY}"
            problems = [
                dataclasses.replace(p, what=p.what.replace(where, "no directory is named (--nvme)"))
                for p in plan.problems
            ]
        else:
            problems = list(plan.problems)
        return dataclasses.replace(plan, problems=tuple(dataclasses.replace(p, cure=text) for p in problems))

    def activations(self, run: RunSettings, config: Config, room: int) -> Activations:
        """Return the activations that are on the device, where the host has `room` bytes for some."""
        train = run.train
        made = self.workload.activations(config, train.batch, train.sequence, train.recompute)
        moved = min(made.inputs, room) if made.largest >= SMALLEST else 0
        # Of those that move, one is in use while the next ones come (or the last ones go).
        away = max(0, moved - (1 + AHEAD) * made.largest)
        return made._replace(saved=made.saved - away, peak=made.peak - away)

    def _plan(self, run: RunSettings, config: Config, machine: Machine) -> Plan:
        train = run.train
        made = self.workload.activations(config, train.batch, train.sequence, train.recompute)
        return self.planner.plan(
            config,
            machine,
            accumulation=train.accumulation,
            inputs=made.inputs,
            activations=lambda room: self.activations(run, config, room).peak,
        )

    # -- changes ----------------------------------------------------------------------------

    def judge(self, change: Change) -> Plan | None:
        """Return the plan of the run with a change; None where the change contradicts the run."""
        try:
            return self._judged(change, None)
        except ConfigError:
            return None

    def _judged(self, change: Change, free: int | None) -> Plan:
        run = changed(self.run, change)
        config = self._of_rank(run.config())
        return self._plan(run, config, self._with(config, free))

    def _with(self, config: Config, free: int | None) -> Machine:
        """Return the machine with the drives that settings name; `free` are the bytes in `DIRECTORY`."""
        known = {d.directory: d for d in (*self.machine.drives, *self._offered())}
        if self.unnamed:
            known.pop(DIRECTORY, None)
        strange = DIRECTORY not in known and DIRECTORY in config.directories
        drives = []
        for directory in config.directories:
            drive = known.get(directory)
            if drive is None:
                ranks = self.at.local_world
                drive = Drive(directory=directory, free=free, system=directory, ranks=ranks)
            # A drive that `infinity tune` has not measured makes all of them count alike.
            drives.append(dataclasses.replace(drive, weight=1.0) if strange else drive)
        return self.machine.with_drives(drives)

    def _offered(self) -> tuple[Drive, ...]:
        """Drives of the description that the run does not name."""
        return () if self.described is None else self.described.drives

    def _room_needed(self, change: Change) -> int:
        plan = self._judged(change, None)
        [there] = [s for s in plan.standing if s.directory == DIRECTORY]
        needed = there.needed
        while not self._judged(change, needed).fits:  # scratch goes in pieces of a parameter each
            needed += max(self.workload.scratch())
        return needed

    def _changes(self) -> Iterator[Change]:
        config, train = self.config, self.run.train
        engine = [c for c in of_config(config) if self._few_enough(c.get("chunk_elements", math.inf))]
        batches: list[Change] = [{}]
        batch, accumulation = train.batch, train.accumulation
        while batch % 2 == 0:
            batch, accumulation = batch // 2, accumulation * 2
            batches.append({"batch": batch, "accumulation": accumulation})
        for drives in self._drives():
            for smaller, fewer, settings in itertools.product(batches, self._recomputing(), engine):
                yield {**settings, **fewer, **smaller, **drives}

    def _recomputing(self) -> list[Change]:
        """Return changes with which fewer activations are on the device."""
        again: Change = {} if self.run.train.recompute else {"recompute": True}
        found = [{}, again] if again else [{}]
        return found if self.config.activations == "host" else [*found, {**again, "activations": "host"}]

    def _drives(self) -> Iterator[Change]:
        named = () if self.unnamed else self.config.directories
        yield {}
        for count in range(len(named) - 1, 0, -1):
            for fewer in itertools.combinations(named, count):
                yield {"nvme": fewer}
        offered = tuple(d.directory for d in self._offered() if d.directory not in named)
        if offered:
            yield {"nvme": (*named, *offered)}
            yield from ({"nvme": (one,)} for one in offered)
            return
        if named:
            yield {"nvme": (*named, DIRECTORY)}
        yield {"nvme": (DIRECTORY,)}

    # -- the fastest ------------------------------------------------------------------------

    def fastest(self, bandwidths: Callable[[Machine], Bandwidths]) -> Change | None:
        """Return the change to the placement with which a step takes least by the plan's bounds, of all
        that fit; None if none does. Chunks are smaller only where nothing fits without, and then
        activations are recomputed, and then moved to the host."""
        base: dict[str, Any] = {}
        if self.described is not None:
            base = {"device": self.config.device or ("cuda" if self.described.staged else "cpu")}
            if self._offered() and (self.unnamed or not self.config.directories):
                base["nvme"] = tuple(d.directory for d in self._offered())
        limits = {
            name: parse_size(self.run.engine[name])
            for name in ("device_memory", "host_memory")
            if self.run.engine.get(name) is not None
        }

        def judge(change: Change) -> Plan | None:
            """No budget is raised beyond one that was named."""
            given = {name: change.get(name) for name in limits}
            if any(v is not None and parse_size(v) > limits[name] for name, v in given.items()):
                return None
            return self.judge(change)

        bases = [base, {k: v for k, v in base.items() if k != "nvme"}] if "nvme" in base else [base]
        for base, fewer, smaller in itertools.product(bases, self._recomputing(), self._chunks()):
            found: list[tuple[Any, Change]] = []
            for change in self._placed({**base, **fewer, **smaller}, judge):
                whole = self._named(change, judge)
                if whole is not None:
                    found.append((self._rank(whole, bandwidths), whole))
            if found:
                return min(found, key=lambda item: item[0])[1]
        return None

    def _chunks(self) -> list[Change]:
        """Return the size of chunks as it is, and smaller ones."""
        sizes = (self.config.elements_per_chunk // by // NORM_BLOCK * NORM_BLOCK for by in (4, 16))
        return [{}, *({"chunk_elements": size} for size in sizes if self._few_enough(size))]

    def _few_enough(self, chunk_elements: float) -> bool:
        return self.planner.model.parameters <= chunk_elements * _MOST_CHUNKS

    def _placed(self, base: Change, judge: Judge) -> Iterator[Change]:
        """Yield every placement on whole tiers, and of the state the most of it on the host, by tenths,
        where not all of it fits."""
        for parameters, gradients in itertools.product(Tier, repeat=2):
            rest = {**base, "parameters": parameters.value, "gradients": gradients.value}
            whole = {t: {**rest, "optimizer_state": t.value} for t in Tier}
            yield from whole.values()
            for near, far in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.NVME), (Tier.DEVICE, Tier.NVME)):
                if complete(whole[near], judge) is not None or complete(whole[far], judge) is None:
                    continue
                low, high = 0, _TENTHS  # so many tenths fit; so many do not
                while high - low > 1:
                    middle = (low + high) // 2
                    if complete(_split(rest, near, far, middle), judge) is not None:
                        low = middle
                    else:
                        high = middle
                if low:
                    yield _split(rest, near, far, low)

    def _named(self, change: Change, judge: Judge) -> Change | None:
        """Return a change that fits with the budgets that its plan takes, so that a run does as well."""
        whole = complete(change, judge)
        if whole is None:
            return None
        plan = self._judged(whole, None)
        ranks = {
            Tier.HOST: self.at.local_world,
            Tier.DEVICE: 1 if self.machine.staged else self.at.local_world,
        }
        taken = {f"{t}_memory": whole_mebibytes(plan.footprint.total(t) * n) for t, n in ranks.items()}
        exact = {**whole, **taken}
        plan_again = judge(exact)
        return exact if plan_again is not None and plan_again.fits else whole

    def _rank(self, change: Change, bandwidths: Callable[[Machine], Bandwidths]) -> Any:
        run = changed(self.run, change)
        machine = self._with(self._of_rank(run.config()), None)
        plan = self._judged(change, None)
        train = run.train
        bounds = step_bounds(
            plan, bandwidths(machine), tokens=train.tokens_per_step, recompute=train.recompute
        )
        moved = plan.traffic
        slowest_first = sorted(bounds.values(), reverse=True)
        return slowest_first, moved.nvme_written + moved.nvme_read, moved.link, moved.host


def _split(rest: Change, near: Tier, far: Tier, tenths: int) -> Change:
    shares = {near.value: tenths / _TENTHS, far.value: (_TENTHS - tenths) / _TENTHS}
    return {**rest, "optimizer_state": shares}


def _config(run: RunSettings) -> tuple[Config, bool]:
    """Return the engine's configuration, and whether a directory that it needs is not named."""
    try:
        return run.config(), False
    except ConfigError:
        if run.engine.get("nvme"):
            raise
        return run.config(nvme=[DIRECTORY]), True


def changed(run: RunSettings, change: Mapping[str, Any]) -> RunSettings:
    """Return a run with a change; None takes a setting back to its default."""
    of_train = {f.name for f in dataclasses.fields(TrainSettings)}
    train = dataclasses.replace(run.train, **{k: v for k, v in change.items() if k in of_train})
    engine = {**run.engine, **{k: v for k, v in change.items() if k not in of_train}}
    return dataclasses.replace(run, train=train, engine={k: v for k, v in engine.items() if v is not None})
