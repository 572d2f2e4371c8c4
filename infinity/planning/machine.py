"""The machine that a run is planned for: memory and drives, of this machine or of a described one.

[Note: one verdict] The engine's device memory and the activations are one sum, which must fit the device; on
a device without memory of its own, the sum includes the host's part, too. For drives, everything that exists
at the same time must fit: when `wrap` begins, it allocates the arenas while the model is still
in scratch files ([Note: scratch]).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from infinity.core.config import Config
from infinity.core.sizes import ALIGNMENT, KiB, ceil_to

from .footprint import Budget

#: Parameters of fewer bytes stay in memory: a mapping costs a page and one of the kernel's 65,530.
LEAST_SCRATCH: Final = 4096
#: What stands beside an arena: the file system's notes of it, and the file on which a backend is tried
#: (infinity/hardware/aio_probe.py).
BESIDE: Final = 256 * KiB


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A directory and the file system below it.

    Attributes:
        directory: as it is named in `nvme`.
        free: bytes that a run may take there; None: the file system does not say.
        system: directories of one file system have the same; they share its room.
        weight: bandwidth by which chunks are spread, in any unit.
        read, write: GB/s (1e9 bytes); None: not known.
        endurance: TB (1e12 bytes) that it is rated for; None: not known.
        ranks: how many of a machine's ranks use it.
    """

    directory: str
    free: int | None
    system: Hashable
    weight: float = 1.0
    read: float | None = None
    write: float | None = None
    endurance: float | None = None
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run may take.

    Attributes:
        host_memory: bytes.
        device_memory: bytes of a device with memory of its own; None: it shares the host's.
        drives: the directories of `nvme`, in that order.
        temporary: where a model is built when no directory is named; None: not known.
        name: a file that describes it; "": the machine that this runs on.
        ranks, local_ranks: that train one model together, and those of them on one such machine, which share
            its host memory; each has a device with memory of its own, where there are such.
        link, dram, tflops: GB/s between host and device and of host memory, TFLOP/s; None: not known.
        network: GB/s that a rank can send to others; None: not known.
    """

    host_memory: int
    device_memory: int | None
    drives: tuple[Drive, ...] = ()
    temporary: Drive | None = None
    name: str = ""
    ranks: int = 1
    local_ranks: int = 1
    link: float | None = None
    dram: float | None = None
    tflops: float | None = None
    network: float | None = None

    @property
    def staged(self) -> bool:
        """Whether the device has a memory of its own."""
        return self.device_memory is not None

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the drives, as the store spreads chunks over them."""
        return tuple(d.weight for d in self.drives)

    def with_drives(self, drives: Iterable[Drive]) -> Machine:
        """Return the machine with other drives."""
        return replace(self, drives=tuple(drives))

    def budget(self, config: Config) -> Budget:
        """Return the budgets of a rank in bytes; what is not named is taken from nine tenths of what is
        free."""
        return budget_of(config, self.host_memory, self.device_memory, self.local_ranks)


def budget_of(config: Config, host_memory: int, device_memory: int | None, ranks: int) -> Budget:
    """Return the budgets of each of `ranks` ranks of a machine where so many bytes are free; `device_memory`
    None: the device shares the host's, and ranks share both."""
    free = host_memory * 9 // 10
    host = config.host_memory
    if config.device_memory is not None:
        on_device = int(config.device_memory)
    elif device_memory is not None:
        on_device = device_memory * 9 // 10
    else:  # one memory for both
        on_device = max(free - int(host) if host is not None else free // 2, 0)
    if host is None:
        host = free if device_memory is not None else max(free - on_device, 0)
    sharing = ranks if device_memory is None else 1
    return Budget(on_device // sharing, int(host) // ranks, sharing, ranks)


def roomiest(free: Sequence[float], weights: Sequence[float]) -> int:
    """Return the file system that the next bytes of scratch go to: the one with the most room for its
    weight. That leaves arenas that are spread by weight all the room that there can be."""
    return max(range(len(free)), key=lambda d: (free[d] / weights[d], -d))


@dataclass(frozen=True)
class Standing:
    """What comes to stand on one file system. Bytes; `free` None: not known."""

    directory: str
    arenas: int
    scratch: int
    free: int | None

    @property
    def needed(self) -> int:
        """Bytes that stand there at once, at most."""
        return self.arenas + self.scratch


def on_drives(machine: Machine, arenas: Sequence[int], scratch: Sequence[int]) -> list[Standing]:
    """Return what comes to stand on each file system.

    Args:
        arenas: bytes of each drive's arena, of one rank.
        scratch: bytes of each parameter as it is built, in that order; several ranks build one model.
    """
    drives = machine.drives or ((machine.temporary,) if machine.temporary else ())
    systems: dict[Hashable, list[int]] = {}
    for index, drive in enumerate(drives):
        systems.setdefault(drive.system, []).append(index)
    groups = list(systems.values())
    firsts = [drives[g[0]] for g in groups]
    free = [float("inf") if d.free is None else float(d.free) for d in firsts]
    weights = [sum(drives[i].weight for i in g) for g in groups]
    taken = [0] * len(groups)
    for nbytes in scratch:
        if nbytes >= LEAST_SCRATCH and groups:
            chosen = roomiest(free, weights)
            free[chosen] -= ceil_to(nbytes, ALIGNMENT)
            taken[chosen] += ceil_to(nbytes, ALIGNMENT)
    whole = [0] * len(drives)
    if any(arenas):  # each directory has an arena then
        whole = [ceil_to(nbytes, ALIGNMENT) + BESIDE for nbytes in arenas]
    return [
        Standing(d.directory, sum(whole[i] * drives[i].ranks for i in g), t, d.free)
        for d, g, t in zip(firsts, groups, taken, strict=True)
    ]
