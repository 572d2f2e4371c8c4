"""`Config(dtype=None)`, the default: each parameter keeps its own dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.cli.main import run
from infinity.core.errors import PrecisionError
from infinity.core.sizes import parse_dtype

from .models import case
from .offloaded import ON_HOST, ON_NVME, RESIDENT, assert_same, config_for, train_offloaded
from .quick import quick
from .ranks import all_well, run_ranks
from .test_ecosystem import need

WIDTH, VOCAB = 32, 24
PLACES = {"nvme": ON_NVME, "host": ON_HOST, "device": RESIDENT}
UPDATES = ("sync", "overlap", "delayed")


class Adapted(nn.Module):
    """A bf16 layer, frozen, with trained low-rank factors in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH).bfloat16()
        self.a = nn.Parameter(torch.randn(WIDTH, 4) / 8)
        self.b = nn.Parameter(torch.randn(4, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x.float() @ self.a @ self.b
        return x + torch.tanh(self.base(self.norm(x)) + low.to(x.dtype))


class Mixed(nn.Module):
    """tokens (batch, length) → bf16 logits; parameters in bf16 and fp32, trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).bfloat16()
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB).bfloat16()

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.float().transpose(1, 2)).transpose(1, 2)
        if weights is not None:
            assert weights.dtype is torch.float32  # as it was given
        return self.head(x.bfloat16())


def built(seed: int = 0) -> tuple[Mixed, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Mixed()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, step: int) -> torch.Tensor:
    batch = tokens(step)
    logits = model(batch, torch.ones(()))
    assert logits.dtype is torch.bfloat16
    return F.cross_entropy(logits.float().flatten(0, 1), batch.roll(-1, 1).flatten())


def train(model: Any, optimizer: Any, steps: range = range(4)) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_torch(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same with torch's AdamW on fp32 masters."""
    model, _ = built()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = {n: p.detach().float().clone().requires_grad_() for n, p in named.items()}
    adam = torch.optim.AdamW(masters.values(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        for name, param in named.items():
            assert param.grad is not None
            masters[name].grad, param.grad = param.grad.float(), None
        adam.step()
        with torch.no_grad():
            for name, param in named.items():
                param.copy_(masters[name])
        losses.append(loss.item())
    return losses, {n: m.detach() for n, m in masters.items()}


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
def test_outputs_are_not_cast(dtype: str | None, tmp_path: Path) -> None:
    made = case("gpt")
    assert infinity.Config().dtype is None
    model = infinity.inference(made.model, config_for(tmp_path, dtype=dtype))
    logits = model(made.batches[0]["tokens"])
    assert logits.dtype is parse_dtype(dtype or "fp32")
    infinity.close(model)


@pytest.mark.parametrize("update", quick(UPDATES, ["overlap"]))
@pytest.mark.parametrize("place", quick(PLACES, ["device"]))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_of_one_dtype_is_trained_as_if_that_were_named(
    dtype: str, place: str, update: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**PLACES[place], "update": update, "delay_warmup_steps": 1}
    found = []
    for given in (None, dtype):
        made = case("gpt")
        made.model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        config = config_for(tmp_path, **settings, dtype=given)
        found.append(train_offloaded(made, config, steps=4))
    assert_same(*found)


@pytest.mark.parametrize("update", quick(UPDATES, ["sync", "delayed"]))
@pytest.mark.parametrize("place", PLACES)
def test_each_parameter_keeps_its_own(place: str, update: str, tmp_path: Path) -> None:
    model, adam = built()
    wanted = {n: p.dtype for n, p in model.named_parameters()}
    warmup = {"delay_warmup_steps": 2 if place == "nvme" else 9}
    config = config_for(tmp_path, **PLACES[place], dtype=None, update=update, **warmup)
    model, optimizer = infinity.wrap(model, adam, config)
    losses = train(model, optimizer)
    if update != "delayed" or place != "nvme":
        theirs, masters = in_torch(4)
        torch.testing.assert_close(losses, theirs, rtol=2e-2, atol=2e-2)
        state = optimizer.state_dict()["state"]
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        for index, name in enumerate(trained):
            assert ("master" in state[index]) == (wanted[name] is torch.bfloat16), name
            kept = state[index].get("master", model.state_dict()[name])
            torch.testing.assert_close(kept, masters[name], rtol=5e-2, atol=2e-2)
    assert {n: p.dtype for n, p in model.named_parameters()} == wanted
    assert {n: v.dtype for n, v in model.state_dict().items() if n in wanted} == wanted
    with infinity.gathered(model, write=True):
        assert {n: p.detach().dtype for n, p in model.named_parameters()} == wanted
        model.blocks[0].a.data.fill_(0.5)
    assert torch.equal(model.state_dict()["blocks.0.a"], torch.full((WIDTH, 4), 0.5))
    whole = model.state_dict()
    infinity.unwrap(model)
    for name, param in model.named_parameters():
        assert param.dtype is wanted[name]
        assert torch.equal(param, whole[name])


def test_placements_and_exact_updates_give_the_same_bits(tmp_path: Path) -> None:
    found = []
    for number, (place, update) in enumerate((("nvme", "overlap"), ("host", "sync"), ("device", "overlap"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with infinity.init(infinity.Config(nvme=folder)):
            model, adam = built()
        config = config_for(folder, **PLACES[place], dtype=None, update=update)
        model, optimizer = infinity.wrap(model, adam, config)
        found.append((train(model, optimizer), model.state_dict(), optimizer.state_dict()["state"]))
        infinity.close(model)
    for losses, params, state in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(v, found[0][1][n]) for n, v in params.items())
        assert all(torch.equal(v, found[0][2][i][k]) for i, s in state.items() for k, v in s.items())


@pytest.mark.parametrize("update", quick(UPDATES, ["overlap"]))
def test_a_checkpoint_goes_on_with_the_same_bits(update: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": None, "update": update, "delay_warmup_steps": 1}
    model, optimizer = infinity.wrap(*built(), config_for(tmp_path, **settings))
    train(model, optimizer)
    path = infinity.save(optimizer, tmp_path / "saved")
    wanted = train(model, optimizer, range(4, 7)), model.state_dict()
    infinity.export(model, tmp_path / "out")
    infinity.close(model)
    other, again = infinity.wrap(*built(1), config_for(tmp_path, **RESIDENT, **settings))
    infinity.load(again, path)
    assert train(other, again, range(4, 7)) == wanted[0]
    assert all(torch.equal(v, wanted[1][n]) for n, v in other.state_dict().items())
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for name, value in other.state_dict().items():
        assert written[name].dtype is value.dtype, name
        assert torch.equal(written[name], value), name
    infinity.close(other)


def test_fp16_is_trained_with_a_loss_scale_alone(tmp_path: Path) -> None:
    for frozen in (False, True):
        model = nn.Sequential(nn.Linear(8, 8).half().requires_grad_(not frozen), nn.Linear(8, 8))
        adam = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        with pytest.raises(PrecisionError, match="fp16") as caught:
            infinity.wrap(model, adam, config_for(tmp_path, dtype=None))
        assert caught.value.cure is not None
        assert 'dtype="fp16"' in caught.value.cure
        wrapped, optimizer = infinity.wrap(model, adam, config_for(tmp_path, dtype="fp16"))
        optimizer.scale(wrapped(torch.ones(2, 8)).sum()).backward()
        optimizer.step()
        infinity.close(wrapped)


def test_fp16_is_kept_where_nothing_is_trained(tmp_path: Path) -> None:
    model = nn.Linear(8, 8).half()
    wanted = model(torch.ones(2, 8).half())
    infinity.inference(model, config_for(tmp_path, dtype=None))
    assert torch.equal(model(torch.ones(2, 8).half()), wanted)
    infinity.close(model)


@pytest.mark.first
@pytest.mark.parametrize("frozen", [False, True])
def test_fp64_is_refused(frozen: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8).double().requires_grad_(not frozen), nn.Linear(8, 8))
    adam = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    with pytest.raises(PrecisionError, match="float64") as caught:
        infinity.wrap(model, adam, config_for(tmp_path, dtype=None))
    assert 'Config(dtype="fp32")' in str(caught.value.cure)
    wrapped, optimizer = infinity.wrap(model, adam, config_for(tmp_path, dtype="fp32"))
    wrapped(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    infinity.unwrap(wrapped)
    assert model[0].weight.dtype is torch.float64


# -- files -----------------------------------------------------------------------------------


def test_inference_keeps_the_dtype_of_each_parameter_in_its_file(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    plain = LlamaForCausalLM(small).bfloat16().eval()
    plain.model.norm.float()
    plain.save_pretrained(tmp_path / "model")
    for weights in (None, tmp_path / "model"):
        for place in ("nvme", "device"):
            given: Any = tmp_path / "model" if weights is None else LlamaForCausalLM(small)
            config = config_for(tmp_path, dtype=None, parameters=place)
            model = infinity.inference(given, config, weights=weights)
            found = {n: p.dtype for n, p in model.named_parameters()}
            assert found == {n: p.dtype for n, p in plain.named_parameters()}
            for name, value in model.state_dict().items():
                assert torch.equal(value, plain.state_dict()[name])
            infinity.close(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_commands_take_the_dtype_of_the_checkpoint(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=32)
    GPT2LMHeadModel(small).to(getattr(torch, dtype)).save_pretrained(tmp_path / "model")
    given = ["--device", "cpu", "--nvme", str(tmp_path), "--sequence", "16"]
    said = []
    for more in (["--init-from", str(tmp_path / "model")], ["--preset", "30m"]):
        capsys.readouterr()
        assert run(["plan", *given, *more, "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out)["dtype"])
    assert said == ["fp32" if dtype == "float32" else "bf16", "bf16"]


# -- ranks -----------------------------------------------------------------------------------

RANKS = """
import os, sys
import torch
import infinity
from tests.offloaded import config_for
from tests.test_dtypes import PLACES, built, train
from pathlib import Path
torch.set_num_threads(1)
folder, stage = Path(sys.argv[1]), int(sys.argv[2])
place = PLACES["nvme" if stage == 3 else "device"]
if stage < 2:
    place = {**place, "gradients": None}
config = config_for(folder, **place, dtype=None, zero_stage=stage, threads=1)
model, adam = infinity.wrap(*built(), config)
losses = train(model, adam)
saved = infinity.save(adam, folder / "saved")
more = train(model, adam, range(4, 6))
params, state = model.state_dict(), adam.state_dict() if stage < 2 else None
infinity.close(model)
if int(os.environ["RANK"]) == 0:
    torch.save({"losses": losses + more, "params": params}, folder / "params")
model, adam = infinity.wrap(*built(1), config)
infinity.load(adam, saved)
assert train(model, adam, range(4, 6)) == more
again = model.state_dict()
assert all(torch.equal(v, params[n]) and v.dtype is params[n].dtype for n, v in again.items())
infinity.close(model)
"""


@pytest.mark.parametrize("stage", quick([1, 2, 3], [3]))
def test_ranks_keep_it_too(stage: int, one_thread: None, tmp_path: Path) -> None:
    """Both ranks see the same batches: the mean of their gradients is each one's."""
    all_well(run_ranks(2, RANKS, str(tmp_path), str(stage), seconds=120))
    found = torch.load(tmp_path / "params", weights_only=True)
    model, optimizer = infinity.wrap(*built(), config_for(tmp_path, dtype=None))
    assert train(model, optimizer, range(6)) == found["losses"]
    for name, value in model.state_dict().items():
        assert found["params"][name].dtype is value.dtype
        assert torch.equal(found["params"][name], value), name
    infinity.close(model)


# -- what a class wants in fp32 -----------------------------------------------------------------


def listed(kind: str) -> Any:
    """A model of transformers that lists parameters: T5 and RWKV for fp16, DeepSeek for bf16, too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
        config = transformers.T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config)
    if kind == "rwkv":
        sizes = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
        return transformers.RwkvForCausalLM(transformers.RwkvConfig(vocab_size=VOCAB, **sizes))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8}
    heads |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV2Config(
        vocab_size=VOCAB, **sizes, **heads, **experts, first_k_dense_replace=1
    )
    return transformers.DeepseekV2ForCausalLM(config)


def dtypes_in(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters()}


SCALE = 8.0


@pytest.mark.parametrize(
    ("kind", "dtype", "place"),
    [("t5", "fp16", "nvme"), ("t5", "bf16", "host"), ("rwkv", "fp16", "host"), ("deepseek", "bf16", "nvme")],
)
def test_what_a_class_lists_is_fp32_as_from_pretrained_has_it(
    kind: str, dtype: str, place: str, tmp_path: Path
) -> None:
    """And the losses are those of torch with the same dtypes."""
    model = listed(kind)
    model.save_pretrained(tmp_path / "model")
    plain = type(model).from_pretrained(tmp_path / "model", dtype=parse_dtype(dtype)).train()
    masters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    config = config_for(tmp_path, dtype=dtype, loss_scale=SCALE, **PLACES[place])
    model, adam = infinity.wrap(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    assert dtypes_in(model) == dtypes_in(plain)
    assert (torch.float32 in dtypes_in(model).values()) is ((kind, dtype) != ("t5", "bf16"))

    theirs = torch.optim.AdamW(masters.values(), lr=1e-2, foreach=False)
    scale = SCALE if dtype == "fp16" else 1.0
    for step in range(3):
        batch = {"input_ids": tokens(step), "labels": tokens(step + 9)}
        wanted, loss = plain(**batch).loss, model(**batch).loss
        assert step or torch.equal(loss, wanted)
        torch.testing.assert_close(loss, wanted, rtol=2e-3, atol=0)  # AdamW is not torch's, bit for bit
        (wanted * scale).backward()
        (adam.scale(loss) if dtype == "fp16" else loss).backward()
        for name, param in plain.named_parameters():
            masters[name].grad = None if param.grad is None else param.grad.float() / scale
            param.grad = None
        theirs.step()
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(masters[name])
    infinity.close(adam)


class Around(nn.Module):
    """A model of one's own, around one of transformers and a class that lists by itself."""

    _keep_in_fp32_modules_strict = ("mine",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = listed("deepseek")
        self.mine = nn.Linear(4, 4).requires_grad_(False)
        self.other = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids).logits


def test_modules_inside_list_too_and_frozen_parameters_are_no_exception(tmp_path: Path) -> None:
    wanted = {"inner.model.layers.1.mlp.gate.weight", "mine.weight", "mine.bias"}
    config = config_for(tmp_path, dtype="bf16")
    model = Around()
    trained = [p for p in model.parameters() if p.requires_grad]
    (tmp_path / "used").mkdir()
    used = infinity.inference(Around(), config_for(tmp_path / "used", dtype="bf16"))
    model, adam = infinity.wrap(model, torch.optim.AdamW(trained), config)
    for each in (model, used):
        assert {n for n, d in dtypes_in(each).items() if d is torch.float32} == wanted
        assert torch.isfinite(each(tokens(0))).all()
    infinity.close(adam)
    infinity.close(used)


@pytest.mark.integration
def test_adapters_leave_what_a_class_lists_in_fp32(tmp_path: Path) -> None:
    peft = need("peft")
    config = peft.LoraConfig(target_modules=["q_a_proj"], modules_to_save=["gate"])
    model = peft.get_peft_model(listed("deepseek"), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, adam = infinity.wrap(model, torch.optim.AdamW(trained), config_for(tmp_path, dtype="bf16"))
    gate = "base_model.model.model.layers.1.mlp.gate."
    wanted = {f"{gate}original_module.weight", f"{gate}modules_to_save.default.weight"}
    assert {n for n, d in dtypes_in(model).items() if d is torch.float32} == wanted
    model(input_ids=tokens(0), labels=tokens(1)).loss.backward()
    adam.step()
    infinity.close(adam)
