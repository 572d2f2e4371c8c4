"""`infinity train`, from text to a sample, with its state on the tiers that were asked for."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity
from infinity.cli.data import ByteStream, Corpus, TokenStream, find_files, open_stream
from infinity.cli.main import run
from infinity.cli.output import read_run
from infinity.cli.settings import MOMENTS
from infinity.cli.train import train
from infinity.core.errors import BudgetError, ConfigError, DataError, DirectoryError
from infinity.optim.rules import rule_of

from . import inner
from .command_line import give_tokenizer, mounted, python, started, wait_for_line
from .quick import quick

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(2000))


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(4):
        part = TEXT[i * len(TEXT) // 4 : (i + 1) * len(TEXT) // 4]
        (folder / f"{i}.py").write_text(part)
    return str(folder)


@pytest.fixture
def nvme(tmp_path: Path) -> str:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return str(folder)


def settings(text: str, nvme: str, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "layers": 2,
        "width": 64,
        "heads": 2,
        "data_path": text,
        "batch": 4,
        "sequence": 32,
        "steps": 12,
        "lr": 3e-3,
        "sample_tokens": 5,
        "device": "cpu",
        "dtype": "fp32",
        "nvme": (nvme,),
        "parameters": "nvme",
        "optimizer_state": "nvme",
        "gradients": "nvme",
        "chunk_elements": 65536,
        "host_memory": "8MiB",
        "device_memory": "4MiB",
        "max_grad_norm": 1.0,
        **changes,
    }
    return {k: v for k, v in given.items() if v is not None}


def options(given: dict[str, Any]) -> list[str]:
    words = []
    for name, value in given.items():
        flag = "--data" if name == "data_path" else "--" + name.replace("_", "-")
        for one in value if isinstance(value, tuple) else (value,):
            words += [flag] if one is True else [flag, str(one)]
    return words


# -- data -----------------------------------------------------------------------------------


def test_a_stream_is_the_files_one_after_the_other(text: str) -> None:
    stream = ByteStream(find_files(text))
    whole = b"".join(p.read_bytes() for p in stream.files)
    assert stream.length == len(whole) == len(TEXT)
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = int(rng.integers(0, stream.length - 20_000))
        count = int(rng.integers(1, 20_000))
        assert stream.read(start, count).tobytes() == whole[start : start + count]


def test_batches_are_a_function_of_seed_and_step(text: str) -> None:
    stream = open_stream(text)
    corpus, same, other = (Corpus(stream, 32, seed=s) for s in (1, 1, 2))
    tokens, targets = corpus.batch(8, 5)
    assert tokens.shape == targets.shape == (8, 32)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    same.batch(8, 4)
    assert torch.equal(same.batch(8, 5)[0], tokens)
    assert not torch.equal(other.batch(8, 5)[0], tokens)
    assert not torch.equal(corpus.batch(8, 6)[0], tokens)
    assert not torch.equal(corpus.batch(8, 5, 1)[0], tokens)


def test_validation_is_never_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "bytes.txt"
    file.write_bytes(bytes([65] * 9000 + [66] * 1000))
    corpus = Corpus(open_stream(file), 16, validation=0.1)
    assert all(set(corpus.batch(32, s)[1].unique().tolist()) == {65} for s in range(20))
    assert set(corpus.batch(32, 0, part="validation")[0].unique().tolist()) == {66}


def test_the_default_text_is_the_standard_library() -> None:
    files = find_files(None)
    assert len(files) > 300
    assert {p.suffix for p in files} == {".py"}
    assert not any("site-packages" in str(p) for p in files)
    assert any(p.name == "argparse.py" for p in files)


def test_globs_and_binary_files(text: str, tmp_path: Path) -> None:
    Path(text, "image.bin").write_bytes(b"\x00\x01\x02")
    Path(text, "empty.py").write_bytes(b"")
    Path(text, ".hidden").write_text("no")
    assert len(find_files(text)) == 4
    assert len(find_files(text + "/[01].py")) == 2
    assert len(find_files(str(tmp_path) + "/**/*.py")) == 4


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "there is no data"),
        (b"", "there is no text|too short"),
        (b"abc", "too short"),
        (b"a\0b", "not text"),
    ],
)
def test_data_that_cannot_be_used(content: bytes | None, word: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=word) as caught:
        Corpus(open_stream(path), 32)
    assert caught.value.cure


def test_data_that_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero", "/dev/null"):
        with pytest.raises(DataError, match="there is no data") as caught:
            find_files(name)
        assert caught.value.found == "not a regular file"


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no text"):
        find_files(tmp_path)


def test_a_file_that_shrinks(text: str) -> None:
    stream = ByteStream(find_files(text))
    os.truncate(stream.files[0], 10)
    with pytest.raises(DataError, match="changed"):
        stream.read(0, 100)


def test_tokens_are_those_of_the_tokenizer(text: str) -> None:
    files = find_files(text)
    stream = TokenStream(files, lambda s: [ord(c) + 1000 for c in s], 70_000, separator=7)
    expected = [t for p in files for t in [*(ord(c) + 1000 for c in p.read_text()), 7]]
    assert stream.length == len(expected)
    assert stream.read(0, stream.length).tolist() == expected


def assert_on_disk(row: dict[str, Any]) -> None:
    """The file system's own blocks (indirect extents) count to a file too."""
    assert 0 <= row["measured"] - row["planned"] <= 64 * 1024


