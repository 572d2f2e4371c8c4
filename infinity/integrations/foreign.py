"""Checkpoints of other programs, as ones of `infinity.save`: what they have, and how it is written.

The values stay in their files, and are copied piece by piece. No model is built.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import torch

from infinity.api.checkpoint import Progress, check_free, content_of, interruptible, writing_ring
from infinity.api.user_state import encode
from infinity.core.commits import Commits
from infinity.core.errors import DataError, DirectoryError
from infinity.storage.checkpoints import Save
from infinity.storage.tensor_file import TensorFile, write_all
from infinity.storage.tensor_header import NAMES, Spec, nbytes_of

from .torch_file import Record, is_dense, load_saved, part

#: The moments of AdamW and Adam.
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_PIECE: Final = 1 << 20  # elements that are in memory at once
_MOST: Final = 1 << 53  # beyond it, a float is no count
_DEPTH: Final = 50  # containers in containers, in further state
_KEYS: Final = (str, int, float, bytes, type(None))
_PLAIN: Final = (*_KEYS, bytearray, dict, list, tuple, set, frozenset)  # bool is an int
_T = TypeVar("_T")


class Extent(NamedTuple):
    """Elements of a tensor in a file: `numel` of them, from element `first` on."""

    tensor: torch.Tensor
    first: int
    numel: int


#: The values of one parameter: "parameters" and the moments that there are, each as extents in their order;
#: and, as "rounded", what has to be the same when the first is rounded to its dtype.
Values: TypeAlias = Mapping[str, Sequence[Extent]]


@dataclass(frozen=True)
class ForeignParameter:
    """What is known of a parameter before its values are read. `dtype`: what it is saved in."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    step: int = 0
    moments: tuple[str, ...] = ()
    tied: list[str] = field(default_factory=list)


@dataclass
class Foreign:
    """What a checkpoint of another program has, in our words.

    Attributes:
        path: where it is.
        counts: see `Optimizer.counts`.
        groups: of the optimizer: the options, and the names of the parameters.
        parameters: by name.
        values: lends the values of a parameter, by its name.
        buffers: by name.
        state: what `infinity.load` returns.
        left_out: where in the saved state there are objects of classes, which are not in `state`.
    """

    path: str
    counts: dict[str, float]
    groups: list[tuple[dict[str, Any], list[str]]]
    parameters: dict[str, ForeignParameter]
    values: Callable[[str], AbstractContextManager[Values]]
    buffers: dict[str, torch.Tensor]
    state: dict[str, Any]
    left_out: list[str]


def imported(
    program: str,
    read: Callable[[str], tuple[Foreign, Sequence[str]]],
    directory: str,
    path: str,
    progress: Progress | None,
) -> tuple[str, Foreign]:
    """Write the checkpoint of a program in `directory` as one of ours, below `path`; return its directory,
    and what it has.

    Args:
        read: returns what a directory has, and the directories that may have the model's configuration.
        path: a new directory, or an empty one.
        progress: called with the bytes that are written, and all bytes.

    Raises:
        DirectoryError: a directory or a file is not there, or not readable or writable.
        DataError: the checkpoint is of a kind that cannot be imported.
        CorruptionError: a file is damaged.
    """
    _check_new(path)
    try:
        foreign, around = read(directory)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(
            f"{directory} has values that no version of {program} writes",
            expected="numbers, texts, containers and tensors in their places",
            found=f"{type(error).__name__}: {error}"[:200],
            cure="copy the checkpoint again from its source; if it is an old one, load it by a newer version "
            "and save it again",
        ) from error
    return _write(foreign, path, _texts_beside(*around), progress), foreign


