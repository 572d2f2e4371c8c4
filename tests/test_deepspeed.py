"""Settings files of DeepSpeed: `config_from`, `scheduler_from` and `infinity plan --deepspeed`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity import Config
from infinity.cli.main import run
from infinity.core.errors import ConfigError
from infinity.integrations.deepspeed import config_from, scheduler_from

from .ranks import all_well, run_ranks
from .small_net import build, tokens

Settings = dict[str, Any]
#: What Trainer fills in for "auto".
ARGUMENTS = SimpleNamespace(
    bf16=True,
    fp16=False,
    max_grad_norm=1.0,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    learning_rate=2e-5,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-8,
    weight_decay=0.1,
    max_steps=100,
    get_warmup_steps=lambda steps: steps // 10,
)
AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
}
FP16 = {
    **{"enabled": "auto", "initial_scale_power": 16, "loss_scale": 0, "loss_scale_window": 1000},
    **{"hysteresis": 2, "min_loss_scale": 1},
}
BF16: Settings = {"bf16": {"enabled": True}}
ADAM = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}

#: `published`: settings as projects publish them, and what becomes of them: stage, parameters, optimizer
#: state, gradients, dtype and max_grad_norm; or the keys that the error names. `ARGUMENTS` fill in what
#: Trainer fills in. `rates`: those of the first group, step by step, of DeepSpeed 0.19.8.
RECORDED = json.loads(Path(__file__).with_name("deepspeed_settings.json").read_text("utf-8"))
PUBLISHED: Mapping[str, Settings] = RECORDED["published"]
RATES: Mapping[str, Settings] = RECORDED["rates"]
#: The keys that `Config` has, so that no note has to name them.
MAPPED: list[str] = RECORDED["mapped"]


def translated(settings: Settings) -> tuple[Config, list[str]]:
    of_trainer = settings.get("gradient_accumulation_steps") == "auto"
    return config_from(settings, ARGUMENTS if of_trainer else None)


def refused(settings: Settings, arguments: Any = None) -> str:
    """Return what the error says that has to change."""
    with pytest.raises(ConfigError, match="cannot be taken over") as caught:
        config_from(settings, arguments)
    return str(caught.value.cure)


def keys_of(settings: Any, path: str = "") -> Iterator[str]:
    """Yield each key of the blocks that are not one key's own value."""
    for key, value in settings.items():
        yield f"{path}{key}"
        if key in MAPPED and isinstance(value, dict) and key != "params":
            yield from keys_of(value, f"{path}{key}.")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_translated_or_the_error_names_the_keys(name: str, tmp_path: Path) -> None:
    settings = PUBLISHED[name]["settings"]
    before = json.dumps(settings)
    file = tmp_path / "ds_config.json"
    file.write_text(before, encoding="utf-8")
    if keys := PUBLISHED[name].get("refused"):
        cure = refused(settings, ARGUMENTS if "Factory" in name or "tensor" in name else None)
        assert [part.split(": ")[0] for part in cure.split("\n    ")] == keys
        return
    config, notes = translated(settings)
    found = (config.zero_stage, config.parameters, config.optimizer_state, config.gradients, config.dtype)
    assert [*found, config.max_grad_norm] == PUBLISHED[name]["becomes"]
    assert json.dumps(settings) == before
    of_trainer = settings.get("gradient_accumulation_steps") == "auto"
    assert config_from(file, ARGUMENTS if of_trainer else None) == (config, notes)
    told = " ".join(notes)
    filled = [key for key in AUTO if settings.get(key) == "auto"]
    lost = [k for k in keys_of(settings) if k.split(".")[-1] not in MAPPED and k not in told]
    assert [key for key in lost if key not in filled] == []
    assert all(note.endswith(".") for note in notes)


def test_all_refusals_are_in_one_error() -> None:
    zero = {"stage": 4, "zenflow": {"topk_ratio": 0.1}, "offload_param": {"device": "disk"}}
    more = {"train_batch_size": "many", "gradient_cliping": 1.0, "bf16": True}
    cure = refused({"zero_optimization": zero, **more, "scheduler": {"type": "Sometimes"}})
    for key in ("zero_optimization.stage", "zero_optimization.zenflow", "train_batch_size", "bf16"):
        assert f"{key}: " in cure
    assert "zero_optimization.offload_param.device: write" in cure
    assert "gradient_cliping: did you mean 'gradient_clipping'?" in cure
    assert "scheduler.type: write one of WarmupLR" in cure


