"""`infinity.Run`: what ends a loop of a user's own, and that it goes on from there as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
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

from .command_line import ROOT, mounted, started, wait_for_line
from .offloaded import wrap_adamw
from .ranks import Result, run_ranks
from .saved import assert_same, tensors

#: A user's program: `python -c PROGRAM DIRECTORY TOTAL WIDTH ARGUMENTS`, those of `Run` as JSON, and `act`,
#: which is done at the end of each step; `every`: bodies of the loop that make a step of the optimizer.
PROGRAM = """
import json, os, signal, sys, time
import torch
import infinity

# Whoever runs these tests may have been told to ignore them.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
folder, total, width, more = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
act, every = more.pop("act", ""), more.pop("every", 1)
config = infinity.Config(device="cpu", dtype="fp32", chunk_elements=65536)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
rank = int(os.environ.get("RANK", 0))
with infinity.Run(optimizer, folder, state={"scheduler": scheduler}, **more) as run:
    print("begins", run.begin, flush=True)
    for step in run.steps(total):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        if (step + 1) % every == 0:
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
        exec(act)
        print("made", step + 1, flush=True)
    print("ends", run.step, flush=True)
print("after", flush=True)
infinity.close(optimizer)
"""
LONG = "100000"


def program(folder: object, total: object, *, width: int = 16, **more: Any) -> list[str]:
    return ["-c", PROGRAM, str(folder), str(total), str(width), json.dumps(more)]


def made(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Run to the end; return what was said."""
    with started(*arguments) as child:
        out, err = child.communicate(timeout=100)
    assert child.returncode == code, (out, err)
    return out, err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of twelve steps that nobody has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    out, err = made(*program(folder / "run", 12, save_every=5, keep_last=2))
    assert out.endswith("ends 12\nafter\n")
    assert err == ""
    assert [found.step for found in list_checkpoints(str(folder / "run"))] == [10, 12], "two are kept"
    return folder


@pytest.mark.first
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_saves_the_step_and_the_run_goes_on_bit_for_bit(
    name: str, whole: Path, tmp_path: Path
) -> None:
    act = f"if step == 6: os.kill(os.getpid(), signal.{name})"
    out, err = made(*program(tmp_path / "run", 12, act=act, save_every=5), code=75)
    assert out.endswith("made 7\nends 7\n"), "what follows the block is not reached"
    assert err == f"{name}: ended after 7 of 12 steps\n"
    assert find(str(tmp_path / "run")).step == 7
    out, err = made(*program(tmp_path / "run", 12, save_every=5))
    assert out.startswith("begins 7\nmade 8\n")
    assert_same(tmp_path / "run", whole / "run")


@pytest.mark.parametrize("moment", ["in the load", "before the first step"])
def test_a_signal_before_the_first_step_saves_that_step(moment: str, tmp_path: Path) -> None:
    """The kernel's own handling would kill the process as the block begins."""
    made(*program(tmp_path, 3))
    sends = "os.kill(os.getpid(), signal.SIGTERM)"
    _, text, *more = program(tmp_path, 9)
    if moment == "in the load":
        loads = "load = type(scheduler).load_state_dict\n"
        loads += f"type(scheduler).load_state_dict = lambda *given: ({sends}, load(*given))\n"
        signalled = text.replace("with infinity.Run", f"{loads}with infinity.Run")
    else:
        signalled = text.replace("    for step in run.steps", f"    {sends}\n    for step in run.steps")
    assert signalled != text
    out, err = made("-c", signalled, *more, code=75)
    assert (out, err) == ("begins 3\nmade 4\nends 4\n", "SIGTERM: ended after 4 of 9 steps\n")
    assert find(str(tmp_path)).step == 4


def test_a_signal_in_a_block_without_steps_is_not_lost(tmp_path: Path) -> None:
    _, text, *more = program(tmp_path, 9)
    begins, rest = text.split("    for step in run.steps")
    _, after = rest.split('print("after"')
    signalled = f'{begins}    os.kill(os.getpid(), signal.SIGTERM)\nprint("after"{after}'
    made("-c", signalled, *more, code=-signal.SIGTERM)


