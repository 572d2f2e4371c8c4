"""The two versions of compute parameters with delayed updates, and the moves between them.

[Note: two versions] With ``update="delayed"`` forward and backward of step t+1 use θ_{t−1} while
the update of step t makes θ_t (ZeRO-Offload, arXiv 2101.06840, section 5.2, "one-step delayed
parameter update"). So a trainable chunk's compute parameters have two slots: the front, which forward and
backward use, and the back, into which the next update writes ([Note: front and back]). `step()`
publishes the result of the update before it: the back becomes the front.

- Off the device the two slots flip.
- On the device the front is the unit's storage, and the back is in host memory; publishing copies the back
  to the device, in the order of the forward. `swap` exchanges the two, for readers of the newest version that
  must not change what the training uses; publishing then flips them.

Without delayed updates there is one version, and nothing in this file has any effect.
"""

from __future__ import annotations

import torch

from infinity.core.sizes import Tier
from infinity.hardware.device import Device, Event
from infinity.storage.store import Slot, Store, Version

from .unit import ParamUnit


class Publisher:
    """Knows what is newer, and brings it to the front. The worker of the update calls `wait_published`; all
    else is the user's thread."""

    def __init__(self, store: Store, device: Device) -> None:
        self._store = store
        self._versions = store.versions
        self._device = device
        self._events: dict[int, Event] = {}  # by chunk id: copies to the device that still read the back

    @property
    def has_two_versions(self) -> bool:
        """Whether there ever are two."""
        return self._versions.has_two("copy")

    def is_newer(self, unit: ParamUnit) -> bool:
        """Return whether a unit's back is newer than its front."""
        chunks = unit.layout.trainable_chunks if self.has_two_versions else ()
        return any(self._versions.is_newer(c.id, "copy") for c in chunks)

    def slots(self, unit: ParamUnit) -> dict[int, Slot]:
        """Return where the version is that a unit shows, by chunk id."""
        version = Version.NEWEST if unit.newest else Version.FRONT
        slots = {}
        for chunk in unit.layout.chunks:
            slots[chunk.id] = self._versions.slot(chunk.id, "copy", version)
        return slots

    def wait_published(self, chunk: int) -> None:
        """Block until the back of a chunk on the device may be written again."""
        event = self._events.pop(chunk, None)
        if event is not None:
            event.wait()

    def publish(self, unit: ParamUnit) -> list[Event]:
        """Put the newest versions of a unit's chunks in front. Return the events after which the unit's
        storage holds them: none for what is there already, or off the device."""
        events = []
        after = self._device.mark()
        for chunk in unit.layout.trainable_chunks:
            if not self._versions.is_newer(chunk.id, "copy"):
                continue
            if self._store.tier(chunk.id, "copy") is not Tier.DEVICE:
                self._versions.flip(chunk.id, "copy")
                continue
            back = self._store.view(chunk.id, "copy", chunk.dtype, numel=chunk.numel, version=Version.BACK)
            event = self._device.h2d(unit.chunk_view(chunk), back, after, chunk=chunk.id)
            self._versions.copied(chunk.id, "copy")
            self._events[chunk.id] = event
            events.append(event)
        return events

    def change_roles(self, unit: ParamUnit) -> None:
        """Of chunks whose back has just been written with what is *older* than the front: have it in front,
        and the front be the newest. No bytes move, so a unit on the device shows the newest then."""
        for chunk in unit.layout.trainable_chunks:
            if self._versions.is_newer(chunk.id, "copy"):
                self._versions.exchanged(chunk.id, "copy")
                unit.newest = unit.on_device

    def swap(self, unit: ParamUnit) -> None:
        """Exchange front and back of those of the chunks of a unit on the device whose back is newer."""
        device = self._device
        for chunk in unit.layout.trainable_chunks:
            if not self._versions.is_newer(chunk.id, "copy"):
                continue
            here = unit.chunk_view(chunk)
            on_host = Version.BACK if self._store.tier(chunk.id, "copy") is Tier.DEVICE else Version.FRONT
            there = self._store.view(chunk.id, "copy", chunk.dtype, numel=chunk.numel, version=on_host)
            with torch.no_grad():
                held = here.clone()
            device.wait_on_device(device.h2d(here, there, device.mark()))
            device.d2h(there, held, device.mark()).wait()  # the slot on the host has been read before
            self._versions.exchanged(chunk.id, "copy")
