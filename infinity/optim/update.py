"""The update: read chunk c+1 ‖ update c ‖ write c−1.

One pass of the kernel unscales, clips, decays, updates and writes the compute parameters. It
runs where the state is: on the CPU for `host` and `nvme`, on the device for `device`, with the
same bits ([Note: one rounding per operation]).

[Note: a feed] Work for the update arrives all at once, by `step()`, or unit by unit while a backward runs.
The worker does not distinguish these: it takes the work that has arrived. If there is none, it passes its
results on and reads the state of the expected next units ahead.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from infinity.core.commits import in_backward
from infinity.core.errors import GradientError, OutOfMemoryError
from infinity.core.sizes import NORM_BLOCK, Tier
from infinity.core.spans import Recorder, now
from infinity.core.waiting import Bell
from infinity.hardware import adam_reference, cpu_adam, halves
from infinity.hardware.device import Device, Event, HostStream, Task
from infinity.hardware.muon import Muon
from infinity.hardware.ranks import Comm
from infinity.params.load import Loader
from infinity.params.param import ShardedParam, plain_name
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates
from infinity.planning.partition import Chunk
from infinity.planning.parts import update_nbytes
from infinity.storage.pipeline import abandon, pipeline
from infinity.storage.store import Slot, Version

from .chunk_io import ChunkIO, Tiers, open_chunk
from .matrices import Matrices, Matrix, Round, Visit, visits_of
from .rules import Options

#: What helps where an update that cannot go on has changed something.
LOST: Final = (
    "build the model again and load the last checkpoint (`infinity.load`), with more memory: free some, or "
    "lower host_memory, device_memory or chunk_elements"
)


class ParamUpdate(NamedTuple):
    """The scalars of one parameter's update, as they were when `step()` was called. `step` is 1 at the first;
    of options, by how much they raise it."""

    lr: float
    weight_decay: float
    step: int
    grad_scale: float
    maximize: bool
    options: Options

    def of(self, sharded: ShardedParam, grad_scale: float) -> ParamUpdate:
        """Count an update of a parameter, and return it."""
        sharded.step = step = sharded.step + self.step
        of_group = self.lr, self.weight_decay
        return ParamUpdate(*of_group, max(step, 1), grad_scale, self.maximize, self.options)

    def named(self) -> dict[str, object]:
        """Return everything by name, the options of the rule one by one."""
        return {name: v for name, v in self._asdict().items() if name != "options"} | self.options._asdict()


class ChunkUpdate(NamedTuple):
    """A chunk and what is to be done to its segments, by parameter index; others stay.

    `visit`: of a chunk of a matrix, which of the two of [Note: two visits], and `round` what it is part of.
    `grad_dtype` is that of the chunk's gradient when `step()` was called, None: it is zero; and
    `gradient` is which version. What happens to `p.grad` afterwards is the next step's. What is made goes to
    the device `after` an event of it.
    """

    chunk: Chunk
    params: dict[int, ParamUpdate]
    grad_dtype: torch.dtype | None
    gradient: Slot
    after: Event | None = None
    visit: Visit | None = None
    round: Round | None = None

    @property
    def is_last(self) -> bool:
        """Whether all of the chunk is updated then."""
        return self.visit is None or self.visit.is_last


class Batch(NamedTuple):
    """Chunks that are to be updated, `after` an event of the device.

    `landed`: the task that takes their gradients to the tier; None: they are there. Its result is an event of
    the device. `make` returns what is to be done to the chunks; their gradients are there then.
    """

    after: Event | None
    landed: Task | None
    make: Callable[[], Sequence[ChunkUpdate]]


class Feed:
    """What is to be updated, as it comes: [Note: a feed]. One thread adds, and the worker takes."""

    def __init__(self, expected: Iterable[Chunk] = ()) -> None:
        self.expected = {chunk.id: chunk for chunk in expected}  # what has not come, in the order it should
        self._batches: deque[Batch] = deque()
        self._bell = Bell()
        self._ended = False

    def add(self, batch: Batch) -> None:
        """Add a batch."""
        self._batches.append(batch)
        self._bell.ring()

    def end(self) -> None:
        """Nothing comes any more."""
        self._ended = True
        self._bell.ring()

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return not self._ended

    @property
    def is_over(self) -> bool:
        """Whether all that comes has been taken."""
        return self._ended and not self._batches

    def take(self, device: Device, *, wait: bool) -> Sequence[ChunkUpdate]:
        """Take the next batch with work, if its gradients are there, with the device's current stream behind
        them; else nothing. `wait`: until they are, or nothing comes any more."""
        while True:
            while wait and not self._batches and not self._ended:
                self._bell.wait(lambda: self._batches or self._ended)
            if not self._batches:
                return ()
            after, landed, make = self._batches[0]
            if landed is not None:
                if not (wait or landed.is_over):
                    return ()
                device.wait_on_device(landed.result())
            device.wait_on_device(after)
            work = make()
            if after is not None:
                work = [update._replace(after=after) for update in work]
            self._batches.popleft()
            for update in work:
                self.expected.pop(update.chunk.id, None)
            if work:
                return work


class Updater:
    """Runs updates on a worker, behind the user's back, and reads state ahead for them."""

    def __init__(
        self, tiers: Tiers, updates: Updates, loader: Loader, recorder: Recorder, owners: Comm
    ) -> None:
        """`owners`: of matrices; see `Matrices`."""
        self._tiers = tiers
        self._recorder = recorder
        self._updates = updates
        self._loader = loader
        self._stream: HostStream | None = None
        self._ahead: dict[int, ChunkIO] = {}  # what was read ahead, by chunk
        self._task: Task | None = None
        self._feed = Feed()
        #: Chunks posted whose state the store does not know of yet, in the order of the work.
        self._unwritten: dict[int, Chunk] = {}
        self._reading: set[int] = set()  # chunks that the worker reads ahead
        self._posted = 0  # updates so far: the generation of what is made
        self._matrices = Matrices(tiers, owners)
        self.drift = Drift()

    def next_number(self) -> int:
        """Return the number of the next change of versions: the generation of what it makes."""
        self._posted += 1
        return self._posted

    def post(self, work: Sequence[ChunkUpdate], *, matrices: int = 0, delayed: bool = False) -> None:
        """Start updates on the worker; `wait`, or `Updates` for one unit, tells when. `matrices`: see `add`.
        `delayed`: the copies that are made are for the forward after the next; no back is newer than its
        front."""
        self.begin(delayed=delayed)
        self._tiers.gradients.chunks.reserve({u.chunk.id: u.gradient for u in work})
        self.add([u.chunk for u in work if u.is_last], None, lambda: work, matrices=matrices)
        self.end()

    def begin(self, expected: Iterable[Chunk] = (), *, delayed: bool = False) -> None:
        """Start an update on the worker of what is going to be added, until `end`. `expected`: the chunks, in
        the order in which they should come; their state is read ahead."""
        if self._stream is None:
            self._stream = HostStream("update", there=self._tiers.device.worker)
        early, self._ahead = self._ahead, {}
        self._updates.post((), blocks_loads=not delayed)
        self._feed, self._unwritten = Feed(expected), {}
        self._matrices.begin()
        self._tiers.gradients.chunks.reserve({})
        self.next_number()
        drift = Drift() if delayed else None
        self._task = self._stream.submit(lambda: self._work(early, drift))

    def add(
        self,
        chunks: Sequence[Chunk],
        landed: Task | None,
        make: Callable[[], Sequence[ChunkUpdate]],
        *,
        matrices: int = 0,
    ) -> None:
        """Update `chunks`, all chunks of their units that have an update, when their gradients have `landed`;
        see `Batch`. `matrices`: how many parameters among them are updated as whole matrices."""
        if not chunks:
            return
        after = self._tiers.device.mark()  # the user's stream may still make what the update reads
        self._unwritten |= {chunk.id: chunk for chunk in chunks}
        self._matrices.expect(matrices)
        self._updates.add(chunks)
        self._feed.add(Batch(after, landed, make))

    def end(self) -> None:
        """Nothing is added to the update any more."""
        self._feed.end()

    def wait(self) -> None:
        """Block until all posted updates are complete on their tier; raise their error.

        Raises:
            GradientError: a hook of the user's asks, in the backward that the rest of the update comes from.
        """
        task = self._task
        if task is not None:
            if self._feed.is_open and in_backward():
                raise GradientError(
                    "the program reads parameters or their state in the last backward of a step",
                    expected='with update="backward", such reads after `step()`',
                    found="a read in a hook or a function of that backward, which updates them",
                    cure='read them after `step()`, or train with update="overlap"',
                )
            wait = self._recorder.waits()
            self._updates.wait_all()
            task.wait()  # after an interrupt it is still under way, and the next call waits
            self._task = None
            # When the last kernel has run, what is left are writes.
            self._recorder.waited(wait, ("update", self._updates.finished_at), ("nvme", 0))
        self._updates.check()

    def read_ahead(self, chunks: Iterable[Chunk]) -> None:
        """Start reading the state of `chunks`, in order, as far as there are leases and as the update
        before has handed its writes to the store, which has reads come after them. Then it is exact:
        only an update changes state."""
        if not self._ahead:
            written = itertools.takewhile(lambda chunk: chunk.id not in self._unwritten, chunks)
            self._read_states(written, self._ahead)

    def _read_states(self, chunks: Iterable[Chunk], into: dict[int, ChunkIO]) -> None:
        """Start reading the state of `chunks` as far as there are leases, and they take one."""
        for chunk in chunks:
            if chunk.id not in into:
                needs = self._tiers.places[chunk.id].lease_nbytes
                io = open_chunk(self._tiers, chunk, wait=False) if needs else None
                if io is None:
                    return
                into[chunk.id] = io
                try:
                    io.read_state(early=True)
                except BaseException:
                    into.pop(chunk.id).close()  # an update would take it for read
                    raise

    @property
    def ahead(self) -> int:
        """Chunks whose state was read ahead."""
        return len(self._ahead)

    def drop_ahead(self) -> None:
        """Drop the state that was read ahead: the caller is about to change state, or needs the leases."""
        for number in [*self._ahead]:
            self._ahead[number].close()  # what fails here is closed by the next call
            del self._ahead[number]

    def close(self) -> None:
        """Finish what was posted and end the worker."""
        self._feed.end()
        while self._ahead:
            abandon(self._ahead.popitem()[1].close)
        if self._stream is not None:
            self._stream.close()
        self._matrices.close()

    def _work(self, early: dict[int, ChunkIO], drift: Drift | None) -> None:
        """Update what comes, on the worker. `early`: what was read ahead, by chunk."""
        try:
            with contextlib.closing(self._pipeline(early, drift)) as opened:
                for update, io in opened:
                    self._reading.discard(update.chunk.id)
                    self._update(update, io, drift)
            while early:
                early.popitem()[1].close()  # it was expected, and has not come
            self._matrices.check()
            self.drift = drift or self.drift
        except BaseException as error:
            while early:
                abandon(early.popitem()[1].close)
            found = error
            if is_out_of_memory(error):
                if not self._unwritten and self._feed.is_over:
                    return  # every chunk is updated, and the store keeps their writes
                try:
                    found = self._out_of_memory(error)
                except MemoryError:
                    found = MemoryError()  # not even for what says so
            self._matrices.fail(found)
            self._updates.fail(found)
            raise found from error

    def _pipeline(
        self, early: dict[int, ChunkIO], drift: Drift | None
    ) -> Generator[tuple[ChunkUpdate, ChunkIO]]:
        tiers, feed, todo = self._tiers, self._feed, deque[ChunkUpdate]()
        self._reading.clear()

        def take(wait: bool) -> ChunkUpdate | None:
            if not todo:
                if wait and not feed.is_over:
                    self._read_states([*feed.expected.values()], early)
                if work := feed.take(tiers.device, wait=wait):
                    todo.extend(work)
                    for number in early.keys() - feed.expected.keys() - {u.chunk.id for u in work}:
                        early.pop(number).close()  # it is not updated in this step
            return todo.popleft() if todo else None

        def open_(update: ChunkUpdate, wait: bool) -> ChunkIO | None:
            chunk = update.chunk
            if chunk.id in self._reading:
                return None  # its first visit changes what the second one reads
            io = early.pop(chunk.id, None) or open_chunk(tiers, chunk, wait=wait and not early)
            while io is None and wait:  # read ahead in another order: its leases are all there are
                early.popitem()[1].close()
                io = open_chunk(tiers, chunk, wait=not early)
            return io

        def read(update: ChunkUpdate, io: ChunkIO) -> None:
            self._reading.add(update.chunk.id)
            if drift is not None:
                io.delay()
            io.gradient = update.gradient
            if io.lease is None:
                return
            visit = update.visit
            dtype = update.grad_dtype if visit is None or visit.is_first else None
            is_last = visit is None or visit.is_last
            io.read(gradient=dtype, changes=is_last)

        return pipeline(take, open_, read, most=1 << 30 if tiers.uses_leases else 1)

    def _update(self, update: ChunkUpdate, io: ChunkIO, drift: Drift | None) -> None:
        """Update a chunk when its parts are there, and begin its writes."""
        if io.lease is not None:
            io.wait()
        io.wait_unread()
        begin = now()
        if drift is not None:
            io.copy_master()
            before = drift.before(io)
            _compute(self._tiers, update, io, self._matrices, delayed=True)
            drift.after(before, io)
        else:
            _compute(self._tiers, update, io, self._matrices)
        visit = update.visit
        if is_last := visit is None or visit.is_last:
            io.write(state=False, copy=True, after=update.after)
            self._finish(update.chunk, io)
        if io.lease is not None or not is_last:
            # Who waits for the copy does not wait for the CRCs of the state.
            io.write(state=True, copy=False)
        if is_last:
            self._unwritten.pop(update.chunk.id, None)  # padding that a round visits is nobody's update
        end = now()  # with the CRC of what it made
        self._recorder.updating += end - begin
        if (log := self._recorder.log) is not None:
            log.add("update", begin, end, chunk=update.chunk.id, nbytes=_moved(self._tiers, update, io))

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """Return what says which unit had no memory, and what helps."""
        left = [*self._unwritten.values(), *self._feed.expected.values()]
        what = "the update"
        if left:
            what += f" of unit {self._tiers.units[left[0].unit].layout.name!r}"
        found = str(error).split("\n")[0] or type(error).__name__
        return OutOfMemoryError(
            f"{what} has no memory, and some parameters are updated",
            expected="memory for the update of one chunk",
            found=found,
            cure=LOST,
        )

    def _finish(self, chunk: Chunk, io: ChunkIO) -> None:
        """A chunk's copy is where it belongs, or on its way to a device."""
        place, lease = io.place, io.lease
        if lease is not None and place.copy_tier is Tier.NVME and io.version is not Version.BACK:
            load = self._tiers.units[chunk.unit].last_load
            self._loader.supply(load, chunk, lease, place.leased["copy"])
        if place.has_two:
            io.made(io.version, self._posted)
        self._updates.finish(chunk, io.copied)


