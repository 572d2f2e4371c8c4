"""Which faults there are, how a run with each of them may end, and samples of them."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

BACKENDS = ("libaio", "syscall", "uring", "threads")
#: Seconds after which a request is late. Where lateness is not the fault nothing may be late.
DEADLINE, PATIENT = 0.4, 60.0
#: Seconds after which a run is too slow, with whatever else the machine may have to do.
SLOW = 15.0


@dataclass(frozen=True)
class Injection:
    """One fault of one run. `means` is "fuse", "strace" or "none" (an undisturbed run).

    `op` is an operation of faultfs, or a system call; `kind` one of faultfs' kinds, or what strace
    is to inject; `nth` the first that fails; `repeat` is "once", "good" (for good) or, with strace,
    "other" (every other one).
    """

    run: str
    backend: str
    means: str = "none"
    op: str = ""
    kind: str = ""
    nth: int = 0
    repeat: str = "once"
    value: int = 0
    slots: int = 1
    directories: int = 1
    sync: bool = False  # the mount's mode
    deadline: float = PATIENT

    @property
    def name(self) -> str:
        """For messages."""
        value = errno.errorcode.get(self.value, str(self.value)) if self.kind == "error" else str(self.value)
        what = f"{self.op} {self.nth} {self.kind}" + (f"={value}" if self.value else "")
        return (
            f"{self.run}/{self.backend}/{self.means}: {what}, {self.repeat}, slots={self.slots}"
            + ", sync" * self.sync
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `how` is "ok", "error" or "hang"."""

    how: str
    digest: str = ""
    error: str = ""  # name of its class
    typed: bool = True
    errno: int | None = None
    path: str | None = None
    message: str = ""
    seconds: float = 0.0  # until the error was raised, or the end
    close_error: str = ""
    close_typed: bool = True
    close_seconds: float = 0.0
    stray: str = ""  # an exception in a thread or a finalizer
    fired: int = 0
    left: bool = False  # whether a file was left behind
    trace: str = ""


#: kind and value of faultfs faults of reads and writes. 8192 is a block, 1000 not aligned.
READ_FAULTS = [
    ("error", errno.EIO),
    ("error", errno.ENOSPC),
    ("error", errno.EAGAIN),
    ("short", 4096),
    ("short", 1000),
    ("short", 0),
    ("stall", 0),
    ("flip", 12345),
    ("elsewhere", 4096),
]
WRITE_FAULTS = [
    ("error", errno.EIO),
    ("error", errno.ENOSPC),
    ("error", errno.EINTR),
    ("short", 4096),
    ("short", 1000),
    ("short", 0),
    ("stall", 0),
    ("flip", 12345),
    ("torn", 4096),
    ("torn", 1000),
    ("lost", 0),
    ("elsewhere", 4096),
]
_SETUP_OPS = ("create", "fallocate")
SETUP_FAULTS = [
    *[("create", number) for number in (errno.EIO, errno.EACCES, errno.EDQUOT)],
    *[("fallocate", number) for number in (errno.ENOSPC, errno.EIO, errno.EOPNOTSUPP)],
]
#: Of each system call of a run this many are tried, from the first on.
MOST_CALLS = 24
#: What strace injects into a backend's own calls: (call, injection, repeats).
_ERRORS = ("once", "other")
_LINUX_AIO = [
    *[("io_submit", f"error={e}", _ERRORS) for e in ("EAGAIN", "EINTR")],
    *[("io_submit", f"error={e}", ("once",)) for e in ("EIO", "ENOMEM", "EINVAL", "EBADF")],
    ("io_submit", "error=EAGAIN", ("good",)),
    ("io_submit", "retval=0", _ERRORS),
    ("io_submit", "retval=1", ("once",)),
    ("io_submit", "delay_enter=1500000", ("once",)),
    *[("io_getevents", f"error={e}", _ERRORS) for e in ("EINTR", "EAGAIN", "EINVAL")],
    ("io_getevents", "error=EINVAL", ("good",)),
]
CALLS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "libaio": _LINUX_AIO,
    "syscall": _LINUX_AIO,
    "uring": [
        *[("io_uring_enter", f"error={e}", _ERRORS) for e in ("EAGAIN", "EBUSY", "EINTR")],
        *[("io_uring_enter", f"error={e}", ("once",)) for e in ("EIO", "ENOMEM", "EBADF")],
        ("io_uring_enter", "error=EAGAIN", ("good",)),
        ("io_uring_enter", "retval=0", _ERRORS),
        ("io_uring_enter", "delay_enter=1500000", ("once",)),
    ],
    "threads": [
        *[(c, f"error={e}", _ERRORS) for c in ("pread64", "pwrite64") for e in ("EAGAIN", "EINTR")],
        *[(c, f"error={e}", ("once", "good")) for c in ("pread64", "pwrite64") for e in ("EIO", "ENOSPC")],
        *[(c, "retval=0", ("once", "good")) for c in ("pread64", "pwrite64")],
        *[(c, "retval=8192", ("once",)) for c in ("pread64", "pwrite64")],
        *[(c, "delay_enter=1500000", ("once",)) for c in ("pread64", "pwrite64")],
        ("pread64", "error=EAGAIN", ("good",)),
    ],
}


