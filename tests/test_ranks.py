"""One model over several ranks: the bits of plain torch, and one end where ranks do not do the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import infinity

from . import ranks
from .quick import quick
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

#: ranks, model, placement, dtype, and what else is set
CASES: dict[str, tuple[int, str, str, str, dict[str, Any]]] = {
    "gpt": (2, "gpt", "nvme", "bf16", {"clip": 0.5, "accumulate": 2, "groups": True}),
    "gpt, four ranks": (4, "gpt", "split", "fp32", {"clip": 0.5}),
    "gpt, three ranks": (3, "gpt", "state on nvme", "bf16", {"accumulate": 3}),
    "gpt, tied, recomputed": (
        2,
        "gpt",
        "host",
        "fp32",
        {"sizes": {"tied": True, "recompute": "non-reentrant"}},
    ),
    "gpt, recomputed reentrantly": (2, "gpt", "nvme", "fp32", {"sizes": {"recompute": "reentrant"}}),
    "gpt, partly frozen": (2, "gpt", "host", "bf16", {"frozen": ["blocks.0"]}),
    "gpt, at once": (2, "gpt", "nvme", "fp32", {"config": {"update": "sync", "device_memory": "least"}}),
    "gpt, activations on the host": (
        *(2, "gpt", "device", "fp32"),
        {"sizes": {"recompute": "non-reentrant"}, "config": {"activations": "host"}},
    ),
    "gpt, stage 2": (
        *(2, "gpt", "device", "bf16"),
        {"accumulate": 2, "clip": 0.5, "config": {"zero_stage": 2, "optimizer_state": "host"}},
    ),
    "gpt, stage 2, four ranks": (
        *(4, "gpt", "state on nvme", "fp32"),
        {"sizes": {"tied": True, "recompute": "reentrant"}, "config": {"zero_stage": 2}},
    ),
    "gpt, stage 1": (
        *(2, "gpt", "state on nvme", "bf16"),
        {"accumulate": 2, "clip": 0.5, "config": {"zero_stage": 1}},
    ),
    "gpt, stage 1, declared": (
        *(4, "gpt", "device", "fp32"),
        {"sizes": {"tied": True, "recompute": "reentrant"}, "config": {"zero_stage": 1, "accumulation": 1}},
    ),
    "gpt, stage 1, declared accumulation": (
        *(2, "gpt", "device", "bf16"),
        {"accumulate": 3, "clip": 0.5, "config": {"zero_stage": 1, "accumulation": 3}},
    ),
    "gpt, stage 0": (
        *(2, "gpt", "state on nvme", "bf16"),
        {"accumulate": 2, "clip": 0.5, "config": {"zero_stage": 0}},
    ),
    "gpt, stage 0, three ranks": (
        *(3, "gpt", "device", "fp32"),
        {"sizes": {"recompute": "non-reentrant"}, "config": {"zero_stage": 0, "optimizer_state": "host"}},
    ),
    "gpt, stage 1, blocks of one rank": (
        *(2, "gpt", "device", "fp16"),
        {"program": [{"turns": 2, "depths": [[3, 0]] * 2}] * 3, "zeros": True, "config": {"zero_stage": 1}},
    ),
    "gpt, stage 0, blocks of one rank": (
        *(2, "gpt", "device", "fp32"),
        {
            "sizes": {"recompute": "reentrant"},
            "program": [{"turns": 2, "shape": "sum", "depths": [[3, 2], [3, 0]]}] * 2,
            "config": {"zero_stage": 0},
        },
    ),
    "gpt, bf16 moments": (
        *(3, "gpt", "nvme", "bf16"),
        {"clip": 0.5, "accumulate": 2, "config": {"optimizer_state_dtype": "bf16"}},
    ),
    "gpt, 8-bit moments": (
        *(3, "gpt", "nvme", "bf16"),
        {"clip": 0.5, "accumulate": 2, "config": {"optimizer_state_dtype": "8bit"}},
    ),
    "gpt, 8-bit moments, stage 1": (
        *(2, "gpt", "state on nvme", "fp32"),
        {"config": {"optimizer_state_dtype": "8bit", "zero_stage": 1}},
    ),
    "gpt, 8-bit moments and fp32 ones": (
        *(3, "gpt", "split", "bf16"),
        {
            "config": {
                "optimizer_state_dtype": "8bit",
                "optimizer_state_fp32": ["*norm*", "*.bias", "tokens*"],
            }
        },
    ),
    "gpt, bf16 moments and fp32 ones, stage 1": (
        *(2, "gpt", "state on nvme", "bf16"),
        {
            "accumulate": 2,
            "config": {
                "optimizer_state_dtype": "bf16",
                "optimizer_state_fp32": ["blocks.*.weight"],
                "zero_stage": 1,
            },
        },
    ),
    "gpt, Lion, bf16 moments, stage 1": (
        *(2, "gpt", "state on nvme", "fp32"),
        {"optimizer": "lion", "config": {"optimizer_state_dtype": "bf16", "zero_stage": 1}},
    ),
    "gpt, SGD": (2, "gpt", "split", "bf16", {"optimizer": "momentum"}),
    "gpt, Adagrad, stage 0": (
        2,
        "gpt",
        "device",
        "fp32",
        {"optimizer": "adagrad", "config": {"zero_stage": 0}},
    ),
    "gpt, Muon": (2, "gpt", "host", "fp32", {"optimizer": "muon", "config": {"update": "sync"}}),
    "gpt, Muon, behind the forward": (
        *(3, "gpt", "nvme", "bf16"),
        {"optimizer": "muon", "clip": 0.5, "accumulate": 2, "config": {"optimizer_state_dtype": "bf16"}},
    ),
    "gpt, Muon, four ranks": (4, "gpt", "split", "fp32", {"optimizer": "muon", "frozen": ["blocks.0"]}),
    "gpt, Muon, stage 2": (
        *(2, "gpt", "device", "bf16"),
        {"optimizer": "muon", "config": {"zero_stage": 2, "optimizer_state": "host"}},
    ),
    "gpt, Muon, stage 1, blocks of one rank": (
        *(2, "gpt", "device", "fp32"),
        {
            "optimizer": "muon",
            "program": [{"turns": 2, "depths": [[3, 0]] * 2}] * 3,
            "config": {"zero_stage": 1},
        },
    ),
    "gpt, Muon, stage 0": (
        *(3, "gpt", "state on nvme", "fp32"),
        {"optimizer": "muon", "config": {"zero_stage": 0}},
    ),
    "moe, stage 1": (2, "moe", "device", "bf16", {"config": {"zero_stage": 1}}),
    "gpt2, stage 0": (2, "gpt2", "device", "fp16", {"accumulate": 2, "config": {"zero_stage": 0}}),
    "cnn": (2, "cnn", "host", "fp32", {"accumulate": 2}),
    "lstm": (2, "lstm", "split", "fp32", {}),
    "moe": (2, "moe", "nvme", "bf16", {}),
    "gpt2": (2, "gpt2", "host", "fp16", {"accumulate": 2}),
    "llama": (2, "llama", "state on nvme", "bf16", {}),
    "qwen2": (2, "qwen2", "nvme", "fp32", {"clip": 0.5}),
}


def settings_of(folder: Path, place: str, dtype: str, **config: Any) -> dict[str, Any]:
    memory = {"device_memory": "64MiB", "host_memory": "512MiB", "threads": 1}
    return {"device": "cpu", "dtype": dtype, "nvme": str(folder), **PLACES[place], **memory, **config}


def of_stage(folder: Path, stage: int) -> dict[str, Any]:
    """Settings of a stage, on the device below 3, else on NVMe; in fp32."""
    place = "nvme" if stage == 3 else "device"
    given = settings_of(folder, place, "fp32", zero_stage=stage, prefetch_memory=0)
    return given if stage >= 2 else {**given, "gradients": None}


STAGES = pytest.mark.parametrize("stage", quick(range(4), [3]))


@pytest.mark.parametrize(
    "name",
    quick(CASES, ["gpt", "gpt, tied, recomputed", "gpt, bf16 moments"]),
)
def test_ranks_train_as_plain_torch_does(name: str, tmp_path: Path) -> None:
    world, model, place, dtype, more = CASES[name]
    config = dict(more.get("config", {}))
    if config.get("zero_stage", 3) < 2:
        config["gradients"] = None  # unset
    if config.get("device_memory") == "least":
        config["device_memory"] = "2MiB"
    given = {"model": model, "steps": 5, **more, "config": settings_of(tmp_path, place, dtype, **config)}
    script = "from tests.rank_training import main; main()"
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
"""
#: what the last of two ranks does and the first does not
DIVERGES = {
    "skips a layer": "model.order = [0, 2]\nstep()",
    "uses layers in another order": "model.order = [1, 0, 2]\nstep()",
    "does one more backward": "loss().backward()\nstep()",
    "does one more forward": "with torch.no_grad(): loss()\nstep()",
    "steps without a backward": "adam.step()\nstep()",
    "steps twice": "step()\nadam.step()\nstep()",
    "raises in its forward": "model.order = [7]\nstep()",
    "raises in its backward": "l = loss()\nl.register_hook(lambda g: 1 / 0)\nl.backward()",
    "raises in a hook": "model.layers[1].register_forward_hook(lambda *a: 1 / 0)\nstep()",
    "raises between": "raise ValueError('mine')",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
    "gathers alone": "with infinity.gathered(model): pass\nstep()",
    "edits alone": "with infinity.gathered(model.first, write=True): model.first.weight.data.zero_()\nstep()",
    "looks at a gradient alone": "loss().backward()\ninfinity.gradient(model.last.weight)\nadam.step()",
    "reads a gradient alone": "loss().backward()\nmodel.last.weight.grad.isnan().any()\nadam.step()",
    "asks for a state dict alone": "model.state_dict()\nstep()",
    "drops a gradient": "loss().backward()\nmodel.last.weight.grad = None\nloss().backward()\nadam.step()",
    "drops a gradient before its step": "loss().backward()\nmodel.last.weight.grad = None\nadam.step()",
    "scales a gradient": "loss().backward()\nmodel.last.weight.grad.mul_(0.5)\nadam.step()",
    "clips to another limit": CLIP.format(0.01),
    "loads other values": LOAD.format(2.0),
    "loads another state": LOAD_STATE + "adam.load_state_dict(state)\nstep()",
    "has another learning rate": "adam.param_groups[0]['lr'] = 0.5\nstep()",
    "ends": "sys.exit(0)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}
SAME = {
    "drops a gradient": "loss().backward()\nloss().backward()\nadam.step()",
    "looks at a gradient alone": "loss().backward()\nadam.step()",
    "reads a gradient alone": "loss().backward()\nadam.step()",
    "clips to another limit": CLIP.format(0.02),
    "loads other values": LOAD.format(1.0),
    "loads another state": "adam.load_state_dict(adam.state_dict())\nstep()",
}


#: What ranks may do below stage 3: at 2 units stay to the next step, below that ranks may use different ones,
#: and what a rank has whole it may look at alone.
ALLOWED = {2: ["does one more forward"]}
ALLOWED[1] = ["skips a layer", "uses layers in another order", "asks for a state dict alone", *ALLOWED[2]]
ALLOWED[0] = ALLOWED[1]
WAYS = [(how, stage) for stage in (3, 2, 1, 0) for how in DIVERGES if how not in ALLOWED.get(stage, ())]
QUICK = [("skips a layer", 3), ("raises in its forward", 3)]
#: Each way once in CI.
ONCE = {how: stage for how, stage in reversed(WAYS) if (how, stage) not in QUICK}


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        *QUICK,
        *(pytest.param(*way, marks=pytest.mark.integration) for way in ONCE.items()),
        *(pytest.param(*w, marks=pytest.mark.nightly) for w in WAYS if w not in [*QUICK, *ONCE.items()]),
    ],
)
def test_ranks_that_do_not_do_the_same_all_end(how: str, stage: int, tmp_path: Path) -> None:
    same, other = (text.replace("\n", "\n    ") for text in (SAME.get(how, "step()"), DIVERGES[how]))
    script = f"{HEAD}{LOOP}if rank == 0:\n    {same}\nelse:\n    {other}\nstep()\nstep()\n"
    results = run_ranks(2, script, json.dumps(of_stage(tmp_path, stage)), seconds=60)
    (first, _, said), (last, _, other_said) = results
    assert first == 1, (said, other_said)
    assert "RankError" in said or "DivergenceError" in said, said
    if how not in ("ends", "is killed", "is interrupted"):
        assert last == 1, other_said


