"""The pool of pinned host memory: quotas of equal buffers, lent as leases.

[Note: one owner] A buffer that the kernel or the device has received belongs to one *lease* until its
ticket or event is complete. Each user of a lease (the caller that requested it, the store during a
transfer) holds a handle of its own; the buffer returns to the pool when the last handle is
released. A user that releases a lease while a copy still reads it names the copy's event: the pool lends the
buffer again when the event is complete, and nobody waits before. A buffer whose transfer never completed is
quarantined: it never returns. With ``protect=True`` the pool is a memfd that is mapped twice: the kernel gets
one mapping, and the CPU's is protected between `Lease.begin_io` and `Lease.end_io`, so that a touch
of a buffer in flight is a fault where it happens. (Protecting the only mapping would make the
kernel's own access fail with EFAULT.)
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch

from infinity.core.errors import OF_A_FORK, BudgetError, ClosedError, DeadlineError, StorageError
from infinity.core.locks import lock
from infinity.core.sizes import ALIGNMENT, ceil_to, format_size
from infinity.core.waiting import POLL, Bell
from infinity.hardware.streams import Event, is_over, wait_over

from .memory import HostMapping, Pins

#: What ends a transfer is a call, not a thread: with helpers, look again so soon (seconds).
_HELP: Final = 0.005
#: What a transfer may still write to is kept mapped for the life of the process.
_KEPT: list[HostMapping] = []


class QuotaStats(NamedTuple):
    """One quota's figures: bytes (of whole buffers), waits, and seconds spent waiting."""

    total: int
    in_use: int
    peak: int
    quarantined: int
    leases: int
    waits: int
    wait_seconds: float


class _QuotaBuffers:
    def __init__(self, name: str, buffer_nbytes: int, buffers: int) -> None:
        self.name = name
        self.buffer_nbytes = buffer_nbytes
        self.stride = ceil_to(buffer_nbytes, ALIGNMENT)
        self.buffers = buffers
        self.mapping: HostMapping | None = None
        self.free = list(range(buffers - 1, -1, -1))  # the last one home is the warmest
        self.keep, self.borrowed = buffers, 0  # never, and now
        self.returned: deque[list[int]] = deque()  # what was borrowed, and is not used any more
        self.late: deque[_Buffer] = deque()  # given up by all, and copies may still read them
        self.in_use = self.peak = self.quarantined = self.leases = self.waits = 0
        self.wait_seconds = 0.0

    def take_returned(self) -> None:
        while self.returned:
            indices = self.returned.popleft()
            self.in_use -= len(indices)
            self.borrowed -= len(indices)
            self.free[:0] = indices
        for _ in range(len(self.late)):
            if all(is_over(event) for event in self.late[0].after):
                self.free.append(self.late[0].index)
                self.late.popleft()
                self.in_use -= 1
            else:
                self.late.rotate(-1)


class _Buffer:
    """What the handles of one lease share. Guarded by the pool's lock."""

    __slots__ = ("active", "after", "index", "lost", "mapping", "quota", "users")

    def __init__(self, quota: _QuotaBuffers, mapping: HostMapping, index: int) -> None:
        self.quota = quota
        self.mapping = mapping
        self.index = index
        self.users = 1
        self.lost = False
        self.after: tuple[Event, ...] = ()  # copies that read it
        self.active: list[tuple[int, int, int]] = []  # (begin, end, protection), of the mapping


