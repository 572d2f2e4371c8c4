"""Where `infinity train` keeps what it trains: the directory, the room that it takes, and how a run goes on.

A new run has a directory of checkpoints of its own; only one that goes on writes into one that is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from infinity.api.claimed import claimed, closed_apart, going_on
from infinity.api.this_machine import drive_here
from infinity.api.together import agree
from infinity.core.errors import ConfigError, DataError, DirectoryError
from infinity.core.system_errors import reason
from infinity.planning.machine import Drive, Machine
from infinity.storage.checkpoints import (
    Found,
    check_root,
    find,
    is_checkpoint,
    list_checkpoints,
)

from .settings import OPTIONS, RunSettings, TrainSettings, Values, read_values, run_of

if TYPE_CHECKING:  # what a plan asks of a directory needs no torch
    from .job import Job

#: The folder of directories that nobody named.
_RUNS: Final = "runs"
_STEP: Final = re.compile(r"step-\d{1,15}")
#: What every step depends on, beside the model, the text and the rate: a run that goes on has it as it began.
_FIXED: Final = (
    *("batch", "sequence", "accumulation", "seed"),
    *("schedule", "warmup_steps", "decay_fraction", "min_lr"),
)
_OF_OPTIMIZER: Final = ("optimizer", "weight_decay", "beta1", "beta2")
#: What belongs to one process.
_OWN: Final = ("output", "resume", "trace", "overwrite")


def place_of(run: RunSettings, directories: Sequence[str]) -> str | None:
    """Return the directory of checkpoints, or the one in which a new one is made; None if nothing is kept."""
    if not run.train.save:
        return None
    if run.train.output is not None:
        return os.path.abspath(os.path.expanduser(run.train.output))
    return os.path.abspath(os.path.join(directories[0] if directories else ".", _RUNS))


def drive_of(path: str, machine: Machine | None) -> Drive | None:
    """Return the drive that `path` is on, or will be: of a described machine (None if it has none such), or
    of this one.

    Raises:
        DirectoryError: nothing can be made there.
    """
    if machine is not None:
        above = [d for d in machine.drives if os.path.commonpath([d.directory, path]) == d.directory]
        return max(above, key=lambda d: len(d.directory), default=None)
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        return drive_here(there)
    except DirectoryError as error:
        error.cure = "--output DIR, a directory that this user may write to; or --no-save"
        raise


def further(train: TrainSettings, path: str, *, here: bool) -> int:
    """Return how many checkpoints come to stand at `path` at once, beside those that are there. One is
    removed when a newer one is whole: that is one more than are kept. `here`: `path` is of this machine."""
    there = list_checkpoints(path, damaged=False) if here and train.output is not None else []
    begin = there[-1].step if there and train.resume else 0
    every = train.save_every or (1 if train.save_minutes is not None else train.steps)
    saves = -(-train.steps // every) - begin // every
    return max(1, min(train.keep_last + 1 - len(there), saves))


def check_unused(path: str) -> None:
    """Raise `ConfigError` where another run keeps its checkpoints, `DirectoryError` inside of one."""
    check_root(path)
    there = list_checkpoints(path, damaged=False)
    if there:
        raise ConfigError(
            f"{path} has the checkpoints of another run",
            expected="a directory of its own for each run, so that none is mixed up or removed",
            found=os.path.basename(there[-1].path),
            cure="--resume to go on with that run, or another --output",
        )


@contextlib.contextmanager
def taken(train: TrainSettings, place: str | None, job: Job) -> Iterator[str | None]:
    """Lend the directory of a run's checkpoints, which no other run has meanwhile: the one that it names, or
    a new one in `place`; None if nothing is kept. A new one without a checkpoint is removed. Collective.

    Raises:
        ConfigError: it has the checkpoints of another run.
        DirectoryError: a run that is under way has it, or it cannot be made.
    """
    if place is None:
        yield None
        return
    with contextlib.ExitStack() as ends:
        root = ""
        if job.first:
            root = place if train.output is not None else new_directory(place)
            if train.output is None:
                ends.callback(closed_apart, lambda: _remove_unused(root))
        root = agree(job.comm, "where checkpoints go", root)[0]
        # Again: another run may have ended since.
        check = check_root if train.resume else check_unused
        ends.enter_context(claimed(job.comm, root, lambda: check(root)))
        yield root


def _remove_unused(root: str) -> None:
    with contextlib.suppress(OSError):  # it stays, unless nothing was saved
        os.rmdir(root)


def new_directory(path: str) -> str:
    """Return a new directory in `path`.

    Raises:
        DirectoryError: it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for name in (stamp, *(f"{stamp}-{i}" for i in range(2, 1000))):
        try:
            os.makedirs(os.path.join(path, name))
        except FileExistsError:
            continue
        except OSError as error:
            raise DirectoryError(
                f"no directory for checkpoints can be made in {path}",
                errno=error.errno,
                path=path,
                expected="a directory that this user may write to",
                found=reason(error.errno),
                cure="--output DIR, or --no-save",
            ) from error
        return os.path.join(path, name)
    raise AssertionError


