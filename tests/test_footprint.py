"""Bytes per tier in closed form, and the refusal of what does not fit."""

from __future__ import annotations

import dataclasses

import pytest

from infinity.core.config import Config
from infinity.core.errors import BudgetError
from infinity.core.sizes import ITEMSIZES, NORM_BLOCK, GiB, MiB, Tier
from infinity.planning.footprint import Budget, Footprint, demand, within
from infinity.planning.partition import ParamSpec, partition
from infinity.planning.parts import ADAM, is_made_once, moments_of, plan_chunks
from infinity.planning.placement import assign

NUMEL = 4 * NORM_BLOCK
UNITS = [(f"block.{i}", [ParamSpec(f"block.{i}.w", (NUMEL,), "bf16", True, 0)]) for i in range(8)]


def plan(budget: Budget, *, staged: bool = False, **settings: object) -> Footprint:
    config = Config(nvme="somewhere", chunk_elements=NORM_BLOCK, **settings)  # type: ignore[arg-type]
    layouts = partition(UNITS, config.elements_per_chunk)
    placements = config.placements
    assignment = assign(
        layouts, placements["parameters"], placements["optimizer_state"], placements["gradients"]
    )
    sets = [[i] for i in range(len(UNITS))]
    moments, once = moments_of(ADAM, config), is_made_once(config, 1)
    plans = plan_chunks(layouts, assignment, moments, staged=staged, once=once)
    wanted = demand(layouts, plans, sets, config, staged=staged)
    return within(wanted, config, budget, staged=staged)


ON_NVME = {"parameters": "nvme", "optimizer_state": "nvme", "gradients": "nvme"}


def test_everything_on_nvme_takes_pools_and_nothing_that_grows() -> None:
    result = plan(Budget(device=64 * MiB, host=64 * MiB), **ON_NVME)
    total = 8 * NUMEL
    assert result.nvme == {"parameters": 2 * total, "optimizer state": 12 * total, "gradients": 4 * total}
    assert set(result.host) == {"load leases", "update leases", "gradient leases"}
    assert result.quotas["update"].buffer_nbytes == NORM_BLOCK * (12 + 4 + 2)
    assert result.working_nbytes == 2 * NUMEL
    assert result.nvme_read_per_step == (12 + 2 + 2 + 2) * total
    assert result.nvme_written_per_step == (12 + 2 + 2) * total


def test_on_the_device_and_the_host() -> None:
    result = plan(Budget(device=GiB, host=GiB), parameters="device", optimizer_state="host", gradients="host")
    total = 8 * NUMEL
    assert result.device == {"parameters": 2 * total, "gradients in flight": 4 * NUMEL}
    assert result.host["optimizer state"] == 12 * total
    assert result.host["gradients"] == 4 * total
    assert not result.nvme
    assert result.total(Tier.DEVICE) == 2 * total + 4 * NUMEL


def test_gradients_that_one_backward_makes_take_what_the_compute_dtype_does() -> None:
    """2 bytes fewer for each element of bf16, on their tier and in each lease; no byte moves that did not."""
    total, budget = 8 * NUMEL, Budget(device=64 * MiB, host=64 * MiB)
    result, wide = (plan(budget, **ON_NVME, accumulation=n) for n in (1, None))
    assert wide.nvme["gradients"] - result.nvme["gradients"] == 2 * total
    assert result.nvme == {"parameters": 2 * total, "optimizer state": 12 * total, "gradients": 2 * total}
    assert result.quotas["update"].buffer_nbytes == NORM_BLOCK * (12 + 2 + 2)
    assert result.quotas["gradient"].buffer_nbytes == NORM_BLOCK * 2
    for name in ("nvme_read_per_step", "nvme_written_per_step", "device"):
        assert getattr(result, name) == getattr(wide, name)
    least = NORM_BLOCK * (2 + 12 + 2 + 2 + 2 * 2)
    assert plan(Budget(device=64 * MiB, host=least), **ON_NVME, accumulation=1).total(Tier.HOST) == least
    on_host = {"parameters": "device", "optimizer_state": "host", "gradients": "host"}
    assert plan(Budget(device=GiB, host=GiB), **on_host, accumulation=1).host["gradients"] == 2 * total


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_rank_takes_on_the_device_what_zero_says(stage: int, world: int, dtype: str) -> None:
    """Of E elements (ZeRO, arXiv 1910.02054, section 5, in our bytes): c of the copy, 4 of the gradient, 12
    of the state, or 8 where the copy is the master; besides units in use and gradients in flight."""
    units = [(n, [dataclasses.replace(p, precision=dtype) for p in params]) for n, params in UNITS]
    gradients = None if stage < 2 else "device"
    config = Config(parameters="device", optimizer_state="device", gradients=gradients, zero_stage=stage)
    layouts = partition(units, config.elements_per_chunk, rank=world - 1, world=world, replicated=stage == 0)
    placements = config.placements
    plans = plan_chunks(
        layouts,
        assign(layouts, placements["parameters"], placements["optimizer_state"], placements["gradients"]),
        moments_of(ADAM, config),
        staged=False,
    )
    wanted = demand(layouts, plans, [[i] for i in range(len(UNITS))], config, staged=False)
    elements, c, g = 8 * NUMEL, ITEMSIZES[dtype], 4
    s = 8 if dtype == "fp32" else 12
    said = {
        0: elements * (c + g + s),
        1: elements * (c + g) + elements * s // world,
        2: elements * c + elements * (g + s) // world,
        3: elements * (c + g + s) // world,
    }
    found = sum(wanted.placed[Tier.DEVICE].values())
    if world > 1 and stage in (1, 2):  # all that was gathered stays
        found += wanted.working
    elif world > 1 and stage == 3:
        assert wanted.working == NUMEL * c
    assert found == said[1 if world == 1 else stage]


