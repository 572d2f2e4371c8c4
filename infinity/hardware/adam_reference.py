"""AdamW and Adam in plain torch, for tensors of any device: the bits of the native kernel.

It serves what is placed on a CUDA device. Single multiplications and additions, each rounded once:
[Note: one rounding per operation] in csrc/cpu_adam/adam_lane.inl.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from infinity.core.sizes import NORM_BLOCK

from .cpu_adam import (
    _CODES,
    Pieces,
    Scalars,
    Segment,
    _bad_segment,
    _check,
    _check_disjoint,
    _derive,
    _pieces,
    _state,
    _wrong,
)

_COLUMNS: Final = 16  # of a block's tree: [Note: the halving tree] in adam_lane.inl


def adamw_reference(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
) -> None:
    """`adamw_update` in plain torch, for tensors of any one device: the same bits.

    See [Note: one rounding per operation]. Temporary memory: a few slices of 2 Mi float32.
    """
    scalars = (lr, beta1, beta2, eps, weight_decay, step, grad_scale, decoupled, maximize)
    segment = Segment(0, master.numel(), *scalars)
    adamw_reference_segments(master, exp_avg, exp_avg_sq, grad, out, (segment,))


@torch.no_grad()
def adamw_reference_segments(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None,
    segments: Sequence[Segment],
) -> None:
    """`adamw_update_segments` in plain torch, for tensors of any one device: the same bits."""
    named = _state(master, exp_avg, exp_avg_sq, grad, out)
    for name, tensor in named:
        if tensor.device != master.device:
            raise _wrong(f"{name} is on another device", master.device, tensor.device, "move it there")
    _check_disjoint(named)
    runs: list[tuple[int, int, Scalars]] = []  # neighbours with equal scalars are one
    end = 0
    for index, segment in enumerate(segments):
        try:
            scalars = _derive(segment)
        except ValueError as error:
            raise _bad_segment(error, index) from error
        if segment.start < end or segment.start + segment.numel > master.numel():
            raise _bad_segment(ValueError(f"segment {index} is outside the chunk or out of order"))
        start, end = segment.start, segment.start + segment.numel
        if runs and runs[-1][1:] == (start, scalars):
            start = runs.pop()[0]
        runs.append((start, end, scalars))
    kinds = [(master.device, grad.dtype, scalars[2] != 0.0, scalars[-1]) for _, _, scalars in runs]
    kernels = [_fused(*kind) if master.device.type in _FUSED_ON else None for kind in kinds]
    for (first, last, scalars), fused in zip(runs, kernels, strict=True):
        if fused is not None:
            fused(master, exp_avg, exp_avg_sq, grad, first, last, scalars)
            if out is not None:
                out[first:last].copy_(master[first:last])
            continue
        for start in range(first, last, _SLICE):
            part = slice(start, min(start + _SLICE, last))
            _reference_slice(
                master[part],
                exp_avg[part],
                exp_avg_sq[part],
                grad[part],
                None if out is None else out[part],
                *scalars,
            )


_SLICE: Final = 1 << 21  # elements
_PROBE: Final = 50_000  # elements
#: Triton compiles anew for each number that is 1 or a multiple of 16.
_PROBED: Final = ((0, 1024), (1024, 32_768), (32_771, 49_901), (1, 2), (0, 777), (777, 4_000), (1, 16))
_FUSED_ON = {"cuda"}  # types of devices that Triton compiles for


@functools.cache
def _fused(
    device: torch.device, dtype: torch.dtype, has_l2: bool, from_grad: bool
) -> Callable[..., None] | None:
    """Return `update` of adam_fused.py for gradients of `dtype`; None where there is no Triton, where it
    cannot compile (it needs a C compiler), or where the first use gives other bits than plain torch."""
    wrong = ""
    try:
        from .adam_fused import update
    except ImportError:
        return None
    except MemoryError:
        raise
    except Exception as error:  # whatever a Triton that is broken raises
        wrong = f"{type(error).__name__}: {error}"
    draw = torch.Generator().manual_seed(0)
    sizes = torch.empty(4, _PROBE).uniform_(-100, 20, generator=draw).exp_()
    p, m, v, g = (torch.randn(4, _PROBE, generator=draw) * sizes).to(device)
    grad, ours, wanted = g.to(dtype), (p, m, v.square()), (p.clone(), m.clone(), v.square())
    l2 = 0.125 if has_l2 else 0.0  # fp32, as those of an update: plain torch multiplies it in fp64
    scalars: Scalars = (0.3, 0.999, l2, 0.1, 0.99, 0.01, 1.7, 1e-8, -1e-3, from_grad)
    for first, last in () if wrong else _PROBED:
        try:
            update(*ours, grad, first, last, scalars)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a compiler raises
            wrong = f"{type(error).__name__}: {error}"
            break
        part = slice(first, last)
        _reference_slice(wanted[0][part], wanted[1][part], wanted[2][part], grad[part], None, *scalars)
        pairs = [(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, wanted, strict=True)]
        if not all(torch.equal(a, b) for a, b in pairs):  # of all, also of what is not to be touched
            wrong = "other bits than torch"
            break
    if not wrong:
        return update
    warnings.warn(
        f"Adam on {device} runs in plain torch, in tens of launches for a chunk: Triton's kernel gives "
        f"{wrong}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _reference_slice(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None,
    grad_scale: float,
    decay: float,
    l2: float,
    lerp: float,
    beta2: float,
    square: float,
    inverse_root: float,
    eps: float,
    step_size: float,
    from_grad: bool,
) -> None:
    # Single multiplications and additions only: addcmul, addcdiv, lerp and add(alpha=) may be
    # contracted to fma, and torch on CUDA replaces a division by a number with a multiplication.
    g = grad.float()
    if grad_scale != 1.0:
        g = g * grad_scale
    if l2 != 0.0:
        g = (p.double().mul_(l2).add_(g)).float()
    if decay != 1.0:
        p.mul_(decay)
    way = (g - m).mul_(lerp)
    if from_grad:
        torch.add(g, way, out=m)
    else:
        m.add_(way)
    v.mul_(beta2)
    v.add_((g * square).mul_(g))
    d = _sqrt(v).mul_(inverse_root).add_(eps)
    p.add_((m * step_size).div_(d))
    if out is not None:
        out.copy_(p)


def _sqrt(v: torch.Tensor) -> torch.Tensor:
    # torch's float32 sqrt rounds correctly on CUDA, but with MKL it may be off by one. One ulp of
    # float64 is nothing: the root of a float32 is never that close to halfway between two.
    return v.double().sqrt_().float() if v.is_cpu else v.sqrt()


@torch.no_grad()
def sum_of_squares_reference(tensor: torch.Tensor, pieces: Pieces | None = None) -> npt.NDArray[np.float64]:
    """`sum_of_squares` in plain torch, for a tensor of any device: the same bits. Reads them once."""
    _check("tensor", tensor, tuple(_CODES))
    pieces = _pieces(tensor.numel(), pieces)
    trees: dict[int, list[int]] = {}  # pieces by the rows of their tree: rows of zeros change no sum
    for index, numel in enumerate(pieces[:, 1].tolist()):
        rows = max(1, -(-numel // _COLUMNS))
        trees.setdefault(1 << (rows - 1).bit_length(), []).append(index)
    sums = torch.empty(len(pieces), dtype=torch.float64, device=tensor.device)
    for height, indices in trees.items():
        most = 16 * NORM_BLOCK // (height * _COLUMNS)  # at a time: they are in float64
        for first in range(0, len(indices), most):
            some = indices[first : first + most]
            part = torch.zeros(len(some), height * _COLUMNS, dtype=torch.float64, device=tensor.device)
            row = 0
            for begin, numel, count in _runs(pieces[some].tolist()):  # each is one launch on a device
                part[row : row + count, :numel] = tensor[begin : begin + count * numel].view(count, numel)
                row += count
            sums[some] = _trees(part.view(len(some), height, _COLUMNS))
    return sums.cpu().numpy()


def _runs(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return pieces (begin, elements), of which neighbours of one size are one, with how many these are."""
    runs: list[tuple[int, int, int]] = []
    for begin, numel in pieces:
        if runs and runs[-1][1] == numel and runs[-1][0] + runs[-1][2] * numel == begin:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((begin, numel, 1))
    return runs


def _trees(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each (rows, columns) of `part`: [Note: the halving tree]."""
    rows = part * part
    while rows.shape[1] > 1:  # neighbours first: the tree's halves from its leaves up
        rows = rows[:, 0::2] + rows[:, 1::2]
    columns = rows[:, 0]
    while columns.shape[1] > 1:
        half = columns.shape[1] // 2
        columns = columns[:, :half] + columns[:, half:]
    return columns[:, 0]