class Drift:
    """How far a delayed update moves the parameters away from those that the forward beside it uses:
    ‖θ_t − θ_{t−1}‖ / ‖θ_t‖ over one norm block of the first chunk of each unit (fp32 masters, 2-norms). One
    of every chunk costs too much for a figure: a wait for the device, if the state is there."""

    def __init__(self) -> None:
        self._moved = self._norm = 0.0
        self._units: set[int] = set()  # that are in the figure

    def before(self, io: ChunkIO) -> torch.Tensor | None:
        """Return what `after` compares with; None: the chunk is not in the figure."""
        return None if io.chunk.unit in self._units else io.master[:NORM_BLOCK].clone()

    def after(self, before: torch.Tensor | None, io: ChunkIO) -> None:
        """Add one chunk."""
        if before is None:
            return
        self._units.add(io.chunk.unit)  # not before: an update that stops comes here again
        now = io.master[:NORM_BLOCK]
        try:
            values = now, before.sub_(now)
            if io.on_device:
                squares = adam_reference.sums_of_squares_reference([(each, None) for each in values])
            else:
                squares = [cpu_adam.sum_of_squares(each) for each in values]
            norm, moved = (float(each.sum()) for each in squares)
        except Exception as error:
            if is_out_of_memory(error):
                return  # the chunk is changed by now, and this is but a figure
            raise
        self._norm += norm
        self._moved += moved

    @property
    def value(self) -> float:
        """The figure; 0.0 where nothing was delayed."""
        return math.sqrt(self._moved / self._norm) if self._norm else 0.0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the host or the device has no memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no class for it
    )


