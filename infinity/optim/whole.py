"""Whole parameters from the parts of several ranks, and checks that all ranks change them in the same way.
With one rank, nothing here has any effect."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.core.errors import DivergenceError
from infinity.hardware.ranks import Comm
from infinity.hardware.watch import differences
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit


def of_first_rank(comm: Comm, tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that count, flat: those of the first rank, which the memory of the others gets.
    Collective."""
    flat = tensor.detach().reshape(-1)
    if comm.world > 1:
        comm.broadcast(flat)
    return flat


def of_owners(
    comm: Comm, units: Sequence[ParamUnit], kind: str, values: Mapping[ShardedParam, torch.Tensor]
) -> None:
    """Fetch the elements of whole parameters that other ranks own, flat: one parameter after the other, in
    the order of units. Collective.

    Raises:
        RankError: another rank failed, or reads something else.
    """
    parts = [s for s in values if not units[s.unit].layout.whole]
    for sharded in sorted(parts, key=lambda s: (s.unit, s.index)):
        comm.exchange(f"a look at the {kind} of {sharded.name!r}")
        for rank, first, end in units[sharded.unit].layout.owners(sharded.index):
            comm.broadcast(values[sharded][first:end], rank)


def agree_on_step(
    comm: Comm,
    present: Sequence[ShardedParam],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Check that all ranks update the same parameters with the same options, after the same clipping: each
    rank only sees its own slices. Collective.

    Raises:
        DivergenceError: they would not.
        RankError: another rank failed, or makes another call.
    """
    if comm.world > 1:
        options = json.dumps(
            {
                f"{key} of param group {number}": repr(value)
                for number, group in enumerate(groups)
                for key, value in group.items()
                if key != "params"
            }
        ).encode()
        seen = ("factor", "limits", "is_zero")
        params = repr([(s.name, *(getattr(s.param.grad, n, None) for n in seen)) for s in present])
        what = f"a step of {len(present)} parameters {zlib.crc32(params.encode()):08x}"
        if len({*comm.exchange(what, zlib.crc32(options).to_bytes(4, "little"))}) > 1:
            told = comm.exchange("the options of a step, which differ", options)
            raise DivergenceError(
                "the ranks make a step with different options",
                expected="the same options in the param groups of all ranks",
                found=differences([json.loads(each) for each in told]),
                cure="set the options of param groups, and step schedulers, in the same way on every rank",
            )
        comm.be_punctual()


def agree_on_edits(comm: Comm, edited: Mapping[str, torch.Tensor], copies: Sequence[str]) -> set[str]:
    """Check that the user made the same edits on all ranks: values by name. Return which of their replicas of
    units (`copies`) were edited on any rank. Collective.

    Raises:
        DivergenceError: the edits are not the same.
        RankError: another rank failed, or makes another call.
    """
    said = json.dumps([{name: f"{crc_of(value):08x}" for name, value in edited.items()}, copies]).encode()
    if len({*comm.exchange("the edits of parameters", zlib.crc32(said).to_bytes(4, "little"))}) == 1:
        return {*copies}
    told = [json.loads(each) for each in comm.exchange("the edits of parameters, which differ", said)]
    values = [each[0] for each in told]
    if any(each != values[0] for each in values):
        raise DivergenceError(
            "ranks have edited parameters outside of a `gathered` block, and not all in the same way",
            expected="the same values on all ranks, because each has a replica",
            found=f"CRC-32 of the edited values: {differences(values)}",
            cure="edit inside `with infinity.gathered(params, write=True, source=0):`: then all ranks take "
            "the values of that rank",
        )
    return {name for each in told for name in each[1]}


def agree_on_values(comm: Comm, what: str, values: Mapping[str, object]) -> None:
    """Check that all ranks load the same tensors, by name: each keeps its own slices of them. Collective.

    Raises:
        DivergenceError: they do not have the same names and values.
        RankError: another rank failed, or makes another call.
    """
    if comm.world == 1:
        return
    names = zlib.crc32(repr([*values]).encode())
    mine = b"".join(crc_of(value).to_bytes(4, "little") for value in values.values())
    told = comm.exchange(
        f"{what} of {len(values)} values from {min(values, default='')!r}, {names:08x}", mine
    )
    for index, name in enumerate(values):
        crcs = [crc[4 * index :][:4][::-1].hex() for crc in told]
        if len(set(crcs)) > 1:
            raise DivergenceError(
                f"ranks load different values of {name!r}",
                expected="the same state dict on all ranks",
                found="; ".join(f"rank {rank}: CRC-32 {crc}" for rank, crc in enumerate(crcs)),
                cure="load the same file on all ranks; or edit inside "
                "`infinity.gathered(…, write=True, source=0)`, which takes the values of that rank",
            )


def agree_on_broadcast(comm: Comm, has_model: bool) -> None:
    """Check that torch's `set_state_dict` with ``broadcast_from_rank0=True`` is going to load the model on
    all ranks (`has_model`) or on none. torch decides it on each rank alone: a rank that loads the model waits
    in torch's broadcast for ranks that do not. Collective.

    Raises:
        DivergenceError: only some ranks would load it.
        RankError: another rank failed, or makes another call.
    """
    if comm.world == 1:
        return
    told = comm.exchange("set_state_dict with broadcast_from_rank0=True", bytes([has_model]))
    if len({*told}) > 1:
        raise DivergenceError(
            "set_state_dict with broadcast_from_rank0=True skips the model on ranks with an empty state dict "
            "of the model, and the other ranks would wait for them forever",
            expected="a state dict of the model on all ranks, or on none",
            found="; ".join(f"rank {r}: {'one' if each[0] else 'none'}" for r, each in enumerate(told)),
            cure="call set_model_state_dict, and then set_optimizer_state_dict, with the same options: these "
            "take {} on all ranks but the first",
        )


def crc_of(value: object) -> int:
    """Return a checksum of a value: of a tensor with its dtype and shape."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        return zlib.crc32(repr(value if isinstance(value, (int, float)) else type(value)).encode())
    flat = value.detach().cpu().reshape(-1).view(torch.uint8)
    kind = repr((value.dtype, tuple(value.shape)))
    return zlib.crc32(flat.numpy(), zlib.crc32(kind.encode()))  # type: ignore[arg-type]
