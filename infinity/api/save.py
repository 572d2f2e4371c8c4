"""`save`: everything that a training run needs to go on, in a directory that any run can read."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch

from infinity.core.errors import ConfigError
from infinity.params.param import ShardedParam
from infinity.planning.parts import MOMENTS
from infinity.storage.checkpoints import Save
from infinity.storage.store import Version
from infinity.storage.tensor_file import TensorFile, write_all
from infinity.storage.under_way import UnderWay
from infinity.version import __version__

from .checkpoint import (
    Progress,
    buffers_of,
    check_free,
    interruptible,
    names_of,
    path_of,
    settle,
    texts_of,
    writing_ring,
)
from .engine import Engine, engine_of
from .random_state import random_state
from .ranks import check_one
from .user_state import check_named, encode, files_of, is_tokenizer

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
    check_one(engine.comm, "`infinity.save`", "`state_dict()` of model and optimizer, on all ranks")
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
    own = encode(random_state(engine.device.torch_device), tensors, "random")
    return interruptible(
        engine.shelter,
        lambda told: _Saving(engine, root, told).run(values, own, tensors, texts, keep_last),
        progress,
    )


class _Saving:
    """One save."""

    def __init__(self, engine: Engine, root: str, progress: Progress) -> None:
        self._engine = engine
        self._root = root
        self._progress = progress
        self._done = self._total = 0

    def run(
        self,
        values: Any,
        own: Any,
        tensors: dict[str, torch.Tensor],
        texts: dict[str, str],
        keep_last: int | None,
    ) -> str:
        engine = self._engine
        settle(engine)
        names = names_of(engine)
        optimizer = engine.optimizer
        trainable = [s for s in names if s.spec.trainable]
        frozen = [s for s in names if not s.spec.trainable]
        newer = _with_front(engine)
        specs: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
            "parameters": {
                n: (torch.float32 if s.spec.trainable else s.spec.dtype, s.spec.shape)
                for s, n in names.items()
            },
            **{kind: {names[s]: (torch.float32, s.spec.shape) for s in trainable} for kind in MOMENTS},
            "front": {names[s]: (s.spec.dtype, s.spec.shape) for s in newer},
        }
        groups = self._groups(names, tensors)
        small = {"buffers": buffers_of(engine), "values": tensors}
        kept = [torch.empty(shape, dtype=d, device="meta") for k in specs.values() for d, shape in k.values()]
        self._total = sum(t.nbytes for t in (*kept, *(t for k in small.values() for t in k.values())))
        with Save(self._root, optimizer.steps) as target, writing_ring(self._root) as ring:
            check_free(self._root, self._total, "a checkpoint", _NO_ROOM)
            crcs: dict[str, Any] = {}
            for stem, kind in small.items():
                if kind:
                    crcs[stem] = write_all(target.file(stem), kind, ring)
                    self._tell(sum(t.nbytes for t in kind.values()))
            with contextlib.ExitStack() as stack:
                files = {
                    stem: stack.enter_context(TensorFile.create(target.file(stem), kind, ring))
                    for stem, kind in specs.items()
                    if kind
                }
                under_way = UnderWay()
                for sharded, segment, pieces in engine.states.segments(
                    ("master", *MOMENTS), trainable, under_way=under_way
                ):
                    for kind_, piece in pieces.items():
                        file = files["parameters" if kind_ == "master" else kind_]
                        file.write(names[sharded], segment.offset, piece, under_way)
                    self._tell(sum(p.nbytes for p in pieces.values()))
                for params, stem, version in (
                    (frozen, "parameters", Version.NEWEST),
                    (newer, "front", Version.FRONT),
                ):
                    for sharded, segment, pieces in engine.states.segments(
                        ("copy",), params, version=version, under_way=under_way
                    ):
                        files[stem].write(names[sharded], segment.offset, pieces["copy"], under_way)
                        self._tell(pieces["copy"].nbytes)
                for stem, file in files.items():
                    file.sync()
                    crcs[stem] = file.checksums()
            self._tell(0)
            target.commit(
                {
                    "infinity": __version__,
                    "crcs": crcs,
                    "parameters": self._described(names),
                    "groups": groups,
                    "counts": optimizer.counts(),
                    "texts": {**texts_of(engine.model()), **texts},
                    "state": values,
                    "random": own,
                }
            )
            for error in target.prune(keep_last) if keep_last is not None else ():
                warnings.warn(
                    f"{target.path} is saved, but an older checkpoint is not removed: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return target.path

    def _tell(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)

    def _described(self, names: Mapping[ShardedParam, str]) -> dict[str, Any]:
        described: dict[str, dict[str, Any]] = {
            n: {"step": s.step, "trainable": s.spec.trainable, "tied": []} for s, n in names.items()
        }
        model = self._engine.model()
        for name, param in model.named_parameters(remove_duplicate=False) if model is not None else ():
            first = names.get(self._engine.params[param]) if param in self._engine.params else None
            if first is not None and first != name:
                described[first]["tied"].append(name)
        return described

    def _groups(self, names: Mapping[ShardedParam, str], tensors: dict[str, torch.Tensor]) -> list[Any]:
        groups: list[Any] = []
        for index, group in enumerate(self._engine.optimizer.param_groups):
            options = {k: v for k, v in group.items() if k != "params"}
            params = [self._engine.params[p] for p in group["params"] if p in self._engine.params]
            groups.append(
                {
                    "options": encode(options, tensors, f"param group {index}"),
                    "params": [names[s] for s in params],
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
