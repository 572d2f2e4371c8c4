"""The rules in one launch (adam_fused.py): its bits, as far as Triton's interpreter shows them on a CPU, that
it compiles for a GPU, and when it is what runs. A module that takes its place shows that without Triton."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.hardware import adam_reference, cpu_adam

from .command_line import python
from .device_bits import OPTIONS, adam_segment, same, state, values

SEGMENTS = [
    adam_segment(3, 700, **OPTIONS),
    adam_segment(800, 200, **{**OPTIONS, "weight_decay": 0.01}, decoupled=False),  # another kind of kernel
]


def fused_bits(**env: str) -> tuple[int, str]:
    heads = Path(sys.prefix) / "heads"  # torch must not see triton anywhere else
    if not heads.is_dir() and not os.environ.get("CI"):
        pytest.skip("needs triton: `make test-nightly` installs it")
    done = python("-m", "tests.fused_bits", env={"PYTHONPATH": str(heads), **env}, timeout=1800)
    return done.returncode, done.stdout + done.stderr[-4000:]


@pytest.mark.processes
@pytest.mark.nightly
def test_the_kernel_gives_the_bits_of_the_cpu() -> None:
    assert fused_bits(TRITON_INTERPRET="1") == (0, "17 checks\n")


@pytest.mark.processes
@pytest.mark.nightly
def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Its parser refuses what its interpreter does not see."""
    assert fused_bits(TRITON_CACHE_DIR=str(tmp_path)) == (0, "360 kernels\n")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., None]], None]]:
    """Have a function be Triton's kernel, on the CPU."""
    module = types.ModuleType("infinity.hardware.adam_fused")

    def served(update: Callable[..., None]) -> None:
        module.update = update  # type: ignore[attr-defined]

    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(adam_reference, "_FUSED_ON", {"cpu"})
    adam_reference._fused.cache_clear()
    yield served
    adam_reference._fused.cache_clear()


def updates_as_the_cpu_does() -> bool:
    grad, outs = values(1000, 9).bfloat16(), [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2)]
    here, there = state(1000), state(1000)
    cpu_adam.update_segments(here[0], here[1:], grad, outs[0], SEGMENTS)
    adam_reference.reference_segments(there[0], there[1:], grad, outs[1], SEGMENTS)
    return all(map(same, [*here, outs[0]], [*there, outs[1]]))


def test_a_kernel_with_the_bits_of_torch_is_what_runs(serve: Any) -> None:
    ran: list[tuple[int, int]] = []

    def update(*given: Any) -> None:
        ran.append(given[4:6])
        _right(*given)

    serve(update)
    assert updates_as_the_cpu_does()
    tried = 2 * len(adam_reference._PROBED)
    assert ran[:tried] == 2 * list(adam_reference._PROBED)
    assert ran[tried:] == [(3, 703), (800, 1000)]
    assert updates_as_the_cpu_does()
    assert ran[tried + 2 :] == [(3, 703), (800, 1000)]  # it is tried once


def _fails_late(*given: Any) -> None:
    _right(*given)
    raise RuntimeError("too late")


def _on(change: Callable[[int, int], tuple[int, int]]) -> Callable[..., None]:
    """Return a kernel that updates other elements than it is asked for."""
    return lambda *given: _right(*given[:4], *change(*given[4:6]), *given[6:])


_right = adam_reference._in_torch
WRONG = {
    "fails when it is done": (_fails_late, "too late"),
    "does nothing": (lambda *_: None, "other bits"),
    "ignores where it begins": (_on(lambda first, last: (0, last - first)), "other bits"),
    "begins at a multiple": (_on(lambda first, last: (first - first % 16, last)), "other bits"),
    "leaves out the last block": (_on(lambda first, last: (first, last - last % 1024)), "other bits"),
    "goes on to the end of it": (_on(lambda first, last: (first, last + -last % 1024)), "other bits"),
    "makes 16 blocks": (_on(lambda first, last: (first, min(last, first + 16_384))), "other bits"),
}


@pytest.mark.parametrize(("kernel", "said"), WRONG.values(), ids=WRONG)
def test_another_one_is_told_and_plain_torch_runs(serve: Any, kernel: Any, said: str) -> None:
    serve(kernel)
    with pytest.warns(RuntimeWarning, match=f"the optimizer on cpu runs in plain torch.*{said}"):
        assert updates_as_the_cpu_does()


def test_where_there_is_no_memory_to_try_it_it_is_tried_again(serve: Any) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    serve(no_memory)
    before = state(1000)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            adam_reference.reference_segments(before[0], before[1:], values(1000, 9), None, SEGMENTS)
    assert all(map(same, before, state(1000)))


def test_a_triton_that_is_broken_is_told(serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise AttributeError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("infinity.hardware.adam_fused", "triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(RuntimeWarning, match="AttributeError: broken"):
        assert updates_as_the_cpu_does()


def test_without_triton_it_is_plain_torch(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "infinity.hardware.adam_fused", raising=False)
    assert updates_as_the_cpu_does()
    assert adam_reference._fused(torch.device("cpu"), torch.bfloat16, 0, torch.float32, False, False) is None
