"""Transfers that are running, and the work that follows each of them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from infinity.core.errors import StorageError
from infinity.hardware.aio import Ticket


class UnderWay:
    """Transfers between files and memory that is about to be used for something else."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[Ticket, Callable[[], None]]] = deque()

    def add(self, ticket: Ticket, then: Callable[[], None]) -> None:
        """Take a transfer; `then` is called when it and all before it are over."""
        self._transfers.append((ticket, then))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._transfers)

    def take(self) -> UnderWay:
        """Return all of them; none are left here."""
        taken = UnderWay()  # what needs memory is done before anything moves
        taken._transfers, self._transfers = self._transfers, taken._transfers
        return taken

    def wait(self, left: int = 0) -> None:
        """Wait for all of them but the last `left`, and do what follows each.

        Raises:
            TransferError, CorruptionError: of the first that failed; the others are over, too.
        """
        try:
            while len(self._transfers) > left:
                ticket, then = self._transfers[0]
                ticket.wait()
                self._transfers.popleft()
                then()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Wait for all of them, whatever comes of it."""
        while self._transfers:
            with contextlib.suppress(StorageError):
                self._transfers[0][0].wait()
            self._transfers.popleft()