class Lease:
    """One user's handle on a buffer of pinned memory; see [Note: one owner].

    `address` is where the CPU finds the bytes, `io_address` where the kernel does; both are
    multiples of 4096. `nbytes` is what was asked for; `room` is what the buffer holds, to the next
    multiple of 4096, so that a transfer may be padded. `released`: this handle was given up. `is_guarded`:
    `begin_io` and `end_io` do anything.
    """

    __slots__ = ("_buffer", "_pool", "address", "io_address", "is_guarded", "nbytes", "released", "room")

    def __init__(self, pool: PinnedPool, buffer: _Buffer, nbytes: int) -> None:
        offset = buffer.index * buffer.quota.stride
        self._pool = pool
        self._buffer = buffer
        self.released = False
        self.is_guarded = buffer.mapping.twice
        self.address = buffer.mapping.address + offset
        self.io_address = buffer.mapping.io_address + offset
        self.nbytes = nbytes
        self.room = buffer.quota.stride

    def tensor(
        self, dtype: torch.dtype = torch.uint8, offset: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """Return `numel` elements (default: all that fit) from byte `offset` on, without copying.

        Raises:
            ClosedError: the lease was released, or belongs to another process.
            ValueError: the range does not lie within the lease.
        """
        if self._pool._pid != os.getpid():
            self._pool._check_process()
        if self.released:
            raise ClosedError("this lease was released", cure="hold it, or `retain` it, while you use it")
        if numel is None:
            numel = (self.nbytes - offset) // dtype.itemsize
        nbytes = numel * dtype.itemsize
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} are not within a lease of {self.nbytes}")
        base = self._buffer.index * self._buffer.quota.stride
        return self._buffer.mapping.tensor(base + offset, nbytes, dtype)

    def retain(self) -> Lease:
        """Return a handle for a second user; the buffer goes home after the last `release`."""
        if self._pool._pid != os.getpid():
            self._pool._check_process()
        with self._pool._lock:
            if self.released:
                raise ClosedError("this lease was released", cure="`retain` it before you release it")
            lease = Lease(self._pool, self._buffer, self.nbytes)
            self._buffer.users += 1  # not before: where there is no memory for it, nobody would release it
        return lease

    def release(self, after: Event | None = None) -> None:
        """Give this handle up; the buffer is not lent again before `after`. A second call does nothing."""
        pool, buffer = self._pool, self._buffer
        if pool._pid != os.getpid():  # in a child the lock may be held, for good
            return
        with pool._lock:
            if self.released:
                return
            if after is not None:
                buffer.after += (after,)
            quota = buffer.quota
            if buffer.users == 1 and not buffer.lost:
                quota.late.append(buffer)
            self.released = True
            buffer.users -= 1
            if buffer.users or buffer.lost:
                return
            if buffer.after or quota.returned or len(quota.late) > 1:
                with contextlib.suppress(MemoryError):  # it stays among the late ones
                    quota.take_returned()
            else:
                quota.free.append(quota.late.pop().index)
                quota.in_use -= 1
        if pool._home.sleepers:
            pool._home.ring()

    def quarantine(self) -> None:
        """Keep the buffer from ever going home: a transfer may still reach it. Counted once."""
        pool, buffer = self._pool, self._buffer
        with pool._lock:
            if not buffer.lost:
                buffer.lost = True
                buffer.quota.in_use -= 1
                buffer.quota.quarantined += 1
                _KEPT.append(buffer.mapping)
        pool._home.ring()

    def begin_io(self, offset: int = 0, nbytes: int | None = None, *, into: bool) -> None:
        """Mark a range (bytes, multiples of 4096) as given to the kernel, which writes `into` it
        or reads from it. Ranges may overlap; each needs its `end_io`. Free unless protected."""
        if self._buffer.mapping.twice:
            part = self._io_range(offset, nbytes, into)
            with self._pool._lock:
                self._buffer.active.append(part)
                self._protect(part)

    def end_io(self, offset: int = 0, nbytes: int | None = None, *, into: bool) -> None:
        """Undo one `begin_io` of the same arguments."""
        if self._buffer.mapping.twice:
            part = self._io_range(offset, nbytes, into)
            with self._pool._lock:
                self._buffer.active.remove(part)
                self._protect(part)

    def _io_range(self, offset: int, nbytes: int | None, into: bool) -> tuple[int, int, int]:
        base = self._buffer.index * self._buffer.quota.stride
        size = self.room - offset if nbytes is None else ceil_to(nbytes, ALIGNMENT)
        return base + offset, base + offset + size, 0 if into else mmap.PROT_READ

    def _protect(self, part: tuple[int, int, int]) -> None:
        """Set the protection of each page of `part` to the strictest that its ranges ask for."""
        begin, end, _ = part
        for page in range(begin, end, ALIGNMENT):
            wanted = [p for low, high, p in self._buffer.active if low <= page < high]
            self._buffer.mapping.protect(
                page, ALIGNMENT, min(wanted, default=mmap.PROT_READ | mmap.PROT_WRITE)
            )

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _neighbours(indices: list[int]) -> list[list[int]]:
    """Return sorted `indices` as runs of consecutive ones."""
    begins = [i for i, index in enumerate(indices) if not i or indices[i - 1] + 1 != index]
    return [indices[i:j] for i, j in zip(begins, [*begins[1:], len(indices)], strict=True)]


#: What watches memory that was lent without a lease. A `weakref.finalize` would do nothing once handlers at
#: exit run, some of which save.
_away: dict[int, weakref.ref[Any]] = {}