def test_a_run_that_was_killed_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    more = {"save_every": 5}
    act = "if step == 8: os.kill(os.getpid(), signal.SIGKILL)"
    made(*program(tmp_path / "run", 12, act=act, **more), code=-signal.SIGKILL)
    out, _ = made(*program(tmp_path / "run", 12, resume=True, **more))
    assert out.startswith("begins 5\n")
    assert_same(tmp_path / "run", whole / "run")


def test_sigusr1_saves_after_the_step(tmp_path: Path) -> None:
    act = "if step == 2: os.kill(os.getpid(), signal.SIGUSR1)"
    act += "\nif step == 3: os.kill(os.getpid(), signal.SIGKILL)"
    made(*program(tmp_path, 12, act=act), code=-signal.SIGKILL)
    assert [found.step for found in list_checkpoints(str(tmp_path))] == [3]


def test_a_late_sigusr1_does_not_kill_what_has_saved(tmp_path: Path) -> None:
    """A scheduler sends it at a time of its own, here as the program closes."""
    late = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGUSR1)\n"
    command = program(tmp_path, 3)
    out, err = made("-c", late + command[1], *command[2:])
    assert (out.splitlines()[-1], err) == ("after", "")
    act = "if step == 1: os.kill(os.getpid(), signal.SIGTERM)"
    command = program(tmp_path, 9, act=act + "\nif step == 4: os.kill(os.getpid(), signal.SIGTERM)")
    made("-c", late + command[1], *command[2:], code=75)


def test_the_clock_saves(tmp_path: Path) -> None:
    act = "if step == 2: time.sleep(1.1)"
    act += "\nif step == 3: os.kill(os.getpid(), signal.SIGKILL)"
    for name, seconds in (("soon", 1), ("late", 3600)):
        command = program(tmp_path / name, 12, act=act, save_minutes=seconds / 60)
        made(*command, code=-signal.SIGKILL)
    assert [found.step for found in list_checkpoints(str(tmp_path / "soon"))][-1:] == [3]
    assert list_checkpoints(str(tmp_path / "late")) == []


@pytest.mark.first
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: int, tmp_path: Path) -> None:
    """Here in a step that takes long."""
    act = (
        "if step == 6:\n    print('now', flush=True)\n    while not run._asked.came: time.sleep(0.01)\n"
        "    print('asked', flush=True)\n    time.sleep(100)"
    )
    with started(*program(tmp_path, LONG, act=act, save_every=5)) as child:
        wait_for_line(child, "now")
        child.send_signal(signal.SIGTERM)
        wait_for_line(child, "asked")
        time.sleep(1.5)  # or it is the first one by another way
        child.send_signal(second)
        out, err = child.communicate(timeout=60)
    assert child.returncode == (143 if second == signal.SIGTERM else -signal.SIGINT), err
    assert (
        f"1 of the 6 steps are lost. The newest whole checkpoint is {tmp_path}/step-5, after 5 steps; "
        f"`infinity.Run(optimizer, '{tmp_path}')` goes on from it.\n"
    ) in err
    assert ("Traceback" in err) == (second == signal.SIGINT), "which Python says of its own"
    assert "ends" not in out
    assert_free(tmp_path)


def test_a_signal_that_comes_by_two_ways_is_one(tmp_path: Path) -> None:
    """From the service manager, say, and from torchrun."""
    act = (
        "if step == 6:\n    for _ in range(3):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.1)"
    )
    _, err = made(*program(tmp_path, 12, act=act, save_every=5), code=75)
    assert err == "SIGTERM: ended after 7 of 12 steps\n"
    assert find(str(tmp_path)).step == 7


