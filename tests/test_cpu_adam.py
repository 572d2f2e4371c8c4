"""The CPU Adam: equal to torch, the same bits everywhere, and nothing written after an error."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from infinity.core.errors import ConfigError, ParameterError
from infinity.core.sizes import NORM_BLOCK
from infinity.hardware import adam_reference, cpu_adam

from .command_line import python
from .device_bits import (
    CHECKS,
    DTYPES,
    OPTIONS,
    SIZES,
    adam_segment,
    any_bits,
    bits,
    same,
    state,
    update,
    values,
)

ISAS = cpu_adam.available_isas()


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    isa, threads, of_torch = cpu_adam.isa(), cpu_adam.threads(), torch.get_num_threads()
    torch.set_num_threads(1)  # its small operations would spin on cores that others need
    yield
    torch.set_num_threads(of_torch)
    cpu_adam.set_isa(isa)
    cpu_adam.set_threads(threads)


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy of `x` that begins `elements` elements into a fresh 64-byte-aligned buffer."""
    return torch.cat([torch.zeros(elements, dtype=x.dtype), x])[elements:]


def run(n: int, out: torch.dtype, isa: str | None, shift: int = 0) -> list[torch.Tensor]:
    """Update the state of `values`; isa None: in plain torch. Return all that was written."""
    tensors = [shifted(t, shift) for t in state(n)]
    grad, copy = (shifted(t, shift) for t in (values(n, 9).bfloat16(), torch.zeros(n, dtype=out)))
    if isa is not None:
        cpu_adam.set_isa(isa)
    call = adam_reference.reference_segments if isa is None else cpu_adam.update_segments
    update(call, tensors, grad, copy, **OPTIONS)
    return [*tensors, copy]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("what", CHECKS)
def test_every_instruction_set_gives_the_bits_of_plain_torch(what: str, isa: str) -> None:
    cpu_adam.set_isa(isa)
    assert CHECKS[what]("cpu") == []


@pytest.mark.parametrize("out", DTYPES)
def test_large_calls_that_write_past_the_caches_give_the_same_bits(out: torch.dtype) -> None:
    """Also with any number of threads."""
    n = (1 << 20) + 77
    expected = run(n, out, None)
    for isa in ISAS:
        for shift, threads in ((0, 1), (5, 4)):
            cpu_adam.set_threads(threads)
            assert cpu_adam.threads() == threads
            found = run(n, out, isa, shift)
            assert all(map(same, found, expected)), (isa, shift)


def by_torch(parts: list[torch.Tensor], grad: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return what torch's own optimizer makes of a master and its moments."""
    kind = torch.optim.AdamW if options.get("decoupled", True) else torch.optim.Adam
    p = torch.nn.Parameter(parts[0].clone())
    rest = {k: options[k] for k in ("lr", "eps", "weight_decay", "maximize") if k in options}
    optimizer = kind([p], betas=(options["beta1"], options["beta2"]), foreach=False, **rest)
    moments = {"exp_avg": parts[1].clone(), "exp_avg_sq": parts[2].clone()}
    optimizer.state[p] = {"step": torch.tensor(options["step"] - 1.0), **moments}
    p.grad = grad.clone()
    optimizer.step()
    return [p.detach(), moments["exp_avg"], moments["exp_avg_sq"]]


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_inf_travel_as_in_torch(isa: str) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e38, 1e-45, 1.0])
    grid = torch.cartesian_prod(special, special, special.abs(), special)
    *parts, grad = (grid[:, k].contiguous() for k in range(4))
    cpu_adam.set_isa(isa)
    for weight_decay, decoupled in ((0.0, True), (0.1, True), (0.1, False)):
        found, out = [p.clone() for p in parts], torch.empty(len(grid), dtype=torch.bfloat16)
        options = {**OPTIONS, "weight_decay": weight_decay, "decoupled": decoupled}
        update(cpu_adam.update_segments, found, grad, out, **options)
        for a, b in zip(found, by_torch(parts, grad, options), strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.isinf(), b.isinf())
        assert same(out, found[0].bfloat16())


# ---- rounding ----


