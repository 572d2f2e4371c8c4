"""Gathers: one unit's slices of all ranks become a whole, where it is used or before that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.hardware.device import POLL, Device, Event, Task
from infinity.hardware.ranks import Comm

from .load import Load


class Gather:
    """Gathers one unit, called `name`; what was begun is waited for before anything else is done to it."""

    def __init__(self, name: str, comm: Comm, device: Device) -> None:
        self._what = f"gather of unit {name!r}"
        self._comm = comm
        self._device = device
        self._task: Task | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not."""
        return self._task is None or self._task.is_over

    @property
    def has_begun(self) -> bool:
        """Whether a gather was begun that nobody has waited for."""
        return self._task is not None

    def begin(self, load: Load, runs: Sequence[torch.Tensor]) -> None:
        """Begin to gather `runs` (as of `Comm.gather`), when `load` has brought this rank's slices:
        [Note: behind compute]. On all ranks, or on none."""

        def gather() -> Event | None:
            event = load.wait_issued()
            with self._device.aside():
                self._device.wait_on_device(event)
                self._now(runs)
                return self._device.mark()

        if self._task is None:
            self._task = self._comm.begin(gather)

    def finish(self, runs: Sequence[torch.Tensor]) -> None:
        """Complete the gather of `runs`: wait for the one that was begun, or do it now.

        Raises:
            RankError: another rank failed, or makes another call.
        """
        if self._task is not None:
            self._comm.finish(self._task)
        if not self.wait():
            self._now(runs)

    def wait(self) -> bool:
        """Wait for what was begun, if anything was (the device does, too); return whether it was gathered. An
        error is `Comm.finish`'s to raise."""
        task = self._task
        if task is None:
            return False
        while not task.pause(POLL):
            continue
        if task.error is None:
            self._device.wait_on_device(task.result())
        self._task = None
        return task.error is None

    def _now(self, runs: Sequence[torch.Tensor]) -> None:
        self._comm.exchange(self._what)
        for run in runs:
            self._comm.gather(run)