@pytest.mark.parametrize("stage", quick([0, 1, 2], [1]))
def test_what_ranks_may_do_below_stage_3(stage: int, tmp_path: Path) -> None:
    script = HEAD + LOOP
    for how in ALLOWED[stage]:
        other = DIVERGES[how].replace("\n", "\n    ")
        script += f"if rank == 0:\n    step()\nelse:\n    {other}\n    model.order = [0, 1, 2]\n"
    script += "step()\nprint(adam.grad_norm)\ninfinity.close(adam)\n"
    first, second = all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, stage))))
    assert first == second


@pytest.mark.integration
def test_declared_accumulation_needs_the_same_layers(tmp_path: Path) -> None:
    script = HEAD + LOOP + "model.order = [0, 1] if rank else [0, 1, 2]\nstep()\n"
    for code, _, err in run_ranks(2, script, json.dumps(of_stage(tmp_path, 1) | {"accumulation": 1})):
        assert code == 1
        assert "DivergenceError" in err


@pytest.mark.on_cpu
@STAGES
def test_a_model_is_moved_to_the_cpu_of_its_rank(stage: int, tmp_path: Path) -> None:
    """As transformers' Trainer does."""
    script = HEAD + LOOP + "assert model.to(torch.device('cpu', rank)) is model.to('cpu:1')\nstep()\n"
    all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, stage))))


