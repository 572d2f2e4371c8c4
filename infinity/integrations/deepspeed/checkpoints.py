"""Checkpoints of DeepSpeed as ones of `infinity.save`: ZeRO 1, 2 and 3, and universal ones.

DeepSpeed is not needed, and no model is built.

[Note: ZeRO's files] A rank's file has the masters and the moments of its part of each param group, or at
stage 3 of each sub-group, as flat tensors. What lies in them is told by ``param_shapes`` in the model's file:
names and shapes, in their order. At stages 1 and 2 the parameters of a group lie one after the other, perhaps
with ``param_alignment_paddings`` between them, and that is cut into equal parts. Padding at the end fills
the last parts: moments have it, and masters have it only where BF16_Optimizer wrote them. At stage 3 each
parameter is cut into equal parts by itself, with padding at its end.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch

from infinity.api.checkpoint import Progress
from infinity.core.errors import DataError
from infinity.integrations.foreign import (
    MOMENTS,
    Extent,
    Foreign,
    ForeignParameter,
    Values,
    count_in,
    entry,
    entry_of,
    imported,
    listing,
    number_in,
    options_of_adam,
    other_optimizer,
    plain,
    scheduler_beside,
    shape_in,
)
from infinity.integrations.torch_file import Record, is_dense, load_saved, part
from infinity.storage.folder import failed

_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})(?:_\d+)?_model_states\.pt")
_OPTIMIZER: Final = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})(?:_\d+)?_optim_states\.pt"
)
#: Files of other kinds of parallelism, and what to call it.
_PARALLEL: Final = (
    (re.compile(r".*expert.*_model_states\.pt|expp_rank_.*"), "expert parallelism"),
    (re.compile(r"layer_\d+.*model_states\.pt"), "pipeline parallelism"),
)
#: Where DeepSpeed copies what it had on NVMe.
_SWAPPED: Final = "offloaded_tensors/*/*.swp"
_UNIVERSAL: Final = "zero"  # the directory of a universal checkpoint with one directory for each parameter
#: Entries of the model's file that are not the user's.
_OWN: Final = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("universal_checkpoint_info", "data_sampler", "random_ltd"),
    )
)
_STAGE_3: Final = 3
_HEAD: Final = 64  # elements that tell most tensors from others
_MORE_PARALLEL: Final = (
    "convert it by the program that made it to a model without that: infinity imports checkpoints of data "
    "parallel runs"
)


def import_deepspeed(directory: str, path: str, progress: Progress | None = None) -> tuple[str, Foreign]:
    """Import the checkpoint in `directory`, which is what was passed to `save_checkpoint`, a tag of it, or a
    universal checkpoint: see `imported`."""

    def read(directory: str) -> tuple[Foreign, Sequence[str]]:
        files = _Files(directory)
        return _foreign(files), files.around

    return imported("DeepSpeed", read, directory, path, progress)


class _Files:
    """The files of a checkpoint.

    Attributes:
        path: the directory with the files.
        around: this directory, and the one that has it.
        model: the value of the first rank's model file, and `model_path`.
        universal: whether it is a universal checkpoint.
    """

    def __init__(self, directory: str) -> None:
        self._loaded: dict[str, Any] = {}
        self.path = _tag_of(directory)
        self.around = (self.path, os.path.dirname(os.path.abspath(self.path)))
        names = listing(self.path, "DeepSpeed")
        self.universal = _UNIVERSAL in names
        if any(glob.iglob(os.path.join(glob.escape(self.path), _SWAPPED))):
            raise DataError(
                f"{self.path} is of a run that kept its state on NVMe",
                expected="optimizer state and parameters in *_states.pt",
                found=f"files of DeepSpeed's own form: {_SWAPPED}",
                cure="DeepSpeed does not convert these files either. In its run, save_16bit_model writes the "
                "weights, from which a new run can begin; or train on with offload to the CPU, and save",
            )
        for name in names:
            for pattern, kind in _PARALLEL:
                if pattern.fullmatch(name):
                    raise _of_parallelism(self.path, kind, name)
        models = {name: m for name in names if (m := _MODEL.fullmatch(name))}
        optimizers = {name: m for name in names if (m := _OPTIMIZER.fullmatch(name))}
        for name, match in [*models.items(), *optimizers.items()]:
            if int(match[match.lastindex or 0]):
                raise _of_parallelism(self.path, "tensor or pipeline parallelism", name)
        #: By rank; at stages 1 and 2 there is one, for all ranks.
        self.models = {int(m[1] or 0): os.path.join(self.path, name) for name, m in models.items()}
        self.model_of_each = any(m[1] for m in models.values())
        self.optimizers = {int(m[2]): os.path.join(self.path, name) for name, m in optimizers.items()}
        if not models or len(self.models) != len(models) or len(self.optimizers) != len(optimizers):
            found = ", ".join(names[:8]) or "nothing"
            raise DataError(
                f"{self.path} is not one checkpoint of DeepSpeed",
                expected="one *_model_states.pt, or one of each rank, and one *_optim_states.pt of each rank",
                found=f"{len(models)} and {len(optimizers)} of them: {found}",
                cure="name the directory that was passed to save_checkpoint, or a tag below it such as "
                "global_step100; remove files of other runs from it",
            )
        self.model_path = self.models.get(0, min(self.models.values()))
        self.model = self.open(self.model_path)

    def open(self, path: str) -> Any:
        """Return the value of a file."""
        if path not in self._loaded:
            self._loaded[path] = load_saved(path)
        return self._loaded[path]


def _tag_of(directory: str) -> str:
    """Return the directory with the files: `directory`, or the one below it that its `latest` names."""
    for name in ("latest", "latest_universal"):
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                tag = file.read(4096).strip()
        except OSError as error:
            raise failed("read", path, error) from error
        if not tag or os.path.basename(tag) != tag or tag == ".." or not {"\0", "\ufffd"}.isdisjoint(tag):
            raise DataError(
                f"{path} names no directory",
                expected="the name of a directory beside it",
                found=repr(tag[:100]),
                cure="name the directory with the *_model_states.pt files",
            )
        return os.path.join(directory, tag)
    return directory


def _of_parallelism(path: str, kind: str, found: str) -> Exception:
    return DataError(
        f"{path} is of a run with {kind}",
        expected="a checkpoint of a data parallel run",
        found=found,
        cure=_MORE_PARALLEL,
    )


# -- what a checkpoint says ----------------------------------------------------------------------


class _Sources(NamedTuple):
    """What is known of the trained parameters: of each group of `param_shapes` the step count and the moments
    that there are, and what lends values."""

    steps: list[int | None]
    moments: Callable[[int, str], tuple[str, ...]]
    values: Callable[[str], AbstractContextManager[Values]]


def _foreign(files: _Files) -> Foreign:
    """Return what a checkpoint has. Everything that is not a value of a parameter is checked here."""
    model, path = files.model, files.model_path
    shapes = _shapes_of(files)
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):  # no file of these has a name of its own
        raise _of_parallelism(path, "expert parallelism", "AutoEP")
    if files.universal:
        saved = files.open(os.path.join(files.path, _UNIVERSAL, "optimizer_state.pt"))
        states = [saved]
        groups = entry(saved, "param_groups", list, path)
        stage = _stage_of(saved)
        sources = _universal(files, saved, shapes)
    else:
        states = _states_of(files)
        stage = _stage_of(states[0])
        base = [_base_of(state, stage, files.path) for state in states]
        groups = entry(base[0], "param_groups", list, path)
        sources = _partitions(files, shapes, stage, states, base)
    steps, skipped = (entry(model, key, int, path) for key in ("global_steps", "skipped_steps"))
    made, of_shapes = _groups_of(groups, len(shapes), model.get("ds_config"), path)
    updates = max(0, steps - skipped)
    parameters: dict[str, ForeignParameter] = {}
    for index, names in enumerate(shapes):
        counted = sources.steps[index]
        if counted is None:
            counted = count_in(groups[of_shapes[index]].get("step"), updates)
        for name, shape in names.items():
            kinds = sources.moments(index, name)
            parameters[name] = ForeignParameter(shape, step=counted if kinds else 0, moments=kinds)
            made[of_shapes[index]][1].append(name)
    frozen = _frozen_of(files, stage, parameters.keys())
    module = entry(model, "module", dict, path)
    for name, extents in frozen.items():
        dtype = extents[0].tensor.dtype
        parameters[name] = ForeignParameter(_frozen_shape(files, name), dtype, trainable=False)
    for tied, first in (model.get("shared_params") or {}).items():
        if first in parameters and isinstance(tied, str):
            parameters[first].tied.append(tied)
    buffers = {
        name: tensor.detach().clone()
        for name in model.get("buffer_names") or ()
        if isinstance(name, str) and is_dense(tensor := module.get(name))
    }
    left_out: list[str] = []
    rates = [options["lr"] for options, _ in made]
    further = plain({k: v for k, v in model.items() if k not in _OWN}, left_out, "the model's file")

    @contextlib.contextmanager
    def values(name: str) -> Iterator[Values]:
        if name in frozen:
            yield {"parameters": frozen[name]}
            return
        with sources.values(name) as found:
            weight = module.get(name)
            if is_dense(weight) and weight.numel() == math.prod(parameters[name].shape):
                found = {**found, "rounded": [Extent(weight, 0, weight.numel())]}
            yield found

    return Foreign(
        files.path,
        {"steps": updates, "skipped_steps": skipped, **_loss_scale_of(states[0])},
        made,
        parameters,
        values,
        buffers,
        {"deepspeed": further, "scheduler": _scheduler_of(files, rates, updates, left_out)},
        left_out,
    )


def _shapes_of(files: _Files) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the trained parameters by name, in the order of ZeRO's flat tensors."""
    path = files.model_path
    there = files.model.get("param_shapes") if isinstance(files.model, dict) else None
    if isinstance(files.model, dict) and there is None:
        raise DataError(
            f"{path} is of a run without ZeRO, or without an optimizer",
            expected="a run with ZeRO at stage 1, 2 or 3",
            found="no param_shapes",
            cure="load it by DeepSpeed into a run with ZeRO, and save that; or load the weights into the "
            "model before `wrap`, and begin with new moments",
        )
    shapes: list[dict[str, tuple[int, ...]]] = []
    names: set[str] = set()
    for group in entry(files.model, "param_shapes", list, path):
        made = {}
        for name, shape in (group if isinstance(group, dict) else {None: None}).items():
            if not isinstance(name, str) or name in names:
                raise DataError(
                    f"{path} has param_shapes that are not of one model",
                    expected="each parameter once, by its name",
                    found=repr(name)[:100],
                    cure="save the checkpoint again by one version of DeepSpeed",
                )
            names.add(name)
            made[name] = shape_in(shape, name, path)
        shapes.append(made)
    return shapes


