"""What `infinity train` says beside the loss: evaluations, which training does not notice, and its MFU."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.cli.data import Corpus, open_stream
from infinity.cli.flops import most_tokens, peak_flops
from infinity.cli.main import run
from infinity.cli.output import read_run
from infinity.cli.training import Training
from infinity.cli.workload import workload_of

from . import inner
from .command_line import started, wait_for_line, words
from .test_train_checkpoints import assert_equal, losses, result_of

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    path = tmp_path / "held out.txt"
    path.write_text("".join(f"class C{i}:\n    x = {i}\n\n" for i in range(500)))
    return str(path)


def evaluations(log: Path) -> dict[int, float]:
    """Return the losses of evaluations, by step."""
    return {s["step"]: s["eval_loss"] for s in map(json.loads, log.open()) if "eval_loss" in s}


@pytest.mark.first
@pytest.mark.parametrize("update", ["overlap", "delayed", "backward"])
def test_training_does_not_notice_that_it_is_evaluated(
    update: str, text: str, nvme: str, held_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses, and every bit that is saved; nor do the bytes of its steps."""
    inner.config(delay_warmup_steps=1)
    common = words(text, nvme, "--steps", "7", "--update", update)
    more = {"not": [], "every second": ["--eval-data", held_out, "--eval-every", "2", "--eval-batches", "3"]}
    found, logs = {}, {}
    for name, given in more.items():
        logs[name] = tmp_path / f"{name}.jsonl"
        given = [*given, "--output", str(tmp_path / name), "--json-log", str(logs[name])]
        found[name] = result_of(capsys, *common, *given)
    assert losses(logs["not"]) == losses(logs["every second"])
    assert_equal(found["not"]["checkpoint"], found["every second"]["checkpoint"])
    assert list(evaluations(logs["not"])) == [7]
    assert list(evaluations(logs["every second"])) == [2, 4, 6, 7]
    for result in found.values():
        rows = {r["what"]: r for r in result["planned_and_measured"]}
        assert rows["nvme: written per step"]["measured"] == rows["nvme: written per step"]["planned"]
        assert 0 < rows["nvme: read per step"]["measured"] <= rows["nvme: read per step"]["planned"]