def test_a_save_waits_for_the_step_that_gradients_are_for(tmp_path: Path) -> None:
    """A checkpoint has no gradients. Bodies of the loop are counted, and the optimizer makes half as many
    steps."""
    made(*program(tmp_path / "whole", 12, every=2))
    act = "if step == 6: os.kill(os.getpid(), signal.SIGTERM)"
    out, err = made(*program(tmp_path / "run", 12, every=2, act=act, save_every=3), code=75)
    assert out.endswith("made 8\nends 8\n")
    assert err == "SIGTERM: ended after 8 of 12 steps\n"
    assert [found.step for found in list_checkpoints(str(tmp_path / "run"))] == [2, 3, 4], "bodies 4, 6 and 8"
    act = "if step == 9: raise KeyError('mine')"
    _, err = made(*program(tmp_path / "run", 12, every=2, act=act), code=1)
    assert f"1 of the 9 steps are lost. The newest whole checkpoint is {tmp_path}/run/step-4, " in err
    assert "after 8 steps of the loop, 4 of the optimizer; " in err
    out, _ = made(*program(tmp_path / "run", 12, every=2))
    assert out.startswith("begins 8\n")
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_save_that_can_never_have_all_gradients_says_so(tmp_path: Path) -> None:
    """Each body begins what the next one's step uses."""
    act = "model(batch).square().mean().backward()\nif step == 6: os.kill(os.getpid(), signal.SIGTERM)"
    out, err = made(*program(tmp_path / "run", 12, act=act), code=75)
    assert out.endswith("ends 8\n")
    assert "step 8 is saved without the gradients that no `optimizer.step()` has used\n" in err
    assert find(str(tmp_path / "run")).step == 8


def assert_free(folder: Path) -> None:
    assert not list(folder.glob(".run.lock"))


def test_an_error_in_a_step_saves_nothing_of_it(tmp_path: Path) -> None:
    act = "if step == 6: raise KeyError('mine')"
    _, err = made(*program(tmp_path, 12, act=act, save_every=5), code=1)
    assert "1 of the 6 steps are lost. The newest whole checkpoint is" in err
    assert err.endswith("KeyError: 'mine'\n")
    assert find(str(tmp_path)).step == 5
    assert_free(tmp_path)
    _, err = made(*program(tmp_path / "none", 12, act=act), code=1)
    assert "6 of the 6 steps are lost. There is no checkpoint." in err
    assert not os.path.exists(tmp_path / "none"), "what it has made goes with it"


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    act = "time.sleep(0.1)"
    with started(*program(tmp_path, LONG, act=act)) as child:
        wait_for_line(child, "made 1")
        _, err = made(*program(tmp_path, 12), code=1)
        assert f"DirectoryError: another run into {tmp_path} is under way" in err
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    made(*program(tmp_path, 12))


@pytest.mark.root
def test_a_full_disk_at_the_last_save(tmp_path: Path) -> None:
    """The one on the way that fails is told, and ends nothing."""
    with mounted("-t", "tmpfs", "-o", "size=2m", "none") as place:
        fill = "fill = lambda: open(folder + '/theirs', 'wb').write(bytes(1 << 20))\n"
        act = fill + "if step == 6: fill()"
        out, err = made(*program(f"{place}/run", 12, width=256, act=act, save_every=5), code=1)
        assert out.endswith("ends 12\n")
        assert "no checkpoint of step 10: the run goes on\n" in err
        assert err.count("RuntimeWarning: no room for a checkpoint") == 1
        assert "DirectoryError: 7 of the 12 steps are lost: no room for a checkpoint" in err
        assert f"`infinity.Run(optimizer, '{place}/run')` makes the lost steps again" in err
        assert find(f"{place}/run").step == 5
        os.unlink(f"{place}/run/theirs")
        out, _ = made(*program(f"{place}/run", 12, width=256))
        assert out.startswith("begins 5\n")


