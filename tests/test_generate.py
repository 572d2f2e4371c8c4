"""`infinity generate`: it writes what transformers writes, for one prompt or many; and what it says."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.cli.generate import Figures, per_forward, sentence
from infinity.cli.main import run

from .command_line import words

transformers = pytest.importorskip("transformers")
PROMPTS = ["def add(x):", "import os and", "y"]
ENGINE = [*("--device", "cpu", "--dtype", "fp32", "--parameters", "nvme"), *("--device-memory", "400KiB")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: a Llama with a tokenizer of bytes and pairs of them."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
        **{
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(PROMPTS * 20, vocab_size=300)
    transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the command; return its exit code, and what it wrote to stdout and stderr."""
    (tmp_path / "nvme").mkdir()

    def call(directory: Any, *more: str) -> tuple[int, str, str]:
        code = run(["generate", str(directory), *ENGINE, "--nvme", str(tmp_path / "nvme"), *more])
        said = capsys.readouterr()
        assert not [p for p in (tmp_path / "nvme").rglob("*") if p.is_file()]
        return code, said.out, said.err

    return call


def by_transformers(directory: Path, texts: list[str], tokens: int) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in made.tolist()]


def test_one_prompt_is_streamed(directory: Path, generate: Any) -> None:
    code, out, err = generate(directory, "--prompt", PROMPTS[0], "--tokens", "12")
    assert code == 0
    assert out == PROMPTS[0] + by_transformers(directory, PROMPTS[:1], 12)[0] + "\n"
    assert "tokens/s" in err
    assert "Bound by" in err
    assert "GB/s" in err


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_many_prompts_from_a_file(
    kind: str, directory: Path, generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_json = [json.dumps(PROMPTS[0]), *(json.dumps({"prompt": p}) for p in PROMPTS[1:])]
    lines = {"txt": PROMPTS, "jsonl": as_json}
    file = tmp_path / f"prompts.{kind}"
    file.write_text("\n".join(lines[kind]) + "\n\n")
    wanted = by_transformers(directory, PROMPTS[:2], 6) + by_transformers(directory, PROMPTS[2:], 6)
    code, out, _ = generate(directory, "--prompts", str(file), "--tokens", "6", "--batch", "2", "--json")
    assert code == 0
    result = json.loads(out)
    assert [o["text"] for o in result["outputs"]] == wanted
    assert [o["prompt"] for o in result["outputs"]] == PROMPTS
    assert result["tokens"] == 18
    assert result["forwards"] == 10
    assert result["bytes_read_per_forward"] > 0
    assert result["bound"] in ("nvme", "compute", "link")
    if kind == "txt":
        monkeypatch.setattr("infinity.cli.console._PAUSE", math.inf)
        code, out, err = generate(directory, "--prompts", str(file), "--tokens", "6", "--batch", "2")
        assert out == "".join(
            f"[{i + 1}] {p}{t}\n" for i, (p, t) in enumerate(zip(PROMPTS, wanted, strict=True))
        )
        assert "batch" not in err
        assert "reading" not in err
        monkeypatch.setattr("infinity.cli.console._PAUSE", 0.0)
        _, _, err = generate(directory, "--prompts", str(file), "--tokens", "6", "--batch", "2")
        assert "batch 2 of 2" in err


def test_temperature_draws_with_a_seed(directory: Path, generate: Any) -> None:
    def texts(*more: str) -> str:
        code, out, _ = generate(directory, "--prompt", "y", "--tokens", "12", *more)
        assert code == 0
        return str(out)

    hot = ("--temperature", "1.5")
    assert texts(*hot, "--seed", "1") == texts(*hot, "--seed", "1")
    assert len({texts(*hot, "--seed", str(seed)) for seed in range(3)}) == 3


def test_without_a_tokenizer_tokens_are_bytes(directory: Path, generate: Any, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(directory / name, bare / name)
    code, out, _ = generate(bare, "--prompt", "ab", "--tokens", "3", "--json")
    assert code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(bare, dtype=torch.float32)
    made = model.generate(torch.tensor([[97, 98]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    tokens = [token if token < 256 else 0x3F for token in made[0, 2:].tolist()]
    assert json.loads(out)["outputs"][0]["text"] == bytes(tokens).decode("utf-8", "replace")


# -- checkpoints ------------------------------------------------------------------------------


def saved(model: Any, folder: Path, **state: Any) -> str:
    folder.mkdir()
    config = infinity.Config(device="cpu", dtype="fp32", device_memory="8MiB", host_memory="64MiB")
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    path = infinity.save(optimizer, folder, state=state)
    infinity.close(optimizer)
    return path


def test_a_checkpoint_of_a_run(
    generate: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes what transformers writes with the exported model; without a tokenizer tokens are bytes."""
    root = str(tmp_path / "run")
    assert run(["train", *words(text, str(tmp_path / "nvme"), "--steps", "3", "--output", root)]) == 0
    assert run(["export", root, str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    capsys.readouterr()
    code, out, _ = generate(root, "--prompt", "def f", "--tokens", "8", "--json")
    assert code == 0
    made = model.generate(torch.tensor([[*b"def f"]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert json.loads(out)["outputs"][0]["text"] == bytes(made[0, 5:]).decode()


def test_a_checkpoint_of_the_built_in_model_of_earlier_versions(
    generate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no config.json. It is refused by name; what is said to work does."""
    told = {"model": {"preset": "30m", "mlp": "gelu", "init_from": None}, "train": {"steps": 3}}
    saved(torch.nn.Linear(4, 4), tmp_path / "run", train={"run": told, "losses": torch.zeros(3)})
    said = [refused(generate, tmp_path / "run", "--prompt", "y")]
    assert run(["train", "--resume", "--output", str(tmp_path / "run"), "--steps", "9"]) == 2
    said.append(capsys.readouterr().err)
    for text in said:
        assert "has the built-in GPT of an earlier version" in text
        assert "the version of infinity that made it" in text
        assert "`infinity export`" in text
    assert run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_model_that_has_diverged(directory: Path, generate: Any, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    saved(model, tmp_path / "run")
    for temperature in ("0", "1"):
        arguments = ("--prompt", "y", "--tokens", "2", "--temperature", temperature)
        assert "are not finite numbers" in refused(generate, tmp_path / "run", *arguments)


def test_a_checkpoint_of_a_model_of_transformers(directory: Path, generate: Any, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    saved(model, tmp_path / "run")
    code, out, _ = generate(tmp_path / "run", "--prompt", "ab", "--tokens", "4", "--json")
    assert code == 0
    assert json.loads(out)["outputs"][0]["tokens"] == 4


# -- refusals ---------------------------------------------------------------------------------


def refused(generate: Any, *arguments: Any) -> str:
    code, _, err = generate(*arguments)
    assert code == 2
    assert "Traceback" not in err
    return str(err)


def test_what_cannot_be_done_says_what_to_write(directory: Path, generate: Any, tmp_path: Path) -> None:
    assert "--prompt TEXT" in refused(generate, directory)
    assert "is no text" in refused(generate, directory, "--prompt", "\udcff")
    assert "has no tokens" in refused(generate, directory, "--prompt", "")
    assert "--tokens 63" in refused(generate, directory, "--prompt", "y", "--tokens", "64")
    assert "check --prompts" in refused(generate, directory, "--prompts", str(tmp_path / "none.txt"))
    (tmp_path / "numbers.jsonl").write_text("1\n2\n")
    assert "prompt" in refused(generate, directory, "--prompts", str(tmp_path / "numbers.jsonl"))
    assert "there is no model" in refused(generate, tmp_path, "--prompt", "y")
    small = refused(generate, directory, "--prompt", "y", "--device-memory", "4KiB")
    assert "--device-memory" in small

    def other(name: str, **changes: Any) -> Path:
        shutil.copytree(directory, tmp_path / name)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return tmp_path / name

    assert "does not write text" in refused(
        generate, other("headless", architectures=["LlamaModel"]), "--prompt", "y"
    )
    broken = other("broken")
    (broken / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused(generate, broken, "--prompt", "y")
    saved(torch.nn.Linear(4, 4), tmp_path / "run")
    assert "does not say what its model is" in refused(generate, tmp_path / "run", "--prompt", "y")


def test_what_bounds_it() -> None:
    def moment(time: float, stalls: float, nbytes: int, reading: float) -> Any:
        return Figures(time, {"nvme": stalls, "h2d": 0.0, "update": 0.0, "reduce": 0.0}, nbytes, reading)

    pieces = [(moment(0, 0, 0, 0), moment(2, 1.5, 2 * 10**9, 1.8))]
    found = per_forward(pieces)
    assert found["bound"] == "nvme"
    assert found["seconds_needed"] == {"nvme": 1.8, "link": 0.0, "compute": 0.5}
    said = sentence(3, 6.0, found)
    assert "0.5 tokens/s. Bound by NVMe reads: 1.8 of the 2 s of a forward" in said
    assert "1.11 GB/s" in said
    assert per_forward([])["bound"] is None
    assert per_forward([(moment(0, 0, 0, 0), moment(2, 0, 0, 0))])["bound"] == "compute"


@pytest.mark.processes
def test_threads_of_torch_sleep_while_they_wait() -> None:
    """What OpenMP is told is told before torch is loaded."""
    code = """
import os, sys
from infinity.__main__ import main
assert "torch" not in sys.modules
sys.argv = ["infinity", "generate", "nowhere", "--prompt", "a"]
try:
    main()
except SystemExit:
    assert "torch" in sys.modules
    print(os.environ["OMP_WAIT_POLICY"])
"""
    command = [sys.executable, "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    for given, expected in [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]:
        done = subprocess.run(
            command, env={**environment, **given}, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.stdout.splitlines()[-1:] == [expected], done.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", str(1 << 64)), ("--temperature", "nan"), ("--temperature", "inf")]
)
def test_what_cannot_be_drawn_with_is_refused(
    option: str, value: str, directory: Path, generate: Any
) -> None:
    code, _, err = generate(directory, "--prompt", "a", option, value)
    assert code == 2
    assert option in err