def anew(found: Found) -> str:
    """Return how a new run begins, with what a checkpoint has learned where --init-from can take that."""
    if "config.json" in found.content.get("texts", {}):
        return "`infinity export` the checkpoint, and begin a new run with --init-from"
    return "begin a new run, without --resume and with another --output"


def check_of_transformers(found: Found) -> None:
    """Raise `DataError` for a checkpoint of the built-in GPT that `infinity train` had once."""
    state = found.content.get("state")
    if "config.json" in found.content.get("texts", {}) or not isinstance(state, dict) or "train" not in state:
        return
    raise DataError(
        f"{found.path} has the built-in GPT of an earlier version, which this version does not have",
        expected="the checkpoint of a model of transformers, with its config.json",
        found=f"a checkpoint of infinity {found.content.get('infinity')} without one",
        cure="go on, or write text, with the version of infinity that made it; `infinity export` writes its "
        "parameters as safetensors in this one, too",
    )


def _saved_run(train: Mapping[str, Any]) -> tuple[Found, Values]:
    """Return the newest checkpoint in ``output``, and the settings of the run that made it, without those
    that are defaults or belong to one process.

    Raises:
        ConfigError: no directory is named, or the checkpoint is not of `infinity train`.
        DataError: the checkpoint is of the built-in GPT of an earlier version.
        DirectoryError, CorruptionError: there is no checkpoint, or it cannot be read; or the directory is
            one itself.
    """
    output = train.get("output")
    if not output:
        raise ConfigError(
            "nobody says which run is to go on",
            expected="the directory of its checkpoints",
            found="--resume alone",
            cure="--resume --output DIR; a run says at its end where its checkpoints are",
        )
    root = os.path.abspath(os.path.expanduser(str(output)))
    check_root(root)
    try:
        with going_on(root):
            found = find(root)
    except DirectoryError as error:
        error.cure = "name the directory that the run said; without --resume a new run begins"
        raise
    from infinity.api.user_state import decode

    made = found.content.get("state")
    made = made.get("train") if isinstance(made, dict) else None
    run = decode(made.get("run"), {}, found.path) if isinstance(made, dict) else None
    if not isinstance(run, dict):
        raise ConfigError(
            f"{found.path} was not saved by `infinity train`",
            expected="a checkpoint with the settings of its run",
            found="one of another program",
            cure=f"load it in Python with `infinity.load`; or {anew(found)}",
        )
    check_of_transformers(found)
    usual = RunSettings.default().as_dict()
    kept = {
        section: {
            k: v
            for k, v in (run.get(section) or {}).items()
            if (section == "engine" or v != usual[section].get(k)) and (section != "train" or k not in _OWN)
        }
        for section in usual
    }
    return found, kept


