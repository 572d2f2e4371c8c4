"""Muon on several ranks: the bits of one rank, and one update of each matrix."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.planning.matrices import flops_of, pieces_of, room_of, rounds_of, work_of
from infinity.planning.partition import ParamSpec, UnitLayout, partition

from .ranks import all_well, run_ranks
from .test_ranks import PLACES, settings_of

SCRIPT = "from tests.rank_muon import main; main()"
STEPS = 4
#: A matrix in slices of all ranks, one that is in one rank's alone, and what is no matrix.
SHAPES = [[[96, 130], [3, 5], [64], [70, 40], [130, 96]], [[20, 200], [7], [8, 8], [1, 50]]]


def trained(world: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    results = run_ranks(world, SCRIPT, json.dumps({"steps": [0, STEPS], **settings}), seconds=120)
    return [json.loads(said) for said in all_well(results)]


def updates_of(shapes: list[list[list[int]]], steps: int = STEPS) -> int:
    """Return how many matrices `steps` steps update: of each block one parameter has no gradient."""
    return sum(
        len(shape) == 2 and index != step
        for step in range(steps)
        for block in shapes
        for index, shape in enumerate(block)
    )


def drawn(seed: int) -> tuple[list[list[list[int]]], random.Random]:
    draw = random.Random(seed)

    def shape() -> list[int]:
        return [draw.choice([1, 3, 17, 64, 100, 257, 400]) for _ in range(draw.choice([1, 2, 2, 2]))]

    return [[shape() for _ in range(draw.randint(2, 5))] for _ in range(draw.randint(1, 3))], draw


def config_of(folder: Path, draw: random.Random, world: int) -> dict[str, Any]:
    modes = ("sync", "overlap") if world > 1 else ("sync", "overlap", "backward")
    stage = draw.choice([1, 2, 3, 3, 3]) if world > 1 else 3
    place = draw.choice([*PLACES] if stage == 3 else ["device", "state on nvme"])
    given = settings_of(folder, place, "fp32", update=draw.choice(modes), zero_stage=stage, units=["Block"])
    given["chunk_elements"] = draw.choice([65536, 131072])
    if stage < 2:
        given["gradients"] = None
    if given["update"] == "backward":
        given["accumulation"] = 1
    return given


@pytest.mark.first
@pytest.mark.parametrize("seed", [0, 1])
def test_any_number_of_ranks_gives_the_same_bits(seed: int, tmp_path: Path) -> None:
    shapes, draw = drawn(seed)
    wanted = None
    for world in (1, 2, 3):
        (folder := tmp_path / str(world)).mkdir()
        config = config_of(folder, draw, world)
        given = {"shapes": shapes, "config": config, "whole": world == 1}
        found = trained(world, given)
        wanted = wanted or found[0]["whole"]
        assert [each["digest"] for each in found] == [wanted] * world, (world, config)
        assert sum(each["calls"] for each in found) == updates_of(shapes)


@pytest.mark.first
@pytest.mark.parametrize("worlds", [(3, 2), (2, 1), (1, 3)], ids=str)
def test_a_checkpoint_of_any_number_of_ranks_goes_on_with_any_other(
    worlds: tuple[int, int], tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    for world, more in zip(worlds, ({"steps": [0, 2], "save": saved}, {"load": saved}), strict=True):
        (folder := tmp_path / f"of {world}").mkdir()
        config = settings_of(folder, "nvme" if "save" in more else "host", "fp32", units=["Block"])
        begin = {"steps": [2, STEPS]} if "load" in more else {}
        given = {"shapes": SHAPES, "config": config, **begin, **more}
        found = trained(world, given)
    (folder := tmp_path / "whole").mkdir()
    config = settings_of(folder, "host", "fp32", units=["Block"])
    [whole] = trained(1, {"shapes": SHAPES, "config": config})
    assert {each["digest"] for each in found} == {whole["digest"]}


HEAD = """
import json, os, signal, sys, time
import torch
import infinity
from infinity.core.errors import BudgetError, OutOfMemoryError
from infinity.hardware import muon
from infinity.optim import matrices, update
from tests.rank_muon import Net, digest, run_steps, state_of
from tests.whole import muon as optimizer_of
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""

