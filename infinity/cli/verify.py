"""`infinity verify`: that on this machine every placement and update mode gives the same bits.

A small GPT is trained some steps in every case, and its losses, norms, loss scales, masters, moments and
copies are compared with those of ``update="sync"`` with everything on the host, bit for bit. A delayed
update gives other results by design: its cases are compared with each other. Behind the backward nothing can
be clipped: its cases, and the one that they are compared with, train without. What the reference itself
is worth is compared with torch's own AdamW, within tolerances (`against_torch` in verify_run.py).

Placements × exact update modes are all there in fp32 and bf16; what else could change a bit (fp16,
splits, several directories, tight memory, instruction sets, I/O backends) is there once or twice.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from infinity.api.this_machine import check_directory
from infinity.core.config import UPDATES
from infinity.core.errors import InfinityError
from infinity.hardware import cpu_adam
from infinity.hardware.aio import available_backends
from infinity.hardware.device import open_device

from .console import finish, status_line, wide_console
from .measure import scratch
from .verify_run import (
    BEHIND,
    CLIP,
    AgainstTorch,
    Case,
    Difference,
    Trace,
    against_torch,
    compare,
    deterministic,
    locate,
    train,
)

_ALL: Final = ("parameters", "gradients", "optimizer_state")


def _place(parameters: Any, gradients: Any, optimizer_state: Any) -> dict[str, Any]:
    return dict(zip(_ALL, (parameters, gradients, optimizer_state), strict=True))


HOST: Final = "all on host"
NVME: Final = "all on NVMe"
PLACEMENTS: Final[dict[str, dict[str, Any]]] = {
    HOST: _place("host", "host", "host"),
    "all on device": _place("device", "device", "device"),
    "state on host": _place("device", "host", "host"),
    "state on NVMe": _place("device", "host", "nvme"),
    "state and gradients on NVMe": _place("device", "nvme", "nvme"),
    NVME: _place("nvme", "nvme", "nvme"),
    "parameters on NVMe": _place("nvme", "host", "host"),
    "split": _place(
        {"device": 0.3, "host": 0.3, "nvme": 0.4},
        {"device": 0.2, "host": 0.3, "nvme": 0.5},
        {"device": 0.2, "host": 0.4, "nvme": 0.4},
    ),
}
#: As little at once as there can be, and one thread.
TIGHT: Final[dict[str, Any]] = {
    "update_depth": 1,
    "read_ahead_memory": 0,
    "prefetch_memory": 0,
    "queue_depth": 1,
    "threads": 1,
}
DTYPES: Final = ("fp32", "bf16", "fp16")
#: The one update mode whose results are its own.
DELAYED: Final = "delayed"
#: The name of the reference of an update behind the backward, whose loop is another one.
_LOOP: Final = "as behind the backward"


def reference_of(case: Case) -> Case:
    """Return what `case` must equal: everything on the host, in its dtype, ``sync`` (or ``delayed``)."""
    if case.accumulation:
        return _case(HOST, "sync", case.dtype, _LOOP, **BEHIND)
    return _case(HOST, DELAYED if case.update == DELAYED else "sync", case.dtype)


def _case(
    place: str,
    update: str,
    dtype: str,
    more: str = "",
    *,
    isa: str | None = None,
    directories: int = 1,
    **settings: Any,
) -> Case:
    name = ", ".join(filter(None, (place, update, dtype, more)))
    whole = {**PLACEMENTS[place], **settings, "update": update, "dtype": dtype}
    return Case(name, whole, isa, directories)


def cases_of(isas: Sequence[str], backends: Sequence[str], isa: str) -> list[Case]:
    """Return the cases, references first within their dtype and kind of update.

    Args:
        isas: the instruction sets that this machine has; `isa` is the one in use.
        backends: the I/O backends that work in the directory.
    """
    cases = []
    for update in sorted(UPDATES, key=lambda update: update != "sync"):
        loop = BEHIND if update == "backward" else {}
        for dtype in ("fp32", "bf16"):
            if loop:
                cases.append(_case(HOST, "sync", dtype, _LOOP, **loop))
            cases += [_case(place, update, dtype, **loop) for place in PLACEMENTS]
    default = UPDATES[0]
    cases.append(_case(HOST, "sync", "fp16"))
    cases += [_case(place, default, "fp16") for place in (NVME, "state on NVMe", "split")]
    for dtype in ("fp32", "bf16"):
        cases.append(_case(NVME, default, dtype, "tight", **TIGHT))
        cases.append(_case(NVME, default, dtype, "two directories", directories=2))
    turns = itertools.cycle(DTYPES)
    for each in isas:
        if each != isa:
            cases += [_case(place, default, next(turns), each, isa=each) for place in (HOST, NVME)]
    for backend in backends:
        cases.append(_case(NVME, default, next(turns), backend, aio_backend=backend))
    return cases


class Verifier:
    """Trains cases and compares them. `folders` are directories on NVMe, two of them."""

    def __init__(self, device: str, folders: Sequence[str]) -> None:
        self._device = device
        self._folders = folders
        self.references: dict[str, Trace] = {}  # by name; one that failed is not there
        self.torch: dict[str, AgainstTorch] = {}

    def check(self, case: Case) -> dict[str, Any]:
        """Train a case and compare it with its reference, which is trained before; return what came of it,
        as JSON has it: ``problem`` None: the same bits; else in words."""
        start, difference = time.perf_counter(), None
        try:
            problem, difference = self._compare(case)
        except InfinityError as error:
            problem = f"failed: {error}"
        return {
            "case": case.name,
            "settings": dict(case.settings),
            "isa": case.isa,
            "directories": case.directories,
            "same": problem is None,
            "seconds": time.perf_counter() - start,
            "problem": problem,
            "difference": None if difference is None else difference._asdict(),
        }

    def _compare(self, case: Case) -> tuple[str | None, Difference | None]:
        trace, reference = train(case, self._device, self._folders), reference_of(case)
        if case == reference:
            self.references[case.name] = trace
            if case.dtype != "fp16" and case.update == "sync" and not case.accumulation:
                self.torch[case.dtype] = against_torch(trace, case.dtype, self._device)
            return None, None
        if reference.name not in self.references:
            return f"nothing to compare with: {reference.name} failed", None
        seen = compare(trace, self.references[reference.name])
        if seen is None:
            return None, None
        found = locate(case, reference, self._device, self._folders, seen)
        return f"differs from {reference.name}: {found}", found


def verify(device: str, directory: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Verify; return everything as JSON has it. Times in seconds.

    Raises:
        DirectoryError: no file can be made in `directory`.
    """
    check_directory(directory)
    with scratch(directory) as place:
        folders = [os.path.join(place, name) for name in ("first", "second")]
        for folder in folders:
            os.mkdir(folder)
        working = [name for name, says in available_backends(place).items() if says == "ok"]
        isas = cpu_adam.available_isas()
        cases = cases_of(isas, working, cpu_adam.isa())
        one = Verifier(device, folders)
        verdicts = []
        start = time.perf_counter()
        with deterministic(torch.device(device)):
            for number, case in enumerate(cases, 1):
                tell(f"[{number}/{len(cases)}] {case.name}")
                verdicts.append(one.check(case))
    clipping = [one.references[c.name] for c in cases if c.name in one.references and not c.accumulation]
    norms = [norm for trace in clipping for norm in trace.norms]
    return {
        "device": device,
        "directory": directory,
        "isas": list(isas),
        "backends": working,
        "updates": list(UPDATES),
        "same": all(v["same"] for v in verdicts) and all(t.same for t in one.torch.values()),
        "seconds": time.perf_counter() - start,
        "clipped_share": sum(norm > CLIP for norm in norms) / max(1, len(norms)),
        "torch": {dtype: found._asdict() for dtype, found in one.torch.items()},
        "cases": verdicts,
    }