def chunk_updates(
    tiers: Tiers, units: Iterable[ParamUnit], updates: Mapping[tuple[int, int], ParamUpdate]
) -> list[ChunkUpdate]:
    """Return the work on the chunks of `units` that `updates`, by unit and parameter, are, in its order. The
    gradients are on their tier."""
    work: list[ChunkUpdate] = []
    for unit in units:
        of_matrices: dict[int, list[ChunkUpdate]] = {}
        for chunk in unit.layout.trainable_chunks:
            params = {
                s.param: updates[unit.index, s.param]
                for s in chunk.segments
                if (unit.index, s.param) in updates
            }
            if params:
                gradient = tiers.store.versions.slot(chunk.id, "gradient")
                dtype = tiers.gradients.chunks.entries[chunk.id].dtype
                update = ChunkUpdate(chunk, params, dtype, gradient)
                if chunk.matrix:
                    of_matrices.setdefault(chunk.segments[0].param, []).append(update)
                else:
                    work.append(update)
        for owned in tiers.rounds[unit.index]:
            of = [(owner, i, updates[unit.index, i]) for owner, i in owned if (unit.index, i) in updates]
            if not of:
                continue
            of_all = (Matrix(owner, i, _options(u)) for owner, i, u in of)
            round_ = Round(unit.index, tuple(of_all))
            pieces = [piece for _, i, _ in of for piece in of_matrices.get(i, ())]
            visits: Iterable[Visit] = visits_of(tiers, [p.chunk for p in pieces]) if pieces else ()
            if not pieces:  # [Note: whole at its owner]
                _, i, update_ = of[0]
                chunk = next(unit.layout.chunks_in(unit.layout.place(i)[0]))
                gradient = tiers.store.versions.slot(chunk.id, "gradient")
                pieces = [ChunkUpdate(chunk, {i: update_}, None, gradient)]
                visits = (Visit(False, True),)
            for visit in visits:
                work += [piece._replace(visit=visit, round=round_) for piece in pieces]
    return work


