"""Tests that know a CPU run on the lagging device: what they give to a model or compare goes where it has to.

Inside of `lagging_lane()` engines that are told "cpu" have a `CudaDevice`. Tests keep their tensors on the
CPU: an operator that a test calls with some on either side has them on the device, as a user's `.to(device)`
would, and comparisons have them on the CPU. What the engine calls is left as it is: it may not mix devices.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from infinity.api.closing import wait_for_dropped

from .nccl import lagging_ranks
from .operators import is_device

_COMPARED = {torch.equal, torch.allclose, torch.isclose, torch.Tensor.equal, torch.Tensor.allclose}
_STAYS = {torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.data.__set__}


def _to_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or is_device(value):
        return value
    return value.to("lagging:0")


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _called_by_a_test() -> bool:
    frame = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    path = frame.f_code.co_filename
    return path == "<rank>" or ("/tests/" in path and "/tests/lagging/" not in path)


class _Meeting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _STAYS and _called_by_a_test():
            tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
            here = [is_device(t) for t in tensors]
            if any(here) and not all(here):
                on_host = func in _COMPARED or (func is torch.Tensor.__setitem__ and not is_device(args[0]))
                args, kwargs = tree_map(_to_host if on_host else _to_device, (args, kwargs))
        return func(*args, **kwargs)


@contextlib.contextmanager
def lagging_lane() -> Iterator[Any]:
    """Engines have a lagging `CudaDevice` inside of this; raises `Finding` for what was found."""
    inner, compare = nn.Module.__call__, torch.testing.assert_close

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if not all(map(is_device, given)) and any(map(is_device, self.parameters())):
            args, kwargs = tree_map(_to_device, (args, kwargs))
        return inner(self, *args, **kwargs)

    with sdpa_kernel(SDPBackend.MATH), lagging_ranks() as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__call__", call)
        patch.setattr(torch.testing, "assert_close", lambda a, b, **k: compare(_to_host(a), _to_host(b), **k))
        with _Meeting():
            yield world
        gc.collect()
        wait_for_dropped()  # engines that the test has dropped close in their world


def note_calls(patch: pytest.MonkeyPatch, owner: type, *names: str) -> list[tuple[str, Any]]:
    """Return a list to which the name and the object of each call of these methods are added from now on."""
    noted: list[tuple[str, Any]] = []

    def note(name: str) -> None:
        inner = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            noted.append((name, self))
            return inner(self, *args, **kwargs)

        patch.setattr(owner, name, call)

    for name in names:
        note(name)
    return noted


def devices(name: str) -> AbstractContextManager[Any]:
    """Return what engines that are told "cpu" have `name` for inside of: "cpu", or "lagging"."""
    return lagging_lane() if name == "lagging" else contextlib.nullcontext()