def note_of(notes: list[str], key: str) -> str:
    [note] = [each for each in notes if each.startswith(f"{key} = ")]
    return note


def test_defaults_of_deepspeed_are_not_ours() -> None:
    config, notes = config_from({"fp16": {"enabled": True}})
    assert (config.loss_scale, config.max_grad_norm) == (65536.0, 1.0)
    assert "since version 0.19.3" in note_of(notes, "gradient_clipping")
    config, notes = config_from({**BF16, "gradient_clipping": 0})
    assert config.max_grad_norm is None
    assert config.skip_nonfinite
    assert "rounds the initial parameters to bf16" in note_of(notes, "bf16.enabled")
    assert config.optimizer_state == "device"  # and `Config()` has it on the host
    assert not config_from({"bf16": {"enabled": True, "check_grad_overflow": False}})[0].skip_nonfinite
    accumulating = {**BF16, "gradient_accumulation_steps": 2}
    key, in_fp32 = "data_types.grad_accum_dtype", {"data_types": {"grad_accum_dtype": "fp32"}}
    assert "here they are added in fp32" in note_of(config_from(accumulating)[1], key)
    assert not any(n.startswith(key) for n in config_from({**accumulating, **in_fp32})[1])


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("Adam", {}, "AdamW(parameters, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)"),
        ("Adam", {"adam_w_mode": False}, "torch.optim.Adam(parameters, lr=0.001,"),
        ("AdamW", {"adam_w_mode": False}, "torch.optim.AdamW(parameters, lr=0.001,"),
        ("AdamW", {"torch_adam": True}, "weight_decay=0.01)"),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, "weight_decay=0.0)"),
        (
            "Lion",
            {"lr": 1e-4},
            "infinity.optim.Lion(parameters, lr=0.0001, betas=(0.9, 0.999), weight_decay=0.0)",
        ),
        ("Adagrad", {}, "torch.optim.Adagrad(parameters, lr=0.01, eps=1e-10, weight_decay=0.0)"),
        ("SGD", {"momentum": 0.9}, "momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)"),
    ],
)
def test_optimizers_have_the_defaults_of_deepspeed(kind: str, params: Settings, said: str) -> None:
    _, notes = config_from({"optimizer": {"type": kind, "params": params}})
    note = note_of(notes, "optimizer.type")
    assert said in note
    made = note.split(": ", 1)[1].removesuffix(".")
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert eval(made, {"torch": torch, "infinity": infinity, "parameters": parameters}).param_groups


