"""Units: whether their parameters are on the device, on their way, or away.

One function per legal transition: `prefetch` SHARDED → FETCHING, `unshard` FETCHING → UNSHARDED,
`idle` UNSHARDED → FETCHING (the storage stays filled, the class is ReleasedParameter), `reshard`
FETCHING → SHARDED.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

import torch

from infinity.core.errors import ParameterChangedError
from infinity.hardware.device import Device
from infinity.planning.partition import Chunk, UnitLayout

from .fetch import Fetch, Fetcher
from .param import ShardedParam


class ParamState(enum.Enum):
    """Where the parameters of a unit are.

    SHARDED: their storage is empty. FETCHING: the storage has its size and is filled or being
    filled, but nobody may use it yet. UNSHARDED: usable.
    """

    SHARDED = "sharded"
    FETCHING = "fetching"
    UNSHARDED = "unsharded"


class ParamUnit:
    """The parameters of one unit and their storage on the device."""

    def __init__(
        self, layout: UnitLayout, params: Sequence[ShardedParam], device: Device, *, resident: bool
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.resident = resident
        self.state = ParamState.SHARDED
        self.users: set[object] = set()
        self.keepers: set[object] = set()  # `gathered` blocks: nothing but their end lets go
        self.newest = False  # shows the newest version instead of the published: [Note: two versions]
        self._memory = device.memory(layout.copy_nbytes)
        self.storage = self._memory.storage
        self._device = device
        self._fetch: Fetch | None = None

    @property
    def index(self) -> int:
        """The unit's number, in the order of the model's forward as far as it is known."""
        return self.layout.index

    def view(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return a flat view of the unit's storage; `offset` and `nbytes` in bytes."""
        tensor = torch.empty(0, dtype=dtype, device=self.storage.device)
        size = dtype.itemsize
        return tensor.set_(self.storage, offset // size, (nbytes // size,), (1,))

    def chunk_view(self, chunk: Chunk) -> torch.Tensor:
        """Return the part of the storage that holds a chunk's copy, in its compute dtype."""
        return self.view(chunk.copy_offset, chunk.copy_nbytes, chunk.dtype)

    def make_resident(self) -> None:
        """Give the storage its memory for good."""
        self._memory.fill()
        self.state = ParamState.UNSHARDED

    def prefetch(self, fetcher: Fetcher, parts: Mapping[int, str], *, urgent: bool = False) -> None:
        """SHARDED → FETCHING. Never waits. `parts`: where each chunk's copy is, by its id."""
        after = self._device.mark()
        self._memory.fill()
        self.state = ParamState.FETCHING
        target = self.view(0, self.layout.copy_nbytes)
        self._fetch = Fetch(target, self.layout.chunks, parts, after)
        fetcher.start(self._fetch, urgent=urgent)

    @property
    def fetch(self) -> Fetch | None:
        """The fetch that fills the storage, or filled it; None while it is empty."""
        return self._fetch

    def suspend(self, wait: Callable[[], None]) -> None:
        """Make every use of a resident unit's values `wait` for its update."""
        for param in self.params:
            param.suspend(wait)

    def resume(self) -> None:
        """The update of a resident unit is over: its values may be used."""
        for param in self.params:
            param.restore()

    def unshard(self) -> None:
        """FETCHING → UNSHARDED. The device waits for the copies (on a CPU, the host does)."""
        if self._fetch is not None:
            self._device.wait_on_device(self._fetch.wait_issued())
            # The event stays with a fetch that the host has not seen done: reshard asks again.
        for param in self.params:
            param.restore()
        self.state = ParamState.UNSHARDED

    def idle(self) -> None:
        """UNSHARDED → FETCHING: nobody uses it; the storage stays filled until room is needed.

        Raises:
            ParameterChangedError: a parameter was edited in place, which would be lost.
        """
        edited = [p for p in self.params if p.param._version != p.version]
        for param in self.params:
            param.release()
            param.version = param.param._version
        self.state = ParamState.FETCHING
        if edited:
            raise ParameterChangedError(
                f"the parameter {edited[0].name!r} was edited in place while it was gathered for use",
                expected="parameters that only the optimizer changes",
                found="an in-place edit",
                cure="edit inside `with infinity.gathered(params, write=True):`",
            )

    def reshard(self) -> None:
        """FETCHING → SHARDED: free the storage. The copy was clean: nothing is written."""
        fetch = self._fetch
        if fetch is not None:
            fetch.issued.wait()
            if fetch.error is None:
                # On CUDA the storage was allocated on the compute stream; it must see the copy
                # before the memory is given to something else.
                self._device.wait_on_device(fetch.event)
        self._fetch = None  # not before: an interrupt may end a wait, but not what fills the storage
        self._memory.drop()
        self.state = ParamState.SHARDED

    @property
    def in_use(self) -> bool:
        """Whether somebody has a claim on it."""
        return bool(self.users or self.keepers)

    def settled(self) -> bool:
        """Return whether freeing the unit would not wait."""
        return self._fetch is None or self._fetch.settled()