def _return_when_gone(
    owner: object, returned: deque[list[int]], run: list[int], mapping: HostMapping
) -> None:
    """Put `run` into `returned` when `owner` is garbage; `mapping` stays until then."""

    def home(gone: weakref.ref[Any], mapping: HostMapping = mapping) -> None:
        returned.append(run)
        del _away[id(gone)]

    reference = weakref.ref(owner, home)
    _away[id(reference)] = reference


class PinnedPool:
    """Pinned host memory in quotas of equal buffers, lent as leases.

    Args:
        quotas: for each name, bytes of a buffer and number of buffers. A quota without bytes exists
            and lends nothing.
        pins: the device that the memory is pinned for; None: it is not.
        node: the NUMA node that the memory prefers.
        protect: map everything twice; see [Note: one owner]. For tests: slow.
        keep: buffers of each quota that `borrow` leaves; of one that is not named all.

    Raises:
        BudgetError: the system has not so much memory.
    """

    def __init__(
        self,
        quotas: Mapping[str, tuple[int, int]],
        *,
        keep: Mapping[str, int] | None = None,
        pins: Pins | None = None,
        node: int | None = None,
        protect: bool = False,
    ) -> None:
        self._lock = lock("pool", reentrant=True)
        self._home = Bell()
        self._pid = os.getpid()
        self._closed = False
        self._reclaimers: list[Callable[[float], bool]] = []
        self._quotas: dict[str, _QuotaBuffers] = {}
        try:
            for name, (buffer_nbytes, buffers) in quotas.items():
                if buffer_nbytes < 0 or buffers < 0:
                    raise ValueError(f"quota {name!r} of {buffers} buffers of {buffer_nbytes} bytes")
                quota = _QuotaBuffers(name, buffer_nbytes, buffers if buffer_nbytes else 0)
                if quota.buffers:
                    quota.mapping = HostMapping(
                        quota.stride * quota.buffers,
                        pins=pins,
                        twice=protect,
                        node=node,
                    )
                quota.keep = (keep or {}).get(name, quota.buffers)
                self._quotas[name] = quota
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of all quotas together."""
        return sum(q.stride * q.buffers for q in self._quotas.values())

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """Return (io address, bytes) of each mapping, for rings that register buffers."""
        maps = [q.mapping for q in self._quotas.values() if q.mapping is not None]
        return tuple((m.io_address, m.nbytes) for m in maps)

    def try_lease(self, quota: str, nbytes: int) -> Lease | None:
        """Return a lease of `nbytes` if the quota has a free buffer, else None.

        Raises:
            BudgetError: no buffer of the quota is so large, or there is no such quota.
            ClosedError: the pool was closed, or belongs to another process.
        """
        if self._pid != os.getpid():
            self._check_process()
        share = self._quota(quota, nbytes)
        with self._lock:
            lease = self._take(share, nbytes)
        if lease is None and self._reclaimers:
            for reclaim in tuple(self._reclaimers):
                reclaim(0.0)
            with self._lock:
                lease = self._take(share, nbytes)
        return lease

    def lease(self, quota: str, nbytes: int, timeout: float | None = None) -> Lease:
        """Return a lease of `nbytes`; block until the quota has a free buffer.

        Raises:
            DeadlineError: none came home within `timeout` seconds.
            StorageError: none ever will: every buffer is quarantined.
            BudgetError, ClosedError: as `try_lease`.
        """
        self._check_process()
        share = self._quota(quota, nbytes)
        with self._lock:
            lease = self._take(share, nbytes)
            if lease is not None:
                return lease
            share.waits += 1
        start = time.monotonic()
        try:
            while lease is None:
                left = POLL if timeout is None else start + timeout - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"no lease of the quota {quota!r} was returned in {timeout} s",
                        expected=f"a free buffer of {format_size(share.buffer_nbytes)}",
                        found=f"{share.in_use} of {share.buffers} buffers lent, "
                        f"{share.quarantined} in quarantine",
                        cure="give the quota more buffers (raise host_memory), or look for a slow drive",
                    )
                reclaimed = [reclaim(min(left, _HELP)) for reclaim in tuple(self._reclaimers)]
                with self._lock:
                    lease = self._take(share, nbytes)
                    late = share.late[0] if share.late else None
                if lease is None and late is not None and timeout is None:
                    for event in late.after:
                        wait_over(event)
                elif lease is None and not any(reclaimed):
                    self._home.wait(
                        lambda: share.free or self._closed, min(left, _HELP if reclaimed else POLL)
                    )
                    with self._lock:
                        lease = self._take(share, nbytes)
            return lease
        finally:
            with self._lock:
                share.wait_seconds += time.monotonic() - start

    def borrow(self, nbytes: int) -> list[torch.Tensor]:
        """Return buffers that nobody uses, and that the quotas do without, as uint8 tensors of neighbouring
        buffers: about `nbytes`, or what there is. They go home when the last tensor over them is gone."""
        self._check_process()
        runs: list[torch.Tensor] = []
        with self._lock:
            for quota in () if self._closed else self._quotas.values():
                quota.take_returned()
                spare = min(len(quota.free), quota.buffers - quota.quarantined - quota.borrowed - quota.keep)
                count = min(spare, -(-nbytes // quota.stride)) if quota.stride else 0
                if quota.mapping is None or count <= 0:
                    continue
                chosen = sorted(quota.free)[-count:]
                quota.free = [i for i in quota.free if i not in chosen]
                quota.in_use += count
                quota.borrowed += count
                nbytes -= count * quota.stride
                for run in _neighbours(chosen):
                    owner = (ctypes.c_char * (len(run) * quota.stride)).from_address(
                        quota.mapping.address + run[0] * quota.stride
                    )
                    # A finalizer only signals: the next lease takes them home. It keeps the mapping, too.
                    _return_when_gone(owner, quota.returned, run, quota.mapping)
                    runs.append(torch.frombuffer(owner, dtype=torch.uint8))
        return runs

    def add_reclaimer(self, reclaim: Callable[[float], bool]) -> None:
        """Register `reclaim(seconds)`, which a thread calls, without a lock, while it waits for a lease.

        `reclaim` may wait so long for the holders of leases, and returns whether there were any."""
        with self._lock:
            self._reclaimers.append(reclaim)

    def remove_reclaimer(self, reclaim: Callable[[float], bool]) -> None:
        """Undo `add_reclaimer`."""
        with self._lock:
            self._reclaimers.remove(reclaim)

    def _quota(self, name: str, nbytes: int) -> _QuotaBuffers:
        quota = self._quotas.get(name)
        if quota is None or nbytes > quota.buffer_nbytes or nbytes < 0:
            all_ = (f"{q.name}: {q.buffers} × {format_size(q.buffer_nbytes)}" for q in self._quotas.values())
            raise BudgetError(
                f"no lease of the quota {name!r} can hold {format_size(nbytes)}",
                expected=", ".join(all_) or "a pool with quotas",
                found=f"{nbytes} bytes of {name!r}",
                cure="raise host_memory, or lower chunk_elements",
            )
        return quota

    def _take(self, quota: _QuotaBuffers, nbytes: int) -> Lease | None:
        if self._closed:
            raise ClosedError("the pinned pool was closed")
        if quota.quarantined == quota.buffers or quota.mapping is None:
            raise StorageError(
                f"the quota {quota.name!r} has no buffer left",
                expected=f"{quota.buffers} buffers",
                found=f"{quota.quarantined} in quarantine, after transfers that never completed",
                cure="replace the drive that does not answer, then start again",
            )
        if quota.returned or quota.late:
            quota.take_returned()
        if not quota.free:
            return None
        lease = Lease(self, _Buffer(quota, quota.mapping, quota.free[-1]), nbytes)
        quota.free.pop()  # not before: where there is no memory for the lease, the buffer stays at home
        quota.in_use += 1
        quota.leases += 1
        quota.peak = max(quota.peak, quota.in_use)
        return lease

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                "pinned memory belongs to the process that created it",
                found=f"process {os.getpid()}, a child of {self._pid}",
                cure=OF_A_FORK,
            )

    def stats(self) -> dict[str, QuotaStats]:
        """Return the figures of each quota."""
        with self._lock:
            for quota in self._quotas.values():
                quota.take_returned()
            return {
                name: QuotaStats(
                    total=q.stride * q.buffers,
                    in_use=q.stride * q.in_use,
                    peak=q.stride * q.peak,
                    quarantined=q.stride * q.quarantined,
                    leases=q.leases,
                    waits=q.waits,
                    wait_seconds=q.wait_seconds,
                )
                for name, q in self._quotas.items()
            }

    def close(self) -> None:
        """Lend nothing more, unpin, and let go of the memory (leases still out keep theirs)."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            mappings = [quota.mapping for quota in self._quotas.values()]
            for quota in self._quotas.values():
                quota.mapping = None
        self._home.ring()
        for mapping in mappings:
            if mapping is not None and not any(mapping is kept for kept in _KEPT):
                mapping.unpin()