# -- training -------------------------------------------------------------------------------


def test_a_run_from_text_to_sample(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "steps.jsonl"
    code = run(["train", *options(settings(text, nvme, json_log=str(log), steps=25))])
    out = capsys.readouterr().out
    assert code == 0
    assert "The loss fell from" in out
    assert " (means of 2 steps)" in out
    assert "at most" in out
    assert "def " in out
    assert "step 25/25" in out
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(1, 26))
    for step in steps:
        assert step["nvme_read"] > 0
        assert step["nvme_written"] > 0
        assert step["memory"]["host"] <= 8 << 20
        assert step["memory"]["device"] <= 4 << 20
        assert step["grad_norm"] > 0
        assert step["tokens_per_second"] > 0
    assert steps[-1]["loss"] < steps[0]["loss"] - 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"optimizer": "lion", "lr": 1e-3, "optimizer_state_dtype": "bf16"}, marks=pytest.mark.integration
        ),
        pytest.param(
            {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": ("*embed*", "*norm*")},
            marks=pytest.mark.integration,
        ),
        pytest.param({"optimizer": "muon"}, marks=pytest.mark.integration),
        pytest.param(  # a matrix has several chunks, and an update visits each twice
            {"optimizer": "muon", "width": 272, "host_memory": "64MiB", "device_memory": "32MiB"},
            marks=pytest.mark.integration,
        ),
    ],
    ids=str,
)
def test_planned_bytes_are_the_measured_ones(changes: dict[str, Any], text: str, nvme: str) -> None:
    result = train(read_run(None, settings(text, nvme, recompute=True, **changes)))
    rows = {r["what"]: r for r in result["planned_and_measured"]}
    assert rows["nvme: written per step"]["measured"] == rows["nvme: written per step"]["planned"]
    assert_on_disk(rows["nvme"])
    for most in ("nvme: read per step", "host: leases", "device: units in use and ahead"):
        assert rows[most]["at_most"]
        assert 0 < rows[most]["measured"] <= rows[most]["planned"], most
    assert result["loss_fell"]
    assert result["steps"] == 12
    assert len(result["sample"]) >= len("def ")
    assert json.loads(json.dumps(result)) == result