@STAGES
def test_a_state_dict_behind_a_forward_is_loaded(stage: int, tmp_path: Path) -> None:
    """Below stage 3 units are gathered then, for the backward; and in a block, on all ranks."""
    script = (
        HEAD
        + LOOP
        + """
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
infinity.close(adam)
"""
    )
    all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, stage))))


@STAGES
def test_what_is_added_to_gradients_counts(stage: int, tmp_path: Path) -> None:
    """As the mean over ranks, as what a backward brings."""
    script = (
        HEAD
        + LOOP
        + """
weight = model.last.weight
for more in ("one rank", "all", "and a backward"):
    loss().backward()
    before = infinity.gradient(weight)
    if rank == 0 or more != "one rank":
        weight.grad.add_(torch.full_like(before, 1.0 + rank))
    if more == "and a backward":
        loss(0.0).backward()
    after = infinity.gradient(weight)
    torch.testing.assert_close(after - before, torch.full_like(before, 0.5 if more == "one rank" else 1.5))
    assert abs(nn.utils.get_total_norm([weight.grad]).item() - after.norm().item()) < 1e-4
    was = {name: value.clone() for name, value in model.state_dict().items()}
    adam.step()
    adam.zero_grad()
    assert not torch.equal(model.state_dict()["last.weight"], was["last.weight"])
print(float(model.state_dict()["last.weight"].double().sum()).hex())
infinity.close(adam)
"""
    )
    first, second = all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, stage))))
    assert first == second


