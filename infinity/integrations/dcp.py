"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2 has them, as ones of `infinity.save`.

No model is built, and no process group.

torch's own `FileSystemReader` and load planner read it, two methods excepted: the metadata, a pickle, is read
with an allowlist of names, and values that are no tensors with ``weights_only=True``.

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
import io
import math
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from infinity.api.checkpoint import Progress
from infinity.core.errors import DataError, InfinityError
from infinity.storage.folder import failed
from infinity.storage.tensor_header import NAMES

from .foreign import (
    MOMENTS,
    Extent,
    Foreign,
    ForeignParameter,
    Values,
    count_in,
    entry,
    imported,
    listing,
    options_of_adam,
    other_optimizer,
    plain,
    scheduler_beside,
    shape_in,
)
from .torch_file import check_archive, load_bytes, part, refused

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
    """Import the checkpoint in `directory`, one with a .metadata file, or the one in which accelerate has two
    of these: see `imported`."""

    def read(directory: str) -> tuple[Foreign, Sequence[str]]:
        saved = _Saved(directory)
        return _foreign(saved), saved.around

    return imported(_PROGRAM, read, directory, path, progress)


class _Box(NamedTuple):
    """A part of a tensor, and where it is: in `nbytes` of a file, from `begin` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: str
    begin: int
    nbytes: int


class _Entry(NamedTuple):
    """A tensor, or (`dtype` is None) another value, and the reader of its directory."""

    reader: _Reader
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    boxes: list[_Box]


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
        reader = _Reader(folder)
        content = vars(reader.read_metadata())
        there = set(listing(folder, _PROGRAM))
        places: dict[str, dict[tuple[int, ...], _Box]] = {}
        for index, info in entry(content, "storage_data", dict, path).items():
            name, offset = entry(vars(index), "fqn", str, path), getattr(index, "offset", None)
            places.setdefault(name, {})[tuple(offset or ())] = _place_of(vars(info), folder, there, path)
        for name, about in entry(content, "state_dict_metadata", dict, path).items():
            if name in self.entries:
                raise DataError(
                    f"{self.path} has {name!r} twice",
                    expected="one model, with one optimizer",
                    found=f"another one in {folder}",
                    cure="name the directory with the one that you want to import",
                )
            self.entries[name] = _entry_of(reader, name, about, places.get(name, {}), path)
        parts = content.get("planner_data")
        self.paths |= parts if isinstance(parts, dict) else {}

    def value(self, name: str) -> Any:
        """Return a value that is no large tensor; None, where it is one."""
        found = self.entries[name]
        if found.dtype is None:
            return plain(_load(name, found), [], name)
        return None if _is_large(found) else _load(name, found)


#: The names in the metadata of a checkpoint, by module.
_ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        ("TensorProperties", "MEM_FORMAT_ENCODING")
    ),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo",)),
    "collections": frozenset(("OrderedDict",)),
    "pathlib": frozenset(("PosixPath", "PurePosixPath")),
}


class _Unpickler(pickle._Unpickler):
    """Reads the metadata of a checkpoint, and finds no class but those of torch that are in one. It is
    Python's reader that is written in Python: that one lets us refuse to give a class attributes."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def load_build(self) -> None:
        """Give an object its state, and no class: that would change it for the whole process."""
        if len(self.stack) < 2 or isinstance(self.stack[-2], type) or callable(self.stack[-2]):
            raise pickle.UnpicklingError("a class or a function is given attributes")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # type: ignore[arg-type]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """Return what `name` of `module` is.

        Raises:
            UnpicklingError: it is nothing that a checkpoint's metadata have.
        """
        if module == "torch":
            value = getattr(torch, name, None)
            if value is torch.Size or isinstance(value, torch.dtype):
                return value
        elif (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        elif name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not of the metadata of a checkpoint")


def _layout(name: str) -> torch.layout:
    """Return the layout of the tensors of a checkpoint."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"tensors with the layout {name!r:.40}")
    return torch.strided


class _Reader(FileSystemReader):
    """torch's reader of a directory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.folder = path
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.

        Raises:
            DirectoryError: the file cannot be read.
            DataError: it has something else.
        """
        path = os.path.join(self.folder, _METADATA)
        if self._metadata is None:
            try:
                with open(path, "rb") as file:
                    found = _Unpickler(file).load()
            except OSError as error:
                raise failed("read", path, error) from error
            except Exception as error:  # a pickle that was not written by torch raises errors of any kind
                raise _no_metadata(path, f"{type(error).__name__}: {error}"[:200]) from error
            if not isinstance(found, Metadata):
                raise _no_metadata(path, type(found).__name__)
            self._metadata = found
        return self._metadata


def _no_metadata(path: str, found: str) -> DataError:
    return DataError(
        f"{path} is not the metadata of a checkpoint of torch.distributed.checkpoint",
        expected="what torch.distributed.checkpoint.save writes",
        found=found,
        cure="name the directory that was passed to it; or copy the checkpoint again from its source",
    )


