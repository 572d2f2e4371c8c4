"""The inputs of checkpointed layers, on the host between their forward and their backward.

`torch.utils.checkpoint` saves the inputs of a layer for its recomputation as autograd saves tensors,
so hooks on saved tensors receive them (saved.py; for activations the hooks are set around the root's
forward). Each input goes d2h after the forward into a lease; the engine frees its device memory when the copy
is done. In the backward it comes back h2d, before its use.

[Note: ahead, in bytes] The last inputs of the forward, and in the backward the next ones, are on the
device: as many as add up to twice the largest. So the first inputs that the backward needs never
leave the device, and the device memory of inputs is bounded for any speed of the link. On CUDA the compute
stream waits for the copy before the engine frees an input's memory (the host does not wait). If the allocator
tracked the copy instead, a host that is ahead of the device would find none of the memory free.

An offloaded input leaves a *witness*: an alias whose data was replaced by an empty tensor, so that it has
the version counter and not the memory ([Note: versions of packed tensors]).
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.core.commits import Commits, commit
from infinity.core.errors import ClosedError
from infinity.core.sizes import format_size
from infinity.hardware.device import Device, Event
from infinity.planning.footprint import AHEAD, SMALLEST
from infinity.storage.heap import HeapLease, PinnedHeap

from .saved import check_version

_CHECKPOINT: Final = "torch.utils.checkpoint"
#: What may stand between it and a pack hook; before torch 2.7 `eager` is a function around the hook.
_BETWEEN: Final = ("infinity.autograd.saved", "torch.autograd.function", "torch._dynamo.eval_frame")


class _Memory:
    """Where a tensor is: on the host, and on the device while `device` is not None.

    `left` is the event of its d2h, `arrival` that of the h2d that fills `device`; None: `device` is
    the memory that was saved. `there`: the stream that `device` goes back to.
    """

    __slots__ = ("arrival", "device", "lease", "left", "there")

    def __init__(self, lease: HeapLease, device: torch.Tensor, of: Device) -> None:
        self.lease = lease
        self.there = of.carry()
        self.device: torch.Tensor | None = device
        self.left: Event | None = None
        self.arrival: Event | None = None


class _InputCopy:
    """One tensor whose memory is lent. When the last graph lets go of the copy its `_Gone` says so."""

    __slots__ = ("__weakref__", "dtype", "memory", "nbytes", "shape", "storage", "stride")

    def __init__(self, tensor: torch.Tensor, lease: HeapLease, of: Device) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.nbytes = tensor.nbytes
        self.memory = _Memory(lease, tensor.detach(), of)
        # While this is held no other storage has its address; see `_key`.
        self.storage = StorageWeakRef(tensor.untyped_storage())

    @property
    def device(self) -> torch.Tensor | None:
        """The tensor, if it is on the device (it may be on its way)."""
        return self.memory.device


class _Gone(weakref.ref[_InputCopy]):
    """Goes to the list of what comes home when its copy is gone: in any thread, at any time, and by an
    `append` alone, which no interrupt ends. (One that comes in a `__del__` is lost, and the rest of it.)"""

    __slots__ = ("memory",)
    memory: _Memory


class _Saved:
    """What autograd holds for one saved input. `before`: the one that was saved before it."""

    __slots__ = ("__weakref__", "_owner", "before", "copy", "task", "version", "witness")

    def __init__(
        self, tensor: torch.Tensor, copy: _InputCopy, before: weakref.ref[_Saved] | None, owner: Activations
    ) -> None:
        self._owner = owner
        self.copy = copy
        self.version = tensor._version
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.before = before
        self.task = -1  # the backward that has used it

    def unpack(self) -> torch.Tensor:
        """Return the tensor, on the device."""
        return self._owner.unpack(self)


class Activations:
    """Sends the inputs of checkpointed layers to the host and brings them back.

    Args:
        heap: what they may take of host memory.
        storages: the engine's own, whose tensors stay where they are.
    """

    def __init__(
        self,
        device: Device,
        heap: PinnedHeap,
        storages: Iterable[torch.UntypedStorage],
        commits: Commits,
    ) -> None:
        self.commits = commits
        self.seen = 0  # inputs of checkpointed layers, whatever became of them
        self.kept = 0  # inputs that found no room on the host
        self._device = device
        self._heap = heap
        self._storages = {s._cdata for s in storages}
        self._copies: weakref.WeakValueDictionary[Any, _InputCopy] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_Saved] | None = None
        self._present: list[weakref.ref[_InputCopy]] = []  # copies that are on the device too
        self._largest = 0
        self._home: deque[Any] = deque()  # each a _Gone
        self._lent: dict[int, _Gone] = {}  # all of them, by id
        self._warned = False
        self._closed = False

    @property
    def peak(self) -> int:
        """Bytes of host memory that were in use at once, at most."""
        return self._heap.peak

    @property
    def in_use(self) -> int:
        """Bytes of host memory in use."""
        self._release_leases()
        return self._heap.in_use

    def after_step(self) -> None:
        """Say once if there was nothing to do."""
        if not self.seen and not self._warned:
            self._warned = True
            warnings.warn(
                'activations="host" has no effect: the model recomputes no layer, so every activation '
                "stays on the device. Recompute layers with torch.utils.checkpoint.checkpoint or, for "
                "Hugging Face models, model.gradient_checkpointing_enable().",
                RuntimeWarning,
                stacklevel=4,
            )

    def close(self) -> None:
        """Finish what is on its way and let go of the host memory."""
        self._closed = True
        self._device.synchronize()
        self._heap.close()

    # -- what autograd calls ----------------------------------------------------------------

    def pack(self, tensor: torch.Tensor, stack: Iterator[FrameType]) -> _Saved | None:
        """Take over the input of a checkpointed layer, if one is saved; None: it stays as it is."""
        if self._closed or not _is_input_of_checkpointing(stack):
            return None
        self.seen += tensor.numel() > 0  # torch 2.6 saves an empty one of its own beside them
        copy = self._copy_of(tensor) if self._is_worth_it(tensor) else None
        if copy is None:
            return None
        packed = _Saved(tensor, copy, self._last, self)
        self._last = weakref.ref(packed)
        self._hold([c for c in self._near(packed) if c.device is not None])
        return packed

    def unpack(self, packed: _Saved) -> torch.Tensor:
        """Return the tensor, on the device."""
        copy = packed.copy
        check_version(packed.witness._version, packed.version, packed.witness, copy.shape)
        if self._closed:
            raise ClosedError(
                "a backward after close()",
                expected="an open engine, which holds the inputs of checkpointed layers",
                found="a closed one",
                cure="call backward before close()",
            )
        tensor = self._bring(copy)
        self._device.wait_on_device(copy.memory.arrival)
        self._device.uses(tensor)
        task = packed.task = torch._C._current_graph_task_id()
        before = packed.before() if packed.before is not None else None
        ahead = list(self._near(before, used_by=task))
        for other in ahead:
            self._bring(other)
        self._hold(ahead)
        return tensor.detach()

    # -- what is on the device --------------------------------------------------------------

    def _near(self, saved: _Saved | None, used_by: int = -1) -> Iterator[_InputCopy]:
        """Yield the copies of `saved` and of those before it that the backward `used_by` has not
        used, nearest first, each once, until there are enough. See [Note: ahead, in bytes]."""
        found: set[int] = set()
        nbytes = 0
        while saved is not None and nbytes < AHEAD * self._largest:
            copy = saved.copy
            if id(copy) not in found and not (saved.task == used_by != -1):
                found.add(id(copy))
                nbytes += copy.nbytes
                yield copy
            saved = saved.before() if saved.before is not None else None

    @commit
    def _hold(self, copies: list[_InputCopy]) -> None:
        """Keep these on the device, and no others."""
        wanted = {id(c) for c in copies}
        present, self._present = self._present, [weakref.ref(c) for c in copies]
        for ref in present:
            copy = ref()
            if copy is not None and id(copy) not in wanted and copy.device is not None:
                # What comes after on the stream that it was made on may get the memory: not before it was
                # read (d2h) or filled (h2d). That stream need not be the one that this thread is on.
                with copy.memory.there():
                    self._device.wait_on_device(copy.memory.arrival or copy.memory.left)
                copy.memory.device = copy.memory.arrival = None

    @commit
    def _copy_of(self, tensor: torch.Tensor) -> _InputCopy | None:
        """Return the copy of a tensor: the one that there is, or a new one on its way to the host;
        None if there is no room."""
        key = _key(tensor)
        copy = self._copies.get(key)
        if copy is not None:
            return copy
        self._release_leases()
        lease = self._heap.take(tensor.nbytes)
        if lease is None:
            self.kept += 1
            self._warn_full(tensor.nbytes)
            return None
        copy = _InputCopy(tensor, lease, self._device)
        gone = _Gone(copy, self._home.append)
        gone.memory = copy.memory
        self._lent[id(gone)] = gone
        self._device.uses(tensor)  # another stream may have made it: `_hold` has this one wait for the copy
        copy.memory.left = self._device.d2h(
            lease.tensor(tensor.dtype), _flat(tensor.detach()), self._device.mark()
        )
        self._largest = max(self._largest, copy.nbytes)
        self._copies[key] = copy
        return copy

    @commit
    def _bring(self, copy: _InputCopy) -> torch.Tensor:
        """Return the tensor on the device; it may be on its way (`arrival`)."""
        memory = copy.memory
        if memory.device is None:
            device = self._device
            tensor = torch.empty_strided(
                copy.shape, copy.stride, dtype=copy.dtype, device=device.torch_device
            )
            source = memory.lease.tensor(copy.dtype)
            memory.there = device.carry()
            memory.arrival = device.h2d(_flat(tensor), source, device.mark(), memory.left)
            memory.device = tensor
        return memory.device

    @commit
    def _release_leases(self) -> None:
        """Return the leases of copies that are gone, as far as nothing still reads or fills them."""
        for _ in range(len(self._home)):
            gone = self._home.popleft()
            memory = gone.memory
            if all(event is None or event.done() for event in (memory.left, memory.arrival)):
                memory.lease.release()
                del self._lent[id(gone)]
            else:
                self._home.append(gone)

    def _is_worth_it(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._device.torch_device
            and tensor.layout is torch.strided
            and tensor.nbytes >= SMALLEST
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage()._cdata not in self._storages
            and _is_dense(tensor)
        )

    def _warn_full(self, nbytes: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"an input of a checkpointed layer, {format_size(nbytes)}, stays on the device: the "
                f"{format_size(self._heap.nbytes)} of host memory for activations are full "
                f"({format_size(self._heap.in_use)} in use). Raise host_memory: they "
                "get a quarter of what it leaves, at most 16 GiB. metrics() counts such inputs as "
                "activations/kept.",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_input_of_checkpointing(stack: Iterator[FrameType]) -> bool:
    """Return whether the caller of a pack hook, at the top of `stack`, saves the inputs of a checkpointed
    layer.

    torch.utils.checkpoint saves nothing else itself: the non-reentrant form in a method of its own
    (in older versions in the `apply` of a function), the reentrant one in the `apply` of its function.
    What the layer saves is packed by other hooks, or not saved at all.
    """
    names = (f.f_globals.get("__name__") for f in stack)
    return next((name for name in names if name not in _BETWEEN), None) == _CHECKPOINT


def _key(tensor: torch.Tensor) -> Any:
    """Return what two saved tensors share if they are the same values in the same memory."""
    storage = tensor.untyped_storage()._cdata
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return storage, *layout, tensor._version


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor, 1-d, in the order in which it lies there."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
