"""One model over several ranks: the bits of plain torch, and one end where ranks do not do the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import infinity

from . import ranks
from .ranks import all_well, run_ranks

PLACES: dict[str, dict[str, Any]] = {
    "host": {"parameters": "host", "optimizer_state": "host", "gradients": "host"},
    "nvme": {"parameters": "nvme", "optimizer_state": "nvme", "gradients": "nvme"},
    "device": {"parameters": "device", "optimizer_state": "device", "gradients": "device"},
    "state on nvme": {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"},
    "split": {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"host": 0.5, "nvme": 0.5},
        "gradients": {"device": 0.2, "host": 0.3, "nvme": 0.5},
    },
}

TWO = {"accumulate": 2, "clip": 0.5}
ONE_HAS_MORE = [{"turns": 2, "depths": [[3, 0]] * 2}] * 3
#: The number of ranks, the placement, the dtype, the configuration, and what else is set.
CASES: dict[str, tuple[int, str, str, dict[str, Any], dict[str, Any]]] = {
    "gpt": (2, "nvme", "bf16", {}, {**TWO, "groups": True}),
    "tied, recomputed, four ranks": (
        *(4, "split", "fp32", {}),
        {"clip": 0.5, "sizes": {"tied": True, "recompute": "non-reentrant"}},
    ),
    "stage 1, declared": (
        *(3, "device", "fp32", {"zero_stage": 1, "accumulation": 1}),
        {"sizes": {"tied": True, "recompute": "reentrant"}},
    ),
    "at once, little memory": (
        *(2, "nvme", "fp32", {"update": "sync", "device_memory": "2MiB"}),
        {"sizes": {"recompute": "reentrant"}},
    ),
    "activations on the host, partly frozen": (
        *(2, "device", "fp32", {"activations": "host"}),
        {"sizes": {"recompute": "non-reentrant"}, "frozen": ["blocks.0"]},
    ),
    "stage 2": (2, "device", "bf16", {"zero_stage": 2, "optimizer_state": "host"}, TWO),
    "stage 0": (3, "state on nvme", "bf16", {"zero_stage": 0}, TWO),
    "stage 1, blocks of one rank": (
        *(2, "device", "fp16", {"zero_stage": 1}),
        {"program": ONE_HAS_MORE, "zeros": True},
    ),
    "8-bit moments and fp32 ones": (
        *(3, "split", "bf16"),
        {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": ["*norm*", "*.bias", "tokens*"]},
        TWO,
    ),
    "Lion, bf16 moments, stage 1": (
        *(2, "state on nvme", "fp32", {"optimizer_state_dtype": "bf16", "zero_stage": 1}),
        {"optimizer": "lion"},
    ),
    "Muon, bf16 moments": (
        *(3, "nvme", "bf16", {"optimizer_state_dtype": "bf16"}),
        {"optimizer": "muon", **TWO},
    ),
    "Muon, stage 1, blocks of one rank": (
        *(2, "device", "fp32", {"zero_stage": 1}),
        {"optimizer": "muon", "program": ONE_HAS_MORE},
    ),
    "moe": (2, "nvme", "bf16", {}, {"model": "moe"}),
    "gpt2": (2, "host", "fp16", {}, {"model": "gpt2", "accumulate": 2}),
}
QUICK = ["gpt", "stage 1, declared"]


def slow(values: Any, chosen: Any) -> list[Any]:
    """Return values for `parametrize`. `make test-all` has those that are not chosen."""
    marks = pytest.mark.integration
    tuples = ((v, v if isinstance(v, tuple) else (v,)) for v in values)
    return [v if v in chosen else pytest.param(*each, marks=marks) for v, each in tuples]


def settings_of(folder: Path, place: str, dtype: str, **config: Any) -> dict[str, Any]:
    memory = {"device_memory": "64MiB", "host_memory": "512MiB", "threads": 1}
    return {"device": "cpu", "dtype": dtype, "nvme": str(folder), **PLACES[place], **memory, **config}


def of_stage(folder: Path, stage: int) -> dict[str, Any]:
    """Settings of a stage, on the device below 3, else on NVMe; in fp32."""
    place = "nvme" if stage == 3 else "device"
    given = settings_of(folder, place, "fp32", zero_stage=stage, prefetch_memory=0)
    return given if stage >= 2 else {**given, "gradients": None}


@pytest.mark.parametrize("name", slow(CASES, QUICK))
def test_ranks_train_as_plain_torch_does(name: str, tmp_path: Path) -> None:
    world, place, dtype, config, more = CASES[name]
    unset = {"gradients": None} if config.get("zero_stage", 3) < 2 else {}
    settings = settings_of(tmp_path, place, dtype, **config, **unset)
    script = "from tests.rank_training import main; main()"
    given = {"model": "gpt", "steps": 4, **more, "config": settings}
    results = run_ranks(world, script, json.dumps(given), seconds=120)
    assert all_well(results) == ["same\n"] * world


HEAD = """
import contextlib, json, os, signal, sys, time
import torch
from torch import nn
import infinity
from tests import inner
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.layers = layers
        self.last = nn.Linear(32, 8)
        self.order, self.hook = [0, 1, 2], None

    def forward(self, x):
        x = self.first(x)
        for i in self.order:
            x = self.layers[i](x)
        return self.last(x)

