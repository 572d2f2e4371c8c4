"""The optimizers' arithmetic in plain torch, for tensors of any device: the bits of the native kernel.

It updates state that is placed on a CUDA device, with single multiplications and additions, each rounded
once: [Note: one rounding per operation] in csrc/cpu_adam/adam_lane.inl.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from infinity.core.sizes import MOMENT_BLOCK, NORM_BLOCK, ceil_to

from . import halves, log_codes
from .cpu_adam import (
    _CODES,
    RULES,
    Adagrad,
    Adam,
    Pieces,
    Scalars,
    Segment,
    _bad_segment,
    _check,
    _check_update,
    _derive,
    _rule_of,
    codes_and_scales,
)

_COLUMNS: Final = 16  # of a block's tree: [Note: the halving tree] in adam_lane.inl


class _Run(NamedTuple):
    """Elements, from `first` on, before `last`, that one call updates; of moments that are rounded, the place
    of the first within the parameter, and the key."""

    first: int
    last: int
    scalars: Scalars
    place: int
    key: int


@torch.no_grad()
def reference_segments(
    master: torch.Tensor,
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    out: torch.Tensor | None,
    segments: Sequence[Segment],
) -> None:
    """`update_segments` in plain torch, for tensors of any one device: the same bits."""
    kept, scales = _check_update(master, moments, grad, out, master.device)
    if (rule := _rule_of(segments, kept, scales)) is None:
        return
    form = moments[0].dtype if moments else torch.float32
    runs: list[_Run] = []  # neighbours with equal scalars are one, where nothing else counts
    end = 0
    for index, segment in enumerate(segments):
        try:
            scalars = _derive(rule, segment)
        except ValueError as error:
            raise _bad_segment(error, index) from error
        if segment.start < end or segment.start + segment.numel > master.numel():
            raise _bad_segment(ValueError(f"segment {index} is outside the chunk or out of order"))
        start, end = segment.start, segment.start + segment.numel
        if runs and form is torch.float32 and runs[-1][1:3] == (start, scalars):
            start = runs.pop().first
        runs.append(_Run(start, end, scalars, segment.first, segment.key))
    if master.dtype is torch.int16:
        assert out is not None, "`_check_update` has checked it"
        for run in runs:
            _in_halves(rule, master, out, moments, grad, run)
        return
    fuses = master.device.type in _FUSED_ON
    common = master.device, grad.dtype, rule, form
    kinds = [(*common, run.scalars[2] != 0.0, run.scalars[-1]) for run in runs]
    kernels = [(fuses and _fused(*kind)) or _in_torch for kind in kinds]
    for run, kernel in zip(runs, kernels, strict=True):
        kernel(rule, master, moments, grad, *run)
        if out is not None:
            out[run.first : run.last].copy_(master[run.first : run.last])


def _in_halves(
    rule: int,
    low: torch.Tensor,
    copy: torch.Tensor,
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    run: _Run,
) -> None:
    """Update a split master: slice by slice, as a whole one."""
    kept, scales = codes_and_scales(moments)
    for start in range(run.first, run.last, SLICE):
        part = slice(start, min(start + SLICE, run.last))
        blocks = slice(start // MOMENT_BLOCK, ceil_to(part.stop, MOMENT_BLOCK) // MOMENT_BLOCK)
        master = halves.join(copy[part], low[part], torch.empty(part.stop - start, device=low.device))
        own = [*(m[part] for m in kept), *(s[blocks] for s in scales)]
        place = run.place + start - run.first
        _in_torch(rule, master, own, grad[part], 0, master.numel(), run.scalars, place, run.key)
        halves.split(master, copy[part], low[part])


def _in_torch(
    rule: int,
    master: torch.Tensor,
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    first: int,
    last: int,
    scalars: Scalars,
    place: int,
    key: int,
) -> None:
    """What `update` of adam_fused.py does, in plain torch."""
    kept, scales = codes_and_scales(moments)
    squares = _SQUARES.get(rule, (False, False))
    for start in range(first, last, SLICE):
        part = slice(start, min(start + SLICE, last))
        blocks = slice(part.start // MOMENT_BLOCK, ceil_to(part.stop, MOMENT_BLOCK) // MOMENT_BLOCK)
        if scales:
            coded = [(m[part], s[blocks]) for m, s in zip(kept, scales, strict=True)]
            wide = [log_codes.decode(*of, squares=sq) for of, sq in zip(coded, squares, strict=False)]
        else:
            wide = [moment[part].float() for moment in kept]  # the moment itself, if it is fp32
        _reference_slice(_RULES[rule], master[part], wide, grad[part], *scalars)
        if not kept or kept[0].dtype is torch.float32:
            continue
        here = place + start - first
        if not scales:
            round_stochastically([m[part] for m in kept], wide, here, key)
            continue
        random = _random(wide[0], here, key)
        for number, value in enumerate(wide):
            below = (_half(random, number) << 4).int()
            log_codes.encode(value, *coded[number], squares=squares[number], below=below)


def round_stochastically(
    moments: Sequence[torch.Tensor], wide: Sequence[torch.Tensor], first: int, key: int
) -> None:
    """Put fp32 values into `moments` in bf16: [Note: stochastic rounding] in csrc/cpu_adam/adam_lane.inl."""
    random = _random(wide[0], first, key)
    for number, (moment, value) in enumerate(zip(moments, wide, strict=True)):
        bits = ((value.view(torch.int32).long() + _half(random, number)) >> 16).to(torch.int16)
        moment.view(torch.int16).copy_(torch.where(value.isnan(), -1, bits))


def _random(like: torch.Tensor, first: int, key: int) -> torch.Tensor:
    index = torch.arange(first, first + like.numel(), device=like.device)
    return _hashed((index & _LOW) ^ key ^ _hashed(index >> 32))


def _half(random: torch.Tensor, number: int) -> torch.Tensor:
    return random >> 16 if number else random & 0xFFFF


_LOW: Final = 0xFFFFFFFF


def _hashed(x: torch.Tensor) -> torch.Tensor:
    """Return lowbias32 of numbers of 32 bits, in int64."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _LOW
    return x ^ (x >> 16)