def read_run(
    config_file: str | None,
    given: Mapping[str, Any],
    ranks: int = 1,
    beneath: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunSettings:
    """Return the run that a file and options describe. One that goes on is as it was saved, but for what they
    name.

    Args:
        given: the parameters of a command that `run_options` decorated.
        ranks: that train together: a step of a run that goes on has as many sequences as before.
        beneath: settings that the file and options win over.

    Raises:
        ConfigError: the file cannot be read, a setting is unknown or wrong, or a run that goes on is told to
            become another.
        DirectoryError, CorruptionError: there is no checkpoint to go on from, or it cannot be read.
    """
    values = read_values(config_file, given, beneath)
    if not values["train"].get("resume"):
        return run_of(values)
    found, kept = _saved_run(values["train"])
    told = {s: {k: v for k, v in values[s].items() if v is not None} for s in values}
    saved = run_of(kept)
    kept["train"]["warmup"] = saved.train.warmup_steps  # of the steps that were planned then
    together = saved.train.batch * (found.content["state"]["train"].get("ranks") or 1)
    if together % ranks:
        fewer = max(n for n in range(1, ranks) if together % n == 0)
        raise ConfigError(
            f"{ranks} ranks cannot share the batches of a run that goes on",
            expected=f"a number of ranks that divides {together}, the sequences of all ranks in one forward",
            found=f"{ranks} ranks",
            cure=f"start {fewer} rank{'s' * (fewer > 1)}; or {anew(found)}",
        )
    kept["train"]["batch"] = together // ranks
    run = run_of({s: {**kept[s], **told[s]} for s in values})
    _check_goes_on(run, run_of(kept), found)
    return run


def _check_goes_on(run: RunSettings, saved: RunSettings, found: Found) -> None:
    changed = [
        (name, getattr(ours, name), getattr(theirs, name))
        for ours, theirs, names in (
            (run.model, saved.model, _names(run.model)),
            (run.data, saved.data, ("validation", "tokenizer")),
            (run.train, saved.train, (*_FIXED, *_OF_OPTIMIZER)),
        )
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if changed:
        name, here, there = changed[0]
        flag = "--" + name.replace("_steps", "").replace("_", "-")
        raise ConfigError(
            f"a run that goes on cannot change its {name}",
            expected=f"{there!r}, as in {found.path}",
            found=repr(here),
            cure=f"leave {flag} out; or {anew(found)}",
        )
    check_steps(run.train, found.step)


def changes(run: RunSettings, before: Mapping[str, Any]) -> list[str]:
    """Return what a run that goes on does in another way, as options. `before`: as `as_dict` has it."""
    now = json.loads(json.dumps(run.as_dict()))
    usual = RunSettings.default().as_dict()  # of settings that there were not when it was saved
    before = {section: {**usual[section], **(before.get(section) or {})} for section in usual}
    found = []
    for option in OPTIONS:
        old, new = (each[option.section].get(option.name) for each in (before, now))
        if old != new and (option.section != "train" or option.name not in (*_OWN, "json_log", "warmup")):
            flag = option.flags.split("/")[0]
            found.append(f"{flag} {'default' if old is None else old} → {'default' if new is None else new}")
    return found


def without_index(root: str) -> list[str]:
    """Return the directories in `root` that would be checkpoints if they had an index."""
    with os.scandir(root) as entries:
        names = [e.name for e in entries if _STEP.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    paths = [os.path.join(root, name) for name in sorted(names, key=lambda n: int(n.removeprefix("step-")))]
    return [path for path in paths if not is_checkpoint(path)]


def check_steps(train: TrainSettings, made: int) -> None:
    """Raise `ConfigError` where a run that goes on after `made` steps has none to make."""
    if made >= train.steps:
        error = ConfigError(
            "the run is at its end",
            expected=f"more than the {made} steps that were made",
            found=f"--steps {train.steps}",
            cure=f"--steps {2 * made}, or another number above {made}",
        )
        vars(error)["exit_code"] = 0  # to who starts runs again until they end well, it has
        raise error


def _names(settings: Any) -> Iterable[str]:
    return (f.name for f in dataclasses.fields(settings))
