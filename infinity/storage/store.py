"""The store: the parts of chunks, on host memory or NVMe, under integer ids."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from infinity.core.errors import OF_A_FORK, ClosedError, DeadlineError, InfinityError, StorageError
from infinity.core.sizes import ALIGNMENT, Tier, ceil_to
from infinity.core.spans import Recorder
from infinity.hardware.aio import USUAL, Priority, Ring, RingSettings, RingStats, open_ring
from infinity.hardware.tuned import bandwidths
from infinity.planning.parts import Part

from .arena import Arena
from .in_place import Files
from .interrupt import LEAST, asked_apart, give_up_on_interrupt
from .layout import DirectoryStats, Extent, Layout
from .memory import HostMemory, Pins
from .order import Order
from .pinned import Lease, PinnedPool
from .table import ChunkTable
from .transfer import Piece, Reads, Transfer, check_room, copy_error, crcs_of, with_transfer
from .versions import FIRST, Slot, Version, Versions

__all__ = ["FIRST", "DirectoryStats", "Part", "Reads", "Slot", "Store", "Transfer", "Version"]

_log = logging.getLogger("infinity.storage")
#: The tensors over one memory: of `()`, all of it.
_Views: TypeAlias = dict[tuple[()] | tuple[torch.dtype, int | None], torch.Tensor]


class Store:
    """Bytes of `chunks` on their tiers.

    Args:
        chunks: the parts of each chunk; a chunk's id is its index. Of slots on the device the store has the
            versions, and the memory that it is given (`place`).
        directories: for the parts on NVMe.
        pool: lends the leases; its memory is registered with the rings.
        weights: bandwidth of each directory in any unit; None: as `infinity tune` measured them, or
            equal where it has not.
        rings: how the ring of each directory works.
        recorder: is told of transfers while a trace is on.
        pins, node: of the memory of the host tier, as in `HostMemory`.
        files: what copies are read from that are not ours.

    Attributes:
        versions: which version of a part is in which slot.

    Raises:
        ConfigError: `chunks` or `weights` make no sense.
        DirectoryError: a directory cannot be used.
        BudgetError: the host tier gets no memory.
        BackendError: the I/O backend does not work here.
    """

    def __init__(
        self,
        chunks: Sequence[Mapping[str, Part]],
        *,
        directories: Sequence[str],
        pool: PinnedPool,
        weights: Sequence[float] | None = None,
        rings: RingSettings = USUAL,
        pins: Pins | None = None,
        recorder: Recorder | None = None,
        node: int | None = None,
        files: Files | None = None,
    ) -> None:
        if weights is None and len(directories) > 1:
            weights = bandwidths(directories)
        self.layout = Layout(chunks, len(directories), weights=weights)
        self.table = ChunkTable(self.layout)
        self.versions = Versions(self.layout.chunks)
        self._order = Order(self._start, recorder or Recorder())
        self._pool = pool
        self._pid = os.getpid()
        self._closed = False
        self._until: float | None = None  # when what was given up has had its time
        self._others: list[Ring] = []
        self._files = files
        # Of each arena, and of `files`: bytes read, written; reads, writes.
        self._moved = [[0, 0, 0, 0] for _ in range(len(directories) + 1)]
        #: By chunk, part and slot: the memory of those on the host and the device, and what was seen of it,
        #: by dtype and length. A step asks for the same tensors each time, and each one made anew costs more
        #: than all else that is done for its chunk.
        self._placed: dict[tuple[int, str, int], _Views] = {}
        self._arenas: list[Arena] = []
        self._rings: list[Ring] = []
        self._memory: HostMemory | None = None
        try:
            # Every directory is tried before anything large is taken.
            if any(self.layout.arena_nbytes):
                for directory, nbytes in zip(directories, self.layout.arena_nbytes, strict=True):
                    self._arenas.append(Arena(directory, nbytes))
            for index, arena in enumerate(self._arenas):
                seed = None if rings.delay_seed is None else rings.delay_seed + index
                ring = open_ring(f"nvme{index}", arena.directory, rings._replace(delay_seed=seed))
                self._rings.append(ring)
                ring.register_file(arena.file)
            if files is not None:
                self._rings.append(files.open_ring(rings))
            for ring, (address, size) in itertools.product(self._rings, pool.buffers()):
                ring.register_buffer(address, size)
            self._memory = HostMemory(self.layout.host_nbytes, pins=pins, node=node)
            for number, chunk in enumerate(self.layout.chunks):
                for name, spec in chunk.items():
                    for slot, tier in enumerate(spec.tiers):
                        if tier is Tier.HOST:
                            self._placed[number, name, slot] = {(): self._memory.take(spec.nbytes)}
        except BaseException:
            self._release_all()
            raise
        pool.add_reclaimer(self._order.reclaim)
        give_up_on_interrupt(self)

    # ------------------------------------------------------------------ what is where

    def spec(self, chunk: int, part: str) -> Part:
        """Return the spec of a part.

        Raises:
            KeyError, IndexError: there is no such part, or no such chunk.
        """
        return self.layout.chunks[chunk][part]

    def tier(self, chunk: int, part: str, version: Version | Slot = Version.FRONT) -> Tier:
        """Return the tier that a version of a part is on now."""
        return self.spec(chunk, part).tiers[self.versions.slot(chunk, part, version)]

    def view(
        self,
        chunk: int,
        part: str,
        dtype: torch.dtype = torch.uint8,
        *,
        numel: int | None = None,
        version: Version | Slot = Version.FRONT,
    ) -> torch.Tensor:
        """Return the memory of a version on the host or the device as a 1-d tensor, or its first `numel`
        elements.

        Raises:
            StorageError: it is on NVMe, or it was not `placed`.
        """
        slot = self.versions.slot(chunk, part, version) if isinstance(version, Version) else version
        views = self._placed.get((chunk, part, slot))
        if views is None:
            raise StorageError(
                f"part {part!r} of chunk {chunk} has no memory",
                expected="a part on the host tier",
                found=str(self.tier(chunk, part, version)),
                cure="read it into a lease",
            )
        if (view := views.get((dtype, numel))) is None:
            with torch.inference_mode(False):
                view = views[dtype, numel] = views[()].view(dtype)[:numel]
        return view

    def place(self, chunk: int, part: str, slot: Slot, memory: torch.Tensor) -> None:
        """Have `memory`, flat uint8, as that of a slot on the device."""
        self._placed[chunk, part, slot] = {(): memory}

    def is_placed(self, chunk: int, part: str, slot: Slot) -> bool:
        """Return whether a slot has memory: each on the host has, and those on the device that were given
        it."""
        return (chunk, part, slot) in self._placed

    def displace(self, chunk: int, part: str) -> None:
        """Forget the memory of the slots of a part that are on the device."""
        for slot in self.versions.slots(chunk, part):
            if self.tier(chunk, part, slot) is Tier.DEVICE:
                self._placed.pop((chunk, part, slot), None)

    # ------------------------------------------------------------------ transfers

    def read(
        self,
        chunk: int,
        part: str,
        lease: Lease,
        offset: int = 0,
        *,
        version: Version | Slot = Version.FRONT,
        sections: range | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Transfer | Reads:
        """Start reading a version of a part, or some neighbouring sections of it, into `lease` from byte
        `offset` on (a multiple of 4096). Never waits for a drive. Of a part that is read in place, windows
        come: [Note: windows].

        Returns:
            A transfer whose `nbytes` is what the version holds.

        Raises:
            StorageError: it is on the device; or the error of an earlier transfer.
            ValueError: the range does not fit the lease or the part, or the part has no such version.
        """
        self.check()
        spec = self.spec(chunk, part)
        if spec.in_place and self._files is not None:
            number = len(self._arenas)
            reads = self._files.transfers(chunk, lease, offset, priority, self._order, number)
            with self._order.lock:
                for read in reads:
                    self._order.submit(read)
            return Reads(reads)
        chosen = spec.choose(sections)
        with self._order.lock:
            slot = self.versions.slot(chunk, part, version)
            sizes = spec.clamp(chosen, self.table.length(chunk, part, slot))
            piece = Piece(chunk, part, slot, chosen, sizes)
            transfer = self._transfer(False, piece, lease, offset, priority)
            if not transfer.finished:
                transfer.crcs = self.table.crcs(chunk, part, slot, chosen)
                self._order.submit(transfer)
        if spec.tiers[slot] is Tier.HOST:
            source = self._host_bytes(chunk, part, slot, chosen, transfer.nbytes)
            lease.tensor(torch.uint8, offset, transfer.nbytes).copy_(source)
        return transfer

    def write(
        self,
        chunk: int,
        part: str,
        lease: Lease,
        offset: int = 0,
        *,
        version: Version | Slot = Version.FRONT,
        nbytes: int | None = None,
        sections: range | None = None,
        crcs: Sequence[int] | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Transfer:
        """Start writing a version of a part, in place, or some neighbouring sections of it, from `lease`
        from byte `offset` on (a multiple of 4096). Never waits for a drive.

        Args:
            nbytes: how much is written, from the part's beginning; the rest is given up. What the lease
                holds up to the next multiple of 4096 is written too.
            sections: write these and keep the others of that version.
            crcs: CRC32C of each section that is written; None: computed here.

        Raises:
            StorageError: the version is on the device; or the error of an earlier transfer.
            ValueError: the range does not fit the lease or the part, or the part has no such version.
        """
        self.check()
        spec = self.spec(chunk, part)
        chosen = spec.choose(sections)
        sizes = list(spec.sections[chosen.start : chosen.stop])
        if nbytes is not None and nbytes != sum(sizes):
            if sections is not None or not 0 <= nbytes < spec.nbytes:
                raise ValueError(f"{nbytes} of {sum(sizes)} bytes of part {part!r} cannot be written")
            sizes = spec.clamp(chosen, nbytes)
        slot = self.versions.slot(chunk, part, version)
        if sections is not None and self.table.length(chunk, part, slot) != spec.nbytes:
            raise ValueError(f"sections of part {part!r}, which does not hold all of its bytes")
        check_room(lease, offset, sum(sizes))
        if spec.tiers[slot] is Tier.HOST:
            target = self._host_bytes(chunk, part, slot, chosen, sum(sizes))
            target.copy_(lease.tensor(torch.uint8, offset, sum(sizes)))
        elif crcs is None:
            crcs = crcs_of(lease.io_address + offset, sizes)
        elif len(crcs) != len(sizes):
            raise ValueError(f"{len(crcs)} CRCs for {len(sizes)} sections")
        with self._order.lock:
            piece = Piece(chunk, part, slot, chosen, sizes)
            transfer = self._transfer(True, piece, lease, offset, priority)
            on_nvme = spec.tiers[slot] is Tier.NVME
            length = self.table.length(chunk, part, slot)
            before = self.table.crcs(chunk, part, slot, chosen) if on_nvme else ()
            try:
                if sections is None:
                    self.table.set_length(chunk, part, slot, sum(sizes))
                if on_nvme:
                    self.table.set_crcs(chunk, part, slot, chosen, crcs or ())
                if not transfer.finished:
                    self._order.submit(transfer)
            except MemoryError:  # nothing is written
                self.table.set_length(chunk, part, slot, length)
                if on_nvme:
                    self.table.set_crcs(chunk, part, slot, chosen, before)
                raise
        return transfer

    # ------------------------------------------------------------------ the end of things

    def check(self) -> None:
        """See to what is complete, and raise what went wrong: each call does, from the first
        failure on.

        Raises:
            StorageError: the first error of a transfer.
            ClosedError: the store was closed, or belongs to another process.
        """
        if self._pid != os.getpid():
            raise ClosedError(
                "the store belongs to the process that created it",
                found=f"process {os.getpid()}, a child of {self._pid}",
                cure=OF_A_FORK,
            )
        self._order.sweep()
        failed = self._order.failed
        if failed is not None and failed.error is not None:
            failed.seen = True
            raise copy_error(failed.error)
        if self._closed:
            raise ClosedError("the store was closed")

    def wait_written(self) -> None:
        """Block until no write is pending.

        Raises:
            StorageError: a transfer failed.
        """
        self.check()
        while writes := self._order.pending(writes=True):
            for transfer in writes:
                transfer.complete(None)
        self.check()

    def stats(self) -> tuple[DirectoryStats, ...]:
        """Return what was given to the drives, by directory."""
        with self._order.lock:
            places = [(arena.directory, arena.nbytes) for arena in self._arenas]
            places += [(self._files.folder, 0)] if self._files is not None else []
            return tuple(DirectoryStats(*p, *m) for p, m in zip(places, self._moved, strict=False))

    def ring_stats(self) -> list[RingStats]:
        """Return the figures of each directory's ring, in the order of the directories."""
        return [ring.stats() for ring in self._rings]

    def close(self) -> None:
        """Wait for all that is pending, end the rings and close the arenas. A second call does
        nothing.

        Raises:
            StorageError: a transfer failed and nobody was told yet, or one is past its deadline.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._pool.remove_reclaimer(self._order.reclaim)
        try:
            while pending := self._order.pending():
                for transfer in pending:
                    transfer.complete(None)
        finally:
            self._release_all()
        failed = self._order.failed
        if failed is not None and failed.error is not None and not (failed.seen or self.given_up):
            failed.seen = True
            raise copy_error(failed.error)

    @property
    def given_up(self) -> bool:
        """Whether `give_up` was called."""
        return self._until is not None

    def left(self) -> float:
        """Return the seconds that what still waits for a drive has after `give_up`."""
        return max(LEAST, (self._until or 0.0) - time.monotonic())

    @contextlib.contextmanager
    def beside(self, ring: Ring) -> Iterator[Ring]:
        """A block in which `give_up` is about `ring`, too, which is closed at its end."""
        self._others.append(ring)
        try:
            with ring:
                yield ring
        finally:
            self._others.remove(ring)

    def give_up(self, timeout: float) -> None:
        """Let what is pending have `timeout` seconds more; then it fails, and all that comes after."""
        self._until = until = time.monotonic() + timeout
        for ring in (*self._rings, *self._others):
            try:
                ring.close(timeout=max(0.0, until - time.monotonic()))
            except DeadlineError as error:
                _log.warning("%s", error.what)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _transfer(
        self, is_write: bool, piece: Piece, lease: Lease, offset: int, priority: Priority
    ) -> Transfer:
        """Return a transfer; it is finished already if there is nothing to move to or from NVMe."""
        chunk, part, slot, sections, sizes = piece
        nbytes = ceil_to(sum(sizes), ALIGNMENT)
        check_room(lease, offset, nbytes)
        tier = self.spec(chunk, part).tiers[slot]
        if tier is Tier.DEVICE:
            raise StorageError(
                f"part {part!r} of chunk {chunk} cannot be transferred",
                expected="a version on the host tier or on NVMe",
                found="a version on the device, whose bytes the store does not have",
            )
        if tier is Tier.NVME:
            extent = self.layout.extent(chunk, part, slot, sections)._replace(nbytes=nbytes)
            file = self._arenas[extent.directory].file
        else:
            extent, file = Extent(-1, 0, nbytes), None
        return Transfer(
            is_write=is_write,
            piece=piece,
            extent=extent,
            file=file,
            lease=lease,
            offset=offset,
            priority=priority,
            order=self._order,
        )

    def _host_bytes(self, chunk: int, part: str, slot: int, sections: range, nbytes: int) -> torch.Tensor:
        begin = sum(self.spec(chunk, part).sections[: sections.start])
        return self._placed[chunk, part, slot][()][begin : begin + nbytes]

    def _start(self, transfer: Transfer) -> InfinityError | None:
        """Give a transfer to its ring; return the error if the ring refuses it."""
        directory, offset, nbytes = transfer.extent
        ring = self._rings[directory]
        call = ring.write if transfer.is_write else ring.read
        address = transfer.lease.io_address + transfer.offset
        assert transfer.file is not None
        transfer.sent = True
        try:
            transfer.ticket = call(transfer.file, offset, address, nbytes, priority=transfer.priority)
        except InfinityError as error:
            return with_transfer(error, transfer)
        moved = self._moved[directory]
        moved[transfer.is_write] += nbytes
        moved[2 + transfer.is_write] += 1
        return None

    def _release_all(self) -> None:
        self._placed.clear()  # the memory goes with its tensors, and not when a collector finds the store
        with contextlib.ExitStack() as stack:  # the last pushed goes first; each goes, whatever fails
            if self._memory is not None:
                stack.callback(self._memory.close)
            for arena in self._arenas[len(self._rings) :]:
                stack.callback(arena.close)
            for arena, ring in zip(self._arenas, self._rings, strict=False):
                stack.callback(self._close_arena, arena, ring)
            for ring in self._rings:
                stack.callback(ring.close)

    def _close_arena(self, arena: Arena, ring: Ring) -> None:
        if ring.stats().blocks_in_flight > 0:
            arena.close(in_flight=True)
        elif not asked_apart(arena.close, lambda: self.left() if self.given_up else None):
            _log.warning("the drive of %s does not answer: its space may stay taken", arena.directory)