@pytest.mark.parametrize("what", ["state on one rank", "another step"])
def test_wrap_with_optimizers_that_are_not_the_same(what: str, tmp_path: Path) -> None:
    script = (
        HEAD
        + """
model(torch.ones(2, 8)).square().mean().backward()
if rank == int(sys.argv[2]) or sys.argv[3] == "another step":
    adam.step()
if rank == int(sys.argv[2]) and sys.argv[3] == "another step":
    adam.state[model.last.weight]["step"] += 7
model.zero_grad()
infinity.wrap(model, adam, config)
"""
    )
    for who in (0, 1):
        given = json.dumps(of_stage(tmp_path, 3))
        for code, _, err in run_ranks(2, script, given, str(who), what):
            assert code == 1
            assert "DivergenceError" in err


@STAGES
def test_a_rank_that_catches_what_it_raised_may_go_on(stage: int, tmp_path: Path) -> None:
    """As long as what it does is what the others do."""
    script = (
        HEAD
        + LOOP
        + """
if rank == 1:
    model.order = [7]
    try:
        step()
    except IndexError:
        model.order = [0, 1, 2]
step()
print(adam.grad_norm)
infinity.close(adam)
"""
    )
    settings = of_stage(tmp_path, stage)
    first, second = all_well(run_ranks(2, script, json.dumps(settings)))
    assert first == second