def test_auto_is_what_trainer_fills_in() -> None:
    settings = {**AUTO, "bf16": {"enabled": "auto"}, "fp16": FP16, "optimizer": ADAM}
    config, notes = config_from(settings, ARGUMENTS)
    assert (config.dtype, config.max_grad_norm) == ("bf16", None)
    made = "torch.optim.AdamW(parameters, lr=2e-05, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1)"
    assert made in note_of(notes, "optimizer.type")
    assert "all parameters are in one group" in note_of(notes, "optimizer.type")
    half = SimpleNamespace(bf16=False, fp16=True)
    config, notes = config_from(settings, half)
    assert (config.dtype, config.max_grad_norm) == ("fp16", 1.0)
    assert "lr=learning_rate, betas=(adam_beta1, adam_beta2)" in note_of(notes, "optimizer.type")
    assert "enabled: give the `arguments`" in refused(settings)
    assert config_from({**settings, **BF16})[0].dtype == "bf16"
    assert config_from(settings, SimpleNamespace(bf16=False, fp16=False))[0].dtype == "fp32"
    wrong = {"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 1, **BF16}
    cure = refused(wrong, ARGUMENTS)
    assert 'gradient_clipping: write "auto", or 1 as in the arguments' in cure
    assert "(per_device_train_batch_size)" in cure
    clips = SimpleNamespace(max_grad_norm=0.5)
    assert "gradient_clipping: write" in refused(BF16, clips)  # DeepSpeed clips at 1, Trainer at 0.5


def test_places_and_directories(tmp_path: Path) -> None:
    drive, other = str(tmp_path / "a"), str(tmp_path / "b")
    state = {"device": "nvme", "nvme_path": drive, "ratio": 0.75}
    zero: Settings = {"stage": 3, "offload_optimizer": state}
    config, notes = config_from({"zero_optimization": zero})
    assert (config.optimizer_state, config.directories) == ({"nvme": 0.75, "device": 0.25}, (drive,))
    assert "Config(gradients='nvme')" in note_of(notes, "zero_optimization.offload_optimizer.device")
    zero["offload_param"] = {"device": "nvme", "nvme_path": other}
    config, notes = config_from({"zero_optimization": zero})
    assert config.directories == (drive, other)
    assert "share is 1e+09 divided by" in note_of(notes, "zero_optimization.offload_param.max_in_cpu")
    del state["nvme_path"]
    assert "nvme_path: name a directory" in refused({"zero_optimization": zero})
    state["nvme_path"] = drive
    _, notes = config_from({"zero_optimization": {"stage": 1, "offload_optimizer": {**state, "ratio": 1}}})
    assert "DeepSpeed keeps it in host memory" in note_of(notes, "zero_optimization.offload_optimizer.device")
    second: Settings = {"stage": 2, "offload_param": {"device": "cpu"}}
    config, notes = config_from({"zero_optimization": second})
    assert config.parameters == "device"
    assert "DeepSpeed ignores this key" in note_of(notes, "zero_optimization.offload_param.device")
    assert config_from({"zero_optimization": True})[0].zero_stage == 1
    assert config_from({})[0].zero_stage == 0


def test_a_file_may_have_comments_and_no_key_twice(tmp_path: Path) -> None:
    file = tmp_path / "annotated.json"
    file.write_text('{\n// why\n"bf16": {"enabled": true,}, # yes\n"name": "a//b,}", /* no */}', "utf-8")
    config, notes = config_from(file)
    assert config.dtype == "bf16"
    assert note_of(notes, "name") == 'name = "a//b,}": left out; DeepSpeed does not know this key either.'
    for text in ('{"bf16": {}, "bf16": {}}', "[1]", "zero_stage: 3", ""):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="cannot read"):
            config_from(os.fspath(file))
    for wrong in (tmp_path / "none.json", None, 3):
        with pytest.raises(ConfigError, match="cannot read"):
            config_from(wrong)  # type: ignore[arg-type]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = run(["plan", "--preset", "10m", "--json", "--device", "cpu", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_plan_reads_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    settings: Settings = {
        **{"bf16": {"enabled": "auto"}, "fp16": FP16, "gradient_clipping": 1.0, "train_batch_size": 32},
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            **{"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu", "pin_memory": True}},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
        "optimizer": {"type": "Lion"},
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
    code, result = plan(capsys, "--deepspeed", str(file), "--ranks", "2")
    assert code == 0
    assert (result["zero_stage"], result["dtype"]) == (3, "bf16")
    assert "parameters" in result["host"]
    elements = result["parameters"] / 2
    assert result["nvme"]["optimizer state"] == pytest.approx(elements * 8, rel=0.05)  # Lion's, with masters
    assert result["per_step"]["tokens"] == 32 * 256
    assert result["notes"] == config_from(settings, SimpleNamespace(bf16=True, fp16=False))[1]
    more = ("--parameters", "device", "--batch", "1", "--optimizer-state", "host", "--dtype", "fp16")
    code, result = plan(capsys, "--deepspeed", str(file), *more)
    assert (code, result["dtype"], result["per_step"]["tokens"]) == (0, "fp16", 2 * 256)
    assert "parameters" in result["device"]
    assert not result["nvme"]
    code, result = plan(capsys, "--deepspeed", str(file), "--ranks", "2", "--fit")
    assert result["settings"]["zero_stage"] == 3
    code, result = plan(capsys, "--deepspeed", str(file), "--ranks", "3")
    assert (code, "contradict each other" in result["error"]["what"]) == (2, True)
    settings["fp16"], settings["bf16"] = {"enabled": True, "loss_scale": 128}, {"enabled": False}
    file.write_text(json.dumps(settings), encoding="utf-8")
    code, result = plan(capsys, "--deepspeed", str(file), "--dtype", "fp16")
    assert (code, 'write "loss_scale": 0' in result["error"]["cure"]) == (2, True)


