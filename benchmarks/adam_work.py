"""State, gradient and copy of any number of parameters on huge pages, and their updates by the CPU's Adam.

One update of n parameters reads a bf16 gradient, the fp32 master and the moments, and writes the master,
the moments and a bf16 copy: with fp32 moments 14 B each way, with bf16 ones 10 B.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import torch

from infinity.core.config import Config, StateDtype
from infinity.core.sizes import MiB, ceil_to
from infinity.hardware import cpu_adam
from infinity.planning.parts import ADAM, Moment, moments_of, update_nbytes
from infinity.storage.memory import HostMapping

#: Forms of the moments.
MOMENTS: Final[tuple[StateDtype, ...]] = get_args(StateDtype)
_BF16: Final = 1  # as the native module numbers dtypes
_ADAMW: Final = cpu_adam.Adam(0.9, 0.999, 1e-8)
_SCALARS: Final = (1e-3, 0.01, 1.0)  # lr, weight_decay, grad_scale
_native: Final[Any] = vars(cpu_adam)["_native"]


class AdamWork:
    """State, gradient and copy of `numel` parameters, and updates of them; `moments`: in which form.

    Attributes:
        moved: bytes that are read and written of one parameter.
    """

    def __init__(self, numel: int, moments: StateDtype = "fp32", *, split_master: bool = False) -> None:
        kept = moments_of(ADAM, Config(optimizer_state_dtype=moments))
        self.moved = update_nbytes(numel, kept, 2, 0 if split_master else 2) / numel
        half = Moment("", "bf16")
        master = half if split_master else Moment("master", "fp32")
        tensors = [master, *kept, half, half]  # then gradient and copy
        self.numel, self._is_coded = numel, moments == "8bit"
        nbytes = sum(each.nbytes(numel) for each in tensors)
        self._mapping = HostMapping(nbytes + len(tensors) * 2 * MiB, populate=True)
        at = 0
        self._tensors: list[torch.Tensor] = []
        for each in tensors:
            self._tensors.append(self._mapping.tensor(at, each.nbytes(numel), each.dtype))
            at += ceil_to(each.nbytes(numel), 4096)
        if split_master:
            self._tensors[0] = self._tensors[0].view(torch.int16)
        self.reset()

    def reset(self) -> None:
        """Put plausible values there, as before the first update."""
        master, *moments, grad, copy = self._tensors
        grad.normal_(generator=torch.Generator().manual_seed(0))
        copy.copy_(grad)
        if master.dtype is torch.int16:
            master.zero_()
        else:
            master.copy_(grad)
        if self._is_coded:  # the first update makes the codes
            for moment in moments:
                moment.zero_()
        else:
            moments[0].copy_(grad).mul_(0.1)
            moments[1].copy_(moments[0]).square_()
        self._step = 0

    def update(self) -> None:
        """Update all of it once."""
        self._step += 1
        master, *moments, grad, copy = self._tensors
        key = cpu_adam.rounding_key("", self._step)
        segment = cpu_adam.Segment(0, self.numel, 0, key, self._step, *_SCALARS, False, _ADAMW)
        cpu_adam.update_segments(master, moments, grad, copy, (segment,))

    def traffic(self, *, past_caches: bool) -> None:
        """Move the bytes of an update without its arithmetic; not of moments in 8 bits, nor of a split
        master. The values become meaningless."""
        *state, grad, copy = (tensor.data_ptr() for tensor in self._tensors)
        kind = int(self._tensors[1].dtype is torch.bfloat16)
        _native.measure(*state, kind, grad, _BF16, copy, _BF16, self.numel, past_caches)
