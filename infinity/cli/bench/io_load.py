"""What `bench io` and `tune` put on a drive: a file of our own, transfers, and checks of every byte.

[Note: a bench leaves nothing behind] The file has no name (O_TMPFILE), so it is gone when the process
ends, however it ends. Its space is taken at once, and never the last of the disk.

[Note: what a bench verifies] Buffers hold random bytes, changed before every pass that writes. For each
grain of the file the CRC-32C of the bytes that were last sent to it is kept; reads are compared with
it, the last ones of each pass and a sample after each pass that wrote, off the clock. A lost, torn
or misdirected write, or a read of other bytes, is a `CorruptionError`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from infinity.api.this_machine import check_directory, refused
from infinity.core.errors import BudgetError, CorruptionError, DeadlineError, DirectoryError
from infinity.core.sizes import GiB, MiB, ceil_to, format_size
from infinity.hardware.aio import DirectFile, Ring, Ticket, crc32c
from infinity.hardware.probe import available_host_memory, make_direct, nameless_file
from infinity.storage.memory import HostMapping

TRANSFER: Final = 8 * MiB  #: one ticket of a sequential pass: about a section of a chunk
PATTERNS: Final = ("read", "write", "mixed")
_quarantine: list[HostMapping] = []  # memory that the kernel may still touch


class Settings(NamedTuple):
    """How a ring is opened."""

    backend: str
    block_bytes: int
    queue_depth: int
    threads: int = 4


class Job(NamedTuple):
    """What a pass does, in order. `single`: a ticket per block, for latencies; else tickets of about `chunk`
    bytes, as the engine has them."""

    pattern: str
    single: bool = False
    chunk: int = TRANSFER

    @property
    def checking(self) -> Job:
        """What reads back what was written."""
        return Job("read", chunk=self.chunk)

    def transfer(self, settings: Settings) -> int:
        """Return bytes of one ticket."""
        block = settings.block_bytes
        return block if self.single else ceil_to(self.chunk, block)

    def tickets(self, settings: Settings) -> int:
        """Return how many tickets are under way at once: enough that the kernel's queue stays full."""
        if self.single:
            return 2 * settings.queue_depth
        full = -(-settings.queue_depth * settings.block_bytes // self.transfer(settings))
        return ceil_to(full + 2, 2)  # even: in a mixed pass every other buffer is read into

    def window(self, settings: Settings) -> int:
        """Return bytes of all of them."""
        return self.tickets(settings) * self.transfer(settings)


@dataclass
class Tally:
    """What one pass moved on one directory, or on several together."""

    read: int = 0
    written: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  #: seconds per ticket

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return (self.read + self.written) / self.seconds if self.seconds else 0.0


def usable_bytes(directory: str) -> tuple[int, int]:
    """Return (bytes that a bench may take in `directory`, bytes that it leaves free)."""
    system = os.statvfs(directory)
    reserve = min(GiB, system.f_blocks * system.f_frsize // 10)
    return max(0, system.f_bavail * system.f_frsize - reserve), reserve


def check_space(directory: str, nbytes: int, what: str, cure: str) -> None:
    """Raise DirectoryError if `nbytes`, which `what` takes, are more than a bench may take in `directory`."""
    usable, reserve = usable_bytes(directory)
    if nbytes > usable:
        raise DirectoryError(
            f"{directory} has not the room for {what}",
            errno=errno.ENOSPC,
            path=directory,
            expected=f"{format_size(nbytes)} free, and {format_size(reserve)} that stay free",
            found=f"{format_size(shutil.disk_usage(directory).free)} free",
            cure=cure,
        )


class Load(contextlib.AbstractContextManager["Load"]):
    """A nameless file of `nbytes` in `directory`, buffers, and what the file must hold.

    Args:
        grain: bytes that one CRC covers: the smallest block of any job, a multiple of 4096.
        window: bytes of the buffers: the largest window of any job.

    Raises:
        DirectoryError: the directory is unfit, or has not the room; the disk is never filled.
        BudgetError: host memory has not the room for the buffers.
    """

    def __init__(self, directory: str, nbytes: int, *, grain: int, window: int) -> None:
        self.directory, self.nbytes, self.grain = directory, nbytes, grain
        check_directory(directory)
        usable = usable_bytes(directory)[0] // MiB
        cure = f"--size {usable}MiB" if usable >= 16 else "free space, or another drive"
        check_space(directory, nbytes, f"a file of {format_size(nbytes)}", cure)
        if window > (have := available_host_memory() * 8 // 10):
            raise BudgetError(
                "a window of buffers does not fit host memory",
                expected=f"about {format_size(window)}",
                found=f"{format_size(have)} available",
                cure="a smaller --block or --depth",
            )
        self.mapping = HostMapping(window, populate=True)
        self._words = self.mapping.tensor(0, window).numpy().view(np.uint64)
        generator = np.random.default_rng()
        for begin in range(0, len(self._words), MiB):
            part = self._words[begin : begin + MiB]
            part[:] = generator.integers(0, 1 << 64, len(part), dtype=np.uint64)
        self._sent = np.zeros(window // grain, dtype=np.uint32)  # CRC of each grain of the buffers
        self._holds = np.zeros(nbytes // grain, dtype=np.uint32)  # CRC of each grain of the file
        self._known = np.zeros(nbytes // grain, dtype=np.bool_)
        self.verified = 0  #: bytes that were compared so far
        self._cursor = self._swap = 0
        fd = nameless_file(directory)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                direct = make_direct(fd)
            except OSError as error:
                raise refused(directory, error) from error
            self.file = DirectFile(directory, fd, direct=direct, owned=True)
            undo.pop_all()

    @property
    def name(self) -> str:
        """A path by which another process can open the file as long as this one has it."""
        return f"/proc/{os.getpid()}/fd/{self.file.fd}"

    def forget(self) -> None:
        """The file was written by others: nothing of it is known any more."""
        self._known[:] = False

    def __exit__(self, *_: object) -> None:
        """Let the file and the buffers go. Rings must be closed."""
        self.file.close()

    @contextlib.contextmanager
    def ring(self, settings: Settings) -> Iterator[Ring]:
        """Open a ring on this file as the engine's store does."""
        ring = Ring("bench", path=self.directory, **settings._asdict(), deadline=60.0)
        try:
            ring.register_file(self.file)
            ring.register_buffer(self.mapping.io_address, self.mapping.nbytes)
            yield ring
        finally:
            try:
                ring.forget_file(self.file.fd)
                ring.close()
            except DeadlineError:
                _quarantine.append(self.mapping)
                raise

    def fill(self, settings: Settings, chunk: int = TRANSFER) -> float:
        """Write all of it once; return bytes per second. What was never written is read without the drive."""
        with self.ring(settings) as ring:
            return run_pass([(self, ring)], settings, Job("write", chunk=chunk), 3600, limit=self.nbytes).rate

    def read(self, ring: Ring, offsets: Iterable[int], nbytes: int) -> None:
        """Read `nbytes` at each of `offsets` into the buffers, one behind the other."""
        address = self.mapping.io_address
        tickets = [ring.read(self.file, at, address + i * nbytes, nbytes) for i, at in enumerate(offsets)]
        for ticket in tickets:
            ticket.wait()

    # ---- passes ----

    def refresh(self, nbytes: int) -> None:
        """Change the first `nbytes` of the buffers, and note their CRCs."""
        self._words[: nbytes // 8] ^= np.uint64(random.getrandbits(64) | 1)
        for grain in range(nbytes // self.grain):
            self._sent[grain] = crc32c(self.mapping.address + grain * self.grain, self.grain)

    def _offsets(self, job: Job, transfer: int) -> tuple[Iterator[int], Iterator[int]]:
        """Return where to read and where to write, round and round; `mixed` reads one half and writes
        the other, as the optimizer reads the slot in use and writes the other; it changes sides each time."""
        self._swap ^= 1
        parts = 2 if job.pattern == "mixed" else 1
        count, start = self.nbytes // parts // transfer, self._cursor // transfer

        def around(part: int) -> Iterator[int]:
            return ((part * count + (start + turn) % count) * transfer for turn in itertools.count())

        return around(self._swap % parts), around((1 - self._swap) % parts)

    def run(
        self, ring: Ring, settings: Settings, job: Job, stop: threading.Event, until: float, limit: int | None
    ) -> Tally:
        """Move bytes, two tickets at least, until `until` (perf_counter) or up to `limit` of them; complete
        what is under way; return what was moved."""
        transfer, slots = job.transfer(settings), job.tickets(settings)
        reads, writes = self._offsets(job, transfer)
        tally, pending = Tally(), deque[tuple[Ticket, int, bool]]()
        placed: dict[int, int] = {}  # slot → offset that was read into it
        base, clock, grain = self.mapping.io_address, time.perf_counter, self.grain
        begin_cpu, start, number, offset = time.thread_time(), clock(), 0, 0

        def finish() -> None:
            ticket, slot, write = pending.popleft()
            ticket.wait()
            if write:
                tally.written += transfer
            else:
                tally.read += transfer
                placed[slot] = ticket.offset
            tally.latencies.append(ticket.seconds[1])

        most = limit // transfer if limit is not None else 1 << 62
        while number < most and (clock() < until or number < 2) and not stop.is_set():
            if len(pending) == slots:
                finish()
            slot = number % slots
            write = job.pattern == "write" or (job.pattern == "mixed" and number % 2 == 1)
            address, number = base + slot * transfer, number + 1
            if write:
                offset = next(writes)
                sent, held = slot * transfer // grain, offset // grain
                count = transfer // grain
                self._holds[held : held + count] = self._sent[sent : sent + count]
                self._known[held : held + count] = True
                ticket = ring.write(self.file, offset, address, transfer)
            else:
                offset = next(reads)
                ticket = ring.read(self.file, offset, address, transfer)
            pending.append((ticket, slot, write))
        while pending:
            finish()
        tally.seconds, tally.cpu_seconds = clock() - start, time.thread_time() - begin_cpu
        self._cursor = offset + transfer if job.pattern != "mixed" else offset % (self.nbytes // 2)
        for slot, where in placed.items():
            self._compare(slot * transfer, where, transfer)
        return tally

    def verify(self, ring: Ring, settings: Settings, job: Job, limit: int) -> None:
        """Read a sample of up to `limit` bytes of what is known, and compare."""
        piece = job.checking.transfer(settings)
        step = max(1, piece // self.grain)
        starts = [s for s in range(0, len(self._known) - step + 1, step) if self._known[s : s + step].any()]
        random.shuffle(starts)
        starts = starts[: max(1, limit // piece)]
        slots = job.checking.tickets(settings)
        for begin in range(0, len(starts), slots):
            group = starts[begin : begin + slots]
            self.read(ring, [start * self.grain for start in group], piece)
            for slot, start in enumerate(group):
                self._compare(slot * piece, start * self.grain, piece)

    def _compare(self, place: int, offset: int, nbytes: int) -> None:
        for at in range(0, nbytes, self.grain):
            index = (offset + at) // self.grain
            if not self._known[index]:
                continue
            self.verified += self.grain
            found = crc32c(self.mapping.address + place + at, self.grain)
            if found != int(self._holds[index]):
                raise CorruptionError(
                    f"{self.directory} gave back other bytes than were written",
                    path=self.directory,
                    offset=offset + at,
                    nbytes=self.grain,
                    expected=f"CRC-32C {int(self._holds[index]):08x}",
                    found=f"{found:08x} at offset {offset + at} of the bench's file",
                    cure="do not trust this drive: look at dmesg and smartctl, and try another",
                )


def _fulfil(future: Future[Tally], call: Callable[[], Tally]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def run_pass(
    pairs: Sequence[tuple[Load, Ring]], settings: Settings, job: Job, seconds: float, limit: int | None = None
) -> Tally:
    """Run one pass on several directories at once, each with a thread of its own; add them up.

    It ends after `seconds`, or `limit` bytes per directory. CPU seconds are those of the rings and of
    the threads that feed them.
    """
    if job.pattern != "read":
        for load, _ in pairs:
            load.refresh(job.window(settings))
    before = sum(ring.stats().cpu_seconds for _, ring in pairs)
    stop, start = threading.Event(), time.perf_counter()
    running: list[Future[Tally]] = []
    try:
        for load, ring in pairs:
            running.append(Future())
            call = functools.partial(load.run, ring, settings, job, stop, until=start + seconds, limit=limit)
            # Not a pool's thread: the program's end would wait for one that a drive keeps.
            told = (running[-1], call)
            threading.Thread(target=_fulfil, args=told, name="infinity-bench", daemon=True).start()
        wait(running, return_when=FIRST_EXCEPTION)
    except BaseException:
        stop.set()
        wait(running, 5.0)  # an interrupt; what is under way ends first, or at its deadline
        raise
    stop.set()
    wait(running)
    tallies = [each.result() for each in running]
    cpu_seconds = sum(ring.stats().cpu_seconds for _, ring in pairs) - before
    return Tally(
        read=sum(t.read for t in tallies),
        written=sum(t.written for t in tallies),
        seconds=max(t.seconds for t in tallies),
        cpu_seconds=cpu_seconds + sum(t.cpu_seconds for t in tallies),
        latencies=[seconds for t in tallies for seconds in t.latencies],
    )
