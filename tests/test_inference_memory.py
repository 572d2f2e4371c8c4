"""A model that is only used stays within its budgets, whatever its size: also while it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .command_line import python

pytest.importorskip("transformers")

MIB = 1 << 20

#: Makes directories with models of so many layers, without ever having one whole; a process of its own.
MAKE = """
import json, os, sys
import torch
from safetensors.torch import save_file
from infinity.api.hugging_face import without_values
import transformers

for layers in map(int, sys.argv[2:]):
    folder = os.path.join(sys.argv[1], str(layers))
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=8, tie_word_embeddings=True, max_position_embeddings=64,
    )
    with without_values():
        model = transformers.LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    of, shard = {}, {}
    for number, (name, param) in enumerate(model.named_parameters()):
        shard[name] = (torch.randn(param.shape) / 50).bfloat16()
        of[name] = f"model-{number // 9}.safetensors"
        if number % 9 == 8:
            save_file(shard, os.path.join(folder, of[name]))
            shard = {}
    if shard:
        save_file(shard, os.path.join(folder, of[name]))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"weight_map": of}, file)
"""

#: Uses such a model, and prints what it took in anonymous memory from before it was made.
RUN = """
import json, sys
import torch
torch.set_num_threads(1)
import infinity, transformers
from tests.measured import Peak
from infinity.api.engine import engine_of

folder, model, dtype, two_units = sys.argv[1:]
config = infinity.Config(
    nvme=folder, device="cpu", dtype=dtype, device_memory=two_units, host_memory="8MiB", parameters="nvme",
    chunk_elements=262144, threads=1,
)
small = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
)).eval()
ids = torch.arange(8)[None]
small.generate(ids, max_new_tokens=2, do_sample=False)
with Peak(interval=0.002) as peak:
    used = infinity.inference(model, config)
    used.generate(ids, max_new_tokens=3, do_sample=False)
    copied = sum(s.arena_nbytes for s in engine_of(used).store.stats())
    numel = sum(p.numel() for p in used.parameters())
infinity.close(used)
print(json.dumps({"peak": peak.nbytes, "numel": numel, "copied": copied}))
"""


def run(code: str, *arguments: str) -> str:
    done = python("-c", code, *arguments, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1] if done.stdout else ""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    run(MAKE, str(folder), "8", "32")
    return [folder / "8", folder / "32"]


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.integration)])
def test_memory_does_not_grow_with_the_model(dtype: str, directories: list[Path], tmp_path: Path) -> None:
    """In bf16 parameters are read in place, in fp32 from a copy."""
    found: list[dict[str, Any]] = []
    two_units = "11MiB" if dtype == "bf16" else "21MiB"
    for model in directories:
        (tmp_path / model.name).mkdir()
        found.append(json.loads(run(RUN, str(tmp_path / model.name), str(model), dtype, two_units)))
    assert [f["copied"] > 0 for f in found] == [dtype == "fp32"] * 2
    slope = (found[-1]["peak"] - found[0]["peak"]) / (found[-1]["numel"] - found[0]["numel"])
    assert slope < 0.1, found
    assert found[-1]["peak"] < (21 + 8 + 16) * MIB, found
