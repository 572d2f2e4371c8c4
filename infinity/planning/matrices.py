"""Which rank updates which whole parameter, what that computes, and what it sends.

Muon orthogonalizes matrices. Adafactor updates parameters of any shape as a whole; what is said of matrices
here holds for these as well.

[Note: rounds] With several ranks each matrix has one *owner*: the rank that updates it. The matrices of a
unit are updated in *rounds*. A round has at most one matrix for each rank, so that all ranks
compute at the same time, and matrices of about the same cost, so that they end at the same time. In each
round the costliest matrix goes to the rank that has computed the least in all rounds before. All of this
follows from the layout, so it is the same on all ranks. With one rank, or where each rank has whole units,
a round is one matrix, and its owner is this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from infinity.core.sizes import ALIGNMENT, ITEMSIZES, ceil_to

from .partition import ParamSpec, UnitLayout

#: The optimizers that update whole parameters.
MUON, ADAFACTOR = "Muon", "Adafactor"
#: The iterations of `torch.optim.Muon`.
STEPS = 5


class Form(NamedTuple):
    """What an owner gets of each element: `planes` values of a dtype. The first of them goes back."""

    precision: str
    planes: int

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return ITEMSIZES[self.precision]


#: Muon: what is to be orthogonalized. Adafactor: the master, and the gradient.
FORMS = {MUON: Form("bf16", 1), ADAFACTOR: Form("fp32", 2)}


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


def work_on(param: ParamSpec) -> int:
    """Return the floating-point operations of the update of a whole parameter; of Adafactor, about."""
    return flops_of(param.shape) if param.matrix == MUON else 10 * param.numel


#: The names of what `factors_of` returns.
FACTORS = ("row_var", "col_var", "variance")


def factors_of(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return what Adafactor keeps of a parameter, by name: shapes, of values in fp32."""
    if len(shape) < 2:
        return {"variance": (*shape,)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def factors_nbytes(param: ParamSpec) -> int:
    """Return the bytes of what Adafactor keeps of a parameter, if that updates it."""
    kept = factors_of(param.shape) if param.matrix == ADAFACTOR else {}
    return sum(4 * math.prod(shape) for shape in kept.values())


def form_of(layouts: Sequence[UnitLayout]) -> Form:
    """Return the form of the matrices of a model, of which one optimizer updates all."""
    kinds = {param.matrix for unit in layouts for param in unit.params} - {""}
    return FORMS[max(kinds, default=MUON)]


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
        matrices.sort(key=lambda i: (-work_on(unit.params[i]), i))
    return sorted((matrices[i : i + world] for i in range(0, len(matrices), world)), key=min)


def _assign(unit: UnitLayout, group: Sequence[int], loads: list[int]) -> tuple[Owned, ...]:
    owners = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    given = sorted(Owned(owner, param) for owner, param in zip(owners, group, strict=False))
    for owner, param in given:
        loads[owner] += work_on(unit.params[param])
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


def lease_nbytes(whole: int, pieces: int, form: Form) -> int:
    """Return the bytes of the lease with `room_of`: the matrix, then the pieces, plane by plane."""
    each = form.itemsize * form.planes
    return ceil_to(each * whole, ALIGNMENT) + ceil_to(each * pieces, ALIGNMENT)


class Work(NamedTuple):
    """What a rank does for the matrices of one step: floating-point operations, bytes that it sends to
    others, and bytes of whole matrices that go to a device of its own and back."""

    flops: int
    sent: int
    crossing: int


def work_of(layouts: Sequence[UnitLayout]) -> list[Work]:
    """Return the work of each rank."""
    form, world = form_of(layouts), _owners(layouts)
    done = [[0, 0, 0] for _ in range(world)]
    for unit, group in _all(layouts):
        for owner, param in group:
            done[owner][0] += work_on(unit.params[param])
            done[owner][2] += form.itemsize * (form.planes + 1) * unit.params[param].numel
            done[owner][1] += (world - 1) * factors_nbytes(unit.params[param])
            for rank, numel in enumerate(pieces_of(unit, param)):
                if rank != owner:  # the piece to the owner, and its update back
                    done[rank][1] += form.itemsize * form.planes * numel
                    done[owner][1] += form.itemsize * numel
    return [Work(*each) for each in done]
