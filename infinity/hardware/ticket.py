"""Tickets: each is one transfer of a ring, with every error that can end it."""

from __future__ import annotations

import enum
import errno as numbers
import os
import time
from typing import Any, Protocol

from infinity.core import waiting
from infinity.core.errors import (
    ClosedError,
    DeadlineError,
    ShortTransferError,
    StorageError,
    TransferError,
)

from .aio_native import CURES, POLL_MS, ffi, lib


class Priority(enum.IntEnum):
    """Which ticket's blocks go to the kernel first; waiting for a ticket outweighs all."""

    BACKGROUND = 0
    NORMAL = 1
    URGENT = 2


class TicketOwner(Protocol):
    """What a ticket needs of its ring."""

    deadline: float

    def foreign(self) -> ClosedError:
        """Return the error for a use after `close`, or in a fork."""
        ...


class Ticket:
    """One transfer. Its buffer belongs to the ring until `done`, and for good if `quarantined`.

    Attributes:
        nbytes: bytes to be moved.
        offset: in the file, in bytes.
        path: of the file.
    """

    __slots__ = ("__weakref__", "_handle", "_ring", "_write", "nbytes", "offset", "path")

    def __init__(
        self, ring: TicketOwner, handle: Any, path: str, offset: int, nbytes: int, write: bool
    ) -> None:
        self._ring = ring
        self._handle = handle
        self._write = write
        self.path = path
        self.offset = offset
        self.nbytes = nbytes

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""
        return self._state(lib.aio_poll(self._handle)) != lib.AIO_PENDING

    @property
    def quarantined(self) -> bool:
        """Whether the deadline passed with blocks in the kernel: the buffer must never be used,
        or its memory returned, as long as the process lives."""
        return self._state(lib.aio_poll(self._handle)) == lib.AIO_EXPIRED

    @property
    def order(self) -> int:
        """Its number, from 1, in the order of submission to the kernel; 0: not submitted yet."""
        return int(self._describe().order)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds in the queue, and from the first submission to completion; NaN until then."""
        queued, started, finished = self.times
        nan = float("nan")
        return (
            (started - queued) * 1e-9 if started else nan,
            (finished - started) * 1e-9 if started and finished else nan,
        )

    @property
    def times(self) -> tuple[int, int, int]:
        """When it was queued, first given to the kernel, and complete: ns of CLOCK_MONOTONIC; 0: not yet."""
        info = self._describe()
        return int(info.queued_ns), int(info.started_ns), int(info.finished_ns)

    def wait(self, timeout: float | None = None) -> None:
        """Block until every byte is moved; its unsent blocks go to the front of the queue.

        Args:
            timeout: seconds; None: as long as it takes (its deadline bounds that).

        Raises:
            ShortTransferError: the file ended, or takes no more bytes.
            DeadlineError: it missed its deadline, and `quarantined` is true; or `timeout` passed
                first: then `done` is false and it may be waited for again.
            TransferError: the system reported an error, or the ring failed before it was sent.
            ClosedError: this process is a fork of the one that started it.
        """
        state = lib.aio_wait(self._handle, POLL_MS if timeout is None else _slice(timeout))
        if state == lib.AIO_DONE:
            return
        until = None if timeout is None else time.monotonic() + timeout
        while self._state(state) == lib.AIO_PENDING:
            left = 0.1 if until is None else until - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"the {self._name} is not complete",
                    **self._where(),
                    expected=f"{timeout} s at most",
                    found="still under way",
                    cure="wait again: the transfer goes on",
                )
            if waiting.hear is not None:
                waiting.hear()
            state = lib.aio_wait(self._handle, _slice(left))
        if state != lib.AIO_DONE:
            raise self._error(state)

    @property
    def _name(self) -> str:
        kind = "write" if self._write else "read"
        return f"{kind} of {self.nbytes} bytes at offset {self.offset} of {self.path}"

    def _where(self) -> dict[str, Any]:
        return {"path": self.path, "offset": self.offset, "nbytes": self.nbytes}

    def _state(self, state: int) -> int:
        if state < 0:
            raise self._ring.foreign()
        return state

    def _describe(self) -> Any:
        info = ffi.new("aio_ticket_info *")
        self._state(lib.aio_ticket_describe(self._handle, info))
        return info

    def _error(self, state: int) -> StorageError:
        info = self._describe()
        number = -int(info.error)
        kind: type[TransferError] = TransferError
        if state == lib.AIO_EXPIRED:
            kind = DeadlineError
            what = f"the {self._name} missed its deadline; the buffer is quarantined and the directory failed"
        elif number == numbers.ESHUTDOWN:
            what = f"the {self._name} was not sent: its directory has failed or was closed"
        else:
            what = f"the {self._name} failed"
            if info.short_transfer:
                kind = ShortTransferError
        name = numbers.errorcode.get(number, str(number))
        return kind(
            what,
            errno=number,
            **self._where(),
            expected=f"{self.nbytes} bytes"
            + (f" within {self._ring.deadline} s" if kind is DeadlineError else ""),
            found=f"{os.strerror(number)} ({name}) at offset {int(info.offset)}, "
            f"{int(info.moved)} bytes moved",
            cure=CURES.get(number, "check dmesg for errors of the drive or the file system"),
        )

    def __repr__(self) -> str:
        return f"<Ticket: {self._name}>"


def _slice(seconds: float) -> int:
    """Return milliseconds for one native wait: at least 1 of what is left, at most 100."""
    return 0 if seconds <= 0 else max(1, min(POLL_MS, int(seconds * 1000)))
