"""`CudaDevice` on a device that is late (tests/lagging): the CPU's bits, and nothing that no wait orders."""

from __future__ import annotations

import json
import subprocess
from collections import Counter

import pytest

from .command_line import python
from .lagging.run import CASES
from .quick import quick

ALL = list(CASES)
#: Each tier for each kind of state, an update mode each, and what else goes a way of its own.
FEW = ["device-host-nvme", "nvme-device-host", "delayed-nvme", "activations", "streams-host", "routes-host"]
FEW += ["two_threads-device", "left_open-nvme", "reentrant", "captured-host", "second-device", "device-fp32"]
FEW += ["interleaved-activations", "streams-delayed-device", "behind_steps-delayed"]
FEW += ["within-device", "held-host", "beside-activations", "looks-gradients", "chunks-split"]
FEW += ["backward-device-device-device", "backward-host-nvme-nvme", "backward-reentrant"]
#: `make test` runs some of these late, and `make test-nightly` the rest.
PARTS = [("late", 0, FEW[n::3]) for n in range(3)]
#: Each schedule of random order has some of these.
SEEDS = [(n, FEW[n % 3 :: 3]) for n in range(2, 12)]
#: What is counted, and the threads that may wait for the device at all.
COUNTED = ["device-host-host", "device-nvme-host", "host-host-host", "nvme-nvme-nvme", "device-device-host"]
COUNTED += ["chunks-device", "chunks-host", "host-host-device", "device-device-device"]
WAITS = {f"host waits: {name}" for name in ("MainThread", "autograd", "infinity-load", "infinity-deferral")}
WAITS |= {f"host waits: {name}" for name in ("infinity-update", "infinity-gradients", "infinity-ranks")}


def run(*arguments: str, what: str = "run", seconds: float = 280) -> subprocess.CompletedProcess[str]:
    """Run cases in a process of their own: torch learns of the device before its first backward."""
    return python("-m", f"tests.lagging.{what}", *arguments, timeout=seconds)


@pytest.mark.first
@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "seed", "cases"),
    quick(
        [
            *PARTS,
            ("random", 1, FEW),
            *(("random", n, some) for n, some in SEEDS),
            ("eager", 0, ALL),
            *(("random", n, ALL) for n in range(2, 12)),
        ],
        [*PARTS, ("random", 1, FEW)],
    ),
    ids=lambda value: f"{len(value)} cases" if isinstance(value, list) else str(value),
)
def test_a_late_device_changes_no_bit_and_nothing_is_unordered(
    schedule: str, seed: int, cases: list[str]
) -> None:
    done = run("--schedule", schedule, "--seed", str(seed), *cases)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count(": same") == len(cases)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("without", "case", "found"),
    [
        ("wait_on_device", "host-host-host", "nothing orders"),
        pytest.param("after", "device-host-host", "nothing orders", marks=pytest.mark.integration),
        pytest.param("mark", "nvme-nvme-nvme", "nothing orders", marks=pytest.mark.nightly),
        pytest.param("host_wait", "host-device-device", "nothing orders", marks=pytest.mark.nightly),
    ],
)
def test_an_engine_without_a_wait_is_found(without: str, case: str, found: str) -> None:
    done = run("--without", without, case)
    assert done.returncode == 1, done.stderr[-4000:]
    assert found in done.stdout