model = Model()
config = inner.config(**json.loads(sys.argv[1]))
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""

LOOP = """
model, adam = infinity.wrap(model, adam, config)

def loss(scale=1.0):
    return model(torch.full((2, 8), rank + 1.0)).square().mean() * scale

def step():
    loss().backward()
    adam.step()
    adam.zero_grad()

step()
step()
"""

CLIP = "loss().backward()\nnn.utils.clip_grad_value_(model.parameters(), {})\nadam.step()"
LOAD = "model.load_state_dict({{n: torch.full(p.shape, {}) for n, p in model.named_parameters()}})\nstep()"
LOAD_STATE = """
state = adam.state_dict()
for one in state["state"].values():
    one["exp_avg"] = one["exp_avg"] * 2
adam.load_state_dict(state)
step()
"""
#: At which stage the last of two ranks does what the first does not. What they do to gradients is in
#: test_rank_agreement.py.
DIVERGES = {
    "skips a layer": (3, "model.order = [0, 2]\nstep()"),
    "raises in its forward": (3, "model.order = [7]\nstep()"),
    "is killed": (2, "os.kill(os.getpid(), signal.SIGKILL)"),
    "uses layers in another order": (2, "model.order = [1, 0, 2]\nstep()"),
    "does one more backward": (1, "loss().backward()\nstep()"),
    "does one more forward": (3, "with torch.no_grad(): loss()\nstep()"),
    "steps twice": (0, "step()\nadam.step()\nstep()"),
    "raises in its backward": (2, "l = loss()\nl.register_hook(lambda g: 1 / 0)\nl.backward()"),
    "raises between": (0, "raise ValueError('mine')"),
    "is interrupted": (1, "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"),
    "edits alone": (
        *(1, "with infinity.gathered(model.first, write=True): model.first.weight.data.zero_()\nstep()"),
    ),
    "asks for a state dict alone": (3, "model.state_dict()\nstep()"),
    "clips to another limit": (3, CLIP.format(0.01)),
    "loads other values": (0, LOAD.format(2.0)),
    "loads another state": (1, LOAD_STATE),
    "ends": (3, "sys.exit(0)"),
}
SAME = {
    "clips to another limit": CLIP.format(0.02),
    "loads other values": LOAD.format(1.0),
    "loads another state": "adam.load_state_dict(adam.state_dict())\nstep()",
}


@pytest.mark.parametrize("how", slow(DIVERGES, [*DIVERGES][:3]))
def test_ranks_that_do_not_do_the_same_all_end(how: str, tmp_path: Path) -> None:
    stage, other = DIVERGES[how]
    same, other = (text.replace("\n", "\n    ") for text in (SAME.get(how, "step()"), other))
    script = f"{HEAD}{LOOP}if rank == 0:\n    {same}\nelse:\n    {other}\nstep()\nstep()\n"
    results = run_ranks(2, script, json.dumps(of_stage(tmp_path, stage)), seconds=60)
    (first, _, said), (last, _, other_said) = results
    assert first == 1, (said, other_said)
    assert "RankError" in said or "DivergenceError" in said, said
    if how not in ("ends", "is killed", "is interrupted"):
        assert last == 1, other_said