# ---- schedulers ----

#: β₁ in "cycle".
MOMENTA = [0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8250000000000001]


def adam() -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, (1e-3, 2e-3), strict=True)]
    )


@pytest.mark.parametrize("name", RATES)
def test_rates_are_those_of_deepspeed(name: str) -> None:
    optimizer, found = adam(), []
    scheduler = scheduler_from({"scheduler": RATES[name]["scheduler"]}, optimizer)
    for _ in range(11):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == RATES[name]["rates"]


def test_one_cycle_sets_betas_of_a_wrapped_optimizer_and_goes_on(config: Config, tmp_path: Path) -> None:
    """A state dict of the scheduler is that of a LambdaLR; a run that goes on has the same rates."""
    settings = {"scheduler": RATES["cycle"]["scheduler"]}
    found: list[tuple[float, float]] = []

    def train(steps: int, state: Settings | None) -> Settings:
        model, optimizer = infinity.wrap(*build(), config)
        scheduler = scheduler_from(settings, optimizer)
        if state is not None:
            infinity.load(optimizer, tmp_path / "saved", state=state | {"scheduler": scheduler})
        for step in range(steps):
            group = optimizer.param_groups[0]
            found.append((group["lr"], group["betas"][0]))
            assert group["betas"][1] == 0.99
            model(tokens(step)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        infinity.save(optimizer, tmp_path / "saved", state={"scheduler": scheduler})
        infinity.close(model)
        return {}

    train(3, None)
    train(3, {})
    assert found == list(zip(RATES["cycle"]["rates"][:6], MOMENTA, strict=True))


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (None, "no scheduler"),
        ({"type": "StepLR", "params": {"step_size": 3}}, "create a scheduler of torch"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "warmup_steps"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "a number of at least 1"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, '"log" or "linear"'),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3] * 3}}, "2 values, one for each param group"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, "Trainer's `arguments`"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "high"}}, "a number of at least 0"),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, "give `steps`"),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 1}}, "scheduler.params.cycle_min_lr"),
    ],
)
def test_a_scheduler_that_cannot_be_made(scheduler: Settings | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scheduler_from({} if scheduler is None else {"scheduler": scheduler}, adam())
    assert said in str(caught.value)


# ---- the example ----

ROOT = Path(__file__).parents[1]
#: The loss of each step with DeepSpeed 0.19.8: the script before, as the page has it.
BEFORE = [
    *(1.0942, 0.9976, 0.9964, 0.9040, 1.0692, 0.9018, 0.9661, 0.9480, 0.8561, 0.8204),
    *(0.8178, 0.8056, 0.7918, 0.7340, 0.7687, 0.7583, 0.8034, 0.7256, 0.7570, 0.7028),
]


@pytest.mark.processes
def test_the_example_has_the_losses_of_deepspeed_and_goes_on(tmp_path: Path) -> None:
    script = ROOT / "examples/deepspeed/train.py"
    page = (ROOT / "docs/deepspeed.md").read_text(encoding="utf-8")
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    code = script.read_text(encoding="utf-8")
    assert [line[1:] for line in diff if not line.startswith("-")] == code.splitlines()
    compile("\n".join(line[1:] for line in diff if not line.startswith("+")), "before", "exec")
    run = f"import os, runpy, sys\nos.chdir(sys.argv[1])\nrunpy.run_path({str(script)!r})"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    first, second = (
        all_well(run_ranks(1, run, str(tmp_path), seconds=120, environment=environment))[0] for _ in range(2)
    )
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.+)$", first, flags=re.M)]
    assert losses == pytest.approx(BEFORE, abs=1e-3)
    assert 'optimizer.type = "AdamW": torch.optim.AdamW(parameters, lr=0.003,' in first
    assert (tmp_path / "checkpoints/step-20").is_dir()
    assert not re.search(r"^step \d+:", second, flags=re.M), "a second run goes on: nothing is left to do"
