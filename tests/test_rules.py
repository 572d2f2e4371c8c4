"""The kernels of the optimizers, and moments in bf16 and in 8 bits: torch's results, and the
same bits everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from infinity.core.errors import ParameterError
from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import adam_reference, cpu_adam, log_codes
from infinity.hardware.cpu_adam import RULES, SGD, Adagrad, Adam, Lion, Options, Segment, rounding_key
from infinity.optim.rules import rule_of

from .device_bits import bits, values
from .whole import OPTIMIZERS

ISAS = cpu_adam.available_isas()
INF = float("inf")
RULE_OPTIONS: list[tuple[Options, int]] = [
    (Adam(0.9, 0.999, 1e-8), 2),
    (Adam(0.3, 0.99, 0.0, decoupled=False), 2),
    (SGD(0.0, 0.0, False), 0),
    (SGD(0.0, 0.0, False), 1),
    (SGD(0.9, 0.5, False), 1),
    (SGD(0.9, 0.0, True), 1),
    (Adagrad(0.1, 1e-10), 1),
    (Lion(0.9, 0.99), 1),
]
CODES = torch.uint8
pytestmark = pytest.mark.usefixtures("kernel_as_before")


def squares_of(options: Options, count: int) -> list[bool]:
    """Return which of the moments of a rule are sums of squares."""
    return {Adam: [False, True], Adagrad: [True]}.get(type(options), [False])[:count]


def coded(wide: Sequence[torch.Tensor], squares: Sequence[bool]) -> list[torch.Tensor]:
    """Return codes, then scales, of moments."""
    codes = [torch.zeros(len(w), dtype=CODES) for w in wide]
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
    """Master and moments of parameters, the latter in `kind`, from their values in fp32."""

    def __init__(self, options: Options, wide: Sequence[torch.Tensor], kind: torch.dtype) -> None:
        self.kind, self.squares = kind, squares_of(options, len(wide))
        self.master = values(len(wide[0]))
        self.moments = coded(wide, self.squares) if kind is CODES else [w.to(kind) for w in wide]

    def update(self, grad: torch.Tensor, cut: Segment) -> None:
        cpu_adam.update_segments(self.master, self.moments, grad, None, [cut])

    def wide(self) -> list[torch.Tensor]:
        if self.kind is CODES:
            return decoded(self.moments, self.squares)
        return [moment.float() for moment in self.moments]


def segment(numel: int, options: Options, step: int, start: int = 0, **more: Any) -> Segment:
    given: dict[str, Any] = {"first": 0, "key": rounding_key("w", step), "lr": 1e-2, "weight_decay": 0.1}
    given |= {"grad_scale": 0.7, "maximize": False, **more}
    return Segment(start=start, numel=numel, step=step, options=options, **given)


def test_lion_has_the_zeros_of_plain_torch() -> None:
    """A parameter of −0 whose direction is 0 or NaN stays −0: on every instruction set, and in the tail."""
    special = torch.tensor([0.0, -0.0, math.nan, -math.nan])
    master, moment, grad = torch.cartesian_prod(torch.tensor([0.0, -0.0]), special, special).T.contiguous()
    for n in (32, 31):
        cut = [segment(n, Lion(0.9, 0.99), 1)]
        expected = master[:n].clone()
        adam_reference.reference_segments(expected, [moment[:n].clone()], grad[:n], None, cut)
        assert torch.equal(bits(expected), bits(master[:n]))
        for isa in ISAS:
            cpu_adam.set_isa(isa)
            found = master[:n].clone()
            cpu_adam.update_segments(found, [moment[:n].clone()], grad[:n], None, cut)
            assert torch.equal(bits(found), bits(expected)), isa


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_torch(name: str) -> None:
    n = 4097
    param = torch.nn.Parameter(values(n, 4))
    theirs = OPTIMIZERS[name]([param])
    group, rule = theirs.param_groups[0], rule_of(theirs)
    master, moments = param.detach().clone(), [torch.zeros(n) for _ in rule.moments]
    draw = torch.Generator().manual_seed(3)
    for step in range(1, 21):
        param.grad = torch.randn(n, generator=draw)
        cut = Segment(
            *(0, n, 0, 0, step, group["lr"], group["weight_decay"], 1.0, bool(group.get("maximize"))),
            rule.options(group),
        )
        cpu_adam.update_segments(master, moments, param.grad, None, [cut])
        theirs.step()
        largest = float(param.detach().abs().max())
        torch.testing.assert_close(master, param.detach(), rtol=1e-6, atol=1e-6 * largest)
    for kind, moment in zip(rule.moments, moments, strict=True):
        wanted = theirs.state[param][kind]
        torch.testing.assert_close(moment, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize(("kind", "low"), [(torch.bfloat16, 0xFFFF), (CODES, 0xFFFFF)])
def test_the_rounding_is_unbiased_and_depends_on_name_index_and_step(kind: torch.dtype, low: int) -> None:
    """Means over many elements, within five standard deviations of what an even distribution has. `low`: the
    bits of an fp32 that a moment of this kind has not."""
    n, options = 1 << 18, Adam(0.9, 0.999, 1e-8)
    draw = torch.Generator().manual_seed(0)
    errors = []
    for name, step in (("a", 1), ("a", 2), ("b", 1)):
        start = [torch.rand(n, generator=draw) + 1 for _ in range(2)]  # no moment is far below its block's
        grad, state = torch.rand(n, generator=draw), State(options, start, kind)
        exact = State(options, state.wide(), torch.float32)
        for each in (exact, state):
            each.update(grad, segment(n, options, step, key=rounding_key(name, step)))
        for wide, narrow in zip(exact.moments, state.wide(), strict=True):
            below = wide.view(torch.int32) & ~low
            place = (below + low + 1).view(torch.float32) - below.view(torch.float32)  # to the next code
            error = ((narrow - wide) / place).double()
            assert float(error.abs().max()) < 1
            assert abs(float(error.mean())) < 5 * (1 / 6 / n) ** 0.5
            errors.append(error)
    # Of both moments, of two steps, of two names, and of neighbours.
    for one, other in ((0, 1), (1, 3), (1, 5)):
        assert abs(float(torch.corrcoef(torch.stack([errors[one], errors[other]]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([errors[1][1:], errors[1][:-1]]))[0, 1])) < 0.02


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


@pytest.mark.parametrize("kind", [torch.bfloat16, CODES])
def test_infinity_and_nan_stay_and_zero_stays_zero(kind: torch.dtype) -> None:
    options = Lion(0.9, 0.99)
    state = State(options, [torch.tensor([INF, float("nan"), 0.0, -INF])], kind)
    for step in range(1, 50):
        state.update(torch.zeros(4), segment(4, options, step))
    found = state.wide()[0]
    assert found[[0, 2, 3]].tolist() == [INF, 0.0, -INF]
    assert bool(found[1].isnan())


def test_a_key_is_a_number_that_does_not_change() -> None:
    assert rounding_key("blocks.0.weight", 1) == 0xE0AE881C
    assert rounding_key("blocks.0.weight", 2) == 0x3CA08B2A
    assert len({rounding_key(f"w{i}", j) for i in range(100) for j in range(100)}) > 9_990


@pytest.mark.parametrize("call", [cpu_adam.update_segments, adam_reference.reference_segments])
def test_moments_that_are_not_those_of_the_rule_are_refused(call: Any) -> None:
    adam, lion, n = Adam(0.9, 0.99, 1e-8), Lion(0.9, 0.99), 600
    master, grad, wide = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    codes, scales = torch.zeros(n, dtype=CODES), torch.zeros(3)
    wrong: list[tuple[list[torch.Tensor], list[Segment], str]] = [
        ([wide], [segment(1, adam, 1)], "Adam has other moments"),
        ([], [segment(1, lion, 1)], "Lion has other moments"),
        ([wide], [segment(1, lion, 1), segment(1, Adagrad(0.0, 1e-8), 1, 1)], "one rule"),
        ([wide, wide.bfloat16()], [segment(1, adam, 1)], "wrong dtype"),
        ([wide.half()], [segment(1, lion, 1)], "wrong dtype"),
        ([codes, scales], [segment(10, lion, 1, 100)], "inside a block"),
        ([codes, scales], [segment(10, lion, 1, first=100)], "inside a block"),
        ([codes, scales[:2].clone()], [segment(10, lion, 1)], "wrong length"),
        ([codes, scales.int()], [segment(10, lion, 1)], "wrong dtype"),
        ([codes], [segment(10, lion, 1)], "has scales"),
        ([codes, codes.clone(), scales, scales.clone()], [segment(10, lion, 1)], "other moments"),
    ]
    for moments, cuts, message in wrong:
        with pytest.raises(ParameterError, match=message):
            call(master, moments, grad, None, cuts)
    assert torch.equal(master, torch.zeros(n))
    assert set(RULES) == {Adam, SGD, Adagrad, Lion}