def entry(value: Any, key: Any, kind: type[_T] | tuple[type[_T], ...], path: str) -> _T:
    """Return what a dict of a file has as `key`.

    Raises:
        DataError: it has none of that kind.
    """
    there = value.get(key) if isinstance(value, dict) else None
    odd = (isinstance(there, bool) and kind is int) or (
        isinstance(there, torch.Tensor) and not is_dense(there)
    )
    if not isinstance(there, kind) or odd:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise DataError(
            f"{path} is not a file of the checkpoint that it should be a part of",
            expected=f"{key!r}, of {' or '.join(k.__name__ for k in kinds)}",
            found=type(there).__name__ if isinstance(value, dict) else f"no dict with {key!r}",
            cure="name the directory that was saved; save it again with a newer version, if this one is old",
        )
    return there


def shape_in(value: Any, name: str, path: str) -> tuple[int, ...]:
    """Return a shape that a file has.

    Raises:
        DataError: it is none.
    """
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (-1,)
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes) or len(sizes) > 32:
        raise DataError(
            f"{path} has no shape of {name!r}",
            expected="a tuple of sizes",
            found=type(value).__name__,
            cure="copy the checkpoint again from its source",
        )
    return sizes


def number_in(value: Any) -> float | None:
    """Return a number, or that of a tensor with one; None: it is neither, or not finite."""
    if is_dense(value) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST else None


def count_in(value: Any, default: int) -> int:
    """Return a count, or `default` where there is none."""
    number = number_in(value)
    return default if number is None or number < 0 else int(number)


def options_of_adam(group: Any, path: str, decoupled: bool | None = None) -> dict[str, Any]:
    """Return the options of a param group of AdamW or Adam, for ours. `decoupled`: whether it is AdamW, where
    the group does not say it; by default it is.

    Raises:
        DataError: it is of another optimizer, or has an option that is not supported.
    """
    options: dict[str, Any] = {
        name: number_in(entry_of(group, name)) for name in ("lr", "eps", "weight_decay")
    }
    betas = entry_of(group, "betas")
    options["betas"] = tuple(map(number_in, betas)) if isinstance(betas, (list, tuple)) else ()
    of_adam = entry_of(group, "amsgrad") is not None or entry_of(group, "bias_correction") is not None
    if not of_adam or None in (*options.values(), *options["betas"]) or len(options["betas"]) != 2:
        found = ", ".join(map(str, group))[:200] if isinstance(group, dict) else type(group).__name__
        raise other_optimizer(path, f"a param group with {found}")
    for option, neutral in (("amsgrad", False), ("bias_correction", True)):
        if bool(group.get(option, neutral)) is not neutral:
            raise other_optimizer(path, f"{option}={not neutral}")
    options |= {"amsgrad": False, "maximize": bool(group.get("maximize"))}
    mode = group.get("decoupled_weight_decay", True) if decoupled is None else decoupled
    options["decoupled_weight_decay"] = bool(mode)
    if (begun := number_in(group.get("initial_lr"))) is not None:
        options["initial_lr"] = begun
    return options


def entry_of(value: Any, key: Any) -> Any:
    """Return what a dict has as `key`; None, where it has none, or is no dict."""
    return value.get(key) if isinstance(value, dict) else None


def other_optimizer(path: str, found: str) -> DataError:
    """Return the error for a checkpoint of another optimizer."""
    return DataError(
        f"{path} is of a run with an optimizer that cannot be imported",
        expected="AdamW or Adam",
        found=found,
        cure="load the weights into the model before `wrap`, and begin with new moments",
    )


def plain(value: Any, left_out: list[str], where: str, depth: int = 0) -> Any:
    """Return state without what is an object of a class, whose places are added to `left_out`. Tensors are
    read."""
    if isinstance(value, torch.Tensor):
        if is_dense(value) and value.dtype in NAMES:
            return value.detach().clone()
        left_out.append(f"{where} (a tensor in {value.dtype})")
        return None
    if depth > _DEPTH or not isinstance(value, _PLAIN):
        kind = value if isinstance(value, type) else type(value)
        left_out.append(f"{where} ({kind.name if issubclass(kind, Record) else kind.__name__})")
        return None
    if isinstance(value, dict):
        kept = {}
        for key, inner in value.items():
            at = f"{where}[{key!r:.60}]"
            if isinstance(key, _KEYS):
                kept[key] = plain(inner, left_out, at, depth + 1)
            else:
                left_out.append(at)
        return kept
    if isinstance(value, (list, tuple)):
        made = [plain(inner, left_out, f"{where}[{i}]", depth + 1) for i, inner in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, (set, frozenset)):
        return {each for each in value if isinstance(each, _KEYS)}
    return value


