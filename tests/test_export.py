"""What is exported is what other programs read: transformers, and safetensors itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.api.module_state import state_of
from infinity.cli.main import run
from infinity.core.errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    DataError,
    DirectoryError,
    ParameterError,
    StateDictError,
    WrapError,
)
from infinity.storage import checkpoints

from .architectures import ARCHITECTURES
from .models import GPT, huggingface
from .offloaded import ON_HOST, config_for


def wrap(model: nn.Module, folder: Path, **settings: Any) -> tuple[Any, Any]:
    folder.mkdir(exist_ok=True, parents=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    return infinity.wrap(model, torch.optim.AdamW(trained, lr=1e-2), config_for(folder, **settings))


def tensors_in(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors in the files of a directory, which are those that its index names, if it has one."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors = safetensors.torch.load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    index = Path(folder, "model.safetensors.index.json")
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"].keys() == found.keys()
        assert set(content["weight_map"].values()) == {p.name for p in Path(folder).glob("*.safetensors")}
        assert content["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["GPT-2", "Qwen3-MoE", "T5"])
def test_transformers_reads_it_with_the_same_outputs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = ARCHITECTURES[name].build(), ARCHITECTURES[name].feed()
    kind = type(model)
    model, adam = wrap(model, tmp_path / "run", device_memory="64MiB")
    loss = getattr(model(**batch), "loss", None)
    if loss is not None:
        loss.backward()
        adam.step()
        adam.zero_grad()
    model.eval()
    before = model.config.to_dict()
    infinity.export(model, tmp_path / "live", max_shard_size="20KB")
    assert len(list((tmp_path / "live").glob("model-*.safetensors"))) > 1
    infinity.save(adam, tmp_path / "saved")
    infinity.export(tmp_path / "saved", tmp_path / "of checkpoint")
    with torch.no_grad():
        wanted = model(**batch)
    infinity.close(adam)
    assert model.config.to_dict() == before  # what says how it was exported is in the files alone
    # Each once, however many names it has.
    assert len(tensors_in(tmp_path / "live")) == len({id(t) for t in state_of(model).values()})
    for folder in ("live", "of checkpoint"):
        read, said = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(said.values()), said  # nothing missing, unexpected or made anew
        assert read.dtype is torch.float32
        assert read.config.architectures == [kind.__name__]
        with torch.no_grad():
            found = read.eval()(**batch)
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[key], value), (folder, key)


def test_names_that_the_program_ties_or_unties_are_read_as_they_were(tmp_path: Path) -> None:
    """The configuration says of two names whether they are tied, and so does what is exported: of the module,
    and of its checkpoint, by `infinity export`, too. So does a checkpoint that is used."""
    ids = torch.arange(24).view(2, 12)

    def logits_of(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits

    for kind, tied in (("llama", True), ("gpt2", False)):
        torch.manual_seed(0)
        model = huggingface(kind, tied=not tied)
        embedding = model.get_input_embeddings().weight
        model.lm_head.weight = embedding if tied else nn.Parameter(torch.randn_like(embedding))
        assert model.config.tie_word_embeddings is not tied
        here = tmp_path / kind
        model, adam = wrap(model, here)
        wanted = logits_of(model)
        infinity.export(model, here / "live")
        infinity.save(adam, here / "saved")
        assert run(["export", str(here / "saved"), str(here / "by command")]) == 0
        infinity.close(adam)
        for folder in ("live", "by command"):
            assert json.loads((here / folder / "config.json").read_text())["tie_word_embeddings"] is False
            assert {"lm_head.weight"} < tensors_in(here / folder).keys()
            read, said = type(model).from_pretrained(here / folder, output_loading_info=True)
            assert not any(said.values()), said
            assert torch.equal(logits_of(read), wanted), (kind, folder)
        used = infinity.inference(here / "saved", config_for(here))
        assert torch.equal(logits_of(used), wanted)
        infinity.close(used)


def test_a_checkpoint_of_an_untied_model_is_not_read_into_a_tied_one(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    untied, adam = wrap(huggingface("llama", tied=False), tmp_path)
    infinity.save(adam, tmp_path / "saved")
    wanted = {n: v.clone() for n, v in untied.state_dict().items()}
    infinity.close(adam)
    with pytest.raises(DataError, match=r"ties 'model\.embed_tokens\.weight', 'lm_head\.weight'") as caught:
        infinity.inference(huggingface("llama", tied=True), config, weights=tmp_path / "saved")
    assert "tie_word_embeddings=False" in str(caught.value.cure)
    used = infinity.inference(huggingface("llama", tied=False), config, weights=tmp_path / "saved")
    assert_equal(used.state_dict(), wanted)
    infinity.close(used)


class Net(nn.Module):
    """Tied, with persistent buffers and others, a frozen layer, and BatchNorm, which stays fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.arange(4, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(self.tokens(x))))


