"""Ranks on a device that is late (tests/lagging), over the double of NCCL, against plain torch, bit for bit:
also the mean of their gradients, which is not NCCL's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .quick import quick
from .ranks import all_well, run_ranks

#: Attention without a kernel of the CPU's own, which the device has not.
SCRIPT = """
from torch.nn.attention import SDPBackend, sdpa_kernel
from tests.lagging.nccl import lagging_ranks
from tests.rank_training import main
with lagging_ranks(), sdpa_kernel(SDPBackend.MATH):
    main()
"""
#: What is done to one parameter, or two, behind each step of two backwards; all others stay as they are.
PROGRAM: list[dict[str, Any]] = [
    {"turns": 2, "edits": {"blocks.0.norm1.weight": 0.5}, "source": 1},
    {"turns": 2, "loads": {"blocks.1.norm2.bias": -1.0, "head.weight": 0.75}},
    {"turns": 2, "masters": {"norm.weight": 0.75}},
    {"turns": 2, "shape": "together", "between": ["evaluate"]},
]
PLACES: dict[str, dict[str, Any]] = {
    "state on host": {"parameters": "device", "optimizer_state": "host"},
    "state on nvme": {"parameters": "device", "optimizer_state": "nvme"},
    "split": {
        "parameters": {"device": 0.5, "host": 0.2, "nvme": 0.3},
        "optimizer_state": {"device": 0.3, "host": 0.3, "nvme": 0.4},
    },
}
CASES = [
    (place, stage, dtype)
    for place in PLACES
    for stage in range(4)
    for dtype in ("bf16", "fp32")
    if stage == 3 or place != "split"  # below that, parameters are on the device
]
QUICK = [("state on host", 1, "bf16"), ("state on host", 3, "bf16")]
HOST = [case for case in CASES if case[0] == "state on host" or (case[1], case[2]) == (3, "bf16")]


@pytest.mark.parametrize(("place", "stage", "dtype"), quick(CASES, QUICK, HOST))
def test_what_is_done_to_one_parameter_leaves_the_others(
    place: str, stage: int, dtype: str, tmp_path: Path
) -> None:
    config = {"device": "cpu", "dtype": dtype, "nvme": str(tmp_path), "zero_stage": stage, "threads": 1}
    config |= {"device_memory": "64MiB", "host_memory": "512MiB", **PLACES[place]}
    given = {"model": "gpt", "program": PROGRAM, "config": config}
    results = run_ranks(2, SCRIPT, json.dumps(given), seconds=240, device="cpu")
    assert all_well(results) == ["same\n"] * 2


_ADDED = """
import contextlib, json, sys
import torch, infinity
from torch import nn
from tests.lagging.nccl import lagging_ranks

def trained(beside):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, adam = infinity.wrap(model, adam, infinity.Config(**json.loads(sys.argv[1])))
    own = torch.cuda.Stream() if beside else torch.cuda.current_stream()
    for number in range(3):
        model(torch.randn(4, 24).to("lagging:0")).square().mean().backward()
        for p in model.parameters():
            half = torch.full(p.shape, 0.5).to("lagging:0")
            p.grad.add_(half)
            own.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(own):
                p.grad.add_(half * number)
            torch.cuda.current_stream().wait_stream(own)
        adam.step()
        adam.zero_grad()
    values = [v.detach().cpu().clone() for v in model.state_dict().values()]
    infinity.close(adam)
    return values

with lagging_ranks():
    assert all(map(torch.equal, trained(True), trained(False)))
"""


@pytest.mark.parametrize("stage", quick([1, 2, 3], [2]))
def test_gradients_are_added_to_on_another_stream(stage: int, tmp_path: Path) -> None:
    config = {"device": "cpu", "dtype": "fp32", "nvme": str(tmp_path), "zero_stage": stage, "threads": 1}
    config |= {"device_memory": "64MiB", "host_memory": "64MiB", "parameters": "device"}
    config |= {"optimizer_state": "host"}
    all_well(run_ranks(2, _ADDED, json.dumps(config), seconds=120, device="cpu"))
