"""Muon on several ranks: one update of each matrix, and one end for all. Its bits are those of plain torch in
test_ranks.py, and its checkpoints are in test_rank_checkpoints.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from infinity.planning.matrices import flops_of, rounds_of, work_of
from infinity.planning.partition import ParamSpec, UnitLayout, partition

from .ranks import all_well, run_ranks
from .test_ranks import HEAD, LOOP, settings_of

pytestmark = pytest.mark.integration

MUON = """
from infinity.core.errors import BudgetError, OutOfMemoryError, StorageError
from infinity.hardware import muon
from infinity.optim import matrices
from tests.whole import muon as optimizer_of

adam = optimizer_of(model.parameters())
"""
#: A training of which one rank does something else; says how it ends, and after how many seconds.
UNDER_A_FAULT = """
begun, inner = time.monotonic(), matrices.Matrices._work_on

def fails(self, matrix):
    matrices.Matrices._work_on = inner
    exec(sys.argv[2])

if rank == 1:
    matrices.Matrices._work_on = fails
try:
    step()
    step()
    infinity.close(adam)
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
    config = json.dumps(settings_of(tmp_path, "nvme", "fp32", rank_timeout=20.0))
    first, second, third = run_ranks(3, HEAD + MUON + LOOP + UNDER_A_FAULT, config, fault)
    assert second[0] != 0
    for exit_code, said, err in (first, third):
        assert exit_code == 1, err
        name, message, seconds = json.loads(said)
        assert name == "RankError"
        assert re.search(FAULTS[fault], message), message
        assert seconds < 15


#: In the last step the owner of a matrix has no memory for it. The loss of the first rank counts, times the
#: number of ranks, which changes no bits where that is a power of two.
NO_MEMORY = """
model, adam = infinity.wrap(model, adam, config)
inner, calls, number = muon.orthogonalize, 0, 0

def short(*given):
    global calls
    if rank == world - 1 and number == 3 and world > 1:
        raise MemoryError
    calls += 1
    return inner(*given)

muon.orthogonalize = short
ended = ""
for number in range(4):
    loss = model(torch.full((2, 8), number + 1.0)).square().mean()
    (loss * (0 if rank else world)).backward()
    try:
        adam.step()
    except InfinityError as error:
        ended = type(error).__name__
    adam.zero_grad() if not ended else None
    if number == 2:
        values = [value.double().sum().item().hex() for value in model.state_dict().values()]
        made = calls
print(json.dumps([values, made, ended]))
infinity.close(adam)
"""


def test_an_update_without_memory_ends_on_all_ranks(tmp_path: Path) -> None:
    """And each matrix is updated by one rank alone."""
    found = []
    for world in (1, 2):
        (folder := tmp_path / str(world)).mkdir()
        config = json.dumps(settings_of(folder, "nvme", "fp32", update="sync"))
        script = HEAD + MUON + "from infinity.core.errors import InfinityError\n" + NO_MEMORY
        found.append([json.loads(said) for said in all_well(run_ranks(world, script, config))])
    (alone,), two = found
    assert [ended for *_, ended in two] == ["RankError", "OutOfMemoryError"]
    assert all(values == alone[0] for values, *_ in two)
    assert sum(calls for _, calls, _ in two) == alone[1] == 3 * 8  # steps, and matrices


TOO_LARGE = """
def made(config):
    model = nn.Sequential(nn.Linear(900, 1000), nn.Linear(1000, 3))
    return infinity.wrap(model, optimizer_of(model.parameters()), config)

try:
    made(config)
except BudgetError as error:
    print(error.what, error.expected, error.cure, flush=True)
    cure = dict(each.strip().split("=") for each in error.cure.split(","))
model, adam = made(config.replace(**{name: json.loads(value) for name, value in cure.items()}))
model(torch.ones(2, 900)).sum().backward()
adam.step()
infinity.close(adam)
"""


def test_a_matrix_that_does_not_fit_is_refused_with_what_helps(tmp_path: Path) -> None:
    config = {**settings_of(tmp_path, "nvme", "fp32"), "device_memory": "2MiB"}
    for said in all_well(run_ranks(2, HEAD + MUON + TOO_LARGE, json.dumps(config), seconds=120)):
        assert "the largest matrix is '0.weight'" in said


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
