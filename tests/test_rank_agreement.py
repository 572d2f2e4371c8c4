"""What each rank's program does of its own: it is the same on all ranks, or all raise a typed error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .ranks import all_well, run_ranks
from .test_ranks import HEAD, LOOP, of_stage

pytestmark = pytest.mark.integration

#: What one rank does to its gradients and the other does not, behind a backward.
CHANGES = {
    "zero_grad": "adam.zero_grad()",
    "the model's zero_grad": "model.zero_grad()",
    "one to None": "weight.grad = None",
    "zeros": "adam.zero_grad(set_to_none=False)",
    "one to zeros": "weight.grad.zero_()",
    "a tensor": "weight.grad = torch.ones(8, 32, device=weight.device)",
    "a factor": "weight.grad.mul_(0.5)",
    "frozen": "weight.requires_grad_(False)",
}
#: When, and what is done next, on all.
NEXT = {
    "before a step": "loss().backward(); change(); adam.step()",
    "between backwards": "loss().backward(); change(); loss().backward(); adam.step()",
    "before backwards of others": "loss().backward(); change(); other().backward(); adam.step()",
    "behind what was asked for": "loss().backward(); adam.clip_grad_norm_(1.0); change(); adam.step()",
    "before it is asked for": "loss().backward(); change(); adam.clip_grad_norm_(1.0); adam.step()",
    "before a look": "loss().backward(); change(); infinity.gradient(weight); adam.step()",
}

ALONE = """
from infinity.core.errors import DivergenceError, GradientError

weight = model.last.weight

def other():
    return model.layers[0](torch.full((2, 32), rank + 1.0)).square().mean()

def all_alike():
    adam.zero_grad()
    weight.requires_grad_(True)
    step()

cases = json.loads(sys.argv[2])
for what, when in cases:
    def change():
        if rank == 1:
            exec(what)
    begun = time.monotonic()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        exec(when)
    except (DivergenceError, GradientError) as error:
        raised = f"{type(error).__name__}: {error}"
        if len(cases) == 1:
            raise
    else:
        raised = None
    weight.requires_grad_(True)
    print(what, "|", when, "|", raised, flush=True)
    assert raised is not None, (what, when)
    adam.zero_grad()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), (what, when)
    all_alike()  # what was raised on all is over
    print("norm", adam.grad_norm)
infinity.close(adam)
"""


def of(stage: int, folder: Path, **more: Any) -> str:
    return json.dumps({**of_stage(folder, stage), "rank_timeout": 40.0, **more})


def cases(stage: int, *, inside: bool) -> list[tuple[str, str]]:
    """Return changes, and when they come. `inside`: in a later backward, where gradients are reduced from
    stage 2 on: what is raised there ends the run."""
    return [
        (what, when)
        for name, what in CHANGES.items()
        for moment, when in NEXT.items()
        if (name != "frozen" or "between" in moment) and inside == (stage >= 2 and "backwards" in moment)
    ]


@pytest.mark.first
@pytest.mark.parametrize("stage", [1, 3, 0, 2])
def test_gradients_that_one_rank_changes(stage: int, tmp_path: Path) -> None:
    given = cases(stage, inside=False)
    arguments = of(stage, tmp_path), json.dumps(given)
    first, second = all_well(run_ranks(2, HEAD + LOOP + ALONE, *arguments, seconds=120))
    norms = [[line for line in out.splitlines() if line.startswith("norm")] for out in (first, second)]
    assert norms[0] == norms[1]
    assert len(norms[0]) == len(given)


@pytest.mark.first
@pytest.mark.parametrize("case", cases(3, inside=True)[::4])
def test_gradients_that_one_rank_changes_before_a_backward_end_all(
    case: tuple[str, str], tmp_path: Path
) -> None:
    for code, _, err in run_ranks(2, HEAD + LOOP + ALONE, of(3, tmp_path), json.dumps([case])):
        assert code == 1, err
        assert "DivergenceError" in err or "GradientError" in err, err


RAISES = """
@contextlib.contextmanager
def raises(kind, words):
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised: {words}")
"""

EDITS = """
from infinity.core.errors import ParameterChangedError
edits = {
    "counted": lambda p: p.mul_(2),
    "other data": lambda p: setattr(p, "data", p.data * 2),
}
for source in (0, 1):
    for how, double in edits.items():
        before = model.state_dict()["last.weight"].clone()
        with raises(ParameterChangedError, f"'last.weight' was edited on rank {1 - source} alone"):
            with infinity.gathered(model.last, write=True, source=source), torch.no_grad():
                if rank != source:
                    double(model.last.weight)
                else:
                    double(model.last.bias)
        state = model.state_dict()
        assert torch.equal(state["last.weight"], before), how
        with infinity.gathered(model.last, write=True, source=source), torch.no_grad():
            double(model.last.weight)
            if rank != source:
                double(model.last.weight)
        assert torch.equal(model.state_dict()["last.weight"], before * 2), how