@pytest.mark.parametrize("isa", ISAS)
def test_all_half_patterns_widen_as_in_torch(isa: str) -> None:
    cpu_adam.set_isa(isa)
    for dtype in DTYPES[1:]:
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        wide = torch.empty(65536)
        cpu_adam.convert(wide, patterns)
        assert torch.equal(bits(wide), bits(patterns.float())), dtype
        for target in DTYPES[1:]:
            found = torch.empty(65536, dtype=target)
            cpu_adam.convert(found, patterns)
            assert same(found, patterns.float().to(target))


def test_flushing_denormals_in_torch_changes_nothing() -> None:
    tiny = torch.full((100_000,), 1e-40)
    expected, found = ([torch.empty(100_000, dtype=torch.bfloat16), torch.zeros(100_000)] for _ in range(2))
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


# ---- sums of squares, sums ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_are_one_fixed_tree(dtype: torch.dtype) -> None:
    for n in (0, 1, 7, 127, 128, 129, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK + 1000):
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
    for isa in ISAS:
        cpu_adam.set_isa(isa)
        x = torch.zeros(3 * NORM_BLOCK, dtype=dtype)
        x[5], x[NORM_BLOCK + 100], x[2 * NORM_BLOCK] = math.inf, math.nan, 6e4
        x[2 * NORM_BLOCK] *= 1 if dtype is torch.float16 else 1e25  # whose square is beyond its dtype
        sums = cpu_adam.sum_of_squares(x)
        assert sums[0] == math.inf
        assert math.isnan(sums[1])
        assert sums[2] == float(x[2 * NORM_BLOCK]) ** 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares_of_pieces_are_those_of_each_alone(dtype: torch.dtype) -> None:
    """In any number and order, with gaps; on every instruction set, and in plain torch."""
    x = values(3 * NORM_BLOCK).to(dtype)
    lengths = [1, 15, 16, 17, 64, 777, 4096, 30_000, NORM_BLOCK, NORM_BLOCK - 1, 0, 5, 33, 64]
    begins = np.cumsum([0, *(n + 3 for n in lengths[:-1])])
    pieces = np.ascontiguousarray(np.array([begins, lengths], dtype=np.int64).T[::-1])
    checked = cpu_adam.Pieces(len(x), pieces)
    wanted = [adam_reference.sum_of_squares_reference(x[b : b + n]).sum() for b, n in pieces.tolist()]
    assert (adam_reference.sum_of_squares_reference(x, checked) == wanted).all()
    for isa in ISAS:
        cpu_adam.set_isa(isa)
        for shift in (0, 1):
            assert (cpu_adam.sum_of_squares(shifted(x, shift), checked) == wanted).all(), isa
    for wrong in ([[-1, 5]], [[0, -1]], [[0, NORM_BLOCK + 1]], [[3 * NORM_BLOCK - 4, 5]], [0, 5]):
        with pytest.raises(ParameterError, match="pieces"):
            cpu_adam.Pieces(len(x), np.array(wrong, dtype=np.int64))
    with pytest.raises(ParameterError, match="length"):
        cpu_adam.sum_of_squares(x[1:], checked)


@pytest.mark.parametrize("isa", ISAS)
def test_accumulate_adds_exactly_widened_values(isa: str) -> None:
    cpu_adam.set_isa(isa)
    for dtype in DTYPES:
        for n in SIZES:
            for shift in (0, 1):
                target, source = shifted(values(n), shift), shifted(any_bits(n, dtype), shift)
                expected = target + source.float()
                cpu_adam.accumulate(target, source)
                assert same(target, expected)


# ---- errors ----


