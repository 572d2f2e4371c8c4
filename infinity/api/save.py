"""`save`: everything that a training run needs to go on, in a directory that any run can read."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from infinity.core.errors import ConfigError
from infinity.hardware.aio import Ring
from infinity.params.param import ShardedParam
from infinity.planning.parts import MOMENTS
from infinity.storage.checkpoints import Save
from infinity.storage.store import Version
from infinity.storage.tensor_file import TensorFile, write_all
from infinity.storage.tensor_header import Spec, nbytes_of
from infinity.storage.under_way import UnderWay
from infinity.version import __version__

from .checkpoint import (
    Progress,
    buffers_of,
    check_free,
    check_shared,
    elements_here,
    interruptible,
    names_of,
    path_of,
    settle,
    texts_of,
    writing_ring,
)
from .engine import Engine, engine_of
from .random_state import of_json, random_state, to_json
from .together import agree, guarded, together
from .user_state import check_named, encode, files_of, is_tokenizer

_WHAT: Final = "a save of step {}"  # what ranks do together
_NO_ROOM: Final = (
    "save elsewhere, or keep fewer checkpoints (keep_last; an older one goes only when the new one is whole)"
)


def save(
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    progress: Progress | None = None,
) -> str:
    """Save a training run as the checkpoint `path`/step-<n>, n being the steps that were made.

    Parameters, moments, buffers, param groups, counts and loss scale, the state of the generators of random
    numbers (torch's, Python's, numpy's), the config of a model of transformers, and with delayed updates both
    versions. Gradients are not saved:
    call it after `step`. It goes chunk by chunk through one lease of host memory, and changes nothing of the
    run. An interrupt ends it.

    Args:
        optimizer: as `wrap` returned it.
        path: a directory of checkpoints, made if there is none.
        state: more to be saved, by name: JSON values, bytes, tensors, numpy arrays, tuples, sets, dicts with
            keys of these, and objects whose `state_dict` consists of these (schedulers, samplers). Mappings
            come back as dicts (counters stay), deques as lists, bytearrays as bytes, parameters as tensors,
            numpy's scalars and members of enums of ints or strings as the plain value. A tokenizer of
            transformers is saved as the files that it is read from: for `infinity.export` and `infinity
            generate`; `load` returns none.
        keep_last: remove all of its checkpoints then but the so many that were completed last, this one
            among them, whatever their steps. None: remove none.
        progress: called with the bytes written, and all bytes, on another thread. It may not use the model or
            the optimizer.

    Returns:
        The checkpoint's directory. It is whole from one moment on, at which an older one of the same step is
        replaced; whatever happens before leaves that as it was.

    Raises:
        StateDictError: `state` is no mapping, or something in it cannot be saved. Nothing was written.
        ParameterError: parameters are being edited, in a `gathered(write=True)` block.
        DirectoryError: the directory is itself a checkpoint, cannot be written, has no room for the
            checkpoint, or another save into it is under way.
        TransferError: a drive reports an error.
    """
    engine = engine_of(optimizer)
    comm, what = engine.comm, _WHAT.format(engine.optimizer.steps)
    given = guarded(comm, what, lambda: _given(engine, path, state, keep_last), engine.shelter.run)
    return interruptible(
        engine.shelter, lambda told: _Saving(engine, what, given, told).run(keep_last), progress, comm
    )


class _Given(NamedTuple):
    """What the user saves beside the model; `own`: of the generators of this rank."""

    root: str
    values: Any
    own: Any
    tensors: dict[str, torch.Tensor]
    texts: dict[str, str]


def _given(
    engine: Engine, path: str | os.PathLike[str], state: Mapping[str, Any] | None, keep_last: int | None
) -> _Given:
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ConfigError(
            f"keep_last={keep_last!r} makes no sense", expected="None, or 1 and more", cure="keep_last=2"
        )
    engine.phases.check()
    check_named(state)
    root = os.path.abspath(path_of(path))
    tensors: dict[str, torch.Tensor] = {}
    texts: dict[str, str] = {}
    for thing in filter(is_tokenizer, (state or {}).values()):
        texts |= files_of(thing)
    values = encode({k: v for k, v in (state or {}).items() if not is_tokenizer(v)}, tensors)
    own = random_state(engine.device.torch_device)
    return _Given(root, values, own, tensors, texts)


class _Saving:
    """One save. Each rank writes what it has of every tensor; the first one all else, and decides."""

    def __init__(self, engine: Engine, what: str, given: _Given, progress: Progress) -> None:
        self._engine = engine
        self._comm = engine.comm
        self._what = what
        self._given = given
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._target: Save
        self._ring: Ring
        self._files: dict[str, TensorFile] = {}
        self._crcs: dict[str, Any] = {}
        self._done = self._total = 0  # bytes of this rank

    def run(self, keep_last: int | None) -> str:
        """Save; return the checkpoint's directory."""
        comm, what = self._comm, self._what
        states = agree(comm, what, to_json(self._given.own) if comm.rank else None)
        with self._stack:
            paths = together(comm, f"{what}: its files", lambda: self._begin(states))[0]
            pieces = together(comm, f"{what}: its parts", lambda: self._fill(paths))
            path: str = together(comm, f"{what}: its index", lambda: self._end(pieces, keep_last))[0]
        return path

    def _begin(self, states: list[Any]) -> dict[str, str] | None:
        """Take over edits; on the first rank, make the files, and write what is not cut; return their
        paths."""
        engine, given = self._engine, self._given
        settle(engine)
        self._names = names_of(engine)
        self._newer = _with_front(engine)
        self._specs = self._specs_of()
        here = elements_here(engine)
        sizes = {s: 4 * (1 + len(MOMENTS)) if s.spec.trainable else s.spec.dtype.itemsize for s in here}
        self._total = sum(here[s] * sizes[s] for s in here)
        self._total += sum(here[s] * s.spec.dtype.itemsize for s in self._newer)
        if self._comm.rank:
            return None
        self._groups_here = self._groups(given.tensors)
        self._random = [
            encode(state, given.tensors, "random" if rank == 0 else f"random of rank {rank}")
            for rank, state in enumerate([given.own, *map(of_json, states[1:])])
        ]
        small = {"buffers": buffers_of(engine), "values": given.tensors}
        small_nbytes = sum(t.nbytes for kind in small.values() for t in kind.values())
        self._total += small_nbytes
        target = self._target = self._stack.enter_context(Save(given.root, engine.optimizer.steps))
        ring = self._ring = self._stack.enter_context(writing_ring(given.root))
        whole = sum(nbytes_of(*spec) for kind in self._specs.values() for spec in kind.values())
        check_free(given.root, whole + small_nbytes, "a checkpoint", _NO_ROOM)
        for stem, kind in small.items():
            if kind:
                self._crcs[stem] = write_all(target.file(stem), kind, ring)
                self._tell(sum(t.nbytes for t in kind.values()))
        paths = {stem: target.file(stem) for stem in self._specs}
        for stem, path in paths.items():
            file = TensorFile.create(path, self._specs[stem], ring)
            self._files[stem] = self._stack.enter_context(file)
            if self._comm.world > 1:
                file.sync()
        return paths

    def _fill(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """Write what this rank has of every tensor; return the checksums of that, by file."""
        if self._comm.rank:
            for path in paths.values():
                check_shared(path, self._comm.rank)
            some = next(iter(paths.values()))
            ring = self._stack.enter_context(writing_ring(os.path.dirname(some)))
            for stem, path in paths.items():
                file = TensorFile.join(path, self._specs[stem], ring)
                self._files[stem] = self._stack.enter_context(file)
        names, files, states = self._names, self._files, self._engine.states
        trainable = [s for s in names if s.spec.trainable]
        frozen = [s for s in names if not s.spec.trainable]
        under_way = UnderWay()
        for sharded, segment, pieces in states.segments(("master", *MOMENTS), trainable, under_way=under_way):
            for kind, piece in pieces.items():
                file = files["parameters" if kind == "master" else kind]
                file.write(names[sharded], segment.offset, piece, under_way)
            self._tell(sum(p.nbytes for p in pieces.values()))
        for params, stem, version in (
            (frozen, "parameters", Version.NEWEST),
            (self._newer, "front", Version.FRONT),
        ):
            for sharded, segment, pieces in states.segments(
                ("copy",), params, version=version, under_way=under_way
            ):
                files[stem].write(names[sharded], segment.offset, pieces["copy"], under_way)
                self._tell(pieces["copy"].nbytes)
        for file in files.values():
            file.sync()
        self._tell(0)
        return {stem: file.pieces() for stem, file in files.items()}

    def _end(self, pieces: list[dict[str, Any]], keep_last: int | None) -> str | None:
        """On the first rank: have the checkpoint whole, and return its directory."""
        if self._comm.rank:
            return None
        target, given = self._target, self._given
        for stem, file in self._files.items():
            self._crcs[stem] = file.checksums([of_rank[stem] for of_rank in pieces])
        target.commit(
            {
                "infinity": __version__,
                "crcs": self._crcs,
                "parameters": self._described(),
                "groups": self._groups_here,
                "counts": self._engine.optimizer.counts(),
                "texts": {**texts_of(self._engine.model()), **given.texts},
                "state": given.values,
                "random": self._random[0],
                "random_of_other_ranks": self._random[1:],
            }
        )
        for error in target.prune(keep_last) if keep_last is not None else ():
            warnings.warn(
                f"{target.path} is saved, but an older checkpoint is not removed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return target.path

    def _specs_of(self) -> dict[str, dict[str, Spec]]:
        """Return what is in each file that is written chunk by chunk."""
        names = self._names
        trainable = [s for s in names if s.spec.trainable]
        specs: dict[str, dict[str, Spec]] = {
            "parameters": {
                n: (torch.float32 if s.spec.trainable else s.spec.dtype, s.spec.shape)
                for s, n in names.items()
            },
            **{kind: {names[s]: (torch.float32, s.spec.shape) for s in trainable} for kind in MOMENTS},
            "front": {names[s]: (s.spec.dtype, s.spec.shape) for s in self._newer},
        }
        return {stem: kind for stem, kind in specs.items() if kind}

    def _tell(self, nbytes: int) -> None:
        self._comm.check()
        self._done += nbytes
        self._progress(self._done, self._total)

    def _described(self) -> dict[str, Any]:
        names = self._names
        described: dict[str, dict[str, Any]] = {
            n: {"step": s.step, "trainable": s.spec.trainable, "tied": []} for s, n in names.items()
        }
        model = self._engine.model()
        for name, param in model.named_parameters(remove_duplicate=False) if model is not None else ():
            first = names.get(self._engine.params[param]) if param in self._engine.params else None
            if first is not None and first != name:
                described[first]["tied"].append(name)
        return described

    def _groups(self, tensors: dict[str, torch.Tensor]) -> list[Any]:
        groups: list[Any] = []
        for index, group in enumerate(self._engine.optimizer.param_groups):
            options = {k: v for k, v in group.items() if k != "params"}
            params = [self._engine.params[p] for p in group["params"] if p in self._engine.params]
            groups.append(
                {
                    "options": encode(options, tensors, f"param group {index}"),
                    "params": [self._names[s] for s in params],
                }
            )
        return groups


def _with_front(engine: Engine) -> list[ShardedParam]:
    """Return the parameters whose front is not their newest version."""
    versions = engine.store.versions
    found: list[ShardedParam] = []
    for unit in engine.units if versions.has_two("copy") else ():
        newer = {
            s.param
            for c in unit.layout.trainable_chunks
            if versions.is_newer(c.id, "copy")
            for s in c.segments
        }
        found += [unit.params[i] for i in sorted(newer)]
    return found
