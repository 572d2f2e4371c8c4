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
from .ranks import all_well, run_ranks

WIDTH, VOCAB = 32, 24
PLACES = {"nvme": ON_NVME, "host": ON_HOST, "device": RESIDENT}


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


def dtypes_in(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters()}


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


def test_outputs_are_not_cast(tmp_path: Path) -> None:
    assert infinity.Config().dtype is None
    for dtype in (None, "bf16", "fp16"):
        made = case("gpt")
        model = infinity.inference(made.model, config_for(tmp_path, dtype=dtype))
        assert model(made.batches[0]["tokens"]).dtype is parse_dtype(dtype or "fp32")
        infinity.close(model)


def test_a_model_of_one_dtype_is_trained_as_if_that_were_named(tmp_path: Path) -> None:
    found = []
    for given in (None, "bf16"):
        made = case("gpt")
        made.model.bfloat16()
        found.append(train_offloaded(made, config_for(tmp_path, **RESIDENT, dtype=given), steps=3))
    assert_same(*found)


def check_dtypes(model: Any, wanted: dict[str, torch.dtype]) -> None:
    """Wherever parameters are shown, each has its own; also where they are taken back."""
    assert dtypes_in(model) == wanted
    assert {n: v.dtype for n, v in model.state_dict().items() if n in wanted} == wanted
    with infinity.gathered(model, write=True):
        assert {n: p.detach().dtype for n, p in model.named_parameters()} == wanted
        model.blocks[0].a.data.fill_(0.5)
    whole = model.state_dict()
    assert torch.equal(whole["blocks.0.a"], torch.full((WIDTH, 4), 0.5))
    infinity.unwrap(model)
    for name, param in model.named_parameters():
        assert param.dtype is wanted[name]
        assert torch.equal(param, whole[name])


def test_each_parameter_keeps_its_own_and_placements_have_the_same_bits(tmp_path: Path) -> None:
    """Near torch's AdamW on fp32 masters."""
    found, wanted = [], dtypes_in(built()[0])
    for place, update in (("nvme", "overlap"), ("host", "sync"), ("device", "overlap")):
        (folder := tmp_path / place).mkdir()
        with infinity.init(infinity.Config(nvme=folder)):
            model, adam = built()
        config = config_for(folder, **PLACES[place], dtype=None, update=update)
        model, optimizer = infinity.wrap(model, adam, config)
        losses = train(model, optimizer)
        params = {n: v.clone() for n, v in model.state_dict().items()}
        found.append((losses, params, optimizer.state_dict()["state"]))
        check_dtypes(model, wanted)
    losses, params, state = found[0]
    theirs, masters = in_torch(4)
    torch.testing.assert_close(losses, theirs, rtol=2e-2, atol=2e-2)
    for index, (name, master) in enumerate(masters.items()):
        assert ("master" in state[index]) == (wanted[name] is torch.bfloat16), name
        kept = state[index].get("master", params[name])
        torch.testing.assert_close(kept, master, rtol=5e-2, atol=2e-2)
    for others in found[1:]:
        assert others[0] == losses
        assert all(torch.equal(v, params[n]) for n, v in others[1].items())
        assert all(torch.equal(v, state[i][k]) for i, s in others[2].items() for k, v in s.items())


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": None, "update": "delayed", "delay_warmup_steps": 1}
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
    check_dtypes(other, dtypes_in(built()[0]))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_fp16_and_fp64_are_refused_and_the_cure_works(
    dtype: torch.dtype, frozen: bool, tmp_path: Path
) -> None:
    """fp16 is trained with a loss scale alone."""
    model = nn.Sequential(nn.Linear(8, 8).to(dtype).requires_grad_(not frozen), nn.Linear(8, 8))
    adam = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    said, cure = ("fp16", "fp16") if dtype is torch.float16 else ("float64", "fp32")
    with pytest.raises(PrecisionError, match=said) as caught:
        infinity.wrap(model, adam, config_for(tmp_path, dtype=None))
    assert f'dtype="{cure}"' in str(caught.value.cure)
    wrapped, optimizer = infinity.wrap(model, adam, config_for(tmp_path, dtype=cure))
    optimizer.scale(wrapped(torch.ones(2, 8)).sum()).backward()
    optimizer.step()
    infinity.unwrap(wrapped)
    assert model[0].weight.dtype is dtype


