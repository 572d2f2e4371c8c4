"""What state dicts give out: a storage of its own for each tensor, and which copies were edited.

In torch each parameter has a storage of its own, and libraries that save models (safetensors, accelerate,
`torch.save`) recognise tied parameters by it. A unit's parameters share one storage. So a state dict gets an
alias through DLPack, which has a storage over exactly its bytes and keeps the unit's storage for as long as
it lives.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from infinity.core.errors import ParameterChangedError

from .param import ShardedParam


def own(values: torch.Tensor) -> torch.Tensor:
    """Return contiguous `values` in a storage over their memory and no more; `values` where they have one."""
    if values.untyped_storage().nbytes() == values.nbytes and not values.is_inference():
        return values
    with torch.inference_mode(False):  # what is made in that mode has no version counter
        flat = values.detach().view(-1)  # as torch < 2.8 changes strides of what has a dimension of 1
        return from_dlpack(to_dlpack(flat)).view(values.shape)


class _GivenCopy:
    """One that was given out, without its memory: its version counter stays when it is gone."""

    __slots__ = ("_counter", "storage", "version")

    def __init__(self, copy: torch.Tensor) -> None:
        self.storage = StorageWeakRef(copy.untyped_storage())
        with torch.inference_mode(False):
            self._counter = copy.detach()
            self._counter.data = torch.empty(0, dtype=copy.dtype)
        self.version = self.now

    @property
    def now(self) -> int:
        return self._counter._version


class Given:
    """Copies of parameters that state dicts gave out, where torch gives out the parameters: an edit of one is
    lost. `staged`: the device is not the host; there ``.cpu()`` would be a copy in torch, and is none here.
    """

    def __init__(self, *, staged: bool) -> None:
        self._staged = staged
        self._copies: dict[
            ShardedParam, list[_GivenCopy]
        ] = {}  # those that live, or were not looked at since

    def add(self, sharded: ShardedParam, copy: torch.Tensor) -> None:
        """Note a copy that is about to be given out."""
        self._copies.setdefault(sharded, []).append(_GivenCopy(copy))

    def forget(self, params: Iterable[ShardedParam]) -> None:
        """Edits so far do not count: these parameters were loaded or written, as in torch over the edit."""
        for sharded in params if self._copies else ():
            for copy in self._copies.get(sharded, ()):
                copy.version = copy.now

    def check(self) -> None:
        """Check for edits that torch counts since the last check, also of copies that are gone since.

        Raises:
            ParameterChangedError: there is an edit. On a device that is not the host this is a warning.
        """
        if not self._copies:
            return
        before = self._copies
        alive = {s: [c for c in copies if not c.storage.expired()] for s, copies in before.items()}
        edited = [s for s, copies in before.items() if any(c.now != c.version for c in copies)]
        self._copies = {s: copies for s, copies in alive.items() if copies}
        if not edited:
            return
        self.forget(edited)
        error = ParameterChangedError(
            f"the program edited a copy of the parameter {edited[0].name!r} from a state dict; the parameter "
            "itself has not changed",
            expected="edits of parameters themselves",
            found=f"an in-place edit of tensors of `state_dict()`, of {len(edited)} parameters",
            cure="edit inside `with infinity.gathered(params, write=True):`, or pass the edited tensors to "
            "`load_state_dict`; clone() tensors whose edits are not for the model",
        )
        if not self._staged:
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
