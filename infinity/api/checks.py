"""What `wrap` checks and asks before it touches anything."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from infinity.core.config import Config
from infinity.core.errors import DirectoryError, WrapError
from infinity.core.sizes import Tier
from infinity.hardware.cores import adam_threads, usable_cores
from infinity.hardware.device import Device
from infinity.hardware.probe import available_host_memory, nameless_file
from infinity.hardware.tuned import bandwidths
from infinity.params.discover import UnitMembers
from infinity.params.param import sharded_of, why_not
from infinity.planning.footprint import Budget
from infinity.planning.machine import Drive, Machine, budget_of
from infinity.planning.partition import COPY_PARTS, GRADIENT_PARTS, ChunkPlan, ParamSpec
from infinity.storage.layout import ChunkSpec, PartSpec
from infinity.storage.leftovers import dead_nbytes

from .init import origin, span_elements, temporary_directory


def machine_here(config: Config, device: Device, *, unnamed: bool = False) -> Machine:
    """Return what this machine has for a run of `config`. `unnamed`: its one directory only stands for one.

    Raises:
        DirectoryError: an NVMe directory is missing, no directory, or closed to us.
    """
    directories = config.directories
    if unnamed:
        drives = [Drive(directory=d, free=0, system=d) for d in directories]
    else:
        weights = (bandwidths(directories) if len(directories) > 1 else None) or [1.0] * len(directories)
        drives = [drive_here(d, w) for d, w in zip(directories, weights, strict=True)]
    return Machine(
        host_memory=available_host_memory(),
        device_memory=device.memory_free() if device.staged else None,
        drives=tuple(drives),
        temporary=drive_here(temporary_directory()) if not drives or unnamed else None,
    )


def drive_here(directory: str, weight: float = 1.0) -> Drive:
    """Return what is below a directory of this machine.

    Raises:
        DirectoryError: it is missing, no directory, or closed to us.
    """
    try:
        system, found = os.statvfs(directory), os.stat(directory)
        os.close(nameless_file(directory)[0])
    except OSError as error:
        missing = error.errno == errno.ENOENT and not os.path.lexists(directory)
        raise DirectoryError(
            f"the directory {directory!r} cannot be used",
            errno=error.errno,
            path=directory,
            expected="a directory that this user may write to",
            found=os.strerror(error.errno or 0),
            cure=f"mkdir -p {shlex.quote(directory)}"
            if missing
            else "name a directory that this user may write to",
        ) from error
    # A file system that does not know its size (ramfs, some network ones) does not know what is free.
    # What killed runs have left there is free: a run removes it before it needs the space.
    free = system.f_bavail * system.f_frsize + dead_nbytes(directory) if system.f_blocks else None
    return Drive(directory=directory, free=free, system=found.st_dev, weight=weight)


def budget_here(config: Config, device: Device) -> Budget:
    """Return the budgets in bytes; what is not named is nine tenths of what is free."""
    return budget_of(config, available_host_memory(), device.memory_free() if device.staged else None)


def threads_of(config: Config, *, staged: bool) -> int:
    """Return the threads of the CPU's Adam: as told, or as [Note: who gets the cores] says."""
    if config.threads is not None:
        return config.threads
    on_nvme = any(place.get(Tier.NVME) for place in config.placements.values())
    rings = len(config.directories) if on_nvme else 0
    return adam_threads(usable_cores().mine, staged=staged, rings=rings)


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the group of each parameter, by its id; raise `WrapError` for what cannot be wrapped."""
    if not isinstance(model, nn.Module):
        raise WrapError(
            "wrap takes a model",
            expected="an nn.Module",
            found=type(model).__name__,
            cure="wrap(model, optimizer, config)",
        )
    for name, module in model.named_modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            inner = ".".join(("model", *filter(None, [name]), "module"))
            raise WrapError(
                f"the model is wrapped in {type(module).__name__}",
                expected="a plain model: this version runs on one device",
                found=f"{type(module).__name__} in {name or 'the root'!r}",
                cure=f"hand over the model as it was built, without {type(module).__name__}"
                + ("" if type(module).__name__.startswith("Fully") else f": {inner}"),
            )
    groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    named = list(model.named_parameters(remove_duplicate=True))
    for name, param in named:
        if sharded_of(param) is not None:
            raise WrapError(
                f"the parameter {name!r} belongs to a wrapped model already",
                expected="a model that is wrapped once",
                found="a second wrap",
                cure="keep what the first `wrap` returned; or make it a plain model again first: "
                "`infinity.unwrap(model)`",
            )
        if param.grad is not None:
            raise WrapError(
                f"the parameter {name!r} has a gradient already",
                expected="parameters without gradients",
                found="one of a backward before `wrap`",
                cure="call `optimizer.step()`, if it is to count, and `optimizer.zero_grad()` before `wrap`",
            )
        if nn.parameter.is_lazy(param):
            raise WrapError(
                f"the parameter {name!r} has no shape yet",
                expected="a model whose lazy modules have seen an input",
                found=type(param).__name__,
                cure="call the model once on a batch, `with torch.no_grad(): model(batch)`, before `wrap`",
            )
        if param.is_meta:
            raise WrapError(
                f"the parameter {name!r} has no values",
                expected="a model with values",
                found="a parameter on the meta device",
                cure="build the model inside `with infinity.init(config):`",
            )
        if type(param.data) is not torch.Tensor:
            raise WrapError(
                f"the parameter {name!r} is not a plain tensor",
                expected="parameters that are plain tensors",
                found=f"{type(param.data).__name__}, as FSDP's fully_shard or quantization makes it",
                cure="hand the model to `wrap` as it was built, before anything else shards or quantizes it",
            )
        if reason := why_not(param):
            raise WrapError(
                f"the parameter {name!r} is of a class that cannot be offloaded",
                expected="nn.Parameter, or a subclass that may be derived from",
                found=f"{type(param).__name__}: {reason}",
                cure="make it an nn.Parameter, before the optimizer is built: nn.Parameter(p.detach())",
            )
        if not param.is_floating_point() or param.layout is not torch.strided:
            raise WrapError(
                f"the parameter {name!r} cannot be offloaded",
                expected="dense floating-point parameters",
                found=f"{param.dtype}, {param.layout}",
                cure="make it a buffer",
            )
        if param.requires_grad and id(param) not in groups:
            raise WrapError(
                f"the parameter {name!r} requires a gradient but the optimizer does not have it",
                expected="every trainable parameter in the optimizer",
                found="a trainable parameter outside it",
                cure=f"pass it to the optimizer, or freeze it: {name}.requires_grad_(False)",
            )
    known = {id(p) for _, p in named}
    for g, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise WrapError(
                    f"param group {g} has a parameter that the model does not have",
                    expected="an optimizer over the model's parameters",
                    found=f"a parameter of shape {tuple(param.shape)}",
                    cure="build the optimizer from model.parameters()",
                )
    if not named:
        raise WrapError(
            "the model has no parameters",
            expected="at least one",
            found="none",
            cure="wrap a model that has some",
        )
    buffers = [(n, b) for n, b in model.named_buffers() if id(b) not in known and _has_address(b)]
    _check_apart(named, buffers)
    return groups


def _has_address(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _check_apart(named: list[tuple[str, nn.Parameter]], buffers: list[tuple[str, torch.Tensor]]) -> None:
    """Raise `WrapError` if a parameter shares memory with another one, or with a buffer: each is to have a
    place of its own."""
    spans: dict[object, list[tuple[int, int, str, torch.Tensor]]] = {}
    names = {name for name, _ in buffers}
    for name, tensor in (*named, *buffers):
        data = tensor.detach()
        nbytes = span_elements(data) * data.element_size()
        if nbytes:
            storage, offset = origin(data)
            for where, begin in ((data.device, data.data_ptr()), (storage, offset)):
                spans.setdefault(where, []).append((begin, begin + nbytes, name, data))
    for row in spans.values():
        open_: list[tuple[int, int, str, torch.Tensor]] = []
        for span in sorted(row, key=lambda span: span[0]):
            open_ = [other for other in open_ if other[1] > span[0]]
            for other in open_:
                kept = [s[2] for s in (other, span) if s[2] in names]
                if len(kept) < 2 and _overlap(other, span):
                    _refuse(other, span, kept)
            open_.append(span)


def _overlap(first: tuple[int, int, str, torch.Tensor], second: tuple[int, int, str, torch.Tensor]) -> bool:
    """Return whether two spans of bytes, of which one begins in the other, have an element in common."""
    if all(span_elements(data) <= data.numel() for *_, data in (first, second)):
        return True  # there are no gaps
    # Such as columns of one matrix: mark the bytes of one, and look for them in the other.
    low = first[0]
    mask = torch.zeros(max(first[1], second[1]) - low, dtype=torch.bool, device="cpu")
    marked, looked_at = (
        mask.as_strided(
            (*data.shape, data.element_size()),
            (*(s * data.element_size() for s in data.stride()), 1),
            begin - low,
        )
        for begin, _, _, data in (first, second)
    )
    marked.fill_(True)
    return bool(looked_at.any())


def _refuse(
    first: tuple[int, int, str, torch.Tensor], second: tuple[int, int, str, torch.Tensor], buffers: list[str]
) -> None:
    (begin, end, name, data), (other_begin, other_end, other, other_data) = first, second
    if buffers:
        param = other if name in buffers else name
        raise WrapError(
            f"the buffer {buffers[0]!r} shares memory with the parameter {param!r}",
            expected="buffers with memory of their own",
            found=f"{min(end, other_end) - other_begin} bytes in which they overlap: the buffer would keep "
            "the values of now",
            cure=f"leave out the buffer and have its module's forward use the parameter, detached: "
            f"`model.{param}.detach()`; or, if these values are to stay, give it a copy: "
            "register_buffer(name, p.detach().clone())",
        )
    same = begin == other_begin and data.shape == other_data.shape and data.dtype == other_data.dtype
    raise WrapError(
        f"the parameters {name!r} and {other!r} share memory, but are not one Parameter",
        expected="parameters with memory of their own; shared values as one Parameter in both places",
        found=f"{min(end, other_end) - other_begin} bytes in which they overlap: the two would be separated",
        cure=(
            f"make them one Parameter (`b.weight = a.weight`, with {name!r} for a.weight), or "
            if same
            else ""
        )
        + f"give {other!r} values of its own: nn.Parameter(p.detach().clone())",
    )


def param_specs(
    model: nn.Module, members: Iterable[UnitMembers], groups: Mapping[int, int], dtype: torch.dtype
) -> list[list[ParamSpec]]:
    """Return the spec of each unit's parameters."""
    # BatchNorm keeps running statistics with its weights: torch's own autocast leaves them fp32.
    keep = {
        id(p)
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        for p in m.parameters(recurse=False)
    }
    return [
        [
            ParamSpec(
                name,
                tuple(p.shape),
                torch.float32 if id(p) in keep else dtype,
                p.requires_grad,
                groups.get(id(p), -1) if p.requires_grad else -1,
            )
            for name, p in member.params.items()
        ]
        for member in members
    ]


def chunk_specs(plans: Iterable[ChunkPlan]) -> list[ChunkSpec]:
    """Return the parts of each chunk that the store keeps: what is not on the device."""
    specs: list[ChunkSpec] = []
    for plan in plans:
        parts = {}
        if plan.copy_tier is not Tier.DEVICE:
            versioned = plan.state_tier is not None  # frozen copies are written once
            parts[COPY_PARTS[0]] = PartSpec((plan.copy_nbytes,), plan.copy_tier, versioned, "copy")
        if plan.spare_tier is not None:
            parts[COPY_PARTS[1]] = PartSpec((plan.copy_nbytes,), plan.spare_tier, True, "spare")
        if plan.state_tier not in (None, Tier.DEVICE):
            parts["state"] = PartSpec(plan.state_sections, plan.state_tier, True, "state")
        if plan.gradient_tier not in (None, Tier.DEVICE):
            for part in GRADIENT_PARTS[: plan.gradient_slots]:
                parts[part] = PartSpec((plan.gradient_nbytes,), plan.gradient_tier, False, "gradient")
        specs.append(parts)
    return specs