def test_fp16_is_kept_where_nothing_is_trained(tmp_path: Path) -> None:
    model = nn.Linear(8, 8).half()
    wanted = model(torch.ones(2, 8).half())
    infinity.inference(model, config_for(tmp_path, dtype=None))
    assert torch.equal(model(torch.ones(2, 8).half()), wanted)
    infinity.close(model)


# -- files -----------------------------------------------------------------------------------


def test_inference_keeps_the_dtype_of_each_parameter_in_its_file(tmp_path: Path) -> None:
    plain = case("llama").model.bfloat16().eval()
    plain.model.norm.float()  # type: ignore[union-attr, operator]
    plain.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    for place, weights in (("nvme", None), ("device", tmp_path / "model")):
        given: Any = tmp_path / "model" if weights is None else case("llama").model
        config = config_for(tmp_path, dtype=None, parameters=place)
        model = infinity.inference(given, config, weights=weights)
        assert dtypes_in(model) == dtypes_in(plain)
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name])
        infinity.close(model)


def test_plan_takes_the_dtype_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("fp32", "bf16"):
        model = case("gpt2", vocab_size=256).model.to(parse_dtype(dtype))
        model.save_pretrained(tmp_path / dtype)  # type: ignore[operator]
        given = ["--device", "cpu", "--nvme", str(tmp_path), "--sequence", "16", "--json"]
        capsys.readouterr()
        assert run(["plan", *given, "--init-from", str(tmp_path / dtype)]) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == dtype


# -- ranks -----------------------------------------------------------------------------------

RANKS = """
import os, sys
import torch
import infinity
from tests.offloaded import config_for
from tests.test_dtypes import built, train
from pathlib import Path
torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = config_for(folder, dtype=None, zero_stage=3, threads=1)
model, adam = infinity.wrap(*built(), config)
losses = train(model, adam)
saved = infinity.save(adam, folder / "saved")
more = train(model, adam, range(4, 6))
params = model.state_dict()
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


@pytest.mark.integration
def test_ranks_keep_it_too(one_thread: None, tmp_path: Path) -> None:
    """Both ranks see the same batches: the mean of their gradients is each one's."""
    all_well(run_ranks(2, RANKS, str(tmp_path), seconds=120))
    found = torch.load(tmp_path / "params", weights_only=True)
    model, optimizer = infinity.wrap(*built(), config_for(tmp_path, dtype=None))
    assert train(model, optimizer, range(6)) == found["losses"]
    for name, value in model.state_dict().items():
        assert found["params"][name].dtype is value.dtype
        assert torch.equal(found["params"][name], value), name
    infinity.close(model)


# -- what a class wants in fp32 -----------------------------------------------------------------


def listed(kind: str) -> Any:
    """A model of transformers that lists parameters: T5 for fp16, DeepSeek for bf16, too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
        config = transformers.T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8}
    heads |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV2Config(
        vocab_size=VOCAB, **sizes, **heads, **experts, first_k_dense_replace=1
    )
    return transformers.DeepseekV2ForCausalLM(config)


@pytest.mark.parametrize(
    ("kind", "dtype", "place"),
    [("t5", "fp16", "nvme"), ("t5", "bf16", "host"), ("deepseek", "bf16", "nvme")],
)
def test_what_a_class_lists_is_fp32_as_from_pretrained_has_it(
    kind: str, dtype: str, place: str, tmp_path: Path
) -> None:
    """And the first loss is that of torch with the same dtypes."""
    model = listed(kind)
    model.save_pretrained(tmp_path / "model")
    plain = type(model).from_pretrained(tmp_path / "model", dtype=parse_dtype(dtype)).train()
    config = config_for(tmp_path, dtype=dtype, loss_scale=8.0, **PLACES[place])
    model, adam = infinity.wrap(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    assert dtypes_in(model) == dtypes_in(plain)
    assert (torch.float32 in dtypes_in(model).values()) is ((kind, dtype) != ("t5", "bf16"))
    batch = {"input_ids": tokens(0), "labels": tokens(9)}
    loss = model(**batch).loss
    assert torch.equal(loss, plain(**batch).loss)
    adam.scale(loss).backward()
    adam.step()
    adam.zero_grad()
    assert dtypes_in(model) == dtypes_in(plain)
    assert model(**batch).loss < loss
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
