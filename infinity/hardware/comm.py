"""Ranks: the collectives of N processes that train one model, by torch.distributed.

[Note: waits for ranks poll] A wait inside gloo or NCCL cannot be interrupted. It ends when the other rank
arrives, or minutes later. So the engine starts works asynchronously and polls them. Meanwhile
this rank learns whether another rank failed, is gone (`watch`) or is too late. gloo's `send` and `recv` do
not report whether they are complete; its collectives do. So a gather is `world` broadcasts at once, each in
place: gloo's own all-gather allocates its output a second time, and takes three times as long.

[Note: one collective behind] The engine puts NCCL's work on the device's streams: uses of the result wait
there, and the host goes on. A thread polls in place of the host. The next collective waits for that thread:
an exchange before it begins, one of NCCL when it has been enqueued. So when a rank returns from an exchange,
all earlier collectives have succeeded, and no update uses a failed result. If the other rank is gone, a
kernel never ends, and neither does a wait for the device: so the engine aborts NCCL's group as soon as it
detects this, before it reports the error.

[Note: a group that is stuck is never destroyed] If a rank does not answer, gloo's threads wait inside a
work until the group's deadline, and the group's destructor waits for them. The engine keeps such a group for
ever; the process can end all the same. It also keeps a work that was left before its end: if gloo's thread
had the last reference to it, the thread would ask for the GIL to free its tensors. If the interpreter shuts
down meanwhile, CPython (up to 3.13) ends the thread there, and C++ aborts the process. The default group that
`connect` made stays until the process ends: if a rank made it again, it might reach the store that
rank 0 is about to close.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import socket
import struct
import sys
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from infinity.core import locks
from infinity.core.at_exit import arm, at_end
from infinity.core.errors import OF_A_FORK, ClosedError, ConfigError, DivergenceError, RankError
from infinity.core.sizes import MiB
from infinity.version import __version__

from .launch import Launch, among, launched, this_node
from .ranks import Alone, Comm, mean
from .streams import POLL, HostStream, Task
from .watch import (
    ASK_SECONDS,
    NOTICE_SECONDS,
    Watch,
    by_rank,
    check_early,
    diverged,
    early_heard,
    gone_early,
    hosts,
    not_come,
    say_early,
    until,
)

__all__ = ["Alone", "Comm", "Ranks", "connect", "numbers"]

_BLOCK: Final = 1024  # bytes that each rank sends to each in an exchange
_HEAD: Final = struct.Struct("<IIQ")  # bytes of `what`, its CRC, bytes of the value
_WORDS: Final = 256  # bytes of `what` that are sent
_ROOM: Final = _BLOCK - _HEAD.size - _WORDS
_CAME: Final = 4 * MiB  # bytes of the others that `reduce` has at once; on a device it has the other number
_CAME_THERE: Final = 16 * MiB
_NEWS_SECONDS: Final = 5.0  # for the first error to arrive when a connection has broken
_SAY_SECONDS: Final = 1.0  # a wait that lasts longer is told to the others
_LONGEST_PAUSE: Final = 0.02  # seconds between two looks
_LAST_SECONDS: Final = 0.25  # for a collective that a rank which failed has made, too, to end here
_FOR_EVER: Final = timedelta(days=100)
_LINGER_SECONDS: Final = 10.0  # for a rank that failed before it made an engine to tell the others

_open: weakref.WeakSet[Ranks] = weakref.WeakSet()
_made_here: dist.ProcessGroup | None = None  # the default group, if `connect` has made it
_made: Counter[tuple[int, ...]] = Counter()  # ranks of a group → how often `connect` was called with it
_is_fork = False  # of a rank


def connect(
    mesh: Any = None,
    *,
    device: torch.device,
    timeout: float = 600.0,
    patience: float = 1.0,
    notice: float = NOTICE_SECONDS,
    apart: bool = False,
) -> Comm:
    """Return the ranks to train with: those of `mesh` (a 1-D DeviceMesh), else of the default process group,
    else those that torchrun or srun has started, for which the default group is initialised; else this
    process alone. Collective.

    Args:
        device: the device of the tensors that are gathered and reduced; gloo for the CPU, NCCL for CUDA.
        timeout: seconds that a wait may take for a rank that is in a collective, too, or does not answer; a
            wait for a rank that is alive and outside has no deadline ([Note: alive and outside], `watch.py`).
        patience: factor of `timeout` for all waits, until `Comm.be_punctual`.
        notice: seconds after which the waiting rank, and the rank that it waits for, log the wait.
        apart: a thread makes its collectives for which the program's collectives may wait, and which waits
            for none of them. So a rank whose program waits for another one is outside of these, and a rank in
            one of these is outside of the program's.

    Raises:
        ConfigError: the mesh is not 1-D, or leaves out this rank or others, or the environment lacks a
            variable.
        RankError: a rank did not arrive in time, failed or is gone.
    """
    if not timeout > 0:
        raise ConfigError("the ranks' timeout is not positive", expected="seconds > 0", found=timeout)
    group = _group(device, timeout * patience) if mesh is None else _group_of(mesh)
    if group is None or dist.get_world_size(group) == 1:
        return Alone()
    return Ranks(group, device, timeout, patience, notice, apart=apart)


def numbers(mesh: Any = None) -> tuple[int, int | None]:
    """Return the number that `connect` would give this rank, and its number on its node, as far as they are
    known, without a connection.

    Raises:
        ConfigError: as `connect`, for the mesh.
    """
    known = dist.is_available() and dist.is_initialized()
    if mesh is None and not known:
        launch = launched()
        return (launch.rank, launch.local_rank) if launch is not None else (0, 0)
    said = os.environ.get("LOCAL_RANK", "")
    rank = dist.get_rank(None if mesh is None else _group_of(mesh))
    return rank, int(said) if said.isdecimal() else None


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """Return the group of a mesh."""
    if getattr(mesh, "ndim", None) != 1 or not hasattr(mesh, "get_group"):
        found = f"{mesh.ndim} dimensions" if hasattr(mesh, "ndim") else type(mesh).__name__
        raise ConfigError(
            "the mesh has to be a DeviceMesh of one dimension",
            expected="a mesh of all ranks of the job; infinity does not support replicated shards yet",
            found=found,
            cure='leave `mesh` out, or `init_device_mesh("cpu", (world_size,))`',
        )
    ranks, world = mesh.mesh.tolist(), dist.get_world_size()
    if len(ranks) < world:
        raise ConfigError(
            "the mesh does not have all ranks of the job: the others would train replicas of the model that "
            "nothing keeps in step with this one",
            expected=f"a mesh of {world} ranks; infinity does not support replicated shards yet",
            found=f"a mesh of {len(ranks)} ranks: {', '.join(map(str, ranks))}",
            cure='leave `mesh` out, or `init_device_mesh("cpu", (world_size,))`',
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _group(device: torch.device, timeout: float) -> dist.ProcessGroup | None:
    """Return the group whose ranks are meant: the default one is made, where there is none; None: alone."""
    global _made_here
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if not dist.is_available() or (launch := launched()) is None:
        return None
    ends = timedelta(seconds=timeout)
    where: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world, "timeout": ends}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if launch.by != "torchrun":
        os.environ["MASTER_ADDR"] = launch.address  # for `hosts`
    at = f"{launch.address}:{launch.port} (MASTER_ADDR, MASTER_PORT)"
    try:
        store = _meeting(launch, timeout)
        _wait_for_all(launch, store, timeout)
        make = functools.partial(dist.init_process_group, backend, store=store, **where)
        _interruptible(make, seconds=timeout + 1)  # torch's own error says more
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RankError):
            raise
        raise RankError(
            f"the process group of {launch.world} ranks cannot be initialised",
            found=str(error).partition("\n")[0],  # what follows are frames of C++
            cure=f"make sure that all ranks run and reach rank 0 at {at}",
        ) from error
    _made_here = dist.group.WORLD
    return _made_here


def _meeting(launch: Launch, seconds: float) -> Any:
    """Return the store in which the ranks of a job meet: torchrun's, or one that rank 0 has in its process.

    Until rank 0 is reached this waits in Python: a thread that waits in torch's store while the interpreter
    ends would abort the process.
    """
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first, end = launch.rank == 0 and not agents, time.monotonic() + seconds
    while not first:
        try:
            socket.create_connection((launch.address, launch.port), timeout=5.0).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise RankError(
                    f"rank 0 has not come within {seconds:g} s to connect",
                    found=f"{launch.address}:{launch.port}: {error}",
                    cure="make sure that rank 0 runs, and that MASTER_ADDR names its machine on all ranks",
                ) from error
        time.sleep(0.05)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *(launch.address, launch.port, launch.world, first),
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    # It may be the one of the ranks before a restart.
    attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    return dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]


def _wait_for_all(launch: Launch, store: Any, seconds: float) -> None:
    """Wait until all ranks have come to the meeting; raise `RankError` if one does not."""
    end, pause = time.monotonic() + seconds, 0.001
    keys = {rank: f"infinity/here/{rank}" for rank in range(launch.world)}
    store.set(keys[launch.rank], "")
    try:
        while not store.check([*keys.values()]):
            _look(store, range(launch.world), first=launch.rank == 0)
            if time.monotonic() > end:
                raise not_come([r for r, key in keys.items() if not store.check([key])], seconds)
            time.sleep(pause := min(2 * pause, 0.1))
    except RankError:
        raise
    except RuntimeError as error:
        raise gone_early(error) from error


def tell_early_end() -> None:
    """At the end of a process: if this rank has made no engine, tell those that wait for it. Where an
    exception ends it, and torchrun has no store for them, it gives them `_LINGER_SECONDS` to hear of it.
    Where none does, only who has joined their group is known to be a rank: a program that one starts is none.
    """
    error = getattr(sys, "last_value", None)
    if _made or _is_fork:
        return
    with contextlib.suppress(RuntimeError, OSError, ConfigError):  # there is nobody to tell
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
            store = dist.distributed_c10d._get_default_store()
        elif error is not None and (launch := launched()) is not None:
            rank, world = launch.rank, launch.world
            store = _meeting(launch, _LINGER_SECONDS)
        else:
            return
        say_early(store, rank, error)
        if rank == 0 and error is not None:
            _linger(store, world)


def _look(store: Any, ranks: Sequence[int], *, first: bool) -> None:
    """Raise RankError if one of `ranks` has ended before it came. `first`: this is rank 0."""
    try:
        check_early(store, ranks)
    except RankError:
        if first:
            _linger(store, len(ranks))
        raise


def _linger(store: Any, world: int) -> None:
    """Before rank 0 ends: let all hear why, if the store is in its process."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        until(lambda: early_heard(store) >= world, _LINGER_SECONDS)