#: Programs that do the same on all ranks, and print the same; and the stages at which they may.
TOGETHER: dict[str, tuple[range, str]] = {
    "a model is moved to the CPU of its rank": (  # as transformers' Trainer does
        range(4),
        "assert model.to(torch.device('cpu', rank)) is model.to('cpu:1')\nstep()\n",
    ),
    # Below stage 3 units are gathered behind a forward, for the backward; and in a block, on all ranks.
    "a state dict is loaded": (
        range(4),
        """
before = {name: value.clone() for name, value in model.state_dict().items()}
for how in ("before a forward", "behind one", "in a block"):
    step()
    if how == "behind one":
        with torch.no_grad():
            loss()
    with infinity.gathered(model, write=True) if how == "in a block" else contextlib.nullcontext():
        model.load_state_dict(before)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), how
    loss()
    step()
    assert not torch.equal(model.state_dict()["last.weight"], before["last.weight"]), how
""",
    ),
    # A factor is not one of the next backward.
    "a factor of gradients": (
        range(4),
        """
weight = model.last.weight
loss().backward()
first = infinity.gradient(weight)
weight.grad.mul_(0.5)
loss().backward()
torch.testing.assert_close(infinity.gradient(weight), first * 0.5 + first)
adam.step()
print(float(model.state_dict()["last.weight"].double().sum()).hex())
""",
    ),
    "a rank catches what it raised": (
        range(4),
        """
if rank == 1:
    model.order = [7]
    try:
        step()
    except IndexError:
        model.order = [0, 1, 2]
step()
print(adam.grad_norm)
""",
    ),
    "edits of one rank count on all": (
        range(4),
        """
for source in (0, 1):
    with infinity.gathered(model.first, write=True, source=source), torch.no_grad():
        model.first.weight.fill_(rank + 2.0)
    with infinity.gathered(model):
        assert model.first.weight.eq(source + 2.0).all()
with infinity.gathered(model):
    kept = {n: p.clone() for n, p in model.named_parameters()}
assert all(torch.equal(kept[n], v) for n, v in model.state_dict().items())
infinity.unwrap(model)
assert all(torch.equal(kept[n], p) for n, p in model.named_parameters())
print(float(sum(v.double().sum() for v in kept.values())))
model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
""",
    ),
    "nobody holds units": (
        range(4),
        "infinity.flush(adam)\nassert infinity.metrics(adam)['memory/held_units'] == 0\n",
    ),
    # The process group that the first `wrap` made is that of all later ones, on ranks that are late, too.
    "a second model outlives the first": (
        range(4),
        """
other = nn.Linear(8, 8)
other, its = infinity.wrap(other, torch.optim.AdamW(other.parameters()), config)
infinity.close(adam)
other(torch.ones(2, 8)).sum().backward()
its.step()
time.sleep(0.3 if rank == 0 else 0)
infinity.close(its)
adam = None
""",
    ),
    # Nothing has happened when options differ: with the same ones the ranks go on.
    "options that differ": (
        range(4),
        """
from infinity.core.errors import DivergenceError
loss().backward()
if rank == 1:
    adam.param_groups[0].update(lr=0.25, betas=(0.5, 0.75))
try:
    adam.step()
except DivergenceError as error:
    said = f"{error.what}: {error.found}; {error.cure}"
assert "the ranks make a step with different options: lr of param group 0: rank 0: " in said
assert "; rank 1: 0.25. betas of param group 0: rank 0: (0.9, 0.999); rank 1: (0.5, 0.75); " in said
adam.param_groups[0].update(lr=0.125, betas=(0.5, 0.75))
adam.step()
""",
    ),
    # A parameter that one rank does not use has a gradient there all the same; one that none uses has none.
    "a gradient of one rank": (
        range(4),
        """
infinity.close(adam)
class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(8, 8)
        self.one, self.other, self.none = (nn.Parameter(torch.ones(8)) for _ in range(3))

    def forward(self, x, use):
        return self.both(x) * (self.one if use == 0 else self.other if use == 1 else 1)

config = inner.config(**json.loads(sys.argv[1]), units=["Switch"])
model = Switch()
model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0), config)
x, nothing = torch.ones(2, 8), []
for uses in ((0, 1), (2, 0), (1, 1)):
    for use in (uses[rank], 2):  # one that is only accumulated to on some ranks, too
        model(x, use).sum().backward()
    found = {n: infinity.gradient(p) for n, p in model.named_parameters()}
    print({n: None if g is None else g.flatten()[:2].tolist() for n, g in found.items()})
    nothing.append([n for n, g in found.items() if g is None])
    adam.step()
    adam.zero_grad()
assert nothing == [["none"], ["other", "none"], ["one", "none"]], nothing
assert model.state_dict()["none"].tolist() == [1.0] * 8
""",
    ),
    # Below stage 3 units stay to the next step.
    "one more forward": (
        range(3),
        "if rank:\n    with torch.no_grad(): loss()\nstep()\nprint(adam.grad_norm)",
    ),
    # Below stage 2 ranks may use different ones. The first one alone evaluates, and has then gathered what
    # the other has not.
    "other layers": (
        range(2),
        """
for order in ([0, 2], [1, 0, 2], []):
    model.order = order if rank else [0, 1, 2]
    step()
    if rank == 0:
        with torch.no_grad():
            loss()
    print(float(sum(v.double().sum() for v in model.state_dict().values())).hex())
""",
    ),
}
EACH = """
import json, sys
head, parts = json.loads(sys.argv[2])
for name, part in parts.items():
    print(name, flush=True)
    names = {"__name__": "__main__"}
    exec(compile(head + part, "<rank>", "exec"), names)
    if names["adam"] is not None:
        names["infinity"].close(names["adam"])
    names.clear()
"""


