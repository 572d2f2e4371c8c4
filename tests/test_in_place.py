"""Windows around the bytes of tensors: whole blocks are read, and each byte comes to its place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.core.sizes import ALIGNMENT
from infinity.planning.in_place import InPlace, Range, in_place

SIZES = [20 * ALIGNMENT + 12, 7 * ALIGNMENT]


def read(place: InPlace, files: list[bytes]) -> dict[int, int]:
    """Do what a plan says; return the bytes of the copy that it fills."""
    lease = bytearray(place.lease_nbytes)
    taken: list[tuple[int, int]] = []
    for file, offset, nbytes, at in place.windows:
        assert offset % ALIGNMENT == at % ALIGNMENT == 0
        assert nbytes % ALIGNMENT == 0 or offset + nbytes == SIZES[file]
        assert 0 <= at <= at + nbytes <= place.lease_nbytes
        assert all(at >= end or at + nbytes <= begin for begin, end in taken)
        taken.append((at, at + nbytes))
        lease[at : at + nbytes] = files[file][offset : offset + nbytes]
    copy = {}
    for at, begin, nbytes in place.stretches:
        for i in range(nbytes):
            assert begin + i not in copy
            copy[begin + i] = lease[at + i]
    return copy


@st.composite
def ranges(draw: st.DrawFn) -> list[Range]:
    found, begin = [], 0
    for _ in range(draw(st.integers(1, 6))):
        file = draw(st.integers(0, 1))
        offset = draw(st.integers(0, SIZES[file] - 1))
        nbytes = draw(st.integers(1, min(3 * ALIGNMENT, SIZES[file] - offset)))
        found.append(Range(file, offset, nbytes, begin))
        begin += nbytes + draw(st.integers(0, 200))
    return draw(st.permutations(found))


@given(ranges())
def test_each_byte_comes_to_its_place(chosen: list[Range]) -> None:
    files = [bytes((i * 7 + i // 251 + n) % 256 for i in range(size)) for n, size in enumerate(SIZES)]
    wanted = {r.begin + i: files[r.file][r.offset + i] for r in chosen for i in range(r.nbytes)}
    place = in_place(chosen, SIZES)
    assert read(place, files) == wanted
    assert place.lease_nbytes <= sum(r.nbytes + 2 * ALIGNMENT for r in chosen)


def test_tensors_that_lie_together_are_one_window() -> None:
    place = in_place([Range(0, 100, 5000, 6000), Range(0, 5100, 6000, 0)], SIZES)
    assert [(w.offset, w.nbytes) for w in place.windows] == [(0, 3 * ALIGNMENT)]
    assert place.lease_nbytes == 3 * ALIGNMENT