def test_inputs_of_recomputed_blocks_on_the_host(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"layers": 6, "batch": 8, "sequence": 64, "host_memory": "32MiB", "recompute": True}
    nbytes = 64 * 8 * 64 * 4  # one block's input
    losses = []
    for where in ("device", "host"):
        log = tmp_path / f"{where}.jsonl"
        given = settings(text, nvme, **size, steps=3, sample_tokens=0, activations=where)
        result = train(read_run(None, {**given, "json_log": str(log)}))
        losses.append([json.loads(line)["loss"] for line in log.read_text().splitlines()])
    assert losses[0] == losses[1]
    rows = {r["what"]: r for r in result["planned_and_measured"]}
    assert 6 * nbytes == rows["host: activations"]["measured"] < rows["host: activations"]["planned"]
    capsys.readouterr()
    plans = []
    for where, most in (("device", 1 << 30), ("host", 1 << 30), ("host", 4 * nbytes)):
        inner.config(activation_memory=most)
        given = settings(text, nvme, **size, activations=where)
        del given["sample_tokens"]
        assert run(["plan", "--json", *options(given)]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    here, there, less = (p["activations"]["peak"] for p in plans)
    assert here - there == (6 - 3) * nbytes
    assert here - less == (4 - 3) * nbytes
    assert plans[0]["activations"]["inputs"] == 6 * nbytes
    assert run(["plan", *options(given)]) == 0
    assert "stays on the device" in capsys.readouterr().out


def test_placement_and_accumulation_change_no_loss(text: str, nvme: str, tmp_path: Path) -> None:
    logs = []
    everywhere = {"parameters": "host", "optimizer_state": "host:0.5,nvme:0.5", "gradients": "device"}
    for index, changes in enumerate(({}, everywhere)):
        log = tmp_path / f"{index}.jsonl"
        given = settings(text, nvme, steps=4, accumulation=2, sample_tokens=0, **changes)
        train(
            read_run(None, {**given, "json_log": str(log), "device_memory": "32MiB", "host_memory": "32MiB"})
        )
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        logs.append([(s["loss"], s["grad_norm"], s["lr"]) for s in lines])
    assert logs[0] == logs[1]


def test_an_update_behind_the_backward_changes_no_loss(text: str, nvme: str, tmp_path: Path) -> None:
    """`--accumulation` says how many backwards a step has."""
    logs = []
    for update in ("sync", "backward"):
        log = tmp_path / f"{update}.jsonl"
        given = settings(
            text, nvme, steps=3, accumulation=2, sample_tokens=0, max_grad_norm=None, update=update
        )
        train(read_run(None, {**given, "json_log": str(log)}))
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        logs.append([(s["loss"], s["grad_norm"], s["lr"]) for s in lines])
    assert logs[0] == logs[1]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)),
    "lion": lambda groups: infinity.optim.Lion(groups, lr=3e-3, betas=(0.9, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=3e-3, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=3e-3),
    "muon": lambda groups: infinity.optim.Muon(
        {**group, "lr": 3e-3}
        | ({"adjust_lr_fn": "match_rms_adamw"} if group["use_muon"] else {"betas": (0.9, 0.95)})
        for group in groups
    ),
}