def test_what_a_killed_run_had_claimed(tmp_path: Path) -> None:
    """It is free at once; and what a claim has made goes with it, unless there is something in it."""
    root = str(tmp_path / "above" / "out")
    code = (
        "import sys, time; from infinity.storage.folder import Claim\n"
        "with Claim(sys.argv[1]): print('ready', flush=True); time.sleep(100)"
    )
    with started("-c", code, root) as child:
        wait_for_line(child, "ready")
        with pytest.raises(DirectoryError, match="another run"):
            Claim(root).__enter__()
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert os.listdir(root), "its file has stayed"
    assert list_checkpoints(root) == []
    with Claim(root):
        pass
    assert os.listdir(root) == [], "the directory was there before"
    os.removedirs(root)
    with Claim(root):
        assert os.path.isdir(root)
    assert not os.path.exists(tmp_path / "above")


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    """Its files are in the index, so that text can be made from the checkpoint alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words_ = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words_.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_, unk_token="[UNK]")
    model = torch.nn.Linear(4, 4)
    model, adam = wrap_adamw(model, infinity.Config(device="cpu"))
    path = infinity.save(adam, tmp_path / "out", state={"tokenizer": tokenizer, "n": 3})
    assert infinity.load(adam, path, state={"tokenizer": tokenizer, "n": 0}) == {"n": 3}
    infinity.close(adam)
    folder = tmp_path / "again"
    folder.mkdir()
    for name, content in find(path).content["texts"].items():
        (folder / name).write_text(content)
    assert PreTrainedTokenizerFast.from_pretrained(folder)("a b")["input_ids"] == [0, 1]


# -- several ranks ----------------------------------------------------------------------------


def ranks_of(*arguments: str) -> list[Result]:
    return run_ranks(2, PROGRAM, *arguments[2:], seconds=100)


@pytest.mark.first
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_counts_for_all(rank: int, tmp_path: Path) -> None:
    act = f"if step == 3 and rank == {rank}: os.kill(os.getpid(), signal.SIGTERM)"
    results = ranks_of(*program(tmp_path / "run", 12, act=act))
    assert [code for code, *_ in results] == [75, 75], results
    assert [err for *_, err in results] == ["SIGTERM: ended after 4 of 12 steps\n", ""]
    assert find(str(tmp_path / "run")).step == 4
    assert ranks_of(*program(tmp_path / "run", 6))[1][1].startswith("begins 4\n")


#: A signal comes to this rank while the ranks agree for the `{nth}`th time on the end of step 3.
LATE = """
if step == 3:
    from infinity.api import wanted
    agree, calls = wanted.agree, []
    def late(*arguments):
        calls.append(1)
        told = agree(*arguments)
        if len(calls) == {nth}:
            os.kill(os.getpid(), signal.SIGTERM)
        return told
    wanted.agree = late
