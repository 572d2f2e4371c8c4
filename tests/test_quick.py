"""What `make test` and `make test-all` take of a test's parameters."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from .quick import cover


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 3, 2), (33, 2), (5, 2, 1, 3)])
def test_each_value_of_each_parameter_occurs_evenly(sizes: tuple[int, ...]) -> None:
    settings = [dict(zip("abcd", each, strict=False)) for each in itertools.product(*map(range, sizes))]
    chosen = cover(settings)
    assert len(chosen) == len(set(chosen)) == max(sizes)
    for name, size in zip("abcd", sizes, strict=False):
        times = Counter(settings[i][name] for i in chosen)
        assert len(times) == size
        assert max(times.values()) - min(times.values()) <= 1


@pytest.mark.parametrize("sizes", [(1,), (5,), (5, 2), (3, 3, 2), (6, 3, 2), (5, 2, 1, 3)])
def test_any_two_values_of_two_parameters_meet(sizes: tuple[int, ...]) -> None:
    settings = [dict(zip("abcd", each, strict=False)) for each in itertools.product(*map(range, sizes))]
    chosen = cover(settings, 2)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        a, b = "abcd"[first], "abcd"[second]
        assert len({(settings[i][a], settings[i][b]) for i in chosen}) == sizes[first] * sizes[second]
    assert len(chosen) == len(set(chosen)) < max(2, len(settings)) or len(sizes) < 3
