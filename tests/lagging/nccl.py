"""NCCL between lagging devices: what torch's process group of that name does, over gloo."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from . import operators
from .cuda import lagging_cuda, world
from .world import NotYet, Point, World, where


class Work:
    """A collective that was put on the group's stream."""

    def __init__(self, point: Point, here: World) -> None:
        self._point = point
        self._here = here
        here.counts["collectives"] += 1

    def is_completed(self) -> bool:
        ended = self._here.query(self._point)
        if ended:
            self._here.counts[f"collectives waited for: {threading.current_thread().name}"] += 1
        return ended

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        """The current stream waits, and the host does not."""
        self._here.block(self._here.current(), self._point)


class Group:
    """A process group with a stream of its own, which waits for the one that a collective is called on. What
    it does never ends where another rank does not come, until it is aborted."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        self.gloo = gloo
        self.aborted = False
        self._left: list[Any] = []  # works of gloo that have not ended
        self._stream = world().new_stream(0, "nccl")

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort(self) -> None:
        self.aborted = True

    def _do(self, call: Callable[[], Any], begun: list[Any]) -> None:
        if self.aborted:
            self._left.extend(begun)
            return
        if not begun:
            begun.append(call())
        if begun[0].is_completed():
            with contextlib.suppress(RuntimeError):  # a rank is gone
                begun[0].wait()
                return
        raise NotYet

    def _put(self, call: Callable[[], Any], reads: Sequence[torch.Tensor], writes: torch.Tensor) -> Work:
        here = world()
        here.block(self._stream, here.record(here.current()))
        spans = [operators.span_of(t) for t in reads], [operators.span_of(writes)]
        begun: list[Any] = []
        here.put(self._stream, lambda: self._do(call, begun), *spans, f"collective  {where()}")
        return Work(here.record(self._stream), here)

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor) -> Work:
        to, of = operators.raw(out), operators.raw(mine)
        return self._put(lambda: self.gloo._allgather_base(to, of.clone()), [mine], out)

    def alltoall_base(self, out: torch.Tensor, of: torch.Tensor, came: list[int], sent: list[int]) -> Work:
        to, from_ = operators.raw(out), operators.raw(of)
        return self._put(lambda: self.gloo.alltoall_base(to, from_, came, sent), [of], out)

    def broadcast(self, data: torch.Tensor, source: int) -> Work:
        raw = operators.raw(data)
        return self._put(lambda: self.gloo.broadcast(raw, source), [data], data)


@contextlib.contextmanager
def lagging_ranks(schedule: str = "late", seed: int = 0) -> Iterator[World]:
    """`lagging_cuda`, for a rank of several."""
    new_group, destroy, backend_of = dist.new_group, dist.destroy_process_group, dist.get_backend

    def made(*args: Any, backend: str, **kwargs: Any) -> Any:
        group = new_group(*args, backend="gloo", **kwargs)
        return Group(group) if backend == "nccl" else group

    def gloo_of(call: Callable[..., Any], group: Any = None) -> Any:
        return call(group.gloo if isinstance(group, Group) else group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", made)
        patch.setattr(dist, "destroy_process_group", functools.partial(gloo_of, destroy))
        patch.setattr(dist, "get_backend", lambda g=None: "nccl" if isinstance(g, Group) else backend_of(g))
        with lagging_cuda(schedule, seed) as here:
            yield here