def listing(path: str, program: str) -> list[str]:
    """Return the names in a directory.

    Raises:
        DirectoryError: it cannot be looked into.
    """
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise DirectoryError(
            f"cannot look into {path}",
            errno=error.errno,
            path=path,
            expected=f"a checkpoint of {program}",
            found=error.strerror,
            cure="name the directory into which it was saved",
        ) from error


def _texts_beside(*directories: str) -> dict[str, str]:
    """Return the configuration of a model of transformers that is in one of these directories, as a
    checkpoint has it."""
    found: dict[str, str] = {}
    for directory in directories:
        for name in ("config.json", "generation_config.json"):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                with open(os.path.join(directory, name), encoding="utf-8") as file:
                    text = file.read()
                if name not in found and isinstance(json.loads(text), dict):
                    found[name] = text
    return found


def scheduler_beside(left_out: list[str], *directories: str) -> dict[str, Any] | None:
    """Return the state of a learning rate scheduler that Trainer or accelerate has saved in one of these
    directories; None: there is none.

    Raises:
        DirectoryError, CorruptionError: it cannot be read.
    """
    for directory in directories:
        for name in ("scheduler.pt", "scheduler.bin"):
            path = os.path.join(directory, name)
            if os.path.isfile(path):
                state = plain(load_saved(path), left_out, name)
                if isinstance(state, dict) and "last_epoch" in state:
                    return state
    return None


def _check_new(path: str) -> None:
    """Raise `DirectoryError` unless nothing is at `path`, or an empty directory."""
    try:
        there = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise DirectoryError(
            f"cannot write into {path}",
            errno=error.errno,
            path=path,
            expected="a new directory, or an empty one",
            found=error.strerror,
            cure="name another directory",
        ) from error
    if there:
        raise DirectoryError(
            f"{path} is not empty",
            path=path,
            expected="a new directory, or an empty one: infinity never replaces files that exist",
            found=", ".join(there[:8]) + " …" * (len(there) > 8),
            cure="name another directory; or remove this one, if an import that was killed has left it",
        )


def _write(foreign: Foreign, path: str, texts: Mapping[str, str], progress: Progress | None = None) -> str:
    """Write a foreign checkpoint as one of ours, below the new directory `path`; return its own directory. It
    counts when all of it is written and checked. An interrupt ends the import.

    Raises:
        DirectoryError: the directory is not empty or not writable, or has no room.
        DataError, CorruptionError: the values are not what they should be.
        TransferError: a drive reports an error.
    """
    with contextlib.closing(Commits()) as commits:
        return interruptible(commits, lambda told: _Writing(foreign, path, texts, told).run(), progress)


