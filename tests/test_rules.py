"""The kernels of the optimizers, and moments in bf16: torch's results, the same bits everywhere."""

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
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.cpu_adam import RULES, SGD, Adagrad, Adam, Lion, Options, Segment, rounding_key
from infinity.optim.rules import rule_of

from .device_bits import bits, same, values
from .whole import OPTIMIZERS

ISAS = cpu_adam.available_isas()
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
DTYPES = (torch.float32, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("kernel_as_before")


class State:
    """Master, moments and copy of `n` parameters."""

    def __init__(self, n: int, count: int, dtype: torch.dtype, out: torch.dtype | None) -> None:
        self.master = values(n)
        self.moments = [values(n, 1 + k).square().to(dtype) for k in range(count)]
        self.out = None if out is None else torch.zeros(n, dtype=out)

    def update(self, call: Any, grad: torch.Tensor, segments: Sequence[Segment]) -> None:
        call(self.master, self.moments, grad, self.out, segments)

    def is_same(self, other: State) -> bool:
        pairs = zip([self.master, *self.moments], [other.master, *other.moments], strict=True)
        outs = self.out is None or other.out is None or same(self.out, other.out)
        return outs and all(same(a, b) for a, b in pairs)


def segment(numel: int, options: Options, step: int, start: int = 0, **more: Any) -> Segment:
    given: dict[str, Any] = {"first": 0, "key": rounding_key("w", step), "lr": 1e-2, "weight_decay": 0.1}
    given |= {"grad_scale": 0.7, "maximize": False, **more}
    return Segment(start=start, numel=numel, step=step, options=options, **given)


@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("options", "count"), RULE_OPTIONS, ids=str)
def test_every_instruction_set_gives_the_bits_of_plain_torch(
    options: Options, count: int, dtype: torch.dtype, out: torch.dtype | None
) -> None:
    for n in (1, 7, 64, 10_007):
        plain, others = State(n, count, dtype, out), [State(n, count, dtype, out) for _ in ISAS]
        for step in (1, 2, 9):
            grad = values(n, 20 + step).to(torch.bfloat16 if step > 1 else torch.float32)
            if n > 7 and step == 9:
                grad[:3] = torch.tensor([float("inf"), float("nan"), -float("inf")])
            cuts = [
                segment(n // 2, options, step, first=(1 << 32) - 5),  # the upper half changes in it
                segment(n - n // 2, options, step, n // 2, first=3 << 33, maximize=True),
            ]
            plain.update(adam_reference.reference_segments, grad, cuts)
            for isa, state in zip(ISAS, others, strict=True):
                cpu_adam.set_isa(isa)
                state.update(cpu_adam.update_segments, grad, cuts)
                assert state.is_same(plain), (isa, n, step)


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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_where_a_parameter_is_cut_changes_no_bit(data: st.DataObject) -> None:
    options, count = data.draw(st.sampled_from([r for r in RULE_OPTIONS if r[1]]))
    n = data.draw(st.integers(2, 3000))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(1, n - 1), max_size=5))})
    begin = data.draw(st.sampled_from([0, 17, (1 << 32) - n // 2, (1 << 35) + 5]))
    cpu_adam.set_isa(data.draw(st.sampled_from(ISAS)))
    cpu_adam.set_threads(data.draw(st.sampled_from([1, 3])))
    grad, whole = values(n, 9), State(n, count, torch.bfloat16, None)
    whole.update(cpu_adam.update_segments, grad, [segment(n, options, 3, first=begin)])
    apart = State(n, count, torch.bfloat16, None)
    for low, high in itertools.pairwise(cuts):  # each in a buffer of its own
        part = State(high - low, count, torch.bfloat16, None)
        part.master.copy_(apart.master[low:high])
        for mine, of_all in zip(part.moments, apart.moments, strict=True):
            mine.copy_(of_all[low:high])
        cut = segment(high - low, options, 3, first=begin + low)
        part.update(cpu_adam.update_segments, grad[low:high].clone(), [cut])
        apart.master[low:high] = part.master
        for mine, of_all in zip(part.moments, apart.moments, strict=True):
            of_all[low:high] = mine
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


def test_the_rounding_is_unbiased_and_depends_on_name_index_and_step() -> None:
    """Means over many elements, within five standard deviations of what an even distribution has."""
    n = 1 << 18
    options = Adam(0.9, 0.999, 1e-8)
    errors = []
    for name, step in (("a", 1), ("a", 2), ("b", 1)):
        exact, state = State(n, 2, torch.float32, None), State(n, 2, torch.bfloat16, None)
        exact.moments = [m.float() for m in state.moments]
        exact.master.copy_(state.master)
        grad = values(n, 9)
        for each in (exact, state):
            each.update(
                cpu_adam.update_segments, grad, [segment(n, options, step, key=rounding_key(name, step))]
            )
        for wide, narrow in zip(exact.moments, state.moments, strict=True):
            below = wide.view(torch.int32) & ~0xFFFF
            place = (below + 0x10000).view(torch.float32) - below.view(torch.float32)  # to the next bf16
            error = torch.where(wide.abs() > 1e-30, (narrow.float() - wide) / place, 0.0).double()
            assert float(error.abs().max()) < 1
            assert abs(float(error.mean())) < 5 * (1 / 6 / n) ** 0.5
            errors.append(error)
    # Of both moments, of two steps, of two names, and of neighbours.
    for one, other in ((0, 1), (1, 3), (1, 5)):
        assert abs(float(torch.corrcoef(torch.stack([errors[one], errors[other]]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([errors[1][1:], errors[1][:-1]]))[0, 1])) < 0.02


def test_exp_avg_sq_falls_with_the_gradient() -> None:
    """After the gradient has fallen by 10, to nearest it would stand still."""
    n, options = 1 << 14, Adam(0.9, 0.999, 1e-8)
    state = State(n, 2, torch.bfloat16, None)
    for moment in state.moments:
        moment.fill_(1.0)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, 3001):
        grad = torch.randn(n, generator=draw) * 0.1
        state.update(cpu_adam.update_segments, grad, [segment(n, options, step, grad_scale=1.0)])
    wanted = 0.999**3000 + 0.01 * (1 - 0.999**3000)
    assert abs(float(state.moments[1].double().mean()) / wanted - 1) < 0.05
    stuck = torch.ones(1, dtype=torch.bfloat16)
    assert float((stuck.float() * 0.999 + 0.001 * 0.01).bfloat16()) == 1.0


def test_infinity_and_nan_stay_and_zero_stays_zero() -> None:
    options = Lion(0.9, 0.99)
    state = State(4, 1, torch.bfloat16, None)
    state.moments[0].copy_(torch.tensor([float("inf"), float("nan"), 0.0, -float("inf")]))
    for step in range(1, 50):
        state.update(cpu_adam.update_segments, torch.zeros(4), [segment(4, options, step)])
    assert state.moments[0].float().tolist()[0] == float("inf")
    assert state.moments[0].isnan().tolist() == [False, True, False, False]
    assert state.moments[0][2] == 0
    assert state.moments[0][3] == -float("inf")


def test_a_key_is_a_number_that_does_not_change() -> None:
    assert rounding_key("blocks.0.weight", 1) == 0xE0AE881C
    assert rounding_key("blocks.0.weight", 2) == 0x3CA08B2A
    assert len({rounding_key(f"w{i}", j) for i in range(100) for j in range(100)}) > 9_990


@pytest.mark.parametrize("call", [cpu_adam.update_segments, adam_reference.reference_segments])
def test_moments_that_are_not_those_of_the_rule_are_refused(call: Any) -> None:
    n = 8
    master, grad = torch.zeros(n), torch.zeros(n)
    both = [torch.zeros(n), torch.zeros(n, dtype=torch.bfloat16)]
    wrong: list[tuple[list[torch.Tensor], list[Options], str]] = [
        ([torch.zeros(n)], [Adam(0.9, 0.99, 1e-8)], "Adam has other moments"),
        ([], [Lion(0.9, 0.99)], "Lion has other moments"),
        ([torch.zeros(n)], [Lion(0.9, 0.99), Adagrad(0.0, 1e-8)], "one rule"),
        (both, [Adam(0.9, 0.99, 1e-8)], "wrong dtype"),
        ([torch.zeros(n, dtype=torch.float16)], [Lion(0.9, 0.99)], "wrong dtype"),
    ]
    for moments, options, message in wrong:
        cuts = [segment(1, each, 1, at) for at, each in enumerate(options)]
        with pytest.raises(ParameterError, match=message):
            call(master, moments, grad, None, cuts)
    assert set(RULES) == {Adam, SGD, Adagrad, Lion}