def _stage_of(state: Any) -> int:
    """Return ZeRO's stage; BF16_Optimizer, which is stage 1, does not say it."""
    stage = entry_of(state, "zero_stage")
    return count_in(stage.args[0] if isinstance(stage, Record) and stage.args else stage, 1)


def _states_of(files: _Files) -> list[Any]:
    """Return the optimizer's state of each rank."""
    _check_models(files)
    states = [
        entry(files.open(path), "optimizer_state_dict", dict, path)
        for _, path in sorted(files.optimizers.items())
    ]
    if not states:
        raise DataError(
            f"{files.path} has no state of an optimizer",
            expected="*_optim_states.pt of each rank",
            found="none",
            cure="copy all files of the checkpoint, from every node",
        )
    count = states[0].get("partition_count")
    counts = count if isinstance(count, list) else [count]
    if counts[:1] != [len(states)] or sorted(files.optimizers) != [*range(len(states))]:
        raise DataError(
            f"{files.path} does not have the files of all ranks",
            expected=f"*_optim_states.pt of {str(counts[:1])[1:-1]} ranks",
            found=f"{len(states)}, of the ranks {', '.join(map(str, sorted(files.optimizers)))}"[:300],
            cure="copy all files of the checkpoint, from every node; remove files of other runs from it",
        )
    return states


