"""How units are cut: every element once, on one rank, aligned, the same for every chunk size."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.sizes import NORM_BLOCK, SEGMENT_ELEMENTS, Tier
from infinity.planning.partition import ParamSpec, UnitLayout, partition
from infinity.planning.parts import ADAM, Moment, plan_chunks
from infinity.planning.placement import assign

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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4096), st.data())
def test_padding_of_large_units_is_small(world: int, data: st.DataObject) -> None:
    """Below 1 % of gathered storage where a rank has more than 1 MiB of a unit."""
    params: list[ParamSpec] = []
    least = (world << 20) + 1
    while sum(p.nbytes for p in params) < least:
        dtype, trainable = data.draw(dtypes), data.draw(st.booleans())
        small = st.integers(1, 65536) if len(params) < 4 else st.nothing()
        numel = data.draw(small | st.integers(world << 17, world << 19))
        params.append(ParamSpec(f"p{len(params)}", (numel,), dtype, trainable, 0 if trainable else -1))
    (layout,) = partition([("u", params)], 1 << 40, rank=world // 2, world=world)
    assert layout.gathered_nbytes - sum(p.nbytes for p in params) < 0.01 * layout.gathered_nbytes


@settings(max_examples=60, deadline=None)
@given(models())
def test_the_place_of_a_parameter_does_not_depend_on_the_chunk_size(
    units: list[tuple[str, list[ParamSpec]]],
) -> None:
    small, large = partition(units, NORM_BLOCK), partition(units, 8 * NORM_BLOCK)
    for a, b in zip(small, large, strict=True):
        assert a.byte_offsets == b.byte_offsets
        assert a.gathered_nbytes == b.gathered_nbytes
        # Norm blocks lie on one grid: sums over them are the same sums (Note: norms).
        pieces = [[(p, c.start + at, n) for c in u.chunks for p, at, n in c.norm_pieces] for u in (a, b)]
        assert pieces[0] == pieces[1]
        sizes = Counter[int]()
        for param, _, numel in pieces[0]:
            assert 0 < numel <= NORM_BLOCK
            sizes[param] += numel
        assert all(sizes[i] == p.numel for i, p in enumerate(a.params))


def test_groups_are_contiguous_within_a_run() -> None:
    params = [ParamSpec(f"p{i}", (100,), "fp32", True, i % 2) for i in range(6)]
    (layout,) = partition([("u", params)], NORM_BLOCK)
    groups = [params[s.param].group for c in layout.chunks for s in c.segments]
    assert groups == sorted(groups)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(4, 60))
def test_a_split_follows_its_shares_all_along(share: float, count: int) -> None:
    units = [(f"u{i}", [ParamSpec(f"p{i}", (NORM_BLOCK,), "bf16", True, 0)]) for i in range(count)]
    layouts = partition(units, NORM_BLOCK)
    shares = {Tier.HOST: share, Tier.NVME: 1 - share}
    assignment = assign(layouts, shares, shares, shares)
    for upto in range(1, count + 1):
        on_host = sum(t is Tier.HOST for t in assignment.copies[:upto])
        assert abs(on_host - share * upto) <= 1


def test_the_copy_is_the_master_only_in_fp32_on_one_tier() -> None:
    def sections(dtype: str, copy: Tier, state: Tier) -> int:
        layouts = partition([("u", [ParamSpec("p", (10,), dtype, True, 0)])], NORM_BLOCK)
        plans = plan_chunks(
            layouts,
            assign(layouts, {copy: 1.0}, {state: 1.0}, {Tier.HOST: 1.0}),
            [Moment(name, "fp32") for name in ADAM],
            staged=False,
        )
        return len(plans[0].parts["state"].sections)

    assert sections("fp32", Tier.NVME, Tier.NVME) == 2
    assert sections("fp32", Tier.DEVICE, Tier.NVME) == 3
    assert sections("bf16", Tier.NVME, Tier.NVME) == 3