@STAGES
def test_what_arrives_on_one_rank_is_the_gradient_of_all(stage: int, tmp_path: Path) -> None:
    """A parameter that a rank does not use has a gradient there all the same; one that none uses has none."""
    script = (
        HEAD
        + """
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
x = torch.ones(2, 8)
for uses in ((0, 1), (2, 0), (1, 1)):
    for use in (uses[rank], 2):  # one that is only accumulated to on some ranks, too
        model(x, use).sum().backward()
    found = {n: infinity.gradient(p) for n, p in model.named_parameters()}
    print({n: None if g is None else g.flatten()[:2].tolist() for n, g in found.items()})
    adam.step()
    adam.zero_grad()
print(model.state_dict()["one"].tolist(), model.state_dict()["none"].tolist())
infinity.close(adam)
"""
    )
    first, second = all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, stage))))
    assert first == second
    lines = first.splitlines()
    assert all("'none': None" in line for line in lines[:3])
    assert ["'one': None" in line for line in lines[:3]] == [False, False, True]
    assert ["'other': None" in line for line in lines[:3]] == [False, True, False]
    assert lines[3].endswith(str([1.0] * 8))


@STAGES
def test_a_gradient_that_a_user_assigns_is_refused(stage: int, tmp_path: Path) -> None:
    script = HEAD + LOOP + "model.last.weight.grad = torch.ones(8, 32)\nloss().backward()\n"
    for code, _, err in run_ranks(2, script, json.dumps(of_stage(tmp_path, stage))):
        assert code == 1
        assert "GradientError: with several ranks, you cannot assign a gradient to 'last.weight'" in err


@STAGES
def test_edits_of_one_rank_count_on_all(stage: int, tmp_path: Path) -> None:
    script = (
        HEAD
        + LOOP
        + """
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
"""
    )
    first, second = all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, stage))))
    assert first == second


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("infinity.inference(nn.Linear(2, 2), config)", "`infinity.inference` is not available"),
        ("with infinity.gathered(model, source=2): pass", "names a rank that does not exist"),
    ],
)
def test_what_is_not_there_yet_is_refused(call: str, words: str, tmp_path: Path) -> None:
    for code, _, err in run_ranks(2, HEAD + LOOP + call, json.dumps(settings_of(tmp_path, "host", "fp32"))):
        assert code == 1
        assert words in err


@pytest.mark.parametrize(
    "more",
    [{"zero_stage": 1, "gradients": None}, {"zero_stage": 2}, {"update": "delayed"}, {"device_memory": 4096}],
)
def test_what_a_config_cannot_have_is_refused_on_all_ranks(more: dict[str, Any], tmp_path: Path) -> None:
    given = {**settings_of(tmp_path, "nvme", "fp32"), **more}
    for code, _, err in run_ranks(2, HEAD + LOOP, json.dumps(given)):
        assert code == 1
        assert "ConfigError" in err or "BudgetError" in err


@pytest.mark.first
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_sent_is_what_zero_says(stage: int, tmp_path: Path) -> None:
    """Per rank, times (N - 1) / N, of every element, in K backwards: stage 0 sends 2 r, stage 1 r + c,
    stage 2 c + K r, stage 3 at most K (2 c + r). Here all three are 4 bytes."""
    script = (
        HEAD
        + LOOP
        + """
from infinity.api.engine import engine_of
engine = engine_of(adam)
elements = sum(u.layout.gathered_nbytes for u in engine.units) // 4
for _ in range(2):
    before = engine.comm.sent
    for _ in range(3):
        loss().backward()
    adam.step()
    adam.zero_grad()
print((engine.comm.sent - before) / (4 * elements) * world / (world - 1))
"""
    )
    given = settings_of(tmp_path, "device", "fp32", zero_stage=stage, prefetch_memory=0)
    given["gradients"] = None
    for said in all_well(run_ranks(2, script, json.dumps(given))):
        assert float(said) == {0: 2, 1: 2, 2: 4}[stage] if stage < 3 else 3 < float(said) <= 9