def _check_models(files: _Files) -> None:
    """Raise `DataError` unless the files of models that each rank has, at stage 3, are those of one save."""
    if not files.model_of_each:
        return
    if lacking := sorted(files.optimizers.keys() - files.models.keys()):
        raise DataError(
            f"{files.path} does not have the files of all ranks",
            expected="*_model_states.pt of each rank",
            found=f"none of the ranks {', '.join(map(str, lacking))}"[:300],
            cure="copy all files of the checkpoint, from every node",
        )
    steps: dict[int, int] = {}
    for rank, path in sorted(files.models.items()):
        steps.setdefault(entry(files.open(path), "global_steps", int, path), rank)
    if len(steps) > 1:
        ranks = ", ".join(f"step {step} of rank {rank}" for step, rank in steps.items())
        raise _of_several_saves(files.path, ranks[:300])


def _base_of(state: Any, stage: int, path: str) -> dict[str, Any]:
    """Return what the optimizer itself saved."""
    key = "optimizer_state_dict" if stage == _STAGE_3 else "base_optimizer_state"
    if isinstance(state.get(key), list):
        raise DataError(
            f"{path} was saved with elastic_checkpoint",
            expected='"zero_optimization": {"elastic_checkpoint": false}, which is the default',
            found="elastic_checkpoint",
            cure="load it by DeepSpeed, and save it without that setting",
        )
    return entry(state, key, dict, path)


