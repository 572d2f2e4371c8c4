"""The harness of the memory tests sees and stops what it should."""

from __future__ import annotations

import pytest

from .cgroup import run_limited

MiB = 1 << 20
TAKE = "import sys; x = bytearray(int(sys.argv[1])); x[::4096] = b'1' * len(x[::4096]); print('had it')"

pytestmark = [pytest.mark.root, pytest.mark.serial]


def test_within_the_limit() -> None:
    result = run_limited(TAKE, str(60 * MiB), limit=128 * MiB, timeout=30)
    assert (result.rc, result.stdout, result.oom_kills) == (0, "had it\n", 0)
    assert 60 * MiB < result.peak <= 128 * MiB


def test_beyond_the_limit() -> None:
    result = run_limited(TAKE, str(300 * MiB), limit=128 * MiB, timeout=30)
    assert result.rc == -9
    assert result.stdout == ""
    assert result.oom_kills == 1


def test_a_script_that_does_not_end() -> None:
    with pytest.raises(TimeoutError, match="no end after"):
        run_limited("import time; time.sleep(60)", limit=128 * MiB, timeout=1)
