"""`infinity.Run`: what ends a loop of a user's own, and what it says of that. test_contracts.py has the
signals, the resumes and the full disk that all ways to train have in common."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import ConfigError, DirectoryError, StateDictError
from infinity.storage.checkpoints import find, list_checkpoints
from infinity.storage.folder import Claim

from . import adapters
from .adapters import Ended
from .command_line import ROOT, python, started, wait_for_line
from .offloaded import wrap_adamw
from .saved import assert_same, tensors
from .test_ecosystem import tokenizer as words_of_it

NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
Act = Callable[[int], object]


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Whoever runs these tests may have been told to ignore these signals."""
    before = [signal.signal(number, signal.SIG_DFL) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def optimizer() -> Iterator[torch.optim.Optimizer]:
    global _model
    torch.manual_seed(0)
    _model = nn.Linear(4, 4)
    _model, optimizer = wrap_adamw(_model, infinity.Config(device="cpu", dtype="fp32"))
    yield optimizer
    infinity.close(optimizer)


_model: nn.Module


def step_of(optimizer: Any) -> None:
    _model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def nothing(step: int) -> None:
    pass


def at(step: int, *names: str) -> Act:
    """Return what sends signals to this process in a step."""
    return lambda now: [signal.raise_signal(getattr(signal, name)) for name in names if now == step]


def code_of(run: infinity.Run, optimizer: Any, act: Act = nothing, total: int = 9, every: int = 1) -> object:
    """Make steps until something ends the process; return its exit code."""
    try:
        with run:
            for step in run.steps(total):
                _model(torch.ones(2, 4) * (step + 1)).sum().backward()
                if (step + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                act(step)
    except SystemExit as error:
        return error.code
    return 0


def steps_in(folder: object) -> list[int]:
    return [found.step for found in list_checkpoints(str(folder))]


# -- signals and the clock ------------------------------------------------------------------------


class Sends:
    """A part of the state whose load takes so long that a signal comes."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("moment", ["in the load", "before the first step"])
def test_a_signal_before_the_first_step_saves_that_step(
    moment: str, optimizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel's own handling would kill the process as the block begins."""
    state: dict[str, Any] = {"sends": Sends()} if moment == "in the load" else {}
    assert code_of(infinity.Run(optimizer, tmp_path, state=state), optimizer, total=3) == 0

    def train() -> None:
        with infinity.Run(optimizer, tmp_path, state=state) as run:
            if moment != "in the load":
                signal.raise_signal(signal.SIGTERM)
            for _ in run.steps(9):
                step_of(optimizer)

    with pytest.raises(SystemExit) as ended:
        train()
    assert (ended.value.code, find(str(tmp_path)).step) == (75, 4)
    assert capsys.readouterr().err == "SIGTERM: ended after 4 of 9 steps\n"


def test_a_signal_in_a_block_without_steps_is_not_lost(
    optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr("infinity.api.wanted.os.kill", lambda _, number: sent.append(number))
    with infinity.Run(optimizer, tmp_path):
        signal.raise_signal(signal.SIGTERM)
    assert sent == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_clock_saves(optimizer: Any, tmp_path: Path) -> None:
    for name, minutes in (("soon", 0.0), ("late", 60)):
        code_of(infinity.Run(optimizer, tmp_path / name, save_minutes=minutes), optimizer, total=3)
    assert (len(steps_in(tmp_path / "soon")), len(steps_in(tmp_path / "late"))) == (3, 1)


def test_a_second_signal_says_what_is_lost(
    optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes by two ways, from the service manager and from torchrun, say, is one signal."""
    infinity.save(optimizer, tmp_path / "begin")
    run = infinity.Run(optimizer, tmp_path / "one", save_every=5)
    assert code_of(run, optimizer, at(6, *["SIGTERM"] * 3)) == 75
    assert capsys.readouterr().err == "SIGTERM: ended after 7 of 9 steps\n"
    assert (run.step, run.kept, run.stopped, steps_in(tmp_path / "one")) == (7, 7, True, [5, 7])
    monkeypatch.setattr("infinity.core.signals.TOGETHER", -1.0)
    infinity.load(optimizer, tmp_path / "begin")
    run = infinity.Run(optimizer, tmp_path / "two", save_every=5)
    assert code_of(run, optimizer, at(6, "SIGTERM", "SIGTERM")) == 143
    assert (run.step, run.kept, run.stopped) == (6, 5, False)
    assert (
        f"2 of the 7 steps are lost. The newest whole checkpoint is {tmp_path}/two/step-5, after 5 steps; "
        f"`infinity.Run(optimizer, '{tmp_path}/two')` goes on from it.\n"
    ) in capsys.readouterr().err
    assert not list(tmp_path.rglob(".run.lock"))


def test_a_save_waits_for_the_step_that_gradients_are_for(
    optimizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint has no gradients. Bodies of the loop are counted, and the optimizer makes half as many
    steps."""
    infinity.save(optimizer, tmp_path / "begin")
    code_of(infinity.Run(optimizer, tmp_path / "whole"), optimizer, total=12, every=2)
    infinity.load(optimizer, tmp_path / "begin")
    run = infinity.Run(optimizer, tmp_path / "run", save_every=3)
    assert code_of(run, optimizer, at(6, "SIGTERM"), 12, every=2) == 75
    assert capsys.readouterr().err == "SIGTERM: ended after 8 of 12 steps\n"
    assert steps_in(tmp_path / "run") == [2, 3, 4], "bodies 4, 6 and 8"

    def fails(step: int) -> None:
        if step == 9:
            raise KeyError("mine")

    with pytest.raises(KeyError):
        code_of(infinity.Run(optimizer, tmp_path / "run"), optimizer, fails, 12, every=2)
    said = capsys.readouterr().err
    assert f"2 of the 10 steps are lost. The newest whole checkpoint is {tmp_path}/run/step-4, " in said
    assert "after 8 steps of the loop, 4 of the optimizer; " in said
    optimizer.zero_grad()  # which the step that raised has left
    run = infinity.Run(optimizer, tmp_path / "run")
    code_of(run, optimizer, total=12, every=2)
    assert run.begin == 8
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_an_error_in_a_step_saves_nothing_of_it(
    optimizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(step: int) -> None:
        if step == 6:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        code_of(infinity.Run(optimizer, tmp_path / "run", save_every=5), optimizer, fails)
    assert "2 of the 7 steps are lost. The newest whole checkpoint is" in capsys.readouterr().err
    assert steps_in(tmp_path / "run") == [5]
    assert not list((tmp_path / "run").glob(".run.lock"))
    with pytest.raises(KeyError, match="mine"):
        code_of(infinity.Run(optimizer, tmp_path / "none"), optimizer, fails)
    assert "7 of the 7 steps are lost. There is no checkpoint." in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "none"), "what it has made goes with it"


#: A signal comes to each rank while they agree for the `{nth}`th time on the end of a step.
LATE = """
import os, signal
from infinity.api import wanted
from tests.adapters import main
agree, calls = wanted.agree, []
def late(*arguments):
    told = agree(*arguments)
    calls.append(1)
    if len(calls) == {nth}:
        os.kill(os.getpid(), signal.SIGTERM)
    return told
wanted.agree = late
main()
"""


@pytest.mark.first
@pytest.mark.parametrize(
    ("total", "nth", "code", "steps"), [(9, 4, 75, 5), (4, 4, 75, 4), (4, 5, -signal.SIGTERM, 4)]
)
def test_a_signal_that_comes_while_ranks_agree_is_not_lost(
    total: int, nth: int, code: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step ends the run; when the last one is over, it does what it does without a run."""
    monkeypatch.setattr(adapters, "_MAIN", LATE.format(nth=nth))
    with pytest.raises(Ended) as ended:
        adapters.ranks(tmp_path / "run", total)
    assert ended.value.code == code
    assert ended.value.said == (f"SIGTERM: ended after {steps} of {total} steps\n" if steps < total else "")
    assert find(str(tmp_path / "run")).step == steps


# -- directories ----------------------------------------------------------------------------------


def test_what_another_run_has_claimed(optimizer: Any, tmp_path: Path) -> None:
    """What a killed run had is free at once; and what a claim has made goes with it, unless there is
    something in it."""
    root = str(tmp_path / "above" / "out")
    code = (
        "import sys, time; from infinity.storage.folder import Claim\n"
        "with Claim(sys.argv[1]): print('ready', flush=True); time.sleep(100)"
    )
    with started("-c", code, root) as child:
        wait_for_line(child, "ready")
        with pytest.raises(DirectoryError, match=f"another run into {root} is under way"):
            infinity.Run(optimizer, root).__enter__()
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert os.listdir(root), "its file has stayed"
    assert list_checkpoints(root) == []
    with infinity.Run(optimizer, root), pytest.raises(DirectoryError, match="is under way") as caught:
        infinity.Run(optimizer, root).__enter__()
    assert "a run of this one" in str(caught.value.found)
    assert os.listdir(root) == [], "the directory was there before"
    os.removedirs(root)
    with Claim(root):
        assert os.path.isdir(root)
    assert not os.path.exists(tmp_path / "above")


def test_a_directory_that_another_run_has_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with Claim(str(tmp_path / "out")), pytest.raises(Ended) as ended:
        adapters.ranks(tmp_path / "out")
    assert ended.value.code == 1
    assert "DirectoryError: another run into" in ended.value.said


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    """Its files are in the index, so that text can be made from the checkpoint alone."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = words_of_it()
    model = torch.nn.Linear(4, 4)
    model, adam = wrap_adamw(model, infinity.Config(device="cpu"))
    path = infinity.save(adam, tmp_path / "out", state={"tokenizer": tokenizer, "n": 3})
    assert infinity.load(adam, path, state={"tokenizer": tokenizer, "n": 0}) == {"n": 3}
    infinity.close(adam)
    folder = tmp_path / "again"
    folder.mkdir()
    for name, content in find(path).content["texts"].items():
        (folder / name).write_text(content)
    assert PreTrainedTokenizerFast.from_pretrained(folder)("w0 w1")["input_ids"] == [0, 1]


# -- what a run is ---------------------------------------------------------------------------------


def test_what_a_run_says_of_itself(optimizer: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {"best": 1.5}
    with infinity.Run(optimizer, tmp_path / "run", state=state) as run:
        assert (run.begin, run.step, run.kept, run.saved, run.state) == (0, 0, 0, None, {})
        for step in run.steps(3):
            assert run.step == step
            step_of(optimizer)
            state["best"] = step
            if step == 0:
                run.save()
                assert run.saved is None, "not before the step is over"
            if step == 1:
                assert run.saved == str(tmp_path / "run" / "step-1")
        assert (run.step, run.kept) == (3, 3)
    state["best"] = 9
    with infinity.Run(optimizer, tmp_path / "run", state=state) as again:
        assert (again.begin, again.step, again.kept, again.saved) == (3, 3, 3, run.saved)
        assert again.state == {"best": 2} == state
        assert again.id == run.id
        assert [*again.steps(3)] == []


@pytest.mark.parametrize(("made", "wanted"), [(True, 3), (False, 2)])
def test_a_step_that_is_left_by_break_is_over_if_it_was_made(
    made: bool, wanted: int, optimizer: Any, tmp_path: Path
) -> None:
    with infinity.Run(optimizer, tmp_path) as run:
        for step in run.steps(9):
            if made or step < 2:
                step_of(optimizer)
            if step == 2:
                break
    assert (run.step, run.kept, find(str(tmp_path)).step) == (wanted, wanted, wanted)
    with infinity.Run(optimizer, tmp_path) as run:
        assert run.begin == wanted
        for _ in run.steps(9):
            break
    assert run.step == wanted


@pytest.mark.parametrize(("behind", "wanted"), [(False, [0, 1, 2, 2, 3, 4]), (True, [0, 1, 2, 3, 4])])
def test_a_step_whose_error_is_caught_counts_if_it_was_made(
    behind: bool, wanted: list[int], optimizer: Any, tmp_path: Path
) -> None:
    """Another loop makes it again only if the optimizer has not."""
    seen: list[int] = []
    with infinity.Run(optimizer, tmp_path / "run") as run:
        while run.step < 5:
            try:
                for step in run.steps(5):
                    seen.append(step)
                    if seen == [0, 1, 2] and not behind:
                        raise KeyError("mine")
                    step_of(optimizer)
                    if seen == [0, 1, 2]:
                        raise KeyError("mine")
            except KeyError:
                run.save()
                assert run.saved == str(tmp_path / "run" / f"step-{len(seen) - (not behind)}")
    assert seen == wanted
    assert (run.step, run.kept, find(str(tmp_path / "run")).step) == (5, 5, 5)


def test_parameters_that_became_nan_do_not_cost_the_finite_ones(optimizer: Any, tmp_path: Path) -> None:
    def train(last: int, scale: float) -> None:
        with infinity.Run(optimizer, tmp_path, save_every=1, keep_last=2) as run:
            for _ in run.steps(last):
                (_model(torch.ones(2, 4)).sum() * scale).backward()
                optimizer.step()
                optimizer.zero_grad()

    train(2, 1.0)
    with pytest.warns(RuntimeWarning, match="NaN or infinite: the newest.* is .*/step-2, which stays"):
        train(5, float("nan"))
    assert steps_in(tmp_path) == [2, 4, 5]
    for step in (4, 5):
        os.rename(tmp_path / f"step-{step}", tmp_path / f"nan-{step}")
    train(5, 1.0)
    assert steps_in(tmp_path) == [4, 5]
    assert all(tensor.isfinite().all() for tensor in tensors(tmp_path).values())


def test_a_checkpoint_of_a_loop_without_a_run(optimizer: Any, tmp_path: Path) -> None:
    for _ in range(4):
        step_of(optimizer)
    infinity.save(optimizer, tmp_path)
    with infinity.Run(optimizer, tmp_path) as run:
        assert run.begin == 4
    with pytest.raises(ConfigError, match="another run"):
        infinity.Run(optimizer, tmp_path, resume=False).__enter__()
    with pytest.raises(DirectoryError, match="no checkpoint") as caught:
        infinity.Run(optimizer, tmp_path / "other", resume=True).__enter__()
    assert ".run.lock" not in str(caught.value)
    assert "infinity.save" not in str(caught.value)
    assert "resume=None" in (caught.value.cure or "")
    assert sorted(os.listdir(tmp_path)) == ["step-4"]


def test_a_run_works_inside_of_its_one_block(optimizer: Any, tmp_path: Path) -> None:
    """Elsewhere it would save without having resumed, and without the lock of its directory."""

    def refused(run: infinity.Run, found: str) -> None:
        for call in (lambda: run.steps(3), run.save):
            with pytest.raises(ConfigError, match="works only inside the `with` block") as caught:
                call()
            assert caught.value.found == f"a run whose block {found}"

    run = infinity.Run(optimizer, tmp_path)
    refused(run, "has not begun")
    with run:
        for _ in run.steps(2):
            step_of(optimizer)
        late = run.steps(3)
    refused(run, "has ended")
    with pytest.raises(ConfigError, match="works only inside"):
        next(late)
    with pytest.raises(ConfigError, match="has had it"):
        run.__enter__()
    run = infinity.Run(optimizer, tmp_path / "step-2")
    for _ in range(2):  # a block that has not begun may be tried again
        with pytest.raises(DirectoryError, match="and cannot contain other checkpoints"):
            run.__enter__()


def test_a_damaged_checkpoint_says_how_the_run_goes_on(optimizer: Any, tmp_path: Path) -> None:
    with infinity.Run(optimizer, tmp_path, save_every=1) as run:
        for _ in run.steps(2):
            step_of(optimizer)
    os.truncate(find(str(tmp_path)).file("parameters") or "", 100)
    with pytest.raises(infinity.InfinityError) as caught:
        infinity.Run(optimizer, tmp_path).__enter__()
    cure = caught.value.cure or ""
    assert f"the run resumes from {tmp_path}/step-1, after 1 steps" in cure
    subprocess.run(cure.split("`")[1], shell=True, check=True, timeout=30)
    with infinity.Run(optimizer, tmp_path) as run:
        assert run.begin == 1


def test_what_is_not_valid_is_refused_at_once(optimizer: Any, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        *({"save_every": 0}, {"save_every": 1.5}, {"save_minutes": -1}, {"keep_last": 0}),
        *({"resume": "yes"}, {"resume": 0}, {"resume": 1}, {"resume": torch.tensor(True)}),
    ]
    for more in wrong:
        with pytest.raises(ConfigError, match="is not valid"):
            infinity.Run(optimizer, tmp_path, **more)
    number: Any = 3
    with pytest.raises(ConfigError, match="the path of the checkpoints directory is not a path"):
        infinity.Run(optimizer, number)
    with pytest.raises(StateDictError):
        infinity.Run(optimizer, tmp_path / "run", state={"loader": object()}).__enter__()
    assert not os.path.exists(tmp_path / "run")
    totals: list[Any] = [2.5, -1, True, "9"]
    with infinity.Run(optimizer, tmp_path / "run") as run:
        for total in totals:
            with pytest.raises(ConfigError, match="is not valid"):
                run.steps(total)


def test_handlers_are_put_back_and_those_of_others_stay(optimizer: Any, tmp_path: Path) -> None:
    mine: list[int] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda number, frame: mine.append(number))
    there = [signal.getsignal(number) for number in NUMBERS]

    def looks(step: int) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert [signal.getsignal(number) for number in NUMBERS][1:] == there[1:]
        at(1, "SIGUSR1", "SIGHUP")(step)
        at(3, "SIGTERM")(step)

    run = infinity.Run(optimizer, tmp_path)
    assert code_of(run, optimizer, looks) == 75
    assert (run.step, run.kept, run.stopped) == (4, 4, True)
    assert mine == [signal.SIGUSR1]
    assert [signal.getsignal(number) for number in NUMBERS] == there
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert code_of(infinity.Run(optimizer, tmp_path), optimizer) == 0
    signal.raise_signal(signal.SIGUSR1)  # a scheduler's, which comes late, does not kill what has saved


def test_a_run_that_has_no_handlers(optimizer: Any, tmp_path: Path) -> None:
    """One without checkpoints, and one on another thread."""
    seen = []

    def work(folder: Path | None) -> None:
        with infinity.Run(optimizer, folder) as run:
            for _ in run.steps(2):
                step_of(optimizer)
                seen.append(signal.getsignal(signal.SIGTERM))

    work(None)
    thread = threading.Thread(target=work, args=[tmp_path])
    thread.start()
    thread.join(60)
    assert seen == [signal.SIG_DFL] * 4
    assert steps_in(tmp_path) == [4]


# -- docs/runs.md -----------------------------------------------------------------------------


@pytest.mark.integration
def test_the_script_of_the_documents(tmp_path: Path) -> None:
    """As it stands; a SIGTERM between has it end and go on."""
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([\s\S]*?)```", text)
    before = (
        f"import os, signal\nos.chdir({str(tmp_path)!r})\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    )
    loop = "    for step in run.steps(100):\n"
    assert loop in code
    signalled = code.replace(loop, loop + "        if step == 30: os.kill(os.getpid(), signal.SIGTERM)\n")
    done = python("-c", before + signalled)
    assert (done.returncode, done.stderr) == (75, "SIGTERM: ended after 31 of 100 steps\n")
    done = python("-c", before + code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert steps_in(tmp_path / "runs" / "1") == [50, 100]