def _groups_of(
    groups: list[Any], count: int, settings: Any, path: str
) -> tuple[list[tuple[dict[str, Any], list[str]]], list[int]]:
    """Return the options of each param group, without names yet, and the group of each of the `count` groups
    of `param_shapes`."""
    optimizer = entry_of(settings, "optimizer")
    kind = entry_of(optimizer, "type")
    if kind is not None and (not isinstance(kind, str) or kind.lower() not in ("adam", "adamw")):
        raise other_optimizer(path, str(kind)[:50])
    told = entry_of(entry_of(optimizer, "params"), "adam_w_mode")
    # DeepSpeed's "Adam" is AdamW unless it is told not to be, and its "AdamW" always is.
    decoupled = None if kind is None else kind.lower() == "adamw" or told is not False
    made: list[tuple[dict[str, Any], list[str]]] = []
    places: dict[int, int] = {}
    for index, group in enumerate(groups):
        made.append((options_of_adam(group, path, decoupled), []))
        places |= {number: index for number in group.get("params") or () if type(number) is int}
    if sorted(places) != [*range(count)]:
        raise DataError(
            f"{path} has param groups that do not fit its param_shapes",
            expected=f"param groups with {count} flat tensors",
            found=f"{len(places)}, in {len(groups)} groups",
            cure="save the checkpoint again by one version of DeepSpeed",
        )
    return made, [places[index] for index in range(count)]


def _loss_scale_of(state: Any) -> dict[str, float]:
    """Return the loss scale of a run in fp16, and the steps since it changed."""
    scaler = entry_of(state, "loss_scaler")

    def attribute(name: str) -> float | None:
        if isinstance(scaler, Record):
            return number_in(scaler.attribute(name))
        return number_in(getattr(scaler, name, None))  # torch makes an object of a class that was allowed

    scale = attribute("cur_scale")
    if not scale or scale == 1.0 or math.frexp(scale)[0] != 0.5:
        return {}
    now, last, window = (attribute(key) for key in ("cur_iter", "last_overflow_iter", "scale_window"))
    good = 0.0
    if now is not None and last is not None and window is not None and window >= 1:
        good = max(0.0, now - last - 1) % window
    return {"loss_scale": scale, "good_steps": int(good)}


