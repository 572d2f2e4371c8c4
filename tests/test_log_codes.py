"""Moments in 8 bits: the code, and the kernels that have its bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from infinity.core.errors import ParameterError
from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import adam_reference, cpu_adam, log_codes
from infinity.hardware.cpu_adam import Adagrad, Adam, Lion, Options, Segment, rounding_key

from .device_bits import same, values
from .test_rules import ISAS, RULE_OPTIONS, segment

INF = float("inf")


pytestmark = pytest.mark.usefixtures("kernel_as_before")


def squares_of(options: Options, count: int) -> list[bool]:
    """Return which of the moments of a rule are sums of squares."""
    return {Adam: [False, True], Adagrad: [True]}.get(type(options), [False])[:count]


def coded(wide: Sequence[torch.Tensor], squares: Sequence[bool]) -> list[torch.Tensor]:
    """Return codes, then scales, of moments."""
    codes = [torch.zeros(len(w), dtype=torch.uint8) for w in wide]
    scales = [torch.zeros(-(-len(w) // MOMENT_BLOCK)) for w in wide]
    for value, code, scale, of_squares in zip(wide, codes, scales, squares, strict=True):
        log_codes.encode(value, code, scale, squares=of_squares)
    return [*codes, *scales]


def decoded(moments: Sequence[torch.Tensor], squares: Sequence[bool]) -> list[torch.Tensor]:
    codes, scales = cpu_adam.codes_and_scales(moments)
    return [
        log_codes.decode(c, s, squares=of_squares)
        for c, s, of_squares in zip(codes, scales, squares, strict=True)
    ]


class State:
    """Master, moments in 8 bits and copy of `n` parameters."""

    def __init__(self, n: int, options: Options, count: int, out: torch.dtype | None) -> None:
        self.squares = squares_of(options, count)
        self.master = values(n)
        self.moments = coded([values(n, 1 + k).square() for k in range(count)], self.squares)
        self.out = None if out is None else torch.zeros(n, dtype=out)

    def update(self, call: Any, grad: torch.Tensor, segments: Sequence[Segment]) -> None:
        call(self.master, self.moments, grad, self.out, segments)

    def is_same(self, other: State) -> bool:
        outs = self.out is None or other.out is None or same(self.out, other.out)
        pairs = zip(self.moments, other.moments, strict=True)
        bits = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        return outs and bits and same(self.master, other.master)


@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize(("options", "count"), RULE_OPTIONS, ids=str)
def test_every_instruction_set_gives_the_bits_of_plain_torch(
    options: Options, count: int, out: torch.dtype | None
) -> None:
    for n in (1, 255, 256, 600, 10_007):
        plain, others = State(n, options, count, out), [State(n, options, count, out) for _ in ISAS]
        half = n // 2 // MOMENT_BLOCK * MOMENT_BLOCK
        for step in (1, 2, 9):
            grad = values(n, 20 + step).to(torch.bfloat16 if step > 1 else torch.float32)
            if n > 7 and step == 9:
                grad[:3] = torch.tensor([INF, float("nan"), -INF])
            cuts = [
                segment(
                    max(half - 3, 0), options, step, first=(1 << 32) - 512
                ),  # the upper half changes in it
                segment(n - half, options, step, half, first=3 << 33, maximize=True),
            ]
            plain.update(adam_reference.reference_segments, grad, cuts)
            for isa, state in zip(ISAS, others, strict=True):
                cpu_adam.set_isa(isa)
                state.update(cpu_adam.update_segments, grad, cuts)
                assert state.is_same(plain), (isa, n, step)


def test_past_the_caches_and_on_threads_the_bits_are_the_same() -> None:
    n, options = (1 << 20) + 77, Adam(0.9, 0.999, 1e-8)
    grad = values(n, 9).bfloat16()
    starts = [0, 512, 768, 65_536, 500_224, n]
    cuts = [
        segment(end - start - (start % 512 == 0) * 100, options, 3, start, key=start)
        for start, end in itertools.pairwise(starts)
    ]
    plain = State(n, options, 2, torch.bfloat16)
    plain.update(adam_reference.reference_segments, grad, cuts)
    for isa in ISAS:
        for threads in (1, 3):
            cpu_adam.set_isa(isa)
            cpu_adam.set_threads(threads)
            found = State(n, options, 2, torch.bfloat16)
            found.update(cpu_adam.update_segments, grad, cuts)
            assert found.is_same(plain), (isa, threads)


def test_where_a_parameter_is_cut_changes_no_bit() -> None:
    n, options = 2900, Adam(0.9, 0.999, 1e-8)
    grad, whole, apart = values(n, 9), State(n, options, 2, None), State(n, options, 2, None)
    whole.update(cpu_adam.update_segments, grad, [segment(n, options, 3, first=256)])
    for low, high in ((0, 256), (256, 1024), (1024, n)):
        blocks = slice(low // MOMENT_BLOCK, -(-high // MOMENT_BLOCK))
        moments = [m[low:high] for m in apart.moments[:2]] + [m[blocks] for m in apart.moments[2:]]
        cut = segment(high - low, options, 3, first=256 + low)
        cpu_adam.update_segments(apart.master[low:high], moments, grad[low:high], None, [cut])
    assert apart.is_same(whole)


@pytest.mark.parametrize("squares", [False, True])
def test_a_value_comes_back_as_the_nearest_code(squares: bool) -> None:
    n = 10_007
    exact = values(n, 5)
    exact = exact.square() if squares else exact
    codes, scales = coded([exact], [squares])
    found = log_codes.decode(codes, scales, squares=squares)
    # Half of an eighth of the power of two below; what is far below the largest of its block is out of range.
    blocks = torch.nn.functional.pad(exact.abs(), (0, -n % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK).amax(1)
    largest = blocks.repeat_interleave(MOMENT_BLOCK)[:n]
    inside = exact.abs() > largest * 2.0 ** (-31 if squares else -15)
    assert int(inside.sum()) > n // 4
    assert float(((found - exact).abs() / exact.abs())[inside].max()) <= 1 / 16
    if squares:
        assert bool((found[exact > 0] > 0).all())
        assert bool((found[exact == 0] == 0).all())
    assert torch.equal(found.signbit(), exact.signbit())
    # From any element on; and codes of codes stand for the same values.
    blocks_from = scales[700 // MOMENT_BLOCK :]
    part = log_codes.decode(codes[700:], blocks_from, squares=squares, first=700 % MOMENT_BLOCK)
    assert torch.equal(part, found[700:])
    again = decoded(coded([found], [squares]), [squares])[0]
    assert torch.equal(again, found)


def test_infinity_and_nan_stay_and_zero_stays_zero() -> None:
    options = Lion(0.9, 0.99)
    moments = coded([torch.tensor([INF, float("nan"), 0.0, -INF])], [False])
    for step in range(1, 50):
        cpu_adam.update_segments(torch.zeros(4), moments, torch.zeros(4), None, [segment(4, options, step)])
    found = decoded(moments, [False])[0]
    assert found[[0, 2, 3]].tolist() == [INF, 0.0, -INF]
    assert bool(found[1].isnan())


def test_the_rounding_is_unbiased() -> None:
    """The mean over many elements, within five standard deviations of what an even distribution has."""
    n, options = 1 << 18, Adam(0.9, 0.999, 1e-8)
    draw = torch.Generator().manual_seed(0)
    wide = [torch.rand(n, generator=draw) + 1, torch.rand(n, generator=draw) + 1]
    moments = coded(wide, [False, True])
    exact, grad = decoded(moments, [False, True]), torch.rand(n, generator=draw)
    for kept in (exact, moments):
        cut = segment(n, options, 1, key=rounding_key("a", 1))
        cpu_adam.update_segments(torch.zeros(n), kept, grad, None, [cut])
    for value, found in zip(exact, decoded(moments, [False, True]), strict=True):
        below = value.view(torch.int32) & ~0xFFFFF
        place = (below + 0x100000).view(torch.float32) - below.view(torch.float32)
        error = ((found - value) / place).double()
        assert float(error.abs().max()) < 1
        assert abs(float(error.mean())) < 5 * (1 / 6 / n) ** 0.5


@pytest.mark.parametrize("call", [cpu_adam.update_segments, adam_reference.reference_segments])
def test_what_is_no_moment_in_8_bits_is_refused(call: Any) -> None:
    n, options = 600, Lion(0.9, 0.99)
    master, grad, codes = torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.uint8)
    scales = torch.zeros(3)
    before = master.clone()
    for moments, cut, message in (
        ([codes, scales], segment(10, options, 1, 100), "inside a block"),
        ([codes, scales], segment(10, options, 1, first=100), "inside a block"),
        ([codes, scales[:2].clone()], segment(10, options, 1), "wrong length"),
        ([codes, scales.int()], segment(10, options, 1), "wrong dtype"),
        ([codes], segment(10, options, 1), "has scales"),
        ([codes, codes.clone(), scales, scales.clone()], segment(10, options, 1), "other moments"),
    ):
        with pytest.raises(ParameterError, match=message):
            call(master, moments, grad, None, [cut])
    assert torch.equal(master, before)
