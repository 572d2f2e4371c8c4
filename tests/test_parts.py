"""The parts of chunks: sizes, places in leases and traffic, for every placement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from infinity.core.sizes import ALIGNMENT, NORM_BLOCK, Tier
from infinity.planning.partition import ParamSpec, partition
from infinity.planning.parts import ADAM, PURPOSES, ChunkParts, Moment, plan_chunks
from infinity.planning.placement import assign
from infinity.storage.layout import Layout

DTYPES = ("fp32", "bf16", "fp16")
PLACES = list(itertools.product(Tier, Tier, Tier))
MOMENTS = [Moment(name, "fp32") for name in ADAM]


def parts_of(
    places: tuple[Tier, Tier, Tier],
    dtype: str,
    *,
    staged: bool,
    delayed: bool,
    frozen: bool = False,
    moments: Sequence[Moment] = MOMENTS,
) -> ChunkParts:
    layouts = partition([("u", [ParamSpec("p", (NORM_BLOCK,), dtype, not frozen, 0)])], NORM_BLOCK)
    assignment = assign(layouts, *({tier: 1.0} for tier in places))
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


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_copy_is_the_master_where_it_can_be(dtype: str, delayed: bool) -> None:
    for places in PLACES:
        plan = parts_of(places, dtype, staged=True, delayed=delayed)
        one_tier = dtype == "fp32" and places[0] is places[1]
        assert plan.copy_is_master == (one_tier and not (delayed and places[0] is Tier.DEVICE))
        assert plan.parts["state"].sections == (4 * NORM_BLOCK,) * (2 if plan.copy_is_master else 3)


@pytest.mark.parametrize("tier", Tier)
def test_a_frozen_chunk_has_a_copy_and_nothing_else(tier: Tier) -> None:
    plan = parts_of((tier, Tier.NVME, Tier.NVME), "bf16", staged=True, delayed=True, frozen=True)
    assert list(plan.parts) == ["copy"]
    assert (plan.state_tier, plan.gradient_tier, plan.gradient_lease) == (None, None, 0)
    assert plan.load_lease == plan.update_lease == (2 * NORM_BLOCK if tier is Tier.NVME else 0)
    assert plan.copy.tiers == (tier,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delayed_update_has_two_slots_of_copy_and_gradient(dtype: str) -> None:
    for places in PLACES:
        once = parts_of(places, dtype, staged=True, delayed=False)
        assert [part.tiers for part in once.parts.values()] == [(places[0],), (places[1],), (places[2],)]
        plan = parts_of(places, dtype, staged=True, delayed=True)
        # The back of what forward and backward use on the device waits on the host.
        back = Tier.HOST if places[0] is Tier.DEVICE else places[0]
        assert plan.parts["copy"].tiers == (places[0], back)
        assert plan.parts["state"].tiers == (places[1],)
        assert plan.parts["gradient"].tiers == (places[2],) * 2


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


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_a_new_moment_needs_its_name_and_its_dtype_and_no_more(
    places: tuple[Tier, Tier, Tier], precision: str, itemsize: int
) -> None:
    before = parts_of(places, "bf16", staged=True, delayed=False)
    more = [*MOMENTS, Moment("max_exp_avg_sq", precision)]
    after = parts_of(places, "bf16", staged=True, delayed=False, moments=more)
    section, on_nvme = itemsize * NORM_BLOCK, places[1] is Tier.NVME
    assert after.parts["state"].sections == (*before.parts["state"].sections, section)
    assert after.update_lease - before.update_lease == (section if on_nvme else 0)
    assert after.moved.read - before.moved.read == (section if on_nvme else 0)
    assert after.moved.written - before.moved.written == (section if on_nvme else 0)
    extents = [Layout([p.parts] * 3, 1).arena_nbytes[0] for p in (before, after)]
    assert extents[1] - extents[0] == (3 * section if on_nvme else 0)
