"""How units are cut: every element once, aligned, the same for every chunk size."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.sizes import ALIGNMENT, NORM_BLOCK, SEGMENT_ELEMENTS, Tier
from infinity.planning.partition import ParamSpec, partition
from infinity.planning.parts import plan_chunks
from infinity.planning.placement import assign

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.lists(st.integers(0, 400), max_size=2).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, list[ParamSpec]]]:
    units = []
    for u in range(draw(st.integers(1, 4))):
        params = []
        for i in range(draw(st.integers(1, 5))):
            trainable = draw(st.booleans())
            group = draw(st.integers(0, 2)) if trainable else -1
            params.append(ParamSpec(f"u{u}.p{i}", draw(shapes), draw(dtypes), trainable, group))
        units.append((f"u{u}", params))
    return units


@settings(max_examples=150, deadline=None)
@given(models(), st.integers(1, 3))
def test_every_element_lies_in_exactly_one_segment(
    units: list[tuple[str, list[ParamSpec]]], blocks: int
) -> None:
    layouts = partition(units, blocks * NORM_BLOCK)
    next_id = 0
    for layout, (name, params) in zip(layouts, units, strict=True):
        assert layout.name == name
        covered = [0] * len(params)
        copy_end = 0
        for chunk in layout.chunks:
            assert chunk.id == next_id
            next_id += 1
            assert chunk.copy_offset == copy_end
            copy_end += chunk.copy_nbytes
            assert chunk.numel <= blocks * NORM_BLOCK
            assert chunk.copy_nbytes % ALIGNMENT == chunk.section_nbytes % ALIGNMENT == 0
            end = 0
            for segment in chunk.segments:
                assert segment.start >= end
                end = segment.start + segment.numel
                spec = params[segment.param]
                assert spec.dtype is chunk.dtype
                assert spec.trainable == chunk.trainable
                assert segment.offset == covered[segment.param]
                covered[segment.param] += segment.numel
                at = chunk.copy_offset + segment.start * chunk.dtype.itemsize
                expected = layout.byte_offsets[segment.param] + segment.offset * chunk.dtype.itemsize
                assert at == expected
            assert end <= chunk.numel
        assert covered == [p.numel for p in params]
        assert copy_end == layout.copy_nbytes
        for spec, offset in zip(params, layout.byte_offsets, strict=True):
            assert offset % (SEGMENT_ELEMENTS * spec.dtype.itemsize) == 0


@settings(max_examples=60, deadline=None)
@given(models())
def test_the_place_of_a_parameter_does_not_depend_on_the_chunk_size(
    units: list[tuple[str, list[ParamSpec]]],
) -> None:
    small, large = partition(units, NORM_BLOCK), partition(units, 8 * NORM_BLOCK)
    for a, b in zip(small, large, strict=True):
        assert a.byte_offsets == b.byte_offsets
        assert a.copy_nbytes == b.copy_nbytes
        # Norm blocks lie on one grid: sums over them are the same sums (Note: norms).
        pieces = [[(p, c.start + at, n) for c in u.chunks for p, at, n in c.norm_pieces] for u in (a, b)]
        assert pieces[0] == pieces[1]
        sizes = Counter[int]()
        for param, _, numel in pieces[0]:
            assert 0 < numel <= NORM_BLOCK
            sizes[param] += numel
        assert all(sizes[i] == p.numel for i, p in enumerate(a.params))


def test_groups_are_contiguous_within_a_run() -> None:
    params = [ParamSpec(f"p{i}", (100,), torch.float32, True, i % 2) for i in range(6)]
    (layout,) = partition([("u", params)], NORM_BLOCK)
    groups = [params[s.param].group for c in layout.chunks for s in c.segments]
    assert groups == sorted(groups)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(4, 60))
def test_a_split_follows_its_shares_all_along(share: float, count: int) -> None:
    units = [(f"u{i}", [ParamSpec(f"p{i}", (NORM_BLOCK,), torch.bfloat16, True, 0)]) for i in range(count)]
    layouts = partition(units, NORM_BLOCK)
    shares = {Tier.HOST: share, Tier.NVME: 1 - share}
    assignment = assign(layouts, shares, shares, shares)
    for upto in range(1, count + 1):
        on_host = sum(t is Tier.HOST for t in assignment.copies[:upto])
        assert abs(on_host - share * upto) <= 1


def test_the_copy_is_the_master_only_in_fp32_on_one_tier() -> None:
    def sections(dtype: torch.dtype, copy: Tier, state: Tier) -> int:
        layouts = partition([("u", [ParamSpec("p", (10,), dtype, True, 0)])], NORM_BLOCK)
        plans = plan_chunks(
            layouts, assign(layouts, {copy: 1.0}, {state: 1.0}, {Tier.HOST: 1.0}), staged=False
        )
        return len(plans[0].parts["state"].sections)

    assert sections(torch.float32, Tier.NVME, Tier.NVME) == 2
    assert sections(torch.float32, Tier.DEVICE, Tier.NVME) == 3
    assert sections(torch.bfloat16, Tier.NVME, Tier.NVME) == 3