def _options(update: ParamUpdate) -> Muon:
    assert isinstance(update.options, Muon), "chunks of a matrix have nothing else"
    return update.options


def _moved(tiers: Tiers, update: ChunkUpdate, io: ChunkIO) -> int:
    """Return the bytes of memory that the kernel reads and writes: state, gradient and copy."""
    chunk = update.chunk
    grad = update.grad_dtype or chunk.dtype
    copy = 0 if io.place.begins_with_copy else chunk.dtype.itemsize
    return update_nbytes(chunk.numel, tiers.plans[chunk.id].moments, grad.itemsize, copy)


def _compute(
    tiers: Tiers, update: ChunkUpdate, io: ChunkIO, matrices: Matrices, *, delayed: bool = False
) -> None:
    """Update a chunk."""
    if update.visit is not None:
        _compute_matrix(tiers, update, update.visit, io, matrices)
        return
    segments = _segments(tiers, update)
    if io.on_device:
        _compute_on_device(tiers, update, io, segments, delayed=delayed)
        return
    state = io.sections()
    if io.place.copy_is_master:
        master, moments, out = io.copy, state, None
    else:
        master, moments, out = state[0], state[1:], io.make_copy()  # or the lower halves of the master
        if len(segments) < len(update.chunk.segments) and not io.place.is_split:
            # The copy of a segment that this update skips is its master, rounded.
            cpu_adam.convert(out, master)
    cpu_adam.update_segments(master, moments, io.grad(update.grad_dtype), out, segments)