def test_an_evaluation_is_the_mean_loss_of_its_batches(
    text: str, nvme: str, held_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    log, out = tmp_path / "log.jsonl", tmp_path / "exported"
    more = ["--steps", "3", "--eval-every", "1", "--eval-data", held_out, "--json-log", str(log)]
    result = result_of(capsys, *words(text, nvme, *more, "--validation", "0"))
    assert run(["export", result["checkpoint"], str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    corpus = Corpus(open_stream(text), 32, validation=0, held_out=open_stream(held_out))
    wanted = 0.0
    with torch.no_grad():
        for index in range(4):
            tokens, targets = corpus.batch(2, index, part="validation")
            logits = model(tokens).logits
            wanted += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() / 4
    assert evaluations(log)[3] == pytest.approx(wanted, rel=1e-5)
    assert result["validation_loss"] == evaluations(log)[3]
    assert len(set(evaluations(log).values())) == 3, "of other parameters each time"


def test_an_evaluation_has_no_dropout_and_takes_no_random_numbers(
    text: str, nvme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model with dropout; nor where a model draws even then."""
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = str(tmp_path / "gpt2")
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=256, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    loss = Training._loss

    def draws(self: Training, *arguments: Any, part: str = "train") -> torch.Tensor:
        if part == "validation":
            torch.rand(3)
        return loss(self, *arguments, part=part)

    monkeypatch.setattr(Training, "_loss", draws)
    made = [*words(text, nvme)[6:], "--init-from", gpt2, "--no-save", "--lr", "0", "--steps", "4"]
    logs = [tmp_path / "never.jsonl", tmp_path / "each.jsonl"]
    for log, more in zip(logs, (["--validation", "0.05"], ["--eval-every", "1"]), strict=True):
        result_of(capsys, *made, *more, "--json-log", str(log))
    assert losses(logs[0]) == losses(logs[1])
    assert len(set(evaluations(logs[1]).values())) == 1, "the parameters are the same, and so are the batches"


def test_a_run_that_goes_on_is_evaluated_at_the_same_steps(
    text: str, nvme: str, held_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = words(text, nvme, "--steps", "40", "--eval-data", held_out, "--eval-every", "7")
    logs = [tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"]
    root = str(tmp_path / "parts")
    result_of(capsys, *common, "--no-save", "--json-log", str(logs[0]))
    with started("-m", "infinity", "train", *common, "--output", root, "--json-log", str(logs[1])) as child:
        wait_for_line(child, "step 9/")
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, (out, err)
    result_of(capsys, "--resume", "--output", root)
    assert evaluations(logs[1]) == evaluations(logs[0])
    assert list(evaluations(logs[0])) == [7, 14, 21, 28, 35, 40]


def test_a_person_sees_every_evaluation(
    text: str, nvme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In lines that few steps have, and above the bar of a terminal."""
    given = words(text, nvme, "--steps", "5", "--no-save", "--eval-every", "2")
    assert run(["train", *given, "--log-every", "100"]) == 0
    lines = re.findall(r"step (\d)/5.*eval loss \d\.\d{4}$", capsys.readouterr().out, flags=re.M)
    assert lines == ["2", "4", "5"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run(["train", *given]) == 0
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert {*re.findall(r"step (\d)/5  loss .*eval loss", out)} == {"2", "4", "5"}


def test_a_held_out_text_that_changes_is_told(
    text: str, nvme: str, held_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "out")
    given = words(text, nvme, "--steps", "1", "--output", root, "--eval-data", held_out)
    assert run(["train", *given]) == 0
    with open(held_out, "a") as file:
        file.write("more")
    capsys.readouterr()
    assert run(["train", "--resume", "--output", root, "--steps", "2"]) == 0
    assert "changed: the held-out text, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "what", "cure"),
    [
        (["--eval-every", "0"], "eval_every", "--eval-every"),
        (["--eval-batches", "0"], "eval_batches", "--eval-batches"),
        (["--eval-every", "2", "--validation", "0"], "there is no text to evaluate on", "--eval-data FILE"),
        (["--eval-data", "/not/here"], "there is no data at", "check --eval-data"),
        (["--eval-data", ""], "the data has no name", "--eval-data"),
        (["--eval-data", "{short}"], "too short for its validation part", "a longer --eval-data"),
        (["--eval-data", "{short}"], "the evaluation text, '{short}', is", "a longer --eval-data"),
        (["--eval-data", "{empty}"], "the evaluation text, '{empty}', is", "a longer --eval-data"),
        (["--eval-data", "{log}", "--json-log", "{log}", "--overwrite"], "--json-log", "name another file"),
        (["--peak-tflops", "0"], "peak_tflops", "--peak-tflops"),
        (["--decay-fraction", "1.5"], "decay_fraction", "--decay-fraction"),
    ],
)
def test_what_cannot_be_used_is_said(
    given: list[str],
    what: str,
    cure: str,
    text: str,
    nvme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {"short": str(tmp_path / "short.txt"), "log": str(tmp_path / "log.jsonl")}
    for path in paths.values():
        Path(path).write_text("too short")
    paths["empty"] = str(tmp_path / "empty.txt")
    Path(paths["empty"]).touch()
    more = [word.format(**paths) for word in given]
    assert run(["train", "--json", *words(text, nvme), *more]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert what.format(**paths) in error["what"]
    assert cure in error["cure"]
    assert error["expected"]
    assert Path(paths["log"]).read_text() == "too short"


# -- model FLOPs utilisation ------------------------------------------------------------------


def test_mfu_is_in_the_log_where_the_peak_is_known(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    given = words(text, nvme, "--steps", "2", "--no-save", "--json-log", str(log), "--overwrite")
    result = result_of(capsys, *given, "--peak-tflops", "0.5")
    flops = 6 * result["parameters"] + 12 * 2 * 64 * 32
    for step in map(json.loads, log.open()):
        assert step["mfu"] == pytest.approx(step["tokens_per_second"] * flops / 0.5e12)
    result_of(capsys, *given)
    assert not any("mfu" in json.loads(line) for line in log.open()), "of a CPU nobody knows it"


def test_mfu_is_palms() -> None:
    """Its training of 540 billion parameters: 238.3 thousand tokens/s on 6144 chips are 46.2 %."""
    most = most_tokens(6144 * 275e12, 540_350_000_000, 118 * 48 * 256, 2048)
    assert 238.3e3 / most == pytest.approx(0.462, abs=0.0005)
    assert math.isnan(most_tokens(1e12, 1, None, 1))
    assert math.isnan(most_tokens(math.nan, 1, 1, 1))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_are_known_by_the_whole_name(
    name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = torch.device("cuda", 0)
    wanted = math.nan if tflops is None else tflops * 1e12
    assert peak_flops(device, "bf16", 2) == pytest.approx(wanted, nan_ok=True)
    assert math.isnan(peak_flops(device, "fp32", 1))
    assert math.isnan(peak_flops(device, "bf16", 3)), "ranks share a device"
    assert math.isnan(peak_flops(torch.device("cpu"), "bf16", 1))


def test_what_a_token_takes_of_other_models(tmp_path: Path) -> None:
    from transformers import LlamaConfig, MixtralConfig

    size: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaConfig(**size, head_dim=32).save_pretrained(tmp_path / "llama")
    LlamaConfig(**size).save_pretrained(tmp_path / "expert")  # a path is no key
    MixtralConfig(**size).save_pretrained(tmp_path / "mixtral")
    found = {}
    for name in ("llama", "expert", "mixtral"):
        found[name] = workload_of(read_run(None, {"init_from": str(tmp_path / name)})).attention
    assert found == {"llama": 3 * 4 * 32, "expert": 3 * 64, "mixtral": None}