def test_leases_shrink_to_the_least_before_a_run_is_refused() -> None:
    least = NORM_BLOCK * 2 + NORM_BLOCK * 18 + 2 * NORM_BLOCK * 4
    result = plan(Budget(device=64 * MiB, host=least), **ON_NVME)
    assert result.total(Tier.HOST) == least
    with pytest.raises(BudgetError) as caught:
        plan(Budget(device=64 * MiB, host=least - 1), **ON_NVME)
    assert str(least) in str(caught.value)
    assert "host_memory" in str(caught.value)


def test_activations_take_a_share_of_what_is_left() -> None:
    least = NORM_BLOCK * 2 + NORM_BLOCK * 18 + 2 * NORM_BLOCK * 4
    on_host = {**ON_NVME, "activations": "host"}
    assert plan(Budget(device=64 * MiB, host=least), **on_host).activation_nbytes == 0
    result = plan(Budget(device=64 * MiB, host=least + 40 * MiB), **on_host)
    assert result.activation_nbytes == result.host["activations"] == 10 * MiB
    assert result.total(Tier.HOST) <= least + 40 * MiB
    assert plan(Budget(device=64 * MiB, host=1 << 50), **on_host).activation_nbytes == 16 * GiB
    assert "activations" not in plan(Budget(device=64 * MiB, host=GiB), **ON_NVME).host


def test_a_device_budget_below_the_largest_unit_is_refused_with_the_unit() -> None:
    need = 2 * NUMEL * 3  # its copy, its gradients and those of the unit before
    assert plan(Budget(device=need, host=GiB), **ON_NVME).prefetch_nbytes == 0
    with pytest.raises(BudgetError) as caught:
        plan(Budget(device=need - 1, host=GiB), **ON_NVME)
    assert str(need) in str(caught.value)
    assert "block.0" in str(caught.value)


def test_prefetch_takes_what_the_device_budget_leaves_and_no_more_than_the_model() -> None:
    need = 2 * NUMEL * 3
    assert plan(Budget(device=need + 5000, host=GiB), **ON_NVME).prefetch_nbytes == 5000
    assert plan(Budget(device=GiB, host=GiB), **ON_NVME).prefetch_nbytes == 7 * 2 * NUMEL


def test_prefetch_leaves_room_for_activations_where_no_device_memory_is_named() -> None:
    """Then the budget is nearly all that the device has. One gradient is not in a buffer yet."""
    need = 2 * NUMEL * (3 + 1)
    budget = Budget(device=need + 4 * NUMEL, host=GiB)
    assert plan(budget, staged=True, **ON_NVME).prefetch_nbytes == 2 * NUMEL
    assert plan(budget, staged=True, device_memory=budget.device, **ON_NVME).prefetch_nbytes == 4 * NUMEL
    assert plan(Budget(device=GiB, host=GiB), staged=True, **ON_NVME).prefetch_nbytes == 7 * 2 * NUMEL