def _late(backend: str, op: str, kind: str, value: int, repeat: str) -> bool:
    """Whether the fault is that something does not end."""
    if kind.startswith(("stall", "delay", "retval=1")):
        return True
    if repeat != "good":
        return False
    if kind == "error":
        return value in (errno.EAGAIN, errno.EINTR)
    if kind == "short":  # io_uring tries a write that moves nothing again, for ever
        return backend == "uring" and op == "write" and value == 0
    return kind in ("error=EAGAIN", "error=EINVAL")


def allowed(injection: Injection) -> set[str]:
    """Return how a run may end: "ok", which means the same bits, and names of errors."""
    op, kind, value, repeat = injection.op, injection.kind, injection.value, injection.repeat
    if op in _SETUP_OPS:
        return {"ok"} if value == errno.EOPNOTSUPP else {"DirectoryError"}
    if injection.means == "strace":
        return _allowed_calls(injection)
    if injection.deadline < PATIENT:
        # TransferError: of a transfer that was not sent any more because another is late.
        return {"DeadlineError", "TransferError"}
    if kind == "error":
        if value in (errno.EAGAIN, errno.EINTR) or (value == errno.EIO and op == "read" and repeat == "once"):
            return {"ok"}
        return {"TransferError"}
    if kind == "short":
        if value and injection.sync and injection.backend == "uring":
            # io_uring resumes a short transfer by itself, and on a synchronous FUSE mount, at least
            # up to Linux 6.18, with the wrong bytes. It says that all is well; the CRCs do not.
            return {"ok", "CorruptionError"}
        if value or (op == "write" and repeat == "once"):
            return {"ok"}
        return {"ShortTransferError"}
    if kind == "flip" and op == "read":
        return {"CorruptionError"}
    if kind == "elsewhere" and op == "read":  # there may be the same bytes, or none
        return {"CorruptionError", "ShortTransferError", "ok"}
    return {"CorruptionError", "ok"}


def _allowed_calls(injection: Injection) -> set[str]:
    op, kind, repeat = injection.op, injection.kind, injection.repeat
    # strace counts the calls of each thread by itself: there may be one that fails, tried again by
    # a thread of which none does.
    perhaps = {"ok"} if injection.backend == "threads" else set()
    if injection.deadline < PATIENT:
        return {"DeadlineError", "TransferError"} | perhaps
    if kind in ("error=EAGAIN", "error=EBUSY", "error=EINTR") or op == "io_getevents":
        return {"ok"}
    if kind == "retval=8192":  # which may be more than was asked for
        return {"CorruptionError", "TransferError", "ok"}
    if kind == "retval=0":
        if op == "pread64" or repeat == "good":
            return {"ShortTransferError"} | perhaps
        return {"ok"}
    return {"TransferError"} if repeat == "good" and not perhaps else {"TransferError", "ok"}


def problem(injection: Injection, outcome: Outcome, wanted: str) -> str | None:
    """Return what is wrong with the way a run ended, or None. `wanted` is the undisturbed digest."""
    if outcome.how == "hang":
        return f"hung:\n{outcome.trace}"
    if outcome.stray:
        return f"an exception that nobody caught:\n{outcome.stray}"
    if not outcome.typed:
        return f"an untyped error: {outcome.message}\n{outcome.trace}"
    if not outcome.close_typed:
        return f"an untyped error in close: {outcome.close_error}\n{outcome.trace}"
    if outcome.how == "ok" and outcome.digest != wanted:
        return "silently different bits"
    if injection.means == "fuse" and injection.run == "store" and not outcome.fired:
        return "the fault did not come about"  # (of a training run the last one may not: it reads ahead)
    ending = "ok" if outcome.how == "ok" else outcome.error
    if outcome.fired and ending not in allowed(injection):
        return f"expected {' or '.join(sorted(allowed(injection)))}, found {ending}: {outcome.message}"
    # strace does not say of every delay that it took place.
    if not outcome.fired and ending != "ok" and not injection.kind.startswith("delay"):
        return f"nothing failed, but {ending}: {outcome.message}"
    if outcome.left and injection.deadline == PATIENT:
        return "a file was left behind"
    if outcome.seconds > SLOW:
        return f"took {outcome.seconds:.1f} s"
    if outcome.close_seconds > SLOW:
        return f"close took {outcome.close_seconds:.1f} s"
    if outcome.how == "error" and outcome.error not in ("DirectoryError",) and not outcome.path:
        return f"the error names no file: {outcome.message}"
    return None


