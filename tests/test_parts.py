"""How units are cut: every element once, on one rank, aligned; and the parts of chunks: sizes, places in
leases and traffic, for every placement."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.sizes import ALIGNMENT, NORM_BLOCK, SEGMENT_ELEMENTS, Tier
from infinity.planning.partition import ParamSpec, UnitLayout, partition
from infinity.planning.parts import ADAM, PURPOSES, ChunkParts, Moment, plan_chunks
from infinity.planning.placement import assign

DTYPES = ("fp32", "bf16", "fp16")
PLACES = list(itertools.product(Tier, Tier, Tier))


def parts_of(places: tuple[Tier, Tier, Tier], dtype: str, *, staged: bool, delayed: bool) -> ChunkParts:
    layouts = partition([("u", [ParamSpec("p", (NORM_BLOCK,), dtype, True, 0)])], NORM_BLOCK)
    assignment = assign(layouts, *({tier: 1.0} for tier in places))
    moments = [Moment(name, "fp32") for name in ADAM]
    (plan,) = plan_chunks(layouts, assignment, moments, staged=staged, delayed=delayed)
    return plan


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_worked_on_in_a_lease_lies_side_by_side(dtype: str, staged: bool, delayed: bool) -> None:
    for places in PLACES:
        plan = parts_of(places, dtype, staged=staged, delayed=delayed)
        assert set(plan.parts) <= set(PURPOSES)
        assert all(size % ALIGNMENT == 0 for part in plan.parts.values() for size in part.sections)
        assert all(len(part.tiers) <= len(PURPOSES[name]) for name, part in plan.parts.items())
        used = [plan.parts[n] for n in ("state", "gradient", "copy")]
        end = 0
        for part in used:
            if part.lease_offset is not None:
                assert part.lease_offset == end
                end += part.nbytes
        assert plan.update_lease == end
        for part in used:
            crosses = staged and plan.state_tier is not Tier.DEVICE and part.tier is Tier.DEVICE
            assert (part.lease_offset is not None) == (part.tier is Tier.NVME or crosses)


D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME


@pytest.mark.parametrize(
    ("places", "dtype", "read", "written", "link"),
    [  # bytes per parameter that a step moves: ZeRO-Infinity (2104.07857), section 4, in our parts
        ((D, H, H), "bf16", 0, 0, 4),
        ((H, H, H), "bf16", 0, 0, 6),
        ((D, N, H), "bf16", 12, 12, 4),
        ((N, N, N), "bf16", 18, 16, 6),
        ((N, N, N), "fp32", 8 + 4 + 8 + 4, 4 + 8 + 4, 12),
        ((D, D, D), "bf16", 0, 0, 0),
    ],
)
def test_what_a_step_moves_per_parameter(
    places: tuple[Tier, Tier, Tier], dtype: str, read: int, written: int, link: int
) -> None:
    moved = parts_of(places, dtype, staged=True, delayed=False).moved
    assert moved.read == read * NORM_BLOCK
    assert moved.written == written * NORM_BLOCK
    assert moved.link_each + moved.link_once == link * NORM_BLOCK


# -- how units are cut ----------------------------------------------------------------------

dtypes = st.sampled_from(["fp32", "bf16", "fp16"])
shapes = st.lists(st.integers(0, 400), max_size=2).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, list[ParamSpec]]]:
    units = []
    for u in range(draw(st.integers(1, 4))):
        params = []
        for i in range(draw(st.integers(1, 5))):
            trainable = draw(st.booleans())
            group = draw(st.integers(0, 2)) if trainable else -1
            spec = ParamSpec(f"u{u}.p{i}", draw(shapes), draw(dtypes), trainable, group)
            params.append(spec._replace(fp32_moments=trainable and draw(st.booleans())))
        units.append((f"u{u}", params))
    return units


def _check(layouts: tuple[UnitLayout, ...], rank: int, covered: list[list[int]], blocks: int) -> None:
    """One rank's chunks: in their place in its slices. Adds the elements of each parameter to `covered`."""
    next_id = 0
    for layout, seen in zip(layouts, covered, strict=True):
        chunks = deque(layout.chunks)
        start = begin = 0
        for run in layout.runs:
            assert run.begin == begin
            begin += run.nbytes
            at = run.begin + rank * run.slice_nbytes
            while at < run.begin + (rank + 1) * run.slice_nbytes:
                chunk = chunks.popleft()
                assert (chunk.id, chunk.start, chunk.copy_offset) == (next_id, start, at)
                assert (chunk.dtype, chunk.trainable) == (run.dtype, run.trainable)
                assert 0 < chunk.numel <= blocks * NORM_BLOCK
                assert chunk.numel % SEGMENT_ELEMENTS == 0
                end = 0
                for segment in chunk.segments:
                    assert segment.start >= end
                    end = segment.start + segment.numel
                    spec = layout.params[segment.param]
                    assert (spec.dtype, spec.trainable) == (chunk.dtype, chunk.trainable)
                    assert spec.fp32_moments == chunk.fp32_moments
                    assert segment.offset == seen[segment.param]
                    seen[segment.param] += segment.numel
                    place = at + segment.start * chunk.dtype.itemsize
                    wanted = layout.byte_offsets[segment.param] + segment.offset * chunk.dtype.itemsize
                    assert place == wanted
                assert end <= chunk.numel
                next_id, start, at = next_id + 1, start + chunk.numel, at + chunk.copy_nbytes
            assert at == run.begin + (rank + 1) * run.slice_nbytes
        assert not chunks
        assert layout.gathered_nbytes == begin
        assert layout.shard_nbytes == sum(c.copy_nbytes for c in layout.chunks)
        for offset in layout.byte_offsets:
            assert offset % 128 == 0  # as kernels like it, and on a cache line of its own


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 3), st.integers(1, 5))
def test_every_element_lies_in_exactly_one_segment_of_one_rank(
    units: list[tuple[str, list[ParamSpec]]], blocks: int, world: int
) -> None:
    covered = [[0] * len(params) for _, params in units]
    for rank in range(world):
        layouts = partition(units, blocks * NORM_BLOCK, rank=rank, world=world)
        assert [(u.name, u.params) for u in layouts] == [(name, tuple(params)) for name, params in units]
        _check(layouts, rank, covered, blocks)
    assert covered == [[p.numel for p in params] for _, params in units]