"""


@pytest.mark.first
@pytest.mark.parametrize(
    ("total", "nth", "code", "steps"), [(12, 1, 75, 5), (4, 1, 75, 4), (4, 2, -signal.SIGTERM, 4)]
)
def test_a_signal_that_comes_while_ranks_agree_is_not_lost(
    total: int, nth: int, code: int, steps: int, tmp_path: Path
) -> None:
    """The next step ends the run; when the last one is over, it does what it does without a run."""
    results = ranks_of(*program(tmp_path / "run", total, act=LATE.format(nth=nth)))
    assert [code for code, *_ in results] == [code, code], results
    said = f"SIGTERM: ended after {steps} of {total} steps\n" if steps < total else ""
    assert [err for *_, err in results] == [said, ""]
    assert find(str(tmp_path / "run")).step == steps


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    act = "if step == 3 and rank == 1: raise KeyError('mine')"
    results = ranks_of(*program(tmp_path, 12, act=act, save_every=2))
    assert [code for code, *_ in results] == [1, 1], results
    newest = "steps are lost. The newest whole checkpoint is"
    assert f"{newest} {tmp_path}/step-2, after 2 steps" in results[0][2]
    assert "rank 1 failed: KeyError" in results[0][2]
    assert "KeyError" in results[1][2]
    assert "steps are lost" not in results[1][2]
    assert_free(tmp_path)


def test_a_directory_that_another_run_has_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with started(*program(tmp_path, LONG, act="time.sleep(0.1)")) as child:
        wait_for_line(child, "made 1")
        results = ranks_of(*program(tmp_path, 12))
    assert [code for code, *_ in results] == [1, 1], results
    assert "DirectoryError: another run into" in results[0][2]
    assert "DirectoryError: rank 0: another run into" in results[1][2]


# -- in this process --------------------------------------------------------------------------


@pytest.fixture
def optimizer() -> Iterator[torch.optim.Optimizer]:
    global _model
    _model = nn.Linear(4, 4)
    _model, optimizer = wrap_adamw(_model, infinity.Config(device="cpu", dtype="fp32"))
    yield optimizer
    infinity.close(optimizer)


_model: nn.Module


def step_of(optimizer: torch.optim.Optimizer) -> None:
    _model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_a_run_says_of_itself(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
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


def test_a_step_that_is_left_by_break_is_over_if_it_was_made(
    optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    with infinity.Run(optimizer, tmp_path) as run:
        for step in run.steps(9):
            step_of(optimizer)
            if step == 2:
                break
    assert (run.step, run.kept) == (3, 3)
    with infinity.Run(optimizer, tmp_path) as run:
        assert run.begin == 3
        for _ in run.steps(9):
            break
    assert run.step == 3


def test_a_loop_that_was_left_before_the_step_was_made_loses_nothing(
    optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    with infinity.Run(optimizer, tmp_path) as run:
        for step in run.steps(9):
            if step == 2:
                break
            step_of(optimizer)
    assert (run.step, run.kept, find(str(tmp_path)).step) == (2, 2, 2)


@pytest.mark.parametrize(("behind", "wanted"), [(False, [0, 1, 2, 2, 3, 4]), (True, [0, 1, 2, 3, 4])])
def test_a_step_whose_error_is_caught_counts_if_it_was_made(
    behind: bool, wanted: list[int], optimizer: torch.optim.Optimizer, tmp_path: Path
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


def test_parameters_that_became_nan_do_not_cost_the_finite_ones(
    optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    def train(last: int, scale: float) -> None:
        with infinity.Run(optimizer, tmp_path, save_every=1, keep_last=2) as run:
            for _ in run.steps(last):
                (_model(torch.ones(2, 4)).sum() * scale).backward()
                optimizer.step()
                optimizer.zero_grad()

    train(2, 1.0)
    with pytest.warns(RuntimeWarning, match="NaN or infinite: the newest.* is .*/step-2, which stays"):
        train(5, float("nan"))
    assert [found.step for found in list_checkpoints(str(tmp_path))] == [2, 4, 5]
    for step in (4, 5):
        os.rename(tmp_path / f"step-{step}", tmp_path / f"nan-{step}")
    train(5, 1.0)
    assert [found.step for found in list_checkpoints(str(tmp_path))] == [4, 5]
    assert all(tensor.isfinite().all() for tensor in tensors(tmp_path).values())


def test_a_checkpoint_of_a_loop_without_a_run(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
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
    with pytest.raises(DirectoryError, match="and cannot contain other checkpoints"):
        infinity.Run(optimizer, tmp_path / "step-4").__enter__()
    assert sorted(os.listdir(tmp_path)) == ["step-4"]


def test_a_run_works_inside_of_its_one_block(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
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
        with pytest.raises(ConfigError, match="has had it"), run:
            pass
        late = run.steps(3)
    refused(run, "has ended")
    with pytest.raises(ConfigError, match="works only inside"):
        next(late)
    with pytest.raises(ConfigError, match="has had it"):
        run.__enter__()
    with infinity.Run(optimizer, tmp_path) as run:
        late = run.steps(3)
        assert next(late) == 2
    with pytest.raises(ConfigError, match="works only inside"):
        next(late)
    assert find(str(tmp_path)).step == 2
    run = infinity.Run(optimizer, tmp_path / "step-2")
    for _ in range(2):  # a block that has not begun may be tried again
        with pytest.raises(DirectoryError, match="and cannot contain other checkpoints"):
            run.__enter__()


def test_a_second_run_of_this_process_is_refused(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
    with infinity.Run(optimizer, tmp_path):
        with pytest.raises(DirectoryError, match="is under way"):
            infinity.Run(optimizer, tmp_path).__enter__()
    with infinity.Run(optimizer, tmp_path):
        pass


def test_a_damaged_checkpoint_says_how_the_run_goes_on(
    optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    "more",
    [
        *({"save_every": 0}, {"save_every": 1.5}, {"save_minutes": -1}, {"keep_last": 0}),
        *({"resume": "yes"}, {"resume": 0}, {"resume": 1}, {"resume": torch.tensor(True)}),
    ],
    ids=str,
)
def test_arguments_that_are_not_valid(
    more: dict[str, Any], optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is not valid"):
        infinity.Run(optimizer, tmp_path, **more)


def test_paths_that_are_none(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
    number: Any = 3
    with pytest.raises(ConfigError, match="the path of the checkpoints directory is not a path"):
        infinity.Run(optimizer, number)


@pytest.mark.parametrize("total", [2.5, -1, True, "9"])
def test_a_number_of_steps_that_is_not_valid(
    total: Any, optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    with infinity.Run(optimizer, tmp_path / "run") as run, pytest.raises(ConfigError, match="is not valid"):
        run.steps(total)


def test_what_cannot_be_saved_is_refused_at_once(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
    with pytest.raises(StateDictError):
        infinity.Run(optimizer, tmp_path / "run", state={"loader": object()}).__enter__()
    assert not os.path.exists(tmp_path / "run")


def code_of(
    run: infinity.Run, optimizer: torch.optim.Optimizer, act: Callable[[int], None]
) -> tuple[object, infinity.Run]:
    """Make steps until something ends the process; return its exit code."""
    try:
        with run:
            for step in run.steps(9):
                step_of(optimizer)
                act(step)
    except SystemExit as error:
        return error.code, run
    return 0, run


def test_handlers_are_put_back_and_those_of_others_stay(
    optimizer: torch.optim.Optimizer, tmp_path: Path
) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    mine: list[int] = []
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda number, frame: mine.append(number))
        there = [signal.getsignal(number) for number in numbers]

        def looks(step: int) -> None:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            assert [signal.getsignal(number) for number in numbers][1:] == there[1:]
            if step == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGHUP)
            if step == 3:
                signal.raise_signal(signal.SIGTERM)

        def twice(step: int) -> None:
            if step == 5:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(1.5)  # or it is the first one by another way
                signal.raise_signal(signal.SIGTERM)

        code, run = code_of(infinity.Run(optimizer, tmp_path), optimizer, looks)
        assert code == 75
        assert (run.step, run.kept, run.stopped) == (4, 4, True)
        assert mine == [signal.SIGUSR1]
        assert [signal.getsignal(number) for number in numbers] == there
        code, run = code_of(infinity.Run(optimizer, tmp_path), optimizer, twice)
        assert code == 143
        assert (run.step, run.kept, run.stopped) == (5, 4, False)
        assert [signal.getsignal(number) for number in numbers] == there
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_run_on_another_thread_has_no_handlers(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with infinity.Run(optimizer, tmp_path) as run:
            for _ in run.steps(2):
                step_of(optimizer)
                seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == [before, before]
    assert find(str(tmp_path)).step == 2


def test_a_run_without_checkpoints(optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with infinity.Run(optimizer, None) as run:
        for _ in run.steps(2):
            assert signal.getsignal(signal.SIGTERM) == before
            step_of(optimizer)
    assert run.step == 2
    assert not os.listdir(tmp_path)


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
    _, err = made("-c", before + signalled, code=75)
    assert err == "SIGTERM: ended after 31 of 100 steps\n"
    assert made("-c", before + code) == ("", "")
    assert [found.step for found in list_checkpoints(str(tmp_path / "runs" / "1"))] == [50, 100]