#: Prints what each rank orthogonalizes, and the moments: where a matrix is shared, what goes in may be no
#: whole matrix, or not of the mean gradient.
WHAT_GOES_IN = (
    HEAD
    + """
model = Net([[[96, 130], [130, 70], [64], [3, 5]]])
given, inner = [], muon.orthogonalize

def seen(matrix, options):
    given.append([list(matrix.shape), matrix.float().flatten().tolist()])
    return inner(matrix, options)

muon.orthogonalize = seen
optimizer = optimizer_of(model.parameters(), nesterov=False)
model, optimizer = infinity.wrap(model, optimizer, infinity.Config(**json.loads(sys.argv[1])))
run_steps(model, optimizer, range(1, 2), rank, world)
run_steps(model, optimizer, range(7, 8), rank, world)
kept = {n: s["momentum_buffer"] for n, s in state_of(model).items() if "momentum_buffer" in s}
moments = {n: moment.flatten().tolist() for n, moment in kept.items()}
infinity.close(optimizer)
print(json.dumps([given, moments]))
"""
)


def test_each_rank_orthogonalizes_whole_matrices_of_the_mean_gradient(tmp_path: Path) -> None:
    found = []
    for world in (3, 1):
        (folder := tmp_path / str(world)).mkdir()
        config = settings_of(folder, "nvme", "fp32", units=["Block"])
        results = run_ranks(world, WHAT_GOES_IN, json.dumps(config))
        found.append([json.loads(said) for said in all_well(results)])
    ranks, [(alone, wanted)] = found
    given = [each for of_rank, _ in ranks for each in of_rank]
    # Not flattened, though slices are flat; and not padded, though a slice of [3, 5] is padded to a segment,
    # and one of [130, 70] ends in one: a draw may round to 0, and padding is zeros.
    shapes = sorted(shape for shape, _ in given)
    assert shapes == sorted([[96, 130], [3, 5], [96, 130], [130, 70], [3, 5]])
    for shape, values in given:
        assert len(values) == shape[0] * shape[1]
        assert values.count(0.0) < 3
    # Not split where a slice ends: all ranks together do what one does, each matrix on one of them.
    assert sorted(given) == sorted(alone)
    assert all(of_rank for of_rank, _ in ranks)
    for of_rank, moments in ranks:
        # The gradients of the ranks differ. The mean comes before the momentum, and before its rounding.
        assert moments == wanted
        # In the second step each has the momentum of the first, of the same elements: without Nesterov that
        # is the momentum, rounded.
        rounded = {len(v): torch.tensor(v).bfloat16().float().tolist() for v in moments.values()}
        last = {tuple(shape): values for shape, values in of_rank}
        assert all(values == rounded[rows * columns] for (rows, columns), values in last.items())


#: A training of which one rank does something else; says how it ends, and after how many seconds.
UNDER_A_FAULT = (
    HEAD
    + """
given = json.loads(sys.argv[1])
model = Net(given["shapes"])
config = infinity.Config(**given["config"])
model, optimizer = infinity.wrap(model, optimizer_of(model.parameters()), config)
run_steps(model, optimizer, range(2), rank, world)
begun = time.monotonic()
inner = matrices.Matrices._work_on

def raising(error):
    def call(self, matrix):
        matrices.Matrices._work_on = inner
        raise error
    return call

def kill(self, matrix):
    os.kill(os.getpid(), signal.SIGKILL)

if rank == 1:
    exec(given["fault"])
try:
    run_steps(model, optimizer, range(2, 4), rank, world)
    infinity.close(optimizer)
except infinity.InfinityError as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic() - begun]), flush=True)
    raise
"""
)
FAULTS = {
    "an update that fails": (
        "from infinity.core.errors import StorageError\n"
        "matrices.Matrices._work_on = raising(StorageError('a drive'))",
        *("RankError", "a drive"),
    ),
    "an update without memory": (
        "matrices.Matrices._work_on = raising(MemoryError())",
        *("RankError", "OutOfMemoryError"),
    ),
    "a rank that is killed in its update": (
        "matrices.Matrices._work_on = kill",
        *("RankError", "rank 1 is gone"),
    ),
    "an orthogonalization that is missing": (
        "matrices.Matrices._work_on = lambda self, _: setattr(self, '_made', self._made - 1)",
        # Each rank counts, and ends; the others may hear of it before they have counted.
        *("(ParameterError|RankError)", "each orthogonalized once"),
    ),
    "another order of matrices": (
        "inner_of = update.chunk_updates\n"
        "import infinity.optim.optimizer as o\n"
        "o.chunk_updates = lambda tiers, units, updates: inner_of(tiers, [*units][::-1], updates)",
        *("(DivergenceError|RankError)", "the update of"),
    ),
}