def train(model: nn.Module, adam: Any, steps: int = 2) -> None:
    for _ in range(steps):
        adam.scale(model(torch.arange(32)).float().square().mean()).backward()
        adam.step()
        adam.zero_grad()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    model, adam = wrap(Net(), tmp_path / "run", dtype="bf16")
    train(model, adam)
    yield model, adam
    infinity.close(adam)


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageReader"), reason="this torch has no such reader")
def test_the_reader_that_fsdp2_uses_reads_it(net: tuple[nn.Module, Any], tmp_path: Path) -> None:
    path = infinity.export(net[0], tmp_path / "out", "fp32", "9KB")
    state = {name: torch.full_like(value, 7) for name, value in tensors_in(path).items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))
    assert_equal(state, tensors_in(path))


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The masters, and what has none in fp32."""
    engine, found = engine_of(model), {}
    for name, param in model.named_parameters():
        state = (
            engine.states.read([engine.params[param]])[engine.params[param]] if param.requires_grad else {}
        )
        found[name] = state.get("master", model.state_dict()[name].float())
    return found


@pytest.mark.integration
def test_a_module_of_any_kind_in_any_dtype(net: tuple[nn.Module, Any], tmp_path: Path) -> None:
    model, adam = net
    state = {n: v.clone() for n, v in model.state_dict().items()}
    buffers = {n: state[n] for n in state if n not in dict(model.named_parameters(remove_duplicate=False))}
    exact = masters(model)
    assert not torch.equal(exact["tokens.weight"], state["tokens.weight"].float())
    once = {n: v for n, v in state.items() if n != "head.weight"}
    infinity.save(adam, tmp_path / "saved")

    infinity.export(model, tmp_path / "compute")
    assert_equal(tensors_in(tmp_path / "compute"), once)
    assert once["norm.weight"].dtype is torch.float32
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        wanted = {n: v.to(dtype) for n, v in exact.items()} | buffers
        for source in (model, tmp_path / "saved"):
            infinity.export(source, tmp_path / f"{name} {source is model}", name, "9KB")
            assert_equal(tensors_in(tmp_path / f"{name} {source is model}"), wanted)
    infinity.export(tmp_path / "saved", tmp_path / "as saved")
    kept = exact | buffers | {n: state[n] for n in state if n.startswith("frozen")}
    assert_equal(tensors_in(tmp_path / "as saved"), kept)

    read = Net()
    for folder in ("compute", "fp32 True", "as saved"):
        files = list((tmp_path / folder).glob("*.safetensors"))
        if len(files) == 1:
            safetensors.torch.load_model(read, files[0])  # which knows tied parameters
            with safetensors.safe_open(files[0], "pt") as file:
                assert file.metadata() == {"format": "pt", "head.weight": "tokens.weight"}
        for file in files:
            read.load_state_dict(safetensors.torch.load_file(file), strict=False)
    assert torch.equal(read.head.weight, exact["tokens.weight"])

    # A part of it, one that is plain, and a compiled one.
    infinity.export(model.norm, tmp_path / "part")
    assert_equal(tensors_in(tmp_path / "part"), {n[5:]: v for n, v in once.items() if n.startswith("norm.")})
    infinity.export(read, tmp_path / "plain")
    assert_equal(
        tensors_in(tmp_path / "plain"), {n: v for n, v in read.state_dict().items() if n != "head.weight"}
    )
    read.frozen = torch.compile(read.frozen)  # type: ignore[assignment]
    infinity.export(torch.compile(read), tmp_path / "compiled")  # type: ignore[arg-type]
    assert_equal(tensors_in(tmp_path / "compiled"), tensors_in(tmp_path / "plain"))
    train(model, adam, 1)


def test_delayed_updates_give_the_newest_values(tmp_path: Path) -> None:
    settings = {**ON_HOST, "parameters": "device", "update": "delayed", "delay_warmup_steps": 0}
    model, adam = wrap(Net(), tmp_path / "run", dtype="bf16", **settings)
    train(model, adam, 3)
    infinity.export(model, tmp_path / "bf16")
    infinity.export(model, tmp_path / "fp32", "fp32")
    newest = {n: v.clone() for n, v in model.state_dict().items() if n != "head.weight"}
    assert_equal(tensors_in(tmp_path / "bf16"), newest)
    found = tensors_in(tmp_path / "fp32")
    assert torch.equal(found["tokens.weight"], masters(model)["tokens.weight"])
    train(model, adam, 1)
    infinity.close(adam)


def test_the_config_names_the_dtype_that_was_written(tmp_path: Path) -> None:
    import transformers

    model = ARCHITECTURES["GPT-2"].build()
    model, adam = wrap(model, tmp_path / "run", dtype="bf16")
    infinity.save(adam, tmp_path / "saved")
    for source, dtype, wanted in (
        (model, None, torch.bfloat16),
        (model, "fp16", torch.float16),
        (tmp_path / "saved", None, torch.float32),
        (tmp_path / "saved", "bf16", torch.bfloat16),
    ):
        path = infinity.export(source, tmp_path / f"{source is model} {dtype}", dtype)
        assert {t.dtype for t in tensors_in(path).values()} == {wanted}
        assert transformers.AutoModelForCausalLM.from_pretrained(path).dtype is wanted
    infinity.close(adam)
    # What was loaded in bf16 says so, and its checkpoint, too.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "False bf16")
    model, adam = wrap(model, tmp_path / "again")
    infinity.save(adam, tmp_path / "saved again")
    path = infinity.export(tmp_path / "saved again", tmp_path / "third")
    assert {t.dtype for t in tensors_in(path).values()} == {torch.bfloat16}
    infinity.close(adam)


def test_a_tokenizer_goes_with_it(tmp_path: Path) -> None:
    import transformers

    from .test_ecosystem import tokenizer

    words = tokenizer()
    infinity.export(ARCHITECTURES["GPT-2"].build(), tmp_path / "out", tokenizer=words)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read("w1 w2")["input_ids"] == words("w1 w2")["input_ids"]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 96


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(
    net: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    model, adam = net
    saved = infinity.save(adam, tmp_path / "saved")
    out = tmp_path / "a" / "b"
    double = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex128))])
    refused: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
        (model, ConfigError, "merge_adapters", {"merge_adapters": True}),
        (saved, ConfigError, "merge_adapters", {"merge_adapters": True}),
        (model, ConfigError, "tokenizer", {"tokenizer": "gpt2"}),
        (model, ConfigError, "dtype", {"dtype": "int8"}),
        (model, ConfigError, "max_shard_size", {"max_shard_size": "many"}),
        ([model], WrapError, "takes a model", {}),
        (tmp_path / "nothing", DirectoryError, "no checkpoint", {}),
        (nn.Linear(3, 3, device="meta"), StateDictError, "meta", {}),
        (double, StateDictError, "float64", {}),
    ]
    for source, kind, message, options in refused:
        with pytest.raises(kind, match=message):
            infinity.export(source, out, **options)
    with pytest.raises(ConfigError, match="the path of the model directory is empty"):
        infinity.export(model, "")
    with infinity.gathered(model.norm, write=True):
        with pytest.raises(ParameterError, match="leave `with infinity"):
            infinity.export(model, out)
    assert not (tmp_path / "a").exists()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    for target in (tmp_path / "there", tmp_path / "there" / "notes.txt", saved):
        with pytest.raises(DirectoryError):
            infinity.export(model, target)
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["notes.txt"]
    infinity.load(adam, saved)
    (tmp_path / "empty").mkdir()
    infinity.export(model, tmp_path / "empty")
    other, second = wrap(nn.Linear(8, 8), tmp_path / "other")
    with pytest.raises(ParameterError, match="several wrapped models"):
        infinity.export(nn.ModuleList([model, other]), out)
    infinity.close(second)
    with pytest.raises(ClosedError):
        infinity.export(other, out)
    train(model, adam, 1)


# -- checkpoints and the command line ------------------------------------------------------------


def rewrite(path: Path, index: dict[str, Any]) -> None:
    """Put another index, with a checksum that is right, into the place of a checkpoint's."""
    inner = checkpoints._dump(index)
    text = b'{"crc32c":"' + checkpoints._crc(inner).encode() + b'","index":' + inner + b"}"
    (path / "index.json").write_bytes(text)


