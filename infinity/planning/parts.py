"""The parts of each chunk: what it keeps under one name on one tier, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity.core.sizes import Tier

from .partition import Chunk, UnitLayout
from .placement import Assignment

#: The parts of a chunk in the store that its copy, and its gradient, can be in.
COPY_PARTS = ("copy", "spare")
GRADIENT_PARTS = ("gradient", "next gradient")


class ChunkPlan(NamedTuple):
    """The parts of one chunk, in bytes, and their tiers. A part of None does not exist.

    [Note: the copy is the master] Where the compute dtype is fp32 and a chunk's copy and state
    are on the same tier, the copy serves as the master and `state` has two sections, not three:
    12 instead of 16 bytes per parameter are written when all is on NVMe. Not where delayed updates run
    beside a forward that uses the copy in place, on the device.
    """

    copy_tier: Tier
    copy_nbytes: int
    state_tier: Tier | None
    state_sections: tuple[int, ...]  # [master,] exp_avg, exp_avg_sq
    gradient_tier: Tier | None
    gradient_nbytes: int  # room for fp32: a gradient is fp32 once it accumulates
    spare_tier: Tier | None = None  # of a second copy, of the same size, into which delayed updates write
    gradient_slots: int = 1  # two when a backward runs beside the update before it

    @property
    def copy_is_master(self) -> bool:
        """See [Note: the copy is the master]."""
        return len(self.state_sections) == 2

    @property
    def nvme_nbytes(self) -> int:
        """Bytes of its parts on NVMe, one version of each."""
        parts = (
            (self.copy_tier, self.copy_nbytes),
            (self.spare_tier, self.copy_nbytes),
            (self.state_tier, sum(self.state_sections)),
            (self.gradient_tier, self.gradient_nbytes * self.gradient_slots),
        )
        return sum(nbytes for tier, nbytes in parts if tier is Tier.NVME)


def plan_chunks(
    layouts: Sequence[UnitLayout], assignment: Assignment, *, delayed: bool = False
) -> tuple[ChunkPlan, ...]:
    """Return the parts of every chunk, by chunk id. `delayed`: updates are one step behind, which
    takes a second copy and a second gradient."""
    made: dict[object, ChunkPlan] = {}  # nearly all chunks are alike
    plans = []
    for unit in layouts:
        copy_tier = assignment.copies[unit.index]
        for chunk in unit.chunks:
            state_tier = assignment.states.get(chunk.id)
            key = chunk.numel, chunk.dtype, copy_tier, state_tier, assignment.gradients.get(chunk.id)
            if key not in made:
                made[key] = _plan_chunk(chunk, *key[2:], delayed=delayed)
            plans.append(made[key])
    return tuple(plans)


def _plan_chunk(
    chunk: Chunk, copy_tier: Tier, state_tier: Tier | None, gradient_tier: Tier | None, *, delayed: bool
) -> ChunkPlan:
    if state_tier is None:  # frozen
        return ChunkPlan(copy_tier, chunk.copy_nbytes, None, (), None, 0)
    shared = chunk.dtype is torch.float32 and copy_tier is state_tier
    # What forward and backward use on the device must stay as it is beside an update.
    shared = shared and not (delayed and copy_tier is Tier.DEVICE)
    spare_tier = Tier.HOST if copy_tier is Tier.DEVICE else copy_tier
    return ChunkPlan(
        copy_tier,
        chunk.copy_nbytes,
        state_tier,
        (chunk.section_nbytes,) * (2 if shared else 3),
        gradient_tier,
        chunk.section_nbytes,
        spare_tier if delayed else None,
        2 if delayed else 1,
    )


class PartSpec(NamedTuple):
    """One part of a chunk.

    Attributes:
        sections: bytes of each section, multiples of 4096. A section is what one CRC covers, and
            the least that can be read.
        tier: HOST or NVME.
        versioned: on NVMe it has as many slots as the store; otherwise one.
        region: the region of the arena that it lies in.
    """

    sections: tuple[int, ...]
    tier: Tier
    versioned: bool
    region: str

    @property
    def nbytes(self) -> int:
        """Bytes of all sections."""
        return sum(self.sections)

    def choose(self, sections: range | None) -> range:
        """Return the indices of `sections`, of all if None.

        Raises:
            ValueError: they are not neighbouring sections of this part.
        """
        whole = range(len(self.sections))
        if sections is None:
            return whole
        if sections.step != 1 or not 0 <= sections.start < sections.stop <= whole.stop:
            raise ValueError(f"{sections} are not neighbouring sections of {whole.stop}")
        return sections

    def clamp(self, sections: range, length: int) -> list[int]:
        """Return the bytes of each section that lie within the first `length` of the part."""
        sizes = []
        begin = sum(self.sections[: sections.start])
        for index in sections:
            sizes.append(min(max(length - begin, 0), self.sections[index]))
            begin += self.sections[index]
        return sizes


#: The parts of one chunk, by name.
ChunkSpec = Mapping[str, PartSpec]


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