class _Writing:
    """One import."""

    def __init__(self, foreign: Foreign, path: str, texts: Mapping[str, str], told: Progress) -> None:
        self._foreign = foreign
        self._path = path
        self._texts = texts
        self._told = told
        self._specs = _specs_of(foreign)
        self._done = 0
        self._total = sum(nbytes_of(*spec) for kind in self._specs.values() for spec in kind.values())
        self._finite = True

    def run(self) -> str:
        """Write everything; return the directory of the checkpoint."""
        foreign = self._foreign
        with Save(self._path, int(foreign.counts["steps"])) as target, writing_ring(target.root) as ring:
            tensors: dict[str, torch.Tensor] = {}
            groups = [
                {"options": encode(options, tensors, f"param group {index}"), "params": names}
                for index, (options, names) in enumerate(foreign.groups)
            ]
            state = encode(foreign.state, tensors)
            small = {"buffers": foreign.buffers, "values": tensors}
            small_nbytes = sum(t.nbytes for kind in small.values() for t in kind.values())
            check_free(target.root, self._total + small_nbytes, "a checkpoint", "or import it elsewhere")
            crcs = {stem: write_all(target.file(stem), kind, ring) for stem, kind in small.items() if kind}
            with contextlib.ExitStack() as stack:
                files = {
                    stem: stack.enter_context(TensorFile.create(target.file(stem), kind, ring))
                    for stem, kind in self._specs.items()
                }
                for name in foreign.parameters:
                    with foreign.values(name) as values:
                        self._copy(name, values, files)
                for stem, file in files.items():
                    file.sync()
                    crcs[stem] = file.checksums()
            index = content_of(
                crcs=crcs,
                parameters={
                    name: {"step": p.step, "trainable": p.trainable, "tied": p.tied}
                    for name, p in foreign.parameters.items()
                },
                optimizer="Adam",
                groups=groups,
                counts=foreign.counts,
                texts=self._texts,
                state=state,
                random=[None],
                buffers_of_other_ranks=[],
                finite=self._finite,
            )
            names = {stem: os.path.basename(target.file(stem)) for stem in crcs}
            target.commit(index, names)
            target.clear()
            return target.path

    def _copy(self, name: str, values: Values, files: Mapping[str, TensorFile]) -> None:
        rounded = _Follower(values["rounded"]) if "rounded" in values else None
        for stem, extents in values.items():
            if stem == "rounded":
                continue
            at = 0
            for piece in _pieces(extents):
                if stem == "parameters":
                    self._check(name, piece, rounded)
                files[stem].write(name, at, piece)
                at += piece.numel()
                self._done += piece.numel() * files[stem].entries[name].dtype.itemsize
                self._told(self._done, self._total)
            if at != files[stem].entries[name].numel:
                raise DataError(
                    f"{self._foreign.path} has {name!r} with another number of elements than its shape",
                    expected=f"{files[stem].entries[name].numel} elements, in {stem}",
                    found=f"{at}",
                    cure="save the checkpoint again; or copy it again from its source",
                )

    def _check(self, name: str, piece: torch.Tensor, rounded: _Follower | None) -> None:
        if self._foreign.parameters[name].trainable and piece.numel():
            self._finite = self._finite and bool(torch.stack(torch.aminmax(piece)).isfinite().all())
        if rounded is None:
            return
        there = rounded.next(piece.numel())
        here = piece.to(there.dtype)
        if not bool(((here == there) | (here.isnan() & there.isnan())).all()):
            raise DataError(
                f"{name!r} in {self._foreign.path} has another value in the optimizer than in the model",
                expected="masters that are the weights of the model when they are rounded",
                found="different values",
                cure="save the checkpoint again; if it is a universal one, or the weights were loaded "
                "without the optimizer, import the one before that",
            )


def _pieces(extents: Sequence[Extent]) -> Iterator[torch.Tensor]:
    for tensor, first, numel in extents:
        for begin in range(0, numel, _PIECE):
            yield part(tensor, first + begin, min(_PIECE, numel - begin))


class _Follower:
    """Reads extents on, so many elements as are asked for."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._pieces = _pieces(extents)
        self._rest: torch.Tensor | None = None

    def next(self, numel: int) -> torch.Tensor:
        """Return the next elements, of which there must be so many."""
        rest = next(self._pieces) if self._rest is None else self._rest
        while rest.numel() < numel:
            rest = torch.cat([rest, next(self._pieces)])
        self._rest = rest[numel:]
        return rest[:numel]


def _specs_of(foreign: Foreign) -> dict[str, dict[str, Spec]]:
    """Return what is in each file."""
    specs: dict[str, dict[str, Spec]] = {
        "parameters": {n: (p.dtype, p.shape) for n, p in foreign.parameters.items()},
        **{
            kind: {n: (torch.float32, p.shape) for n, p in foreign.parameters.items() if kind in p.moments}
            for kind in MOMENTS
        },
    }
    return {stem: kind for stem, kind in specs.items() if kind}