@pytest.mark.parametrize("stage", slow(range(4), [3]))
def test_what_ranks_do_together(stage: int, tmp_path: Path) -> None:
    parts = {name: part for name, (stages, part) in TOGETHER.items() if stage in stages}
    if ranks.DEVICE == "lagging":
        del parts["a model is moved to the CPU of its rank"]
    arguments = json.dumps(of_stage(tmp_path, stage)), json.dumps([HEAD + LOOP, parts])
    first, second = all_well(run_ranks(2, EACH, *arguments, seconds=200))
    assert first == second


WRAP = "infinity.wrap(model, adam, config)"
TRAINED = "model(torch.ones(2, 8)).square().mean().backward()\nif {}:\n    adam.step()\nmodel.zero_grad()\n"
OPTIMIZER = "adam = torch.optim.AdamW(model.parameters())\n"
META = "with torch.device('meta' if rank == {} else 'cpu'):\n    {}\n" + OPTIMIZER
BUFFER = "model.register_buffer('of_rank', {})\n"
#: What is refused on all ranks, and words that each of them says.
REFUSED: dict[str, tuple[str, list[str]]] = {
    "state on one rank": (TRAINED.format("rank") + WRAP, ["DivergenceError"]),
    "another step": (
        TRAINED.format("True") + "adam.state[model.last.weight]['step'] += 7 * rank\n" + WRAP,
        ["DivergenceError"],
    ),
    "settings": (
        "if rank:\n    config = config.replace(max_grad_norm=0.5, update='sync')\n" + WRAP,
        [
            "DivergenceError: the ranks have different settings",
            "max_grad_norm: rank 0: None; rank 1: 0.5",
            "update: rank 0: 'overlap'; rank 1: 'sync'",
        ],
    ),
    "a model": (
        "if rank:\n    model.last = nn.Linear(32, 9)\n" + OPTIMIZER + WRAP,
        ["DivergenceError: the ranks have different models", "last.weight", "(8, 32)", "(9, 32)"],
    ),
    # Buffers are the first rank's: others would get the bytes of another one.
    "the shape of a buffer": (
        BUFFER.format("torch.ones(2 + rank)") + WRAP,
        ["DivergenceError: the ranks have different models", "the buffer "],
    ),
    "the order of buffers": (
        "for name in ('mean', 'std')[:: -1 if rank else 1]:\n    model.register_buffer(name, torch.ones(2))\n"
        + WRAP,
        ["DivergenceError: the ranks have different models"],
    ),
    "no values": (META.format(0, "model.last = nn.Linear(32, 8)") + WRAP, ["WrapError"]),
    "no values of an attribute": (META.format(1, "model.scale = torch.ones(3)") + WRAP, ["WrapError"]),
    "stage 1 on NVMe": ("config = config.replace(zero_stage=1, gradients=None)\n" + WRAP, ["ConfigError"]),
    "stage 2 on NVMe": ("config = config.replace(zero_stage=2)\n" + WRAP, ["ConfigError"]),
    "delayed updates": ("config = config.replace(update='delayed')\n" + WRAP, ["ConfigError"]),
    "little memory": ("config = config.replace(device_memory=4096)\n" + WRAP, ["BudgetError"]),
    "inference": (
        "infinity.inference(nn.Linear(2, 2), config)",
        ["`infinity.inference` is not available"],
    ),
    "a source": (
        LOOP + "with infinity.gathered(model, source=2):\n    pass",
        ["names a rank that does not exist"],
    ),
    "a gradient that is assigned": (
        LOOP + "model.last.weight.grad = torch.ones(8, 32)\nloss().backward()\n",
        ["GradientError: with several ranks, you cannot assign a gradient to 'last.weight'"],
    ),
    "a version": (
        "import infinity.hardware.comm as comm\nif rank:\n    comm.__version__ = '0.0.1'\n" + WRAP,
        [
            "DivergenceError: the ranks run different versions",
            f"rank 0: infinity {infinity.__version__}, torch ",
            "; rank 1: infinity 0.0.1, torch ",
        ],
    ),
}
EACH_IS_REFUSED = """
import json, sys
import infinity
head, parts = json.loads(sys.argv[2])
for name, part in parts.items():
    try:
        exec(compile(head + part, "<rank>", "exec"), {"__name__": "__main__"})
    except infinity.InfinityError as error:
        print(json.dumps([name, f"{type(error).__name__}: {error}"]), flush=True)
    else:
        raise AssertionError(name)
"""


