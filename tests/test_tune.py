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
from infinity.cli.tune import Tuner, as_config, find, remember, smallness
from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.sizes import KiB, MiB
from infinity.hardware.aio import Ring
from infinity.hardware.tuned import TunedSettings, drive_key, settings_file, tuned

SOME = TunedSettings(512 * KiB, 16, "libaio", 4)


@pytest.fixture(autouse=True)
def _own_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.delenv("INFINITY_AIO", raising=False)


# ---- the command ----


def test_a_run_finds_keeps_and_prints_settings_that_work(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--seconds", "2"]
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


def test_a_person_gets_a_config_to_paste_and_nothing_is_kept_unasked(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--seconds", "1", "--no-store"]
    done = CliRunner().invoke(tune_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert f'infinity.Config(nvme="{tmp_path}", ' in done.stdout
    assert "of the best" in done.stdout
    assert not settings_file().exists()


@pytest.mark.parametrize("place", ["/missing", __file__])
def test_a_wrong_directory_is_said_at_once(place: str) -> None:
    with pytest.raises(DirectoryError):
        CliRunner().invoke(tune_command, [place], catch_exceptions=False)


def test_a_drive_without_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.cli.bench.io.usable_bytes", lambda directory: (40 * MiB, 0))
    with pytest.raises(ConfigError, match="has not the room"):
        CliRunner().invoke(tune_command, [str(tmp_path)], catch_exceptions=False)


# ---- the choice ----


class MadeUp(Tuner):
    """A drive whose score is a formula, with noise and a clock of its own."""

    def __init__(self, rate: Callable[[Settings], float], noise: float, seed: int) -> None:
        self._rate, self._noise, self._random = rate, noise, random.Random(seed)
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


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_that_is_as_good_is_taken(seed: int) -> None:
    tuner = MadeUp(saturating, 0.01, seed)
    chosen, measured = find(tuner, ("libaio", "uring", "threads"), lambda *_: None, 0.3)
    assert chosen.backend in ("libaio", "uring")
    assert 8 * MiB <= chosen.block_bytes * chosen.queue_depth <= 16 * MiB
    assert saturating(chosen) == 1e9
    assert measured["of_best"] >= 0.98


@pytest.mark.parametrize("seed", range(3))
def test_a_backend_that_is_better_wins(seed: int) -> None:
    def rate(settings: Settings) -> float:
        return saturating(settings) * (2 if settings.backend == "uring" else 1)

    tuner = MadeUp(rate, 0.03, seed)
    chosen, _ = find(tuner, ("libaio", "uring", "threads"), lambda *_: None, 0.3)
    assert chosen.backend == "uring"


def test_small_means_bytes_in_flight_first() -> None:
    order = [
        Settings("libaio", 256 * KiB, 4),
        Settings("libaio", MiB, 4),
        Settings("uring", MiB, 4),
        Settings("threads", MiB, 4, 2),
        Settings("threads", MiB, 4, 8),
        Settings("libaio", 512 * KiB, 8),
        Settings("libaio", 4 * MiB, 4),
    ]
    shuffled = random.Random(0).sample(order, len(order))
    ranked = sorted(shuffled, key=smallness)
    assert [s.block_bytes * s.queue_depth for s in ranked] == sorted(
        s.block_bytes * s.queue_depth for s in order
    )
    assert ranked[0] == order[0]
    assert ranked[-1] == order[-1]


def test_one_configuration_serves_several_drives() -> None:
    text = as_config([("/a b", Settings("libaio", 512 * KiB, 32)), ("/c", Settings("uring", MiB, 8))])
    config = eval(text, {"infinity": infinity})
    assert config.directories == ("/a b", "/c")
    assert (config.block_bytes, config.queue_depth, config.aio_backend) == (MiB, 32, "auto")


# ---- the file ----


def test_settings_are_kept_per_drive(tmp_path: Path) -> None:
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


def test_the_home_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_file() == tmp_path / ".config" / "infinity" / "tuned.json"


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "not json",
        "[]",
        '{"version": 99, "drives": {}}',
        '{"version": 1, "drives": []}',
        '{"version": 1}',
        "\x00\xff",
    ],
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(damage: str, tmp_path: Path) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text(damage, encoding="latin-1")
    assert tuned(str(tmp_path)) is None
    remember(str(tmp_path), SOME, {})
    assert tuned(str(tmp_path)) == SOME


@pytest.mark.parametrize(
    "change",
    [
        {"block_bytes": 5000},
        {"block_bytes": "1MiB"},
        {"queue_depth": 0},
        {"queue_depth": True},
        {"threads": 1 << 40},
        {"backend": None},
        {"backend": 7},
    ],
)
def test_a_damaged_entry_counts_as_none(change: dict[str, Any], tmp_path: Path) -> None:
    file = remember(str(tmp_path), SOME, {})
    content = json.loads(file.read_text())
    content["drives"][drive_key(str(tmp_path))].update(change)
    file.write_text(json.dumps(content))
    assert tuned(str(tmp_path)) is None


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(file))
    assert tuned(str(tmp_path)) is None
    with pytest.raises(DirectoryError, match="XDG_CONFIG_HOME"):
        remember(str(tmp_path), SOME, {})


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
