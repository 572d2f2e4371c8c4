"""The file of tuned settings, damaged or out of reach."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.tune import remember
from infinity.core.errors import DirectoryError
from infinity.core.sizes import MiB
from infinity.hardware.aio import open_ring
from infinity.hardware.tuned import TunedSettings, bandwidths, drive_key, settings_file, tuned

from .command_line import need_root, python

pytestmark = pytest.mark.usefixtures("own_environment")


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
    deep = b"[" * 100_000
    damaged: list[bytes] = [
        *(b"", b"{", b"null", b"[]", b"\xff\xfe\x00", os.urandom(4096), bytes(4096)),
        *(deep, b'{"a":' * 100_000, b'{"version": 1, "drives": ' + deep, b"1" * 100_000, b"-1e999"),
        b'{"version": 1, "drives": {}}'.replace(b"{}", b"[]"),
        entry()[:-20],
        entry(block_bytes=10**400),
        *(
            entry(**{name: value})
            for name in good
            for value in (None, True, [], {}, -1, 0, 2**80, 1e400, "", "x")
        ),
        *(entry(queue_depth=value) for value in (float("nan"), 16.0, 1 << 20, 5000)),
        *(entry(threads=value) for value in (4000, "4")),
        *(entry(block_bytes=value) for value in (4097, 1 << 31)),
    ]
    for content in damaged:
        file.write_bytes(content)
        found = tuned(place)
        if found is not None:  # a name of a backend may be any text: it is tried, and then as if absent
            assert found.backend in ("", "x")
        else:
            assert bandwidths([place]) is None
        with open_ring("test", place) as ring:
            assert (ring.block_bytes, ring.queue_depth, ring.threads) == (MiB, 32, 4)
    for value in (0, -1, True, "fast", float("nan"), float("inf"), 10**400, 1e-300, None, [1]):
        file.write_bytes(entry(measured={"score_bytes_per_second": value}))
        assert bandwidths([place]) is None
    file.write_bytes(entry(measured=[]))
    assert bandwidths([place]) is None

    nested = entry(measured={"a": "DEEP"}).replace(b'"DEEP"', b"[" * 800 + b"]" * 800)
    for content in (*damaged, nested):  # and a new result replaces all of it
        file.write_bytes(content)
        remember(place, TunedSettings(**good), measured)  # type: ignore[arg-type]
        assert tuned(place) == TunedSettings(**good)  # type: ignore[arg-type]
    file.unlink()
    file.mkdir()
    assert tuned(place) is None
    with pytest.raises(DirectoryError, match="cannot write the settings file"):
        remember(place, TunedSettings(**good), measured)  # type: ignore[arg-type]


@pytest.mark.root
def test_tune_prints_what_it_may_not_keep() -> None:
    need_root()
    # Once as root, so that everything is imported: this Python may be where only root can read.
    as_nobody = (
        "import contextlib, io, os, sys\n"
        "from infinity.cli.main import run\n"
        "drive, ours, theirs = sys.argv[1:]\n"
        "tune = ['tune', drive, '--seconds', '1']\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    run([*tune, '--no-store'])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "os.environ['XDG_CONFIG_HOME'] = theirs\n"
        "print(run([*tune, '--json']), flush=True)\n"
        "print(run(tune), flush=True)\n"
        "os.environ['XDG_CONFIG_HOME'] = ours\n"  # the cure
        "print(run([*tune, '--json']), flush=True)\n"
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chmod(home, 0o755)
        drive, ours, theirs = (os.path.join(home, name) for name in ("drive", "ours", "theirs"))
        for place, mode in ((drive, 0o777), (ours, 0o777), (theirs, 0o755)):
            os.mkdir(place)
            os.chmod(place, mode)
        done = python("-c", as_nobody, drive, ours, theirs)
        assert done.returncode == 0, done
        assert "Traceback" not in done.stderr
        refused, code, *person, kept, last = done.stdout.splitlines()
        result = json.loads(refused)
        assert result["stored"] is None
        assert f'nvme="{drive}"' in result["config"]
        assert (code, last) == ("1", "0")
        shown = "\n".join(person)
        assert "of the best" in shown
        assert f'infinity.Config(nvme="{drive}"' in shown
        assert shown.endswith("\n1")
        assert done.stderr.count("Permission denied") == 2
        assert "to change: set XDG_CONFIG_HOME to a writable directory" in done.stderr
        assert os.listdir(theirs) == []
        assert json.loads(kept)["stored"] == os.path.join(ours, "infinity", "tuned.json")