class Ranks(Comm):
    """Ranks of a process group, with two groups of their own: gloo's for what they say to each other, and one
    for data of `device`. Use `connect`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        patience: float = 1.0,
        notice: float = NOTICE_SECONDS,
        *,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._timeout, self.patience = timeout, patience
        self._waits = ""  # in which collective, in words
        self._groups: list[dist.ProcessGroup] = []
        self._number = 0  # collectives that were begun
        self._came = torch.empty(0, dtype=torch.uint8)
        self._stream: HostStream | None = None  # [Note: behind compute]
        self._begun: deque[Task] = deque()
        self._looks: HostStream | None = None  # [Note: one collective behind]
        self._behind: Task | None = None  # polls for the works that were enqueued last
        self._error: RankError | None = None  # this rank failed, or left a collective before its end
        self._closed = False
        ranks = dist.get_process_group_ranks(group)
        key = f"infinity/{'-'.join(map(str, ranks))}/{_made[tuple(ranks)]}"
        _made[tuple(ranks)] += 1
        store = dist.distributed_c10d._get_default_store()
        try:
            look = functools.partial(_check_others, store, ranks)
            most = timeout * patience
            self._watch = Watch(
                *(self.rank, self.world, store, key, hosts(ranks[0] == 0), most, look),
                notice=notice,
                inside=(lambda: self._waits) if apart else _inside,
            )
            # The deadlines are ours: gloo's own would end a wait for a rank that is alive and outside.
            settings: dict[str, Any] = {"timeout": _FOR_EVER}
            if len(ranks) < dist.get_world_size():
                settings |= {"ranks": ranks, "use_local_synchronization": True}
            self._nccl = device.type != "cpu"
            try:
                for backend in ("gloo", "nccl" if self._nccl else "gloo"):
                    make = functools.partial(dist.new_group, backend=backend, **settings)
                    self._groups.append(_interruptible(make, self._watch.check, most + 60))
            except (RuntimeError, ValueError) as error:
                raise self._broken("the groups are made", error) from error
            self._control, self._data = self._groups
            self._check_versions()
            self.local_rank, self.local_world = among(self.exchange("this node", this_node()), self.rank)
        except BaseException:
            self.close()
            raise
        self._hooked = sys.excepthook
        self._hook: Callable[..., object] = self._excepthook  # one object, to know it again
        sys.excepthook = self._hook
        _open.add(self)
        arm()  # this process may be a fork of the one that imported this file

    # -- collectives

    def exchange(self, what: str, value: bytes = b"") -> list[bytes]:
        text = what.encode()
        head = _HEAD.pack(len(text), zlib.crc32(text), len(value)) + text[:_WORDS].ljust(_WORDS)
        block = torch.frombuffer(bytearray((head + value[:_ROOM]).ljust(_BLOCK)), dtype=torch.uint8)
        blocks = torch.empty(self.world * _BLOCK, dtype=torch.uint8)
        self._do(what, lambda: [self._control.alltoall_base(blocks, block.repeat(self.world), [], [])])
        values, sizes, said = [], [], []
        for raw in blocks.view(self.world, _BLOCK):
            came = raw.numpy().tobytes()
            nwords, crc, size = _HEAD.unpack_from(came)
            words = came[_HEAD.size :][: min(nwords, _WORDS)].decode(errors="replace")
            said.append((words, nwords, crc))
            sizes.append(size)
            values.append(came[_HEAD.size + _WORDS :][:size])
        if len(set(said)) > 1:
            raise diverged([words for words, *_ in said])
        if max(sizes) > _ROOM:
            longer = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            longer[self.rank] = torch.frombuffer(bytearray(value or b" "), dtype=torch.uint8)[: len(value)]
            long = [r for r, size in enumerate(sizes) if size > _ROOM]
            self._do(what, lambda: (self._control.broadcast(longer[r], r) for r in long))
            for r in long:
                values[r] = longer[r].numpy().tobytes()
        return values

    def gather(self, run: torch.Tensor) -> None:
        self.sent += run.nbytes // self.world * (self.world - 1)
        data = _bytes(run)
        slices = data.view(self.world, -1).unbind()
        if self._nccl:
            self._do("gather", lambda: [self._data._allgather_base(data, slices[self.rank])], behind=True)
        else:
            self._do("gather", lambda: (self._data.broadcast(s, r) for r, s in enumerate(slices)))

    def reduce(self, run: torch.Tensor, *, narrow: bool = False) -> torch.Tensor:
        self.sent += run.nbytes // self.world * (self.world - 1)
        parts = run.detach().view(self.world, -1)
        mine = parts[self.rank]
        wide = not narrow and run.dtype is not torch.float32
        total = torch.empty(mine.numel(), dtype=torch.float32, device=run.device) if wide else mine
        # Piece by piece: on the CPU what comes lies in a cache then, and in memory that stays.
        most = max((_CAME_THERE if self._nccl else _CAME) // (self.world - 1) // run.itemsize, 1)
        for begin in range(0, mine.numel(), most):
            self._mean(parts[:, begin : begin + most], total[begin : begin + most])
        return total

    def _mean(self, parts: torch.Tensor, out: torch.Tensor) -> None:
        """Put the mean of all ranks' `parts[rank]` into `out`, which may be this rank's."""
        others = [r for r in range(self.world) if r != self.rank]
        sizes = [out.numel() * (r != self.rank) * parts.itemsize for r in range(self.world)]
        of = _bytes(parts[others[0]] if len(others) == 1 else parts[others].view(-1))
        if self._nccl:  # torch's allocator keeps it
            to = torch.empty(sum(sizes), dtype=torch.uint8, device=parts.device)
        else:
            if self._came.numel() < sum(sizes):
                self._came = torch.empty(sum(sizes), dtype=torch.uint8)
            to = self._came[: sum(sizes)]
        self._do("reduce", lambda: [self._data.alltoall_base(to, of, sizes, sizes)], behind=self._nccl)
        came = iter(to.view(parts.dtype).view(len(others), -1))
        mean([parts[r] if r == self.rank else next(came) for r in range(self.world)], out)

    def all_to_all(
        self, to: torch.Tensor, of: torch.Tensor, to_sizes: Sequence[int], of_sizes: Sequence[int]
    ) -> None:
        self.sent += (sum(of_sizes) - of_sizes[self.rank]) * of.itemsize
        sizes = [[size * of.itemsize for size in each] for each in (to_sizes, of_sizes)]
        self._do("all-to-all", lambda: [self._data.alltoall_base(_bytes(to), _bytes(of), *sizes)])

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> None:
        data = _bytes(flat)
        group = self._control if data.device.type == "cpu" else self._data
        self._do("broadcast", lambda: [group.broadcast(data, source)])

    def begin(self, call: Callable[[], Any]) -> Task:
        if self._stream is None:
            self._stream = HostStream("ranks")
        task = self._stream.submit(call)
        self._begun.append(task)
        return task

    def finish(self, last: Task | None = None) -> None:
        self._finish_begun(last)
        if last is None:
            _over(self._behind)

    def _finish_begun(self, last: Task | None = None) -> None:
        self._usable()
        if self._stream is None or self._stream.is_here():
            return
        while self._begun and (last is None or last in self._begun):
            while not self._begun[0].pause(POLL):  # an interrupt leaves it under way
                continue
            self._begun.popleft().wait()

    def _check_versions(self) -> None:
        """Raise `DivergenceError` unless all ranks run the same software."""
        versions = f"infinity {__version__}, torch {torch.__version__}"
        told = [each.decode() for each in self.exchange("the versions", versions.encode())]
        if len({*told}) > 1:
            raise DivergenceError(
                "the ranks run different versions",
                expected="the same infinity and the same torch on all ranks",
                found=by_rank(told),
                cure="install the same versions in the environment of every node",
            )

    # -- errors

    def post(self, error: BaseException) -> None:
        if self._error is None:
            self._error = RankError(f"this rank failed: {type(error).__name__}")
        self._watch.post(error)

    def check(self) -> None:
        self._watch.check()

    def close(self) -> None:
        if self._closed:
            return
        while self._begun and self._error is None and not self._watch.failed:
            with contextlib.suppress(Exception):  # was for nobody
                self._finish_begun()
        while self._behind is not None and self._error is None and not self._watch.failed:
            if self._behind.pause(POLL):
                break
        self._closed = True
        global _made_here
        if hasattr(self, "_hook") and sys.excepthook is self._hook:
            sys.excepthook = self._hooked
        stuck = self._error is not None
        if hasattr(self, "_watch"):  # or not even this was made
            stuck = stuck or self._watch.failed
            self._watch.close()
        for stream in (self._stream, self._looks):
            if stream is not None:
                stream.close()
        if stuck:
            self._abort()
        for group in self._groups if dist.is_initialized() else ():
            if stuck:
                _keep(group)
            else:
                dist.destroy_process_group(group)
        _open.discard(self)
        if stuck and _made_here is not None:
            _keep(_made_here)
            _made_here = None

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Tell the others why this process ends."""
        if not self._closed:
            self.post(error)
        self._hooked(kind, error, trace)

    def _do(self, what: str, start: Callable[[], Iterable[Any]], *, behind: bool = False) -> None:
        """Start works, and poll until they are complete ([Note: waits for ranks poll]). `behind`: they are
        NCCL's, and the current stream waits ([Note: one collective behind])."""
        if locks.before_wait is not None:
            locks.before_wait()
        self._finish_begun()
        before = self._behind
        if not behind:
            _over(before)
        self._number += 1
        works: list[Any] = []
        with self._kept(what, works):
            works.extend(start())  # one by one: those before one that raises are kept
            if not behind:
                self._wait(self._number, what, works)
                return
            for work in works:
                work.synchronize()  # `wait` would be the host's, with TORCH_NCCL_BLOCKING_WAIT
            if self._looks is None:
                self._looks = HostStream("looks")
            self._behind = self._looks.submit(functools.partial(self._look, self._number, what, works))
            _over(before)

    def _look(self, number: int, what: str, works: list[Any]) -> None:
        with self._kept(what, works):
            self._wait(number, what, works, behind=True)

    @contextlib.contextmanager
    def _kept(self, what: str, works: list[Any]) -> Iterator[None]:
        """A block in which a collective ends. Where it raises, works are kept: this rank is at its end."""
        ended = False
        try:
            yield
            ended = True
        except (RankError, ClosedError):
            raise
        except RuntimeError as error:
            raise self._broken(what, error) from error
        finally:
            if not ended:
                _keep(works)
                self._error = self._error or RankError(f"a collective ({what}) was left before its end")
                self._abort()

    def _abort(self) -> None:
        """Abort all kernels of NCCL: they would wait on the device for ever, and so would every wait for
        it."""
        for group in self._groups if dist.is_initialized() else ():
            if dist.get_backend(group) == "nccl":
                getattr(group._get_backend(self._device), "abort", lambda: None)()

    def _usable(self) -> None:
        if self._closed:
            raise ClosedError(
                "this process is a fork of a rank" if _is_fork else "the ranks' connection was closed",
                cure=OF_A_FORK if _is_fork else "wrap a model again, on every rank",
            )
        self.check()
        if self._error is not None:
            if self._looks is not None and not self._looks.is_here():
                _over(self._behind)  # which may have been that, and says why
            raise RankError(self._error.what)

    def _wait(self, number: int, what: str, works: Sequence[Any], *, behind: bool = False) -> None:
        begun = time.monotonic()
        looks, said = 0, False
        say_after = min(_SAY_SECONDS, self._timeout / 4)
        ask_after = min(ASK_SECONDS, self._timeout / 4, self._watch.notice)
        asked = begun
        ended_after = None  # when a rank was first seen to have said goodbye
        self._waits = what
        try:
            for work in works:
                while not work.is_completed():
                    looks += 1
                    if looks < 20:
                        time.sleep(0)
                        continue
                    now = time.monotonic()
                    elapsed = now - begun
                    time.sleep(min(max(elapsed / 16, 2e-5), _LONGEST_PAUSE))
                    try:
                        self._usable()
                    except RankError:
                        # It may have failed by what this very collective has told it.
                        if until(work.is_completed, _LAST_SECONDS):
                            break
                        raise
                    if elapsed > say_after and not said:
                        said = True
                        self._watch.waiting(number, what)
                    if said and now - asked > ask_after:
                        asked = now
                        self._watch.ask(number, what, elapsed, ask_after)
                    if elapsed > (most := self._timeout * self.patience):
                        since = max(begun, self._watch.excused(number, what))
                        if now - since > most:
                            self._raise(self._watch.late(number, what, most))
                    if self._watch.left:
                        ended_after = elapsed if ended_after is None else ended_after
                        if elapsed - ended_after > _NEWS_SECONDS:
                            self._raise(self._watch.ended(what))
                if not behind:
                    work.wait()  # is over: raises its error; on CUDA the current stream waits for it
        finally:
            self._waits = ""

    def _raise(self, error: RankError) -> NoReturn:
        self.post(error)  # this rank ends next
        raise error

    def _broken(self, what: str, error: Exception) -> RankError:
        """Return why a call to gloo or NCCL failed: the error that ended another rank, if it reports it
        soon."""
        until(lambda: self._watch.failed or self._watch.left, _NEWS_SECONDS)
        if self._watch.left:  # or that rank's last word is under way
            until(lambda: self._watch.failed, 0.5)
        try:
            self.check()
        except RankError as first:
            return first
        broken = self._watch.ended(what) if self._watch.left else RankError(f"{what} failed", found=error)
        self.post(broken)
        return broken