def show(result: dict[str, Any]) -> None:
    """Print the result for a person."""
    console = wide_console()
    wrong = [case for case in result["cases"] if not case["same"]]
    for case in wrong:
        console.print(f"{case['case']}: {case['problem']}", style="bold red", markup=False)
    for dtype, found in result["torch"].items():
        text = f"torch's AdamW, {dtype}: losses within {found['losses']:.1e}"
        if dtype == "fp32":
            text += (
                f"; {found['differing']} elements of parameters beyond 1e-5, {found['own']} between torch's "
                "own two implementations"
            )
        console.print(text, style=None if found["same"] else "bold red", markup=False)
    count = len(result["cases"])
    console.print(
        f"{count - len(wrong)} of {count} cases gave the same bits in {result['seconds']:.0f} s: "
        f"{len(PLACEMENTS)} placements, update modes {', '.join(result['updates'])}, {', '.join(DTYPES)}, "
        f"instruction sets {', '.join(result['isas'])}, I/O backends {', '.join(result['backends'])}, "
        f"on {result['device']}",
        style="bold red" if wrong else "green",
        markup=False,
    )
    if not result["same"]:
        console.print(
            "This machine does not give the results that it should. If it is the same each time, report "
            "it with the output of --json; if not, suspect memory, processor or drive (doctor, dmesg)."
        )


def verify_command(directory: str, device: str | None, as_json: bool) -> int:
    """Verify as the parameters of the command say; return the exit code."""
    # cuBLAS reads it once, before its first product; without it sums have no fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    opened = open_device(device)
    name = str(opened.torch_device)
    opened.close()
    with status_line(quiet=as_json) as tell:
        result = verify(name, os.path.abspath(directory), tell)
    return finish(result, show, as_json=as_json, failed=not result["same"])