def _scheduler_of(files: _Files, rates: list[float], updates: int, left_out: list[str]) -> dict[str, Any]:
    """Return the state of a scheduler: that of torch's, or for one of DeepSpeed's the state that a LambdaLR
    takes: the next learning rate is that of the step which comes next. `rates`: of the param groups."""
    saved = plain(files.model.get("lr_scheduler"), left_out, "lr_scheduler")
    of_torch = saved if saved is not None else scheduler_beside(left_out, *files.around)
    if of_torch is not None and "last_epoch" in of_torch:
        return of_torch
    done = count_in(entry_of(saved, "last_batch_iteration"), updates - 1) + 1
    at = {"last_epoch": done, "_step_count": done + 1, "_last_lr": rates}
    return {**at, "lr_lambdas": [None] * len(rates)}


# -- frozen parameters -----------------------------------------------------------------------------


def _frozen_of(files: _Files, stage: int, trained: Any) -> dict[str, list[Extent]]:
    """Return the values of frozen parameters: at stage 3 in fragments, one of each rank."""
    model = files.model
    tied = model.get("shared_params") or {}
    others = {*trained, *tied, *(name for name in model.get("buffer_names") or () if isinstance(name, str))}
    if stage != _STAGE_3:
        return {
            name: [Extent(tensor, 0, tensor.numel())]
            for name, tensor in model["module"].items()
            if isinstance(name, str) and is_dense(tensor) and name not in others
        }
    shapes = model.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    if sorted(files.models) != [*range(len(files.models))]:
        raise DataError(
            f"{files.path} does not have the files of all ranks",
            expected="*_model_states.pt of each rank: there are frozen parameters in them",
            found=f"those of the ranks {', '.join(map(str, sorted(files.models)))}"[:300],
            cure="copy all files of the checkpoint, from every node",
        )
    found = {}
    for name in shapes:
        numel, at, extents = math.prod(_frozen_shape(files, name)), 0, []
        for _, path in sorted(files.models.items()):
            fragments = entry(files.open(path), "frozen_param_fragments", dict, path)
            fragment = entry(fragments, name, torch.Tensor, path)
            extents.append(Extent(fragment, 0, max(0, min(fragment.numel(), numel - at))))
            at += fragment.numel()
        if not numel <= at < numel + len(extents) or len({e.tensor.numel() for e in extents}) > 1:
            raise _other_layout(files.path, f"{name!r}, which is frozen", f"{numel} elements", f"{at}")
        found[name] = extents
    return found


def _frozen_shape(files: _Files, name: str) -> tuple[int, ...]:
    shapes = files.model.get("frozen_param_shapes")
    if isinstance(shapes, dict) and name in shapes:
        return shape_in(shapes[name], name, files.model_path)
    return tuple(entry(files.model["module"], name, torch.Tensor, files.model_path).shape)


# -- ZeRO's partitions -----------------------------------------------------------------------------


def _partitions(
    files: _Files,
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    stage: int,
    states: Sequence[Any],
    base: Sequence[Any],
) -> _Sources:
    """Return where the values of ZeRO's files are: [Note: ZeRO's files]."""
    key = "fp32_flat_groups" if stage == _STAGE_3 else "single_partition_of_fp32_groups"
    masters = [entry(state, key, list, files.path) for state in states]
    found: dict[str, dict[str, list[Extent]]] = {}
    steps: list[int | None] = []
    kinds: list[tuple[str, ...]] = []
    flats_of: dict[int, list[torch.Tensor]] = {}
    for index, names in enumerate(shapes):
        saved = [entry(b, "state", dict, files.path).get(index, {}) for b in base]
        there = {name for state in saved for name in state if isinstance(name, str)}
        if others := there - {*MOMENTS, "step"}:
            raise other_optimizer(files.path, f"{', '.join(sorted(others))[:100]} of a param group")
        kinds.append(MOMENTS if there & {*MOMENTS} else ())
        counts = {count_in(state["step"], 0) for state in saved if "step" in state}
        if len(counts) > 1:
            told = ", ".join(map(str, sorted(counts)))
            raise _of_several_saves(files.path, f"steps {told} of one param group")
        steps.append(counts.pop() if counts else None)
        flats = {"parameters": [_flat(of_rank, index, files.path) for of_rank in masters]}
        flats |= {kind: [_flat(state, kind, files.path) for state in saved] for kind in kinds[-1]}
        for rank, of_rank in enumerate(zip(*flats.values(), strict=True)):
            flats_of.setdefault(rank, []).extend(of_rank)
        if stage == _STAGE_3:
            _cut_each(files.path, names, flats, found)
        else:
            _cut_group(files.path, index, names, states, flats, found)
    if any(kinds):
        _check_apart(files.path, flats_of, found)
    return _Sources(steps, lambda index, _: kinds[index], lambda name: contextlib.nullcontext(found[name]))


