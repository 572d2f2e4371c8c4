"""`CudaDevice` on a device that is late (tests/lagging): the CPU's bits, and nothing that no wait orders."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

import pytest

from .command_line import python
from .lagging.run import CASES

pytestmark = pytest.mark.processes

#: Each tier for each kind of state, an update mode each, and what else goes a way of its own.
FEW = ["device-host-nvme", "nvme-device-host", "delayed-nvme", "activations", "streams-host", "routes-host"]
FEW += ["two_threads-device", "left_open-nvme", "reentrant", "captured-host", "second-device", "device-fp32"]
FEW += ["interleaved-activations", "streams-delayed-device", "behind_steps-delayed"]
FEW += ["within-device", "held-host", "beside-activations", "looks-gradients", "chunks-split"]
FEW += ["backward-device-device-device", "backward-host-nvme-nvme", "backward-reentrant"]
NIGHT = [("eager", 0), *(("random", seed) for seed in range(2, 8))]
#: What is counted, and the threads that may wait for the device at all.
COUNTED = ["device-host-host", "host-host-device", "chunks-device", "chunks-host"]
#: How often a step reads compute parameters that are placed on the device.
READS = {"device-host-host": 0, "delayed-device": 0}
READS["halves-device-host-host"] = 1  # an update on the CPU begins with the upper halves


def run(*arguments: str, what: str = "run", seconds: float = 280) -> tuple[int, str]:
    """Run cases in a process of their own: torch learns of the device before its first backward. Return its
    exit code and what it said."""
    script = f"import sys\nfrom tests.lagging.{what} import main\nsys.exit(main())"
    done = python("-c", script, *arguments, timeout=seconds, cold=True)
    return done.returncode, done.stdout + done.stderr[-4000:]


@pytest.mark.integration
@pytest.mark.first
@pytest.mark.parametrize(
    ("schedule", "seed", "cases"),
    [
        *(("late", 0, FEW[n::3]) for n in range(3)),
        ("random", 1, FEW),
        *(pytest.param(*each, list(CASES), marks=pytest.mark.nightly) for each in NIGHT),
    ],
    ids=lambda value: f"{len(value)} cases" if isinstance(value, list) else str(value),
)
def test_a_late_device_changes_no_bit_and_nothing_is_unordered(
    schedule: str, seed: int, cases: list[str]
) -> None:
    code, said = run("--schedule", schedule, "--seed", str(seed), *cases)
    assert code == 0, said
    assert said.count(": same") == len(cases)


@functools.cache
def counts() -> dict[str, Any]:
    """What each case counts, all in one process."""
    code, said = run(*dict.fromkeys([*COUNTED, *READS, "device-device-device"]), what="counts")
    assert code == 0, said
    return dict(json.loads(line) for line in said.splitlines() if line.startswith("["))


@pytest.mark.integration
@pytest.mark.parametrize("case", COUNTED)
def test_nothing_waits_for_the_device_where_it_need_not(case: str) -> None:
    """The table "Who waits for a CUDA device" of docs/architecture.md."""
    found = counts()[case]
    forward, backward, step = (Counter(found[phase]) for phase in ("forward", "backward", "step"))
    chunks, params = found["chunks"], found["parameters"]
    units, where = found["units"], CASES[case]
    parameters, state, gradients = (where[k] for k in ("parameters", "optimizer_state", "gradients"))
    worker, update = "host waits: infinity-gradients", "host waits: infinity-update"
    assert not [name for name in forward if name.startswith("host waits")]
    assert {name for name in backward if name.startswith("host waits")} <= {worker}
    assert {name for name in step if name.startswith("host waits")} <= {update, worker}
    assert backward[worker] == (0 if gradients == "device" else chunks)
    assert step[worker] == (gradients == "device")  # for the squares of all chunks
    assert step[update] <= (chunks if "device" in (state, gradients) else 0)
    assert step["copies that block"] <= (gradients == "device")  # the squares of all gradients
    # Autograd's, and one for each parameter and chunk: what the device keeps is copied to its place, too.
    assert backward["launches"] <= 5 * params
    if gradients == "device":
        assert step["launches"] <= 3 * chunks + 60  # the squares of all chunks are summed at once
        return
    assert backward["copies"] == chunks
    assert backward["stream waits"] <= 4 * units
    assert backward["events"] <= 2 * units + chunks
    assert step["events"] <= chunks + (1 if parameters == "device" else 2 * units)
    assert step["launches"] <= (4 * params + 14 * chunks if parameters == "device" else 2 * chunks)
    assert found["registrations after wrap"] == 0


@pytest.mark.parametrize("case", READS)
def test_a_step_reads_no_parameters_on_the_device(case: str) -> None:
    found = counts()[case]
    step, nbytes = Counter(found["step"]), found["bytes"]
    assert step["bytes read"] == nbytes * READS[case]
    assert not step["host waits: MainThread"]
    assert not step["copies that block"]
    assert step["launches"] <= 20 * found["units"]


def test_clipping_gradients_waits_for_the_device_where_it_must() -> None:
    """torch's clip_grad_norm_ asks for each norm, and multiplies each gradient by a number on the device."""
    found = counts()["device-device-device"]
    for phase, waits in (("clip", found["parameters"]), ("foreach", 1)):
        assert Counter(found[phase])["host waits: MainThread"] <= waits
        assert Counter(found[phase])["copies that block"] <= 1  # the squares of gradients


NIGHTLY = pytest.mark.nightly


@pytest.mark.integration
@pytest.mark.parametrize(
    ("case", "which"),
    [
        ("host-host-host", "0::24"),
        pytest.param("device-host-host", "0::5", marks=NIGHTLY),
        pytest.param("activations", "0::5", marks=NIGHTLY),
    ],
)
def test_memory_of_the_device_runs_out_anywhere_and_the_batch_is_tried_again(case: str, which: str) -> None:
    code, said = run(case, which, what="faults", seconds=1200)
    assert code == 0, said
    assert "'OutOfMemoryError'" in said


@pytest.mark.integration
def test_a_driver_that_refuses_to_pin_leaves_nothing_behind() -> None:
    """Nothing registered, no error for the next launch; and the same model can be wrapped again."""
    code, said = run("nvme-host-host", "--registrations", what="faults")
    assert code == 0, said
    assert "'ConfigError'" in said
