"""The kernels of the optimizers, and moments in bf16 and in 8 bits: torch's results, and the
same bits everywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.errors import ParameterError
from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import adam_reference, cpu_adam, log_codes
from infinity.hardware.cpu_adam import RULES, SGD, Adagrad, Adam, Lion, Options, Segment, rounding_key
from infinity.optim.rules import rule_of

from .device_bits import bits, same, values
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
KINDS = (torch.float32, torch.bfloat16, CODES)


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
    """Master, moments and copy of `n` parameters."""

    def __init__(
        self, n: int, options: Options, count: int, kind: torch.dtype, out: torch.dtype | None = None
    ) -> None:
        self.kind, self.squares = kind, squares_of(options, count)
        self.master = values(n)
        wide = [values(n, 1 + k).square() for k in range(count)]
        self.moments = coded(wide, self.squares) if kind is CODES else [w.to(kind) for w in wide]
        self.out = None if out is None else torch.zeros(n, dtype=out)

    def update(self, call: Any, grad: torch.Tensor, segments: Sequence[Segment]) -> None:
        call(self.master, self.moments, grad, self.out, segments)

    def part_of(self, moment: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Return the view of a moment, or of its scales, for some elements."""
        if self.kind is CODES and moment.dtype is not CODES:
            return moment[low // MOMENT_BLOCK : -(-high // MOMENT_BLOCK)]
        return moment[low:high]

    def wide(self) -> list[torch.Tensor]:
        return (
            decoded(self.moments, self.squares) if self.kind is CODES else [m.float() for m in self.moments]
        )

    def is_same(self, other: State) -> bool:
        outs = self.out is None or other.out is None or same(self.out, other.out)
        pairs = zip([self.master, *self.moments], [other.master, *other.moments], strict=True)
        return outs and all(torch.equal(a, b) if a.dtype is CODES else same(a, b) for a, b in pairs)


def segment(numel: int, options: Options, step: int, start: int = 0, **more: Any) -> Segment:
    given: dict[str, Any] = {"first": 0, "key": rounding_key("w", step), "lr": 1e-2, "weight_decay": 0.1}
    given |= {"grad_scale": 0.7, "maximize": False, **more}
    return Segment(start=start, numel=numel, step=step, options=options, **given)


@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("options", "count"), RULE_OPTIONS, ids=str)
def test_every_instruction_set_gives_the_bits_of_plain_torch(
    options: Options, count: int, kind: torch.dtype, out: torch.dtype | None
) -> None:
    for n in (1, 7, 256, 600, 10_007):
        plain, others = (
            State(n, options, count, kind, out),
            [State(n, options, count, kind, out) for _ in ISAS],
        )
        half, left, begin = n // 2, n // 2, (1 << 32) - 5  # the upper half of an index changes in it
        if kind is CODES:  # segments begin with a block
            half = half // MOMENT_BLOCK * MOMENT_BLOCK
            left, begin = max(half - 3, 0), (1 << 32) - 512
        for step in (1, 2, 9):
            grad = values(n, 20 + step).to(torch.bfloat16 if step > 1 else torch.float32)
            if n > 7 and step == 9:
                grad[:3] = torch.tensor([INF, float("nan"), -INF])
            cuts = [
                segment(left, options, step, first=begin),
                segment(n - half, options, step, half, first=3 << 33, maximize=True),
            ]
            plain.update(adam_reference.reference_segments, grad, cuts)
            for isa, state in zip(ISAS, others, strict=True):
                cpu_adam.set_isa(isa)
                state.update(cpu_adam.update_segments, grad, cuts)
                assert state.is_same(plain), (isa, n, step)


def test_past_the_caches_and_on_threads_the_bits_of_codes_are_the_same() -> None:
    n, options = (1 << 18) + 77, Adam(0.9, 0.999, 1e-8)
    grad = values(n, 9).bfloat16()
    starts = [0, 512, 768, 65_536, 150_016, n]
    cuts = [
        segment(end - start - (start % 512 == 0) * 100, options, 3, start, key=start)
        for start, end in itertools.pairwise(starts)
    ]
    plain = State(n, options, 2, CODES, torch.bfloat16)
    plain.update(adam_reference.reference_segments, grad, cuts)
    for isa, threads in itertools.product(ISAS, (1, 3)):
        cpu_adam.set_isa(isa)
        cpu_adam.set_threads(threads)
        found = State(n, options, 2, CODES, torch.bfloat16)
        found.update(cpu_adam.update_segments, grad, cuts)
        assert found.is_same(plain), (isa, threads)


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


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_where_a_parameter_is_cut_changes_no_bit(data: st.DataObject) -> None:
    options, count = data.draw(st.sampled_from([r for r in RULE_OPTIONS if r[1]]))
    kind, n = data.draw(st.sampled_from([torch.bfloat16, CODES])), data.draw(st.integers(2, 3000))
    grain = MOMENT_BLOCK if kind is CODES else 1
    places = data.draw(st.lists(st.integers(1, n - 1), max_size=5))
    cuts = sorted({0, n, *(place // grain * grain for place in places)})
    begin = data.draw(st.sampled_from([0, 17, (1 << 32) - n // 2, (1 << 35) + 5])) // grain * grain
    cpu_adam.set_isa(data.draw(st.sampled_from(ISAS)))
    cpu_adam.set_threads(data.draw(st.sampled_from([1, 3])))
    grad, whole, apart = values(n, 9), State(n, options, count, kind), State(n, options, count, kind)
    whole.update(cpu_adam.update_segments, grad, [segment(n, options, 3, first=begin)])
    for low, high in itertools.pairwise(cuts):  # each in buffers of its own
        views = [apart.master[low:high], *(apart.part_of(m, low, high) for m in apart.moments)]
        master, *moments = (view.clone() for view in views)
        cut = segment(high - low, options, 3, first=begin + low)
        cpu_adam.update_segments(master, moments, grad[low:high].clone(), None, [cut])
        for view, part in zip(views, (master, *moments), strict=True):
            view.copy_(part)
    assert apart.is_same(whole)


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
        grad, exact, state = (
            torch.rand(n, generator=draw),
            State(n, options, 2, kind),
            State(n, options, 2, kind),
        )
        state.moments = coded(start, state.squares) if kind is CODES else [m.to(kind) for m in start]
        exact.kind, exact.moments = torch.float32, state.wide()
        for each in (exact, state):
            cut = segment(n, options, step, key=rounding_key(name, step))
            each.update(cpu_adam.update_segments, grad, [cut])
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


def test_exp_avg_sq_falls_with_the_gradient() -> None:
    """After the gradient has fallen by 10, to nearest it would stand still."""
    n, options = 1 << 12, Adam(0.9, 0.999, 1e-8)
    state = State(n, options, 2, torch.bfloat16)
    for moment in state.moments:
        moment.fill_(1.0)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, 3001):
        grad = torch.randn(n, generator=draw) * 0.1
        state.update(cpu_adam.update_segments, grad, [segment(n, options, step, grad_scale=1.0)])
    wanted = 0.999**3000 + 0.01 * (1 - 0.999**3000)
    assert abs(float(state.moments[1].double().mean()) / wanted - 1) < 0.05


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
    options, state = Lion(0.9, 0.99), State(4, Lion(0.9, 0.99), 1, kind)
    start = torch.tensor([INF, float("nan"), 0.0, -INF])
    state.moments = coded([start], [False]) if kind is CODES else [start.to(kind)]
    for step in range(1, 50):
        state.update(cpu_adam.update_segments, torch.zeros(4), [segment(4, options, step)])
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
