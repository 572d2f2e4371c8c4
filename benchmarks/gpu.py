"""The stages of gpu_check.sh: what there is to find out on a machine with a GPU.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py facts --output facts.json --logs logs --directory /mnt/nvme --seconds 540

A stage is a list of parts, each with a verdict (passed, failed, error, timed out, interrupted, left out) and
what it has found, in one JSON that is written anew after each part: whatever ends the stage, what was
measured is kept. What touches the device does so in a process of its own, which has so many seconds. The
status is 0 only if every part that was begun has passed, and one was.

With `--device lagging`, the double of CUDA (devices.py), sizes are the smallest: so tests run each stage.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import common
import speed
from devices import LAGGING, opened
from gpt2 import GPT2

HERE: Final = Path(__file__).resolve()
#: Seconds that a process has to end when it is told to, before it is killed.
GRACE: Final = 20.0
#: Models by their parameters; and the smallest, for the double.
SIZES: Final = {
    name: GPT2(layers=layers, width=width, positions=2048, repeated=True)
    for name, (layers, width) in {
        "0.2b": (12, 1024),
        "1.4b": (26, 2048),
        "2.7b": (32, 2560),
        "3.8b": (32, 3072),
        "6.7b": (32, 4096),
    }.items()
}
SMALLEST: Final = GPT2(layers=1, width=64, vocabulary=300, positions=16, repeated=True)
#: Bytes per parameter: optimizer state, that and all else on NVMe; and what `infinity.init` puts there first.
STATE, ALL, SCRATCH = 12, 16, 4
MODULES: Final = (
    "cffi",
    "click",
    "rich",
    "yaml",
    "safetensors",
    "numpy",
    "transformers",
    "pytest",
    "hypothesis",
)


# -- stages and their parts -------------------------------------------------------------------


class Stage:
    """One stage: its parts, and the time that it has."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.smoke = args.device == LAGGING
        self.parts: dict[str, dict[str, Any]] = {}
        self._end = time.monotonic() + args.seconds
        args.logs.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def part(self, name: str, least: float, call: Callable[[dict[str, Any]], bool]) -> None:
        """Do one part, if `least` seconds are left, or any on the double. `call` puts what it finds into what
        it is given, as it finds it, and says whether that is good."""
        found = self.parts[name] = {"verdict": "interrupted"}
        if self.left() < (0 if self.smoke else least):
            found["verdict"] = f"left out: {self.left():.0f} s are left"
            return
        print(f"== {self.name}: {name}", flush=True)
        began = time.monotonic()
        try:
            good = call(found)
            if found["verdict"] == "interrupted":
                found["verdict"] = "passed" if good else "failed"
        except Exception:
            found |= {"verdict": "error", "error": traceback.format_exc()[-3000:]}
        finally:
            found["seconds"] = round(time.monotonic() - began, 1)
            print(f"   {found['verdict']}, {found['seconds']} s", flush=True)
            self.save()

    @property
    def passed(self) -> bool:
        """Whether all is well."""
        verdicts = [part["verdict"] for part in self.parts.values()]
        begun = [verdict for verdict in verdicts if not verdict.startswith("left out")]
        return bool(begun) and set(begun) == {"passed"}

    def save(self) -> None:
        """Write what there is so far."""
        verdict = "passed" if self.passed else "failed"
        head = {"benchmark": f"gpu_check: {self.name}", "device": self.args.device, "verdict": verdict}
        shares = speed.shares(self.parts)
        headline = {"headline": shares} if shares else {}
        common.publish(self.args.output, {**head, **headline, "parts": self.parts})

    def run(self, found: dict[str, Any], name: str, command: Sequence[str], most: float, **env: str) -> bool:
        """Run a command for `most` seconds; keep what it says. Return whether it succeeded. One that takes
        longer is interrupted, so that it can still say what it has."""
        log = self.args.logs / f"{name}.log"
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                list(command),
                cwd=common.ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
            )
            try:
                # The double takes its own time.
                status = process.wait(max(1.0, self.left() if self.smoke else min(most, self.left())))
            except subprocess.TimeoutExpired:
                found["verdict"] = "timed out"
                status = _interrupt(process)
            except BaseException:  # the whole stage is told to end
                _interrupt(process)
                raise
        found["exit_status"] = status
        if status or found["verdict"] == "timed out":
            found["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        return status == 0

    def script(self, name: str, words: Sequence[str], most: float) -> Callable[[dict[str, Any]], bool]:
        """Return a part that runs one of the benchmarks, with its result as what is found."""

        def call(found: dict[str, Any]) -> bool:
            path = self.args.logs / f"{name}.json"
            command = [sys.executable, str(HERE.with_name(words[0])), *words[1:], "--output", str(path)]
            try:
                good = self.run(found, name, command, most)
            finally:  # however it has ended, what it has written is there
                if path.exists():
                    found |= _shortened(json.loads(path.read_text(encoding="utf-8")))
            return good and found.get("passed", True)

        return call

    def task(self, name: str, most: float) -> Callable[[dict[str, Any]], bool]:
        """Return a part that is one of `TASKS`, in a process of its own."""
        args = self.args
        words = ["gpu.py", "--task", name, "--device", args.device, "--directory", args.directory]
        return self.script(name, words, most)


def _interrupt(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(GRACE)


def _shortened(result: dict[str, Any]) -> dict[str, Any]:
    """Return a benchmark's result without what the stage says itself, and without samples."""
    dropped = ("benchmark", "date", "versions", "hardware")
    result = {key: value for key, value in result.items() if key not in dropped}
    for group in result.get("placements", {}).values():
        del group["samples"]
    return result


# -- facts ------------------------------------------------------------------------------------


def facts(stage: Stage) -> None:
    """GPU and software, the link, bits of Adam and norms, every placement against the CPU's bits."""
    stage.part("machine", 0, lambda found: _machine(stage, found))
    stage.part("link", 20, stage.task("link", 60))
    stage.part("bits", 20, stage.task("bits", 90))
    stage.part("placements", 30, lambda found: _placements(stage, found))


def _machine(stage: Stage, found: dict[str, Any]) -> bool:
    import torch

    from infinity.cli.doctor import gpus
    from infinity.hardware import cpu_adam
    from infinity.hardware.aio import available_backends

    found |= {
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "gpus": [gpu._asdict() for gpu in gpus()],
        "driver": _driver(),
        "versions": common.versions(),
        "hardware": common.hardware(stage.args.directory),
        "native": {"isa": cpu_adam.isa(), "isas": list(cpu_adam.available_isas())},
        "io_backends": available_backends(stage.args.directory),
        "missing": [name for name in MODULES if importlib.util.find_spec(name) is None],
    }
    return stage.smoke or bool(found["gpus"])


def _driver() -> str | None:
    """Return what the driver says of its devices, one line for each; None: there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,pci.bus_id"
    command = [program, f"--query-gpu={fields}", "--format=csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return (done.stdout + done.stderr).strip()


def _placements(stage: Stage, found: dict[str, Any]) -> bool:
    from placements import cases, compare

    chosen = list({case.update: case for case in cases()}.values()) if stage.smoke else cases()
    found |= {"cases": len(chosen), "verdicts": {}, "rows": []}
    for row in compare(chosen, stage.args.device, stage.args.directory, left=lambda: stage.left() - 10):
        found["rows"].append(row)
        found["verdicts"] = dict(Counter(row["verdict"] for row in found["rows"]))
        if row["verdict"] not in ("same", "reference"):
            print(f"   {row}", flush=True)
        stage.save()
    return set(found["verdicts"]) == {"same", "reference"}


def link(args: argparse.Namespace) -> dict[str, Any]:
    """Rates of copies, by kind of host memory."""
    import torch
    from link import KINDS, measure_cuda

    from infinity.core.sizes import MiB
    from infinity.hardware.device import CudaDevice

    smoke = args.device == LAGGING
    with opened(args.device):
        device = CudaDevice(torch.device(args.device, 0))
        # What is not pinned the double takes for a mistake.
        kinds = ("registered",) if smoke else KINDS
        rows, warnings = measure_cuda(device, (1 if smoke else 256) * MiB, 2 if smoke else 9, kinds)
        device.close()
    return {"passed": bool(rows) and not warnings, "rows": rows, "warnings": warnings}


def bits(args: argparse.Namespace) -> dict[str, Any]:
    """What the device computes beside the CPU's kernels."""
    from tests.device_bits import CHECKS

    one_of_a_kind = {name.split()[0]: name for name in CHECKS}.values()
    with opened(args.device):
        names = one_of_a_kind if args.device == LAGGING else CHECKS
        differ = {name: CHECKS[name](args.device)[:5] for name in names}
    wrong = {name: found for name, found in differ.items() if found}
    return {"passed": not wrong, "checks": len(differ), "differ": wrong}


# -- tests ------------------------------------------------------------------------------------


#: What is run again under other settings of CUDA: each tier, streams, late copies, recomputing.
AGAIN: Final = "repeated or late_copies or own or activations or goes_to_the_device or gpt-bf16"


def tests(stage: Stage) -> None:
    """The tests for a GPU; again without the caching allocator; memory of the device that runs out."""
    again = ["-k", "four_bytes" if stage.smoke else AGAIN]
    all_of_them = again if stage.smoke else []
    stage.part("memory", 20, stage.task("memory", 60))
    stage.part("gpu", 60, lambda found: _pytest(stage, found, "gpu", 400, all_of_them))
    no_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    stage.part("no-cache", 40, lambda found: _pytest(stage, found, "no-cache", 200, again, **no_cache))


def _pytest(
    stage: Stage, found: dict[str, Any], name: str, most: float, words: Sequence[str], **env: str
) -> bool:
    report = stage.args.logs / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rf", "--tb=short"]
    command += [
        "--durations=10",
        "--junitxml",
        str(report),
        "--basetemp",
        os.path.join(stage.args.directory, name),
    ]
    if stage.smoke:  # CI: else tests for a GPU are skipped where there is none
        command, env = [*command, "tests/test_gpu.py"], {**env, "CI": "1", "INFINITY_TEST_GPU": LAGGING}
    good = stage.run(found, name, [*command, *words], most, **env)
    if report.exists():
        found |= _counted(report)
    return good and found.get("passed", 0) > 0


def _counted(report: Path) -> dict[str, Any]:
    """Return how many tests passed, by pytest's report, and which did not."""
    outcomes: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[wrong[0].tag if wrong else "passed"] += 1
        if wrong and wrong[0].tag != "skipped":
            failed[f"{case.get('classname')}::{case.get('name')}"] = (wrong[0].get("message") or "")[:300]
    return {**outcomes, "failures": failed}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Memory of the device runs out in each step, whose batch is tried again: bits as if it had not."""
    import tempfile

    import torch
    from placements import Case, same, train

    from infinity.core.errors import InfinityError

    raised: list[str] = []

    def without_memory(optimizer: Any, backward: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            torch.cuda.memory_allocated() / torch.cuda.mem_get_info()[1]
        )
        try:
            backward()
        except (torch.OutOfMemoryError, InfinityError) as error:
            raised.append(type(error).__name__)
        torch.cuda.set_per_process_memory_fraction(1.0)
        optimizer.zero_grad()

    rows = 2 if args.device == LAGGING else 256
    result: dict[str, Any] = {"passed": True}
    cases = [
        Case("host", "host", "host", "overlap", "bf16"),
        Case("device", "nvme", "host", "sync", "fp32"),
        Case("nvme", "device", "device", "delayed", "bf16"),
    ]
    for case in cases[:1] if args.device == LAGGING else cases:
        found = []
        for first in (None, without_memory):
            raised.clear()
            with tempfile.TemporaryDirectory(dir=args.directory) as nvme:
                found.append(train(case, args.device, nvme, rows=rows, first=first))
        differ = [name for name, value in found[0].items() if not same(found[1][name], value)]
        result["-".join(case)] = {"raised": list(raised), "differ": differ[:8]}
        result["passed"] &= bool(raised) and not differ
    return result


# -- checks -----------------------------------------------------------------------------------


def checks(stage: Stage) -> None:
    """`infinity verify`; tests under CUDA's sanitizer; 8-bit state on the drive; updates on the device."""
    if not stage.smoke:  # what these two are about is CUDA itself
        stage.part("verify", 60, lambda found: _verify(stage, found))
        again, env = ["-k", AGAIN], {"TORCH_CUDA_SANITIZER": "1"}
        stage.part("sanitizer", 60, lambda found: _pytest(stage, found, "sanitizer", 200, again, **env))
    plan = speed.plan_of(stage, speed.SMALL, speed.POINTS[1:2])
    drive = speed.contestant(stage, "8-bit-on-nvme", speed.ON_DRIVE, plan)
    stage.part("8-bit-on-nvme", speed.SMALL_START, drive)
    stage.part("update", 20, stage.task("update", 60))


def _verify(stage: Stage, found: dict[str, Any]) -> bool:
    """`infinity verify`."""
    command = [sys.executable, "-m", "infinity", "verify", "--nvme", stage.args.directory, "--json"]
    good = stage.run(found, "verify", [*command, "--device", stage.args.device], 300)
    said = _json_in(stage.args.logs / "verify.log")
    cases = said.get("cases", [])
    found |= {"cases": len(cases), "wrong": [case for case in cases if case["verdict"] != "same"]}
    return good and bool(cases)


def _json_in(log: Path) -> dict[str, Any]:
    """Return the JSON among the lines that a command has said."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def update(args: argparse.Namespace) -> dict[str, Any]:
    """Updates of state on the device: the engine's kernel, plain torch, and torch's fused AdamW."""
    import torch

    from infinity.core.sizes import MOMENT_BLOCK
    from infinity.hardware import adam_reference, cpu_adam

    smoke = args.device == LAGGING
    numel, rounds = (5000, 1) if smoke else (1 << 26, 20)
    rows = []
    with opened(args.device):

        def timed(name: str, nbytes: float, call: Callable[[], object]) -> None:
            for times in (3, rounds):  # the first compile
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(times):
                    call()
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / rounds
            rows.append({"name": name, "ms": seconds * 1e3, "bytes_per_second": nbytes * numel / seconds})

        parameter = torch.nn.Parameter(torch.randn(numel, device=args.device))
        parameter.grad = torch.randn(numel, device=args.device)
        adamw = torch.optim.AdamW([parameter], fused=not smoke)
        timed("torch's AdamW, fp32 gradients", 28, adamw.step)
        del adamw, parameter
        master, grad = (torch.randn(numel, device=args.device) for _ in range(2))
        adam, lion = cpu_adam.Adam(0.9, 0.999, 1e-8), cpu_adam.Lion(0.9, 0.99)
        for options, count, kept in (
            (adam, 2, torch.float32),
            (adam, 2, torch.bfloat16),
            (adam, 2, torch.uint8),
            (lion, 1, torch.float32),
        ):
            moments = [torch.zeros(numel, dtype=kept, device=args.device) for _ in range(count)]
            if kept is torch.uint8:
                scales = master.new_zeros(count, -(-numel // MOMENT_BLOCK))
                moments += scales.unbind()
            segment = cpu_adam.Segment(0, numel, 0, 1, 1, 1e-3, 0.01, 1.0, False, options)
            nbytes = 12 + 2 * sum(moment.nbytes for moment in moments) / numel
            name = f"{type(options).__name__}, {count} moments in {kept}"
            for kernel in ("kernel", "plain torch"):
                adam_reference._FUSED_ON = {"cuda"} if kernel == "kernel" else set()
                timed(
                    f"{name}: {kernel}",
                    nbytes,
                    lambda moments=moments, segment=segment: adam_reference.reference_segments(
                        master, moments, grad, None, [segment]
                    ),
                )
    return {"passed": True, "elements": numel, "rows": rows}


# -- nvme -------------------------------------------------------------------------------------


def _steps(
    stage: Stage,
    name: str,
    size: str,
    updates: Sequence[str],
    mode: str,
    most: float,
    *,
    contestants: Sequence[str] = ("infinity", "torch"),
    settings: Mapping[str, Any] | None = None,
) -> Callable[[dict[str, Any]], bool]:
    """Return a part that is a race of whole steps."""
    model = _model(size, stage.smoke)
    words = ["whole_step.py", "--modes", mode, "--update", *updates, "--contestants", *contestants]
    for field in ("layers", "width", "vocabulary", "positions"):
        words += [f"--{field}", str(getattr(model, field))]
    words += [
        "--tokens",
        str(model.positions),
        "--repeated",
        "--dtype",
        "bf16",
        "--device",
        stage.args.device,
    ]
    words += ["--rounds", "1" if stage.smoke else "3", "--warmup", "0" if stage.smoke else "1"]
    words += ["--burst", "2" if stage.smoke else "4", "--timeout", str(round(most - 10))]
    words += ["--directory", stage.args.directory, "--config", json.dumps(settings or {})]
    return stage.script(name, words, most)


def _model(size: str, smoke: bool) -> GPT2:
    return SMALLEST if smoke else SIZES[size]


def nvme(stage: Stage) -> None:
    """The drive; the largest model whose state it holds, and all of a model; 6.7 B on the host, and split."""
    from infinity.hardware.probe import available_host_memory

    room = shutil.disk_usage(stage.args.directory).free * 0.9
    state, everything = (_largest(room / (each + SCRATCH)) for each in (STATE, ALL))
    large = SIZES["6.7b"].parameters
    on_drive = round(min(0.5, (room / large - SCRATCH) / STATE), 2)
    split = {"optimizer_state": {"nvme": on_drive, "host": round(1 - on_drive, 2)}}
    stage.part("drive", 20, lambda found: _drive(stage, found))

    def steps(name: str, size: str, mode: str, **options: Any) -> None:
        stage.part(name, 100, _steps(stage, name, size, ["overlap"], mode, 240, **options))

    steps(f"state-on-nvme-{state}", state, "state-on-nvme")
    if stage.smoke or available_host_memory() * 0.9 >= large * ALL:
        steps("6.7b-host", "6.7b", "state-on-host", contestants=["infinity"])
    if stage.smoke:
        return  # what follows is the same with other settings
    steps("6.7b-split", "6.7b", "state-on-nvme", contestants=["infinity"], settings=split)
    steps(f"all-on-nvme-{everything}", everything, "all-on-nvme")


def _largest(parameters: float) -> str:
    """Return the largest size of at most so many parameters."""
    return [name for name, model in SIZES.items() if model.parameters <= parameters][-1]


def _drive(stage: Stage, found: dict[str, Any]) -> bool:
    """`infinity bench io`."""
    command = [sys.executable, "-m", "infinity", "bench", "io", stage.args.directory, "--quick", "--json"]
    command += ["--size", "2GiB"]
    if stage.smoke:
        command += ["--size", "16MiB", "--depth", "4", "--seconds", "0.05", "--repeats", "1"]
    good = stage.run(found, "drive", command, 90)
    found["io"] = _json_in(stage.args.logs / "drive.log")
    return good and bool(found["io"])


# -- the command ------------------------------------------------------------------------------


STAGES: Final = {call.__name__: call for call in (facts, tests, speed.speed, speed.large, checks, nvme)}
TASKS: Final = {call.__name__: call for call in (link, bits, update, memory, speed.deepspeed)}


def _interrupted(*_: object) -> None:
    """SIGINT has a handler of its own: what a shell runs in the background has it ignored, and so would all
    that is started here. `timeout` sends it twice: what the first one has begun is not to be broken off."""
    signal.signal(signal.SIGINT, lambda *_: None)
    raise KeyboardInterrupt


def main() -> int:
    """See above."""
    signal.signal(signal.SIGINT, _interrupted)
    parser = common.arguments(__doc__)
    parser.add_argument("stage", nargs="?", choices=tuple(STAGES))
    parser.add_argument("--list", action="store_true", help="say what the stages are")
    parser.add_argument("--task", choices=tuple(TASKS), help="one part of a stage, in this process")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="a folder: what parts said")
    parser.add_argument("--seconds", type=float, default=540, help="for the stage")
    args = parser.parse_args()
    args.directory = os.path.abspath(args.directory)
    paths = (str(HERE.parent), str(common.ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of all that is started here
    if args.list:
        for name, call in STAGES.items():
            print(f"{name:8} {call.__doc__}")
        return 0
    if args.task is not None:
        common.publish(args.output, {"benchmark": f"gpu: {args.task}", **TASKS[args.task](args)})
        return 0
    if args.stage is None:
        parser.error("name a stage")
    stage = Stage(args.stage, args)
    try:
        STAGES[args.stage](stage)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    stage.save()
    print(f"== {args.stage}: {'passed' if stage.passed else 'failed'}", flush=True)
    return 0 if stage.passed else 1


if __name__ == "__main__":
    sys.exit(main())