@pytest.mark.first
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_run_behind_compute(stage: int, tmp_path: Path) -> None:
    """All reductions do, and from stage 2 on all gathers but that of the first unit of a cycle; at stage 0
    reduced gradients are gathered."""
    script = (
        HEAD
        + LOOP
        + """
import threading
from infinity.api.engine import engine_of
engine = engine_of(adam)
there = {"gather": [], "reduce": []}
for name, threads in there.items():
    def watched(run, call=getattr(engine.comm, name), threads=threads, **settings):
        threads.append(threading.current_thread().name == "infinity-ranks")
        return call(run, **settings)
    setattr(engine.comm, name, watched)
for _ in range(3):
    for threads in there.values():
        threads.clear()
    loss().backward()
    adam.step()
    adam.zero_grad()
print(json.dumps([there, len(engine.units[0].layout.runs)]))
"""
    )
    given = settings_of(tmp_path, "device", "fp32", zero_stage=stage)
    given["gradients"] = None
    for said in all_well(run_ranks(2, script, json.dumps(given))):
        there, runs = json.loads(said)
        assert there["reduce"]
        assert all(there["reduce"])
        if stage != 1:
            assert there["gather"].count(False) <= (runs if stage else 0) < len(there["gather"])


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


@pytest.mark.parametrize("place", quick(["nvme", "host", "device"], ["nvme"]))
def test_a_rank_that_is_short_of_memory_gathers_in_the_order_of_the_others(
    place: str, tmp_path: Path
) -> None:
    given = settings_of(tmp_path, place, "fp32", units=["Linear"])
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


LAYERDROP = """
config = inner.config(**{**json.loads(sys.argv[1]), **json.loads(sys.argv[2])})
import copy
plain = copy.deepcopy(model)
torch_adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
model, adam = infinity.wrap(model, adam, config)
orders = [[[0, 1, 2], [0, 1, 2]], [[0, 2], [1]], [[1], []], [[0, 1, 2], [0, 1, 2]]]

def loss(model, rank, step):
    model.order = orders[step][rank]
    return model(torch.full((2, 8), rank + 1.0)).square().mean()

for step in range(len(orders)):
    loss(model, rank, step).backward()
    adam.step()
    adam.zero_grad()
    if step == 1 and rank == 0:
        with torch.no_grad():
            loss(model, rank, step)  # the first rank alone evaluates
    sum(loss(plain, r, step) for r in range(world)).div(world).backward()
    torch_adam.step()
    torch_adam.zero_grad()
for name, value in model.state_dict().items():
    torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
print(float(sum(v.double().sum() for v in model.state_dict().values())).hex())
"""


def test_ranks_may_use_different_layers_below_stage_2(tmp_path: Path) -> None:
    """As in DistributedDataParallel(find_unused_parameters=True); the same bits in both stages."""
    given = settings_of(tmp_path, "device", "fp32", gradients=None)
    said: list[str] = []
    for stage in (0, 1):
        said += all_well(run_ranks(2, HEAD + LAYERDROP, json.dumps(given), json.dumps({"zero_stage": stage})))
    assert len(set(said)) == 1


@STAGES
def test_nobody_holds_units_but_users(stage: int, tmp_path: Path) -> None:
    script = HEAD + LOOP + "infinity.flush(adam)\nprint(infinity.metrics(adam)['memory/held_units'])\n"
    results = run_ranks(2, script, json.dumps(of_stage(tmp_path, stage)))
    assert all_well(results) == ["0.0\n"] * 2
    assert not any("stay on the device" in err for _, _, err in results)


UNEVEN = """
model, adam = infinity.wrap(model, adam, config)
x = torch.full((2, 8), rank + 1.0)
for order in ([0], [0, 1, 2]), ([1], []):
    model.order = [0, 1, 2]
    model(x).square().mean().backward()
    adam.step()
    adam.zero_grad()
    model.order = order[rank]
    with torch.no_grad():
        model(x)
    found = model.state_dict()
print(float(sum(v.double().sum() for v in found.values())).hex())
infinity.close(adam)
"""


def test_a_state_dict_behind_an_evaluation_with_different_layers(tmp_path: Path) -> None:
    """Below stage 2 a rank has gathered what another has not."""
    given = settings_of(tmp_path, "device", "fp32", gradients=None, zero_stage=1)
    first, second = all_well(run_ranks(2, HEAD + UNEVEN, json.dumps(given)))
    assert first == second


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


@pytest.mark.first
@pytest.mark.parametrize("stage", quick(range(4), [1, 3]))
def test_what_users_do_to_gradients(stage: int, tmp_path: Path) -> None:
    """What torch does with the mean of the losses."""
    given = settings_of(tmp_path, "device", "fp32")
    given["gradients"] = None
    all_well(run_ranks(2, HEAD + GRADIENTS, json.dumps(given), str(stage), seconds=240))


