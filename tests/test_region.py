"""Pinned memory in pieces of any size, against a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.core.errors import ClosedError
from infinity.core.sizes import ALIGNMENT, ceil_to
from infinity.storage.heap import HeapLease, PinnedHeap

from .pins import Pins

PAGES = 24
#: a number > 0: take so many bytes; ≤ 0: give back one of the leases that are out
ACTIONS = st.lists(st.one_of(st.integers(1, 9 * ALIGNMENT), st.integers(-50, 0)), max_size=60)


@given(ACTIONS)
def test_leases_never_overlap_and_the_first_hole_is_taken(actions: list[int]) -> None:
    region = PinnedHeap(PAGES * ALIGNMENT + 1)
    pages: list[HeapLease | None] = [None] * PAGES  # who has each page
    out: list[HeapLease] = []
    peak = 0
    for action in actions:
        if action > 0:
            need = ceil_to(action, ALIGNMENT) // ALIGNMENT
            fits = (i for i in range(PAGES - need + 1) if not any(pages[i : i + need]))
            first = next(fits, None)
            lease = region.take(action)
            assert (lease is None) == (first is None)
            if lease is not None and first is not None:
                assert lease.offset == first * ALIGNMENT
                assert lease.nbytes == action
                pages[first : first + need] = [lease] * need
                out.append(lease)
        elif out:
            lease = out.pop(action % len(out))
            lease.release()
            lease.release()  # does nothing
            pages = [None if p is lease else p for p in pages]
        used = sum(p is not None for p in pages) * ALIGNMENT
        peak = max(peak, used)
        assert (region.in_use, region.peak) == (used, peak)
    for lease in out:
        lease.release()
    assert region.take(PAGES * ALIGNMENT) is not None


def test_what_is_written_stays_until_it_is_given_back() -> None:
    region = PinnedHeap(1 << 20)
    leases = [region.take(n) for n in (4, 100_000, 8192)]
    for value, lease in enumerate(leases):
        assert lease is not None
        lease.tensor(torch.float32).fill_(value)
    for value, lease in enumerate(leases):
        assert lease is not None
        tensor = lease.tensor(torch.float32)
        assert tensor.nbytes == lease.nbytes
        assert bool((tensor == value).all())
        lease.release()
        with pytest.raises(ClosedError):
            lease.tensor(torch.float32)


def test_memory_is_registered_whole_and_once() -> None:
    pins = Pins()
    region = PinnedHeap(1 << 20, pins=pins)
    lease = region.take(4096)
    assert lease is not None
    held = lease.tensor(torch.uint8)
    region.close()
    region.close()
    assert region.take(1) is None
    assert [(c[0], c[2]) for c in pins.calls] == [("pin", 1 << 20), ("unpin", 1 << 20)]
    assert pins.calls[0][1] == pins.calls[1][1]
    held.fill_(1)  # what is held keeps the memory
    lease.release()


def test_an_empty_region_lends_nothing() -> None:
    assert PinnedHeap(0).take(1) is None
