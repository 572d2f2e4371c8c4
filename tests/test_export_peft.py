"""Models of PEFT in files: their adapters alone, and merged into their base."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ConfigError, DataError, ReleasedParameterError, StateDictError, WrapError

from .models import huggingface
from .offloaded import config_for
from .test_ecosystem import adapted, llama, need, tokens
from .test_export import assert_equal, tensors_in

pytestmark = pytest.mark.integration


def built(kind: str) -> Any:
    model = adapted(kind)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.1)
    return model


def trained(model: nn.Module, folder: Path, **settings: Any) -> tuple[Any, Any]:
    folder.mkdir()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, adam = infinity.wrap(model, optimizer, config_for(folder, **settings))
    model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    adam.step()
    adam.zero_grad()
    return model.eval(), adam


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens(1)).logits


def state(model: Any, adam: Any) -> list[torch.Tensor]:
    values = [v.clone() for v in model.state_dict().values()]
    return [*values, *(v for s in adam.state_dict()["state"].values() for _, v in sorted(s.items()))]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "fp32") for kind in ("lora", "dora", "ia3", "saved", "embedding", "prompt")),
        ("lora", "bf16"),
    ],
)
def test_adapters_alone_and_merged(kind: str, dtype: str, tmp_path: Path) -> None:
    peft = need("peft")
    model, adam = trained(built(kind), tmp_path / "run", dtype=dtype)
    wanted, before = logits(model), state(model, adam)
    infinity.export(model, tmp_path / "alone")

    plain = llama().to(wanted.dtype)
    plain.load_state_dict(base_of(model))
    read = peft.PeftModel.from_pretrained(plain, tmp_path / "alone", autocast_adapter_dtype=False)
    read.to(wanted.dtype)
    if dtype == "fp32":
        assert torch.equal(logits(read), wanted)
    read.save_pretrained(tmp_path / "by peft")  # the same files
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        found, own = tmp_path / "alone" / name, tmp_path / "by peft" / name
        if name.endswith("json"):
            assert json.loads(found.read_text()) == json.loads(own.read_text())
        else:
            assert_equal(safetensors.torch.load_file(found), safetensors.torch.load_file(own))

    if kind == "prompt":
        with pytest.raises(ConfigError, match="merge_adapters=False"):
            infinity.export(model, tmp_path / "merged", merge_adapters=True)
    else:
        infinity.export(model, tmp_path / "merged", max_shard_size="50KB", merge_adapters=True)
        merged, said = type(plain).from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not any(said.values())
        assert merged.dtype is wanted.dtype
        assert_equal(merged.state_dict(), read.merge_and_unload().state_dict())
        if dtype == "fp32":
            assert torch.allclose(logits(merged), wanted, atol=1e-5)
            assert torch.equal(logits(merged), logits(read.get_base_model()))
    after = state(model, adam)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    if kind == "lora" and dtype == "fp32":
        assert torch.equal(logits(infinity.unwrap(model).merge_and_unload()), logits(merged))
    infinity.close(adam)


def base_of(model: Any) -> dict[str, torch.Tensor]:
    """The values of the base, without what adapters add to them."""
    prefix = "base_model." if model.active_peft_config.is_prompt_learning else "base_model.model."
    found = {}
    for name, value in model.state_dict().items():
        name = name.removeprefix(prefix).replace(".base_layer.", ".").replace(".original_module.", ".")
        if not any(
            part in name for part in ("lora_", "ia3_", "modules_to_save", "prompt_", "word_embeddings")
        ):
            found[name] = value
    return found


def test_a_merge_of_peft_is_refused_with_what_helps(tmp_path: Path) -> None:
    model, adam = trained(built("lora"), tmp_path / "run")
    with pytest.raises(ReleasedParameterError, match=r"that `infinity.unwrap\(model\)` returns; `inf"):
        model.merge_and_unload()
    with pytest.raises(ReleasedParameterError, match=r"with infinity.gathered\(params, write=True\)"):
        model.merge_adapter()
    infinity.close(adam)


def test_masters_are_merged_in_fp32(tmp_path: Path) -> None:
    model, adam = trained(built("lora"), tmp_path / "run", dtype="bf16")
    engine = engine_of(model)
    infinity.export(model, tmp_path / "merged", "fp32", merge_adapters=True)
    infinity.export(model, tmp_path / "alone", "fp32")
    alone = tensors_in(tmp_path / "alone")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    low, high = (
        engine.states.read([engine.params[p]])[engine.params[p]]["master"]
        for p in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    assert torch.equal(alone[f"{name}.lora_A.weight"], low)
    base = base_of(model)["model.layers.0.self_attn.q_proj.weight"].float()
    found = tensors_in(tmp_path / "merged")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, base + high @ low * layer.scaling["default"])
    infinity.close(adam)


#: Adapters on the tied names of a Llama → whether these are tied after the merge.
TIED: dict[str, tuple[dict[str, Any], bool]] = {
    "head saved": ({"modules_to_save": ["lm_head"]}, False),
    "embedding saved": ({"modules_to_save": ["embed_tokens"]}, False),
    "both saved, tied": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "rows": ({"trainable_token_indices": [1, 5]}, True),
}


def on_tied_names(kind: str) -> Any:
    """A tied Llama with adapters that are not zero."""
    peft = need("peft")
    torch.manual_seed(0)
    chosen = {"target_modules": ["q_proj"], **TIED[kind][0]}
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **chosen)
    with warnings.catch_warnings():  # PEFT warns of what is tested here
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(huggingface("llama", tied=True), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.1)
    return model


def says_tied(folder: Path) -> bool:
    """Whether the configuration in a directory ties names: it must, just if the files have one of them."""
    said = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert said is not ("lm_head.weight" in tensors_in(folder))
    return bool(said)


@pytest.mark.parametrize("kind", TIED)
def test_a_merged_model_says_of_tied_names_what_its_files_have(kind: str, tmp_path: Path) -> None:
    transformers = need("transformers")
    _, tied = TIED[kind]
    model, _ = trained(on_tied_names(kind), tmp_path / "run", dtype="fp32")
    wanted = logits(model)
    infinity.export(model, tmp_path / "merged", merge_adapters=True)
    assert says_tied(tmp_path / "merged") is tied
    read, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(said.values())
    assert (read.lm_head.weight is read.get_input_embeddings().weight) is tied
    assert torch.allclose(logits(read), wanted, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(read.state_dict(), infinity.unwrap(model).merge_and_unload().state_dict())


def lines_of_the_page(page: str, after: str) -> str:
    """The first block of Python after some words of a page of the documentation."""
    text = Path(__file__).parents[1].joinpath("docs", page).read_text(encoding="utf-8")
    return text.split(after)[1].split("```python\n")[1].split("```")[0]


def test_adapters_that_peft_ties_stay_tied_as_the_error_says(tmp_path: Path) -> None:
    """PEFT's own two parameters over one memory, and with SGD its numbers."""
    peft = need("peft")

    def model_of() -> Any:
        torch.manual_seed(0)
        settings = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
        config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        return peft.get_peft_model(huggingface("llama", tied=True), config)

    def run(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3):
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def sgd(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    plain = model_of()
    wanted = run(plain, sgd(plain))
    tied = model_of()
    config = config_for(tmp_path, dtype="fp32")
    with pytest.raises(WrapError, match="share memory") as caught:
        infinity.wrap(tied, sgd(tied), config)
    assert re.search(r"to keep them tied[^;]*parametrize[^;]*`docs/libraries\.md`", str(caught.value.cure))
    exec(lines_of_the_page("libraries.md", "*LoRA on tied embeddings.*"), {"torch": torch, "tied": tied})
    model, adam = infinity.wrap(tied, sgd(tied), config)
    assert run(model, adam) == pytest.approx(wanted, rel=1e-5)

    expected = logits(model)
    infinity.export(model, tmp_path / "alone")
    assert not any("parametrizations" in name for name in tensors_in(tmp_path / "alone"))
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(huggingface("llama", tied=True), tmp_path / "alone")
    assert torch.equal(logits(again), expected)
    assert logits(again).equal(logits(infinity.unwrap(model)))


def test_several_adapters_and_plain_models(tmp_path: Path) -> None:
    peft = need("peft")
    model = built("lora")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    infinity.export(model, tmp_path / "out")
    read = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
    read.load_adapter(tmp_path / "out" / "other", "other")
    for name in ("default", "other"):
        model.set_adapter(name)
        read.set_adapter(name)
        assert torch.equal(logits(model), logits(read))
        infinity.export(model, tmp_path / name, merge_adapters=True)
        merged = type(model.get_base_model()).from_pretrained(tmp_path / name)
        assert torch.allclose(logits(merged), logits(model), atol=1e-5)


def test_a_checkpoint_of_a_run_with_adapters_says_what_to_do(tmp_path: Path) -> None:
    model, adam = trained(built("lora"), tmp_path / "run")
    infinity.save(adam, tmp_path / "saved")
    infinity.export(model, tmp_path / "out")
    infinity.close(adam)
    with pytest.raises(StateDictError, match=r"infinity\.load\(optimizer, checkpoint\), then"):
        infinity.export(tmp_path / "saved", tmp_path / "again")
    model, adam = trained(built("lora"), tmp_path / "second")
    infinity.load(adam, tmp_path / "saved")
    infinity.export(model, tmp_path / "again")
    assert_equal(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "out"))
    wanted = logits(model)
    with infinity.gathered(model, write=True):
        model.merge_adapter()
    assert torch.allclose(logits(model), wanted, atol=1e-5)
    infinity.close(adam)


