"""The suggestions of `wrap` when a run does not fit: settings with which it would fit."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator, Sequence

from infinity.core.config import Config
from infinity.core.errors import BudgetError, ConfigError, DirectoryError
from infinity.core.sizes import format_size
from infinity.hardware.device import Device
from infinity.planning.cures import DIRECTORY, Change, as_settings, cure, of_config
from infinity.planning.machine import Drive
from infinity.planning.partition import ParamSpec
from infinity.planning.parts import Moment
from infinity.planning.planner import Model, Plan, Planner

from .this_machine import machine_here


def add_cure(
    error: BudgetError | DirectoryError,
    units: Sequence[tuple[str, Sequence[ParamSpec]]],
    working_sets: Sequence[Sequence[int]],
    moments: Sequence[Moment],
    config: Config,
    device: Device,
) -> None:
    """Add suggestions to an error of `wrap`: those of the tried settings that fit here.

    Args:
        error: a budget that is too small, or a directory that is full; others are left as they are.
    """
    if isinstance(error, DirectoryError) and error.errno != errno.ENOSPC:
        return
    machine = machine_here(config, device.memory_free() if device.staged else None)
    names = [moment.name for moment in moments if moment.block == 1]  # a plan adds scales by itself
    planner = Planner(Model(units, working_sets, moments=names))

    def tried(change: Change, free: int | None) -> Plan:
        new = config.replace(**change)
        known = {d.directory: d for d in machine.drives}
        missing = [d for d in new.directories if d not in known]
        drives = [known.get(d, Drive(directory=d, free=free, system=d)) for d in new.directories]
        if missing:  # not measured by `infinity tune`: then all of them count alike
            drives = [dataclasses.replace(d, weight=1.0) for d in drives]
        return planner.plan(new, machine.with_drives(drives))

    def judge(change: Change) -> Plan | None:
        try:
            return tried(change, None)
        except ConfigError:
            return None

    def room_needed(change: Change) -> int:
        [there] = [s for s in tried(change, None).standing if s.directory == DIRECTORY]
        return there.needed

    found = cure(tried({}, None).problems, _changes(config), judge, as_settings, room_needed)
    if isinstance(error, DirectoryError):
        full = next((p for p in tried({}, None).problems if p.needed > p.available), None)
        if full is not None:
            found = f"free {format_size(full.needed - full.available)} there, or {found}"
    error.cure = found


def _changes(config: Config) -> Iterator[Change]:
    named = config.directories
    engine = list(of_config(config))
    drives: list[tuple[str, ...]] = [(d,) for d in named] if len(named) > 1 else []
    drives += [(*named, DIRECTORY)] if named else []
    for directories in (None, *drives, (DIRECTORY,)):
        for settings in engine:
            yield {**settings, "nvme": directories} if directories else settings