def test_what_is_refused_on_all_ranks(tmp_path: Path) -> None:
    parts = {name: part for name, (part, _) in REFUSED.items()}
    arguments = json.dumps(settings_of(tmp_path, "nvme", "fp32")), json.dumps([HEAD, parts])
    for said in all_well(run_ranks(2, EACH_IS_REFUSED, *arguments, seconds=120)):
        found = dict(json.loads(line) for line in said.splitlines())
        assert found.keys() == REFUSED.keys()
        for name, (_, words) in REFUSED.items():
            assert all(each in found[name] for each in words), (name, found[name])


def test_declared_accumulation_needs_the_same_layers(tmp_path: Path) -> None:
    script = HEAD + LOOP + "model.order = [0, 1] if rank else [0, 1, 2]\nstep()\n"
    for code, _, err in run_ranks(2, script, json.dumps(of_stage(tmp_path, 1) | {"accumulation": 1})):
        assert code == 1
        assert "DivergenceError" in err


#: Prints what a step of three backwards sends, in elements of all parameters, and which of its collectives
#: run on the ranks' own thread.
TRAFFIC = """
import threading
from infinity.api.engine import engine_of
engine = engine_of(adam)
elements = sum(u.layout.gathered_nbytes for u in engine.units) // 4
there = {"gather": [], "reduce": []}
for name, threads in there.items():
    def watched(run, call=getattr(engine.comm, name), threads=threads, **settings):
        threads.append(threading.current_thread().name == "infinity-ranks")
        return call(run, **settings)
    setattr(engine.comm, name, watched)
for _ in range(2):
    for threads in there.values():
        threads.clear()
    before = engine.comm.sent
    for _ in range(3):
        loss().backward()
    adam.step()
    adam.zero_grad()
sent = (engine.comm.sent - before) / (4 * elements) * world / (world - 1)
print(json.dumps([sent, there, len(engine.units[0].layout.runs)]))
"""