def _segments(tiers: Tiers, update: ChunkUpdate) -> list[cpu_adam.Segment]:
    """Return what an update does to its chunk. Its key makes stochastic rounding the same wherever the
    elements of a parameter are: it depends on the parameter's name and on its step."""
    segments, key, chunk = [], 0, update.chunk
    rounds = tiers.places[chunk.id].rounds
    for segment in chunk.segments:
        if (of := update.params.get(segment.param)) is not None:
            if rounds:
                name = tiers.units[chunk.unit].params[segment.param].name
                key = cpu_adam.rounding_key(plain_name(name), of.step)
            at = segment.start, segment.numel, segment.offset
            scalars = of.lr, of.weight_decay, of.grad_scale
            assert not isinstance(of.options, Muon), "these are updated elsewhere"
            segments.append(cpu_adam.Segment(*at, key, of.step, *scalars, of.maximize, of.options))
    return segments


def _compute_on_device(
    tiers: Tiers,
    update: ChunkUpdate,
    io: ChunkIO,
    segments: Sequence[cpu_adam.Segment],
    *,
    delayed: bool,
) -> None:
    """Update a chunk there, with the same bits; when this returns, all of it is done."""
    grad = _gradient_on_device(tiers, update, io)

    def work(copy: torch.Tensor | None) -> None:
        master, out = (io.master, None) if io.low is None else (io.low, copy)
        adam_reference.reference_segments(master, io.moments, grad, out, segments)

    _on_device(tiers, update.chunk, io, work, delayed=delayed)


