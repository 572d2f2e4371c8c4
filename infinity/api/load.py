"""`load`: loads a checkpoint into a wrapped model and its optimizer, for any placement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Final

import torch

from infinity.core.errors import DirectoryError, StateDictError, StorageError
from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware.aio import Ring
from infinity.hardware.ranks import Comm
from infinity.optim.loading import counts_of
from infinity.optim.pieces import read_moment, write_moment
from infinity.optim.state_io import bump
from infinity.params.param import ShardedParam
from infinity.planning.parts import scales_of
from infinity.storage.checkpoints import INDEX, Found, check_shared, find
from infinity.storage.checksums import sums_of
from infinity.storage.store import Version
from infinity.storage.tensor_file import TensorFile, read_all
from infinity.storage.tensor_header import DTYPES
from infinity.storage.under_way import UnderWay

from .checkpoint import (
    Progress,
    buffers_of,
    elements_here,
    names_of,
    naming_another,
    open_saved,
    path_of,
    pieces_of,
    reading_ring,
    wrong_index,
)
from .engine import Engine, engine_of
from .random_state import set_random_states
from .together import agree, agree_on_path, guarded, together
from .user_state import check_named, decode, is_tokenizer

_SHOWN: Final = 20  # names in a message
_WHAT: Final = "a load"  # what ranks do together
_GIVEN: Final = "the end of a load"
_AT_ONCE: Final = 1 << 18  # elements that are converted at once
_ATTEMPTS: Final = 1000  # each another checkpoint, that a process which saves meanwhile has removed


def load(
    optimizer: torch.optim.Optimizer | torch.nn.Module,
    path: str | PathLike[str],
    *,
    state: MutableMapping[str, Any] | None = None,
    strict: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a wrapped model and its optimizer, to resume the run.

    The model may have another placement, other chunks, another compute dtype and another number of ranks than
    the saved run. Param groups get the saved options. The random number generators get their saved states;
    they stay as they are if the checkpoint is imported from a program that saves none.

    With several ranks `load` is a collective, and each rank reads its part of every tensor. All ranks pass
    the same path. The first rank chooses the checkpoint; every rank gets the `state` that the first rank
    saved. If the number of ranks is the same as at the save, each rank gets back its buffers and its random
    numbers. With another number, all ranks get the buffers of the first rank, and the first rank gets its
    random numbers. The torch generator of rank r then starts with the first rank's seed plus r, as in `wrap`.

    Args:
        optimizer: the optimizer or the model, as `wrap` returned them.
        path: a checkpoint; or a directory of checkpoints, for the one that was completed last.
        state: as for `save`. `load` calls `load_state_dict` of each object that has one, with the saved
            values. It replaces other values by the saved ones. Tokenizers stay as they are.
        strict: whether these are errors: parameters that only the model or only the checkpoint has,
            trained parameters in other groups, and names in `state` that the checkpoint does not have. If
            not, `load` loads what both have. For a parameter that is in no group here, such as a frozen one,
            it loads the values.
        progress: a function that `load` calls, on another thread, with the bytes that this rank has read and
            all bytes that it will read. It may not use the model or the optimizer.

    Returns:
        The saved `state`, by name, without tokenizers: `infinity.export` of the checkpoint writes these.

    Raises:
        ConfigError: the ranks passed different paths.
        DirectoryError: there is no checkpoint, or it is not readable.
        CorruptionError: the checkpoint differs from what was saved.
        StateDictError: the checkpoint does not fit the model. Nothing was changed.
        ParameterError: a `gathered` block is open for parameters that would change. Nothing was changed.
        RankError: a rank is gone, or makes another call. Any other error on one rank raises an error of the
            same class on all.

    `load` drops the gradients. If a load ends early (a damaged byte, a `load_state_dict` that raises, an
    interrupt), it may have loaded a part: then the engine raises an error until another load succeeds.
    """
    engine = engine_of(optimizer)
    comm, make = engine.comm, engine.commits.run

    def begin() -> str:
        engine.check_trains()
        check_named(state)
        return path_of(path)

    name = guarded(comm, _WHAT, begin, make)
    # Where no interrupt leaves a file open; and a change goes on when one ends the wait for it.
    with comm.slowly():
        loading, given = make(
            lambda: _prepare(engine, name, state, strict, progress or (lambda done, total: None))
        )
        with naming_another(loading.found):
            make(loading.run)

    def give() -> None:
        for name, thing in (state or {}).items():
            if name in given:
                if callable(getattr(thing, "load_state_dict", None)):
                    thing.load_state_dict(given[name])
                else:
                    assert state is not None
                    state[name] = given[name]

    guarded(comm, _GIVEN, give, make)
    make(lambda: agree(comm, _GIVEN))
    loading.go_on()
    return given


