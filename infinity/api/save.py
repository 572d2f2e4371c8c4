"""`save`: saves everything that a training run needs to resume, in a directory that any run can load."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from infinity.core.errors import ConfigError
from infinity.optim.whole import crc_of
from infinity.storage.checkpoints import Save, check_shared
from infinity.storage.checksums import sums_of
from infinity.storage.store import Version
from infinity.storage.tensor_file import TensorFile, write_all
from infinity.storage.tensor_header import NAMES, Spec, nbytes_of
from infinity.storage.under_way import UnderWay

from .checkpoint import (
    Progress,
    buffers_of,
    check_free,
    content_of,
    elements_here,
    interruptible,
    names_of,
    path_of,
    pieces_of,
    settle,
    texts_of,
    writing_ring,
)
from .engine import Engine, engine_of
from .random_state import of_json, random_state, to_json
from .together import agree, agree_on_path, guarded, together
from .user_state import check_named, encode, files_of, is_tokenizer

_AT_ONCE: Final = 16 << 20  # bytes that the first rank sends at once
_WHAT: Final = "a save of step {}"  # what ranks do together
_NO_ROOM: Final = (
    "save elsewhere, or keep fewer checkpoints (keep_last; an older one goes only when the new one is whole)"
)


def save(
    optimizer: torch.optim.Optimizer | torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    frozen: bool = True,
    progress: Progress | None = None,
) -> str:
    """Save a training run as the checkpoint `path`/step-<n>, where n is the number of steps.

    The checkpoint holds the parameters, moments, buffers, param groups, step counts and the loss scale, the
    states of the random number generators (torch's, Python's, numpy's), and the config of a transformers
    model. With delayed updates it holds both versions of the parameters. It does not hold gradients: call
    `save` after `step`. `save` works chunk by chunk through one buffer in pinned host memory, and does not
    change the run. An interrupt ends it.

    With several ranks `save` is a collective, and each rank writes its part of every tensor into common
    files. All ranks pass the same path. The checkpoint holds `state`, groups and `keep_last` of the first
    rank. It holds buffers (running statistics follow each rank's data) and random numbers of every rank. If
    other values differ between ranks, such as positions in their data, pass a list with the values of all
    ranks.

    Args:
        optimizer: the optimizer or the model, as `wrap` returned them.
        path: a directory of checkpoints; `save` creates it if it does not exist. All nodes share it.
        state: further values to save, by name: JSON values, bytes, tensors, numpy arrays, tuples, sets, dicts
            with keys of these, and objects whose `state_dict` consists of these (schedulers, samplers).
            Mappings come back as dicts (counters stay counters), deques as lists, bytearrays as bytes,
            parameters as tensors, numpy scalars and members of enums of ints or strings as the plain value. A
            tokenizer of transformers is saved as its files, for `infinity.export`;
            `load` does not return it.
        keep_last: the number of checkpoints that stay in `path`: those that were completed last, including
            this one, whatever their steps. `save` removes the others, but not the newest one whose trained
            parameters are all finite. None: remove none.
        frozen: whether the checkpoint holds the frozen parameters. Without them, a checkpoint of adapters is
            small. `load` then leaves these parameters as the program has built them, and raises an error if
            they are others: in the same compute dtype it compares checksums, in another one names and shapes.
            `save` and `load` read them for that. `export` and `inference` need a checkpoint that holds them.
        progress: a function that `save` calls, on another thread, with the bytes that this rank has written
            and all bytes that it will write. It may not use the model or the optimizer.

    Returns:
        The checkpoint's directory. The checkpoint becomes complete atomically, and replaces an older one of
        the same step then. If anything ends the save earlier, the older one stays as it was.

    Raises:
        StateDictError: `state` is not a mapping, or contains a value that `save` does not support. Nothing
            was written.
        ConfigError: the ranks passed different paths.
        ParameterError: a `gathered(write=True)` block is editing parameters.
        DirectoryError: the directory is itself a checkpoint, is not writable, has no room for the checkpoint,
            another save is writing into it, or the nodes do not share it.
        TransferError: a drive reports an error.
        RankError: a rank is gone, was interrupted, or makes another call.

    With several ranks, an error on one rank raises an error of the same class on all. The run may go on,
    except after a `RankError`.
    """
    engine = engine_of(optimizer)
    comm, what = engine.comm, _WHAT.format(engine.optimizer.steps)
    given = guarded(comm, what, lambda: _given(engine, path, state, keep_last), engine.commits.run)
    return interruptible(
        engine.commits,
        lambda told: _Saving(engine, what, given, frozen, told).run(keep_last),
        progress,
        comm,
    )


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite, in one pass that takes no memory."""
    return not values.numel() or bool(torch.stack(torch.aminmax(values)).isfinite().all())


class _Beside(NamedTuple):
    """What the user saves beside the model; `own`: of the generators of this rank."""

    root: str
    values: Any
    own: Any
    tensors: dict[str, torch.Tensor]
    texts: dict[str, str]


def _given(
    engine: Engine, path: str | os.PathLike[str], state: Mapping[str, Any] | None, keep_last: int | None
) -> _Beside:
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ConfigError(
            f"keep_last={keep_last!r} is not valid", expected="None, or an integer ≥ 1", cure="keep_last=2"
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
    return _Beside(root, values, own, tensors, texts)


class _Saving:
    """One save. Each rank writes what it has of every tensor, and the first one all else, and decides."""

    def __init__(self, engine: Engine, what: str, given: _Beside, frozen: bool, progress: Progress) -> None:
        self._engine = engine
        self._comm = engine.comm
        self._what = what
        self._given = given
        self._frozen = frozen
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._target: Save | None = None  # of the first rank
        self._files: dict[str, TensorFile] = {}
        self._crcs: dict[str, Any] = {}
        self._small: dict[str, dict[str, torch.Tensor]] = {}  # what is not cut
        self._done = self._total = 0  # bytes of this rank

    def run(self, keep_last: int | None) -> str:
        """Save; return the checkpoint's directory."""
        comm, what = self._comm, self._what
        agree_on_path(comm, what, self._given.root)
        states = agree(comm, what, to_json(self._given.own) if comm.rank else None)
        others = self._buffers_of_others()
        with self._stack:
            together(comm, f"{what}: what it has", lambda: self._begin(states, others))
            path, mark = together(comm, f"{what}: its directory", self._take)[0]
            seen = partial(check_shared, os.path.join(path, mark), comm.rank) if comm.rank else bool
            together(comm, f"{what}: who sees it", seen)
            names = together(comm, f"{what}: its files", self._make)[0]
            pieces = together(comm, f"{what}: its parts", lambda: self._fill(path, names))
            together(comm, f"{what}: its index", lambda: self._end(pieces, names, keep_last))
        return str(path)

    def _buffers_of_others(self) -> list[dict[str, torch.Tensor]]:
        """Return, on the first rank, which buffers of each other rank are not the same as its own: running
        statistics are of each rank's data."""
        comm, what = self._comm, f"{self._what}: buffers"
        if comm.world == 1:
            return []
        here = buffers_of(self._engine)
        specs = {
            name: [crc_of(t), str(t.dtype).removeprefix("torch."), [*t.shape]] for name, t in here.items()
        }
        told = agree(comm, what, specs)
        others: list[dict[str, torch.Tensor]] = []
        for rank, of_rank in enumerate(told[1:], 1):
            others.append({})
            for name, spec in of_rank.items():
                if told[0].get(name) == spec:
                    continue
                made = (
                    here[name] if comm.rank == rank else torch.empty(spec[2], dtype=getattr(torch, spec[1]))
                )
                flat = made.detach().cpu().contiguous().view(-1).view(torch.uint8)
                for piece in flat.split(_AT_ONCE) if flat.numel() else ():
                    came = comm.exchange(what, piece.numpy().tobytes() if comm.rank == rank else b"")[rank]
                    if comm.rank == 0:
                        piece.copy_(torch.frombuffer(bytearray(came), dtype=torch.uint8))
                if comm.rank == 0:
                    others[-1][name] = made
        return others

    def _begin(self, states: list[Any], others: list[dict[str, torch.Tensor]]) -> None:
        """Take over edits; find out what is to be written."""
        engine, given = self._engine, self._given
        settle(engine)
        names = names_of(engine)
        self._left_out = {s: n for s, n in names.items() if not (self._frozen or s.spec.trainable)}
        self._names = {s: n for s, n in names.items() if s not in self._left_out}
        self._newer = engine.states.with_front()
        self._specs = self._specs_of()
        here = {s: n for s, n in elements_here(engine, own=True).items() if s in self._names}
        of = engine.states.moments_of
        for sharded, numel in here.items():
            if sharded.spec.trainable:
                self._total += 4 * numel + sum(m.nbytes(numel) for m in of(sharded))
            else:
                self._total += numel * sharded.spec.dtype.itemsize
        self._total += sum(here[s] * s.spec.dtype.itemsize for s in self._newer)
        if self._comm.rank == 0:
            self._groups_here = self._groups(given.tensors)
            self._random = [
                encode(state, given.tensors, "random" if rank == 0 else f"random of rank {rank}")
                for rank, state in enumerate([given.own, *map(of_json, states[1:])])
            ]
            self._others = [
                encode(of_rank, given.tensors, f"buffers of rank {rank}")
                for rank, of_rank in enumerate(others, 1)
            ]
            self._small = {"buffers": buffers_of(engine), "values": given.tensors}

    def _take(self) -> tuple[str, str] | None:
        """On the first rank: take the root; return the directory of the checkpoint, and a name in it."""
        if self._comm.rank:
            return None
        self._target = self._stack.enter_context(Save(self._given.root, self._engine.optimizer.steps))
        return self._target.path, self._target.mark

    def _make(self) -> dict[str, str] | None:
        """On the first rank: make the files, and write what is not cut; return their names."""
        target = self._target
        if target is None:
            return None
        small_nbytes = sum(t.nbytes for kind in self._small.values() for t in kind.values())
        self._total += small_nbytes
        ring = self._stack.enter_context(self._engine.store.beside(writing_ring(target.root)))
        nbytes = sum(nbytes_of(*spec) for kind in self._specs.values() for spec in kind.values())
        check_free(target.root, nbytes + small_nbytes, "a checkpoint", _NO_ROOM)
        for stem, kind in self._small.items():
            if kind:
                self._crcs[stem] = write_all(target.file(stem), kind, ring)
                self._tell(sum(t.nbytes for t in kind.values()))
        for stem in self._specs:
            file = TensorFile.create(target.file(stem), self._specs[stem], ring)
            self._files[stem] = self._stack.enter_context(file)
            if self._comm.world > 1:
                file.sync()
        stems = [*(stem for stem, kind in self._small.items() if kind), *self._specs]
        return {stem: os.path.basename(target.file(stem)) for stem in stems}

    def _fill(self, path: str, names_of_files: Mapping[str, str]) -> dict[str, Any]:
        """Write what this rank has of every tensor; return the checksums of that, by file, and whether all
        that is trained is `finite`."""
        if self._target is None:
            ring = self._stack.enter_context(self._engine.store.beside(writing_ring(path)))
            for stem, specs in self._specs.items():
                file = TensorFile.join(os.path.join(path, names_of_files[stem]), specs, ring)
                self._files[stem] = self._stack.enter_context(file)
        names, files, states = self._names, self._files, self._engine.states
        trainable = [s for s in names if s.spec.trainable]
        frozen = [s for s in names if not s.spec.trainable]
        under_way, finite = UnderWay(), True
        for sharded, segment, pieces in states.segments(
            ("master", *states.kept), trainable, under_way=under_way, own=True
        ):
            for kind, piece in pieces.items():
                finite = finite and (kind != "master" or _is_finite(piece))
                file = files["parameters" if kind == "master" else kind]
                first = segment.offset // states.kept.get(kind, 1)
                file.write(names[sharded], first, piece, under_way)
            self._tell(sum(p.nbytes for p in pieces.values()))
        for params, stem, version in (
            (frozen, "parameters", Version.NEWEST),
            (self._newer, "front", Version.FRONT),
        ):
            for sharded, segment, pieces in states.segments(
                ("copy",), params, version=version, under_way=under_way, own=True
            ):
                files[stem].write(names[sharded], segment.offset, pieces["copy"], under_way)
                self._tell(pieces["copy"].nbytes)
        for file in files.values():
            file.sync()
        self._tell(0)
        left_out = pieces_of(self._engine, self._left_out)
        return {**{stem: file.pieces() for stem, file in files.items()}, "finite": finite} | (
            {"left out": left_out} if self._left_out else {}
        )

    def _end(self, pieces: list[dict[str, Any]], names: Mapping[str, str], keep_last: int | None) -> None:
        """On the first rank: make the checkpoint whole, and remove what is not kept beside it."""
        given, target = self._given, self._target
        if target is None:
            return
        for stem, file in self._files.items():
            self._crcs[stem] = file.checksums([of_rank[stem] for of_rank in pieces])
        content = content_of(
            crcs=self._crcs,
            parameters=self._described(),
            optimizer=self._engine.optimizer.rule.kind,
            groups=self._groups_here,
            counts=self._engine.optimizer.counts(),
            texts={**texts_of(self._engine.model()), **given.texts},
            state=given.values,
            random=self._random,
            buffers_of_other_ranks=self._others,
            finite=all(of_rank["finite"] for of_rank in pieces),
        )
        if self._left_out:
            specs = {n: s.spec for s, n in self._left_out.items()}
            sizes = {n: spec.numel * spec.dtype.itemsize for n, spec in specs.items()}
            sums = sums_of([of_rank["left out"] for of_rank in pieces], sizes)
            content["left_out"] = {
                n: {"dtype": NAMES[spec.dtype], "shape": [*spec.shape], "crc32c": sums[n]}
                for n, spec in specs.items()
            }
        target.commit(content, names)
        target.clear()
        if not content["finite"]:
            self._warn_of_nan(target, stays=keep_last is not None)
        for error in target.prune(keep_last) if keep_last is not None else ():
            warnings.warn(
                f"{target.path} is saved, but an older checkpoint is not removed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _warn_of_nan(self, target: Save, stays: bool) -> None:
        whole = target.newest_finite()
        there = "no checkpoint there has finite ones"
        if whole is not None:
            there = f"the newest checkpoint with finite ones is {whole}" + ", which stays" * stays
            there += "; to resume from it, move newer ones to another directory"
        warnings.warn(
            f"{target.path} has parameters that are NaN or infinite: {there}", RuntimeWarning, stacklevel=2
        )

    def _specs_of(self) -> dict[str, dict[str, Spec]]:
        """Return what is in each file that is written chunk by chunk."""
        names, states = self._names, self._engine.states
        specs: dict[str, dict[str, Spec]] = {
            "parameters": {
                n: (torch.float32 if s.spec.trainable else s.spec.dtype, s.spec.shape)
                for s, n in names.items()
            },
            **{
                kind: {
                    n: (m.dtype, s.spec.shape if m.block == 1 else (m.count(s.spec.numel),))
                    for s, n in names.items()
                    for m in states.moments_of(s)
                    if m.name == kind
                }
                for kind in states.kept
            },
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
                    "params": [self._names[s] for s in params if s in self._names],
                }
            )
        return groups
