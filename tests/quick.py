"""Which parameters of a test `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return `values` for `pytest.mark.parametrize`: those that are not in `chosen` are marked `full`."""
    values = list(values)
    assert all(v in values for v in chosen), "no such value"
    return [v if v in chosen else _full(v) for v in values]


def _full(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
