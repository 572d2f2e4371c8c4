"""Which rank orthogonalizes which matrix for Muon, what that computes, and what it sends.

[Note: rounds] With several ranks each matrix has one *owner*: the rank that updates it. The matrices of a
unit are updated in *rounds*. A round has at most one matrix for each rank, so that all ranks
compute at the same time, and matrices of about the same cost, so that they end at the same time. In each
round the costliest matrix goes to the rank that has computed the least in all rounds before. All of this
follows from the layout, so it is the same on all ranks. With one rank, or where each rank has whole units,
a round is one matrix, and its owner is this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from infinity.core.sizes import ALIGNMENT, ceil_to

from .partition import UnitLayout

#: The iterations of `torch.optim.Muon`.
STEPS = 5


#: Bytes of an element on the way to an owner and back: bf16.
ITEMSIZE = 2


class Owned(NamedTuple):
    """A matrix of a round: the number of its owner, and its index among the parameters of its unit."""

    owner: int
    param: int


Rounds = tuple[tuple[Owned, ...], ...]


def flops_of(shape: Sequence[int], steps: int = STEPS) -> int:
    """Return the floating-point operations of one orthogonalization: in each iteration a product of the
    matrix and its transpose, the square of that, and a product of this and the matrix."""
    short, long = min(shape), max(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def rounds_of(layouts: Sequence[UnitLayout]) -> tuple[Rounds, ...]:
    """Return the rounds of each unit: [Note: rounds]."""
    loads = [0] * _owners(layouts)
    return tuple(
        tuple(_assign(unit, group, loads) for group in _groups(unit, len(loads))) for unit in layouts
    )


def _owners(layouts: Sequence[UnitLayout]) -> int:
    return 1 if all(u.whole for u in layouts) else layouts[0].world


def _groups(unit: UnitLayout, world: int) -> list[list[int]]:
    """Return the matrices of each round, the costliest first; rounds in the order of the parameters."""
    matrices = [i for i, p in enumerate(unit.params) if p.matrix and p.numel]
    if world > 1:
        matrices.sort(key=lambda i: (-flops_of(unit.params[i].shape), i))
    return sorted((matrices[i : i + world] for i in range(0, len(matrices), world)), key=min)


def _assign(unit: UnitLayout, group: Sequence[int], loads: list[int]) -> tuple[Owned, ...]:
    owners = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    given = sorted(Owned(owner, param) for owner, param in zip(owners, group, strict=False))
    for owner, param in given:
        loads[owner] += flops_of(unit.params[param].shape)
    return tuple(given)


def pieces_of(unit: UnitLayout, param: int) -> list[int]:
    """Return how many elements of a parameter each owner has, by rank."""
    if unit.whole:
        return [unit.params[param].numel]
    sizes = [0] * unit.world
    for rank, first, end in unit.owners(param):
        sizes[rank] = end - first
    return sizes


def _all(layouts: Sequence[UnitLayout]) -> Iterator[tuple[UnitLayout, tuple[Owned, ...]]]:
    return (
        (unit, group) for unit, rounds in zip(layouts, rounds_of(layouts), strict=True) for group in rounds
    )


def room_of(layouts: Sequence[UnitLayout]) -> tuple[int, int]:
    """Return elements of room: for the largest matrix, and for the pieces that any rank has of the matrices
    of one round. With one owner the pieces are the matrix."""
    whole = max((unit.params[m.param].numel for unit, group in _all(layouts) for m in group), default=0)
    if _owners(layouts) == 1:
        return whole, 0
    sums = (
        map(sum, zip(*(pieces_of(unit, m.param) for m in group), strict=True))
        for unit, group in _all(layouts)
    )
    return whole, max((size for of_ranks in sums for size in of_ranks), default=0)


def lease_nbytes(whole: int, pieces: int) -> int:
    """Return the bytes of the lease with `room_of`: the matrix, then the pieces."""
    return ceil_to(ITEMSIZE * whole, ALIGNMENT) + ceil_to(ITEMSIZE * pieces, ALIGNMENT)


class Work(NamedTuple):
    """What a rank does for the matrices of one step: floating-point operations, bytes that it sends to
    others, and bytes of whole matrices that go to a device of its own and back."""

    flops: int
    sent: int
    crossing: int


def work_of(layouts: Sequence[UnitLayout]) -> list[Work]:
    """Return the work of each rank."""
    done = [[0, 0, 0] for _ in range(_owners(layouts))]
    for unit, group in _all(layouts):
        for owner, param in group:
            done[owner][0] += flops_of(unit.params[param].shape)
            done[owner][2] += 2 * ITEMSIZE * unit.params[param].numel
            for rank, numel in enumerate(pieces_of(unit, param)):
                if rank != owner:  # the piece to the owner, and its update back
                    done[rank][1] += ITEMSIZE * numel
                    done[owner][1] += ITEMSIZE * numel
    return [Work(*each) for each in done]