@pytest.mark.first
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_all(fault: str, tmp_path: Path) -> None:
    code, kind, text = FAULTS[fault]
    config = settings_of(tmp_path, "nvme", "fp32", units=["Block"], rank_timeout=20.0)
    given = {"shapes": [SHAPES[0], SHAPES[0]], "config": config, "fault": code}
    first, second, third = run_ranks(3, UNDER_A_FAULT, json.dumps(given))
    assert second[0] != 0
    for exit_code, said, err in (first, third):
        assert exit_code == 1, err
        name, message, seconds = json.loads(said)
        assert re.fullmatch(kind, name), message
        assert re.search(text, message), message
        assert seconds < 15


#: The owner of a matrix has no memory for it, once; its program makes the same call again.
GOES_ON = (
    HEAD
    + """
given = json.loads(sys.argv[1])
model = Net(given["shapes"])
model, optimizer = infinity.wrap(model, optimizer_of(model.parameters()), infinity.Config(**given["config"]))
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
found = digest(state_of(model))
infinity.close(optimizer)
print(json.dumps([found, raised]))
"""
)


def test_an_update_that_stops_goes_on_on_all_ranks(tmp_path: Path) -> None:
    found = []
    for world in (1, 3):
        (folder := tmp_path / str(world)).mkdir()
        config = settings_of(folder, "nvme", "fp32", units=["Block"], update="sync")
        results = run_ranks(world, GOES_ON, json.dumps({"shapes": SHAPES, "config": config}))
        found.append([json.loads(said) for said in all_well(results)])
    assert [raised for _, raised in found[1]] == [0, 0, 2]
    assert {digest for digest, _ in found[1]} == {found[0][0][0]}


def layouts_of(shapes: list[list[list[int]]], world: int, rank: int = 0) -> tuple[UnitLayout, ...]:
    units = [
        (
            f"unit {u}",
            [ParamSpec(f"{u}.{i}", tuple(s), "bf16", True, 0, len(s) == 2) for i, s in enumerate(of)],
        )
        for u, of in enumerate(shapes)
    ]
    return partition(units, 65536, rank=rank, world=world)


@pytest.mark.parametrize("world", [1, 3])
def test_owners_are_the_same_on_all_ranks_and_share_the_work(world: int) -> None:
    width, blocks = 512, 12
    block = [[width, width]] * 4 + [[4 * width, width]] * 2 + [[width, 4 * width], [width]]
    shapes = [block] * blocks
    found = [rounds_of(layouts_of(shapes, world, rank)) for rank in range(world)]
    assert found == found[:1] * world
    for rounds in found[0]:
        assert sorted(m.param for group in rounds for m in group) == [*range(7)]  # each matrix, once
        assert all(len({m.owner for m in group}) == len(group) <= world for group in rounds)
    flops = [each.flops for each in work_of(layouts_of(shapes, world))]
    assert sum(flops) == blocks * sum(flops_of(shape) for shape in block if len(shape) == 2)
    assert max(flops) - min(flops) <= flops_of([4 * width, width])


def test_the_room_is_for_the_pieces_of_every_rank() -> None:
    shapes = [[[3, 5], [100, 300], [300, 200], [8, 8]]]
    for world in (1, 2, 5):
        layouts = layouts_of(shapes, world)
        whole, pieces = room_of(layouts)
        assert whole == 300 * 200
        assert pieces == max(
            (
                sum(pieces_of(layouts[0], m.param)[rank] for m in group)
                for group in rounds_of(layouts)[0]
                for rank in range(world)
                if world > 1
            ),
            default=0,
        )


TOO_LARGE = (
    HEAD
    + """
config = json.loads(sys.argv[1])
for attempt in range(2):
    model = Net([[[1000, 900], [8]], [[8, 8], [3]]])
    try:
        model, optimizer = infinity.wrap(model, optimizer_of(model.parameters()), infinity.Config(**config))
    except BudgetError as error:
        assert not attempt, error
        print(error.what, error.expected, error.cure, flush=True)
        given = dict(each.strip().split("=") for each in error.cure.split(","))
        config |= {name: json.loads(value) for name, value in given.items()}
run_steps(model, optimizer, range(2), rank, world)
infinity.close(optimizer)
"""
)


def test_a_matrix_that_does_not_fit_is_refused_with_what_helps(tmp_path: Path) -> None:
    config = {**settings_of(tmp_path, "nvme", "fp32", units=["Block"]), "device_memory": "2MiB"}
    for said in all_well(run_ranks(2, TOO_LARGE, json.dumps(config))):
        assert "the largest matrix is 'blocks.0.each.0'" in said