def test_a_model_of_peft_that_is_used(tmp_path: Path) -> None:
    """Whether a directory has base, adapters or both is said where it is the wrong one; each cure works."""
    peft = need("peft")
    config = config_for(tmp_path, dtype="fp32", parameters="nvme")
    paths = {name: str(tmp_path / name) for name in ("base", "alone", "merged", "saved", "base saved")}
    llama().save_pretrained(paths["base"])
    model, adam = trained(built("lora"), tmp_path / "run", dtype="fp32")
    wanted = logits(model)
    infinity.save(adam, paths["saved"])
    infinity.export(model, paths["alone"])
    infinity.export(model, paths["merged"], merge_adapters=True)
    infinity.close(adam)
    plain = llama()
    adam = infinity.wrap(plain, torch.optim.AdamW(plain.parameters()), config)[1]
    infinity.save(adam, paths["base saved"])
    infinity.close(adam)

    for given, weights, expected in [
        (paths["saved"], None, r"those of a PEFT model\n[^$]*get_peft_model[^$]*merge_adapters=True"),
        (llama(), "saved", "those of a PEFT model\n"),
        (paths["alone"], None, "only adapters[^$]*PeftModel.from_pretrained"),
        (llama(), "alone", "only adapters"),
        (adapted("lora"), "alone", "only adapters"),
        (adapted("lora"), "base", r"those of a model without adapters\n[^$]*without weights"),
        (adapted("lora"), "base saved", "those of a model without adapters\n"),
    ]:
        with pytest.raises(DataError, match=expected):
            infinity.inference(given, config, weights=paths[weights] if weights else None)
    Path(paths["alone"], "config.json").write_text(Path(paths["base"], "config.json").read_text())
    with pytest.raises(DataError, match="only adapters"):
        infinity.inference(paths["alone"], config)

    with infinity.init(config):
        base = type(llama()).from_pretrained(paths["base"])
    for given, weights in [
        (adapted("lora"), "saved"),
        (peft.PeftModel.from_pretrained(base, paths["alone"]), None),
        (paths["merged"], None),
    ]:
        used = infinity.inference(given, config, weights=paths[weights] if weights else None)
        assert torch.allclose(logits(used), wanted, atol=1e-5)
        assert given == paths["merged"] or torch.equal(logits(used), wanted)
        infinity.close(used)
