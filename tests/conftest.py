"""Settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from infinity.core import locks

# A shared machine has slow moments; a run in CI tries the same examples every time.
settings.register_profile("infinity", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("infinity"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "infinity")

# Locks hold their users to the order ([Note: the order of locks]). Child processes are killed and
# interrupted, and have plain ones.
locks.checking = True

# Child processes ask no one for a model or a data set.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was() -> Iterator[None]:
    """A test starts with torch's defaults, and a test that changes them does not change the next."""
    dtype, threads, state = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it costs seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(state)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test for a GPU fails in CI where there is none; `make test` does not select it."""
    if torch.cuda.is_available() or os.environ.get("CI"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
