"""`infinity.inference`: the tokens and logits of transformers, wherever the parameters are; and no gradients,
and no writes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity.api import hugging_face
from infinity.api.engine import engine_of
from infinity.core.errors import (
    BudgetError,
    CorruptionError,
    DataError,
    ParameterError,
    WrapError,
)

from . import models
from .offloaded import config_for

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
GPT2 = {"vocab_size": 320, "n_positions": 128, "n_embd": 64, "n_layer": 4, "n_head": 4}
T5 = {"vocab_size": 320, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "t5": lambda: transformers.T5Config(**T5, decoder_start_token_id=0),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def class_of(kind: str) -> Any:
    return transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a directory with a model of transformers as it saves them; each is made once."""
    made: dict[tuple[str, str], Path] = {}

    def of(kind: str, dtype: str = "fp32", *, copied_to: Path | None = None) -> str:
        if (kind, dtype) not in made:
            made[kind, dtype] = tmp_path_factory.mktemp(f"{kind}-{dtype}")
            torch.manual_seed(1)
            model = class_of(kind).from_config(CONFIGS[kind]()).to(DTYPES[dtype])
            model.save_pretrained(made[kind, dtype])
        if copied_to is None:
            return str(made[kind, dtype])
        shutil.copytree(made[kind, dtype], copied_to)
        return str(copied_to)

    return of


def plain(directory: str, kind: str, dtype: str = "fp32") -> Any:
    return class_of(kind).from_pretrained(directory, dtype=DTYPES[dtype]).eval()


def config_of(folder: Path, **settings: Any) -> infinity.Config:
    folder.mkdir(exist_ok=True)
    return config_for(folder, **settings)


@pytest.fixture
def standing() -> Iterator[Callable[..., Any]]:
    """`infinity.inference`, closed at the end."""
    made: list[Any] = []

    def stand(*args: Any, **more: Any) -> Any:
        made.append(infinity.inference(*args, **more))
        return made[-1]

    yield stand
    for model in made:
        infinity.close(model)


