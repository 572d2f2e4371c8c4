"""Checkpoints that DeepSpeed itself has written go on here; others are refused by name.

deepspeed_states.py says what they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import infinity
from infinity.cli.main import run
from infinity.core.errors import CorruptionError, DataError, DirectoryError, StateDictError
from infinity.integrations.deepspeed.checkpoints import import_deepspeed
from infinity.storage.checkpoints import find

from .command_line import python
from .deepspeed_states import ARCHIVE, CASES, STEPS, build, losses_after, wrapped
from .recorded import check_damage, saved_in, unpack

RATE = 0.01
REFUSED = "universal-round-robin"
MORE_OF_THEM = pytest.mark.integration


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(ARCHIVE, tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """What copies a recorded checkpoint for a test to change, and returns it and its files' directory."""

    def copy(name: str) -> tuple[Path, Path]:
        shutil.copytree(recorded / name, tmp_path / "saved")
        return tmp_path / "saved", tmp_path / "saved" / (tmp_path / "saved" / "latest").read_text().strip()

    return copy


class _Stub:
    """What torch makes of an object of DeepSpeed."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a file. Objects of DeepSpeed get lost."""
    names = (
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
    with torch.serialization.safe_globals([(type("Stub", (_Stub,), {}), name) for name in names]):
        content = torch.load(path, weights_only=True)
    for state in (content, content.get("optimizer_state_dict", {})):
        if isinstance(stage := state.get("zero_stage"), _Stub):
            state["zero_stage"] = stage.args[0]
        for lost in ("loss_scaler", "param_slice_mappings"):
            state.pop(lost, None)
    change(content)
    torch.save(content, path)


def made(name: str, folder: Path) -> tuple[Any, Any]:
    frozen, dtype = CASES[name].get("frozen", False), CASES[name].get("dtype", "fp32")
    return wrapped(folder, frozen=frozen, dtype=dtype, lr=RATE)


def check_tied_and_frozen(path: str) -> None:
    described = find(path).content["parameters"]
    assert described["embed.weight"]["tied"] == ["head.weight"]
    trained = {"embed.weight", "second.weight", "second.bias", "norm.weight", "norm.bias", "scale"}
    assert {n for n, p in described.items() if p["trainable"]} == trained
    frozen = saved_in(path, "parameters")["first.weight"]
    # Torch draws them with a fused multiply-add on some CPUs, with two roundings on others.
    eps = torch.finfo(frozen.dtype).eps
    torch.testing.assert_close(frozen, build().first.weight.detach().to(frozen.dtype), rtol=eps, atol=eps)


@pytest.mark.parametrize("name", [name for name in CASES if name != REFUSED])
def test_it_goes_on(name: str, recorded: Path, tmp_path: Path) -> None:
    """With the same masters and moments, learning rates and losses as in DeepSpeed itself."""
    case = CASES[name]
    path, _ = import_deepspeed(str(recorded / name), str(tmp_path / "out"))
    truth = safetensors.torch.load_file(recorded / name / "truth.safetensors")
    if case.get("round_robin_gradients"):  # DeepSpeed itself tells these of other parameters
        truth = {}
    told = json.loads((recorded / name / "truth.json").read_text())
    files = {"master": "parameters", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    saved = {kind: saved_in(path, stem) for kind, stem in files.items()}
    for place, value in truth.items():
        parameter, kind = place.split("/")
        assert torch.equal(saved[kind][parameter], value), place

    if case.get("frozen"):
        check_tied_and_frozen(path)
    model, adam = made(name, tmp_path / "run")
    if case.get("client"):
        scheduler: Any = torch.optim.lr_scheduler.StepLR(adam, 2)
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: told["rates"][step][0] / RATE)
    state = infinity.load(adam, path, state={"scheduler": scheduler})
    assert state["deepspeed"]["epoch"] == 2
    assert torch.equal(state["deepspeed"]["order"], torch.arange(3))
    assert infinity.metrics(adam)["steps"] == STEPS
    assert torch.equal(model.get_buffer("shift"), torch.arange(3) / 10)
    l2 = case.get("params", {}).get("adam_w_mode") is False
    assert [group["decoupled_weight_decay"] for group in adam.param_groups] == [not l2] * 2

    def check_rates(step: int) -> None:
        assert [group["lr"] for group in adam.param_groups] == pytest.approx(told["rates"][step])

    losses = losses_after(model, adam, check_rates, scheduler)
    assert losses == pytest.approx(told["losses"][STEPS:], rel=1e-5 if "dtype" not in case else 1e-4)
    infinity.close(adam)


def test_what_was_not_saved_stays(copied: Any, tmp_path: Path) -> None:
    """Frozen parameters that the run left out, as with PEFT."""
    saved, tag = copied("stage2-bf16")

    def leave_out(content: Any) -> None:
        for name in ("first.weight", "first.bias"):
            del content["module"][name]
        content["frozen_param_shapes"] = content["frozen_param_fragments"] = None

    edit(tag / "mp_rank_00_model_states.pt", leave_out)
    path, _ = import_deepspeed(str(saved), str(tmp_path / "out"))
    model, adam = made("stage2-bf16", tmp_path / "run")
    with pytest.raises(StateDictError, match=r"first\.weight"):
        infinity.load(adam, path)
    infinity.load(adam, path, strict=False)
    assert infinity.metrics(adam)["steps"] == STEPS
    with infinity.gathered(model):
        assert (model.first.weight == 0.25).all()
        assert not (model.second.weight == 0.25).all()
    infinity.close(adam)


def test_no_code_of_a_file_runs(copied: Any, tmp_path: Path) -> None:
    """What stands for an object is left out; names of the system torch refuses."""

    class Harmful:
        def __init__(self, function: Any, *arguments: str) -> None:
            self.made = function, arguments

        def __reduce__(self) -> Any:
            return self.made

    saved, tag = copied("stage1-fp32")
    harm = Harmful(shutil.copyfile, __file__, str(tmp_path / "harm"))
    edit(tag / "mp_rank_00_model_states.pt", lambda content: content.update(harm=[harm], kept=1))
    path, foreign = import_deepspeed(str(saved), str(tmp_path / "out"))
    assert foreign.left_out == ["the model's file['harm'][0] (shutil.copyfile)"]
    _, adam = made("stage1-fp32", tmp_path / "run")
    state = infinity.load(adam, path)
    assert (state["deepspeed"]["harm"], state["deepspeed"]["kept"]) == ([None], 1)
    infinity.close(adam)
    shutil.rmtree(saved)
    saved, tag = copied("stage1-fp32")
    harm = Harmful(os.system, f"touch {tmp_path / 'harm'}")
    edit(tag / "mp_rank_00_model_states.pt", lambda content: content.update(harm=[harm]))
    with pytest.raises(DataError, match=r"posix\.system"):
        import_deepspeed(str(saved), str(tmp_path / "refused"))
    assert not (tmp_path / "harm").exists()


#: Writes a checkpoint of ZeRO 1 with one large parameter, imports it, and prints the memory that took.
LARGE = """
import json, os, sys
import torch
from infinity.integrations.deepspeed.checkpoints import import_deepspeed
from tests.measured import Peak

folder, rows = sys.argv[1], int(sys.argv[2])
values = torch.rand(rows, 1024)
group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "params": [0]}
state = {"step": 3, "exp_avg": values.view(-1), "exp_avg_sq": values.view(-1)}
model = {"param_shapes": [{"large": values.shape}], "module": {"large": values.bfloat16()}}
steps = {"global_steps": 3, "skipped_steps": 0, "shared_params": {}, "buffer_names": []}
optimizer = {
    "single_partition_of_fp32_groups": [values.view(-1)], "partition_count": 1, "group_paddings": [0],
    "base_optimizer_state": {"state": {0: state}, "param_groups": [group]},
}
os.makedirs(folder + "/saved")
torch.save(model | steps, folder + "/saved/mp_rank_00_model_states.pt")
torch.save({"optimizer_state_dict": optimizer}, folder + "/saved/zero_pp_rank_0_mp_rank_00_optim_states.pt")
del values, state, model, optimizer
with Peak(interval=0.002) as peak:
    import_deepspeed(folder + "/saved", folder + "/out")
print(json.dumps(peak.nbytes))
"""


@pytest.mark.integration
@pytest.mark.processes
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    done = python("-c", LARGE, str(tmp_path), "24576")  # 96 MiB each of masters and moments
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 60 << 20


def test_the_command(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    assert run(["import-deepspeed", str(recorded / "stage2-l2"), str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["parameters"], result["frozen"]) == (3, 8, 0)
    assert [group["decoupled_weight_decay"] for group in result["groups"]] == [False, False]
    assert run(["import-deepspeed", str(recorded / "stage2-bf16"), str(tmp_path / "second")]) == 0
    shown = capsys.readouterr().out
    assert "8 parameters, 2 of them frozen, after 3 steps" in shown
    assert "AdamW, 2 parameters, lr 0.01, weight decay 0.1" in shown
    assert run(["import-deepspeed", str(recorded / "stage2-bf16"), str(tmp_path / "second")]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_what_lies_beside_it_comes_along(copied: Any, tmp_path: Path) -> None:
    """The configuration of the model, and Trainer's scheduler, where DeepSpeed has none."""
    saved, tag = copied("stage1-fp32")
    (saved / "config.json").write_text('{"model_type": "llama"}')
    (saved / "generation_config.json").write_text("no JSON")
    torch.save({"last_epoch": 3, "base_lrs": [0.5], "lr_lambdas": [None]}, saved / "scheduler.pt")
    path, foreign = import_deepspeed(str(saved), str(tmp_path / "a"))
    assert find(path).content["texts"] == {"config.json": '{"model_type": "llama"}'}
    assert foreign.state["scheduler"]["lr_lambdas"] == [None] * 2
    edit(tag / "mp_rank_00_model_states.pt", lambda content: content.update(lr_scheduler=None))
    assert import_deepspeed(str(saved), str(tmp_path / "b"))[1].state["scheduler"]["base_lrs"] == [0.5]
    (saved / "scheduler.pt").write_bytes(b"damaged")
    with pytest.raises(CorruptionError, match=r"scheduler\.pt"):
        import_deepspeed(str(saved), str(tmp_path / "c"))


# -- what is refused -----------------------------------------------------------------------------

Change = Callable[[Any], object]


def _of_model(change: Change) -> Callable[[Path], object]:
    return lambda tag: edit(tag / "mp_rank_00_model_states.pt", change)


def _of_rank(change: Change) -> Callable[[Path], object]:
    return lambda tag: edit(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt", change)


def _of_all(change: Change) -> Callable[[Path], object]:
    return lambda tag: [edit(path, change) for path in sorted(tag.glob("*optim_states.pt"))]


def _option(name: str, value: Any) -> Change:
    def change(content: Any) -> None:
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group[name] = value

    return change


def _moment(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["max_exp_avg_sq"] = torch.zeros(3)


def _optim(tag: Path, rank: int) -> Path:
    [path] = tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def _added(name: str) -> Callable[[Path], object]:
    return lambda tag: (tag / name).touch()


def _tag(text: bytes) -> Callable[[Path], object]:
    return lambda tag: (tag.parent / "latest").write_bytes(text)


def _lacks(stem: str) -> Callable[[Path], object]:
    return lambda tag: (tag / "zero" / "embed.weight" / f"{stem}.pt").unlink()


def _state(**changes: Any) -> Change:
    return lambda content: content["optimizer_state_dict"].update(changes)


def _reversed(content: Any) -> None:
    content["param_shapes"] = [dict(reversed(group.items())) for group in content["param_shapes"]]


def _copied_rank(tag: Path) -> None:
    shutil.copy(_optim(tag, 0), _optim(tag, 1))


def _later(content: Any) -> None:
    for state in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        state["step"] = state["step"] + 4


def _on_nvme(tag: Path) -> None:
    (tag / "offloaded_tensors" / "rank0").mkdir(parents=True)
    (tag / "offloaded_tensors" / "rank0" / "0_param.tensor.swp").touch()


def _second(tag: Path) -> Path:
    [path] = tag.glob("*zero_pp_rank_1_mp_rank_00_model_states.pt")
    return path


ORDER = "another value in the optimizer than in the model"
FIRST, THREE, HALF, UNIVERSAL = "stage1-fp32", "stage3-fp32", "stage3-bf16", "universal-stage3"
#: The checkpoint, what is done to it, and what the error says.
REFUSALS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "tensor parallel": (FIRST, _added("mp_rank_01_model_states.pt"), "tensor or pipeline"),
    "pipeline": (FIRST, _added("layer_00-model_00-model_states.pt"), "pipeline parallelism"),
    "experts": (FIRST, _added("layer_0_expert_0_mp_rank_00_model_states.pt"), "expert"),
    "experts of AutoEP": (FIRST, _of_model(lambda c: c.update(ds_autoep_layers=[{}])), "expert parallelism"),
    "a missing rank": (FIRST, lambda tag: _optim(tag, 1).unlink(), "the files of all ranks"),
    "no optimizer": (
        FIRST,
        lambda tag: [p.unlink() for p in tag.glob("*optim*")],
        "no state of an optimizer",
    ),
    "no ZeRO": (FIRST, _of_model(lambda c: c.update(param_shapes=None)), "without ZeRO"),
    "another optimizer": (
        FIRST,
        _of_model(lambda c: c["ds_config"]["optimizer"].update(type="Lamb")),
        "Lamb",
    ),
    "amsgrad": (FIRST, _of_all(_option("amsgrad", True)), "amsgrad=True"),
    "no correction": (FIRST, _of_all(_option("bias_correction", False)), "bias_correction=False"),
    "another moment": (FIRST, _of_rank(_moment), "max_exp_avg_sq"),
    "elastic": (FIRST, _of_all(_state(base_optimizer_state=[{}, {}])), "elastic_checkpoint"),
    "another weight": (FIRST, _of_model(lambda c: c["module"]["first.bias"].add_(1)), "'first.bias'"),
    "another order": (FIRST, _of_model(_reversed), ORDER),
    "other sizes": (
        FIRST,
        _of_model(lambda c: c["param_shapes"][0].update({"first.weight": torch.Size([30, 5])})),
        "another layout",
    ),
    "a wrong padding": (FIRST, _of_rank(_state(group_paddings=[2, 0])), "another layout"),
    "too few groups": (FIRST, _of_model(lambda c: c["param_shapes"].pop()), "do not fit its param_shapes"),
    "shapes of another kind": (FIRST, _of_model(lambda c: c.update(param_shapes=[5])), "not of one model"),
    "paddings of another kind": (FIRST, _of_all(_state(group_paddings="x")), "'group_paddings', of list"),
    "no steps": (FIRST, _of_model(lambda c: c.pop("global_steps")), "'global_steps', of int"),
    "a tag elsewhere": (FIRST, _tag(b"../elsewhere"), "latest names no directory"),
    "a tag that is no text": (FIRST, _tag(b"\xff\xfe"), "latest names no directory"),
    "exchanged parameters": (REFUSED, lambda tag: None, ORDER),  # DeepSpeed's converter exchanges them
    "state on NVMe": (THREE, _on_nvme, "kept its state on NVMe"),
    "the file of another rank": (THREE, _copied_rank, "in the files of ranks 0, 1"),
    "the file of another rank in bf16": (HALF, _copied_rank, "in the files of ranks 0, 1"),
    "a rank of another step": (HALF, lambda tag: edit(_optim(tag, 1), _later), "not of one save"),
    "a model's file that is cut": (HALF, lambda tag: os.truncate(_second(tag), 2000), ""),
    "a model's file that is gone": (HALF, lambda tag: _second(tag).unlink(), ""),
    "a model of another step": (HALF, lambda tag: edit(_second(tag), lambda c: c.update(global_steps=9)), ""),
    "universal without a master": (UNIVERSAL, _lacks("fp32"), "no embed.weight/fp32.pt"),
    "universal without a moment": (UNIVERSAL, _lacks("exp_avg_sq"), "no embed.weight/exp_avg_sq.pt"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_it_is_refused(what: str, copied: Any, tmp_path: Path) -> None:
    name, change, said = REFUSALS[what]
    saved, tag = copied(name)
    change(tag)
    with pytest.raises((DataError, CorruptionError)) as raised:
        import_deepspeed(str(saved), str(tmp_path / "out"))
    assert said in str(raised.value)
    assert raised.value.cure
    assert not list((tmp_path / "out").glob("*"))


def test_directories_that_are_not_meant(copied: Any, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="cannot look into"):
        import_deepspeed(str(tmp_path / "nothing"), str(tmp_path / "out"))
    with pytest.raises(DataError, match="not one checkpoint of DeepSpeed"):
        import_deepspeed(str(tmp_path), str(tmp_path / "out"))
    saved, _ = copied("stage1-fp32")
    with pytest.raises(DirectoryError, match="is not empty"):
        import_deepspeed(str(saved), str(saved))
    with pytest.raises(DirectoryError, match="infinity import-deepspeed"):
        find(str(saved))


@pytest.mark.parametrize("name", ["stage1-fp32", pytest.param("stage3-fp32", marks=MORE_OF_THEM)])
def test_damage_is_found(name: str, copied: Any, tmp_path: Path) -> None:
    saved, tag = copied(name)
    path, _ = import_deepspeed(str(saved), str(tmp_path / "right"))
    right = {stem: saved_in(path, stem) for stem in ("parameters", "exp_avg", "exp_avg_sq", "buffers")}

    def read(out: str) -> str:
        return str(import_deepspeed(str(saved), out)[0])

    errors = [check_damage(file, read, tmp_path / "out", right) for file in sorted(tag.glob("*.pt"))]
    assert sum(errors) > 20
