"""Signals and the clock in an offloaded trainer and in Lightning, beside those of test_contracts.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import infinity

from . import adapters
from .adapters import EPOCH, STEPS
from .test_contracts import ADAPTERS, as_before, check, saved, undisturbed  # noqa: F401

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread", "as_before")]
EACH = pytest.mark.parametrize("name", ["trainer", "lightning"])


def test_a_signal_in_the_last_step_ends_nothing(tmp_path: Path) -> None:
    """Trainer would make one step too many if it went on from its last one."""
    with pytest.warns(RuntimeWarning, match="SIGTERM came in the last step"):
        found = adapters.trainer(tmp_path / "out", acts={STEPS - 1: "SIGTERM"})
    check(found, undisturbed("trainer"))


def test_lightning_has_nothing_left_to_train(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        adapters.lightning(tmp_path / "out", acts={STEPS - 1: "SIGTERM"})
    assert ended.value.code == 75
    check(adapters.lightning(tmp_path / "out"), undisturbed("lightning"), STEPS)


def test_lightning_leaves_out_no_batch_behind_the_end_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        adapters.lightning(tmp_path / "out", acts={EPOCH - 1: "SIGTERM"})
    assert ended.value.code == 75
    check(adapters.lightning(tmp_path / "out"), undisturbed("lightning"), EPOCH)


@EACH
def test_a_training_that_raised_leaves_the_next_one_its_signals(name: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        ADAPTERS[name](tmp_path / "raised", acts={3: "KeyError"})
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(SystemExit) as ended:
        ADAPTERS[name](tmp_path / "out", acts={3: "SIGTERM"})
    assert ended.value.code == 75


@EACH
def test_the_clock_saves(name: str, tmp_path: Path) -> None:
    with pytest.raises(infinity.InfinityError, match="save_minutes=True is not valid"):
        ADAPTERS[name](tmp_path / "refused", save_minutes=True)
    found = ADAPTERS[name](tmp_path / "out", 3, save_minutes=0)
    assert list(found.losses) == [0, 1, 2]
    assert saved(tmp_path / "out") == ([1, 2, 3] if name == "trainer" else [3])
    paths = {path.name for path in (tmp_path / "out").iterdir()}
    assert paths == ({f"checkpoint-{n}" for n in (1, 2, 3)} if name == "trainer" else {"stopped.ckpt"})
