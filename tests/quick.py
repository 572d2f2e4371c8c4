"""Which parameters of a test `make test` runs; `make test-nightly` runs the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

#: Marks a test whose parameters are a product: `make test` runs a few, in which each value occurs, and
#: `make test-nightly` the others.
covering = pytest.mark.covering


def quick(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return `values` for `pytest.mark.parametrize`: those that are not in `chosen` are marked `nightly`."""
    values = list(values)
    assert all(v in values for v in chosen), "no such value"
    return [v if v in chosen else _nightly(v) for v in values]


def _nightly(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)


def cover(settings: Sequence[Mapping[Any, Hashable]], together: int = 1) -> list[int]:
    """Return which of `settings`, a value for each parameter, to take so that any `together` values that
    occur together do so in what is taken, evenly."""
    groups = [
        {frozenset(group) for group in combinations(setting.items(), min(together, len(setting)))}
        for setting in settings
    ]
    left = set().union(*groups)
    chosen: list[int] = []
    times: Counter[frozenset[tuple[Any, Hashable]]] = Counter()

    def worth(i: int) -> tuple[int, int]:
        return len(left & groups[i]), -sum(times[group] for group in groups[i])

    while left:
        best = max(range(len(settings)), key=worth)
        chosen.append(best)
        left -= groups[best]
        times.update(groups[best])
    return chosen


def leave_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as `nightly` what a covering subset of each test marked `covering` does without, and as
    `integration` all settings but the first of each test marked `first`."""
    tests: dict[str, list[pytest.Item]] = {}
    begun: set[str] = set()
    for item in items:
        if item.get_closest_marker("nightly"):
            continue
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("first"):
            if test in begun:
                item.add_marker(pytest.mark.integration)
            begun.add(test)
        if item.get_closest_marker("covering"):
            tests.setdefault(test, []).append(item)
    for found in tests.values():
        each = [found[i] for i in cover([_setting(item) for item in found])]
        for item in found:
            if item not in each:
                item.add_marker(pytest.mark.nightly)


def _setting(item: Any) -> dict[Any, Hashable]:
    """What a test has of each `parametrize`. Values need no hash: each is the same object in all tests."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    return {
        name: tuple(id(item.callspec.params[each]) for each in ((name,) if isinstance(name, str) else name))
        for name in names
    }