# ------------------------------------------------------------------------------- which ones


def _injection(
    run: str, backend: str, means: str, op: str, kind: str, nth: int, repeat: str, value: int = 0
) -> Injection:
    late = _late(backend, op, kind, value, repeat)
    odd = (nth + len(kind) + BACKENDS.index(backend)) % 2
    return Injection(
        run,
        backend,
        means,
        op,
        kind,
        nth,
        repeat,
        value,
        slots=1 + odd,
        directories=1 + (nth // 2) % 2,
        # The kernel calls a short write EIO unless it is synchronous.
        sync=(op == "write" and kind == "short") or bool((nth // 4) % 2),
        deadline=DEADLINE if late else PATIENT,
    )


def all_injections(counts: Mapping[str, Mapping[str, int]]) -> list[Injection]:
    """Return every fault at every operation.

    Args:
        counts: for each run and operation how many of them an undisturbed run has.
    """
    found = []
    for run, seen in counts.items():
        for backend in BACKENDS:
            for op, faults in (("read", READ_FAULTS), ("write", WRITE_FAULTS)):
                for kind, value in faults:
                    for nth in range(1, seen[op] + 1):
                        for repeat in ("once", "good"):
                            found.append(_injection(run, backend, "fuse", op, kind, nth, repeat, value))
            for op, value in SETUP_FAULTS:
                found.append(_injection(run, backend, "fuse", op, "error", 1, "once", value))
            for call, kind, repeats in CALLS[backend]:
                for nth in range(1, 1 + MOST_CALLS):
                    for repeat in repeats:
                        found.append(_injection(run, backend, "strace", call, kind, nth, repeat))
    return found


def thorough(injections: list[Injection], seed: int) -> list[Injection]:
    """Return for the store every fault at every operation on every backend, once or for good (with
    the next seed the other way round); of the rest one in many."""
    chosen = []
    for k, i in enumerate(injections):
        if i.means == "fuse" and i.run == "store":
            number = i.nth + BACKENDS.index(i.backend) + len(i.kind) + seed
            keep = i.repeat == ("once", "good")[number % 2] or i.op in _SETUP_OPS
        elif i.means == "fuse":
            keep = (k + seed) % 121 == 0
        else:
            keep = (k + seed) % (11 if i.run == "store" else 73) == 0
        if keep:
            chosen.append(i)
    random.Random(seed).shuffle(chosen)
    return chosen


def sample(injections: list[Injection], count: int, random: random.Random) -> list[Injection]:
    """Return `count` of them, every tenth a training run, every fifth by strace, with as many of each kind of
    fault on each backend as there can be."""
    parts = {
        ("training", "strace"): count // 50,
        ("training", "fuse"): count // 10 - count // 50,
        ("store", "strace"): count // 5 - count // 50,
    }
    parts["store", "fuse"] = count - sum(parts.values())
    chosen: list[Injection] = []
    for (run, means), share in parts.items():
        groups: dict[tuple[object, ...], list[Injection]] = {}
        for i in injections:
            if i.means == means and i.run.startswith(run):
                groups.setdefault((i.backend, i.op, i.kind, i.value, i.repeat), []).append(i)
        for group in groups.values():
            random.shuffle(group)
        # There are more groups than a small sample holds: kinds take turns, and so do the ways in which each
        # may end, lest chance leave one out.
        kinds: dict[str, list[list[Injection]]] = {}
        for key in random.sample(list(groups), len(groups)):
            kinds.setdefault(f"{key[2]} {sorted(allowed(groups[key][0]))}", []).append(groups[key])
        order = [group for turn in itertools.zip_longest(*kinds.values()) for group in turn if group]
        taken: list[Injection] = []
        while len(taken) < share and any(order):
            taken += [group.pop() for group in order if group][: share - len(taken)]
        chosen += taken
    random.shuffle(chosen)
    return chosen
