"""How units are cut: every element once, on one rank, aligned; and what a step moves of them."""

from __future__ import annotations

import dataclasses
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.sizes import NORM_BLOCK, SEGMENT_ELEMENTS, Tier
from infinity.planning.partition import ParamSpec, UnitLayout, partition
from infinity.planning.parts import ADAM, Moment, plan_chunks
from infinity.planning.placement import assign

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
    layouts = partition([("u", [ParamSpec("p", (NORM_BLOCK,), dtype, True, 0)])], NORM_BLOCK)
    assignment = assign(layouts, *({tier: 1.0} for tier in places))
    moments = [Moment(name, "fp32") for name in ADAM]
    (plan,) = plan_chunks(layouts, assignment, moments, staged=True, delayed=False)
    moved = plan.moved
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
            params.append(dataclasses.replace(spec, fp32_moments=trainable and draw(st.booleans())))
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
@given(st.floats(0.05, 0.95), st.integers(4, 60))
def test_a_split_follows_its_shares_all_along(share: float, count: int) -> None:
    units = [(f"u{i}", [ParamSpec(f"p{i}", (NORM_BLOCK,), "bf16", True, 0)]) for i in range(count)]
    layouts = partition(units, NORM_BLOCK)
    shares = {Tier.HOST: share, Tier.NVME: 1 - share}
    assignment = assign(layouts, shares, shares, shares)
    for upto in range(1, count + 1):
        on_host = sum(t is Tier.HOST for t in assignment.copies[:upto])
        assert abs(on_host - share * upto) <= 1