def _check_apart(
    path: str,
    flats_of: Mapping[int, Sequence[torch.Tensor]],
    found: Mapping[str, Mapping[str, Sequence[Extent]]],
) -> None:
    """Raise `DataError` if two ranks have the same values: one's file was copied over the other's. At stage 3
    nothing else tells. Ranks that have nothing but padding may be alike."""
    used = {id(e.tensor) for kinds in found.values() for e in kinds["parameters"] if e.numel}
    known: dict[tuple[bytes, ...], list[int]] = {}
    for rank, flats in flats_of.items():
        if used.isdisjoint(map(id, flats)):
            continue
        head = tuple(part(flat, 0, _HEAD).double().numpy().tobytes() for flat in flats)
        for other in known.setdefault(head, []):
            if all(map(torch.equal, flats, flats_of[other])):
                found_twice = f"the same masters and moments in the files of ranks {other}, {rank}"
                raise _of_several_saves(path, found_twice)
        known[head].append(rank)


def _of_several_saves(path: str, found: str) -> DataError:
    return DataError(
        f"{path} has files that are not of one save",
        expected="files of one save, each of its own rank",
        found=found,
        cure="copy all files of the checkpoint again, from every node, into an empty directory",
    )


def _flat(of_rank: Any, key: Any, path: str) -> torch.Tensor:
    if isinstance(of_rank, list):
        of_rank = dict(enumerate(of_rank))
    return entry(of_rank, key, torch.Tensor, path)