def _prepare(
    engine: Engine, path: str, state: Mapping[str, Any] | None, strict: bool, progress: Progress
) -> tuple[_Loading, dict[str, Any]]:
    """Return a load of what is at `path`, that fits, with its files open; and what was saved as `state`."""
    comm = engine.comm
    agree_on_path(comm, _WHAT, os.path.abspath(path))
    for left in reversed(range(_ATTEMPTS)):
        newest, loading = _newest(comm, path), None
        try:
            loading = _Loading(engine, _found_there(comm, newest), strict, progress)
            with naming_another(loading.found):
                given = guarded(comm, "what is loaded", partial(loading.check, state))
                agree(comm, "what is loaded")
            return loading, given
        except BaseException as error:
            if loading is not None:
                loading.close()
            # Perhaps a save of another process has just replaced or removed it.
            if not left or not isinstance(error, StorageError) or _newest(comm, path)[:2] == newest[:2]:
                raise
    raise AssertionError


def _newest(comm: Comm, path: str) -> tuple[str, int, Found | None]:
    """Return path and counter of the checkpoint at `path`, the one that the first rank finds; there also what
    it found. Collective.

    Raises:
        DirectoryError, CorruptionError: see `find`; on all ranks.
    """
    found: list[Found] = []

    def look() -> tuple[str, int]:
        found.append(find(os.path.abspath(path)))
        return found[0].path, found[0].counter

    at, counter = together(comm, "which checkpoint is loaded", look if comm.rank == 0 else lambda: None)[0]
    return at, counter, found[0] if found else None


def _found_there(comm: Comm, newest: tuple[str, int, Found | None]) -> Found:
    """Return the checkpoint that `_newest` has found, as this rank sees it. Collective.

    Raises:
        DirectoryError, CorruptionError: one of the ranks sees none, or another one there; on all ranks.
    """
    at, counter, found = newest

    def look() -> None:
        nonlocal found
        if found is not None:
            return
        check_shared(os.path.join(at, INDEX), comm.rank)
        found = find(at)
        if found.counter != counter:
            raise DirectoryError(
                f"{at} is not the same checkpoint for all ranks",
                path=at,
                expected=f"the checkpoint that rank 0 has found, with the counter {counter}",
                found=f"a checkpoint with the counter {found.counter}, on rank {comm.rank}",
                cure="name a directory that all nodes share",
            )

    together(comm, "where that is", look)
    assert found is not None
    return found


def _listed(names: Sequence[str], separator: str) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more