def _inside() -> str:
    """Return the collective, of any engine, that this process waits in, in words; "" for none."""
    return next((comm._waits for comm in list(_open) if comm._waits and not comm.apart), "")


def _check_others(store: Any, ranks: Sequence[int]) -> None:
    """Raise RankError if another rank has ended, as the store or an engine that is open knows."""
    for comm in list(_open):
        comm.check()
    _look(store, ranks, first=dist.get_rank() == 0)


def _interruptible(
    call: Callable[[], Any], check: Callable[[], None] = lambda: None, seconds: float = math.inf
) -> Any:
    """Return what `call` returns, which waits for other ranks in C++, where no signal is heard. When `check`
    raises meanwhile, or so many `seconds` are over, it is left alone."""
    stream, end = HostStream("groups"), time.monotonic() + seconds
    task = stream.submit(call)
    while not task.pause(POLL):
        check()
        if time.monotonic() > end:
            raise RankError("not all ranks have come")
    stream.close()
    return task.result()


def _over(task: Task | None) -> None:
    """Wait for a task, if there is one; raise its error. An interrupt leaves it under way."""
    while task is not None and not task.pause(POLL):
        continue
    if task is not None:
        task.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_contiguous()
    return tensor.detach().view(-1).view(torch.uint8)


def _keep(thing: Any) -> None:
    """Never destroy it ([Note: a group that is stuck is never destroyed])."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _end() -> None:
    """The program ends, and engines are closed: say goodbye, and destroy the default group that `connect`
    made, unless somebody else has, or it is stuck."""
    for comm in list(_open):
        comm.close()
    if _made_here is not None and _made_here is dist.group.WORLD:
        dist.destroy_process_group()


def _after_fork() -> None:
    """A fork of a rank, as a worker that loads data, is no rank: it has none of the threads."""
    global _made_here, _is_fork
    _is_fork = bool(_made) or "WORLD_SIZE" in os.environ
    if _made_here is not None:
        _keep(_made_here)
        _made_here = None
    for comm in list(_open):
        comm._closed = True
        comm._begun.clear()
        comm._watch.abandon()
        for group in comm._groups:
            _keep(group)


os.register_at_fork(after_in_child=_after_fork)
at_end(_end, last=True)
