"""Saving, loading and exporting stay within what the run has, whatever the model's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .command_line import python

MIB = 1 << 20

#: Saves, loads and exports a model of so many layers; prints what each took in memory beyond the run.
RUN = """
import json, sys
import torch
torch.set_num_threads(1)
from torch import nn
import infinity
from tests.measured import Peak

folder, layers = sys.argv[1], int(sys.argv[2])
config = infinity.Config(
    nvme=folder, device="cpu", dtype="bf16", device_memory="24MiB", host_memory="24MiB",
    parameters="nvme", optimizer_state="nvme", gradients="nvme", chunk_elements=262144, threads=1,
)
with infinity.init(config):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))
numel = sum(p.numel() for p in model.parameters())
model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
model(torch.randn(2, 1024)).square().mean().backward()
adam.step()
adam.zero_grad()
infinity.save(adam, folder + "/warm")
found = {"numel": numel}
with Peak(interval=0.002) as peak:
    infinity.save(adam, folder + "/saved")
    found["save"] = peak.nbytes
with Peak(interval=0.002) as peak:
    infinity.load(adam, folder + "/saved")
    found["load"] = peak.nbytes
for wanted in ("fp32", "fp16"):
    with Peak(interval=0.002) as peak:
        infinity.export(model, f"{folder}/{wanted}", wanted, max_shard_size="16MiB")
        found[f"export {wanted}"] = peak.nbytes
infinity.close(adam)
with Peak(interval=0.002) as peak:
    infinity.export(folder + "/saved", folder + "/checkpoint", "bf16")
    found["checkpoint"] = peak.nbytes
print(json.dumps(found))
"""


def measure(folder: Path, layers: int) -> dict[str, Any]:
    folder.mkdir()
    done = python("-c", RUN, str(folder), str(layers), timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.integration
def test_memory_of_saves_loads_and_exports_does_not_grow_with_the_model(tmp_path: Path) -> None:
    # The smaller one already fills what is on its way at once, of which it is the drive's affair how much is
    # there when somebody looks: one transfer more or less is no growth.
    found = [measure(tmp_path / str(layers), layers) for layers in (16, 64)]
    for name in found[0].keys() - {"numel"}:
        assert all(f[name] <= (16 if "checkpoint" in name else 4) * MIB for f in found), (name, found)
        grown = found[-1][name] - found[0][name] - 4 * MIB
        assert grown / (found[-1]["numel"] - found[0]["numel"]) < 0.1, (name, found)
