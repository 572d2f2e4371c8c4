"""The CPU Adam: equal to torch, the same bits everywhere, and nothing written after an error."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.core.errors import ConfigError, ParameterError
from infinity.core.sizes import NORM_BLOCK
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.cpu_adam import Adam, Segment

from .command_line import python
from .quick import covering

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 64, 100_003)
ISAS = cpu_adam.available_isas()
OPTIONS: dict[str, Any] = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7)


def adam_segment(
    start: int,
    numel: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
) -> Segment:
    options = Adam(beta1, beta2, eps, decoupled)
    return Segment(start, numel, 0, 0, step, lr, weight_decay, grad_scale, maximize, options)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    isa, threads, of_torch = cpu_adam.isa(), cpu_adam.threads(), torch.get_num_threads()
    torch.set_num_threads(1)  # its small operations would spin on cores that others need
    yield
    torch.set_num_threads(of_torch)
    cpu_adam.set_isa(isa)
    cpu_adam.set_threads(threads)


def values(n: int, seed: int = 0) -> torch.Tensor:
    """Return (n,) float32 from subnormal to large, zeros among them."""
    return made(n, seed).clone()


@functools.lru_cache(maxsize=64)
def made(n: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g) * 10.0 ** torch.randint(-6, 3, (n,), generator=g).float()
    x[torch.rand(n, generator=g) < 0.02] = 0.0
    x[torch.rand(n, generator=g) < 0.02] *= 1e-36
    return x


def state(n: int, seed: int = 0) -> list[torch.Tensor]:
    """Return master, exp_avg and exp_avg_sq."""
    return [values(n, seed), values(n, seed + 1) * 0.1, values(n, seed + 2).square()]


def any_bits(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return (n,) random bit patterns: NaN, Inf and subnormals too."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(width)
    g = torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max + 1, (n,), dtype=width, generator=g).view(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, any NaN being as good as another."""
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all()) and a.shape == b.shape


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy of `x` that begins `elements` elements into a fresh 64-byte-aligned buffer."""
    return torch.cat([torch.zeros(elements, dtype=x.dtype), x])[elements:]


def run(
    n: int,
    grad: torch.dtype,
    out: torch.dtype | None,
    *,
    isa: str | None,
    shift: int = 0,
    **options: Any,
) -> list[torch.Tensor]:
    """Update the state of `values`; isa None: in plain torch. Return all that was written."""
    tensors = [shifted(t, shift) for t in state(n)]
    g = shifted(values(n, 9).to(grad), shift)
    o = None if out is None else shifted(torch.zeros(n, dtype=out), shift)
    if isa is None:
        adam_reference.adamw_reference(*tensors, g, o, **{**OPTIONS, **options})
    else:
        cpu_adam.set_isa(isa)
        cpu_adam.adamw_update(*tensors, g, o, **{**OPTIONS, **options})
    return tensors if o is None else [*tensors, o]


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"decoupled": False, "maximize": True, "beta1": 0.3, "grad_scale": 0.37},
    {"weight_decay": 0.0, "beta1": 0.5, "beta2": 0.0, "eps": 0.0, "step": 1},
)


@pytest.mark.parametrize("out", [None, *DTYPES])
@pytest.mark.parametrize("grad", DTYPES)
def test_every_instruction_set_gives_the_bits_of_plain_torch(
    grad: torch.dtype, out: torch.dtype | None
) -> None:
    for n in SIZES:
        for options in VARIANTS:
            expected = run(n, grad, out, isa=None, **options)
            for isa in ISAS:
                for shift in (0, 1, 3) if n < 1000 else (1,):
                    found = run(n, grad, out, isa=isa, shift=shift, **options)
                    for a, b in zip(found, expected, strict=True):
                        assert same(a, b), (n, options, isa, shift)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("shift", [0, 5])
def test_large_calls_that_write_past_the_caches_give_the_same_bits(out: torch.dtype, shift: int) -> None:
    n = (1 << 20) + 77
    expected = run(n, torch.bfloat16, out, isa=None)
    for isa in ISAS:
        found = run(n, torch.bfloat16, out, isa=isa, shift=shift)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True)), isa


def test_one_element_at_a_time_gives_the_same_bits() -> None:
    whole = state(64)
    grad = values(64, 9)
    cpu_adam.adamw_update(*whole, grad, None, **OPTIONS)
    single = state(64)
    for i in range(64):
        part = slice(i, i + 1)
        cpu_adam.adamw_update(*(t[part] for t in single), grad[part], None, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_inf_travel_as_in_torch(isa: str) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e38, 1e-45, 1.0])
    grid = torch.cartesian_prod(special, special, special.abs(), special)
    parts = [grid[:, k].contiguous() for k in range(4)]
    for weight_decay, decoupled in ((0.0, True), (0.1, True), (0.1, False)):
        found = [p.clone() for p in parts[:3]]
        out = torch.empty(len(grid), dtype=torch.bfloat16)
        cpu_adam.set_isa(isa)
        options = {**OPTIONS, "weight_decay": weight_decay, "decoupled": decoupled}
        cpu_adam.adamw_update(*found, parts[3], out, **options)
        expected = torch_update(parts, options)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.isinf(), b.isinf())
        assert same(out, found[0].bfloat16())


def torch_update(parts: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    kind = torch.optim.AdamW if options["decoupled"] else torch.optim.Adam
    p = torch.nn.Parameter(parts[0].clone())
    betas = (options["beta1"], options["beta2"])
    rest = {k: options[k] for k in ("lr", "eps", "weight_decay")}
    optimizer = kind([p], betas=betas, foreach=False, **rest)
    optimizer.state[p] = {
        "step": torch.tensor(float(options["step"] - 1)),
        "exp_avg": parts[1].clone(),
        "exp_avg_sq": parts[2].clone(),
    }
    p.grad = parts[3].clone()
    optimizer.step()
    return [p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]


@covering
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("lr", "betas", "eps"),
    [
        (1e-3, (0.9, 0.999), 1e-8),
        (torch.tensor(0.01), (0.9, 0.95), 1e-3),
        (0.5, (0.3, 0.5), 1e-8),
        (0.5, (0.0, 0.0), 1e-3),
        (1e-3, (0.5, 0.99), 1e-3),
        (0.0, (0.9, 0.999), 1e-8),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_hundred_steps_equal_torch(
    kind: type[torch.optim.Adam],
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Each step is torch's in float64, from the state that the kernel had before it. A hundred steps of both
    would part: where a gradient and its decay cancel, one rounding may move a step by a part of the rate."""
    n = 257
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(n, generator=generator), torch.zeros(n), torch.zeros(n)
    decoupled = kind is torch.optim.AdamW
    options = {"eps": eps, "weight_decay": weight_decay, "maximize": maximize}

    def by_torch(step: int, grad: torch.Tensor) -> list[torch.Tensor]:
        p = torch.nn.Parameter(state[0].double())
        optimizer = kind([p], lr=lr, betas=betas, foreach=False, **options)
        optimizer.state[p] = {
            "step": torch.tensor(step - 1.0),
            "exp_avg": state[1].double(),
            "exp_avg_sq": state[2].double(),
        }
        p.grad = grad
        optimizer.step()
        return [p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]

    for step in range(1, 101):
        grad = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-3, 2, (n,), generator=generator)
        wanted = [by_torch(step, grad.double())]
        if weight_decay and not decoupled:  # what it is if the sum of gradient and decay was rounded to fp32
            most = grad.double().abs() + weight_decay * state[0].double().abs()
            rounding = torch.finfo(torch.float32).eps * most
            wanted += [by_torch(step, grad.double() + by) for by in (rounding, -rounding)]
        cpu_adam.adamw_update(
            *state,
            grad,
            lr=float(lr),
            beta1=betas[0],
            beta2=betas[1],
            step=step,
            decoupled=decoupled,
            **options,
        )
        for found, *near in zip(state, *wanted, strict=True):
            least, most = torch.stack(near).aminmax(dim=0)
            slack = 1e-6 * most.abs().max()
            assert bool(((found >= least - slack) & (found <= most + slack)).all()), step


