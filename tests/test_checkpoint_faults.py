"""Saves that end halfway: whatever happens, the checkpoint from before is whole, and the next save works."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli.main import run
from infinity.core.errors import CorruptionError, DirectoryError, ParameterError, StorageError
from infinity.storage import checkpoints

from .command_line import started, wait_for_line
from .faults import FaultFS, build, missing_means
from .offloaded import ON_HOST, config_for
from .ranks import run_ranks


def start(folder: Path, **settings: Any) -> tuple[nn.Module, Any]:
    folder.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    return infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(folder, **settings))


def step(model: nn.Module, adam: Any) -> None:
    model(torch.randn(4, 64)).square().mean().backward()
    adam.step()
    adam.zero_grad()


def digest(model: nn.Module, adam: Any) -> str:
    """Of everything that a step depends on."""
    values = [*model.state_dict().values(), torch.get_rng_state()]
    values += [v for s in adam.state_dict()["state"].values() for _, v in sorted(s.items())]
    flat = (v.detach().contiguous().view(-1).view(torch.uint8).numpy() for v in values)
    return hashlib.sha256(b"".join(v.tobytes() for v in flat)).hexdigest()


def digests(folder: Path, steps: int) -> list[str]:
    """What an undisturbed run has come to after each step."""
    model, adam = start(folder, **ON_HOST)
    found = [digest(model, adam)]
    for _ in range(steps):
        step(model, adam)
        found.append(digest(model, adam))
    infinity.close(adam)
    return found


#: A run that goes on from its newest checkpoint, if it has one, saves after every step, and says so.
TRAIN_AND_SAVE = """
import os, sys
from pathlib import Path
for name in ("RANK", "WORLD_SIZE"):  # it is not one of several
    del os.environ[name]
import infinity
from tests.test_checkpoint_faults import start, step
folder, root, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
model, adam = start(folder)
if any(root.glob("step-*/index.json")):
    infinity.load(adam, root)
while adam.steps < steps:
    step(model, adam)
    infinity.save(adam, root, keep_last=2)
    print(adam.steps, flush=True)
