"""`copy_to`: copies the newest values of a wrapped model into a plain one of the same structure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn

from infinity.core.commits import in_backward
from infinity.core.errors import ParameterError, StateDictError
from infinity.params.param import ShardedParam, plain_name, sharded_of

from .checkpoint import Progress, interruptible, settle
from .engine import Engine, engine_of, model_of
from .module_state import engine_in
from .together import together

_Here: TypeAlias = tuple[torch.Tensor, bool]  # a value, and whether a state dict would have it


def copy_to(model: nn.Module | torch.optim.Optimizer, plain: nn.Module) -> None:
    """Copy the newest values of a wrapped model into a plain one, chunk by chunk. Use it for averages of
    weights (EMA, SWA), and for everything else that needs a model that can be copied.

    Args:
        model: as `wrap` or `inference` returned it, a part of it, or the optimizer of `wrap`. With several
            ranks, call `copy_to` on all of them; each gets the whole model in its `plain`.
        plain: a module with the same names and shapes, on any device: a copy from before `wrap`, or a newly
            built model. Its parameters keep their dtypes. They get the values of the fp32 masters if the
            compute dtype differs from their own. `copy_to` copies buffers, too; it copies a buffer that is
            not persistent if both models have it.

    Raises:
        WrapError: `model` belongs to no wrapped model.
        StateDictError: `plain` has other names or shapes, has no memory, or is wrapped itself; nothing was
            copied.
        ParameterError: a `gathered` block is editing parameters, or parameters were added after `wrap`; or a
            forward or a backward is running.
        DivergenceError, RankError: the ranks do not make the same calls; or one of them failed.
        StorageError: a transfer or an update failed.
    """
    wrapped: nn.Module = model_of(model)
    engine = engine_in(wrapped) or engine_of(wrapped)
    engine.phases.check()
    if in_backward() or engine.phases.is_forward_here():
        raise ParameterError(
            "`infinity.copy_to` cannot copy the model while it is in use",
            expected="`infinity.copy_to` between steps",
            found=f"a {'backward' if in_backward() else 'forward'} under way",
            cure="call it after `optimizer.step()`",
        )
    root = engine.model()
    if root is not None:
        engine.hooks.guard.check_added(root)
    targets: dict[ShardedParam, list[torch.Tensor]] = {}
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def find() -> None:
        found = dict(_tensors(plain))
        wanted = dict(_tensors(wrapped))
        for name in {**wanted, **found}:
            _check(name, wanted.get(name), found.get(name))
        for name, (value, lasts) in wanted.items():
            if name not in found or (not lasts and found[name][0].shape != value.shape):
                continue
            if isinstance(value, nn.Parameter) and value in engine.params:
                targets.setdefault(engine.params[value], []).append(found[name][0].detach())
            else:
                buffers.append((value.detach(), found[name][0].detach()))

    together(engine.comm, "copy_to", find)
    for of in targets.values():
        of.sort(key=lambda target: -target.itemsize)  # the others are copies of the first
    settle(engine)
    kinds = {s: "master" if _exact(s, of[0].dtype) else "copy" for s, of in targets.items()}
    if engine.comm.world > 1:
        told = repr([(s.name, kinds[s], str(of[0].dtype)) for s, of in targets.items()])
        engine.comm.exchange(f"copy_to of {len(targets)} parameters {zlib.crc32(told.encode()):08x}")
    interruptible(engine.commits, lambda told: _copy(engine, targets, kinds, told), None, engine.comm)
    with torch.no_grad():
        for value, target in buffers:
            target.copy_(value)


def _tensors(module: nn.Module) -> Iterator[tuple[str, _Here]]:
    """Yield each parameter and buffer by its names, and whether a state dict would have it."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, value in (*inner._parameters.items(), *inner._buffers.items()):
            if value is not None:
                full = plain_name(f"{prefix}.{name}" if prefix else name)
                yield full, (value, name not in inner._non_persistent_buffers_set)


def _check(name: str, wanted: _Here | None, found: _Here | None) -> None:
    """Raise `StateDictError` unless the plain model has a place for the value `name`."""

    def of(here: _Here | None) -> str:
        return "no such tensor" if here is None else f"shape {tuple(here[0].shape)}"

    lasts = any(here is not None and here[1] for here in (wanted, found))
    if lasts and (wanted is None or found is None or wanted[0].shape != found[0].shape):
        raise StateDictError(
            f"{name!r} is not the same in the plain model",
            expected=f"{of(wanted)}, as the wrapped model has",
            found=of(found),
            cure="pass a model of the same structure: built like the wrapped one, or copied from it before "
            "`wrap`",
        )
    target = found[0] if found is not None else None
    if target is not None and (target.is_meta or sharded_of(target) is not None):
        raise StateDictError(
            f"{name!r} of the plain model has no memory of its own",
            expected="ordinary parameters and buffers, on any device",
            found="one on the meta device" if target.is_meta else "a parameter of a wrapped model",
            cure="build the plain model on a device (`plain.to_empty(device='cpu')`)"
            if target.is_meta
            else "pass a model that was never wrapped, or call `infinity.unwrap` on it first",
        )


def _exact(sharded: ShardedParam, dtype: torch.dtype) -> bool:
    """Whether a place of `dtype` gets the master, which has more than the copy."""
    return sharded.spec.trainable and sharded.spec.dtype not in (torch.float32, dtype)


@torch.no_grad()
def _copy(
    engine: Engine,
    targets: dict[ShardedParam, list[torch.Tensor]],
    kinds: dict[ShardedParam, str],
    told: Progress,
) -> None:
    done = 0
    for unit in engine.units:
        params = [s for s in unit.params if s in targets]
        flat = {s: _flat(targets[s][0]) for s in params}
        for kind in ("copy", "master"):
            chosen = [s for s in params if kinds[s] == kind]
            for sharded, segment, tensors in engine.states.segments((kind,), chosen):
                flat[sharded][segment.offset : segment.offset + segment.numel].copy_(tensors[kind])
        for sharded in params if not unit.layout.whole else ():
            engine.comm.exchange(f"copy_to, the values of {sharded.name!r}")
            for rank, first, end in unit.layout.owners(sharded.index):
                piece = flat[sharded][first:end].cpu()  # itself, on the host
                engine.comm.broadcast(piece, rank)
                flat[sharded][first:end].copy_(piece)
        for sharded in params:
            first_one, *others = targets[sharded]
            if not first_one.is_contiguous():
                first_one.copy_(flat[sharded].view(first_one.shape))
            for other in others:
                other.copy_(first_one)
        done += len(params)
        told(done, len(targets))


def _flat(target: torch.Tensor) -> torch.Tensor:
    """Return the elements of `target` in their order: itself, or memory that is copied there."""
    return target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