BUILT = """
import gc
from transformers import LlamaForCausalLM, GPT2Config, GPT2LMHeadModel
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
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=99, n_positions=9)),
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


def test_other_ranks_than_the_first_build_without_memory(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    given = settings_of(tmp_path, "nvme", "fp32")
    results = run_ranks(2, HEAD + BUILT, json.dumps(given), str(tmp_path / "llama"))
    first, second = all_well(results)
    assert first == second


def test_no_values_on_the_first_rank_or_in_an_attribute(tmp_path: Path) -> None:
    script = """
with torch.device("meta" if rank == int(sys.argv[2]) else "cpu"):
    model.last = nn.Linear(32, 8)
    model.scale = torch.ones(3)
adam = torch.optim.AdamW(model.parameters())
infinity.wrap(model, adam, config)
"""
    given = json.dumps(settings_of(tmp_path, "host", "fp32"))
    for meta, words in (("0", "'last.weight' has no values"), ("1", "'scale' has no values on this rank")):
        results = run_ranks(2, HEAD + script, given, meta)
        assert [code for code, *_ in results] == [1, 1]
        for rank, (_, _, err) in enumerate(results):
            assert words in err if rank == int(meta) else "WrapError" in err


def test_transfers_of_slices_are_large(tmp_path: Path) -> None:
    """Every rank's drive works for every unit, in blocks of 512 KiB and more, where its slice is as large."""
    script = """
import json, os, sys
import torch
from torch import nn
import infinity
from infinity.api.engine import engine_of
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024)) for _ in range(3)))
adam = torch.optim.AdamW(model.parameters())
model, adam = infinity.wrap(model, adam, infinity.Config(**json.loads(sys.argv[1])))
for _ in range(3):
    model(torch.ones(2, 1024)).square().mean().backward()
    adam.step()
    adam.zero_grad()
infinity.flush(adam)
engine = engine_of(adam)
assert all(u.layout.shard_nbytes >= 2 << 20 for u in engine.units)
(stats,) = engine.store.ring_stats()
for nbytes, count in ((stats.bytes_read, stats.reads), (stats.bytes_written, stats.writes)):
    assert nbytes > 20 << 20, nbytes
    assert nbytes >= count << 19, (nbytes, count)
"""
    all_well(run_ranks(2, script, json.dumps(settings_of(tmp_path, "nvme", "fp32"))))


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


def test_an_edit_on_one_rank_alone_is_told_where_each_has_its_own_values(tmp_path: Path) -> None:
    edit = """
if rank == int(sys.argv[2]) or sys.argv[2] == "2":
    with torch.no_grad():
        model.last.weight.mul_(0.5)
loss().backward()
adam.step()
"""
    given = settings_of(tmp_path, "device", "fp32", zero_stage=0, gradients=None)
    for _, _, err in run_ranks(2, HEAD + LOOP + edit, json.dumps(given), "0"):
        assert "DivergenceError" in err
        assert "last.weight: rank 0: " in err
    all_well(run_ranks(2, HEAD + LOOP + edit, json.dumps(given), "2"))


def test_a_second_model_outlives_the_first(tmp_path: Path) -> None:
    """The process group that the first `wrap` made is that of all later ones, on ranks that are late, too."""
    script = (
        HEAD
        + LOOP
        + """
other = nn.Linear(8, 8)
other, its = infinity.wrap(other, torch.optim.AdamW(other.parameters()), config)
infinity.close(adam)
other(torch.ones(2, 8)).sum().backward()
its.step()
if rank == 0:
    time.sleep(1)
infinity.close(its)
again = nn.Linear(8, 8)
again, its = infinity.wrap(again, torch.optim.AdamW(again.parameters()), config)
infinity.close(its)
"""
    )
    all_well(run_ranks(2, script, json.dumps(settings_of(tmp_path, "host", "fp32"))))