def bad_calls() -> list[tuple[str, dict[str, Any]]]:
    n = 64
    store = torch.zeros(3 * n)
    return [
        ("grad has a wrong dtype", {"grad": torch.zeros(n, dtype=torch.float64)}),
        ("master has a wrong dtype", {"master": torch.zeros(n, dtype=torch.bfloat16)}),
        ("out has a wrong dtype", {"out": torch.zeros(n, dtype=torch.int16)}),
        ("has a wrong length", {"exp_avg": torch.zeros(n + 1)}),
        ("grad has a wrong length", {"grad": torch.zeros(n - 1)}),
        ("out has a wrong length", {"out": torch.zeros(0)}),
        ("flat and contiguous", {"grad": torch.zeros(2 * n)[::2]}),
        ("flat and contiguous", {"exp_avg_sq": torch.zeros(8, 8)}),
        ("not a tensor", {"grad": np.zeros(n, dtype=np.float32)}),
        ("overlap", {"master": store[:n], "grad": store[n - 1 : 2 * n - 1]}),
        ("overlap", {"exp_avg": store[:n], "exp_avg_sq": store[:n]}),
        ("overlap", {"grad": store[:n], "out": store[n // 2 : n // 2 + n]}),
        *(
            ("segment", {"segments": [adam_segment(**{**OPTIONS, "start": 0, "numel": n, **wrong})]})
            for wrong in (
                *({"step": 0}, {"beta1": 1.0}, {"beta2": math.nan}, {"lr": "fast"}),
                *({"numel": 65}, {"start": -1, "numel": 4}, {"numel": -4}, {"numel": 1 << 70}),
            )
        ),
        *(
            ("segment", {"segments": [adam_segment(**{**OPTIONS, "start": at, "numel": 4}) for at in pair]})
            for pair in ((0, 3), (8, 0))
        ),
        ("segment", {"segments": [(0, 4)]}),
    ]


@pytest.mark.parametrize("call", [cpu_adam.update_segments, adam_reference.reference_segments])
def test_errors_come_before_anything_is_written(call: Any) -> None:
    for message, changed in bad_calls():
        given: dict[str, Any] = dict(zip(("master", "exp_avg", "exp_avg_sq"), state(64), strict=True))
        given |= {"grad": values(64, 9), "out": torch.zeros(64, dtype=torch.bfloat16)}
        given |= {"segments": [adam_segment(0, 64, **OPTIONS)], **changed}
        before = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
        moments = [given["exp_avg"], given["exp_avg_sq"]]
        with pytest.raises(ParameterError, match=message) as caught:
            call(given["master"], moments, given["grad"], given["out"], given["segments"])
        assert caught.value.expected is not None
        assert caught.value.cure is not None
        for name, value in before.items():
            assert torch.equal(given[name], value), (name, changed)


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
        lambda: cpu_adam.copy_bytes(x.data_ptr(), x.data_ptr(), -1),
    ):
        with pytest.raises(ParameterError):
            call()


# ---- instruction sets, threads, processes ----

FORCED = """
import importlib, os
from infinity.core.errors import ConfigError
from infinity.hardware import cpu_adam
os.environ["INFINITY_ISA"] = "scalar"
assert importlib.reload(cpu_adam).isa() == "scalar"
os.environ["INFINITY_ISA"] = "avx1024"
try:
    importlib.reload(cpu_adam)
except ConfigError as error:
    print(error)
"""


def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    done = python("-c", FORCED)
    assert done.returncode == 0, done.stderr
    assert "unknown instruction set" in done.stdout
    with pytest.raises(ConfigError, match="unknown"):
        cpu_adam.set_isa("AVX2")
    before = cpu_adam.isa()
    monkeypatch.setattr(cpu_adam._native, "use_isa", lambda name: False)
    with pytest.raises(ConfigError, match="no such instruction set"):
        cpu_adam.set_isa("avx512")
    assert cpu_adam.isa() == before
    with pytest.raises(ConfigError):
        cpu_adam.set_threads(0)


def test_the_gil_is_free_while_the_kernel_works() -> None:
    tensors, grad = state(300_000), values(300_000, 9)
    cpu_adam.set_isa("scalar")
    cpu_adam.set_threads(1)
    inside = False

    def work() -> None:
        nonlocal inside
        for _ in range(20):
            inside = True
            update(cpu_adam.update_segments, tensors, grad, None, **OPTIONS)
            inside = False

    worker = threading.Thread(target=work)
    worker.start()
    seen = 0
    while worker.is_alive():
        seen += inside  # True only while the other thread is at that line, without the GIL
        time.sleep(1e-4)
    worker.join(60)
    assert seen >= 20
