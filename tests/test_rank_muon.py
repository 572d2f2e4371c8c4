"""Muon on several ranks: the bits of plain torch, and one update of each matrix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from infinity.planning.matrices import flops_of, rounds_of, work_of
from infinity.planning.partition import ParamSpec, UnitLayout, partition

from .ranks import all_well, run_ranks
from .test_ranks import settings_of

#: A matrix in slices of all ranks, one that is in one rank's alone, and what is no matrix.
SHAPES = [[[96, 130], [3, 5], [64], [70, 40], [130, 96]], [[20, 200], [7], [8, 8], [1, 50]]]


def updates_of(steps: range) -> int:
    """Return how many matrices `steps` update: of each block one parameter has no gradient."""
    return sum(
        len(shape) == 2 and index != step
        for step in steps
        for block in SHAPES
        for index, shape in enumerate(block)
    )


@pytest.mark.first
@pytest.mark.parametrize("worlds", [(3, 2), (2, 1), (1, 3)], ids=str)
def test_any_number_of_ranks_goes_on_from_a_checkpoint_of_any_other(
    worlds: tuple[int, int], tmp_path: Path
) -> None:
    """With the bits of plain torch: each matrix is whole, in its shape, and of the mean gradient."""
    saved = str(tmp_path / "saved")
    for world, place, steps, more in zip(
        worlds, ("nvme", "split"), ((0, 2), (2, 4)), ({"save": saved}, {"load": saved}), strict=True
    ):
        (folder := tmp_path / f"of {world}").mkdir()
        config = settings_of(folder, place, "fp32", units=["Block"], chunk_elements=65536)
        given = {"shapes": SHAPES, "config": config, "steps": steps, **more}
        results = run_ranks(world, "from tests.rank_muon import main; main()", json.dumps(given), seconds=120)
        found = [json.loads(said) for said in all_well(results)]
        assert all(mine == whole for mine, _, whole in found)
        assert sum(calls for _, calls, _ in found) == updates_of(range(*steps))


HEAD = """
import json, os, signal, sys, time
import torch
import infinity
from infinity.core.errors import BudgetError, OutOfMemoryError, StorageError
from infinity.hardware import muon
from infinity.optim import matrices
from tests.rank_muon import Net, digest_of, run_steps
from tests.whole import muon as optimizer_of
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
given = json.loads(sys.argv[1])

def made(shapes, config):
    model = Net(shapes)
    return infinity.wrap(model, optimizer_of(model.parameters()), infinity.Config(**config))
"""
#: A training of which one rank does something else; says how it ends, and after how many seconds.
UNDER_A_FAULT = """
model, optimizer = made(given["shapes"], given["config"])
run_steps(model, optimizer, range(2), rank, world)
begun, inner = time.monotonic(), matrices.Matrices._work_on

def fails(self, matrix):
    matrices.Matrices._work_on = inner
    exec(given["fault"])

if rank == 1:
    matrices.Matrices._work_on = fails
try:
    run_steps(model, optimizer, range(2, 4), rank, world)
    infinity.close(optimizer)
except infinity.InfinityError as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic() - begun]), flush=True)
    raise
"""
FAULTS = {
    "raise StorageError('a drive')": "a drive",
    "raise MemoryError": "OutOfMemoryError",
    "os.kill(os.getpid(), signal.SIGKILL)": "rank 1 is gone",
}


@pytest.mark.first
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_in_its_update_ends_all(fault: str, tmp_path: Path) -> None:
    config = settings_of(tmp_path, "nvme", "fp32", units=["Block"], rank_timeout=20.0)
    given = {"shapes": [SHAPES[0], SHAPES[0]], "config": config, "fault": fault}
    first, second, third = run_ranks(3, HEAD + UNDER_A_FAULT, json.dumps(given))
    assert second[0] != 0
    for exit_code, said, err in (first, third):
        assert exit_code == 1, err
        name, message, seconds = json.loads(said)
        assert name == "RankError"
        assert re.search(FAULTS[fault], message), message
        assert seconds < 15


#: The owner of a matrix has no memory for it, once; its program makes the same call again.
GOES_ON = """
model, optimizer = made(given["shapes"], given["config"])
inner, raised = muon.orthogonalize, 0

def short(*given):
    global raised
    if rank == world - 1 and not raised:
        raised = 1
        raise MemoryError
    return inner(*given)

muon.orthogonalize = short
for step in range(4):
    model(step, 1.0).backward()
    try:
        optimizer.step()
    except OutOfMemoryError:
        optimizer.step()
        raised += 1
    optimizer.zero_grad()
print(json.dumps([digest_of(model), raised]))
infinity.close(optimizer)
"""


def test_an_update_that_stops_goes_on_on_all_ranks(tmp_path: Path) -> None:
    found = []
    for world in (1, 3):
        (folder := tmp_path / str(world)).mkdir()
        config = settings_of(folder, "nvme", "fp32", units=["Block"], update="sync")
        results = run_ranks(world, HEAD + GOES_ON, json.dumps({"shapes": SHAPES, "config": config}))
        found.append([json.loads(said) for said in all_well(results)])
    assert [raised for _, raised in found[1]] == [0, 0, 2]
    assert {digest for digest, _ in found[1]} == {found[0][0][0]}


TOO_LARGE = """
shapes = [[[1000, 900], [8]], [[8, 8], [3]]]
try:
    made(shapes, given)
except BudgetError as error:
    print(error.what, error.expected, error.cure, flush=True)
    cure = dict(each.strip().split("=") for each in error.cure.split(","))
model, optimizer = made(shapes, given | {name: json.loads(value) for name, value in cure.items()})
run_steps(model, optimizer, range(2), rank, world)
infinity.close(optimizer)
"""


def test_a_matrix_that_does_not_fit_is_refused_with_what_helps(tmp_path: Path) -> None:
    config = {**settings_of(tmp_path, "nvme", "fp32", units=["Block"]), "device_memory": "2MiB"}
    for said in all_well(run_ranks(2, HEAD + TOO_LARGE, json.dumps(config), seconds=120)):
        assert "the largest matrix is 'blocks.0.each.0'" in said


def test_owners_are_the_same_on_all_ranks_and_share_the_work() -> None:
    world, width, blocks = 3, 512, 12
    block = [[width, width]] * 4 + [[4 * width, width]] * 2 + [[width, 4 * width], [width]]

    def layouts(rank: int) -> tuple[UnitLayout, ...]:
        units = [
            (
                f"unit {u}",
                [ParamSpec(f"{u}.{i}", (*s,), "bf16", True, 0, len(s) == 2) for i, s in enumerate(block)],
            )
            for u in range(blocks)
        ]
        return partition(units, 65536, rank=rank, world=world)

    found = [rounds_of(layouts(rank)) for rank in range(world)]
    assert found == found[:1] * world
    for rounds in found[0]:
        assert sorted(m.param for group in rounds for m in group) == [*range(7)]  # each matrix, once
        assert all(len({m.owner for m in group}) == len(group) <= world for group in rounds)
    flops = [each.flops for each in work_of(layouts(0))]
    assert sum(flops) == blocks * sum(flops_of(shape) for shape in block if len(shape) == 2)
    assert max(flops) - min(flops) <= flops_of([4 * width, width])
