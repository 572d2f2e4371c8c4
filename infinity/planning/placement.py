"""The tier and the directory of all compute parameters, state and gradients: shares of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.core.sizes import Tier

from .partition import UnitLayout


@dataclass(frozen=True)
class Assignment:
    """The tier of every unit's copy, and of every trainable chunk's state and gradient."""

    copies: tuple[Tier, ...]  # by unit index
    states: Mapping[int, Tier]  # by chunk id
    gradients: Mapping[int, Tier]  # by chunk id


def assign(
    layouts: Sequence[UnitLayout],
    parameters: Mapping[Tier, float],
    optimizer_state: Mapping[Tier, float],
    gradients: Mapping[Tier, float],
) -> Assignment:
    """Spread units and chunks over tiers in the given shares of bytes.

    Each goes to the tier that is furthest behind its share, so that a split is even along the
    model and every stretch of the schedule uses both tiers' bandwidth.
    """
    chunks = [c for u in layouts for c in u.trainable_chunks]
    copies = _spread([u.shard_nbytes for u in layouts], parameters)
    states = _spread([c.numel for c in chunks], optimizer_state)
    grads = _spread([c.numel for c in chunks], gradients)
    return Assignment(
        tuple(copies),
        {c.id: t for c, t in zip(chunks, states, strict=True)},
        {c.id: t for c, t in zip(chunks, grads, strict=True)},
    )


def _spread(sizes: Sequence[int], shares: Mapping[Tier, float]) -> list[Tier]:
    if len(shares) == 1:
        return list(shares) * len(sizes)
    given = dict.fromkeys(shares, 0)
    total = 0
    result = []
    for size in sizes:
        total += size
        tier = max(shares, key=lambda t: (shares[t] * total - given[t], -list(Tier).index(t)))
        given[tier] += size
        result.append(tier)
    return result


def spread_over_directories(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Give each chunk (its bytes on NVMe) to the directory that is furthest behind its share, so that
    every stretch of the chunks keeps all directories busy; return the directory of each. A chunk of 0
    bytes counts to none."""
    given = [0] * len(weights)
    total = 0
    result = [0] * len(sizes)
    whole = sum(weights)
    for number, size in enumerate(sizes):
        if size == 0:
            continue
        total += size
        behind = [weight / whole * total - had for weight, had in zip(weights, given, strict=True)]
        chosen = behind.index(max(behind))
        given[chosen] += size
        result[number] = chosen
    return result
