"""Units: whether their parameters are on the device, on their way, or away.

One function per legal transition: `load` SHARDED → LOADING, `gather` LOADING → GATHERED, `unshard` GATHERED →
UNSHARDED, `idle` UNSHARDED → GATHERED, `reshard` and `invalidate` LOADING or GATHERED → SHARDED. A
*persistent* unit is not idle after use: it stays UNSHARDED until its values change. One that is placed on the
device has its copy in this very storage, and is never SHARDED: what an update or a new version brings it is
`expect`ed, UNSHARDED → LOADING, and has come with `arrived`, LOADING → UNSHARDED.

What is written last is what says that the rest was done: an error may end each of them between any two lines.

[Note: held units] An alias of a parameter (`p.detach()`, `p.data`, `.numpy()`, a view that a module
returned, a graph that saved it without the engine's hooks) still refers to the unit's memory. Before the
engine frees the memory it counts the owners of the storage and of the parameters. If there are more than
when the unit was bound, code outside of the engine is among them. Then the memory stays, and the engine
writes new values into it, so that an alias shows what it shows in torch. The engine cannot count raw
addresses (`data_ptr()`, CUDA graphs, IPC).

[Note: late loads] Ranks gather units in one order, and a gather ahead begins where a load has begun. So with
several ranks a load that finds no memory counts as begun: the unit is LOADING, and its load is *late*. The
engine tries again at each visit, and at the latest where the ranks gather the unit. There it raises the error
of the device. Other loads of this rank may become late instead (`put_off`). No collective depends on that.
"""

from __future__ import annotations

import enum
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch

from infinity.core.errors import ParameterChangedError
from infinity.core.sizes import format_size
from infinity.hardware.device import Device, Event
from infinity.hardware.ranks import Comm
from infinity.hardware.streams import wait_over
from infinity.planning.partition import UnitLayout
from infinity.storage.versions import Slot

from .gather import Gather
from .load import Load, Loader
from .param import ShardedParam
from .unit_memory import UnitMemory
from .uses import Use, UseKind, Uses


class UnitState(enum.Enum):
    """Where the parameters of a unit are.

    SHARDED: away; their storage is empty, or `kept` ([Note: held units]). LOADING: a load is filling it with
    this rank's slice (with one rank, the whole unit). GATHERED: the whole unit is there, and not in use.
    UNSHARDED: usable.
    """

    SHARDED = "sharded"
    LOADING = "loading"
    GATHERED = "gathered"
    UNSHARDED = "unsharded"


#: States of which nobody makes use, with memory.
IDLE_STATES = (UnitState.LOADING, UnitState.GATHERED)
#: Those with all of the unit. Between them no byte moves.
WHOLE_STATES = (UnitState.GATHERED, UnitState.UNSHARDED)


#: What to do about an edit of what is not placed on the device, by whether there is an optimizer: without one
#: nothing is written back.
_CURES: Final = {
    True: "edit inside `with infinity.gathered(params, write=True):`",
    False: "make the edit before `infinity.inference(model, config)`, which takes a model as it is; one that "
    "edits itself in a forward (RWKV rescales its layers) does so in a first one, as a plain model in eval "
    'mode; or parameters="device", where an edit stays',
}