infinity.close(adam)
"""


def killed(folder: Path, root: Path, steps: int, seconds: float) -> int:
    """Train in a process that is killed after `seconds`; return the last step that it said was saved."""
    given = str(folder), str(root), str(steps)
    imports = ["torch._dynamo", "infinity.api.save", "infinity.api.load", "tests.test_checkpoint_faults"]
    ((code, said, error),) = run_ranks(1, TRAIN_AND_SAVE, *given, seconds=seconds, imports=imports)
    assert code in (-signal.SIGKILL, 0), error
    return int(said.split()[-1]) if said else 0


@pytest.mark.integration
@pytest.mark.processes
def test_a_run_that_is_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # as the others have
    wanted = digests(tmp_path / "undisturbed", 120)
    moments, saved, most = random.Random(6), 0, 0
    root = tmp_path / "saved"
    for kill in range(6):
        saved = max(saved, killed(tmp_path / f"run{kill % 2}", root, 120, moments.uniform(0.1, 0.8)))
        model, adam = start(tmp_path / "look", **ON_HOST)
        if saved:
            infinity.load(adam, root)
            assert adam.steps >= saved
            saved = adam.steps
            assert digest(model, adam) == wanted[saved]
            most = max(most, saved)
        infinity.close(adam)
        if saved > 100:
            shutil.rmtree(root)
            saved = 0
    assert most > 0
    model, adam = start(tmp_path / "look", **ON_HOST)
    infinity.save(adam, root, keep_last=1)  # clears up what the killed have left
    assert [p.name for p in root.iterdir()] == ["step-0"]
    assert all("incomplete" not in p.name for p in (root / "step-0").iterdir())
    infinity.close(adam)


@pytest.fixture
def faulty(tmp_path: Path) -> Any:
    reason = missing_means()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with FaultFS(build(tmp_path), tmp_path / "fs", capacity=8 << 20) as mount:
        yield mount


@pytest.mark.integration
@pytest.mark.first
@pytest.mark.parametrize(
    ("op", "number"),
    [
        *(("write", errno.ENOSPC), ("create", errno.EIO), ("write", errno.EIO)),
        *(("fsync", errno.EIO), ("truncate", errno.EIO)),
    ],
)
def test_a_save_that_meets_an_error_leaves_the_one_before(
    op: str, number: int, faulty: Any, tmp_path: Path
) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    root = faulty.path / "saved"
    for _ in range(2):
        step(model, adam)
    infinity.save(adam, root)
    known, failures = digest(model, adam), 0
    for nth in range(1, 60):
        step(model, adam)
        before = digest(model, adam)
        faulty.arm(op, "error", nth, value=number)
        error = None
        try:
            infinity.save(adam, root, keep_last=1)
        except StorageError as raised:
            error, failures = raised.errno, failures + 1
        assert error in (None, number)
        passed = error is None
        fired = faulty.get("fired")
        faulty.disarm()
        assert digest(model, adam) == before  # the run goes on as if nothing had been
        if passed:
            known = before
        other, loaded = start(tmp_path / "look", **ON_HOST)
        random_state = torch.get_rng_state()
        infinity.load(loaded, root)
        if passed or digest(other, loaded) != known:
            # An error after the index was in place: the new one is whole, and the save said that it failed.
            assert digest(other, loaded) in (known, before)
            known = digest(other, loaded)
        infinity.close(loaded)
        torch.set_rng_state(random_state)
        if not fired:
            break
    assert failures > 3 or op in ("truncate", "fsync")
    infinity.close(adam)


def test_a_checkpoint_where_nothing_can_be_made_is_loaded(faulty: Any, tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    step(model, adam)
    infinity.save(adam, faulty.path / "saved")
    known = digest(model, adam)
    step(model, adam)
    faulty.arm("create", "error", 1, value=errno.EROFS, for_good=True)
    infinity.load(adam, faulty.path / "saved")
    faulty.disarm()
    assert digest(model, adam) == known
    infinity.close(adam)


class Interrupt(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("call", ["save", "load"])
def test_an_interrupt_leaves_a_whole_checkpoint_and_an_engine_that_says_what_it_is(
    call: str, tmp_path: Path
) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    step(model, adam)
    infinity.save(adam, tmp_path / "saved")
    known = digest(model, adam)

    def ring(number: int, frame: Any) -> None:
        raise Interrupt

    def slow(done: int, total: int) -> None:
        time.sleep(0.02)

    def interrupted() -> None:
        (infinity.save if call == "save" else infinity.load)(adam, tmp_path / "saved", progress=slow)
        time.sleep(1)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for delay in (0.005, 0.02, 0.05):
            step(model, adam)
            here = digest(model, adam)
            signal.setitimer(signal.ITIMER_REAL, delay)
            with pytest.raises(Interrupt):
                interrupted()
            if call == "save":
                assert digest(model, adam) == here
            else:
                with contextlib.suppress(ParameterError):
                    assert digest(model, adam) in (here, known)
            infinity.load(adam, tmp_path / "saved")
            if call == "load" or adam.steps == 1:
                assert digest(model, adam) == known
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    infinity.save(adam, tmp_path / "saved")
    names = [p.name for p in (tmp_path / "saved").rglob("*")]
    assert not [n for n in names if "incomplete" in n]
    infinity.close(adam)


def test_an_old_checkpoint_that_is_damaged_does_not_keep_the_run_from_saving(tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    old = Path(infinity.save(adam, tmp_path / "saved"))
    (old / "index.json").write_text("{}")
    step(model, adam)
    new = infinity.save(adam, tmp_path / "saved", keep_last=1)
    infinity.load(adam, new)
    with pytest.raises(CorruptionError, match="step-0"):  # which of the two is newer nobody knows
        infinity.load(adam, tmp_path / "saved")
    infinity.load(adam, new)
    infinity.close(adam)


def test_an_older_one_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    infinity.save(adam, tmp_path / "saved")
    step(model, adam)
    inner = os.unlink

    def refuse(path: Any, **more: Any) -> None:
        if "step-0" in str(path):
            raise PermissionError(errno.EPERM, "no", str(path))
        inner(path, **more)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.warns(RuntimeWarning, match="step-1 is saved, but an older checkpoint is not removed"):
        saved = infinity.save(adam, tmp_path / "saved", keep_last=1)
    monkeypatch.undo()
    infinity.load(adam, tmp_path / "saved")
    assert (adam.steps, Path(saved).name) == (1, "step-1")
    infinity.close(adam)


#: Loads the newest of a directory into which another process saves, for some seconds; prints how often.
LOAD_BESIDE = """
import sys, time
from pathlib import Path
import infinity
from tests.offloaded import ON_HOST
from tests.test_checkpoint_faults import start

_, adam = start(Path(sys.argv[2]), **ON_HOST)
print("ready", flush=True)
count, until = 0, time.monotonic() + 3
while time.monotonic() < until:
    infinity.load(adam, sys.argv[1])
    count += 1