class _Planner(DefaultLoadPlanner):
    """torch's planner, for one value of a checkpoint."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is no tensor."""
        name = read_item.dest_index.fqn
        self.state_dict[name] = load_bytes(value, name)


def _load(name: str, found: _Entry) -> Any:
    """Return a value of a checkpoint; a tensor is on the CPU.

    Raises:
        DirectoryError: a file cannot be read.
        CorruptionError: a file is damaged.
        DataError: a file has something else than the metadata say.
    """
    for box in found.boxes:
        with _reading(box.path), open(box.path, "rb") as file:
            file.seek(box.begin)
            check_archive(io.BytesIO(file.read(box.nbytes)), box.path)
    value = None if found.dtype is None else torch.empty(found.shape, dtype=found.dtype)
    if value is not None:
        _check_boxes(name, found)
    state: dict[str, Any] = {name: value}
    planner: LoadPlanner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader, metadata = found.reader, found.reader.read_metadata()
    with _reading(found.boxes[0].path if found.boxes else reader.folder):
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()
    return state[name]


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Make the errors of torch's reader ours."""
    try:
        yield
    except InfinityError:
        raise
    except OSError as error:
        raise failed("read", path, error) from error
    except Exception as error:  # torch raises errors of many kinds for a content that it does not take
        raise refused(path, error) from error


def _check_boxes(name: str, found: _Entry) -> None:
    """Raise `DataError` unless each element of a tensor is in one box: torch's planner does not look."""
    seen = torch.zeros(found.shape, dtype=torch.bool)
    for box in found.boxes:
        place = seen[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        if place.shape != box.sizes or bool(place.any()):
            break
        place.fill_(True)
    if not bool(seen.all()):
        where = found.boxes[0].path if found.boxes else found.reader.folder
        raise _incomplete(where, name, "each element once", "a hole or an overlap")


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


def _place_of(info: Mapping[str, Any], folder: str, there: set[str], path: str) -> _Box:
    name, begin = entry(info, "relative_path", str, path), entry(info, "offset", int, path)
    if info.get("transform_descriptors") or name not in there:
        raise DataError(
            f"{path} has values in a form or a place that cannot be read",
            expected="files beside it, not compressed",
            found=f"{info.get('transform_descriptors') or name!r}"[:200],
            cure="copy all files of the checkpoint, of every node; load and save a compressed one by torch, "
            "without extensions",
        )
    return _Box((), (), os.path.join(folder, name), begin, entry(info, "length", int, path))


def _entry_of(
    reader: _Reader, name: str, about: object, places: Mapping[tuple[int, ...], _Box], path: str
) -> _Entry:
    if isinstance(about, BytesStorageMetadata):
        if len(places) != 1:
            raise _incomplete(path, name, "one value", f"{len(places)}")
        return _Entry(reader, None, (), list(places.values()))
    if not isinstance(about, TensorStorageMetadata):
        raise _incomplete(path, name, "the metadata of a tensor or of another value", type(about).__name__)
    shape = shape_in(vars(about).get("size"), name, path)
    dtype = getattr(vars(about).get("properties"), "dtype", None)
    if dtype not in NAMES:
        raise _incomplete(path, name, "a dtype of torch that safetensors have", f"{dtype}"[:50])
    boxes = []
    for chunk in entry(vars(about), "chunks", list, path):
        offsets = shape_in(getattr(chunk, "offsets", None), name, path)
        sizes = shape_in(getattr(chunk, "sizes", None), name, path)
        if not len(offsets) == len(sizes) == len(shape):
            raise _incomplete(path, name, f"chunks of {shape}", f"one of {sizes}")
        if math.prod(sizes):  # a rank may have nothing of it
            if offsets not in places:
                raise _incomplete(path, name, f"a chunk at {offsets}", "none")
            boxes.append(places[offsets]._replace(offsets=offsets, sizes=sizes))
    return _Entry(reader, dtype, shape, boxes)


def _incomplete(path: str, name: str, expected: str, found: str) -> DataError:
    return DataError(
        f"{path} does not say where all of {name!r} is",
        expected=expected,
        found=found,
        cure="save the checkpoint again by a newer version of torch; or copy it again from its source",
    )


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
        yield {kind: [_whole(_load(full, saved.entries[full]))] for kind, full in names.items()}

    counts: dict[str, float] = {"steps": steps, "skipped_steps": 0}
    return Foreign(saved.path, counts, groups, parameters, values, {}, further, left_out)


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
    values = part(_load(name, saved.entries[name]), 0, _HEAD)
    return tuple(values.double().tolist())


def _equal(saved: _Saved, name: str, other: str) -> bool:
    return torch.equal(*(_load(each, saved.entries[each]) for each in (name, other)))


def _whole(tensor: torch.Tensor) -> Extent:
    return Extent(tensor, 0, tensor.numel())


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
        for each in parts[:-1]:
            inner = inner.setdefault(each, _Branch())
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
