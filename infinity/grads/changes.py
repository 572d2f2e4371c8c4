"""A program's changes of gradients between its backwards, which have to be the same on all ranks.

[Note: changes are compared] After a backward every rank has a gradient of each parameter that any rank has
used, so all ranks see the same gradients. Each rank only knows its own changes after that (`zero_grad()`,
`p.grad = None`, a factor): if one rank alone dropped its gradients, the others would go on with theirs, and
the sum would be wrong. So the ranks compare their changes when a backward begins, and when the program reads
gradients. The end of the backward carries the first comparison, before the program sees the new gradients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from infinity.core.errors import DivergenceError
from infinity.hardware.ranks import Comm
from infinity.params.param import ShardedParam

from .buffer import Arrival
from .sharded_grad import ShardedGrad

#: Of one parameter: whether it requires gradients, whether it has one, the factor of that (None: it is zero),
#: and the limits that it was clamped to.
Change = tuple[bool, bool, float | None, tuple[tuple[float, float], ...]]


def change_of(sharded: ShardedParam, arrival: Arrival | None) -> Change:
    """Return what has become of a parameter's gradient. `arrival`: what was added to it on this rank alone,
    which may be: it is undone here."""
    grad, learns = sharded.param.grad, sharded.param.requires_grad
    if not isinstance(grad, ShardedGrad):
        return learns, False, None, ()
    if grad.is_zero or (arrival is not None and arrival.fresh):
        return learns, True, None, grad.limits
    return learns, True, grad.factor * (1.0 if arrival is None else arrival.factor), grad.limits


def agree_on_changes(comm: Comm, what: str, value: bytes, changes: Mapping[str, Change]) -> list[bytes]:
    """Return every rank's `value`; raise `DivergenceError` for the first parameter whose change differs
    between ranks. Collective."""
    mine = [*changes.values()]
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).digest()
    came = comm.exchange(what, digest + value)
    if len({each[:16] for each in came}) > 1:
        _check_alike(changes, comm.exchange("what became of gradients", json.dumps(mine).encode()))
    return [each[16:] for each in came]


def _check_alike(names: Iterable[str], told: Sequence[bytes]) -> None:
    came = [json.loads(each) for each in told]
    for name, *of_ranks in zip(names, *came, strict=True):
        said = [_said(*change) for change in of_ranks]
        if len(set(said)) == 1:
            continue
        found = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(said))
        if len({learns for learns, *_ in of_ranks}) > 1:
            raise DivergenceError(
                f"{name!r} is frozen on some ranks, and not on others",
                expected="the same `requires_grad` on all ranks",
                found=found,
                cure=f"make the same `requires_grad_()` calls for {name!r} on all ranks",
            )
        raise DivergenceError(
            f"some ranks have changed the gradient of {name!r}, and others have not",
            expected="after a backward, the same changes of gradients on all ranks: zero_grad(), "
            "`p.grad = None` and others",
            found=found,
            cure="let all ranks decide together, for example by an all_reduce, whether to skip a batch; or "
            "multiply the loss by 0 on the rank with the bad batch. To go on, call `zero_grad()` on all "
            "ranks",
        )
    raise AssertionError("what differs has no name")


def _said(learns: bool, is_there: bool, factor: float | None, limits: Sequence[Sequence[float]]) -> str:
    frozen = "" if learns else "frozen, with "
    if not is_there:
        return f"{frozen}no gradient"
    times = "zeros" if factor is None else f"a gradient times {factor!r}"
    return f"{frozen}{times}" + "".join(f", clamped to {low!r} … {high!r}" for low, high in limits)