@pytest.mark.parametrize("name", quick(OPTIMIZERS, ["adamw"]))
def test_the_loop_is_torchs(name: str, text: str, nvme: str, tmp_path: Path) -> None:
    """The same model, batches and schedule in a plain torch loop give the same losses."""
    log = tmp_path / "steps.jsonl"
    told: Any = {"optimizer": name, "steps": 6, "sample_tokens": 0, "json_log": str(log)}
    run_ = read_run(None, settings(text, nvme, **told))
    train(run_)
    ours = [json.loads(line)["loss"] for line in log.read_text().splitlines()]

    from infinity.cli.workload import param_groups, workload_of

    workload = workload_of(run_)
    torch.manual_seed(run_.train.seed)
    model = workload.build(recompute=False)
    optimizer = OPTIMIZERS[name](param_groups(model, 0.1, muon=name == "muon"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, run_.train.lr_factor)
    corpus = Corpus(open_stream(text), 32, seed=run_.train.seed)
    theirs = []
    for step in range(6):
        loss = workload.loss(model, *corpus.batch(4, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_loss_that_does_not_fall_is_said_so(
    text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *options(settings(text, nvme, steps=2, lr=0.0, sample_tokens=0))]) == 0
    out = capsys.readouterr().out
    assert "did NOT fall" in out or "fell from" in out
    result = train(read_run(None, settings(text, nvme, steps=1, sample_tokens=0)))
    assert result["loss_fell"] is False


@pytest.mark.parametrize(
    "more", [{"lr": 1e30}, {"lr": 1e4, "dtype": "fp16", "schedule": "constant"}, {"lr": 1.0, "min_lr": 1e308}]
)
def test_a_run_that_diverges_is_reported(
    more: dict[str, Any], text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(text, nvme, steps=6, warmup=0, max_grad_norm=math.inf, **more)
    assert run(["train", "--json", *options(given)]) == 0
    shown = capsys.readouterr()

    def strange(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    result = json.loads(shown.out, parse_constant=strange)
    assert result["steps"] == 6
    assert result["last_loss"] is None
    assert result["sample"] == "def  [no more: the model's outputs are not finite numbers]"
    assert "Bytes" in shown.err


def test_json_is_all_that_stdout_gets(text: str, nvme: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = os.path.join(nvme, "t.json")
    given = settings(text, nvme, steps=2, sample_tokens=0, trace=trace)
    assert run(["train", "--json", *options(given)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["steps"] == 2
    assert "step 2/2" in shown.err


def test_a_run_that_cannot_fit_builds_nothing(text: str, nvme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: Any) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr("infinity.cli.train._build", built)
    with pytest.raises(BudgetError) as caught:
        train(read_run(None, settings(text, nvme, host_memory="100KB")))
    assert "--host-memory" in str(caught.value)
    with pytest.raises(ConfigError, match="sequence"):
        train(read_run(None, settings(text, nvme, sequence=64, context=32)))
    assert list(Path(nvme).iterdir()) == []


def test_what_is_promised_at_most_is_kept_and_the_rest_is_remarked(
    text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In half precision torch's kernels generate code on a CPU: MiB that no plan of bytes knows of."""
    given = settings(text, nvme, dtype="bf16", steps=20)
    done = _command("train", "--json", *options(given))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["planned_and_measured"]
    assert all(row["measured"] <= row["planned"] for row in rows if row["at_most"])
    process = rows[0]
    assert process["what"].startswith("process: ")
    assert not process["at_most"]
    assert ("more than planned" in done.stderr) is (process["measured"] > process["planned"])


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `infinity`; stdout and stderr apart."""
    return python("-m", "infinity", *words, timeout=120)


@pytest.mark.root
def test_a_trace_without_room_costs_nothing_that_was_trained(text: str, nvme: str, tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=8k", "none") as small:
        trace = Path(small, "t.json")
        words = options(settings(text, nvme, steps=3, trace=str(trace)))
        done = _command("train", "--json", *words)
        assert done.returncode == 1, done.stderr
        result = json.loads(done.stdout)
        assert (result["steps"], result["validation_loss"] > 0) == (3, True)
        assert "on text not trained on" in done.stderr
        assert "measured" in done.stderr
        told = done.stderr.index(f"error: the trace {str(trace)!r} cannot be written")
        assert "No space left" in done.stderr[told:]
        assert told > done.stderr.index("measured")
        assert result["incomplete"][0]["found"] == "No space left on device"
        assert "Traceback" not in done.stderr
        assert os.listdir(small) == []
        # The cure: another file.
        words[words.index("--trace") + 1] = str(tmp_path / "t.json")
        assert run(["train", *words]) == 0


@pytest.mark.root
@pytest.mark.parametrize("as_json", quick([False, True], [True]))
def test_a_log_without_room_does_not_end_the_run(as_json: bool, text: str, nvme: str) -> None:
    with mounted("-t", "tmpfs", "-o", "size=8k", "none") as small:
        log = Path(small, "log.jsonl")
        words = options(settings(text, nvme, steps=60, sample_tokens=0, json_log=str(log)))
        done = _command("train", *["--json"] * as_json, *words)
        assert done.returncode == 1, done.stderr
        shown = done.stderr if as_json else done.stdout
        assert "step 60/60" in shown
        assert "The loss " in shown
        assert done.stderr.count("warning: the log") == 1
        assert f"warning: the log {str(log)!r} cannot be written (No space left on device)" in done.stderr
        content = log.read_bytes()
        assert content.endswith(b"}\n")
        steps = [json.loads(line)["step"] for line in content.splitlines()]
        assert steps == list(range(1, len(steps) + 1))
        assert 1 < len(steps) < 60
        last = done.stderr[done.stderr.index("error: the log") :]
        assert "is not complete" in last
        assert f"after {len(steps)} steps" in last
        if as_json:
            result = json.loads(done.stdout)
            assert result["steps"] == 60
            assert [e["type"] for e in result["incomplete"]] == ["DataError"]


def test_a_log_on_a_device_without_room_does_not_end_the_run(
    text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(text, nvme, steps=2, sample_tokens=0, json_log="/dev/full")
    assert run(["train", *options(given)]) == 1
    shown = capsys.readouterr()
    assert "step 2/2" in shown.out
    assert "the log '/dev/full' cannot be written" in shown.err
    assert "after 0 steps" in shown.err
    assert "--json-log" in shown.err


@pytest.mark.root
def test_a_log_on_a_file_system_that_is_read_only(
    text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted("-t", "tmpfs", "-o", "ro", "none") as place:
        given = settings(text, nvme, steps=2, json_log=f"{place}/log.jsonl")
        assert run(["train", *options(given)]) == 2
    assert "found: a file system that is mounted read-only" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["json_log", "trace"])
def test_a_link_stays_one_and_its_target_is_written(
    option: str, text: str, nvme: str, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "file.json", tmp_path / "link.json"
    given = settings(text, nvme, steps=2, sample_tokens=0)
    assert run(["train", *options({**given, option: str(target)})]) == 0
    before = target.read_text()
    link.symlink_to("far/file.json")
    words = options({**given, option: str(link), "steps": 3})
    assert run(["train", *words]) == 2, "it is that of an earlier run, behind a link too"
    assert run(["train", *words, "--overwrite"]) == 0
    assert os.readlink(link) == "far/file.json"
    assert not target.is_symlink()
    assert target.read_text() != before
    assert os.listdir(target.parent) == ["file.json"]


@pytest.mark.parametrize("option", ["json_log", "trace"])
def test_a_link_to_nothing_is_found_before_anything_is_built(
    option: str,
    text: str,
    nvme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flag = "--" + option.replace("_", "-")
    link = tmp_path / "link.json"
    words = options(settings(text, nvme, steps=2, sample_tokens=0, **{option: str(link)}))

    def built(*_: Any) -> None:
        raise AssertionError("the model was built")

    for target, what in (("gone/t.json", "does not exist"), ("link.json", "symbolic links")):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with monkeypatch.context() as patch:
            patch.setattr("infinity.cli.train._build", built)
            assert run(["train", *words]) == 2
        shown = capsys.readouterr().err
        assert all(word in shown for word in (flag, what, repr(str(link)))), shown
    link.unlink()  # the cure
    assert run(["train", *words]) == 0


def _refused(given: dict[str, Any], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert run(["train", *options(given)]) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("cannot be written", *words)), shown


@pytest.mark.parametrize("option", ["json_log", "trace"])
def test_no_file_of_the_user_is_overwritten(
    option: str, text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--" + option.replace("_", "-")
    notes = tmp_path / "notes.json"
    notes.write_text('{"step": "my own"}')
    for mine, why in ((Path(text, "0.py"), "reads"), (notes, "did not write")):
        before = mine.read_bytes()
        for overwrite in (None, True):
            given = settings(text, nvme, **{option: str(mine)}, overwrite=overwrite)
            _refused(given, capsys, flag, why, mine.name)
            assert mine.read_bytes() == before
    missing = tmp_path / "missing" / "t.json"
    _refused(settings(text, nvme, **{option: str(missing)}), capsys, flag, "no such directory")


def test_a_run_that_is_refused_writes_nothing(text: str, nvme: str, tmp_path: Path) -> None:
    log, trace = tmp_path / "log.json", tmp_path / "t.json"
    outputs = {"json_log": str(log), "trace": str(trace)}
    for more in ({"host_memory": "100KB"}, {"nvme": (nvme, str(tmp_path / "missing"))}):
        with pytest.raises((BudgetError, DirectoryError)):
            train(read_run(None, {**settings(text, nvme, **outputs), **more}))
        assert not log.exists()
        assert not trace.exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        train(read_run(None, settings(text, nvme, json_log=str(log), trace=str(log))))


def test_overwrite_replaces_what_an_earlier_run_wrote(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, trace = tmp_path / "log.json", tmp_path / "t.json"
    log.touch()  # nothing is lost
    given = settings(text, nvme, steps=2, sample_tokens=0, json_log=str(log), trace=str(trace))
    assert run(["train", *options(given)]) == 0
    capsys.readouterr()
    old = log.read_text(), trace.read_text()
    _refused(given, capsys, "--json-log", "--overwrite")
    assert (log.read_text(), trace.read_text()) == old
    assert run(["train", *options({**given, "steps": 3}), "--overwrite"]) == 0
    assert len(log.read_text().splitlines()) == 3
    assert trace.read_text() != old[1]


def test_an_interrupt_ends_a_run_cleanly(text: str, nvme: str) -> None:
    words = options(settings(text, nvme, steps=100_000))
    with started("-m", "infinity", "train", *words) as child:
        wait_for_line(child, "step 3/", 90)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130, err
    assert "interrupted after" in out
    assert "Traceback" not in err


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype: str, text: str, nvme: str, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    given = settings(text, nvme, dtype=dtype, steps=25, sample_tokens=0, json_log=str(log))
    result = train(read_run(None, given))
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    kept = [s for s in steps if not s["skipped"]]
    assert kept[-1]["loss"] < kept[0]["loss"] - 0.5
    assert (steps[-1]["loss_scale"] == 1.0) is (dtype == "bf16")
    rows = {r["what"]: r for r in result["planned_and_measured"]}
    assert_on_disk(rows["nvme"])


@pytest.mark.parametrize("tokenized", [False, True])
def test_a_directory_that_is_missing(
    tokenized: bool, text: str, nvme: str, request: pytest.FixtureRequest
) -> None:
    changes: dict[str, Any] = {}
    if tokenized:
        gpt2 = request.getfixturevalue("gpt2")
        give_tokenizer(gpt2, TEXT)
        changes = {"init_from": str(gpt2), "layers": None, "width": None, "heads": None}
    with pytest.raises(DirectoryError) as caught:
        train(read_run(None, settings(text, nvme + "/not/here", **changes)))
    assert "mkdir -p" in str(caught.value)


def test_a_terminal_gets_a_bar(
    text: str, nvme: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run(["train", *options(settings(text, nvme, steps=3))]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out
    assert "3/3" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert "grad norm" in out
    assert "step 1/3" not in out


# -- Hugging Face ---------------------------------------------------------------------------


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=300, bos_token_id=0, eos_token_id=0
    )
    path = tmp_path / "gpt2"
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_fine_tuning_a_hugging_face_model(with_tokenizer: bool, gpt2: Path, text: str, nvme: str) -> None:
    if with_tokenizer:
        give_tokenizer(gpt2, TEXT)
    given = settings(
        text, nvme, init_from=str(gpt2), layers=None, width=None, heads=None, steps=15, recompute=True
    )
    run_ = read_run(None, given)
    result = train(run_)
    rows = {r["what"]: r for r in result["planned_and_measured"]}
    assert_on_disk(rows["nvme"])
    assert result["loss_fell"]
    assert result["sample"].startswith("def")


@pytest.mark.parametrize("of_preset", [False, True])
def test_how_a_run_that_would_change_begins_anew(
    of_preset: bool, gpt2: Path, text: str, nvme: str, tmp_path: Path
) -> None:
    """The cure is followed."""
    directory = {"init_from": str(gpt2), "layers": None, "width": None, "heads": None}
    model: dict[str, Any] = {} if of_preset else directory
    given = {**settings(text, nvme, **model), "steps": 1, "sample_tokens": 0}
    result = train(read_run(None, {**given, "output": str(tmp_path / "one")}))
    change: dict[str, Any] = {"layers": 1} if of_preset else {"batch": 2}
    with pytest.raises(ConfigError, match="cannot change its") as caught:
        read_run(None, {"resume": True, "output": str(tmp_path / "one"), "steps": 2, **change})
    assert "begin a new run with --init-from" in str(caught.value.cure)
    assert run(["export", result["checkpoint"], str(tmp_path / "out")]) == 0
    again = settings(text, nvme, **{**directory, "init_from": str(tmp_path / "out")}, batch=2)
    assert train(read_run(None, {**again, "steps": 1, "sample_tokens": 0}))["steps"] == 1


def test_weights_are_read_and_not_drawn(gpt2: Path, text: str, nvme: str) -> None:
    from transformers import GPT2LMHeadModel

    from infinity.cli.workload import workload_of

    given = settings(text, nvme, init_from=str(gpt2), layers=None, width=None, heads=None)
    loaded = workload_of(read_run(None, given)).build(recompute=False)
    original = GPT2LMHeadModel.from_pretrained(gpt2)
    for (name, ours), theirs in zip(loaded.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("remove", ["config.json", "model.safetensors"])
def test_a_model_directory_that_is_not_whole(remove: str, gpt2: Path, text: str, nvme: str) -> None:
    (gpt2 / remove).unlink()
    if remove == "model.safetensors":  # a pickle is not read in its place
        torch.save({}, gpt2 / "pytorch_model.bin")
    given = settings(text, nvme, init_from=str(gpt2), layers=None, width=None, heads=None)
    with pytest.raises(DataError) as caught:
        train(read_run(None, given))
    assert caught.value.cure


def test_a_model_that_is_no_causal_language_model(
    gpt2: Path, text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import T5Config

    T5Config(num_layers=1, d_model=32, num_heads=2, architectures=["T5Model"]).save_pretrained(
        tmp_path / "t5"
    )
    odd = json.loads((gpt2 / "config.json").read_text()) | {"n_head": 3}
    (gpt2 / "config.json").write_text(json.dumps(odd))
    for path, what, found in (
        (tmp_path / "t5", "is no causal language model", "T5Model"),
        (gpt2, "cannot be read", "ValueError"),
    ):
        arguments = ["--data", text, "--nvme", nvme, "--init-from", str(path), "--sequence", "16"]
        for verb in ("plan", "train"):
            assert run([verb, *arguments, "--device", "cpu", "--json"]) == 2
            error = json.loads(capsys.readouterr().out)["error"]
            assert what in error["what"]
            assert found in error["found"]
            assert error["type"] == "DataError"
            assert error["cure"]


def test_a_sample_is_no_longer_than_the_context(gpt2: Path, text: str, nvme: str) -> None:
    given = settings(text, nvme, init_from=str(gpt2), layers=None, width=None, heads=None, steps=1)
    prompt = "x" * 100
    result = train(read_run(None, {**given, "sample_tokens": 40, "prompt": prompt}))
    assert result["sample"].startswith(prompt)
    assert len(result["sample"]) > len(prompt)


def test_a_seed_is_that_of_every_generator(text: str, nvme: str) -> None:
    """A model that draws from Python's or numpy's, as for SpecAugment, is trained the same way again."""
    drawn, states = [], (random.getstate(), np.random.get_state())
    try:
        for before in (1, 2):
            random.seed(before)
            np.random.seed(before)
            train(read_run(None, settings(text, nvme, steps=1, seed=(1 << 64) - 1)))
            drawn.append((random.random(), np.random.random()))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_knows_what_each_optimizer_keeps(name: Any) -> None:
    """It imports no torch, so it has a table of its own."""
    param = torch.nn.Parameter(torch.zeros(2))
    made = OPTIMIZERS[name]([{"params": [param], "use_muon": False} if name == "muon" else param])
    assert tuple(MOMENTS[name]) == rule_of(made).moments
    assert OPTIMIZERS.keys() == MOMENTS.keys()


def test_a_file_that_the_drive_does_not_give_is_no_matter_of_permissions(tmp_path: Path) -> None:
    link = tmp_path / "text.py"
    link.symlink_to("/proc/self/mem")  # its first byte is an EIO
    with pytest.raises(DataError, match="cannot be read") as caught:
        find_files(str(link))
    assert caught.value.cure == "leave it out of the text"
