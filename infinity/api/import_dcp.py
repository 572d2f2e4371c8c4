"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2 has them, as ones of `infinity.save`.

No model is built, and no process group.

[Note: DCP's files] A directory has ``.metadata``, a pickle, and files of ranks. The metadata has the shape of
each tensor and the places of its chunks, which are boxes of the tensor: each is what `torch.save` writes, in
some part of a file. Names are paths with dots between their parts: ``model.embed.weight``,
``optim.state.embed.weight.exp_avg``. The first part of a path is the program's choice. accelerate has one
directory for the model and one for the optimizer.

A checkpoint of DCP does not say which tensors of the model are parameters, which are buffers, and which names
are tied. What the optimizer has is a trained parameter. A tensor with all values of a trained one is tied to
it. All others are saved as frozen parameters, and `load` gives them to buffers of these names.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from infinity.core.errors import DataError
from infinity.storage.pickled import Record, SavedTensor, TorchFile, dtype_of, read_pickle

from .checkpoint import Progress
from .foreign import (
    MOMENTS,
    Extent,
    Foreign,
    ForeignParameter,
    Values,
    alike,
    check_new,
    count_in,
    entry,
    listing,
    not_of,
    options_of_adam,
    other_optimizer,
    plain,
    scheduler_beside,
    shape_in,
    texts_beside,
    write,
)

_PROGRAM: Final = "torch.distributed.checkpoint"
_METADATA: Final = ".metadata"
#: The directories of accelerate: of the model, and of the optimizer.
_MODEL, _OPTIMIZER = re.compile(r"pytorch_model_fsdp_\d+"), re.compile(r"optimizer_\d+")
_STATE: Final = re.compile(r"((?:.*?\.)??)state\.(.+)\.([^.]+)")
_IN_GROUP: Final = re.compile(r"((?:.*?\.)??)param_groups\.(.+)\.([^.]+)")
_LARGE: Final = 1 << 20  # bytes of a tensor that is left out of further state
_DIGITS: Final = 9  # of the number of a param group
_HEAD: Final = 64  # elements of a tensor that tell most others from it


def import_dcp(directory: str, path: str, progress: Progress | None = None) -> tuple[str, Foreign]:
    """Write the checkpoint of torch.distributed.checkpoint in `directory` as one of ours, below `path`;
    return its directory, and what it has.

    Args:
        directory: one with a .metadata file, or the one in which accelerate has two of these.
        path: a new directory, or an empty one.
        progress: called with the bytes that are written, and all bytes.

    Raises:
        DirectoryError: a directory or a file is not there, or not readable or writable.
        DataError: the checkpoint is of a kind that cannot be imported.
        CorruptionError: a file is damaged.
    """
    check_new(path, directory)
    try:
        saved = _Saved(directory)
        foreign = _foreign(saved)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise not_of(_PROGRAM, directory, error) from error
    return write(foreign, path, texts_beside(*saved.around), progress), foreign


class _Chunk(NamedTuple):
    """A box of a tensor, and where it is: in `nbytes` of a file, from `begin` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: str
    begin: int
    nbytes: int


class _Entry(NamedTuple):
    """A tensor, or (`dtype` is None) another value, which is one chunk."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: list[_Chunk]


def _is_large(found: _Entry) -> bool:
    return found.dtype is not None and math.prod(found.shape) * found.dtype.itemsize > _LARGE


class _Saved:
    """What the directories of a checkpoint have, by name.

    Attributes:
        around: this directory, and the one that has it.
        entries: tensors and other values.
        paths: the parts of a name.
    """

    def __init__(self, directory: str) -> None:
        self.path = directory
        self.around = (directory, os.path.dirname(os.path.abspath(directory)))
        self.entries: dict[str, _Entry] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        for folder in _folders_of(directory):
            self._add(folder)

    def _add(self, folder: str) -> None:
        path = os.path.join(folder, _METADATA)
        content = read_pickle(path)
        if not isinstance(content, Record) or content.name.rpartition(".")[2] != "Metadata":
            raise DataError(
                f"{path} is not the metadata of a checkpoint of torch.distributed.checkpoint",
                expected="what torch.distributed.checkpoint.save writes",
                found=getattr(content, "name", type(content).__name__),
                cure="name the directory that was passed to it",
            )
        there = set(listing(folder, _PROGRAM))
        places: dict[str, dict[tuple[int, ...], _Chunk]] = {}
        for index, info in entry(content.state, "storage_data", dict, path).items():
            name, offset = entry(index.state, "fqn", str, path), index.attribute("offset")
            chunk = _place_of(info, folder, there, path)
            places.setdefault(name, {})[tuple(offset or ())] = chunk
        for name, about in entry(content.state, "state_dict_metadata", dict, path).items():
            if name in self.entries:
                raise DataError(
                    f"{self.path} has {name!r} twice",
                    expected="one model, with one optimizer",
                    found=f"another one in {folder}",
                    cure="name the directory with the one that you want to import",
                )
            self.entries[name] = _entry_of(name, about, places.get(name, {}), path)
        parts = content.attribute("planner_data")
        self.paths |= parts if isinstance(parts, dict) else {}

    def value(self, name: str) -> Any:
        """Return a value that is no large tensor; None, where it is one."""
        found = self.entries[name]
        if found.dtype is not None and _is_large(found):
            return None
        if found.dtype is not None:
            with _opened(self, name) as (extents,):
                pieces = [e.tensor.part(e.first, e.numel) for e in extents]
                return torch.cat(pieces).view(found.shape) if pieces else torch.empty(found.shape)
        chunk = found.chunks[0]
        with TorchFile(chunk.path, begin=chunk.begin, nbytes=chunk.nbytes) as file:
            value = plain(file.value, [], name)
            file.check()
            return value


def _folders_of(directory: str) -> list[str]:
    """Return the directories with metadata: this one, or those of accelerate in it."""
    names = listing(directory, _PROGRAM)
    if _METADATA in names:
        if not _MODEL.fullmatch(os.path.basename(os.path.abspath(directory))):
            return [directory]
        directory = os.path.dirname(os.path.abspath(directory))  # the optimizer is beside it
        names = listing(directory, _PROGRAM)
    folders = [
        os.path.join(directory, name)
        for name in names
        if (_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))
        and os.path.exists(os.path.join(directory, name, _METADATA))
    ]
    if not folders:
        raise DataError(
            f"{directory} is not a checkpoint of torch.distributed.checkpoint",
            expected=f"{_METADATA}; or, of accelerate, pytorch_model_fsdp_0 and optimizer_0 with {_METADATA}",
            found=", ".join(names[:8]) or "nothing",
            cure="name the directory that was passed to torch.distributed.checkpoint.save; one without "
            f"{_METADATA} is of a save that did not end",
        )
    return folders


