"""The optimizers' arithmetic over flat tensors on the CPU: the native kernel.

It gives the same bits ([Note: one rounding per operation] in csrc/cpu_adam/adam_lane.inl) on every
instruction set and with any number of threads. Every tensor is 1-D and contiguous. A wrong argument or a lack
of memory raises an error before the kernel writes a byte. The kernel runs without the GIL.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from infinity.core.errors import BuildError, ConfigError, ParameterError
from infinity.core.sizes import MOMENT_BLOCK, NORM_BLOCK

from .cores import usable_cores

try:
    from infinity import _cpu_adam as _native
except ImportError as error:
    raise BuildError(
        "the native CPU Adam cannot be loaded",
        expected="the extension module infinity._cpu_adam, built for this Python",
        found=str(error),
        cure="`pip install .` in the source directory",
    ) from error

#: Instruction sets, as INFINITY_ISA names them.
ISAS: Final = ("scalar", "avx2", "avx512", "neon", "sve256", "sve512")
#: Of `_derive`: grad_scale, decay, l2, six numbers of the rule (csrc/cpu_adam/rules.h), and its flag.
Scalars: TypeAlias = tuple[float, float, float, float, float, float, float, float, float, bool]
_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NONE: Final = 3
_MASTERS: Final = (torch.float32, torch.int16)
_MOMENT_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 4}
_DTYPE: Final = operator.attrgetter("dtype")
_OPTIONS: Final = operator.attrgetter("options")
_PACKED: Final = struct.Struct("<qqqqddddddI??2x")  # struct Segment in adam.h


class Adam(NamedTuple):
    """The options of AdamW, or, if weight decay is not `decoupled`, of Adam. Moments: exp_avg, exp_avg_sq."""

    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True


class SGD(NamedTuple):
    """The options of `torch.optim.SGD`. Moment: momentum_buffer; none, if there is no momentum anywhere."""

    momentum: float
    dampening: float
    nesterov: bool


class Lion(NamedTuple):
    """The options of Lion (arXiv 2302.06675, algorithm 2). Moment: exp_avg."""

    beta1: float
    beta2: float


class Adagrad(NamedTuple):
    """The options of `torch.optim.Adagrad`. Moment: sum."""

    lr_decay: float
    eps: float


Options: TypeAlias = Adam | SGD | Lion | Adagrad
#: Of each rule, its number in the kernel by the count of its moments.
RULES: Final[Mapping[type, Mapping[int, int]]] = {
    Adam: {2: 0},
    SGD: {0: 1, 1: 2},
    Lion: {1: 3},
    Adagrad: {1: 4},
}
_Numbers: TypeAlias = tuple[float, float, float, bool]
_NUMBERS: Final[Mapping[type, Callable[[Any], _Numbers]]] = {
    Adam: lambda of: (of.beta1, of.beta2, of.eps, of.decoupled),
    SGD: lambda of: (of.momentum, of.dampening, 0.0, of.nesterov),
    Lion: lambda of: (of.beta1, of.beta2, 0.0, False),
    Adagrad: lambda of: (of.lr_decay, of.eps, 0.0, False),
}


class Segment(NamedTuple):
    """One parameter's part of a chunk, and the scalars of its update.

    `start` and `numel` count elements within the chunk; `first` is the index within the parameter of the
    first of them, and `key` that of `rounding_key`; fp32 moments need neither. `step` is 1 at the
    first update; `grad_scale` multiplies the gradient first; `maximize`: ascend. The scalars are float64
    here and rounded as torch rounds them.
    """

    start: int
    numel: int
    first: int
    key: int
    step: int
    lr: float
    weight_decay: float
    grad_scale: float
    maximize: bool
    options: Options


def rounding_key(name: str, step: int) -> int:
    """Return the key (32 bits) of the stochastic rounding of a parameter's moments in one step. See
    [Note: stochastic rounding] in csrc/cpu_adam/adam_lane.inl."""
    digest = hashlib.blake2b(f"{step} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


# ---- instruction sets and threads ----


def isa() -> str:
    """Return the instruction set in use, one of ISAS; ``sve256`` is SVE with vectors of 256 bits."""
    return _native.isa()


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets that work on this machine, the widest last."""
    return tuple(_native.available_isas())


def set_isa(name: str) -> None:
    """Use the instruction set `name` from now on. The results are the same.

    Raises:
        ConfigError: it is unknown, or does not work on this machine.
    """
    if not _native.use_isa(name):
        raise ConfigError(
            "this machine has no such instruction set" if name in ISAS else "unknown instruction set",
            expected=", ".join(available_isas()),
            found=repr(name),
            cure=f"unset INFINITY_ISA, or INFINITY_ISA={available_isas()[-1]}",
        )


def threads() -> int:
    """Return how many threads one call uses, the caller's included."""
    return _native.threads()