def _gradient_on_device(tiers: Tiers, update: ChunkUpdate, io: ChunkIO) -> torch.Tensor:
    device, chunk, grad = tiers.device, update.chunk, io.grad(update.grad_dtype)
    if tiers.plans[chunk.id].gradient_tier is not Tier.DEVICE:
        here, grad = grad, torch.empty_like(grad, device=device.torch_device)
        device.wait_on_device(device.h2d(grad, here, device.mark(), chunk=chunk.id))
    return grad


def _on_device(
    tiers: Tiers,
    chunk: Chunk,
    io: ChunkIO,
    change: Callable[[torch.Tensor | None], None],
    *,
    delayed: bool = False,
) -> None:
    """Make a `change` of a master that is on the device, and its copy; when this returns, all is done.
    `change` gets the copy there, which it changes itself if that is the upper half of the master."""
    device = tiers.device
    in_place = tiers.plans[chunk.id].copy_tier is Tier.DEVICE and not delayed
    made: torch.Tensor | None = None
    if not io.place.copy_is_master:
        made = io.copy if in_place else torch.empty_like(io.copy, device=device.torch_device)
        if io.low is not None and not in_place:
            device.wait_on_device(device.h2d(made, io.copy, device.mark(), chunk=chunk.id))

    def work() -> None:
        change(made)
        if made is not None and io.low is None:
            made.copy_(io.master)

    device.compute(work)
    done = device.mark()
    if made is not None and not in_place:
        done = device.d2h(io.copy, made, done, chunk=chunk.id)
    if done is not None:
        done.wait()


def _change_master(tiers: Tiers, chunk: Chunk, io: ChunkIO, change: Callable[[torch.Tensor], None]) -> None:
    """Make a `change` of a master, which may be split, and its copy; when this returns, all is done."""

    def work(copy: torch.Tensor | None) -> None:
        if (low := io.low) is None or copy is None:
            change(io.master)
            return
        master = halves.join(copy, low, torch.empty(low.numel(), device=low.device))
        change(master)
        halves.split(master, copy, low)

    if io.on_device:
        _on_device(tiers, chunk, io, work)
        return
    out = None if io.place.copy_is_master else io.make_copy()
    work(out)
    if out is not None and io.low is None:
        cpu_adam.convert(out, io.master)


def _compute_matrix(tiers: Tiers, update: ChunkUpdate, visit: Visit, io: ChunkIO, matrices: Matrices) -> None:
    """Visit a chunk of a matrix; when this returns, all that it changes is done."""
    [of] = update.params.values()
    options, device, round_ = _options(of), tiers.device, update.round
    assert round_ is not None
    if visit.is_first:
        grad = _gradient_on_device(tiers, update, io) if io.on_device else io.grad(update.grad_dtype)
        matrices.collect(io, round_, grad, options, scale=of.grad_scale, step=of.step)
        if (done := device.mark()) is not None and io.on_device:
            done.wait()
    if not visit.is_last:
        return
    matrices.work(round_)
    piece = matrices.take(io)

    def change(master: torch.Tensor) -> None:
        matrices.apply(io, master, piece, options, lr=of.lr, weight_decay=of.weight_decay)

    _change_master(tiers, update.chunk, io, change)