def _place_of(info: Record, folder: str, there: set[str], path: str) -> _Chunk:
    name, begin = entry(info.state, "relative_path", str, path), entry(info.state, "offset", int, path)
    if info.attribute("transform_descriptors") or name not in there:
        raise DataError(
            f"{path} has values in a form or a place that cannot be read",
            expected="files beside it, not compressed",
            found=f"{info.attribute('transform_descriptors') or name!r}"[:200],
            cure="copy all files of the checkpoint, of every node; load and save a compressed one by torch, "
            "without extensions",
        )
    return _Chunk((), (), os.path.join(folder, name), begin, entry(info.state, "length", int, path))


def _entry_of(name: str, about: Record, places: Mapping[tuple[int, ...], _Chunk], path: str) -> _Entry:
    if about.name.rpartition(".")[2] != "TensorStorageMetadata":
        if len(places) != 1:
            raise _incomplete(path, name, "one value", f"{len(places)}")
        return _Entry(None, (), list(places.values()))
    shape = shape_in(about.attribute("size"), name, path)
    properties = about.attribute("properties")
    told = properties.state if isinstance(properties, Record) else None
    dtype = dtype_of(told[0] if isinstance(told, tuple) and told else entry(told, "dtype", object, path))
    if dtype is None:
        raise _incomplete(path, name, "a dtype of torch that safetensors have", "another one")
    chunks = []
    for box in entry(about.state, "chunks", list, path):
        offsets = shape_in(box.attribute("offsets"), name, path)
        sizes = shape_in(box.attribute("sizes"), name, path)
        if not len(offsets) == len(sizes) == len(shape):
            raise _incomplete(path, name, f"chunks of {shape}", f"one of {sizes}")
        if math.prod(sizes):  # a rank may have nothing of it
            if offsets not in places:
                raise _incomplete(path, name, f"a chunk at {offsets}", "none")
            chunks.append(places[offsets]._replace(offsets=offsets, sizes=sizes))
    return _Entry(dtype, shape, chunks)


