"""The scripts of examples/, as they stand, on a tiny model. Each is started twice with the same arguments:
the second start has nothing left to train, and ends well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infinity.storage.checkpoints import find

from .ranks import all_well, run_ranks
from .test_ecosystem import llama, need, tokenizer, words

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[1] / "examples"
IMPORTS = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama", "peft")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in (llama(), tokenizer()):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "nvme").mkdir()
    (tmp_path / "text").write_text("\n".join(words(i, 12) for i in range(40)), encoding="utf-8")
    return tmp_path


def run(name: str, folder: Path, *options: str, ranks: int = 1) -> str:
    """Run an example on CPUs; return what its first rank has printed."""
    for library in ("accelerate", "peft"):
        need(library)
    given = ["--model", str(folder / "model"), "--nvme", str(folder / "nvme")]
    if name != "pipeline":
        given += ["--text", str(folder / "text"), "--output", str(folder / "out")]
    script = f"import runpy, torch\ntorch.set_num_threads(1)\nrunpy.run_path({str(EXAMPLES / name)!r}+'.py')"
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "CI": "1"}
    environment["TORCHELASTIC_RUN_ID"] = "none"  # by which Lightning knows torchrun
    results = run_ranks(
        ranks, script, *given, *options, seconds=120, environment=environment, imports=IMPORTS
    )
    said = all_well(results)[0]
    return said


def run_twice(name: str, folder: Path, *options: str, ranks: int = 1) -> str:
    """Run an example as a restart loop does; return what the first start has printed."""
    said = run(name, folder, *options, ranks=ranks)
    assert "loss" not in run(name, folder, *options, ranks=ranks)
    return said


def test_every_example_is_short_and_tested() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    tested = {"accelerate_loop", "loop", "pipeline", "ranks", "sft_lora", "trainer"}
    tested |= {"adapters", "diffusion", "dpo", "gradients", "grpo", "lightning_loop"}
    tested |= {"train_lm", "generate"}  # by test_train_lm.py
    assert {path.stem for path in files} == tested  # and deepspeed/train.py by test_deepspeed.py
    lines = {path.stem: path.read_text(encoding="utf-8").count("\n") for path in files}
    assert lines.pop("train_lm") <= 160
    assert max(lines.values()) <= 80


def test_a_loop_goes_on_and_its_model_writes(folder: Path) -> None:
    first = run("loop", folder, "--steps", "2", "--length", "16")
    rest = run_twice("loop", folder, "--steps", "4", "--length", "16")
    assert [line.split(":")[0] for line in (first + rest).splitlines()] == [f"step {n}" for n in range(4)]
    assert find(str(folder / "out" / "checkpoints")).content["counts"]["steps"] == 4
    assert_trained(folder, "model-4")
    made = run("pipeline", folder, "w1 w2", "w3", "--tokens", "3")
    assert [line[:2] for line in made.splitlines()] == ["w1", "w3"]


def test_a_loop_of_two_ranks(folder: Path) -> None:
    run_twice("ranks", folder, "--steps", "2", "--length", "16", ranks=2)
    assert find(str(folder / "out" / "checkpoints")).content["counts"]["steps"] == 2
    assert_trained(folder, "model-2")


def test_trainer(folder: Path) -> None:
    run("trainer", folder, "--steps", "20", ranks=2)
    assert "'epoch'" in run_twice("trainer", folder, "--steps", "40", ranks=2)
    names = {path.name for path in (folder / "out").glob("checkpoint-*")}
    assert names == {"checkpoint-20", "checkpoint-40"}
    assert_trained(folder, "model")


def test_sft_with_lora(folder: Path) -> None:
    need("trl")
    run_twice("sft_lora", folder, "--steps", "2")
    assert (folder / "out" / "checkpoint-2" / "infinity").is_dir()
    adapters = load_file(folder / "out" / "adapters" / "adapter_model.safetensors")
    assert any(value.any() for name, value in adapters.items() if "lora_B" in name)
    assert_trained(folder, "merged-2")


def test_accelerate(folder: Path) -> None:
    assert run_twice("accelerate_loop", folder, ranks=2).startswith("epoch 0: loss ")
    assert find(str(folder / "out" / "checkpoints")).content["counts"]["steps"] == 5
    assert_trained(folder, "model-1")


def test_dpo_with_a_reference_for_inference(folder: Path) -> None:
    said = run_twice("dpo", folder, "--steps", "2").splitlines()
    assert said[0].startswith("step 0: loss 0.6931, margin ")  # both models are the same yet: ln 2
    assert_trained(folder, "model-2")


def test_two_adapters_and_layers_that_are_unfrozen(folder: Path) -> None:
    said = run_twice("adapters", folder, "--steps", "4").splitlines()
    assert [line.partition(":")[0] for line in said] == [
        f"{a} {n}" for a in ("first", "second") for n in range(4)
    ]
    assert [line[-4] for line in said] == ["1", "1", "0", "0"] * 2
    values = []
    for name in ("first", "second"):
        values.append(load_file(folder / "out" / "adapters-4" / name / "adapter_model.safetensors"))
        assert all(value.any() for key, value in values[-1].items() if "lora_B" in key)
    assert any(not torch.equal(value, values[1][key]) for key, value in values[0].items())


#: Makes a tiny UNet and its data, and trains. diffusers lies where other tests do not see it.
DIFFUSION = """
import runpy, sys
from pathlib import Path
import torch
sys.path.append(str(Path(sys.prefix, "architectures")))
sys.modules["torchvision"] = None  # it is of another torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
torch.set_num_threads(1)
torch.manual_seed(0)
folder = Path(sys.argv.pop(1))
sizes = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
sizes |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 16}
sizes |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4}
UNet2DConditionModel(**sizes).save_pretrained(folder / "unet")
save_file({"latents": torch.randn(4, 4, 16, 16), "embeddings": torch.randn(4, 6, 16)}, folder / "data")
runpy.run_path(sys.argv.pop(1))
"""


def test_diffusion_with_lora_and_an_average(tmp_path: Path) -> None:
    if not Path(sys.prefix, "architectures").is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs diffusers: make test-all")
    (tmp_path / "nvme").mkdir()
    given = ["--model", str(tmp_path / "unet"), "--latents", str(tmp_path / "data"), "--steps", "3"]
    given += ["--nvme", str(tmp_path / "nvme"), "--output", str(tmp_path / "out")]
    script = [sys.executable, "-c", DIFFUSION, str(tmp_path), str(EXAMPLES / "diffusion.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for steps in (range(3), range(0)):
        done = subprocess.run(
            [*script, *given], env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [f"step {n}" for n in steps]
    last, average = (
        load_file(next((tmp_path / "out" / name).glob("*.safetensors"))) for name in ("last", "average")
    )
    assert last.keys() == average.keys()
    assert any(not torch.equal(value, average[key]) for key, value in last.items())


def test_grpo(folder: Path) -> None:
    need("trl")
    run_twice("grpo", folder, "--steps", "2", "--length", "8")
    assert (folder / "out" / "checkpoint-2" / "infinity").is_dir()
    assert_trained(folder, "model")


def test_norms_of_gradients_and_a_step_that_is_skipped(folder: Path) -> None:
    said = run_twice("gradients", folder, "--steps", "4", "--every", "2", "--spoil", "1").splitlines()
    assert [line.split(":")[0] for line in said if ": loss" in line] == [f"step {n}" for n in range(4)]
    assert re.match(r"step 1 is skipped: \d+ gradients are not finite", said[1])
    assert not any("nan" in line for line in said if line.startswith(("step 2", "step 3")))
    logged = [json.loads(line) for line in (folder / "out" / "gradients.jsonl").read_text().splitlines()]
    assert [each["step"] for each in logged] == [0, 2]
    assert all(norm > 0 for each in logged for norm in each["norms"].values())


def test_lightning(folder: Path) -> None:
    need("lightning")
    run("lightning_loop", folder, "--steps", "2", ranks=2)
    run_twice("lightning_loop", folder, "--steps", "4")
    assert_trained(folder, "model-4")


def assert_trained(folder: Path, name: str) -> None:
    """A model that `from_pretrained` reads, with other values than before."""
    saved = need("transformers").AutoModelForCausalLM.from_pretrained(folder / "out" / name)
    before = dict(llama().named_parameters())
    assert any(not torch.equal(p.float(), before[n].to(p.dtype).float()) for n, p in saved.named_parameters())