def _cut_each(
    path: str,
    names: Mapping[str, tuple[int, ...]],
    flats: Mapping[str, Sequence[torch.Tensor]],
    found: dict[str, dict[str, list[Extent]]],
) -> None:
    """Find the parameters of a sub-group of stage 3, each of which is cut by itself."""
    offset = 0
    for name, shape in names.items():
        numel = math.prod(shape)
        part = -(-numel // len(flats["parameters"]))
        found[name] = {
            kind: [Extent(flat, offset, max(0, min(part, numel - r * part))) for r, flat in enumerate(of)]
            for kind, of in flats.items()
        }
        offset += part
    for kind, of in flats.items():
        for rank, flat in enumerate(of):
            if flat.numel() != offset:
                raise _other_layout(path, f"{kind} of rank {rank}", f"{offset} elements", f"{flat.numel()}")


def _cut_group(
    path: str,
    index: int,
    names: Mapping[str, tuple[int, ...]],
    states: Sequence[Any],
    flats: Mapping[str, Sequence[torch.Tensor]],
    found: dict[str, dict[str, list[Extent]]],
) -> None:
    """Find the parameters of a param group of stage 1 or 2, which is cut as a whole."""
    between = states[0].get("param_alignment_paddings")
    gaps = entry(dict(enumerate(between)), index, list, path) if isinstance(between, list) else []
    gaps = [count_in(gap, 0) for gap in gaps] or [0] * len(names)
    behind = [_padding(state, index, path) for state in states]
    sizes = [math.prod(shape) for shape in names.values()]
    used = sum(sizes) + sum(gaps)
    total = used + sum(behind)
    size = total // len(states)
    if len(gaps) != len(names) or total % len(states):
        raise _other_layout(path, f"param group {index}", f"{len(names)} paddings", f"{len(gaps)}")
    for kind, of in flats.items():
        for rank, flat in enumerate(of):
            lean = size - behind[rank]  # BF16_Optimizer saves it with the padding
            if flat.numel() != size and (kind != "parameters" or flat.numel() != max(0, lean)):
                raise _other_layout(path, f"{kind} of rank {rank}", f"{size} elements", f"{flat.numel()}")
    offset = 0
    for name, numel, gap in zip(names, sizes, gaps, strict=True):
        found[name] = {kind: _cut(of, size, offset, numel) for kind, of in flats.items()}
        offset += numel + gap


def _padding(state: Any, index: int, path: str) -> int:
    paddings = entry(state, "group_paddings", list, path)
    return entry(dict(enumerate(paddings)), index, int, path)


def _cut(flats: Sequence[torch.Tensor], size: int, offset: int, numel: int) -> list[Extent]:
    """Return where the elements from `offset` on are in parts of `size`."""
    extents = []
    for rank, flat in enumerate(flats):
        low, high = max(offset, rank * size), min(offset + numel, (rank + 1) * size)
        if low < high:
            extents.append(Extent(flat, low - rank * size, high - low))
    return extents


def _other_layout(path: str, whose: str, expected: str, found: str) -> Exception:
    return DataError(
        f"{path} has another layout than its param_shapes say",
        expected=f"{expected} in {whose}",
        found=found,
        cure="load it by the version of DeepSpeed that saved it, and save it by a newer one, without MiCS "
        "and without state on NVMe",
    )


# -- universal checkpoints -------------------------------------------------------------------------


def _universal(files: _Files, saved: Any, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> _Sources:
    """Return where the values of a universal checkpoint are: each in a file of its own."""
    there = {name: shape for group in shapes for name, shape in group.items()}
    root = os.path.join(files.path, _UNIVERSAL)
    listing(root, "DeepSpeed")

    def has(name: str, stem: str) -> bool:
        return os.path.exists(os.path.join(root, name, f"{stem}.pt"))

    kinds = ("fp32", *(kind for kind in MOMENTS if any(has(name, kind) for name in there)))
    if absent := [f"{name}/{stem}.pt" for name in there for stem in kinds if not has(name, stem)]:
        raise DataError(
            f"{root} does not have all values",
            expected=f"a directory for each trained parameter, with {', '.join(f'{k}.pt' for k in kinds)}",
            found=f"no {', '.join(absent[:8])}",
            cure="copy all files of the checkpoint, or convert it again",
        )

    def moments(index: int, name: str) -> tuple[str, ...]:
        return MOMENTS if {*kinds} >= {*MOMENTS} else ()

    @contextlib.contextmanager
    def values(name: str) -> Iterator[Values]:
        found = {}
        for stem in ("parameters", *moments(0, name)):
            path = os.path.join(root, name, "fp32.pt" if stem == "parameters" else f"{stem}.pt")
            value = load_saved(path)
            tensor = value if is_dense(value) else entry(value, "param", torch.Tensor, path)
            if tensor.numel() != math.prod(there[name]):
                expected = f"{math.prod(there[name])} elements"
                raise _other_layout(files.path, f"{stem} of {name!r}", expected, f"{tensor.numel()}")
            found[stem] = [Extent(tensor, 0, tensor.numel())]
        yield found

    state = entry_of(entry_of(saved, "optimizer_state_dict"), "state")
    steps = []
    for index, group in enumerate(shapes):  # at stage 3 in the optimizer's state, else beside the moments
        step = entry_of(entry_of(state, index), "step")
        found = [_step_in(os.path.join(root, name)) for name in list(group)[:1]]
        steps.append(count_in(step, 0) if step is not None else next(iter(found), None))
    return _Sources(steps, moments, values)


def _step_in(directory: str) -> int | None:
    path = os.path.join(directory, "step.pt")
    if not os.path.exists(path):
        return None
    return count_in(load_saved(path), 0)
