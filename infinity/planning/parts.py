"""The parts of each chunk: what it keeps under one name on one tier, in bytes.

Whatever depends on them derives from here: budgets and quotas (footprint.py), the layout of arenas
(storage/layout.py), where a part lies in an update's lease (optim/chunk_io.py), what a step moves (`Moved`).
A moment of an optimizer is a section of ``state``. A part of its own takes an entry in `_parts_of`, its bytes
in that function's lease and in `_with_update`, a name in `PURPOSES`, and its reads and writes in `ChunkIO`.

- ``copy``, one section in the chunk's dtype: the compute parameters, which forward and backward use; with
  delayed updates it has a second slot, which an update writes while the first is in use;
- ``state``: [master,] in fp32, or of a split one the lower halves; then the moments of the optimizer, in
  `optimizer_state_dtype`, or, of parameters that `optimizer_state_fp32` matches, in fp32; of moments in 8
  bits the codes, then the scales;
- ``gradient``, one section with room for fp32, in which gradients of several backwards are added up, or, of
  `is_made_once`, for the compute dtype; a second slot where a backward runs beside an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from infinity.core.config import Config
from infinity.core.sizes import (
    ALIGNMENT,
    ITEMSIZES,
    MOMENT_BLOCK,
    SEGMENT_ELEMENTS,
    Tier,
    ceil_to,
    torch_dtype,
)

from .in_place import InPlace
from .partition import Chunk, ParamSpec, UnitLayout
from .placement import Assignment

if TYPE_CHECKING:  # what is planned is not built: it has names of dtypes, and needs no torch
    import torch

#: What a plan counts each slot of a part under.
PURPOSES = {
    "copy": ("parameters", "parameters being updated"),
    "state": ("optimizer state",),
    "gradient": ("gradients", "gradients"),
}


class Moment(NamedTuple):
    """What the state keeps of each `block` of elements beside the master, in a section of its own, and the
    name of its dtype."""

    name: str
    precision: str
    block: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """`precision`, as torch has it."""
        return torch_dtype(self.precision)

    def count(self, numel: int) -> int:
        """Return how many values there are of `numel` elements."""
        return ceil_to(numel, self.block) // self.block

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` elements."""
        return self.count(numel) * ITEMSIZES[self.precision]


#: The moments of AdamW and Adam.
ADAM = ("exp_avg", "exp_avg_sq")
#: Moments that are sums of squares, of any optimizer: they have no sign.
SQUARES = frozenset({"exp_avg_sq", "sum"})
#: What Muon keeps of a matrix, whatever other parameters have.
MATRIX = ("momentum_buffer",)


def moments_of(names: Sequence[str], config: Config) -> tuple[Moment, ...]:
    """Return the moments that an optimizer has by `names`, as `config` keeps them; those in 8 bits have their
    scales behind them."""
    moments = tuple(Moment(name, config.optimizer_state_dtype) for name in names)
    if config.optimizer_state_dtype != "8bit":
        return moments
    return *moments, *(Moment(scales_of(name), "fp32", MOMENT_BLOCK) for name in names)


def scales_of(name: str) -> str:
    """Return the name of the scales of a moment in 8 bits."""
    return f"{name}_scales"


def alignment_of(config: Config) -> int:
    """Return a number of elements on whose multiples parameters and slices begin."""
    return MOMENT_BLOCK if config.optimizer_state_dtype == "8bit" else SEGMENT_ELEMENTS


def is_made_once(config: Config, world: int) -> bool:
    """Return whether each gradient of a step is made by one backward, and replaces what was there. Then it
    needs no room for a sum in fp32: the compute dtype has its bits. Not in ZeRO stages 0 and 1 of several
    ranks, whose gradients wait on the device for their sum over the ranks."""
    return config.accumulation == 1 and (world == 1 or config.zero_stage > 1)