def _incomplete(path: str, name: str, expected: str, found: str) -> DataError:
    return DataError(
        f"{path} does not say where all of {name!r} is",
        expected=expected,
        found=found,
        cure="save the checkpoint again by a newer version of torch; or copy it again from its source",
    )


@contextlib.contextmanager
def _opened(saved: _Saved, *names: str) -> Iterator[list[list[Extent]]]:
    """Lend the elements of tensors, which are checked at the end."""
    with contextlib.ExitStack() as stack:
        files: list[TorchFile] = []
        yield [_extents_of(name, saved.entries[name], stack, files) for name in names]
        for file in files:
            file.check()


def _extents_of(
    name: str, found: _Entry, stack: contextlib.ExitStack, files: list[TorchFile]
) -> list[Extent]:
    """Return where the elements of a tensor are, in their order, and add the files that are open for them."""
    runs: list[tuple[int, Extent]] = []
    for chunk in found.chunks:
        file = stack.enter_context(TorchFile(chunk.path, begin=chunk.begin, nbytes=chunk.nbytes))
        tensor = file.value
        if not isinstance(tensor, SavedTensor) or (tensor.shape, tensor.dtype) != (chunk.sizes, found.dtype):
            raise _incomplete(chunk.path, name, f"a chunk of {chunk.sizes}, {found.dtype}", "something else")
        files.append(file)
        runs += [(at, Extent(tensor, first, numel)) for at, first, numel in _runs(found.shape, chunk)]
    runs.sort(key=lambda run: run[0])
    at = 0
    for begin, extent in runs:
        if begin != at:
            break
        at += extent.numel
    if at != math.prod(found.shape):
        raise _incomplete(
            found.chunks[0].path if found.chunks else "the checkpoint",
            name,
            "each element once",
            f"a hole or an overlap at element {at}",
        )
    return [extent for _, extent in runs]