@pytest.mark.first
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_what_is_sent_and_by_whom(stage: int, tmp_path: Path) -> None:
    """Per rank, times (N - 1) / N, of every element, in K backwards: stage 0 sends 2 r, stage 1 r + c,
    stage 2 c + K r, stage 3 at most K (2 c + r). Here all three are 4 bytes. All reductions run behind
    compute, and from stage 2 on all gathers but that of the first unit of a cycle; at stage 0 reduced
    gradients are gathered."""
    given = {**settings_of(tmp_path, "device", "fp32", zero_stage=stage), "gradients": None}
    for said in all_well(run_ranks(2, HEAD + LOOP + TRAFFIC, json.dumps(given))):
        sent, there, runs = json.loads(said)
        assert sent == {0: 2, 1: 2, 2: 4}[stage] if stage < 3 else 3 < sent <= 9
        assert there["reduce"]
        assert all(there["reduce"])
        if stage != 1:
            assert there["gather"].count(False) <= (3 * runs if stage else 0) < len(there["gather"])


SHORT_OF_MEMORY = """
from infinity.api.engine import engine_of
from infinity.params.cache import Cache
from infinity.params.unit import ParamUnit
under_way, failed, put_off, short, limit = [], [], [], "", 0

def noted(kind, name):
    call = getattr(kind, name)
    def method(self, *args, **options):
        under_way.append(name)
        try:
            done = call(self, *args, **options)
            if name == "put_off" and done:
                put_off.append(self.index)
            return done
        finally:
            under_way.pop()
    setattr(kind, name, method)

for kind, name in (Cache, "prefetch"), (Cache, "load_now"), (ParamUnit, "begin_late"), (ParamUnit, "put_off"):
    noted(kind, name)

def train(where, times, forward):
    global short, model
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, adam = infinity.wrap(model, adam, config)
    engine = engine_of(model)
    engine.residency.cache._capacity = 5 * engine.units[0].layout.gathered_nbytes  # on any device
    failed.clear(), put_off.clear()
    for unit in engine.units:
        def fill(fill=unit._memory.fill, index=unit.index):
            due = under_way[-1:] == ["begin_late"]
            if short in under_way or (short and due):
                again = times < 99 or index in (failed or [index])  # or one unit, until others give way
                if len(failed) < times and again and not put_off:
                    failed.append(index)
                    raise torch.OutOfMemoryError("no memory on this rank")
            fill()
        unit._memory.fill = fill
    for step in range(3):
        faults = where if rank == 1 and step == 2 else ""
        if forward:
            infinity.flush(adam)
            engine.residency.reshard_all()
            short = faults
        loss = model(torch.full((2, 64), rank + 1.0)).square().mean()
        short = faults
        loss.backward()
        short = ""
        adam.step()
        adam.zero_grad()
    bits = float(sum(v.double().sum() for v in model.state_dict().values())).hex()
    print(json.dumps([bits, engine.residency.cache.loads, len(failed), len(put_off)]))
    infinity.close(adam)

for case in json.loads(sys.argv[2]):
    train(*case)
"""


def test_a_rank_that_is_short_of_memory_gathers_in_the_order_of_the_others(tmp_path: Path) -> None:
    given = settings_of(tmp_path, "nvme", "fp32", units=["Linear"])
    cases = [("prefetch", 0, True), ("prefetch", 2, False), ("prefetch", 99, True), ("load_now", 2, True)]
    cases = cases[1:3] if ranks.DEVICE == "lagging" else cases  # a case takes seconds there
    results = run_ranks(2, HEAD + SHORT_OF_MEMORY, json.dumps(given), json.dumps(cases), seconds=180)
    first, second = ([json.loads(line) for line in said.splitlines()] for said in all_well(results))
    for (_, times, _), one, other in zip(cases, first, second, strict=True):
        assert one[0] == other[0] == first[0][0]  # the bits of the run without faults
        assert one[1] == other[1]  # as many loads
        assert one[2:] == [0, 0]
        assert (other[2] > 0) == (times > 0)
        if times == 99:  # it failed until other loads had given way
            assert other[3] > 0


def test_a_rank_without_any_memory_for_a_unit_is_named(tmp_path: Path) -> None:
    given = settings_of(tmp_path, "nvme", "fp32", units=["Linear"])
    script = HEAD + SHORT_OF_MEMORY.replace("and not put_off", "")
    first, second = run_ranks(2, script, json.dumps(given), json.dumps([("prefetch", 9999, True)]))
    assert "OutOfMemoryError: no memory on this rank" in second[2]
    assert "RankError" in first[2]
    assert "rank 1" in first[2]
    assert "DivergenceError" not in first[2] + second[2]