#: Elements that plain torch updates at once.
SLICE: Final = 1 << 21
_PROBE: Final = 50_000  # elements
#: Triton compiles anew for each number that is 1 or a multiple of 16.
_PROBED: Final = ((0, 1024), (1024, 32_768), (32_771, 49_901), (1, 2), (0, 777), (777, 4_000), (1, 16))
_FUSED_ON = {"cuda"}  # types of devices that Triton compiles for


@functools.cache
def _fused(
    device: torch.device, dtype: torch.dtype, rule: int, form: torch.dtype, has_l2: bool, flag: bool
) -> Callable[..., None] | None:
    """Return `update` of adam_fused.py for gradients of `dtype` and moments in `form`. None: there is no
    Triton, it cannot compile (it needs a C compiler), or its first use gives other bits than plain torch."""
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
    kinds = [v.square()] if rule == RULES[Adagrad][1] else [m, v.square()]  # a sum of squares has a root
    moments = [moment.to(form) for moment in kinds[: _COUNTS[rule]]]
    if form is torch.uint8:
        scales = [
            moment.new_empty(ceil_to(_PROBE, MOMENT_BLOCK) // MOMENT_BLOCK, dtype=torch.float32)
            for moment in moments
        ]
        for wide, codes, scale, squares in zip(
            kinds, moments, scales, _SQUARES.get(rule, (False,)), strict=False
        ):
            log_codes.encode(wide, codes, scale, squares=squares)
        moments += scales
    grad, ours, wanted = g.to(dtype), (p, moments), (p.clone(), [moment.clone() for moment in moments])
    l2 = 0.125 if has_l2 else 0.0  # fp32, as those of an update: plain torch multiplies it in fp64
    scalars: Scalars = (0.3, 0.999, l2, 0.1, 0.99, 0.01, 1.7, 1e-8, -1e-3, flag)
    for first, last in () if wrong else _PROBED:
        begin = first - first % MOMENT_BLOCK if form is torch.uint8 else first
        run = _Run(begin, last, scalars, (1 << 32) - 500, 0x9E3779B9)
        try:
            update(rule, ours[0], ours[1], grad, *run)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a compiler raises
            wrong = f"{type(error).__name__}: {error}"
            break
        _in_torch(rule, wanted[0], wanted[1], grad, *run)
        pairs = zip([ours[0], *ours[1]], [wanted[0], *wanted[1]], strict=True)
        # Of all, also of what is not to be touched.
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            wrong = "other bits than torch"
            break
    if not wrong:
        return update
    warnings.warn(
        f"the optimizer on {device} runs in plain torch, in tens of launches for a chunk: Triton's kernel "
        f"gives {wrong}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _reference_slice(
    rule: _Rule,
    p: torch.Tensor,
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    grad_scale: float,
    decay: float,
    l2: float,
    *scalars: float,
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
    rule(p, moments, g, *scalars)


# The rules of csrc/cpu_adam/rules.h, by their numbers there: of p, the moments, and the scaled gradient.


def _adam(
    p: torch.Tensor,
    moments: Sequence[torch.Tensor],
    g: torch.Tensor,
    lerp: float,
    beta2: float,
    square: float,
    inverse_root: float,
    eps: float,
    step_size: float,
    from_grad: float,
) -> None:
    m, v = moments
    way = (g - m).mul_(lerp)
    if from_grad:
        torch.add(g, way, out=m)
    else:
        m.add_(way)
    v.mul_(beta2)
    v.add_((g * square).mul_(g))
    d = _sqrt(v).mul_(inverse_root).add_(eps)
    p.add_((m * step_size).div_(d))


def _plain(
    p: torch.Tensor, moments: Sequence[torch.Tensor], g: torch.Tensor, step_size: float, *_: float
) -> None:
    p.add_(g * step_size)


def _momentum(
    p: torch.Tensor,
    moments: Sequence[torch.Tensor],
    g: torch.Tensor,
    step_size: float,
    momentum: float,
    undamped: float,
    *rest: float,
) -> None:
    if momentum:
        m = moments[0].mul_(momentum).add_(g * undamped)
        nesterov = rest[-1]
        g = g + m * momentum if nesterov else m
    p.add_(g * step_size)


def _lion(
    p: torch.Tensor,
    moments: Sequence[torch.Tensor],
    g: torch.Tensor,
    step_size: float,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    *_: float,
) -> None:
    p.add_((moments[0] * beta1).add_(g * rest1).sign_().mul_(step_size))
    moments[0].mul_(beta2).add_(g * rest2)


def _adagrad(
    p: torch.Tensor,
    moments: Sequence[torch.Tensor],
    g: torch.Tensor,
    step_size: float,
    eps: float,
    *_: float,
) -> None:
    total = moments[0].add_(g * g)
    p.add_((g * step_size).div_(_sqrt(total).add_(eps)))


_Rule: TypeAlias = Callable[..., None]
_RULES: Final[Sequence[_Rule]] = (_adam, _plain, _momentum, _lion, _adagrad)
#: Of those that have one, which moments are sums of squares.
_SQUARES: Final = {RULES[Adam][2]: (False, True), RULES[Adagrad][1]: (True,)}
#: Of each, how many moments it has.
_COUNTS: Final = {number: count for codes in RULES.values() for count, number in codes.items()}


def _sqrt(v: torch.Tensor) -> torch.Tensor:
    # torch's float32 sqrt rounds correctly on CUDA, but with MKL it may be off by one. One ulp of
    # float64 is nothing: the root of a float32 is never that close to halfway between two.
    return v.double().sqrt_().float() if v.is_cpu else v.sqrt()


def sum_of_squares_reference(tensor: torch.Tensor, pieces: Pieces | None = None) -> npt.NDArray[np.float64]:
    """`sum_of_squares` in plain torch, for a tensor of any device: the same bits. Reads them once."""
    return sums_of_squares_reference([(tensor, pieces)])[0]


@torch.no_grad()
def sums_of_squares_reference(
    parts: Sequence[tuple[torch.Tensor, Pieces | None]],
) -> list[npt.NDArray[np.float64]]:
    """`sum_of_squares` of several tensors of one device, in plain torch: the same bits. The host waits for
    it once.

    Trees grow together, up to `_AT_ONCE` elements of them, in thirty to fifty launches, of however many
    pieces. Temporary memory is 12 bytes for each of these elements (576 MiB), and a double for each piece.
    On a CPU, and on a device that has not that much, `_FEW_AT_ONCE` of them grow together (18 MiB).
    """
    device = parts[0][0].device if parts else torch.device("cpu")
    if device.type != "cpu":
        with contextlib.suppress(torch.OutOfMemoryError):
            return _sums_of_squares(parts, _AT_ONCE)
    return _sums_of_squares(parts, _FEW_AT_ONCE)


def _sums_of_squares(
    parts: Sequence[tuple[torch.Tensor, Pieces | None]], at_once: int
) -> list[npt.NDArray[np.float64]]:
    tensors = [tensor for tensor, _ in parts]
    for tensor in tensors:
        _check((("tensor", tensor, _CODES, None),), tensor.device)
    each = [(pieces or Pieces(tensor.numel())).places for tensor, pieces in parts]
    counts = [len(pieces) for pieces in each]
    found = np.empty(sum(counts))
    if len(found):
        places = np.concatenate(each)
        owners = np.repeat(np.arange(len(parts)), counts)
        kinds = np.array([_CODES[tensor.dtype] for tensor in tensors])[owners]
        # Rows of zeros change no sum: squares are not negative, so adding 0 to one, or to a sum of them,
        # gives its bits, also where it is Inf or NaN. So each tree has a power of two of rows.
        heights = _HEIGHTS[np.searchsorted(_HEIGHTS, -(-places[:, 1] // _COLUMNS))]
        orders, sums = [], []
        for kind in np.unique(kinds):
            some = np.flatnonzero(kinds == kind)
            order = some[np.argsort(-heights[some], kind="stable")]  # neighbours stay neighbours
            sizes = heights[order] * _COLUMNS
            cuts = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // at_once)) + 1
            for batch in np.split(order, cuts):
                sums.append(_trees(tensors, owners[batch], places[batch], heights[batch]))
            orders.append(order)
        found[np.concatenate(orders)] = torch.cat(sums).cpu().numpy()
    return np.split(found, np.cumsum(counts)[:-1])


_HEIGHTS: Final = 1 << np.arange((NORM_BLOCK // _COLUMNS).bit_length())  # rows of trees
#: Elements whose trees grow together: on a device, so that a chunk of 4 Mi costs at most four launches;
#: and so few that they stay in a CPU's caches.
_AT_ONCE: Final = 768 * NORM_BLOCK
_FEW_AT_ONCE: Final = 24 * NORM_BLOCK


def _trees(
    tensors: Sequence[torch.Tensor],
    owners: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    heights: npt.NDArray[np.int64],
) -> torch.Tensor:
    """Return the sum of squares of each piece: [Note: the halving tree]. `owners`: whose pieces they are, of
    tensors of one dtype; `heights`: the rows of their trees, of which the tallest come first."""
    zeros: torch.Tensor = tensors[owners[0]].new_zeros(int((heights * _COLUMNS - places[:, 1]).max()))
    rows: torch.Tensor = zeros.new_empty(0, 2 * int(heights[0]), _COLUMNS, dtype=torch.float64)
    while (height := rows.shape[1] // 2) > 0:  # neighbours first: the tree's halves from its leaves up
        at = len(rows)
        end = int(np.searchsorted(-heights, -height, side="right"))
        pairs, rows = rows, rows.new_empty(end, height, _COLUMNS)
        if at:
            torch.add(pairs[:, 0::2], pairs[:, 1::2], out=rows[:at])
        if at < end:
            leaves = rows[at:]
            flat = _padded(tensors, owners[at:end], places[at:end], height * _COLUMNS, zeros)
            leaves.copy_(flat.view(leaves.shape))
            leaves.mul_(leaves)
    columns = rows[:, 0]
    while columns.shape[1] > 1:
        half = columns.shape[1] // 2
        columns = columns[:, :half] + columns[:, half:]
    return columns[:, 0]


def _padded(
    tensors: Sequence[torch.Tensor],
    owners: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    size: int,
    zeros: torch.Tensor,
) -> torch.Tensor:
    """Return the elements of pieces, flat, each with zeros behind it up to `size`."""
    begins, numels = places.T
    # What lies side by side without zeros between is one range.
    joined = (numels[:-1] == size) & (owners[:-1] == owners[1:]) & (begins[:-1] + size == begins[1:])
    cuts = np.flatnonzero(~joined)
    firsts, lasts = [0, *(cuts + 1).tolist()], [*cuts.tolist(), len(places) - 1]
    ranges = []
    for first, last in zip(firsts, lasts, strict=True):
        ranges.append(tensors[owners[first]][begins[first] : begins[last] + numels[last]])
        if numels[last] < size:
            ranges.append(zeros[: size - numels[last]])
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges)