def _runs(shape: Sequence[int], chunk: _Chunk) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of elements of a chunk that follow one another in the tensor: where each begins in the
    tensor and in the chunk, and its length."""
    inner = len(shape)
    while inner and chunk.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)  # this dimension and those behind it are one run
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(chunk.sizes[outer:])
    begin = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, chunk.sizes[:outer]))):
        at = begin + sum(i * stride for i, stride in zip(index, strides[:outer], strict=True))
        yield at, number * length, length


# -- what a checkpoint says ----------------------------------------------------------------------


class _Optimizer(NamedTuple):
    """Names of the optimizer's entries: of the state of each parameter, by its kind, and of each option. A
    group may be called by its number, or (flat) by a parameter."""

    prefix: str
    state: dict[str, dict[str, str]]
    options: dict[str, dict[str, str]]


def _foreign(saved: _Saved) -> Foreign:
    """Return what a checkpoint has. Everything that is not a value of a parameter is read here."""
    optimizer = _optimizer_of(saved)
    groups = _groups_of(saved, optimizer)
    trained = [name for _, names in groups for name in names]
    prefix = _prefix_of(saved, optimizer, trained)
    of_model = {
        name.removeprefix(prefix): name
        for name, found in saved.entries.items()
        if found.dtype is not None and name.startswith(prefix) and not _of_optimizer(name, optimizer)
    }
    parameters, tied, frozen = {}, _tied(saved, of_model, trained), of_model.keys() - {*trained}
    steps = 0
    for name, full in of_model.items():
        if name in tied:
            continue
        found, state = saved.entries[full], optimizer.state.get(name, {})
        if others := state.keys() - {*MOMENTS, "step"}:
            raise other_optimizer(saved.path, f"{', '.join(sorted(others))[:100]} of {name!r}")
        kinds = MOMENTS if state else ()
        if lacking := [kind for kind in kinds if kind not in state]:
            raise other_optimizer(saved.path, f"state of {name!r} without {', '.join(lacking)}")
        for kind in kinds:
            if saved.entries[state[kind]].shape != found.shape:
                raise _incomplete(saved.path, state[kind], f"{found.shape}", "another shape")
        if name in frozen:
            assert found.dtype is not None
            parameters[name] = ForeignParameter(found.shape, found.dtype, trainable=False)
            continue
        if kinds and "step" not in state:
            raise other_optimizer(saved.path, f"moments of {name!r} without their step")
        step = count_in(saved.value(state["step"]), 0) if kinds else 0
        steps = max(steps, step)
        parameters[name] = ForeignParameter(found.shape, step=step, moments=kinds)
    for alias, name in tied.items():
        parameters[name].tied.append(alias)
    left_out: list[str] = []
    further = _further(saved, {*of_model.values()}, optimizer, left_out)
    if "scheduler" not in further and (scheduler := scheduler_beside(left_out, *saved.around)) is not None:
        further["scheduler"] = scheduler

    @contextlib.contextmanager
    def values(name: str) -> Iterator[Values]:
        names = {"parameters": of_model[name]}
        names |= {kind: optimizer.state[name][kind] for kind in parameters[name].moments}
        with _opened(saved, *names.values()) as extents:
            yield dict(zip(names, extents, strict=True))

    counts: dict[str, float] = {"steps": steps, "skipped_steps": 0}
    return Foreign(saved.path, counts, groups, parameters, values, {}, further, left_out, lambda: None)


def _optimizer_of(saved: _Saved) -> _Optimizer:
    """Find the entries of the optimizer.

    Raises:
        DataError: there is none, or more than one.
    """
    matches = {name: m for name in saved.entries if (m := _STATE.fullmatch(name))}
    prefixes = {m[1] for m in matches.values() if m[3] == MOMENTS[0]}
    if len(prefixes) != 1:
        raise DataError(
            f"{saved.path} does not have one optimizer",
            expected="names such as optim.state.layer.weight.exp_avg, of AdamW or Adam",
            found=", ".join(sorted(prefixes)[:8]) or "none of them",
            cure="save the state dict of the optimizer beside that of the model, as "
            "torch.distributed.checkpoint.state_dict.get_state_dict returns both",
        )
    (prefix,) = prefixes
    state: dict[str, dict[str, str]] = {}
    for name, match in matches.items():
        if match[1] == prefix:
            state.setdefault(match[2], {})[match[3]] = name
    options: dict[str, dict[str, str]] = {}
    for name in saved.entries:
        if (m := _IN_GROUP.fullmatch(name)) and m[1] == prefix:
            options.setdefault(m[2], {})[m[3]] = name
    return _Optimizer(prefix, state, options)


def _of_optimizer(name: str, optimizer: _Optimizer) -> bool:
    return name.startswith((f"{optimizer.prefix}state.", f"{optimizer.prefix}param_groups."))


def _groups_of(saved: _Saved, optimizer: _Optimizer) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the param groups: options and names. Where the state dict is flat, each parameter has options of
    its own, and those with the same ones are a group."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    order = {name: index for index, name in enumerate(optimizer.state)}  # that of the optimizer
    for key, names in sorted(optimizer.options.items(), key=lambda of: order.get(of[0], _number_in(of[0]))):
        values = {option: saved.value(name) for option, name in names.items()}
        options = options_of_adam(values, saved.path)
        if key in optimizer.state or "params" not in values:
            same = next((members for of_group, members in groups if of_group == options), None)
            if same is None:
                groups.append((options, same := []))
            same.append(key)
        else:
            members = values["params"]
            groups.append((options, [name for name in members if isinstance(name, str)]))
    members = [name for _, of_group in groups for name in of_group]
    if not groups or len(set(members)) < len(members) or not optimizer.state.keys() <= set(members):
        raise DataError(
            f"{saved.path} has param groups that do not fit the optimizer's state",
            expected="each parameter in one group, by its name",
            found=f"{len(groups)} groups with {len(members)} names, and state of {len(optimizer.state)}",
            cure="save the state dicts that torch.distributed.checkpoint.state_dict.get_state_dict returns: "
            "optimizer.state_dict() has numbers for names",
        )
    return groups


def _number_in(key: str) -> int:
    return int(key) if key.isdecimal() and len(key) < _DIGITS else 0


def _prefix_of(saved: _Saved, optimizer: _Optimizer, trained: Sequence[str]) -> str:
    """Return what stands before the names of the model's tensors.

    Raises:
        DataError: no prefix has all trained parameters, or several have them.
    """
    names = {n for n, found in saved.entries.items() if found.dtype and not _of_optimizer(n, optimizer)}
    prefixes = [name.removesuffix(trained[0]) for name in sorted(names) if name.endswith(trained[0])]
    prefixes = [p for p in prefixes if (not p or p.endswith(".")) and all(p + t in names for t in trained)]
    if len(prefixes) > 1 and "model." in prefixes:
        return "model."
    if len(prefixes) != 1:
        raise DataError(
            f"{saved.path} does not have one model with the parameters of its optimizer",
            expected=f"names such as model.{trained[0]}",
            found=", ".join(p or "names without a prefix" for p in prefixes[:8]) or "none of them",
            cure="save the state dict of the model as `model`",
        )
    return prefixes[0]


def _tied(saved: _Saved, of_model: Mapping[str, str], trained: Sequence[str]) -> dict[str, str]:
    """Return which tensors of the model have all values of a trained parameter, and of which."""

    def like(name: str) -> Any:
        found = saved.entries[of_model[name]]
        return found.dtype, found.shape

    others = [name for name in of_model if name not in {*trained}]
    both = {like(name) for name in trained} & {like(name) for name in others}
    heads: dict[Any, list[str]] = {}
    for name in trained:
        if like(name) in both:
            heads.setdefault((like(name), _head(saved, of_model[name])), []).append(name)
    tied = {}
    for name in others:
        if like(name) in both:
            there = heads.get((like(name), _head(saved, of_model[name])), ())
            same = (other for other in there if _equal(saved, of_model[name], of_model[other]))
            if (first := next(same, None)) is not None:
                tied[name] = first
    return tied


def _head(saved: _Saved, name: str) -> tuple[float, ...]:
    """Return some of a tensor's values."""
    with _opened(saved, name) as (extents,):
        some = extents[0].tensor.part(extents[0].first, min(_HEAD, extents[0].numel)) if extents else None
        return () if some is None else tuple(some.double().tolist())


