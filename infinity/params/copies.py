"""Which version of each chunk's copy is where, when updates are delayed.

[Note: two versions] With ``update="delayed"`` forward and backward of step t+1 use θ_{t−1} while
the update of step t makes θ_t (ZeRO-Offload, arXiv 2101.06840, section 5.2, "one-step delayed
parameter update"). So a trainable chunk's copy has two places: the one that is *published*, which
forward and backward use, and a spare, into which the next update writes. `step()` publishes what the
update before it has made.

- Off the device the two are parts of the store, and publishing swaps their roles.
- On the device the published copy is the unit's storage, and the spare is in host memory; publishing
  copies it to the device, in the order of the forward. `swap` exchanges the two, for whoever wants to
  see the newest without changing what the training sees.

Otherwise a chunk has one place and nothing here ever changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.core.sizes import Tier
from infinity.hardware.device import Device, Event
from infinity.planning.partition import Chunk
from infinity.planning.parts import COPY_PARTS, ChunkParts
from infinity.storage.store import Store

#: Returns the part of a unit's storage that holds a chunk's copy.
View = Callable[[Chunk], torch.Tensor]


class Copies:
    """The versions of copies, by chunk id. The worker asks, and calls `updated` and `wait_published`; all
    else is the user's thread."""

    def __init__(self, plans: Sequence[ChunkParts], store: Store, device: Device) -> None:
        self._plans = plans
        self._store = store
        self._device = device
        #: Whether there ever are two versions.
        self.two = any(COPY_PARTS[1] in p.parts for p in plans)
        self._published = [0] * len(plans)  # index into COPY_PARTS; stays 0 on the device
        self._newer: set[int] = set()  # chunks whose spare holds a newer version than the published
        self._events: dict[int, Event] = {}  # copies to the device that still read the spare

    def is_newer(self, chunk: int) -> bool:
        """Return whether there is a version that is not published yet."""
        return chunk in self._newer

    def any_newer(self) -> bool:
        """Return whether any chunk has a version that is not published yet."""
        return bool(self._newer)

    def published(self, chunk: int) -> str:
        """Return the part that forward and backward read."""
        return COPY_PARTS[self._published[chunk]]

    def newest(self, chunk: int) -> str:
        """Return the part that holds the newest version."""
        return COPY_PARTS[self._published[chunk] ^ (chunk in self._newer)]

    def spare(self, chunk: int) -> str:
        """Return the part that a delayed update writes, once everything is published."""
        return COPY_PARTS[1 - self._published[chunk]]

    def updated(self, chunk: int) -> None:
        """Note that a delayed update has made the spare the newest version."""
        self._newer.add(chunk)

    def wait_published(self, chunk: int) -> None:
        """Block until the spare of a chunk on the device may be written again."""
        event = self._events.pop(chunk, None)
        if event is not None:
            event.wait()

    def publish(self, chunks: Sequence[Chunk], view: View, *, swapped: bool) -> list[Event]:
        """Make the newest versions of a unit's `chunks` the published ones.

        `swapped`: they are in the unit's storage already. Returns the events after which the storage
        holds them (none for what is off the device: whoever fetches it reads the other part).
        """
        events = []
        after = self._device.mark()
        for chunk in chunks:
            if chunk.id not in self._newer:
                continue
            self._newer.discard(chunk.id)
            if self._plans[chunk.id].copy_tier is not Tier.DEVICE:
                self._published[chunk.id] ^= 1
            elif not swapped:
                event = self._device.h2d(
                    view(chunk), self._store.view(chunk.id, COPY_PARTS[1], chunk.dtype), after, chunk=chunk.id
                )
                self._events[chunk.id] = event
                events.append(event)
        return events

    def swap(self, chunks: Sequence[Chunk], view: View) -> None:
        """Exchange storage and spare of those of a resident unit's `chunks` that have a newer version."""
        device = self._device
        for chunk in chunks:
            if chunk.id not in self._newer:
                continue
            here = view(chunk)
            spare = self._store.view(chunk.id, COPY_PARTS[1], chunk.dtype)
            with torch.no_grad():
                held = here.clone()
            arrived = device.h2d(here, spare, device.mark())
            device.wait_on_device(arrived)
            arrived.wait()  # the spare has been read
            device.d2h(spare, held, device.mark()).wait()