def set_threads(count: int | None) -> None:
    """Use `count` threads; None: one for each of `usable_cores`.

    Raises:
        ConfigError: `count` is below 1.
    """
    if count is not None and count < 1:
        raise ConfigError(
            "the CPU Adam needs a thread", expected="an integer ≥ 1", found=repr(count), cure="threads=1"
        )
    _native.set_threads(count or usable_cores().mine)


set_threads(None)  # the native default does not know of a cgroup's quota
if os.environ.get("INFINITY_ISA"):
    set_isa(os.environ["INFINITY_ISA"])


# ---- the update ----


def update_segments(
    master: torch.Tensor,
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    out: torch.Tensor | None,
    segments: Sequence[Segment],
) -> None:
    """Update the segments of a chunk in one call; nothing between them is read or written.

    Args:
        master: (n,) float32; or (n,) int16, the lower halves of a split master, of which `out`, in bfloat16,
            has the upper halves: [Note: a split master] in csrc/cpu_adam/adam_lane.inl.
        moments: what the segments' rule keeps, (n,) each, all float32, or all bfloat16, which is rounded
            stochastically. Or all in 8 bits: their codes, (n,) uint8 each, then the scales of each,
            (⌈n / 256⌉,) float32. Then each segment begins at a multiple of 256 in the chunk, and in its
            parameter.
        grad: (n,) float32, bfloat16 or float16.
        out: (n,) float32, bfloat16 or float16 (to nearest, ties to even), or None.
        segments: in ascending order, without overlap, of one rule.

    Raises:
        ParameterError: a wrong device, dtype, length, layout or scalar; tensors that overlap; a segment that
            is outside the chunk or out of order; segments of several rules; moments that are not those of the
            rule.
    """
    kept, scales = codes_and_scales(moments)
    form = kept[0].dtype if kept else torch.float32
    numel = master.numel() if isinstance(master, torch.Tensor) else -1
    checks: list[_Check] = [(master, _MASTERS, numel), (grad, _CODES, numel)]
    checks += zip(kept, itertools.repeat((form,)), itertools.repeat(numel), strict=False)
    checks += zip(
        scales, itertools.repeat(_MASTERS[:1]), itertools.repeat(-(-numel // MOMENT_BLOCK)), strict=False
    )
    if out is not None:
        checks.append((out, _CODES, numel))
    whole = len(scales) == len(kept) * (form is torch.uint8) and form in _MOMENT_CODES
    split = numel >= 0 and master.dtype is torch.int16
    if not (whole and _fit(checks) and (not split or (out is not None and out.dtype is torch.bfloat16))):
        named = _state(master, moments, grad, out)
        for name, tensor in named:
            if not tensor.is_cpu:
                raise _wrong(
                    f"{name} is not on the CPU", "cpu", tensor.device, "use reference_segments there"
                )
        _check_disjoint(named)
    if (rule := _rule_of(segments, kept, scales)) is None:
        return
    first, second = (*map(torch.Tensor.data_ptr, kept), 0, 0)[:2]
    first_scales, second_scales = (*map(torch.Tensor.data_ptr, scales), 0, 0)[:2]
    try:
        _native.update(
            rule,
            master.data_ptr(),
            split,
            first,
            second,
            first_scales,
            second_scales,
            _MOMENT_CODES[form],
            grad.data_ptr(),
            _CODES[grad.dtype],
            0 if out is None else out.data_ptr(),
            _NONE if out is None else _CODES[out.dtype],
            numel,
            _pack(segments),
        )
    except ValueError as error:
        raise _bad_segment(error) from error


def _rule_of(
    segments: Sequence[Segment], kept: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> int | None:
    """Return the rule's number in the kernel; None: there is nothing to update."""
    try:
        kinds = {*map(type, map(_OPTIONS, segments))}
    except AttributeError as error:
        raise _bad_segment(error) from error
    if not kinds:
        return None
    if len(kinds) > 1 or not kinds <= RULES.keys():
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise _wrong("a chunk has one rule", "segments with options of one", names, "call it for each")
    kind = kinds.pop()
    codes = RULES[kind]
    if len(kept) not in codes:
        wanted = " or ".join(map(str, codes))
        raise _wrong(f"{kind.__name__} has other moments", wanted, len(kept), "pass those of the rule")
    for segment in segments if scales else ():
        if segment.start % MOMENT_BLOCK or segment.first % MOMENT_BLOCK:
            found = f"element {segment.start} of the chunk, and {segment.first} of the parameter"
            expected = f"multiples of {MOMENT_BLOCK}"
            raise _wrong("a segment begins inside a block of 8-bit moments", expected, found, "cut at blocks")
    return codes[len(kept)]


def codes_and_scales(
    moments: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the moments, or their codes if they are in 8 bits; and the scales of these."""
    count = [*map(_DTYPE, moments)].count(torch.uint8) or len(moments)
    return moments[:count], moments[count:]


# ---- sums of squares, sums, conversions, copies ----


class Pieces:
    """Pieces of a tensor, checked.

    Args:
        numel: of the tensor.
        places: (k, 2) int64: first element, and number of elements (65,536 at most); None: blocks of 65,536
            elements, of which the last may be shorter.

    Raises:
        ParameterError: a piece is too long, or outside the tensor.
    """

    __slots__ = ("address", "numel", "places")

    def __init__(self, numel: int, places: npt.NDArray[np.int64] | None = None) -> None:
        if places is None:
            begins = np.arange(0, numel, NORM_BLOCK, dtype=np.int64)
            places = np.stack([begins, np.minimum(NORM_BLOCK, numel - begins)], axis=1)
        whole = (
            *(places.ndim == 2 and places.shape[1] == 2, places.dtype == np.int64),
            places.flags.c_contiguous,
        )
        if not all(whole) or (
            len(places)
            and (places.min() < 0 or places[:, 1].max() > NORM_BLOCK or places.sum(1).max() > numel)
        ):
            found = str(places.tolist()) if all(whole) else f"shape {places.shape} of {places.dtype}"
            expected = f"(k, 2) int64, of at most {NORM_BLOCK} elements each within {numel}"
            raise _wrong("these pieces cannot be summed", expected, found, "cut the tensor's own elements")
        self.numel, self.places, self.address = numel, places, places.ctypes.data


def sum_of_squares(tensor: torch.Tensor, pieces: Pieces | None = None) -> npt.NDArray[np.float64]:
    """Return the sum of squares of each piece; None: of each of its blocks.

    Each is summed in double as a fixed tree, so the bits depend on the values alone. NaN and
    Inf show in the sum of their piece. See [Note: norms] and [Note: the halving tree].

    Args:
        tensor: (n,) float32, bfloat16 or float16 on the CPU.

    Returns:
        (k,) float64.

    Raises:
        ParameterError: a wrong device, dtype or layout, or pieces of another tensor.
    """
    if pieces is None or not _fit(((tensor, _CODES, pieces.numel),)):
        _check("tensor", tensor, tuple(_CODES), numel=None if pieces is None else pieces.numel, cpu=True)
        pieces = pieces or Pieces(tensor.numel())
    sums = np.empty(len(pieces.places), dtype=np.float64)
    address = sums.__array_interface__["data"][0]
    _native.sum_of_squares(
        tensor.data_ptr(), _CODES[tensor.dtype], pieces.address, len(pieces.places), address
    )
    return sums


def accumulate(target: torch.Tensor, source: torch.Tensor) -> None:
    """Add `source` to `target`, in place, in float32.

    Args:
        target: (n,) float32 on the CPU.
        source: (n,) float32, bfloat16 or float16 on the CPU.

    Raises:
        ParameterError: a wrong device, dtype, length or layout, or tensors that overlap.
    """
    numel = target.numel()
    if not _fit(((target, _MASTERS[:1], numel), (source, _CODES, numel))):
        _check_pair(target, source, _MASTERS[:1])
    _native.accumulate(target.data_ptr(), source.data_ptr(), _CODES[source.dtype], target.numel())


def convert(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write `source`, rounded to nearest (ties to even), to `target`.

    A NaN becomes torch's NaN: 0xFFFF in bfloat16, its leading bits in float16.

    Args:
        target, source: (n,) float32, bfloat16 or float16 on the CPU.

    Raises:
        ParameterError: a wrong device, dtype, length or layout, or tensors that overlap.
    """
    numel = target.numel()
    if not _fit(((target, _CODES, numel), (source, _CODES, numel))):
        _check_pair(target, source, tuple(_CODES))
    if target.dtype is source.dtype:
        _native.copy_bytes(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        codes = _CODES[target.dtype], _CODES[source.dtype]
        _native.convert(target.data_ptr(), codes[0], source.data_ptr(), codes[1], target.numel())


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` from address `source` to address `target` on several threads.

    The addresses are trusted: both ranges must be mapped and must not overlap.

    Raises:
        ParameterError: `nbytes` is negative, or the ranges overlap.
    """
    if nbytes < 0 or (abs(target - source) < nbytes and nbytes):
        raise _wrong(
            "these bytes cannot be copied", "two ranges apart", (target, source, nbytes), "copy once"
        )
    _native.copy_bytes(target, source, nbytes)


# ---- checks ----

_Named = Sequence[tuple[str, torch.Tensor]]
#: A tensor, the dtypes that it may have, and its length.
_Check: TypeAlias = tuple[torch.Tensor, Collection[torch.dtype], int]


def _fit(checks: Iterable[_Check]) -> bool:
    """Return whether tensors on the CPU are flat and contiguous, as they must be, and do not overlap. In one
    call, because each chunk makes it; where it is false, the checks below say what is wrong."""
    ranges = []
    for tensor, dtypes, numel in checks:
        if not (
            isinstance(tensor, torch.Tensor)
            and tensor.is_cpu
            and tensor.dtype in dtypes
            and tensor.layout is torch.strided
            and tensor.dim() == 1
            and tensor.is_contiguous()
            and tensor.numel() == numel
        ):
            return False
        if numel:
            ranges.append((tensor.data_ptr(), tensor.nbytes))
    ranges.sort()
    last = 0
    for begin, nbytes in ranges:
        if begin < last:
            return False
        last = begin + nbytes
    return True


def _check_pair(target: torch.Tensor, source: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    _check("target", target, dtypes, cpu=True)
    _check("source", source, tuple(_CODES), numel=target.numel(), cpu=True)
    _check_disjoint((("target", target), ("source", source)))


def _state(
    master: torch.Tensor, moments: Sequence[torch.Tensor], grad: torch.Tensor, out: torch.Tensor | None
) -> _Named:
    _check("master", master, (torch.float32, torch.int16))
    numel = master.numel()
    named = [("master", master)]
    if master.dtype is torch.int16 and (out is None or out.dtype is not torch.bfloat16):
        found = "no out" if out is None else str(out.dtype)
        raise _wrong("a split master has no upper halves", "out in bfloat16", found, "pass the bf16 copy")
    kept, scales = codes_and_scales(moments)
    for number, moment in enumerate(kept):
        name = "exp_avg" if number == 0 else "exp_avg_sq"
        kinds = tuple(_MOMENT_CODES) if number == 0 else (kept[0].dtype,)
        _check(name, moment, kinds, numel=numel)
        named.append((name, moment))
    if len(scales) != len(kept) * (bool(kept) and kept[0].dtype is torch.uint8):
        found = f"{len(kept)} moments and {len(scales)} scales"
        raise _wrong(
            "each moment in 8 bits has scales", "codes of all, then scales of all", found, "pass both"
        )
    for number, scale in enumerate(scales):
        name = f"the scales of moment {number}"
        _check(name, scale, (torch.float32,), numel=-(-numel // MOMENT_BLOCK))
        named.append((name, scale))
    _check("grad", grad, tuple(_CODES), numel=numel)
    named.append(("grad", grad))
    if out is not None:
        _check("out", out, tuple(_CODES), numel=numel)
        named.append(("out", out))
    return named


def _check(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    *,
    numel: int | None = None,
    cpu: bool = False,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise _wrong(f"{name} is not a tensor", "a torch.Tensor", type(tensor).__name__, "pass a tensor")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise _wrong(f"{name} has a wrong dtype", wanted, tensor.dtype, f"convert {name}")
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.layout is not torch.strided:
        found = f"shape {tuple(tensor.shape)}, stride {tensor.stride()}"
        raise _wrong(f"{name} is not flat and contiguous", "a contiguous 1-D tensor", found, "flatten it")
    if numel is not None and tensor.numel() != numel:
        raise _wrong(f"{name} has a wrong length", f"{numel} elements", tensor.numel(), f"cut {name}")
    if cpu and not tensor.is_cpu:
        raise _wrong(f"{name} is not on the CPU", "cpu", tensor.device, f"copy {name} to the CPU")


def _check_disjoint(named: _Named) -> None:
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in named if t.numel())
    for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
        if start < end:
            found = f"{end - start} bytes in common"
            raise _wrong(f"{first} and {second} overlap", "memory apart", found, "give each its own memory")


def _pack(segments: Sequence[Segment]) -> bytes:
    packed = []
    try:
        for start, numel, first, key, step, *scalars, maximize, options in segments:
            *numbers, flag = _numbers_of(options)
            packed.append(_PACKED.pack(start, numel, first, step, *scalars, *numbers, key, flag, maximize))
    except (struct.error, TypeError, OverflowError) as error:
        raise _bad_segment(error) from error
    return b"".join(packed)


@functools.lru_cache(typed=True)
def _numbers_of(options: Options) -> _Numbers:
    return _NUMBERS[type(options)](options)


def _derive(rule: int, segment: Segment) -> Scalars:
    """Return the kernel's own scalars of a segment, each rounded to float32 once."""
    return _native.derive(rule, _pack((segment,)))


def _bad_segment(error: Exception, index: int | None = None) -> ParameterError:
    found = str(error) if index is None else str(error).replace("segment 0", f"segment {index}")
    return _wrong(
        "a segment cannot be updated",
        "segments in ascending order within the chunk, step ≥ 1, betas in [0, 1), numbers for scalars",
        found,
        "correct the segment",
    )


def _wrong(what: str, expected: object, found: object, cure: str) -> ParameterError:
    return ParameterError(what, expected=expected, found=str(found), cure=cure)
