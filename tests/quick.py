"""Which parameters of a test `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

#: Marks a test whose parameters are a product: `make test` runs a few, in which each value occurs.
covering = pytest.mark.covering


def quick(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return `values` for `pytest.mark.parametrize`: those that are not in `chosen` are marked `full`."""
    values = list(values)
    assert all(v in values for v in chosen), "no such value"
    return [v if v in chosen else _full(v) for v in values]


def _full(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)


def cover(settings: Sequence[Mapping[Any, Hashable]]) -> list[int]:
    """Return which of `settings`, a value for each parameter, to take so that each value occurs, evenly."""
    left = {pair for setting in settings for pair in setting.items()}
    chosen: list[int] = []
    times: Counter[tuple[Any, Hashable]] = Counter()

    def worth(i: int) -> tuple[int, int]:
        return len(left & settings[i].items()), -sum(times[pair] for pair in settings[i].items())

    while left:
        best = max(range(len(settings)), key=worth)
        chosen.append(best)
        left -= settings[best].items()
        times.update(settings[best].items())
    return chosen


def leave_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` what a covering subset of each test that is marked `covering` does without."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "covering" in marks and not marks & {"full", "slow"}:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in tests.values():
        kept = cover([_setting(item) for item in found])
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker(pytest.mark.full)


def _setting(item: Any) -> dict[Any, Hashable]:
    """What a test has of each `parametrize`. Values need no hash: each is the same object in all tests."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    return {
        name: tuple(id(item.callspec.params[each]) for each in ((name,) if isinstance(name, str) else name))
        for name in names
    }
