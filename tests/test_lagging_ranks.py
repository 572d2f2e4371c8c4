"""Ranks on a device that is late (tests/lagging), over the double of NCCL: streams, waits and lost ranks.

Their bits are compared in test_rank_seeds.py and test_ranks.py, with `--device lagging`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .ranks import all_well, run_ranks

#: A training of a few layers, each a unit; `model`, `adam`, `here` and `one_step` are what follows uses.
_LAYERS = """
import contextlib, json, os, signal, sys, time
import torch, infinity
from torch import nn
from infinity.core.errors import RankError
from tests.lagging.nccl import Group, lagging_ranks

rank, config = int(os.environ["RANK"]), json.loads(sys.argv[1])

class Layer(nn.Linear):
    pass

def made():
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(24, 24) for _ in range(4)))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return infinity.wrap(model, adam, infinity.Config(**config))

def one_step(model, adam):
    for _ in range(2):
        loss = model(torch.randn(4, 24).to("lagging:0")).square().mean()
        loss.backward()
    adam.step()
    adam.zero_grad()
    return loss.item()
"""


def layers(tmp_path: Path, stage: int, **more: Any) -> str:
    """Return the settings of `_LAYERS`."""
    config = {"device": "cpu", "dtype": "bf16", "nvme": str(tmp_path), "zero_stage": stage, "threads": 1}
    config |= {"device_memory": "64MiB", "host_memory": "64MiB", "units": ["Layer"], **more}
    return json.dumps(config | {"parameters": "host" if stage == 3 else "device", "optimizer_state": "host"})


_COUNTED = """
with lagging_ranks() as here:
    model, adam = made()
    for _ in range(3):
        before = here.counts.copy()
        one_step(model, adam)
    print(json.dumps({name: n for name, n in (here.counts - before).items() if "collectives" in name}))
    infinity.close(adam)
"""


@pytest.mark.integration
@pytest.mark.parametrize("stage", [3, 1])
def test_who_makes_a_collective_does_not_wait_for_its_end(stage: int, tmp_path: Path) -> None:
    """The table "Who waits for a CUDA device" of docs/architecture.md."""
    for out in all_well(run_ranks(2, _LAYERS + _COUNTED, layers(tmp_path, stage), seconds=120, device="cpu")):
        counts = json.loads(out)
        made = counts.pop("collectives")
        assert made >= 4
        assert set(counts) == {"collectives waited for: infinity-looks"}
        assert abs(sum(counts.values()) - made) <= 1  # the last one's end is seen in the next step


#: Rank 1 agrees to a collective and does not make it: what rank 0 has enqueued never ends by itself.
_LOST = """
which, fault, where = sys.argv[2:]
armed, put = False, getattr(Group, which)

def lost(*arguments):
    if armed and fault == "raise":
        raise RuntimeError("mine")
    if armed:
        os.kill(os.getpid(), getattr(signal, fault))
    return put(*arguments)

setattr(Group, which, lost if rank == 1 else put)
with lagging_ranks() as here:
    model, adam = made()
    one_step(model, adam)
    armed = True
    begun = time.monotonic()
    try:
        with infinity.gathered(model) if where == "gathered" else contextlib.nullcontext():
            assert where != "gathered", "shown"
        one_step(model, adam)
        one_step(model, adam)
    except RankError as error:
        print(json.dumps([str(error), time.monotonic() - begun]))
        infinity.close(adam)
        print(json.dumps(time.monotonic() - begun))
"""


@pytest.mark.first
@pytest.mark.parametrize(
    ("which", "where", "fault"),
    [
        ("_allgather_base", "a step", "SIGKILL"),
        ("_allgather_base", "gathered", "SIGSTOP"),
        ("alltoall_base", "a step", "raise"),
    ],
)
def test_a_rank_that_is_lost_in_a_collective_of_nccl(
    which: str, where: str, fault: str, tmp_path: Path
) -> None:
    """The others wait for the device, which waits for that rank, and are told in time all the same."""
    config = layers(tmp_path, 3, rank_timeout=4.0)
    (code, out, err), _ = run_ranks(2, _LAYERS + _LOST, config, which, fault, where, device="cpu")
    assert code == 0, err
    (text, late), closed = map(json.loads, out.splitlines())
    assert "rank 1" in text
    if fault == "raise":
        assert "mine" in text
    assert late <= closed < {"SIGKILL": 10, "SIGSTOP": 4 + 10, "raise": 10}[fault]