def test_settings_and_models_that_differ_are_named(tmp_path: Path) -> None:
    script = (
        HEAD
        + """
import dataclasses
what = sys.argv[2]
if rank == 1 and what == "settings":
    config = config.replace(max_grad_norm=0.5, update="sync")
elif rank == 1:
    model.last = nn.Linear(32, 9)
    adam = torch.optim.AdamW(model.parameters())
infinity.wrap(model, adam, config)
"""
    )
    given = json.dumps(settings_of(tmp_path, "host", "fp32"))
    for code, _, err in run_ranks(2, script, given, "settings"):
        assert code == 1
        assert "DivergenceError: the ranks have different settings" in err
        assert "max_grad_norm: rank 0: None; rank 1: 0.5" in err
        assert "update: rank 0: 'overlap'; rank 1: 'sync'" in err
    for code, _, err in run_ranks(2, script, given, "model"):
        assert code == 1
        assert "DivergenceError: the ranks have different models" in err
        assert "last.weight" in err
        assert "(8, 32)" in err
        assert "(9, 32)" in err


def test_options_that_differ_are_told_by_key_and_both_values(tmp_path: Path) -> None:
    """Nothing has happened then: with the same options the ranks go on."""
    script = (
        HEAD
        + LOOP
        + """
from infinity.core.errors import DivergenceError
loss().backward()
if rank == 1:
    adam.param_groups[0].update(lr=0.25, betas=(0.5, 0.75))
try:
    adam.step()
except DivergenceError as error:
    print(f"{error.what}: {error.found}; {error.cure}")
adam.param_groups[0].update(lr=0.125, betas=(0.5, 0.75))
adam.step()
"""
    )
    for said in all_well(run_ranks(2, script, json.dumps(settings_of(tmp_path, "host", "fp32")))):
        assert "the ranks make a step with different options: lr of param group 0: rank 0: " in said
        assert "; rank 1: 0.25. betas of param group 0: rank 0: (0.9, 0.999); rank 1: (0.5, 0.75); " in said


def test_versions_that_differ_are_named(tmp_path: Path) -> None:
    script = """
import infinity.hardware.comm
if rank == 1:
    infinity.hardware.comm.__version__ = "0.0.1"
infinity.wrap(model, adam, config)
"""
    for code, _, err in run_ranks(2, HEAD + script, json.dumps(settings_of(tmp_path, "host", "fp32"))):
        assert code == 1
        assert "DivergenceError: the ranks run different versions" in err
        assert f"rank 0: infinity {infinity.__version__}, torch " in err
        assert "; rank 1: infinity 0.0.1, torch " in err


EXPERTS = """
import copy, json, os, sys
import infinity, torch
from torch import nn

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
settings, cases = json.loads(sys.argv[1]), json.loads(sys.argv[2])


class Expert(nn.Linear):
    pass


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Expert(8, 8) for _ in range(4))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for i in shares.argmax(-1).unique().tolist():
            chosen = shares.argmax(-1) == i
            used.add(i)
            out[chosen] = self.experts[i](x[chosen]) * shares[chosen, i, None]
        return x + out


class Root(MoE):  # calls the experts itself
    pass


for units in cases:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), MoE(), nn.Tanh()) if units == ["MoE"] else Root()
    model = copy.deepcopy(plain)
    config = infinity.Config(**settings, units=units, rank_timeout=30)
    model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), config)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    made, differ = torch.Generator().manual_seed(5), 0
    for _ in range(4):
        batches, sets = [torch.randn(2, 8, generator=made) for _ in range(world)], []
        for batch in batches:
            used = set()
            (plain(batch).square().mean() / world).backward()
            sets.append(used)
        differ += sets[0] != sets[1]
        model(batches[rank]).square().mean().backward()
        for optimizer in (adam, reference):
            optimizer.step()
            optimizer.zero_grad()
    assert differ
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    infinity.close(adam)
"""


@pytest.mark.first
@pytest.mark.parametrize("stage", [3, 2])
def test_experts_that_the_data_choose(stage: int, tmp_path: Path) -> None:
    """Each rank uses others: the cure is one unit of all of them."""
    settings = json.dumps(settings_of(tmp_path, "nvme" if stage == 3 else "device", "fp32", zero_stage=stage))
    for _, _, err in run_ranks(2, EXPERTS, settings, "[null]"):
        assert "DivergenceError: ranks do different things" in err
        assert 'Config(units=["MoE"])' in err
        assert 'units=["experts"]' in err
        assert "only the data may differ" not in err
    all_well(run_ranks(2, EXPERTS, settings, '[["MoE"], ["experts"]]'))