@settings(max_examples=30, deadline=None)
@given(models(), st.integers(2, 4096), st.data())
def test_ranks_agree_on_all_but_whose_elements_they_have(
    units: list[tuple[str, list[ParamSpec]]], world: int, data: st.DataObject
) -> None:
    """What must be equal for collectives, without going through thousands of ranks."""
    ranks = [0, data.draw(st.integers(0, world - 1)), world - 1]
    first, *others = (partition(units, NORM_BLOCK, rank=r, world=world) for r in ranks)
    for rank, layouts in zip(ranks[1:], others, strict=True):
        for a, b in zip(first, layouts, strict=True):
            assert (a.byte_offsets, a.runs) == (b.byte_offsets, b.runs)
            moved = [(c.id, c.start, c.numel, c.dtype, c.trainable) for c in b.chunks]
            assert moved == [(c.id, c.start, c.numel, c.dtype, c.trainable) for c in a.chunks]
            for run in b.runs:
                mine = [c for c in b.chunks if run.begin <= c.copy_offset < run.begin + run.nbytes]
                assert mine[0].copy_offset == run.begin + rank * run.slice_nbytes


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(4, 60))
def test_a_split_follows_its_shares_all_along(share: float, count: int) -> None:
    units = [(f"u{i}", [ParamSpec(f"p{i}", (NORM_BLOCK,), "bf16", True, 0)]) for i in range(count)]
    layouts = partition(units, NORM_BLOCK)
    shares = {Tier.HOST: share, Tier.NVME: 1 - share}
    assignment = assign(layouts, shares, shares, shares)
    for upto in range(1, count + 1):
        on_host = sum(t is Tier.HOST for t in assignment.copies[:upto])
        assert abs(on_host - share * upto) <= 1
