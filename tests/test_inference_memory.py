"""A model that is only used stays within its budgets, whatever its size: also while it is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infinity.api.hugging_face import without_values

from .ranks import all_well, run_ranks

transformers = pytest.importorskip("transformers")
MIB = 1 << 20

#: Uses such a model in both dtypes, and prints what each took in anonymous memory from before it was made.
RUN = """
import json, os, sys
import torch
torch.set_num_threads(1)
import infinity, transformers
from tests.measured import Peak
from infinity.api.engine import engine_of

model = sys.argv[1]
small = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
)).eval()
ids = torch.arange(8)[None]
small.generate(ids, max_new_tokens=2, do_sample=False)
found = {}
for dtype, two_units in (("bf16", "11MiB"), ("fp32", "21MiB")):
    config = infinity.Config(
        nvme=os.path.dirname(model), device="cpu", dtype=dtype, device_memory=two_units, host_memory="8MiB",
        parameters="nvme", chunk_elements=262144, threads=1,
    )
    with Peak(interval=0.002) as peak:
        used = infinity.inference(model, config)
        used.generate(ids, max_new_tokens=2, do_sample=False)
        copied = sum(s.arena_nbytes for s in engine_of(used).store.stats())
        nbytes = sum(p.nbytes for p in used.parameters())
    infinity.close(used)
    del used
    found[dtype] = {"peak": peak.nbytes, "nbytes": nbytes, "copied": copied}
print(json.dumps(found))
"""


@pytest.mark.integration
@pytest.mark.processes
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """In bf16 parameters are read in place, in fp32 from a copy."""
    folder = tmp_path / "model"
    config = transformers.LlamaConfig(
        **{"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 48},
        **{"num_attention_heads": 8, "tie_word_embeddings": True, "max_position_embeddings": 64},
    )
    with without_values():
        model = transformers.LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    values = {name: (torch.randn(p.shape) / 50).bfloat16() for name, p in model.named_parameters()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    del values
    [said] = all_well(run_ranks(1, RUN, str(folder), seconds=250))
    found = json.loads(said.splitlines()[-1])
    for dtype, took in found.items():
        assert (took["copied"] > 0) == (dtype == "fp32")
        assert took["peak"] < (21 + 8 + 16) * MIB < took["nbytes"] / 5, found