class ParamUnit(UnitMemory):
    """The parameters of one unit and their storage on the device.

    Args:
        placed: this rank's shard is placed on the device.
        stage: of ZeRO, for the ranks of `comm`; 0 where each has the whole unit, as one rank has.
        trains: whether there is an optimizer.

    Attributes:
        index: the unit's number, in the order in which `discover` found it.
        state: where the parameters are.
        kept: the storage of a unit that is away has its memory, since code outside of the engine holds it.
        placed: this rank's shard is placed on the device.
        on_device: the whole unit is placed on the device: the storage holds the compute parameters.
        last_load: the load that fills the storage, or filled it; None while it is empty.
        late: the slots of a load that has no memory yet: [Note: late loads].
        persistent: not released after use.
    """

    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[ShardedParam],
        device: Device,
        comm: Comm,
        uses: Uses,
        *,
        placed: bool,
        stage: int,
        trains: bool,
    ) -> None:
        apart = placed and stage == 3
        super().__init__(layout, params, device, kept_apart=apart, in_place=placed and not apart)
        self.index = layout.index
        self.placed = placed
        self.on_device = placed and comm.world == 1
        self.persistent = self.on_device or (comm.world > 1 and stage < 3)
        self.state = UnitState.SHARDED
        self.kept = False
        self.users = uses.users[layout.index]  # the uses that keep it: [Note: uses]
        self.on_state: Callable[[ParamUnit], None] | None = None  # called when bytes of it move
        self.newest = False  # shows the newest version instead of the front: [Note: two versions]
        self.arriving: Callable[[], None] | None = None  # waits for the values that are expected, if any are
        self.references: weakref.WeakSet[Any] | None = None  # see `note_references`
        self._device = device
        self._comm = comm
        self.last_load: Load | None = None
        self._read: Event | None = None  # when the copies of the load before were done
        self._loader: Loader | None = None
        self._flat = torch.empty(0)  # all of the storage, from `bind` on
        self.late: Mapping[int, Slot] | None = None
        self._gather = Gather(layout.name, comm, device)
        self._warned = False
        self._trains = trains
        self._owners: tuple[int, int, list[int]] | None = None

    def _enter(self, state: UnitState) -> None:
        """Be in a state between which and the one before bytes move."""
        self.state = state
        if self.on_state is not None:
            self.on_state(self)

    def bind(self) -> None:
        """Make the parameters views of the storage, and note how many own that from now on."""
        if self.state is UnitState.SHARDED:
            self._memory.fill()  # once: `set_` would give an empty storage memory for each parameter
        self._flat = self.view(0, self.layout.gathered_nbytes)
        for sharded, offset in zip(self.params, self.layout.byte_offsets, strict=True):
            sharded.bind(self.storage, offset)
            if not self.on_device:
                sharded.keep_accumulator()
        self._become(self.state)
        if self.state is UnitState.SHARDED:
            self.drop()
        self._owners = self._count()

    def _count(self) -> tuple[int, int, list[int]]:
        storage = self.storage
        owners = []
        with torch._C.DisableTorchFunctionSubclass():
            for sharded in self.params:  # without calls: each update comes here
                owners.append(sharded.param._use_count())  # type: ignore[attr-defined]
        return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage), owners

    def note_references(self) -> None:
        """From now on have `references` be what graphs have saved of the unit."""
        self.references = weakref.WeakSet()

    def is_held(self) -> bool:
        """Return whether code outside of the engine refers to the unit's memory. No load may be running into
        it, and no forward or backward may use it. See [Note: held units]."""
        if self._owners is None:
            return False
        memory, references, owners = self._count()
        before = self._owners
        if memory > before[0] or references > before[1]:
            return True
        # What a graph saved of a parameter that is placed here is for torch to compare.
        return not self.on_device and any(map(operator.gt, owners, before[2]))

    def warn_held(self) -> None:
        """Warn the user, once, that the engine needed the memory and that it is held."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{format_size(self.layout.gathered_nbytes)} of unit {self.layout.name!r} stay on the device: "
            "something outside of the engine refers to them (a detached parameter, its `.data`, a numpy "
            "array, a view that a module returned). Until the program drops these references, this memory "
            "comes on top of device_memory; keep a clone() instead. metrics() counts such units as "
            "memory/held_units.",
            RuntimeWarning,
            stacklevel=5,
        )

    def warn_room(self, needed: int, planned: int) -> None:
        """Warn the user that units in use at once need `needed` bytes and not `planned`."""
        warnings.warn(
            f"unit {self.layout.name!r} needs {format_size(self.layout.gathered_nbytes)} on the device while "
            f"other units are in use: {format_size(needed)} instead of the planned {format_size(planned)}; "
            "the model uses more units at once than its structure shows. Name larger units with "
            "Config(units=[...]), so that the plan includes this.",
            RuntimeWarning,
            stacklevel=5,
        )

    def own_data(self, written: Collection[int]) -> None:
        """Before any unit is bound again: copy what parameters were given of storages that are `written`
        then (their addresses), as those of two parameters are that were exchanged."""
        for sharded in self.params:
            if not sharded.in_place(self.storage):
                with torch._C.DisableTorchFunctionSubclass():
                    data = sharded.param.data
                    if data.untyped_storage()._cdata in written:
                        sharded.param.data = data.clone()

    def rebind(self) -> list[ShardedParam]:
        """Make parameters that were given other data (`p.data = t`) views of the storage again, with the
        values of `t`, in their own dtype; return those whose data cannot be taken: of another shape. They
        are bound again too, with the values that they had."""
        refused = []
        for sharded, offset in zip(self.params, self.layout.byte_offsets, strict=True):
            if sharded.in_place(self.storage):
                continue
            with torch._C.DisableTorchFunctionSubclass():
                given, version = sharded.param.data, sharded.version
            # Values first: where an error ends this, what was given is still there.
            if given.shape == sharded.spec.shape:
                self.values(sharded).view(given.shape).copy_(given)
            else:
                refused.append(sharded)
            sharded.bind(self.storage, offset)
            sharded.version = version
        return refused

    def place(self) -> None:
        """Give the storage its memory for good, if that is to be so: then the copy's place is there."""
        if self.in_place:
            self._memory.fill()
        if self.on_device:
            self._enter(UnitState.UNSHARDED)

    def _become(self, state: UnitState) -> None:
        """Be in `state`. The one place where the class of a parameter is chosen, without calls: each use of a
        unit comes here twice."""
        usable = state is UnitState.UNSHARDED
        for sharded in self.params:
            if self.on_device and not (usable and sharded.on_detach is None):
                # Its values come without being asked for; or a state dict answers for it.
                sharded.param.__class__ = sharded.pending
            else:
                sharded.param.__class__ = sharded.cls if usable else sharded.released
        if state in WHOLE_STATES and self.state in WHOLE_STATES:
            self.state = state
        else:
            self._enter(state)

    def renew_classes(self) -> None:
        """Choose the parameters' classes again: a state dict has begun to answer for them, or has ended."""
        self._become(self.state)

    def load(self, loader: Loader, slots: Mapping[int, Slot], *, urgent: bool = False) -> None:
        """SHARDED → LOADING. Does not wait. `slots`: which version of each chunk's copy, by its id.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing has changed. With several ranks the load
                is late instead: [Note: late loads].
        """
        self._loader = loader
        if self.last_load is not None:
            self._wait_load()
        try:
            self._begin_load(slots, urgent=urgent)
        except torch.OutOfMemoryError:
            if self._comm.world == 1:
                raise
            self.late = slots
            self._become(UnitState.LOADING)

    def _begin_load(self, slots: Mapping[int, Slot], *, urgent: bool) -> None:
        loader = self._loader
        assert loader is not None
        self._memory.fill()
        after = self._device.mark()  # not before: what the memory was until now, the device may still use
        here = self.here() if self.placed else {}
        load = Load(self._flat, self.layout.chunks, slots, after, here)
        loader.start(load, urgent=urgent)
        self.last_load = load
        self.kept = False
        self._become(UnitState.LOADING)
        self.late = None

    def begin_late(self, *, urgent: bool) -> None:
        """Begin a load that is late.

        Raises:
            torch.OutOfMemoryError: the device still has no room; the load stays late.
        """
        if self.late is not None:
            self._begin_load(self.late, urgent=urgent)

    def put_off(self) -> bool:
        """Give the memory of a load back, and make the load late. Return False if it is no load of several
        ranks, or if the ranks gather it already; then do nothing."""
        load = self.last_load
        gathers = self._gather.has_begun
        if self._comm.world == 1 or self.state is not UnitState.LOADING or load is None or gathers:
            return False
        self._wait_load()
        if not self.is_held():
            self.drop()
        self.late = load.slots
        return True

    def expect(self, wait: Callable[[], None]) -> None:
        """UNSHARDED → LOADING, of a unit that is placed here: its values are about to change, and who looks
        at them `wait`s."""
        self.arriving = wait
        self._become(UnitState.LOADING)

    def arrived(self) -> None:
        """LOADING → UNSHARDED, of a unit that is placed here: what was expected has come."""
        self._become(UnitState.UNSHARDED)
        self.arriving = None

    def edited(self) -> list[ShardedParam]:
        """Return the parameters that were edited, as torch counts it, outside of a block that keeps edits.
        None of a unit that is placed here: its next update takes edits over."""
        if self.on_device:
            return []
        for use in self.users:
            if self.index in use.writes:
                return []
        found = []
        address = self.storage._cdata
        with torch._C.DisableTorchFunctionSubclass():
            for sharded in self.params:  # without calls: each use of a unit comes here
                param = sharded.param
                there = param.untyped_storage()._cdata == address
                place = param.storage_offset(), param.stride()
                if param._version != sharded.version or not there or place != sharded.place:
                    found.append(sharded)
        return found

    def check_edited(self) -> None:
        """Raise `ParameterChangedError` for what `edited` finds, unless the unit is in use and looked at
        later, or placed here: then the next update takes it over. The edits are gone then."""
        if self.state in IDLE_STATES and self.edited():
            self.invalidate()

    def wait_loaded(self) -> None:
        """Wait until a load has brought its values: the device does (on a CPU, the host). Raises what went
        wrong. The load is not late."""
        if self.last_load is not None:
            self._device.wait_on_device(self.last_load.wait_issued())  # reshard asks again

    def gather(self) -> None:
        """LOADING → GATHERED: get the slices of all ranks. With one rank, its slice is the whole unit: see
        [Note: load and gather]. The load is over.

        Raises:
            RankError: another rank failed, or makes another call.
        """
        if self.state is not UnitState.LOADING:
            return
        if self._comm.world > 1:
            self._gather.finish(self.runs())
        self._enter(UnitState.GATHERED)

    def gather_ahead(self) -> None:
        """Begin to gather a unit that is LOADING: it is used next, on all ranks. Does not wait. The load is
        not late."""
        if self.last_load is not None and self.state is UnitState.LOADING:
            self._gather.begin(self.last_load, self.runs())

    def unshard(self) -> None:
        """GATHERED → UNSHARDED.

        Raises:
            ParameterChangedError: a parameter was edited since the last use; the edit is gone.
        """
        if self.edited():
            self.invalidate()
        self._become(UnitState.UNSHARDED)

    def idle(self) -> None:
        """UNSHARDED → GATHERED: the unit is not in use; the storage stays filled until the engine needs room.

        Raises:
            ParameterChangedError: a parameter was edited, which would be lost.
        """
        edited = self.edited()
        self._become(UnitState.GATHERED)
        if edited:
            self.rebind()
            self._forget_edits()
            raise ParameterChangedError(
                f"the parameter {edited[0].name!r} was edited in place while it was gathered for use",
                expected="parameters that only the optimizer changes" if self._trains else "read-only values",
                found="an in-place edit",
                cure=_CURES[self._trains],
            )

    def _forget_edits(self) -> None:
        """What was edited is not to be used any more."""
        for param in self.params:
            param.version = param.current_version

    def _wait_load(self) -> None:
        """Wait until nothing is on its way to the storage."""
        load = self.last_load
        if load is not None:
            load.wait()
        if self._comm.world > 1:
            self._gather.wait()
        if load is not None and load.error is None:
            # On CUDA the storage was allocated on the compute stream; it must see the copy
            # before the memory is given to something else.
            self._device.wait_on_device(load.event)
            self._read = load.event
        self.last_load = None  # not before: an interrupt may end a wait, but not what fills the storage

    def wait_read(self) -> None:
        """Block until no load that was begun reads copies in host memory any more. Any thread that is about
        to change these calls it: for a load that nobody has used nobody else waits."""
        load = self.last_load
        for event in (self._read, None if load is None else load.event):
            if event is not None:
                wait_over(event)

    def reshard(self) -> bool:
        """LOADING or GATHERED → SHARDED: free the storage. The compute parameters were clean, so the engine
        writes nothing.

        Returns False, and does nothing, if the unit is held: [Note: held units]. With several ranks it goes
        on all of them at the same time: where it is held its memory is kept, and filled again.

        Raises:
            ParameterChangedError: a parameter was edited since the last use; it is freed, the edit is gone.
        """
        return self._let_go(keep=False)

    def _let_go(self, *, keep: bool) -> bool:
        self._wait_load()
        self.late = None
        held = self.is_held()
        if held and not keep and self._comm.world == 1:
            return False
        edited = self.edited()
        self._leave(kept=held)
        if edited:
            self._forget_edits()
            cure = "edit inside such a block; the values are those from before the edit"
            raise _edit_of(edited[0], "between its uses", cure)
        return not held or self._comm.world > 1

    def invalidate(self) -> None:
        """As `reshard`, because another version is about to arrive. The memory of a held unit is kept.

        Raises:
            ParameterChangedError: a parameter was edited since the last use; the edit is gone.
        """
        self._let_go(keep=True)

    def free_unused(self) -> None:
        """Free memory that was kept, if its owner has let go."""
        if self.kept and not self.is_held():
            self._leave(kept=False)

    def _leave(self, *, kept: bool) -> None:
        self.kept = kept
        if not kept:
            self.drop()
        self._enter(UnitState.SHARDED)

    @property
    def nbytes(self) -> int:
        """Bytes that count as the unit's own on the device. Memory that is held on one rank counts only
        there, and must not influence the decisions of all ranks."""
        there = self.state is not UnitState.SHARDED or (self.kept and self._comm.world == 1)
        return self.layout.gathered_nbytes if there else 0

    @property
    def is_away(self) -> bool:
        """Whether the unit has to be loaded before its next use."""
        return self.state is UnitState.SHARDED

    @property
    def waits_for_owner(self) -> bool:
        """Whether the unit's memory is held, with values from before an update; `refresh` writes the new
        ones."""
        return self.kept and self._comm.world == 1

    @property
    def missing_nbytes(self) -> int:
        """Bytes that a load takes more than there are."""
        return self.layout.gathered_nbytes - self.nbytes

    @property
    def in_use(self) -> bool:
        """Whether a use keeps the unit."""
        return bool(self.users)

    @property
    def keepers(self) -> list[Use]:
        """Of these, the `gathered` blocks: nothing but their end lets go."""
        return [use for use in self.users if use.kind is UseKind.BLOCK]

    @property
    def writers(self) -> list[Use]:
        """Of these, the blocks whose end takes over every edit."""
        return [use for use in self.users if self.index in use.writes]

    def load_is_over(self) -> bool:
        """Return whether freeing the unit would not wait."""
        return self._gather.is_over and (self.last_load is None or self.last_load.is_over())


def _edit_of(sharded: ShardedParam, how: str, cure: str) -> ParameterChangedError:
    return ParameterChangedError(
        f"the parameter {sharded.name!r} was edited {how}",
        expected="edits inside `with infinity.gathered(params, write=True):`",
        found="an edit through `p.data`, numpy or another alias",
        cure=cure,
    )
