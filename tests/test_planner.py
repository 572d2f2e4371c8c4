"""Plans: bytes, traffic and wear in closed form, and cures that cure."""

from __future__ import annotations

from typing import Any

import pytest

from infinity.core.config import Config
from infinity.core.sizes import GiB, MiB, Tier
from infinity.planning.footprint import Budget
from infinity.planning.machine import Drive, Machine
from infinity.planning.partition import ParamSpec
from infinity.planning.planner import Bandwidths, Model, Plan, Planner, step_bounds, wear

from . import inner

DIMENSION = 1024
BLOCKS = 6
PARAMETERS = BLOCKS * DIMENSION * DIMENSION  # sizes that need no padding
ROOMY = Budget(device=64 * GiB, host=64 * GiB)


def model_of(dtype: str) -> Model:
    units = [
        (f"blocks.{i}", [ParamSpec(f"blocks.{i}.weight", (DIMENSION, DIMENSION), dtype, True, 0)])
        for i in range(BLOCKS)
    ]
    return Model(units, [(i,) for i in range(BLOCKS)])


def config_of(places: str = "nvme", **changes: Any) -> Config:
    placed = {"parameters": places, "optimizer_state": places, "gradients": places}
    settings = {**placed, "nvme": "/nvme", "dtype": "bf16"}
    return Config(**{**settings, "device": "cpu", "chunk_elements": 1 << 19, **changes})


def plan_of(config: Config, budget: Budget = ROOMY, *, staged: bool = True, **options: Any) -> Plan:
    """The plan on a machine that has what `budget` says, and more."""
    given = {"device_memory": budget.device, "host_memory": budget.host}
    planner = Planner(model_of(str(config.dtype)))
    return planner.plan(config.replace(**given), large_machine(config, staged), **options)


def large_machine(config: Config, staged: bool) -> Machine:
    drives = tuple(Drive(directory=d, free=None, system=d) for d in config.directories)
    return Machine(host_memory=1 << 50, device_memory=1 << 50 if staged else None, drives=drives)


@pytest.mark.parametrize(
    ("dtype", "at_rest", "read", "written"),
    # bf16: copy 2, state 12, gradient 4 (room for fp32, 2 used); fp32: the copy is the master
    [("bf16", 2 + 12 + 4, 2 * 2 + 12 + 2, 12 + 2 + 2), ("fp32", 12 + 4, 2 * 4 + 12 + 4, 12 + 4)],
)
def test_bytes_per_parameter_on_nvme(dtype: str, at_rest: int, read: int, written: int) -> None:
    plan = plan_of(config_of(dtype=dtype))
    assert plan.parameters == plan.trainable == PARAMETERS
    assert plan.footprint.total(Tier.NVME) == at_rest * PARAMETERS
    assert plan.traffic.nvme_read == read * PARAMETERS
    assert plan.traffic.nvme_written == written * PARAMETERS


def test_traffic_of_accumulation_and_over_the_link() -> None:
    """Each further micro-batch loads again and adds in fp32; the link carries activations as far as there is
    room for them."""
    config = config_of(dtype="bf16")
    once, four = (plan_of(config, accumulation=a).traffic for a in (1, 4))
    assert four.nvme_read - once.nvme_read == 3 * (2 * 2 + 4) * PARAMETERS
    assert four.nvme_written - once.nvme_written == 3 * 4 * PARAMETERS
    assert once.link == plan_of(config, inputs=MiB).traffic.link == 6 * PARAMETERS
    on_device = config_of("host", dtype="bf16", parameters="device")
    assert plan_of(on_device).traffic.link == 4 * PARAMETERS
    config = config_of(dtype="bf16", activations="host")
    inner.config(activation_memory="8MiB")
    for inputs, moved in ((0, 0), (5 * MiB, 5 * MiB), (9 * MiB, 8 * MiB)):
        plan = plan_of(config, inputs=inputs, accumulation=3)
        assert plan.traffic.link == 3 * (6 * PARAMETERS + 2 * moved)


def test_wear_and_bounds() -> None:
    plan = plan_of(config_of(dtype="bf16"))
    assert plan.fits
    worn = wear(plan.traffic, steps=1000, tbw=1, drives=2)
    assert worn.run_bytes == 16 * PARAMETERS * 1000
    assert worn.share == pytest.approx(worn.run_bytes / 2e12)
    assert worn.steps_rated == pytest.approx(2e12 / (16 * PARAMETERS))
    assert step_bounds(plan, Bandwidths(nvme_read=2, tflops=1), tokens=100, recompute=True) == {
        "compute": pytest.approx(8 * PARAMETERS * 100 / 1e12),
        "nvme read": pytest.approx(18 * PARAMETERS / 2e9),
    }
    plan = plan_of(config_of("host"))
    assert plan.footprint.total(Tier.NVME) == 0
    assert wear(plan.traffic, steps=10, tbw=600, drives=0).steps_rated is None


PLACES = ["device", "host", "nvme"]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("places", PLACES)
def test_what_is_needed_is_the_exact_boundary(places: str, dtype: str, staged: bool) -> None:
    config = config_of(places, dtype=dtype)
    needed = {p.tier: p.needed for p in plan_of(config, Budget(device=0, host=0), staged=staged).problems}
    enough = Budget(device=needed.get(Tier.DEVICE, 0), host=needed.get(Tier.HOST, 0))
    assert plan_of(config, enough, staged=staged).fits
    for tier in needed:
        short = Budget(
            device=enough.device - 4096 * (tier is Tier.DEVICE), host=enough.host - 4096 * (tier is Tier.HOST)
        )
        [problem] = plan_of(config, short, staged=staged).problems
        assert problem.tier is tier


def test_a_device_without_memory_of_its_own_shares_the_hosts() -> None:
    planner = Planner(model_of("fp32"))
    config = config_of("host", dtype="fp32", device_memory="24MiB", host_memory="120MiB")
    alone = planner.plan(config, Machine(host_memory=GiB, device_memory=None))
    assert alone.fits
    whole = alone.footprint.total(Tier.DEVICE) + alone.footprint.total(Tier.HOST)
    for beside, fits in ((MiB, True), (MiB + 1, False)):
        plan = planner.plan(
            config, Machine(host_memory=whole + MiB, device_memory=None), activations=lambda _, n=beside: n
        )
        assert plan.fits is fits


LARGE = Model([("block", [ParamSpec("block.weight", (4096, 8192), "bf16", True, 0)])], [(0,)])
CHUNKS = {2 * MiB: 16, 4 * MiB: 8, 16 * MiB: 2}  # of it, by their size


@pytest.mark.parametrize(
    ("places", "staged", "changes", "size"),
    [
        ("host", True, {}, 16 * MiB),
        ("device", True, {}, 16 * MiB),
        ("host", False, {}, 4 * MiB),
        ("nvme", True, {}, 2 * MiB),
        ("host", True, {"gradients": {"host": 0.9, "nvme": 0.1}}, 2 * MiB),
        ("host", True, {"chunk_elements": 4 * MiB}, 4 * MiB),
        ("host", True, {"host_memory": "2GiB"}, 4 * MiB),  # 160 MiB of leases are no sixteenth
    ],
)
def test_chunks_are_large_where_a_device_has_its_own_memory(
    places: str, staged: bool, changes: dict[str, Any], size: int
) -> None:
    budgets = {"host_memory": "64GiB", "device_memory": "64GiB"}
    config = config_of(places, **{"chunk_elements": None, **budgets, **changes})
    assert Planner(LARGE).plan(config, large_machine(config, staged)).chunks == CHUNKS[size]
