"""Ranks that are killed, stopped or cut off in the middle of a training; and ranks on two hosts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from .hosts import BETWEEN, two_hosts
from .ranks import all_well, run_ranks
from .test_ranks import HEAD, settings_of

pytestmark = [pytest.mark.processes, pytest.mark.root]

#: on which host this rank is, and its own directory; `given`: what the test says
ON_A_HOST = """
import json, os, signal, subprocess, sys, threading, time
from tests.hosts import enter
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
given = json.loads(sys.argv[1])
if given["hosts"]:
    host = rank * len(given["hosts"]) // world
    enter(given["hosts"][host])
    local = world // len(given["hosts"])
    os.environ |= {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
    given["config"]["nvme"] += f"/host{host}"
sys.argv[1] = json.dumps(given)
"""

#: trains until the fault has ended it, and says by what and how long after
UNDER_A_FAULT = """
model, adam = infinity.wrap(model, adam, config)

def fault():
    with open(given["when"], "w") as file:
        file.write(str(time.monotonic()))
    if given["fault"] == "link":
        subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
    else:
        os.kill(os.getpid(), getattr(signal, given["fault"]))

if rank == given["victim"]:
    threading.Timer(given["after"], fault).start()
try:
    for number in range(100_000):
        model(torch.full((2, 8), rank + 1.0 + number % 3)).square().mean().backward()
        adam.step()
        adam.zero_grad()
        if given["steps"] == number + 1:
            break
except infinity.InfinityError as error:
    late = time.monotonic() - float(open(given["when"]).read())
    print(json.dumps([type(error).__name__, str(error), late]), flush=True)
    raise
print(json.dumps([v.double().sum().item().hex() for v in model.state_dict().values()]))
"""


@pytest.mark.parametrize(
    "seed",
    [*(pytest.param(s, marks=pytest.mark.integration) for s in range(3))]
    + [pytest.param(s, marks=pytest.mark.nightly) for s in range(3, 18)],
)
def test_a_rank_that_is_lost_in_a_training(seed: int, tmp_path: Path) -> None:
    """The others end in time, with an error that says which one; nothing is in the way of the next start."""
    chance = random.Random(seed)
    fault = ("SIGKILL", "SIGSTOP", "link")[seed % 3]
    world = 2 if fault == "link" else chance.choice([2, 2, 3])
    stage = chance.randrange(4)
    place = chance.choice(["nvme", "split"] if stage == 3 else ["device", "state on nvme"])
    update = chance.choice(["sync", "overlap"])
    config = settings_of(tmp_path, place, "fp32", zero_stage=stage, update=update)
    config |= {"rank_timeout": 4.0} | ({} if stage > 1 else {"gradients": None})
    for host in range(2):
        (tmp_path / f"host{host}").mkdir()
    given: dict[str, Any] = {"config": config, "when": str(tmp_path / "when"), "hosts": [], "steps": 0}
    given |= {"fault": fault, "victim": chance.randrange(world), "after": chance.uniform(0.3, 2.0)}

    def run(**more: Any) -> list[tuple[int, str, str]]:
        script = ON_A_HOST + 'sys.argv[1] = json.dumps(given["config"])' + HEAD + UNDER_A_FAULT
        return run_ranks(
            world, script, json.dumps(given | more), environment=BETWEEN if given["hosts"] else {}
        )

    def check(rank: int, result: tuple[int, str, str]) -> None:
        code, out, err = result
        assert code == 1, (code, out, err)
        assert "terminate" not in err
        kind, text, late = json.loads(out)
        assert kind == "RankError", err
        lost = [1 - rank] if fault == "link" else [given["victim"]]
        # One that is a collective behind, for it waits for the lost one, is named beside it.
        assert any(re.search(rf"ranks? (\d, )*{r}\b", text) for r in lost), text
        assert late < {"SIGKILL": 10, "SIGSTOP": 3 * 4 + 10, "link": 10 + 5}[fault]  # 3: in the first step

    if fault == "link":
        with two_hosts() as given["hosts"]:
            results = run()
            for rank, result in enumerate(results):
                check(rank, result)
        given["hosts"] = []
    else:
        for rank, result in enumerate(run()):
            if rank != given["victim"]:
                check(rank, result)
    again = run(steps=3, victim=-1)
    (fresh := tmp_path / "fresh").mkdir()
    undisturbed = run(steps=3, victim=-1, config=config | {"nvme": str(fresh)})
    assert all_well(again) == all_well(undisturbed)


@pytest.mark.integration
def test_two_hosts_train_as_one(tmp_path: Path) -> None:
    """Four ranks, two on each host, each with drives of its own: the bits of plain torch."""
    script = ON_A_HOST + "from tests.rank_training import main; main()"
    given: dict[str, Any] = {"model": "gpt", "steps": 4, "accumulate": 2, "clip": 0.5}
    for host in range(2):
        (tmp_path / f"host{host}").mkdir()
    with two_hosts() as names:
        given |= {"hosts": names, "config": settings_of(tmp_path, "nvme", "bf16")}
        results = run_ranks(4, script, json.dumps(given), seconds=120, environment=BETWEEN)
    assert all_well(results) == ["same\n"] * 4