GRADIENTS = """
import copy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

def zeros(m, o): o.zero_grad(set_to_none=False)
def none(m, o): o.zero_grad()
def one_none(m, o): m.last.weight.grad = None
def some_zero(m, o): m.last.weight.grad.zero_()
def half(m, o): m.first.weight.grad.mul_(0.5)
def clip(m, o): clip_grad_norm_(m.parameters(), 0.05)
def clamp(m, o): clip_grad_value_(m.parameters(), 1e-3)
def freeze(m, o): m.layers[1].requires_grad_(False)
def thaw(m, o): m.layers[1].requires_grad_(True)
def look(m, o):
    for p in m.parameters():
        p.grad is None or seen[m is plain].append(p.grad.clone() if m is plain else infinity.gradient(p))
def step(m, o):
    o.step()
    o.zero_grad()

LOOPS = [
    ["b", "b", zeros, "b", step], ["b", clip, "b", clip, step], ["b", one_none, "b", step, "b", step],
    ["b", one_none, step], ["b", half, "b", half, step], ["b", look, "b", look, step], [zeros, step],
    ["b", none, "b", step], ["b", "b", "b", step, "b", step], ["b", some_zero, "b", step],
    ["b", some_zero, step], ["b", zeros, step], ["b", step, freeze, "b", step, thaw, "b", step],
    ["b", clamp, "b", step],
]
made, stage = model, int(sys.argv[2])
for accumulation in (None, 2) if stage < 2 else (None,):
    for number, loop in enumerate(LOOPS):
        plain = copy.deepcopy(made)
        o = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        model = copy.deepcopy(made)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = inner.config(**json.loads(sys.argv[1]), zero_stage=stage, accumulation=accumulation)
        model, adam = infinity.wrap(model, adam, config)
        seen = [], []
        x = [torch.full((2, 8), r + 1.0) for r in range(world)]
        for do in loop:
            if do == "b":
                model(x[rank]).square().mean().backward()
                (sum(plain(each).square().mean() for each in x) / world).backward()
            else:
                do(model, adam)
                do(plain, o)
        for name, value in model.state_dict().items():
            said = f"{name}, stage {stage}, accumulation {accumulation}, loop {number}: "
            torch.testing.assert_close(
                value, plain.state_dict()[name], rtol=1e-5, atol=2e-6, msg=lambda m: said + m
            )
        for mine, wanted in zip(*seen, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-7)
        infinity.close(adam)
"""


@pytest.mark.integration
@pytest.mark.first
@pytest.mark.parametrize("stage", [3, 1])
def test_what_users_do_to_gradients(stage: int, tmp_path: Path) -> None:
    """What torch does with the mean of the losses."""
    given = settings_of(tmp_path, "device", "fp32")
    given["gradients"] = None
    all_well(run_ranks(2, HEAD + GRADIENTS, json.dumps(given), str(stage), seconds=240))


BUILT = """
import gc
from transformers import LlamaForCausalLM
from infinity.api.init import scratch_extent

given = json.loads(sys.argv[1])
config = infinity.Config(**given)

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other = nn.Linear(200, 300), nn.Linear(200, 300)
        self.other.weight = self.linear.weight
        self.scale = torch.full((3,), 2.0)
        self.register_buffer("kept", torch.full((5,), float(rank)))
        self.register_buffer("not_kept", torch.full((5,), float(rank)), persistent=False)
        self.drawn = nn.Parameter(torch.randn(70, 70))

    def forward(self, x):
        return (self.linear(x) + self.other(x)).sum() * self.scale.sum() + self.drawn.sum() + self.kept.sum()

build = {
    "odd": lambda: Odd(),
    "llama": lambda: LlamaForCausalLM.from_pretrained(sys.argv[2]),
}
for name, make in build.items():
    torch.manual_seed(3 + rank)
    with infinity.init(config):
        model = make()
    for param in model.parameters():
        large = param.nbytes >= 4096
        assert param.is_meta == (rank > 0) and (scratch_extent(param) is not None) == (rank == 0 and large)
    if rank == 0:
        wanted = {n: v.clone() for n, v in model.state_dict().items()}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, adam = infinity.wrap(model, adam, config)
    model.eval()  # what dropout draws is each rank's own
    ids = torch.arange(8).view(1, 8)
    loss = model(torch.ones(2, 200)) if name == "odd" else model(input_ids=ids, labels=ids).loss
    print(name, loss.item(), getattr(model, "not_kept", ""))
    found = model.state_dict()
    if rank == 0:
        assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in found)
    loss.backward()
    adam.step()
    infinity.close(adam)
"""


