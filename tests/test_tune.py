"""`infinity tune`: a real run, the choice among made-up drives, and the file in which results are kept."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import infinity
from infinity.cli.bench.io_load import Settings
from infinity.cli.commands import tune_command
from infinity.cli.main import run
from infinity.cli.tune import Tuner, as_config, find, remember
from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.sizes import KiB, MiB
from infinity.hardware.aio import Ring, open_ring
from infinity.hardware.tuned import TunedSettings, bandwidths, drive_key, settings_file, tuned

SOME = TunedSettings(512 * KiB, 16, "libaio", 4)


pytestmark = pytest.mark.usefixtures("own_environment")


# ---- the command ----


def test_a_run_finds_keeps_and_prints_settings_that_work(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--seconds", "1"]
    done = CliRunner().invoke(tune_command, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    (row,) = found["tuned"]
    assert row["path"] == str(tmp_path)
    measured = row["measured"]
    assert measured["candidates"] > 3
    assert measured["score_bytes_per_second"] > 0
    assert 0.01 <= measured["noise"] <= 0.10
    assert measured["of_best"] >= 1 - measured["noise"]
    assert found["stored"] == str(settings_file())

    kept = tuned(str(tmp_path))
    assert kept == TunedSettings(*(row[name] for name in TunedSettings._fields))
    config = eval(found["config"], {"infinity": infinity})
    assert config.directories == (str(tmp_path),)
    assert (config.block_bytes, config.queue_depth) == (kept.block_bytes, kept.queue_depth)
    assert config.aio_backend == kept.backend
    with Ring("test", path=str(tmp_path), **kept._asdict()) as ring:
        assert ring.backend == kept.backend
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_directory_and_a_drive_without_room_are_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("/missing", __file__):
        with pytest.raises(DirectoryError):
            CliRunner().invoke(tune_command, [place], catch_exceptions=False)
    monkeypatch.setattr("infinity.cli.bench.io.usable_bytes", lambda directory: (40 * MiB, 0))
    with pytest.raises(ConfigError, match="has not the room"):
        CliRunner().invoke(tune_command, [str(tmp_path)], catch_exceptions=False)


# ---- the choice ----


class MadeUp(Tuner):
    """A drive whose score is a formula, with noise and a clock of its own."""

    def __init__(self, rate: Callable[[Settings], float], noise: float) -> None:
        self._rate, self._noise, self._random = rate, noise, random.Random(0)
        self._seconds = 0.0
        self.scores = {}

    @property
    def spent(self) -> float:
        return self._seconds / 60

    def fits(self, settings: Settings) -> bool:
        return True

    def score(self, settings: Settings, seconds: float) -> float:
        self._seconds += seconds
        score = self._rate(settings) * (1 + self._random.uniform(-self._noise, self._noise))
        self.scores.setdefault(settings, []).append(score)
        return score


def saturating(settings: Settings) -> float:
    """A drive that needs 8 MiB in flight, and is a third slower with `threads`."""
    flight = settings.block_bytes * settings.queue_depth
    return 1e9 * min(1.0, flight / (8 * MiB)) * (0.66 if settings.backend == "threads" else 1.0)


def test_the_smallest_that_is_as_good_is_taken() -> None:
    tuner = MadeUp(saturating, 0.01)
    chosen, measured = find(tuner, ("libaio", "uring", "threads"), lambda *_: None, 0.3)
    assert chosen.backend in ("libaio", "uring")
    assert 8 * MiB <= chosen.block_bytes * chosen.queue_depth <= 16 * MiB
    assert saturating(chosen) == 1e9
    assert measured["of_best"] >= 0.98

    def rate(settings: Settings) -> float:
        return saturating(settings) * (2 if settings.backend == "uring" else 1)

    chosen, _ = find(MadeUp(rate, 0.03), ("libaio", "uring", "threads"), lambda *_: None, 0.3)
    assert chosen.backend == "uring", "a backend that is better wins"

    text = as_config([("/a b", Settings("libaio", 512 * KiB, 32)), ("/c", Settings("uring", MiB, 8))])
    config = eval(text, {"infinity": infinity})  # one for several drives
    assert config.directories == ("/a b", "/c")
    assert (config.block_bytes, config.queue_depth, config.aio_backend) == (MiB, 32, "auto")


# ---- the file ----


def test_settings_are_kept_per_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned(str(tmp_path)) is None
    assert tuned(None) is None
    assert tuned("/missing") is None
    file = remember(str(tmp_path), SOME, {"why": "test"})
    assert tuned(str(tmp_path)) == SOME
    assert tuned(str(tmp_path.parent)) == SOME  # of the drive, not of the directory
    assert tuned("/dev/shm") is None
    other = TunedSettings(MiB, 4, "threads", 2)
    remember("/dev/shm", other, {})
    assert (tuned(str(tmp_path)), tuned("/dev/shm")) == (SOME, other)
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(file.parent) == ["tuned.json"]
    entry = json.loads(file.read_text())["drives"][drive_key(str(tmp_path))]
    assert entry["measured"] == {"why": "test"}
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_file() == tmp_path / ".config" / "infinity" / "tuned.json"


def test_chunks_are_placed_by_measured_bandwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infinity.cli import tune
    from infinity.core.sizes import Tier
    from infinity.hardware import tuned as kept
    from infinity.storage.pinned import PinnedPool
    from infinity.storage.store import Part, Store

    folders = [str(tmp_path / name) for name in ("slow", "fast")]
    for folder in folders:
        Path(folder).mkdir()
    # Two directories of one drive here, so the drives are told apart by name.
    for module in (kept, tune):
        monkeypatch.setattr(module, "drive_key", os.path.basename)
    settings = kept.TunedSettings(65536, 4, "threads", 2)

    def shares() -> list[int]:
        chunks = [{"x": Part((4096,), (Tier.NVME,))}] * 40
        store = Store(chunks, directories=folders, pool=PinnedPool({"a": (4096, 1)}))
        counts = [int((store.layout.directory == i).sum()) for i in range(2)]
        store.close()
        return counts

    remember(folders[0], settings, {"score_bytes_per_second": 1e9})
    assert shares() == [20, 20]
    remember(folders[1], settings, {"score_bytes_per_second": 3e9})
    assert shares() == [10, 30]


def test_a_damaged_file_of_settings_counts_as_absent(tmp_path: Path) -> None:
    place = str(tmp_path)
    good = {"block_bytes": MiB, "queue_depth": 16, "backend": "threads", "threads": 4}
    measured = {"score_bytes_per_second": 1e9}

    def entry(**changes: Any) -> bytes:
        whole = {**good, "measured": measured, **changes}
        return json.dumps({"version": 1, "drives": {drive_key(place): whole}}).encode()

    file = settings_file()
    file.parent.mkdir(parents=True)
    file.write_bytes(entry())
    assert tuned(place) == TunedSettings(**good)  # type: ignore[arg-type]
    assert bandwidths([place]) == [1e9]
    damaged: list[bytes] = [
        *(b"", b"null", b"\xff\xfe\x00", os.urandom(4096), bytes(4096), b"[" * 100_000, b"1" * 100_000),
        *(b'{"version": 1, "drives": []}', b"-1e999", entry()[:-20]),
        *(entry(**{name: v}) for name in good for v in (None, True, [], {}, -1, 0, 2**80, 1e400, "", "x")),
        *(entry(queue_depth=value) for value in (float("nan"), 16.0, 1 << 20, 5000)),
        *(entry(threads=value) for value in (4000, "4")),
        *(entry(block_bytes=value) for value in (4097, 1 << 31, 10**400)),
    ]
    for content in damaged:
        file.write_bytes(content)
        found = tuned(place)
        if found is not None:  # a name of a backend may be any text: it is tried, and then as if absent
            assert found.backend in ("", "x")
        else:
            assert bandwidths([place]) is None
    for content in (damaged[0], entry(backend="x"), entry(block_bytes=1 << 31)):
        file.write_bytes(content)
        with open_ring("test", place) as ring:
            assert (ring.block_bytes, ring.queue_depth, ring.threads) == (MiB, 32, 4)
    for value in (0, -1, True, "fast", float("nan"), float("inf"), 10**400, 1e-300, None, [1]):
        file.write_bytes(entry(measured={"score_bytes_per_second": value}))
        assert bandwidths([place]) is None
    file.write_bytes(entry(measured=[]))
    assert bandwidths([place]) is None

    for content in damaged:  # and a new result replaces all of it
        file.write_bytes(content)
        remember(place, TunedSettings(**good), measured)  # type: ignore[arg-type]
        assert tuned(place) == TunedSettings(**good)  # type: ignore[arg-type]
    file.unlink()
    file.mkdir()
    assert tuned(place) is None
    with pytest.raises(DirectoryError, match="cannot write the settings file"):
        remember(place, TunedSettings(**good), measured)  # type: ignore[arg-type]


@pytest.mark.integration
def test_tune_prints_what_it_may_not_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drive, theirs, ours = (tmp_path / name for name in ("drive", "theirs", "ours"))
    drive.mkdir()
    theirs.touch()  # in place of a directory
    monkeypatch.setenv("XDG_CONFIG_HOME", str(theirs))
    assert run(["tune", str(drive), "--seconds", "1"]) == 1
    shown = capsys.readouterr()
    assert f'infinity.Config(nvme="{drive}"' in shown.out
    assert shown.err.count("Not a directory") == 1
    assert "to change: set XDG_CONFIG_HOME to a writable directory" in shown.err
    monkeypatch.setenv("XDG_CONFIG_HOME", str(ours))  # the cure
    assert remember(str(drive), SOME, {}) == ours / "infinity" / "tuned.json"