def test_the_gradient_scale_is_one_multiplication() -> None:
    grad = values(1000, 9)
    a, b = state(1000), state(1000)
    scale = float(np.float32(1 / 3))
    cpu_adam.adamw_update(*a, grad, grad_scale=scale, **OPTIONS)
    cpu_adam.adamw_update(*b, grad * scale, **OPTIONS)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- segments ----


def segments_of(n: int, seed: int) -> list[Segment]:
    """Return segments of 0 to 300 elements with gaps, each with scalars of its own."""
    rng = np.random.default_rng(seed)
    found, at = [], 0
    while True:
        at += int(rng.choice([0, 0, 3, 64]))
        numel = int(rng.choice([0, 1, 5, 64, 128, 300]))
        if at + numel > n:
            return found
        k = len(found)
        found.append(
            adam_segment(
                at, numel, 1e-3 * (k % 3), 0.9 - 0.3 * (k % 2), 0.99, 1e-8, 0.1, 1 + k % 4, 0.5, k % 5 > 0
            )
        )
        at += numel


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 4])
def test_one_call_for_many_segments_equals_many_calls(isa: str, count: int) -> None:
    n = 100_003
    cpu_adam.set_isa(isa)
    cpu_adam.set_threads(count)
    grad = values(n, 9).bfloat16()
    segments = segments_of(n, 3)
    assert len(segments) > 300
    outs = [torch.full((n,), 7.0, dtype=torch.float16) for _ in range(3)]
    together, apart, reference = state(n), state(n), state(n)
    cpu_adam.update_segments(together[0], together[1:], grad, outs[0], segments)
    for s in segments:
        part = slice(s.start, s.start + s.numel)
        options = {k: getattr(s, k) for k in ("lr", "weight_decay", "step", "grad_scale", "maximize")}
        options |= s.options._asdict()
        cpu_adam.adamw_update(*(t[part] for t in apart), grad[part], outs[1][part], **options)
    adam_reference.reference_segments(reference[0], reference[1:], grad, outs[2], segments)
    touched = torch.zeros(n, dtype=torch.bool)
    for s in segments:
        touched[s.start : s.start + s.numel] = True
    for a, b, c in zip([*together, outs[0]], [*apart, outs[1]], [*reference, outs[2]], strict=True):
        assert same(a, b)
        assert same(a, c)
    for a, b in zip(together, state(n), strict=True):
        assert torch.equal(a[~touched], b[~touched])
    assert bool((outs[0][~touched] == 7.0).all())