@pytest.mark.integration
def test_other_ranks_than_the_first_build_without_memory(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    given = settings_of(tmp_path, "nvme", "fp32")
    arguments = json.dumps(given), str(tmp_path / "llama")
    first, second = all_well(run_ranks(2, HEAD + BUILT, *arguments, imports=["transformers"]))
    assert first == second


@pytest.mark.integration
def test_no_sync(tmp_path: Path) -> None:
    """In a context that is on, no gradient is sent; the next backward outside sends them all, once."""
    script = (
        HEAD
        + LOOP
        + """
from infinity.api.engine import engine_of
comm = engine_of(adam).comm
loss().backward()
adam.zero_grad()
sent = [comm.sent]
for on in (True, True, False):
    with model.no_sync() if on else contextlib.nullcontext():
        loss().backward()
    sent.append(comm.sent)
print([after > before for before, after in zip(sent, sent[1:])])
once = sent[-1] - sent[-2]
adam.step()
assert comm.sent == sent[-1]
infinity.close(adam)
"""
    )
    for stage, wanted in ((1, [False, False, True]), (2, [True, True, True])):
        given = settings_of(tmp_path, "device", "fp32", zero_stage=stage, accumulation=1, gradients=None)
        results = run_ranks(2, "import contextlib\n" + script, json.dumps(given))
        assert all_well(results) == [f"{wanted}\n"] * 2
        assert all(("no_sync() does nothing" in err) == (stage == 2) for _, _, err in results)


MOE = """
import torch


class MoE(torch.nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.router = torch.nn.Linear(width, count)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for i in shares.argmax(-1).unique().tolist():
            chosen = shares.argmax(-1) == i
            out[chosen] = self.experts[i](x[chosen]) * shares[chosen, i, None]
        return x + out
"""
EXPERTS = """
import json, os, sys
import infinity, torch
from torch import nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
settings, cases, sets = json.loads(sys.argv[1]), json.loads(sys.argv[2]), []


class Root(MoE):  # calls the experts itself
    pass


for units in cases:
    torch.manual_seed(0)
    experts = MoE(8, 4) if units == ["MoE"] else Root(8, 4)
    model = nn.Sequential(nn.Linear(8, 8), experts, nn.Tanh()) if units == ["MoE"] else experts
    config = infinity.Config(**settings, units=units, rank_timeout=30)
    model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    for i, expert in enumerate(experts.experts):
        expert.register_forward_hook(lambda *_, i=i: used.add(i))
    made = torch.Generator().manual_seed(5)
    for _ in range(4):
        used, batches = set(), [torch.randn(2, 8, generator=made) for _ in range(world)]
        model(batches[rank]).square().mean().backward()
        sets.append(sorted(used))
        adam.step()
        adam.zero_grad()
    infinity.close(adam)
print(sets)
"""


@pytest.mark.integration
def test_experts_that_the_data_choose(tmp_path: Path) -> None:
    """Each rank uses others: the cure is one unit of all of them."""
    settings = json.dumps(settings_of(tmp_path, "nvme", "fp32"))
    for _, _, err in run_ranks(2, MOE + EXPERTS, settings, "[null]"):
        assert "DivergenceError: ranks do different things" in err
        assert 'Config(units=["MoE"])' in err
        assert 'units=["experts"]' in err
        assert "only the data may differ" not in err
    first, second = all_well(run_ranks(2, MOE + EXPERTS, settings, '[["MoE"], ["experts"]]'))
    assert first != second  # which experts they use
