"""Suggestions for a run that does not fit: changes that the planner has tried, as settings or as options.

A *change* is a set of settings by name, which replace the given ones. The planner suggests a change only if
the whole run, planned with it, fits every tier at once; so no suggestion leads to another refusal. ``DIR`` in
a change stands for a directory on a drive that is not named yet; the space that must be free there follows.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from infinity.core.config import Config
from infinity.core.sizes import NORM_BLOCK, MiB, Tier

from .footprint import room, whole_mebibytes
from .planner import KINDS, Plan, Problem

Change = Mapping[str, Any]
#: Returns the plan of a run with a change; None where the change contradicts the run.
Judge = Callable[[Change], "Plan | None"]
#: A directory that is not named yet.
DIRECTORY: Final = "DIR"


def as_options(change: Change) -> str:
    """Return a change as options on the command line."""
    words: list[str] = []
    for name, value in change.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        for one in value if isinstance(value, (tuple, list)) else (value,):
            words += [flag, shlex.quote(str(placement_text(one)))]
    return " ".join(words)


def as_settings(change: Change) -> str:
    """Return a change as arguments of `Config`."""
    words = []
    for name, value in change.items():
        if isinstance(value, (tuple, list)):
            value = value[0] if len(value) == 1 else list(value)
        words.append(f"{name}={_quoted(value)}")
    return ", ".join(words)


def _quoted(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_quoted, value)) + "]"
    return (
        '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
    )


def placement_text(value: Any) -> Any:
    """Return a split as the command line writes it: ``host:0.3,nvme:0.7``; anything else as it is."""
    if isinstance(value, Mapping):
        return ",".join(f"{tier}:{share:g}" for tier, share in value.items())
    return value


def complete(change: Change, judge: Judge) -> Change | None:
    """Return `change` with the budgets that it needs to fit; None if it cannot."""
    plan = judge(change)
    if plan is None or plan.fits:
        return None if plan is None else change
    for budgets in _budgets(plan):
        more = {**change, **budgets}
        plan = judge(more)
        if plan is not None and plan.fits:
            return more
    return None


def _budgets(plan: Plan) -> Iterator[Change]:
    least = {f"{t}_memory": whole_mebibytes(getattr(plan.least, t)) for t in (Tier.HOST, Tier.DEVICE)}
    short = {f"{p.tier}_memory" for p in plan.problems if p.needed == getattr(plan.least, p.tier, None)}
    if short:
        yield {name: size for name, size in least.items() if name in short}
    if plan.least.device <= plan.room.device:  # less is loaded ahead, so that activations find room
        yield {"device_memory": f"{plan.room.device // MiB}MiB"}
    if plan.least.host <= plan.room.host:
        yield {"host_memory": f"{plan.room.host // MiB}MiB"}
    yield least


def placements(config: Config) -> Iterator[Change]:
    """Yield every placement on whole tiers, those that change least first, faster tiers preferred."""
    tiers = list(Tier)
    options = []
    for chosen in itertools.product(tiers, repeat=len(KINDS)):
        changed = {
            kind: tier.value
            for kind, tier in zip(KINDS, chosen, strict=True)
            if dict(config.placements[kind]) != {tier: 1.0}
        }
        options.append((len(changed), sum(tiers.index(Tier(t)) for t in changed.values()), changed))
    options.sort(key=lambda option: option[:2])
    for _, _, changed in options:
        yield changed


def of_config(config: Config) -> Iterator[Change]:
    """Yield the changes of settings of the engine that may let a run fit."""
    yield from placements(config)
    if config.update == "delayed":  # it takes a second copy
        for placed in placements(config):
            yield {**placed, "update": "overlap"}
    size = config.elements_per_chunk // 2 // NORM_BLOCK * NORM_BLOCK
    while size >= max(NORM_BLOCK, config.elements_per_chunk >> _SMALLER):
        # Many small chunks are slow to plan: with them only the two ends are tried.
        yield {"chunk_elements": size}
        yield {**dict.fromkeys(KINDS, Tier.NVME.value), "chunk_elements": size}
        size = size // 4 // NORM_BLOCK * NORM_BLOCK


#: Chunks are cut to no less than this power of two smaller.
_SMALLER: Final = 6


def cure(
    problems: Iterable[Problem],
    changes: Iterable[Change],
    judge: Judge,
    speak: Callable[[Change], str],
    room_needed: Callable[[Change], int],
) -> str:
    """Return what to change so that everything fits: one alternative of budgets alone, one of other
    settings, and one of another drive, as far as there are such.

    Args:
        changes: without budgets, in the order in which they are preferred; one may name `DIRECTORY`.
        room_needed: returns the bytes that must be free in `DIRECTORY` with a change.
    """
    found = []
    budgets = complete({}, judge)
    if budgets:
        found.append(speak(budgets))
    changes = [c for c in changes if c]
    here = [c for c in changes if DIRECTORY not in c.get("nvme", ())]
    elsewhere = [c for c in changes if DIRECTORY in c.get("nvme", ())]
    first = _first(here, judge, budgets_too=not budgets)
    if first is not None:
        found.append(speak(first))
    if not found or any(p.tier is Tier.NVME for p in problems):
        more = _first(elsewhere, judge, budgets_too=True)
        if more is not None:
            found.append(f"{speak(more)} (DIR with {room(room_needed(more))} free)")
    return ", or ".join(found) or "no setting is enough: take a smaller model, less at once, or more memory"


def _first(changes: list[Change], judge: Judge, *, budgets_too: bool) -> Change | None:
    for change in changes:
        plan = judge(change)
        if plan is not None and plan.fits:
            return change
    if budgets_too:
        for change in changes:
            found = complete(change, judge)
            if found is not None:
                return found
    return None
