"""A device that notes which host memory is pinned for it."""

from __future__ import annotations


class Pins:
    """Notes each call: (what, address, bytes)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory."""
        self.calls.append(("pin", address, nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`."""
        self.calls.append(("unpin", address, nbytes))