infinity.close(adam)
print(count)
"""


@pytest.mark.integration
@pytest.mark.processes
def test_loads_beside_a_saver_that_keeps_one(tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    root = tmp_path / "saved"
    infinity.save(adam, root)
    with started("-c", LOAD_BESIDE, str(root), str(tmp_path / "other")) as child:
        wait_for_line(child, "ready")
        until = time.monotonic() + 90
        while child.poll() is None and time.monotonic() < until:
            step(model, adam)
            infinity.save(adam, root, keep_last=1)
        out, err = child.communicate(timeout=30)
    assert int(out) > 3, err
    infinity.close(adam)


def test_what_is_being_edited_is_not_saved(tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run")
    editing = "is editing the parameters of unit .* they cannot be saved or copied now"
    with infinity.gathered(model, write=True), pytest.raises(ParameterError, match=editing):
        infinity.save(adam, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with infinity.gathered(model):
        infinity.save(adam, tmp_path / "saved")
        with pytest.raises(ParameterError, match="`gathered` block"):
            infinity.load(adam, tmp_path / "saved")
    infinity.load(adam, tmp_path / "saved")
    infinity.close(adam)


@pytest.mark.integration
def test_what_was_damaged_is_named_and_stops_the_run(tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    step(model, adam)
    good = infinity.save(adam, tmp_path / "good")
    path = Path(infinity.save(adam, tmp_path / "saved"))
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        at = len(content) - 9
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for damage, left in (("flip", flipped), ("cut", content[:at]), ("gone", b"")):
            file.write_bytes(left)
            if damage == "gone":
                file.unlink()
            with pytest.raises((CorruptionError, DirectoryError)) as caught:
                infinity.load(adam, path)
            assert file.name in str(caught.value) or file.name == "index.json"
            # What was read halfway must not be trained on.
            if isinstance(caught.value, CorruptionError) and damage == "flip" and "exp_avg" in file.name:
                with pytest.raises(ParameterError, match="load a whole checkpoint"):
                    model(torch.zeros(1, 64))
                with pytest.raises(ParameterError, match="load a whole checkpoint"):
                    adam.step()
            infinity.load(adam, good)
            step(model, adam)
            file.write_bytes(content)
    first, second = sorted(path.glob("exp_avg*"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with pytest.raises(CorruptionError, match="is not what was saved"):
        infinity.load(adam, path)
    infinity.load(adam, good)
    infinity.close(adam)


def test_names_that_climb_are_refused(tmp_path: Path) -> None:
    _, adam = start(tmp_path / "run", **ON_HOST)
    path = Path(infinity.save(adam, tmp_path / "saved"))
    index = checkpoints.find(str(path)).content
    for name in ("../../etc/passwd", "/etc/passwd", "x/parameters-01234567.safetensors"):
        index["files"]["parameters"] = name
        inner = checkpoints._dump(index)
        text = b'{"crc32c":"' + checkpoints._crc(inner).encode() + b'","index":' + inner + b"}"
        (path / "index.json").write_bytes(text)
        with pytest.raises(CorruptionError, match="names of files of its own"):
            infinity.load(adam, tmp_path / "saved")
    infinity.close(adam)


def test_a_damaged_index_says_what_was_found(tmp_path: Path) -> None:
    _, adam = start(tmp_path / "run", **ON_HOST)
    index = Path(infinity.save(adam, tmp_path / "saved")) / "index.json"
    whole = index.read_bytes()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: index.write_bytes(b""), "an empty file"),
        (lambda: index.write_bytes(whole[:100]), "100 bytes that are not JSON"),
        (lambda: index.write_text("[1]"), "other JSON: [1]"),
        (lambda: index.write_bytes(b"[" * 1_000_000), ""),
        (lambda: index.write_bytes(whole.replace(b'"format":1', b'"format":7')), ""),  # another CRC
        (lambda: os.mkfifo(index), "a named pipe"),
        (index.mkdir, "a directory"),
    ]
    for make, found in cases:
        index.unlink()
        make()
        with pytest.raises(CorruptionError, match="not a readable index of a checkpoint") as caught:
            infinity.load(adam, tmp_path / "saved")
        assert str(caught.value.found).startswith(found)
    infinity.close(adam)


def test_a_checkpoint_that_has_lost_its_index_is_not_passed_over_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    root = tmp_path / "saved"
    for _ in range(2):
        step(model, adam)
        infinity.save(adam, root)
    (root / "step-2" / "index.json").rename(tmp_path / "index.json")
    with pytest.warns(RuntimeWarning, match=r"step-2 has lost its index.json .*step-1\. To use"):
        infinity.load(adam, root)
    assert adam.steps == 1
    with pytest.warns(RuntimeWarning, match="step-2 has lost its index.json"):
        assert run(["export", str(root), str(tmp_path / "out")]) == 0
    assert f"the checkpoint {root / 'step-1'}, of 1 steps" in capsys.readouterr().out
    shutil.rmtree(root / "step-1")
    with pytest.raises(DirectoryError, match=r"copy index.json of .*step-2 again"):
        infinity.load(adam, root)
    (tmp_path / "index.json").rename(root / "step-2" / "index.json")  # the cure
    infinity.load(adam, root)
    assert adam.steps == 2
    infinity.close(adam)


def test_two_saves_at_once_into_one_directory(tmp_path: Path) -> None:
    _, adam = start(tmp_path / "run", **ON_HOST)
    from infinity.storage.checkpoints import Save

    with Save(str(tmp_path / "saved"), 7):
        with pytest.raises(DirectoryError, match="another save"):
            infinity.save(adam, tmp_path / "saved")
    infinity.save(adam, tmp_path / "saved")
    assert [p.name for p in (tmp_path / "saved").iterdir()] == ["step-0"]
    infinity.close(adam)


def test_foreign_files_stay(tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    root = tmp_path / "saved"
    for name in ("step-1/notes.txt", "step-1/model-00112233.safetensors", "step-3/x", "other/y"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for _ in range(4):
        step(model, adam)
        infinity.save(adam, root, keep_last=1)
    for name in ("step-1/notes.txt", "step-1/model-00112233.safetensors", "step-3/x", "other/y"):
        assert (root / name).read_text() == name
    assert sorted(p.name for p in root.iterdir()) == ["other", "step-1", "step-3", "step-4"]
    infinity.close(adam)