def _equal(saved: _Saved, name: str, other: str) -> bool:
    with _opened(saved, name, other) as extents:
        return all(torch.equal(*pair) for pair in alike(*extents))


def _further(saved: _Saved, of_model: set[str], optimizer: _Optimizer, left_out: list[str]) -> dict[str, Any]:
    """Return what there is beside the model and the optimizer, as the program passed it."""
    state: dict[str, Any] = _Branch()
    for name, found in saved.entries.items():
        if name in of_model or _of_optimizer(name, optimizer):
            continue
        if _is_large(found):
            left_out.append(f"{name} (a tensor of {found.shape})")
            continue
        inner, parts = state, saved.paths.get(name) or (name,)
        for part in parts[:-1]:
            inner = inner.setdefault(part, _Branch())
        inner[parts[-1]] = saved.value(name)
    listed: dict[str, Any] = _with_lists(state, len(saved.entries))
    return listed


class _Branch(dict[Any, Any]):
    """What the paths of several entries have in common."""


def _with_lists(value: Any, most: int) -> Any:
    """Return a branch with a list where paths have numbers (names in dicts are always text there). None
    stands in it where a tensor is left out."""
    if not isinstance(value, _Branch):
        return value
    found = {part: _with_lists(inner, most) for part, inner in value.items()}
    if found and all(type(part) is int and 0 <= part < most for part in found):
        return [found.get(index) for index in range(max(found) + 1)]
    return found