@pytest.mark.first
@pytest.mark.processes
@pytest.mark.parametrize(
    "case", quick(COUNTED, ["device-host-host", "host-host-device", "chunks-device", "chunks-host"])
)
def test_nothing_waits_for_the_device_where_it_need_not(case: str) -> None:
    """The table "Who waits for a CUDA device" of docs/architecture.md."""
    found = json.loads(run(case, what="counts").stdout)
    forward, backward, step = (Counter(found[phase]) for phase in ("forward", "backward", "step"))
    chunks, params = found["chunks"], found["parameters"]
    units, where = found["units"], CASES[case]
    parameters, state, gradients = (where[k] for k in ("parameters", "optimizer_state", "gradients"))
    assert not [name for name in forward if name.startswith("host waits")]
    worker = "host waits: infinity-gradients"
    assert set(WAITS & backward.keys()) <= {worker}
    assert set(WAITS & step.keys()) <= {
        "host waits: infinity-deferral",
        "host waits: infinity-update",
        worker,
    }
    assert backward[worker] == (0 if gradients == "device" else chunks)
    assert step[worker] == (gradients == "device")  # for the squares of all chunks
    assert step["host waits: infinity-deferral"] <= 1
    assert step["host waits: infinity-update"] <= (chunks if "device" in (state, gradients) else 0)
    # Which values somebody has edited, and the squares of all gradients.
    assert step["copies that block"] <= (parameters == "device") + (gradients == "device")
    # Autograd's, and one for each parameter and chunk: what the device keeps is copied to its place, too.
    assert backward["launches"] <= 5 * params
    if gradients == "device" and state != "device":
        assert step["launches"] <= 3 * chunks + 60  # the squares of all chunks are summed at once
    if "device" in (state, gradients):
        return
    assert backward["copies"] == backward["host waits: infinity-gradients"] == chunks
    assert backward["stream waits"] <= 4 * units
    assert backward["events"] <= 2 * units + chunks
    assert step["events"] <= chunks + (1 if parameters == "device" else 2 * units)
    assert step["launches"] <= (4 * params + 14 * chunks if parameters == "device" else 2 * chunks)
    assert found["registrations after wrap"] == 0


#: How often a step reads compute parameters that are placed on the device.
READS = dict.fromkeys(
    ("device-host-host", "device-device-device", "delayed-device", "backward-device-host-host"), 2
)
READS["halves-device-host-host"] = 3  # an update on the CPU begins with the upper halves


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", quick([*READS], ["device-host-host", "halves-device-host-host", "delayed-device"])
)
def test_a_step_looks_once_whether_parameters_on_the_device_were_edited(case: str) -> None:
    """Two digests, after an update and before the next one, each read the values once; one wait."""
    found = json.loads(run(case, what="counts").stdout)
    step, nbytes = Counter(found["step"]), found["bytes"]
    assert 0 < nbytes * (READS[case] - 0.1) < step["bytes read"] <= nbytes * READS[case]
    assert step["host waits: infinity-deferral"] == 1
    assert step["copies that block"] == 1 + (case == "device-device-device")  # the squares of gradients
    if case == "device-host-host":  # each allocation is counted as a launch
        assert step["launches"] - step["allocations"] <= 20 * found["units"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", quick(["device-host-host", "device-device-device"], ["device-device-device"])
)
def test_clipping_gradients_waits_for_the_device_where_it_must(case: str) -> None:
    """torch's clip_grad_norm_ asks for each norm, and multiplies each gradient by a number on the device."""
    found = json.loads(run(case, what="counts").stdout)
    for phase, waits in (("clip", found["parameters"]), ("foreach", 1)):
        counts = Counter(found[phase])
        assert counts["host waits: MainThread"] <= waits
        assert counts["copies that block"] <= 1  # the squares of gradients


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "which"),
    quick(
        [("host-host-host", "0::12"), ("device-host-host", "0::12"), ("activations", "0::12")]
        + [(name, "0:") for name in ("host-host-host", "device-host-host", "nvme-nvme-nvme", "activations")],
        [("host-host-host", "0::12")],
    ),
)
def test_memory_of_the_device_runs_out_anywhere_and_the_batch_is_tried_again(case: str, which: str) -> None:
    done = run(case, which, what="faults", seconds=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "'OutOfMemoryError'" in done.stdout


@pytest.mark.processes
@pytest.mark.parametrize("case", quick(["nvme-host-host", "activations"], ["nvme-host-host"]))
def test_a_driver_that_refuses_to_pin_leaves_nothing_behind(case: str) -> None:
    """Nothing registered, no error for the next launch; and the same model can be wrapped again."""
    done = run(case, "--registrations", what="faults")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "'ConfigError'" in done.stdout
