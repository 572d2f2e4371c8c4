"""Corruption that a store finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.core.errors import CorruptionError
from infinity.storage.store import Store

from .small_store import CHUNK, PAGE, ROOM, arena_file, bytes_of, get, pool_of, put, store_of


def _overwrite(store: Store, chunk: int, part: str, at: int, content: bytes) -> None:
    extent = store.layout.extent(chunk, part)
    with open(arena_file(store), "r+b") as file:
        file.seek(extent.offset + at)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("kind", ["flipped bit", "torn", "lost", "misdirected", "zeroed"])
@pytest.mark.parametrize("part", list(CHUNK))
def test_a_write_that_went_wrong_is_found_at_the_next_read(tmp_path: Path, kind: str, part: str) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        nbytes = CHUNK[part].nbytes
        for chunk in range(3):
            put(store, lease, chunk, chunk + 1)
            store.write(chunk, "gradient", lease).wait()
        old = bytes_of(store, 1, part)
        put(store, lease, 1, 77)
        store.write(1, "gradient", lease).wait()
        assert get(store, lease, 1, part) == bytes([77]) * nbytes
        other = bytes_of(store, 2, part)
        content = {
            "flipped bit": bytes([77]) * (nbytes - 1) + bytes([76]),
            "torn": bytes([77]) * (nbytes - 512) + old[-512:],
            "lost": old,
            "misdirected": other,
            "zeroed": bytes(nbytes),
        }[kind]
        _overwrite(store, 1, part, 0, content)
        with pytest.raises(CorruptionError, match=f"part '{part}' of chunk 1") as raised:
            get(store, lease, 1, part)
        error = raised.value
        sections = len(CHUNK[part].sections)
        section = sections - 1 if kind in ("flipped bit", "torn") else 0
        assert f"section {section} of" in str(error)
        extent = store.layout.extent(1, part, sections=range(section, section + 1))
        assert (error.path, error.offset, error.nbytes) == (str(tmp_path / "drive"), *extent[1:])
        with pytest.raises(CorruptionError):  # and from then on
            store.read(2, part, lease)


def test_only_the_sections_that_are_read_are_checked(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        put(store, lease, 0, 1)
        _overwrite(store, 0, "state", PAGE, b"x")
        store.read(0, "state", lease, sections=range(2, 3)).wait()
        store.read(0, "state", lease, sections=range(1)).wait()
        with pytest.raises(CorruptionError, match="section 1"):
            store.read(0, "state", lease, sections=range(1, 3)).wait()
