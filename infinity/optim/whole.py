"""Whole parameters of several ranks: what each has of them, brought together; and that all do the same to
them. With one rank, nothing is done."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.hardware.ranks import Comm
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
    """Have what other ranks own of whole parameters, flat: one after the other, in the order of units.
    Collective.

    Raises:
        RankError: another rank failed, or looks at something else.
    """
    parts = [s for s in values if not units[s.unit].layout.whole]
    for sharded in sorted(parts, key=lambda s: (s.unit, s.index)):
        comm.exchange(f"a look at the {kind} of {sharded.name!r}")
        for rank, first, end in units[sharded.unit].layout.owners(sharded.index):
            comm.broadcast(values[sharded][first:end], rank)


def agree_on_step(
    comm: Comm,
    present: Sequence[ShardedParam],
    edited: Sequence[ShardedParam],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Have all ranks update the same parameters with the same options: each only sees its own slices. And
    have the user edited the same ones, where each has its own. Collective.

    Raises:
        DivergenceError: they would not.
        RankError: another rank failed, or does something else.
    """
    if comm.world > 1:
        options = repr([{k: v for k, v in group.items() if k != "params"} for group in groups])
        params = repr([(s.name, getattr(s.param.grad, "factor", None)) for s in present])
        crcs = f"{zlib.crc32(params.encode()):08x}, with options {zlib.crc32(options.encode()):08x}"
        edits = f", after edits of {', '.join(s.name for s in edited)}" if edited else ""
        comm.exchange(f"a step of {len(present)} parameters {crcs}{edits}")