class Part(NamedTuple):
    """One part of a chunk.

    Attributes:
        sections: bytes of each section, multiples of 4096. A section is what one CRC covers.
        tiers: where each of its slots is: one, or two for a part of which there are two versions.
        lease_offset: byte of the update's lease where it is worked on; None: where it lies.
        in_place: it is on NVMe in foreign files, which the engine only reads.
    """

    sections: tuple[int, ...]
    tiers: tuple[Tier, ...]
    lease_offset: int | None = None
    in_place: bool = False

    @property
    def tier(self) -> Tier:
        """Where its first slot is; of a part with one, where it is."""
        return self.tiers[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all sections: of one slot."""
        return sum(self.sections)

    @property
    def nvme_nbytes(self) -> int:
        """Bytes of its slots on NVMe, of ours."""
        return 0 if self.in_place else self.nbytes * self.tiers.count(Tier.NVME)


class Moved(NamedTuple):
    """Bytes that one chunk moves: on NVMe in a step of one backward, and in each further backward; between
    host and device in each backward, and once a step."""

    read: int = 0
    written: int = 0
    read_again: int = 0
    written_again: int = 0
    link_each: int = 0
    link_once: int = 0


def update_nbytes(numel: int, moments: Sequence[Moment], gradient: int, copy: int) -> int:
    """Return the bytes of memory that the update of `numel` elements reads and writes: master and moments
    both ways, and of each element `gradient` bytes of its gradient and `copy` bytes of its compute parameter,
    if that is apart."""
    state = 4 * numel + sum(moment.nbytes(numel) for moment in moments)
    return 2 * state + numel * (gradient + copy)


@dataclass(frozen=True)
class ChunkParts:
    """The parts of one chunk, by name.

    [Note: the copy is the master] Where the compute dtype is fp32 and a chunk's copy and state
    are on the same tier, the copy serves as the master and `state` has a section less: with AdamW, 12
    instead of 16 bytes per parameter are written when all is on NVMe. Not where delayed updates run beside a
    forward that uses the copy in place, on the device, and not where there are no moments: a state has a
    section.

    [Note: halves] With `split_master` the copy of a chunk in bf16 is the upper half of its master: an update
    begins with it, and `state` has the lower halves.

    Attributes:
        parts: by name; one that is not there does not exist.
        copy_is_master: see the first note.
        is_split: see the second note.
        load_lease, update_lease, gradient_lease: of the lease through which the copy comes to the
            device, in which the chunk is updated, and in which its gradient is worked on; 0: none.
        moved: what it moves.
        place: how the compute parameters are read in place, from foreign files.
        moments: what the state keeps beside the master.
    """

    parts: Mapping[str, Part]
    copy_is_master: bool
    load_lease: int
    update_lease: int
    gradient_lease: int
    moved: Moved
    place: InPlace | None = None
    moments: tuple[Moment, ...] = ()
    is_split: bool = False

    @property
    def begins_with_copy(self) -> bool:
        """Whether an update needs the copy's values: they are the master, or the upper half of it."""
        return self.copy_is_master or self.is_split

    @property
    def copy(self) -> Part:
        """The part that every chunk has."""
        return self.parts["copy"]

    @property
    def copy_tier(self) -> Tier:
        """Where the copy is."""
        return self.copy.tier

    @property
    def state_tier(self) -> Tier | None:
        """Where the state is; None: the chunk is frozen."""
        return self._tier("state")

    @property
    def gradient_tier(self) -> Tier | None:
        """Where the gradient is; None: the chunk is frozen."""
        return self._tier("gradient")

    def _tier(self, name: str) -> Tier | None:
        part = self.parts.get(name)
        return None if part is None else part.tier

    @property
    def nvme_nbytes(self) -> int:
        """Bytes of its parts on NVMe."""
        return sum(part.nvme_nbytes for part in self.parts.values())


def plan_chunks(
    layouts: Sequence[UnitLayout],
    assignment: Assignment,
    moments: Sequence[Moment],
    *,
    staged: bool,
    delayed: bool = False,
    split: bool = False,
    once: bool = False,
    places: Mapping[int, InPlace] | None = None,
) -> tuple[ChunkParts, ...]:
    """Return the parts of every chunk, by chunk id.

    Args:
        moments: what the state keeps beside the master, of what is no matrix and has no `fp32_moments`.
        staged: whether what moves between host and device needs pinned leases (a device of its own).
        delayed: updates are one step behind, which takes a second copy and a second gradient.
        split: masters are split where the copy is in bf16: [Note: halves].
        once: gradients are made once: `is_made_once`.
        places: how frozen chunks are read whose compute parameters stay in foreign files, by chunk id.
    """
    made: dict[object, ChunkParts] = {}  # nearly all chunks are alike
    plans = []
    for unit in layouts:
        copy_tier = assignment.copies[unit.index]
        for chunk in unit.chunks:
            if places is not None and chunk.id in places:
                plans.append(_in_place(chunk, places[chunk.id]))
                continue
            state_tier = assignment.states.get(chunk.id)
            tiers = copy_tier, state_tier, assignment.gradients.get(chunk.id)
            key = chunk.numel, chunk.precision, chunk.matrix, chunk.fp32_moments, tiers
            if key not in made:
                kept, halved = kept_of(chunk, moments), split and chunk.precision == "bf16"
                made[key] = _parts_of(
                    chunk, kept, *tiers, staged=staged, delayed=delayed, split=halved, once=once
                )
            plans.append(made[key])
    return tuple(plans)


def kept_of(of: Chunk | ParamSpec, moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Return what the state keeps of a chunk or a parameter, where it is `moments` of most."""
    if of.fp32_moments:
        moments = [moment._replace(precision="fp32") for moment in moments if moment.block == 1]
    return tuple(moments[0]._replace(name=name) for name in MATRIX) if of.matrix else tuple(moments)


def _in_place(chunk: Chunk, place: InPlace) -> ChunkParts:
    nbytes, lease = ceil_to(chunk.copy_nbytes, ALIGNMENT), place.lease_nbytes
    read = 2 * sum(window.nbytes for window in place.windows)
    copy = Part((nbytes,), (Tier.NVME,), 0, in_place=True)
    moved = Moved(read=read, read_again=read, link_each=2 * nbytes)
    return ChunkParts({"copy": copy}, False, lease, lease, 0, moved, place)


def _parts_of(
    chunk: Chunk,
    moments: tuple[Moment, ...],
    copy_tier: Tier,
    state_tier: Tier | None,
    gradient_tier: Tier | None,
    *,
    staged: bool,
    delayed: bool,
    split: bool,
    once: bool,
) -> ChunkParts:
    nbytes, fp32 = ceil_to(chunk.copy_nbytes, ALIGNMENT), ceil_to(chunk.section_nbytes, ALIGNMENT)
    of_gradient = nbytes if once else fp32
    on_nvme = copy_tier is Tier.NVME
    load_lease = nbytes if on_nvme else 0
    used = Moved(  # by forward and backward
        read=2 * load_lease,
        read_again=2 * load_lease,
        link_each=0 if copy_tier is Tier.DEVICE else 2 * nbytes,
    )
    if state_tier is None or gradient_tier is None:  # frozen: its copy is written once
        copy = Part((nbytes,), (copy_tier,), 0 if on_nvme else None)
        return ChunkParts({"copy": copy}, False, load_lease, load_lease, 0, used)
    shared = chunk.precision == "fp32" and copy_tier is state_tier and len(moments) > 0
    # What forward and backward use on the device must stay as it is beside an update.
    shared = shared and not (delayed and copy_tier is Tier.DEVICE)
    # The update's lease: what is on NVMe, and what crosses to where the state is; one part after the other.
    crossing = {Tier.NVME, Tier.DEVICE} if staged and state_tier is not Tier.DEVICE else {Tier.NVME}
    of_moments = (ceil_to(moment.nbytes(chunk.numel), ALIGNMENT) for moment in moments)
    sections = (*(() if shared else (nbytes,) if split else (fp32,)), *of_moments)
    sizes = (
        sum(sections) if state_tier is Tier.NVME else 0,
        of_gradient if gradient_tier in crossing else 0,
        nbytes if copy_tier in crossing else 0,
    )
    begins = (sum(sizes[:i]) if size else None for i, size in enumerate(sizes))
    state_begins, gradient_begins, copy_begins = begins
    # What an update makes beside a forward that uses the device's memory waits on the host.
    back = Tier.HOST if copy_tier is Tier.DEVICE else copy_tier
    parts = {
        "copy": Part((nbytes,), (copy_tier, back) if delayed else (copy_tier,), copy_begins),
        "state": Part(sections, (state_tier,), state_begins),
        "gradient": Part((of_gradient,), (gradient_tier,) * (2 if delayed else 1), gradient_begins),
    }
    converted = gradient_tier is Tier.NVME or staged or chunk.precision != "fp32"
    moved = _with_update(used, parts, shared or split)
    gradient_lease = of_gradient if converted else 0
    leases = load_lease, sum(sizes), gradient_lease
    return ChunkParts(parts, shared, *leases, moved, moments=moments, is_split=split)


def _with_update(used: Moved, parts: Mapping[str, Part], begins_with_copy: bool) -> Moved:
    copy, state, gradient = parts["copy"], parts["state"], parts["gradient"]
    nbytes = copy.nbytes  # also of a gradient, in the compute dtype, until there is a second one
    moved = dict.fromkeys(Moved._fields, 0)
    if copy.tier is Tier.NVME:
        moved["written"] += nbytes
        moved["read"] += nbytes if begins_with_copy else 0
    if state.tier is Tier.NVME:
        moved["read"] += state.nbytes
        moved["written"] += state.nbytes
    if gradient.tier is Tier.NVME:
        moved["read"] += nbytes
        moved["written"] += nbytes
        # From the second backward on they are read and written in fp32, where they accumulate.
        moved["read_again"] += gradient.nbytes
        moved["written_again"] += gradient.nbytes
    if gradient.tier is not Tier.DEVICE:
        moved["link_each"] += nbytes
    if state.tier is not Tier.DEVICE and copy.tier is Tier.DEVICE:
        moved["link_once"] += 2 * nbytes if begins_with_copy else nbytes
    return Moved(*(a + b for a, b in zip(used, moved.values(), strict=True)))