def test_no_segments_touch_nothing() -> None:
    tensors = state(10)
    cpu_adam.update_segments(tensors[0], tensors[1:], torch.zeros(10), None, [])
    assert all(torch.equal(a, b) for a, b in zip(tensors, state(10), strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_threads_do_not_change_bits(count: int) -> None:
    n = 300_007
    expected = run(n, torch.float16, torch.bfloat16, isa=None)
    cpu_adam.set_threads(count)
    assert cpu_adam.threads() == count
    found = run(n, torch.float16, torch.bfloat16, isa=cpu_adam.isa())
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_several_python_threads_may_call_at_once() -> None:
    cpu_adam.set_threads(3)
    expected = run(200_001, torch.float32, torch.bfloat16, isa=None)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(5):
            found = run(200_001, torch.float32, torch.bfloat16, isa=cpu_adam.isa())
            if not all(same(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not wrong


# ---- rounding ----


@pytest.mark.parametrize("isa", ISAS)
def test_all_half_patterns_widen_as_in_torch(isa: str) -> None:
    cpu_adam.set_isa(isa)
    for dtype in DTYPES[1:]:
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        wide = torch.empty(65536)
        cpu_adam.convert(wide, patterns)
        assert torch.equal(bits(wide), bits(patterns.float())), dtype
        back = torch.empty(65536, dtype=dtype)
        cpu_adam.convert(back, wide)
        assert same(back, patterns)
        other = torch.empty(65536, dtype=DTYPES[3 - DTYPES.index(dtype)])
        cpu_adam.convert(other, patterns)
        assert same(other, patterns.float().to(other.dtype))


def around_the_ties() -> torch.Tensor:
    """Return float32 next to, and at, the middle between neighbours in bf16 and fp16."""
    halves = torch.arange(65536, dtype=torch.int64) << 16
    near = torch.tensor([-1, 0, 1, 0x7FFF, 0x8000, 0x8001])
    bf16 = (halves[:, None] + near).flatten()
    fp16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    low = bits(fp16).to(torch.int64)
    fp16_bits = (low[:, None] + torch.tensor([-1, 0, 1, 0xFFF, 0x1000, 0x1001])).flatten()
    middle = (fp16.double()[1:] + fp16.double()[:-1]) / 2
    exact = bits(middle.float()).to(torch.int64)
    every = torch.cat([bf16, fp16_bits, exact - 1, exact, exact + 1]) & 0xFFFFFFFF
    return torch.where(every >= 1 << 31, every - (1 << 32), every).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_float32_narrows_as_in_torch(isa: str) -> None:
    cpu_adam.set_isa(isa)
    for source in (around_the_ties(), any_bits(300_000, torch.float32)):
        for dtype in DTYPES[1:]:
            for size in (len(source), 5):
                narrow = torch.empty(size, dtype=dtype)
                cpu_adam.convert(narrow, source[:size].clone())
                assert same(narrow, source[:size].to(dtype)), dtype
                cpu_adam.set_isa("scalar")
                exactly = torch.empty_like(narrow)
                cpu_adam.convert(exactly, source[:size].clone())
                cpu_adam.set_isa(isa)
                assert torch.equal(bits(narrow), bits(exactly))  # NaN patterns too


def test_the_copy_is_rounded_to_nearest_even_with_subnormals() -> None:
    # lr 0 leaves the master as it is, so the copy shows the rounding alone.
    master = around_the_ties()
    master = master[master.isfinite()].contiguous()
    n = len(master)
    for isa in ISAS:
        cpu_adam.set_isa(isa)
        for dtype in DTYPES[1:]:
            p, out = master.clone(), torch.empty(n, dtype=dtype)
            options = {**OPTIONS, "lr": 0.0, "weight_decay": 0.0}
            cpu_adam.adamw_update(p, torch.zeros(n), torch.ones(n), torch.zeros(n), out, **options)
            assert torch.equal(bits(out), bits(master.to(dtype))), (isa, dtype)


def test_flushing_denormals_in_torch_changes_nothing() -> None:
    tiny = torch.full((100_000,), 1e-40)
    expected = [torch.empty(100_000, dtype=torch.bfloat16), torch.zeros(100_000)]
    found = [torch.empty_like(t) for t in expected]
    found[1].zero_()
    cpu_adam.convert(expected[0], tiny)
    cpu_adam.accumulate(expected[1], tiny)
    assert bool(expected[0].view(torch.int16).bool().all())
    if not torch.set_flush_denormal(True):
        pytest.fail("this machine cannot flush denormals: nothing was tested")
    try:
        cpu_adam.set_threads(1)
        cpu_adam.convert(found[0], tiny)
        cpu_adam.set_threads(3)
        cpu_adam.accumulate(found[1], tiny)
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


# ---- sums of squares, sums, copies ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_are_one_fixed_tree(dtype: torch.dtype) -> None:
    for n in (*SIZES, 127, 128, 129, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK + 1000):
        x = values(n).to(dtype)
        expected = adam_reference.sum_of_squares_reference(x)
        assert expected.shape == (-(-n // NORM_BLOCK),)
        padded = torch.cat([x, torch.zeros(-n % NORM_BLOCK, dtype=dtype)])
        for isa in ISAS:
            cpu_adam.set_isa(isa)
            for shift in (0, 1):
                assert (cpu_adam.sum_of_squares(shifted(x, shift)) == expected).all(), (n, isa)
            assert (cpu_adam.sum_of_squares(padded) == expected).all()
        for span, total in enumerate(expected):
            part = x[span * NORM_BLOCK : (span + 1) * NORM_BLOCK].double().tolist()
            assert total == pytest.approx(math.fsum(v * v for v in part), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_of_pieces_are_those_of_each_alone(dtype: torch.dtype) -> None:
    """In any number and order, with gaps; on every instruction set, and in plain torch."""
    x = values(3 * NORM_BLOCK).to(dtype)
    lengths = [1, 15, 16, 17, 64, 777, 4096, 30_000, NORM_BLOCK, NORM_BLOCK - 1, 0, 5, 33, 64]
    begins = np.cumsum([0, *(n + 3 for n in lengths[:-1])])
    pieces = np.ascontiguousarray(np.array([begins, lengths], dtype=np.int64).T[::-1])
    wanted = [adam_reference.sum_of_squares_reference(x[b : b + n]).sum() for b, n in pieces.tolist()]
    assert (adam_reference.sum_of_squares_reference(x, pieces) == wanted).all()
    for isa in ISAS:
        cpu_adam.set_isa(isa)
        for shift in (0, 1):
            assert (cpu_adam.sum_of_squares(shifted(x, shift), pieces) == wanted).all(), isa
    for wrong in ([[-1, 5]], [[0, -1]], [[0, NORM_BLOCK + 1]], [[3 * NORM_BLOCK - 4, 5]], [0, 5]):
        for call in (cpu_adam.sum_of_squares, adam_reference.sum_of_squares_reference):
            with pytest.raises(ParameterError, match="pieces"):
                call(x, np.array(wrong, dtype=np.int64))


class Counted(TorchDispatchMode):
    """Counts operators that are launches on a device."""

    launches = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches += not op.is_view and "empty" not in str(op)
        return op(*args, **kwargs or {})


def test_sums_of_squares_of_several_tensors_grow_in_one_pass() -> None:
    """However many there are, of several dtypes; also more than there is room for at a time."""
    rng = np.random.default_rng(0)
    parts = []
    for n in range(60):
        lengths = [NORM_BLOCK] * (n % 3) + rng.integers(0, [20, 600, 40_000]).tolist()
        begins = np.cumsum([0, *lengths])
        pieces = np.ascontiguousarray(np.stack([begins[:-1], lengths], axis=1))
        parts.append((values(int(begins[-1]), n).to(DTYPES[n % 2]), pieces))
    parts[7][0][:3] = torch.tensor([math.inf, math.nan, -0.0])
    parts.insert(3, (torch.zeros(0), np.empty((0, 2), dtype=np.int64)))
    with Counted() as counted:
        found = adam_reference.sums_of_squares_reference(parts)
    wanted = [cpu_adam.sum_of_squares(*part) for part in parts]
    assert [sums.tobytes() for sums in found] == [sums.tobytes() for sums in wanted]
    assert counted.launches <= 40 * 4  # of each dtype there are more elements than are summed at once
    (none,) = adam_reference.sums_of_squares_reference(parts[3:4])
    assert none.shape == (0,)


@pytest.mark.parametrize("isa", ISAS)
def test_sums_of_squares_keep_nan_and_inf(isa: str) -> None:
    cpu_adam.set_isa(isa)
    x = torch.zeros(3 * NORM_BLOCK)
    x[5] = math.inf
    x[NORM_BLOCK + 100] = math.nan
    x[2 * NORM_BLOCK] = 1e30  # its square is beyond float32
    sums = cpu_adam.sum_of_squares(x)
    assert sums[0] == math.inf
    assert math.isnan(sums[1])
    assert sums[2] == float(np.float32(1e30)) ** 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_accumulate_adds_exactly_widened_values(isa: str, dtype: torch.dtype) -> None:
    cpu_adam.set_isa(isa)
    for n in SIZES:
        for shift in (0, 1):
            target, source = shifted(values(n), shift), shifted(any_bits(n, dtype), shift)
            expected = target + source.float()
            cpu_adam.accumulate(target, source)
            assert same(target, expected)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 3 * (1 << 20) + 5])
@pytest.mark.parametrize("count", [1, 3])
def test_copy_bytes(nbytes: int, count: int) -> None:
    cpu_adam.set_threads(count)
    source = torch.randint(0, 256, (nbytes + 2,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 2, dtype=torch.uint8)
    cpu_adam.copy_bytes(target.data_ptr() + 1, source.data_ptr() + 1, nbytes)
    assert torch.equal(target[1:-1], source[1:-1])
    assert target[0] == 0
    assert target[-1] == 0
    with pytest.raises(ParameterError):
        cpu_adam.copy_bytes(source.data_ptr(), source.data_ptr(), -1)


# ---- errors ----


def bad_calls() -> list[tuple[str, dict[str, Any]]]:
    n = 64
    store = torch.zeros(3 * n)
    return [
        ("grad has a wrong dtype", {"grad": torch.zeros(n, dtype=torch.float64)}),
        ("master has a wrong dtype", {"master": torch.zeros(n, dtype=torch.bfloat16)}),
        ("out has a wrong dtype", {"out": torch.zeros(n, dtype=torch.int16)}),
        ("exp_avg has a wrong length", {"exp_avg": torch.zeros(n + 1)}),
        ("grad has a wrong length", {"grad": torch.zeros(n - 1)}),
        ("out has a wrong length", {"out": torch.zeros(0)}),
        ("flat and contiguous", {"grad": torch.zeros(2 * n)[::2]}),
        ("flat and contiguous", {"exp_avg_sq": torch.zeros(8, 8)}),
        ("not a tensor", {"grad": np.zeros(n, dtype=np.float32)}),
        ("overlap", {"master": store[:n], "grad": store[n - 1 : 2 * n - 1]}),
        ("overlap", {"exp_avg": store[:n], "exp_avg_sq": store[:n]}),
        ("overlap", {"grad": store[:n], "out": store[n // 2 : n // 2 + n]}),
        ("segment", {"step": 0}),
        ("segment", {"beta1": 1.0}),
        ("segment", {"beta2": math.nan}),
        ("segment", {"lr": "fast"}),
    ]


@pytest.mark.parametrize(("message", "changed"), bad_calls(), ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("call", [cpu_adam.adamw_update, adam_reference.adamw_reference])
def test_errors_come_before_anything_is_written(call: Any, message: str, changed: dict[str, Any]) -> None:
    tensors: dict[str, Any] = dict(zip(("master", "exp_avg", "exp_avg_sq"), state(64), strict=True))
    tensors |= {"grad": values(64, 9), "out": torch.zeros(64, dtype=torch.bfloat16)}
    arguments = {**tensors, **OPTIONS, **changed}
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(ParameterError, match=message) as caught:
        call(**arguments)
    assert caught.value.expected is not None
    assert caught.value.cure is not None
    for name, value in before.items():
        assert torch.equal(arguments[name], value), name


@pytest.mark.parametrize(
    "segments",
    [
        [adam_segment(0, 65, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1)],
        [adam_segment(-1, 4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1)],
        [
            adam_segment(0, 4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1),
            adam_segment(3, 4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1),
        ],
        [
            adam_segment(8, 4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1),
            adam_segment(0, 4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1),
        ],
        [adam_segment(0, -4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1)],
        [
            adam_segment(0, 4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1),
            adam_segment(4, 4, 1e-3, 0.9, 0.99, 1e-8, 0.0, 0),
        ],
        [adam_segment(0, 1 << 70, 1e-3, 0.9, 0.99, 1e-8, 0.0, 1)],
        [(0, 4)],
    ],
)
@pytest.mark.parametrize("call", [cpu_adam.update_segments, adam_reference.reference_segments])
def test_bad_segments_are_refused(call: Any, segments: Any) -> None:
    tensors = state(64)
    with pytest.raises(ParameterError, match="segment"):
        call(tensors[0], tensors[1:], values(64, 9), None, segments)
    assert all(torch.equal(a, b) for a, b in zip(tensors, state(64), strict=True))


def test_helpers_refuse_bad_tensors() -> None:
    x = torch.zeros(8)
    for call in (
        lambda: cpu_adam.sum_of_squares(torch.zeros(2, 2)),
        lambda: cpu_adam.sum_of_squares(torch.zeros(2, dtype=torch.int32)),
        lambda: cpu_adam.accumulate(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)),
        lambda: cpu_adam.accumulate(x[:4], x[3:7]),
        lambda: cpu_adam.convert(x[:4], torch.zeros(5)),
        lambda: cpu_adam.convert(x[:4], x[1:5]),
        lambda: cpu_adam.convert(torch.zeros(4, device="meta"), torch.zeros(4)),
    ):
        with pytest.raises(ParameterError):
            call()


# ---- instruction sets, threads, processes ----


def test_the_environment_forces_an_instruction_set() -> None:
    code = "from infinity.hardware import adam_reference, cpu_adam; print(cpu_adam.isa())"
    found = python("-c", code, env={"INFINITY_ISA": "scalar"})
    assert found.stdout.strip() == "scalar", found.stderr


def test_an_unknown_instruction_set_is_an_error() -> None:
    found = python("-c", "import infinity.hardware.cpu_adam", env={"INFINITY_ISA": "avx1024"})
    assert found.returncode != 0
    assert "ConfigError: unknown instruction set" in found.stderr
    with pytest.raises(ConfigError, match="unknown"):
        cpu_adam.set_isa("AVX2")


def test_an_unsupported_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_adam.isa()
    monkeypatch.setattr(cpu_adam._native, "use_isa", lambda name: False)
    with pytest.raises(ConfigError, match="no such instruction set"):
        cpu_adam.set_isa("avx512")
    assert cpu_adam.isa() == before


def test_threads_follow_affinity_and_local_world_size() -> None:
    load = (  # the module alone: importing torch would take seconds
        "import importlib.util as u, os; s = u.spec_from_file_location('_cpu_adam', "
        f"{cpu_adam._native.__file__!r}); m = u.module_from_spec(s); s.loader.exec_module(m); "
    )
    code = load + "print(m.threads())"
    cores = len(os.sched_getaffinity(0))
    assert int(python("-c", code, env={"LOCAL_WORLD_SIZE": "1"}).stdout) == cores
    assert int(python("-c", code, env={"LOCAL_WORLD_SIZE": "2"}).stdout) == max(1, cores // 2)
    assert int(python("-c", code, env={"LOCAL_WORLD_SIZE": "1000"}).stdout) == 1
    one = f"os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); print(m.threads())"
    assert int(python("-c", load + one, env={"LOCAL_WORLD_SIZE": "1"}).stdout) == 1
    with pytest.raises(ConfigError):
        cpu_adam.set_threads(0)


FORK = """
import os, signal, torch
from infinity.hardware import adam_reference, cpu_adam
cpu_adam.set_threads(3)
x = torch.randn(500_000)
def update():
    p, m, v, out = x.clone(), x * 0, x * 0, x.bfloat16()
    cpu_adam.adamw_update(p, m, v, x, out, lr=1e-3, beta1=.9, beta2=.99, eps=1e-8, weight_decay=0., step=1)
    return p
before = update()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        ok = all(torch.equal(update(), before) for _ in range(5)) and cpu_adam.threads() == 3
        os._exit(0 if ok else 3)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(update(), before)
"""


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    found = python("-c", "import torch; torch.set_num_threads(1)\n" + FORK)
    assert found.returncode == 0, found.stderr


def test_the_gil_is_free_while_the_kernel_works() -> None:
    tensors, grad = state(1_000_000), values(1_000_000, 9)
    cpu_adam.set_isa("scalar")
    cpu_adam.set_threads(1)
    inside = False

    def work() -> None:
        nonlocal inside
        for _ in range(20):
            inside = True
            cpu_adam.adamw_update(*tensors, grad, None, **OPTIONS)
            inside = False

    worker = threading.Thread(target=work)
    worker.start()
    seen = 0
    while worker.is_alive():
        seen += inside  # True only while the other thread is at that line, without the GIL
        time.sleep(1e-4)
    worker.join(60)
    assert seen >= 20