class _Loading:
    """One load."""

    def __init__(self, engine: Engine, found: Found, strict: bool, progress: Progress) -> None:
        self._engine = engine
        self.found = found
        self._strict = strict
        self._progress = progress
        self._done = self._total = 0
        self._names: dict[ShardedParam, str] = {}  # in the checkpoint
        self._stay: dict[ShardedParam, tuple[str, list[int]]] = {}  # what was left out, and checksums of it
        self._buffers: dict[str, torch.Tensor] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._random: list[Any] = []  # of each rank
        self._options: list[dict[str, Any]] = []
        self._same_kind = False  # of optimizer; otherwise the moments begin anew
        self._two: set[int] = set()  # units that get two versions
        # Open from the comparison to the end, so that what was compared is what is loaded.
        self._ring: Ring
        self._files: dict[str, TensorFile] = {}
        self._scales: dict[str, str] = {}  # of moments, the name of their scales, if they are in 8 bits
        self._decoded: dict[str, tuple[str, torch.Tensor]] = {}  # the name of a parameter, and its scales
        self._again: TensorFile | None = None
        self._stack = contextlib.ExitStack()

    def _read_all(self, stem: str) -> dict[str, torch.Tensor]:
        path = self.found.file(stem)
        return {} if path is None else read_all(path, self._ring, self.found.content["crcs"][stem])

    def _read_some(self, stem: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if names and (file := self._open(stem)) is not None:
            with file:
                for name in names:
                    found[name] = torch.empty(file.entries[name].shape, dtype=file.entries[name].dtype)
                    file.read(name, 0, found[name])
        return found

    def _open(self, stem: str) -> TensorFile | None:
        return open_saved(self.found, stem, self._ring)

    # -- before anything is changed ---------------------------------------------------------

    def check(self, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Compare everything with the model; return what was saved as `state`."""
        try:
            with contextlib.ExitStack() as stack:
                self._ring = stack.enter_context(reading_ring())
                given = self._compare(state)
                moments = self._engine.states.moments if self._same_kind else ()
                self._scales = {kind: scales_of(kind) for kind in moments}
                for stem in ("parameters", *moments, *self._scales.values(), "front"):
                    if (file := self._open(stem)) is not None:
                        self._files[stem] = stack.enter_context(file)
                self._again = self._open("parameters")  # a tensor's bytes come in order, and once
                if self._again is not None:
                    stack.enter_context(self._again)
                self._stack = stack.pop_all()
            return given
        except (KeyError, TypeError, AttributeError) as error:
            raise wrong_index(self.found.path, error) from error

    def _compare(self, state: Mapping[str, Any] | None) -> dict[str, Any]:
        index, engine = self.found.content, self._engine
        self._values = self._read_all("values")
        given: dict[str, Any] = decode(index["state"], self._values, self.found.path)
        self._random = [
            decode(state, self._values, self.found.path)
            for state in (index["random"], *index.get("random_of_other_ranks", ()))
        ]
        counts_of({"infinity": index["counts"]})
        saved = {name: name for name in index["parameters"]}
        saved |= {tied: name for name, p in index["parameters"].items() for tied in p["tied"]}
        model = engine.model()
        assert model is not None
        for name, param in model.named_parameters(remove_duplicate=False):
            sharded = engine.params.get(param)
            if sharded is not None and name in saved:
                self._names.setdefault(sharded, saved[name])
        missing = []
        for s, name in names_of(engine).items():
            if s in self._names:
                continue
            there = index.get("left_out", {}).get(name)
            if there is None or there["shape"] != [*s.spec.shape]:
                missing.append(name)
            elif DTYPES[there["dtype"]] is s.spec.dtype and not s.spec.trainable:
                self._stay[s] = name, there["crc32c"]
        unexpected = sorted(index["parameters"].keys() - set(self._names.values()))
        self._buffers = self._read_all("buffers")
        others = decode(index.get("buffers_of_other_ranks", []), self._values, self.found.path)
        if engine.comm.rank and engine.comm.world == len(others) + 1:
            self._buffers |= others[engine.comm.rank - 1]
        here = buffers_of(engine)
        # Some programs do not tell buffers from parameters: [Note: DCP's files].
        kept = [n for n in here if n in index["parameters"] and n not in self._buffers]
        self._buffers |= self._read_some("parameters", kept)
        unexpected = [name for name in unexpected if name not in kept]
        missing += [n for n in here if n not in self._buffers]
        unexpected += [n for n in self._buffers if n not in here]
        lacking = [
            f"state[{n!r}]" for n, v in (state or {}).items() if n not in given and not is_tokenizer(v)
        ]
        self._refuse("does not have all of the model", "it lacks", missing + lacking if self._strict else [])
        self._refuse("has more than the model", "it alone has", unexpected if self._strict else [])
        self._check_shapes(here)
        self._check_groups()
        return given

    def _refuse(self, what: str, found: str, names: list[str]) -> None:
        if names:
            raise StateDictError(
                f"the checkpoint {self.found.path} {what}",
                expected="the parameters, buffers and state of the run that loads it; nothing was changed",
                found=f"{found} {_listed(names, ', ')}",
                cure="load it into the model that was saved; or load with strict=False, which loads what "
                "both have",
            )

    def _check_shapes(self, here: Mapping[str, torch.Tensor]) -> None:
        wrong = []
        file = self._open("parameters")
        if file is not None:
            elements = elements_here(self._engine)
            with file:
                for sharded, name in self._names.items():
                    shape = file.entries[name].shape
                    self._total += elements[sharded] * file.entries[name].dtype.itemsize
                    if shape != sharded.spec.shape:
                        wrong.append(f"{name} {[*shape]}, of the model {[*sharded.spec.shape]}")
        for name, buffer in here.items():
            if name in self._buffers and self._buffers[name].shape != buffer.shape:
                wrong.append(f"{name} {[*self._buffers[name].shape]}, of the model {[*buffer.shape]}")
        if wrong:
            raise StateDictError(
                f"the checkpoint {self.found.path} has other shapes than the model",
                expected="the shapes of the model; nothing was changed",
                found=_listed(wrong, "; "),
                cure="build the model as it was when it was saved",
            )

    def _check_groups(self) -> None:
        groups = self._engine.optimizer.param_groups
        saved = self.found.content["groups"]
        rule, kind = self._engine.optimizer.rule, self.found.content.get("optimizer", "Adam")
        if kind != rule.kind:
            if not self._strict:
                return  # the moments begin anew, and the groups of the optimizer keep their options
            raise StateDictError(
                f"the checkpoint {self.found.path} is of another optimizer",
                expected=f"a checkpoint of a run with {rule.kind}; nothing was changed",
                found=f"one of a run with {kind}",
                cure=f"build the {kind} that was saved; or load with strict=False, so that the moments begin "
                "anew",
            )
        self._same_kind = True
        params = self._engine.params
        # A frozen parameter has no options: it does not matter in which group it is.
        trained = [
            [params[p] for p in g["params"] if p in params and params[p].spec.trainable] for g in groups
        ]
        here = [{self._names.get(sharded) for sharded in group} - {None} for group in trained]
        both = set().union(*here) if here else set()
        there = [set(g["params"]) & both for g in saved]
        if here != there:
            if not self._strict:
                return  # the groups of the optimizer keep their options
            places = [{n: i for i, g in enumerate(groups_) for n in g} for groups_ in (here, there)]
            name = next((n for n in places[0] if places[0][n] != places[1].get(n)), None)
            raise StateDictError(
                f"the checkpoint {self.found.path} has other param groups than the optimizer",
                expected=f"{len(here)} groups" + (f", {name!r} in group {places[0][name]}" if name else ""),
                found=f"{len(there)} groups" + (f", it in group {places[1].get(name)}" if name else ""),
                cure="build the optimizer with the groups that were saved; or load with strict=False, so "
                "that the groups keep their current options. Nothing was changed",
            )
        self._options = [decode(g["options"], self._values, self.found.path) for g in saved]
        for options, group in zip(self._options, groups, strict=True):
            rule.check_saved(options, f"the checkpoint {self.found.path}", group)

    # -- the change -------------------------------------------------------------------------

    def close(self) -> None:
        """Close its files."""
        self._stack.close()

    def run(self) -> None:
        """Change everything."""
        engine, index, comm = self._engine, self.found.content, self._engine.comm
        with self._stack:
            with engine.phases.beginning_load():
                together(comm, "the begin of a load", self._begin)
                if self._stay:
                    names = {s: name for s, (name, _) in self._stay.items()}
                    make = partial(pieces_of, engine, names)
                    self._check_base(together(comm, "what the checkpoint leaves out", make))
            engine.phases.lose(f"a load of {self.found.path} that raised, or was interrupted")
            pieces = together(comm, "a load of what each rank has", self._fill_all)
            for stem, file in self._files.items():
                file.compare([of_rank[stem] for of_rank in pieces])
        for sharded, name in self._names.items():
            saved = index["parameters"][name]
            # What was frozen there, or is here, or had other moments: they begin anew, and so do its steps.
            has_moments = sharded.spec.trainable and saved["trainable"] and self._same_kind
            files = [self._files.get(kind) for kind in engine.states.kinds_of(sharded)]
            has_moments = has_moments and all(file is not None and name in file.entries for file in files)
            sharded.step = int(saved["step"]) if has_moments else 0
        for group, options in zip(engine.optimizer.param_groups, self._options, strict=False):
            group.update(options)
        engine.optimizer.set_counts(index["counts"])
        changed = list(self._names)
        bump(changed)
        engine.edits.given.forget(changed)
        engine.residency.refresh()
        for name, buffer in buffers_of(engine).items():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])

    def _check_base(self, of_ranks: Sequence[Mapping[str, Any]]) -> None:
        sizes = {name: s.spec.numel * s.spec.dtype.itemsize for s, (name, _) in self._stay.items()}
        found = sums_of(of_ranks, sizes)
        if wrong := [name for name, sums in self._stay.values() if found[name] != sums]:
            raise StateDictError(
                f"the checkpoint {self.found.path} was saved over other frozen parameters",
                expected="the frozen parameters of the run that saved, which the checkpoint leaves out; "
                "nothing was changed",
                found=f"other values of {_listed(wrong, ', ')}",
                cure="build the model from the same base, and its adapters in the same way",
            )

    def _begin(self) -> None:
        """Complete all work that would change the loaded values, or use the old ones."""
        self._engine.optimizer.publish()
        self._engine.edits.adopt_all()
        self._engine.residency.reshard_all({s.unit for s in self._names})

    def _fill_all(self) -> dict[str, Any]:
        """Fill what this rank has; return of which bytes of each file it cannot tell whether they are those
        that were saved."""
        self._two = self._with_two(self._files.get("front"))
        self._fill(self._files)
        if self._two and self._again is not None:
            self._fill_backs(self._again)
        return {stem: file.pieces() for stem, file in self._files.items()}

    def _with_two(self, front: TensorFile | None) -> set[int]:
        """Return the units that get two versions: those of which one was saved, if all of them is loaded."""
        if front is None or not self._engine.store.versions.has_two("copy"):
            return set()
        units = {self._engine.units[s.unit] for s, name in self._names.items() if name in front.entries}
        return {u.index for u in units if all(s in self._names for s in u.params if s.spec.trainable)}

    def _fill(self, files: Mapping[str, TensorFile]) -> None:
        names, states, front = self._names, self._engine.states, files.get("front")
        segments, kinds = states.segments, states.kinds
        under_way = UnderWay()
        for sharded, segment, pieces in segments(
            kinds, names, written=kinds, fresh=True, under_way=under_way
        ):
            name = names[sharded]
            source, copy = files["parameters"], pieces["copy"]
            older = front is not None and sharded.unit in self._two and name in front.entries
            if front is not None and older:
                front.read(name, segment.offset, copy, under_way)
            if "master" in pieces:
                master = pieces["master"]
                follow = (lambda: None) if older else partial(copy.copy_, master)
                source.read(name, segment.offset, master, under_way, follow)
            elif not older:
                source.read(name, segment.offset, copy, under_way)
            for kind in states.kinds_of(sharded):
                if kind not in files or name not in files[kind].entries:
                    pieces[kind].zero_()
                    continue
                scales = self._scales[kind]
                coded = scales in files and name in files[scales].entries
                if coded and scales in pieces:
                    files[kind].read(name, segment.offset, pieces[kind], under_way)
                    files[scales].read(name, segment.offset // MOMENT_BLOCK, pieces[scales], under_way)
                elif coded or scales in pieces:
                    self._convert(kind, name, segment.offset, pieces)
                else:
                    files[kind].read(name, segment.offset, pieces[kind], under_way)
            self._engine.comm.check()
            self._done += copy.numel() * source.entries[name].dtype.itemsize
            self._progress(self._done, self._total)

    def _convert(self, kind: str, name: str, first: int, pieces: Mapping[str, torch.Tensor]) -> None:
        """Fill a moment of a segment, which is in 8 bits either there or here."""
        file, scales = self._files[kind], self._scales[kind]
        for begin in range(0, pieces[kind].numel(), _AT_ONCE):
            part, at = slice(begin, begin + _AT_ONCE), first + begin
            here = {kind: pieces[kind][part]}
            if scales in pieces:
                here[scales] = pieces[scales][begin // MOMENT_BLOCK : (begin + _AT_ONCE) // MOMENT_BLOCK]
                values = torch.empty(here[kind].shape)
                file.read(name, at, values)
                write_moment(kind, here, values)
            else:
                codes = torch.empty(here[kind].shape, dtype=torch.uint8)
                file.read(name, at, codes)
                there = {kind: codes, scales: self._all_scales(scales, name)[at // MOMENT_BLOCK :]}
                read_moment(kind, there, here[kind], at % MOMENT_BLOCK)

    def _all_scales(self, stem: str, name: str) -> torch.Tensor:
        """Return all scales of a parameter, read once: its segments come one after the other, and in a run
        that keeps moments in another form two of them may share a block."""
        if stem not in self._decoded or self._decoded[stem][0] != name:
            scales = torch.empty(self._files[stem].entries[name].shape)
            self._files[stem].read(name, 0, scales)
            self._decoded[stem] = name, scales
        return self._decoded[stem][1]

    def _fill_backs(self, source: TensorFile) -> None:
        """Write the newest values of units that have two versions: [Note: two versions]."""
        params = [s for s in self._names if s.unit in self._two and s.spec.trainable]
        under_way = UnderWay()
        for sharded, segment, pieces in self._engine.states.segments(
            ("copy",), params, written=("copy",), fresh=True, version=Version.BACK, under_way=under_way
        ):
            source.read(self._names[sharded], segment.offset, pieces["copy"], under_way)

    def go_on(self) -> None:
        """Let the run go on: all of it is what was saved."""
        comm = self._engine.comm
        if self._random[0] is not None:  # imported from a program that saves none
            set_random_states(self._random, comm.rank, comm.world, self._engine.device.torch_device)
        self._engine.phases.mark_consistent()
        self._engine.optimizer.zero_grad()