def test_hostile_and_damaged_checkpoints_are_refused(net: tuple[nn.Module, Any], tmp_path: Path) -> None:
    _, adam = net
    path = Path(infinity.save(adam, tmp_path / "saved"))
    index, out = checkpoints.find(str(path)).content, tmp_path / "out"
    parameters = index["parameters"]
    for changes in (
        {"texts": {"../config.json": "{}"}},
        {"texts": {"/etc/passwd": "x"}},
        {"texts": {"model.safetensors.index.json": "{}"}},
        {"texts": {"modeling.py": "raise SystemExit"}},
        {"texts": {"config.json": "[" * 100_000}},
        {"texts": {"config.json": "[]"}},
        {"texts": {"tokenizer.json": 3}},
        {"texts": 3},
        {"parameters": {**parameters, "more": {"step": 0, "trainable": True, "tied": []}}},
        {"parameters": {}},
        {"parameters": None},
        {"crcs": {}},
        {"files": {"parameters": "../parameters-01234567.safetensors"}},
        {"files": {}},
    ):
        rewrite(path, {**index, **changes})
        with pytest.raises(CorruptionError):
            infinity.export(path, out)
        assert not out.exists()
    rewrite(path, index)
    infinity.export(path, tmp_path / "whole")
    [file] = path.glob("parameters-*")
    content = file.read_bytes()
    for damaged in (content[:-1], content[:100], content[:-1] + bytes([content[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError):
            infinity.export(path, out)
        assert not out.exists()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, adam = wrap(GPT(tied=True), tmp_path / "run")
    infinity.save(adam, tmp_path / "gpt")
    infinity.close(adam)

    assert run(["export", str(tmp_path / "gpt"), str(tmp_path / "plain"), "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert shown.err == ""
    assert list(found["files"]) == ["model.safetensors"]
    assert found["bytes"] == (tmp_path / "plain" / "model.safetensors").stat().st_size
    assert found["load"].startswith("safetensors.torch.load_model(model, ")
    assert run(["export", str(tmp_path / "gpt"), str(tmp_path / "plain"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["what"].endswith("is not empty")
    small = ["export", str(tmp_path / "gpt"), str(tmp_path / "small"), "--max-shard-size"]
    assert run([*small, "100KB"]) == 0
    assert_equal(tensors_in(tmp_path / "small"), tensors_in(tmp_path / "plain"))
    for wrong in (
        [*small, "x"],
        ["export", "", "x"],
        ["export", str(tmp_path / "gpt"), ""],
        ["export", str(tmp_path / "run"), str(tmp_path / "no")],
    ):
        assert run(wrong) == 2
        assert "to change: " in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
