"""Child processes that take turns.

A child prints ``@@ {json}`` once when it is ready and once after each line that it is sent; anything else
that it prints is kept as its log. As they take turns, a slow moment of the machine meets all of them, and
nobody's memory is counted as another's. The standard library alone is imported here, so that a peer that
lives in another environment can take part.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

MARK: Final = "@@ "
_GRACE: Final = 20.0  # seconds that a child has to end


class ChildError(RuntimeError):
    """A child ended, or did not answer in time (`code` None). `said`: the end of what it printed."""

    def __init__(self, what: str, code: int | None, log: str) -> None:
        self.said = said = [line for line in log.splitlines() if line.strip()]
        self.reason = next((x for x in reversed(said) if "Error" in x), said[-1] if said else what).strip()
        if code is None:
            self.reason = what
        elif code < 0:
            self.reason = f"ended by {signal.Signals(-code).name}: is there enough memory?"
        super().__init__(f"{what}: {self.reason} (exit status {code})\n{log}")
        self.code = code


class Child(contextlib.AbstractContextManager["Child"]):
    """One child. `command` is a whole command line; `timeout` is for each answer, in seconds.

    Raises:
        ChildError: it ended before it was ready, or was not ready in time.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> None:
        self.name = name
        self.timeout = timeout
        self._log: deque[str] = deque(maxlen=400)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()  # None: it has ended
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env={**os.environ, **(env or {})},
        )
        with contextlib.suppress(OSError):  # if memory runs out, this and nobody else's work is to end
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")
        threading.Thread(target=self._listen, name=f"{name}-output", daemon=True).start()
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line; return the answer, with the bytes that the process made drives read and write.

        Raises:
            ChildError: it ended or is too slow.
        """
        before = _io_bytes(self._process.pid)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, which _answer says with its log
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
        answer = self._answer()
        after = _io_bytes(self._process.pid)
        answer["read_bytes"], answer["written_bytes"] = (a - b for a, b in zip(after, before, strict=True))
        return answer

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ask it to end; after 20 s kill it."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_GRACE)

    def log(self) -> str:
        """Return the end of what it printed."""
        return "".join(list(self._log))

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            answer = _answer_in(line)
            if answer is None:
                self._log.append(line)
            else:
                self._answers.put(answer)
        self._answers.put(None)

    def _answer(self) -> dict[str, Any]:
        what = "ended"
        try:
            answer = self._answers.get(timeout=self.timeout)
        except queue.Empty:
            answer, what = None, f"did not answer in {self.timeout:.0f} s"
            self._process.kill()
        if answer is not None:
            return answer
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        code = self._process.returncode if what == "ended" else None
        raise ChildError(f"{self.name} {what}", code, self.log()[-6000:])


def _answer_in(line: str) -> dict[str, Any] | None:
    """Return the answer that a line is, or None: others write to the same stream."""
    if not line.startswith(MARK):
        return None
    try:
        found = json.loads(line[len(MARK) :])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _io_bytes(pid: int) -> tuple[int, int]:
    """Return the bytes that a process made drives read and write, so far (proc_pid_io(5))."""
    try:
        pairs = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (OSError, ValueError):
        return 0, 0
    return int(pairs["read_bytes"]), int(pairs["write_bytes"])


# -- in a child -------------------------------------------------------------------------------


def tell(answer: Mapping[str, Any]) -> None:
    """Answer the parent."""
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def lines() -> Iterator[str]:
    """Yield what the parent asks, until it asks no more."""
    for line in sys.stdin:
        yield line.strip()


def forget_peak() -> None:
    """Make `peak_memory` count from here on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the most memory that this process has had, in bytes."""
    return _status("VmHWM")


def peak_anonymous() -> int:
    """Return `peak_memory` without the pages of files that are resident now: the code of libraries."""
    return _status("VmHWM") - _status("RssFile")


def _status(name: str) -> int:
    """Return a size in bytes of this process (proc_pid_status(5)); 0: the kernel does not say."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