step()
print(adam.grad_norm, float(model.state_dict()["last.bias"].double().sum()))
infinity.close(adam)
"""


def test_an_edit_of_another_rank_than_the_source(tmp_path: Path) -> None:
    script = HEAD + LOOP + RAISES + EDITS
    first, second = all_well(run_ranks(2, script, of(1, tmp_path), seconds=120))
    assert first == second


OUTSIDE = """
from infinity.core.errors import DivergenceError, InfinityError, ParameterChangedError
weight, stage = model.last.weight, config.zero_stage
if stage:  # where each rank has a copy of what is frozen
    model.last.requires_grad_(False)
    step()
def in_place(factor):
    with torch.no_grad():
        weight.mul_(factor)
def read_only(factor):
    with infinity.gathered(weight):
        in_place(factor)
before = model.state_dict()["last.weight"].clone()
ways = [in_place, *([] if stage else [read_only])]
ends = [step, *([lambda: infinity.save(adam, sys.argv[2] + "/never")] if sys.argv[2] else [])]
for way in ways:
    for alone in (False, True) if way is not read_only else (False,):  # which all enter
        for end in ends:
            if rank or not alone:
                way(2.0 + rank)
            try:
                end()
            except (DivergenceError, ParameterChangedError) as error:
                print(way, alone, error, flush=True)
            else:
                raise AssertionError((way, alone))
            if not stage:  # the edits are there: the cure
                with infinity.gathered(weight, write=True, source=0):
                    if rank == 0:
                        weight.data.copy_(before)
                assert torch.equal(model.state_dict()["last.weight"], before), (way, alone)
            adam.zero_grad()
            step()
            before = model.state_dict()["last.weight"].clone()
if not stage:
    in_place(0.5)  # on all alike
    step()
values = model.state_dict().values()
print("end", sum(float(value.double().sum()) for value in values))
infinity.close(adam)
"""


@pytest.mark.first
@pytest.mark.parametrize("stage", [0, 1])
def test_edits_outside_of_blocks_that_differ(stage: int, tmp_path: Path) -> None:
    """Where each rank has a copy of a parameter, of the same values; also before a save."""
    arguments = json.dumps(of_stage(tmp_path, stage)), str(tmp_path)
    results = run_ranks(2, HEAD + LOOP + OUTSIDE, *arguments, seconds=120)
    first, second = (said.splitlines()[-1] for said in all_well(results))
    assert first == second


PATHS = """
from infinity.core.errors import ConfigError
folder, mine = sys.argv[2], f"{sys.argv[2]}/{rank}"
os.makedirs(mine)
for path in (mine, "here"):
    os.chdir(mine)
    for call in (lambda: infinity.save(adam, path), lambda: infinity.load(adam, path),
                 lambda: infinity.export(model, path)):
        with raises(ConfigError, "different directories"):
            call()
assert os.listdir(mine) == []
infinity.save(adam, f"{folder}/all")
infinity.load(adam, f"{folder}/all")
infinity.export(model, f"{folder}/exported")
step()
infinity.close(adam)
"""


def test_paths_that_differ_between_ranks(tmp_path: Path) -> None:
    arguments = of(3, tmp_path), str(tmp_path / "saved")
    all_well(run_ranks(2, HEAD + LOOP + RAISES + PATHS, *arguments, seconds=120))


STATISTICS = """
def built():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    model.register_buffer("same", torch.arange(3))
    return infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)

def train(model, adam, first, end):
    for number in range(first, end):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank)) + rank
        model(x).square().mean().backward()
        adam.step()
        adam.zero_grad()

def contents(model):
    model.eval()
    with torch.no_grad():
        said = model(torch.ones(2, 8))
    model.train()
    return {**{n: v.clone() for n, v in model.state_dict().items()}, "said": said}

path = sys.argv[2]
model, adam = built()
train(model, adam, 0, 3)
infinity.save(adam, path)
train(model, adam, 3, 5)
wanted = contents(model)
infinity.close(adam)
model, adam = built()
infinity.load(adam, path)
train(model, adam, 3, 5)
found = contents(model)
assert found.keys() == wanted.keys()
for name, value in wanted.items():
    assert torch.equal(found[name], value), name
print(found["1.running_mean"].sum().item())
infinity.close(adam)
"""

#: On one rank, or three: all have the first one's.
ELSEWHERE = """
path = sys.argv[2]
model, adam = built()
infinity.load(adam, path)
print(model[1].running_mean.tolist())
infinity.close(adam)
"""


def test_a_rank_goes_on_with_its_own_buffers(tmp_path: Path) -> None:
    arguments = of(3, tmp_path), str(tmp_path / "saved")
    first, second = all_well(run_ranks(2, HEAD + STATISTICS, *arguments, seconds=120))
    assert first != second
    script = HEAD + STATISTICS[: STATISTICS.index("path = ")] + ELSEWHERE
    said = [all_well(run_ranks(world, script, *arguments, seconds=120)) for world in (1, 3)]
    assert len({text for of_ranks in said for text in of_ranks}) == 1