def prompts(*, batch: int = 3, length: int = 7) -> dict[str, torch.Tensor]:
    """Tokens of a batch, padded on the left."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 320, (batch, length), generator=random)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 2 * row] = ids[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, tokens: int = 8) -> torch.Tensor:
    made: torch.Tensor = model.generate(**prompts(), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return made


def logits(model: Any) -> torch.Tensor:
    batch: dict[str, Any] = prompts()
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"][:, :3]
    with torch.no_grad():
        found: torch.Tensor = model(**batch).logits
    return found


def units_of(model: Any) -> list[int]:
    return [u.layout.gathered_nbytes for u in engine_of(model).units]


# -- the same numbers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "place", "dtype"),
    [
        *(("gpt2", "host", "fp32"), ("llama", "nvme", "bf16"), ("qwen3", "host", "bf16")),
        pytest.param("mixtral", "nvme", "fp32", marks=pytest.mark.integration),
        pytest.param("t5", "nvme", "bf16", marks=pytest.mark.integration),
    ],
)
def test_tokens_and_logits_are_those_of_transformers(
    kind: str, place: str, dtype: str, directory: Any, standing: Any, tmp_path: Path
) -> None:
    path = directory(kind, dtype)
    wanted = plain(path, kind, dtype)
    probe = infinity.inference(path, config_of(tmp_path, parameters=place, dtype=dtype))
    two_units = 2 * max(units_of(probe))
    infinity.close(probe)
    told: list[tuple[int, int]] = []
    budgets = {"device_memory": two_units, "host_memory": "8MiB"}
    config = config_of(tmp_path, parameters=place, dtype=dtype, **budgets)
    model = standing(path, config, progress=lambda *done: told.append(done))
    if place == "host":  # on NVMe they are used where they are
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] > 0
    cache = engine_of(model).residency.cache
    assert sum(units_of(model)) > two_units
    for _ in range(2):
        assert torch.equal(logits(model), logits(wanted))
        assert torch.equal(generated(model), generated(wanted))
    assert cache.peak <= two_units
    if place == "nvme" and kind != "mixtral":  # whose experts are in the files one by one
        assert [(s.arena_nbytes, s.bytes_written) for s in engine_of(model).store.stats()] == [(0, 0)]
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_parameters_on_every_tier(directory: Any, standing: Any, tmp_path: Path) -> None:
    path = directory("llama", "bf16")
    place = {"device": 0.3, "host": 0.3, "nvme": 0.4}
    model = standing(path, config_of(tmp_path, dtype="bf16", parameters=place))
    assert len({plan.copy_tier for plan in engine_of(model).tiers.plans}) == 3
    wanted = plain(path, "llama", "bf16")
    assert torch.equal(generated(model), generated(wanted))
    state = model.state_dict()
    assert all(torch.equal(state[n], p) for n, p in wanted.state_dict().items())


def test_a_model_that_was_built(standing: Any, tmp_path: Path) -> None:
    case = models.case("gpt")
    case.model.eval()
    batch = {k: v for k, v in case.batches[0].items() if k != "targets"}
    with torch.no_grad():
        wanted = case.model(**batch)
    model = standing(case.model, config_of(tmp_path, device_memory="1MiB"))
    assert model is case.model
    for _ in range(3):
        assert torch.equal(model(**batch), wanted)
    infinity.unwrap(model)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model(**batch), wanted)
    model.train()


def test_a_refusal_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = models.build("gpt").train()
    values = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(BudgetError):
        infinity.inference(model, config_of(tmp_path, device_memory=4096))
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, values[name]) for name, p in model.state_dict().items())


# -- nothing but forwards ---------------------------------------------------------------------


def test_what_would_train_it_says_what_to_write(directory: Any, standing: Any, tmp_path: Path) -> None:
    model = standing(directory("llama"), config_of(tmp_path))
    batch = prompts()
    adam = torch.optim.AdamW(model.parameters())
    calls: list[Callable[[], object]] = [
        model.train,
        model.model.layers[0].train,
        model(**batch).logits.sum().backward,
        lambda: model(**batch, labels=batch["input_ids"]).loss.backward(),
        lambda: infinity.gathered(model, write=True).__enter__(),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: infinity.save(model, tmp_path / "saved"),
        lambda: infinity.load(model, tmp_path / "saved"),
        adam.step,
    ]
    for call in calls:
        with pytest.raises((ParameterError, WrapError), match=r"infinity\.wrap\(model, optimizer, config\)"):
            call()
    model.eval()
    infinity.flush(model)
    assert torch.equal(logits(model), logits(plain(directory("llama"), "llama")))


def test_a_forward_outside_of_no_grad_keeps_no_graph(standing: Any, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = standing(module, config_of(tmp_path))
    given = torch.randn(2, 8, requires_grad=True)
    output = model(given)
    output.mul_(2.0)  # what comes out may be edited, as in torch
    with pytest.raises(ParameterError, match="a backward"):
        output.sum().backward()
    assert given.grad is None
    with torch.no_grad():
        assert not model(given).requires_grad


def test_nothing_is_written_once_it_stands(directory: Any, standing: Any, tmp_path: Path) -> None:
    def written() -> list[int]:
        return [each.bytes_written for each in (*engine_of(model).store.stats(), *rings())]

    def rings() -> Any:
        return engine_of(model).store.ring_stats()

    model = standing(directory("gpt2"), config_of(tmp_path, device_memory="500KiB", prefetch_memory=0))
    before, read = written(), rings()[0].bytes_read
    generated(model)
    model.state_dict()
    assert written() == before
    assert rings()[0].bytes_read > read


# -- directories ------------------------------------------------------------------------------


def rewritten(path: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = Path(path) / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: t.clone() for name, t in tensors.items()}, file, metadata={"format": "pt"})


def test_shards_and_a_dtype_of_the_files_own(directory: Any, standing: Any, tmp_path: Path) -> None:
    model = plain(directory("llama"), "llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    found = standing(str(tmp_path / "model"), config_of(tmp_path / "nvme", dtype="bf16"))
    wanted = class_of("llama").from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert torch.equal(generated(found), generated(wanted))
    assert torch.equal(logits(found), logits(wanted))


def test_names_without_the_prefix_of_the_base_model(directory: Any, standing: Any, tmp_path: Path) -> None:
    path = directory("gpt2", copied_to=tmp_path / "model")
    rewritten(path, lambda ts: {n.removeprefix("transformer."): t for n, t in ts.items()})
    model = standing(path, config_of(tmp_path / "nvme"))
    assert torch.equal(logits(model), logits(plain(path, "gpt2")))


@pytest.mark.parametrize("same", [True, False])
def test_tied_parameters_that_the_file_has_twice(
    same: bool, directory: Any, standing: Any, tmp_path: Path
) -> None:
    path = directory("qwen3", copied_to=tmp_path / "model")

    def twice(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embedding = tensors["model.embed_tokens.weight"]
        return {**tensors, "lm_head.weight": embedding if same else embedding * 2}

    rewritten(path, twice)
    model = standing(path, config_of(tmp_path / "nvme"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is same
    assert torch.equal(logits(model), logits(plain(path, "qwen3")))


def test_a_conversion_that_only_transformers_can_do(directory: Any, standing: Any, tmp_path: Path) -> None:
    path = directory("mixtral")
    model = standing(path, config_of(tmp_path))
    assert torch.equal(generated(model), generated(plain(path, "mixtral")))
    assert any(s.arena_nbytes for s in engine_of(model).store.stats())
    built = class_of("mixtral").from_config(CONFIGS["mixtral"]())
    with pytest.raises(DataError, match="in another form") as caught:
        infinity.inference(built, config_of(tmp_path), weights=path)
    assert caught.value.cure == f"infinity.inference({path!r}, config)"


# -- where they are ---------------------------------------------------------------------------


def is_in_place(model: Any) -> list[bool]:
    return [plan.place is not None for plan in engine_of(model).tiers.plans]


def shifted(path: str, nbytes: int) -> None:
    """Let the tensors begin so many bytes later in their file."""
    file = Path(path) / "model.safetensors"
    content = file.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")] + b" " * nbytes
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + len(header) - nbytes :])


@pytest.mark.parametrize("nbytes", [1, 2])
def test_tensors_that_begin_anywhere(nbytes: int, directory: Any, standing: Any, tmp_path: Path) -> None:
    path = directory("llama", "bf16", copied_to=tmp_path / "model")
    shifted(path, nbytes)
    model = standing(path, config_of(tmp_path / "nvme", dtype="bf16"))
    assert set(is_in_place(model)) == {nbytes != 1}
    assert torch.equal(logits(model), logits(plain(path, "llama", "bf16")))


def test_what_is_of_another_dtype_is_copied(directory: Any, standing: Any, tmp_path: Path) -> None:
    path = directory("llama", copied_to=tmp_path / "model")
    other = "model.layers.1.mlp.up_proj.weight"
    rewritten(path, lambda ts: {n: t.half() if n == other else t for n, t in ts.items()})
    before = sorted((tmp_path / "model").iterdir())
    model = standing(path, config_of(tmp_path / "nvme"))
    assert is_in_place(model).count(False) == 1
    assert all(s.arena_nbytes > 0 for s in engine_of(model).store.stats()[:1])
    wanted = plain(path, "llama")
    for _ in range(2):
        assert torch.equal(generated(model), generated(wanted))
    state = model.state_dict()
    assert all(torch.equal(state[n], p) for n, p in wanted.state_dict().items())
    assert sorted((tmp_path / "model").iterdir()) == before


def test_a_file_that_changes_while_it_is_used(directory: Any, standing: Any, tmp_path: Path) -> None:
    path = directory("gpt2", copied_to=tmp_path / "model")
    model = standing(path, config_of(tmp_path / "nvme", device_memory="500KiB", prefetch_memory=0))
    generated(model)
    with open(Path(path) / "model.safetensors", "r+b") as file:
        file.seek(-100_000, 2)
        file.write(b"\1" * 4096)
    with pytest.raises(CorruptionError, match="first read"):
        generated(model)


def test_a_damaged_checkpoint_is_found_before_it_is_used(tmp_path: Path) -> None:
    path = Path(saved(models.build("cnn"), tmp_path / "run"))
    [file] = path.glob("parameters-*.safetensors")
    with open(file, "r+b") as damaged:
        damaged.seek(-8, 2)
        damaged.write(b"damaged!")
    for place in ("nvme", "host"):
        with pytest.raises(CorruptionError, match="is not what was saved"):
            infinity.inference(
                models.build("cnn"), config_of(tmp_path / "nvme", parameters=place), weights=path
            )
    assert not [p for p in (tmp_path / "nvme").rglob("*") if p.is_file()]


# -- checkpoints ------------------------------------------------------------------------------


def saved(model: nn.Module, folder: Path) -> str:
    folder.mkdir()
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = infinity.wrap(model, adam, config_of(folder / "nvme"))
    path = infinity.save(optimizer, folder / "saved")
    infinity.close(optimizer)
    return path


@pytest.mark.parametrize(("kind", "dtype"), [("mixtral", "fp32"), ("qwen3", "bf16")])
def test_a_checkpoint_of_a_model_of_transformers(
    kind: str, dtype: str, directory: Any, standing: Any, tmp_path: Path
) -> None:
    model = plain(directory(kind), kind)
    model.get_input_embeddings().weight.requires_grad_(False)
    path = saved(model, tmp_path / "run")
    wanted = plain(directory(kind), kind, dtype)
    for place in (path, Path(path).parent):
        found = standing(place, config_of(tmp_path / "nvme", dtype=dtype))
        assert torch.equal(generated(found), generated(wanted))
        infinity.close(found)


def test_a_checkpoint_of_a_model_that_is_built(standing: Any, tmp_path: Path) -> None:
    case = models.case("cnn")
    batch = {k: v for k, v in case.batches[0].items() if k != "targets"}
    with torch.no_grad():
        case.model(**batch)  # its buffers are no longer those of a new one
        wanted = case.model.eval()(**batch)
    values = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    path = saved(case.model, tmp_path / "run")
    with pytest.raises(DataError, match=r"weights="):
        infinity.inference(path, config_of(tmp_path / "nvme"))
    with hugging_face.without_values():
        built = models.build("cnn", seed=5)
    model = standing(built, config_of(tmp_path / "nvme"), weights=path)
    assert torch.equal(model(**batch), wanted)
    infinity.close(model)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")  # as in a directory of Hugging Face
    save_file(values, tmp_path / "files" / "model.safetensors")
    model = standing(models.build("cnn", seed=6), config_of(tmp_path / "nvme"), weights=tmp_path / "files")
    assert torch.equal(model(**batch), wanted)
    other = models.build("gpt")
    before = dict(other.named_parameters())
    with pytest.raises(DataError, match="in another shape"):
        infinity.inference(other, config_of(tmp_path / "nvme"), weights=path)
    assert all(p is before[name] for name, p in other.named_parameters())


# -- what is not what it should be ------------------------------------------------------------


def of_json(path: str, name: str, change: Callable[[Any], Any]) -> None:
    file = Path(path) / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def sharded(path: str, change: Callable[[dict[str, str]], Any]) -> None:
    """Make the directory one with an index."""
    names = load_file(Path(path) / "model.safetensors")
    (Path(path) / "model.safetensors").rename(Path(path) / "one.safetensors")
    of = change(dict.fromkeys(names, "one.safetensors"))
    (Path(path) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))


def cut(path: str) -> None:
    file = Path(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lied(path: str) -> None:
    file = Path(path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[:8] = (1 << 62).to_bytes(8, "little")
    file.write_bytes(content)


HOSTILE: dict[str, tuple[Callable[[str], Any], type[Exception]]] = {
    "no weights": (lambda p: (Path(p) / "model.safetensors").unlink(), DataError),
    "a file that was cut": (cut, CorruptionError),
    "a header of 4 EiB": (lied, CorruptionError),
    "no parameter": (lambda p: rewritten(p, lambda ts: dict(list(ts.items())[:-2])), DataError),
    "another shape": (lambda p: rewritten(p, lambda ts: {n: t[..., :1] for n, t in ts.items()}), DataError),
    "a file elsewhere": (
        lambda p: sharded(p, lambda of: {**of, "lm_head.weight": "../one.safetensors"}),
        DataError,
    ),
    "a tensor that is not there": (
        lambda p: sharded(p, lambda of: {**of, "another": "one.safetensors"}),
        DataError,
    ),
    "no JSON": (lambda p: (Path(p) / "config.json").write_text("{" * 100_000), DataError),
    "no class of a model": (
        lambda p: of_json(p, "config.json", lambda c: {**c, "architectures": ["AutoConfig"]}),
        DataError,
    ),
    "code of its own": (
        lambda p: of_json(
            p, "config.json", lambda c: {**c, "model_type": "x", "auto_map": {"AutoConfig": "evil.X"}}
        ),
        DataError,
    ),
    "quantized": (
        lambda p: of_json(p, "config.json", lambda c: {**c, "quantization_config": {"bits": 4}}),
        DataError,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_directory_that_is_not_what_it_should_be(name: str, directory: Any, tmp_path: Path) -> None:
    path = directory("llama", copied_to=tmp_path / "model")
    (tmp_path / "model" / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass X: pass\n")
    change, error = HOSTILE[name]
    change(path)
    with pytest.raises(error) as raised:
        infinity.inference(path, config_of(tmp_path / "nvme"))
    assert raised.value.cure  # type: ignore[attr-defined]
    assert not (tmp_path / "executed").exists()
    assert not [p for p in (tmp_path / "nvme").rglob("*") if p.is_file()]


def test_a_repository_of_the_hub_is_fetched_first(directory: Any, tmp_path: Path) -> None:
    fetch = re.escape("infinity.inference(huggingface_hub.snapshot_download('org/name'), config)")
    with pytest.raises(DataError, match=fetch):
        infinity.inference("org/name", config_of(tmp_path / "nvme"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no model in") as caught:
        infinity.inference(str(tmp_path / "empty"), config_of(tmp_path / "nvme"))
    assert "snapshot_download" not in str(caught.value)


def test_what_it_takes(directory: Any, tmp_path: Path) -> None:
    with pytest.raises(WrapError, match="takes a Config"):
        infinity.inference(directory("llama"), {"device": "cpu"})  # type: ignore[arg-type]
    with pytest.raises(WrapError, match="two directories"):
        infinity.inference(directory("llama"), config_of(tmp_path), weights=directory("llama"))
    with pytest.raises(WrapError, match="no values"):
        infinity.inference(nn.Linear(2, 2, device="meta"), config_of(tmp_path))
    with torch.device("meta"):
        with_buffers = models.build("cnn")
    with pytest.raises(WrapError, match=r"buffer[^$]*init_empty_weights"):
        infinity.inference(with_buffers, config_of(tmp_path), weights=directory("llama"))
