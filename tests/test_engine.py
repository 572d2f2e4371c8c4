"""What a user does with a wrapped model, and every way in which they can get it wrong."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import (
    BudgetError,
    ClosedError,
    ConfigError,
    DirectoryError,
    GradientError,
    OptimizerTypeError,
    ParameterChangedError,
    PrecisionError,
    ReleasedParameterError,
    StateDictError,
    WrapError,
)
from infinity.grads.sharded_grad import ShardedGrad
from infinity.params.param import ReleasedParameter

from .models import huggingface

WIDTH, VOCAB = 48, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, three blocks, a tied head, a buffer, and a module that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1) * self.scale, tokens.roll(-1, 1).flatten())


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))


def build(seed: int = 0, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


@pytest.fixture
def config(tmp_path: Path) -> infinity.Config:
    return infinity.Config(
        nvme=tmp_path,
        device="cpu",
        dtype="fp32",
        parameters="nvme",
        optimizer_state="nvme",
        gradients="nvme",
        device_memory="2MiB",
        host_memory="16MiB",
        chunk_elements=65536,
    )


Wrapped = tuple[Any, Any]


@pytest.fixture
def wrapped(config: infinity.Config) -> Iterator[Wrapped]:
    model, optimizer = infinity.wrap(*build(), config)
    yield model, optimizer
    infinity.close(optimizer)


def train(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- released parameters ------------------------------------------------------------------------


def test_a_released_parameter_never_reaches_a_kernel(wrapped: Wrapped) -> None:
    model, _ = wrapped
    weight = model.blocks[0].up.weight
    assert isinstance(weight, ReleasedParameter)
    assert isinstance(weight, nn.Parameter)
    uses = [
        lambda: weight + 1,
        lambda: weight.sum(),
        lambda: F.linear(torch.ones(1, WIDTH), weight),
        lambda: weight.data,
        lambda: weight.clone(),
        lambda: weight.numpy(),
        lambda: weight.tolist(),
        lambda: weight.data_ptr(),
        lambda: torch.save(weight, os.devnull),
        lambda: copy.deepcopy(model),
        lambda: model.blocks[0](torch.ones(1, WIDTH)) + weight.sum(),
    ]
    for use in uses:
        with pytest.raises(ReleasedParameterError) as caught:
            use()
        assert "blocks.0.up.weight" in str(caught.value) or "cannot be" in str(caught.value)
        assert "gathered" in str(caught.value) or "state_dict" in str(caught.value)


def test_metadata_of_a_released_parameter_stays_readable(wrapped: Wrapped) -> None:
    weight = wrapped[0].blocks[0].up.weight
    assert weight.shape == (4 * WIDTH, WIDTH)
    assert weight.dtype is torch.float32
    assert weight.device.type == "cpu"
    assert weight.numel() == weight.nelement() == 4 * WIDTH * WIDTH
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert weight.dim() == weight.ndim == 2
    assert "blocks.0.up.weight" in repr(weight)
    assert len({weight, weight}) == 1
    assert sum(p.numel() for p in wrapped[0].parameters()) > 0


@pytest.mark.parametrize("method", ["half", "bfloat16", "double", "share_memory"])
def test_casts_and_moves_after_wrap_are_refused(wrapped: Wrapped, method: str) -> None:
    with pytest.raises(ParameterChangedError, match="after `wrap`"):
        getattr(wrapped[0], method)()


def test_to_where_it_already_is_does_nothing(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    assert model.to("cpu").to(torch.float32) is model
    train(model, optimizer, 1)
    with pytest.raises(ParameterChangedError):
        model.to(torch.bfloat16)
    with pytest.raises(ParameterChangedError):
        model.to("meta")


def test_gathered_reads_and_keeps_edits(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    with infinity.gathered(model):
        for (_, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert torch.equal(a, b)
    with infinity.gathered(model.blocks[1].up.weight, write=True), torch.no_grad():
        model.blocks[1].up.weight[3] += 1
    with torch.no_grad():
        reference.blocks[1].up.weight[3] += 1
    assert isinstance(model.blocks[1].up.weight, ReleasedParameter)
    assert same(model.state_dict(), reference.state_dict())
    losses, expected = train(model, optimizer), train(reference, torch_optimizer)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_an_edit_without_write_raises_instead_of_getting_lost(wrapped: Wrapped) -> None:
    model, _ = wrapped
    weight = model.blocks[0].up.weight
    with pytest.raises(ParameterChangedError, match="write=True"), infinity.gathered([weight]):
        with torch.no_grad():
            weight.zero_()


def test_a_graph_from_before_the_step_fails_as_in_torch(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    loss = model(tokens())
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_backwards_of_one_graph_accumulate(wrapped: Wrapped) -> None:
    model, _ = wrapped
    loss = model(tokens())
    loss.backward(retain_graph=True)
    once = infinity.gradient(model.blocks[2].up.weight)
    loss.backward()
    twice = infinity.gradient(model.blocks[2].up.weight)
    assert once is not None
    assert twice is not None
    assert torch.equal(twice, once * 2)


# -- gradients -----------------------------------------------------------------------------------


def test_gradients_equal_torchs(wrapped: Wrapped) -> None:
    model, _ = wrapped
    reference, _ = build()
    model(tokens()).backward()
    reference(tokens()).backward()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
            assert infinity.gradient(a) is None
            continue
        assert isinstance(a.grad, ShardedGrad)
        assert a.grad.shape == b.grad.shape
        whole = infinity.gradient(a)
        assert whole is not None
        assert torch.equal(whole, b.grad), name


def test_torchs_clip_grad_norm_works_on_sharded_gradients(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for step in range(3):
        for m in (model, reference):
            m(tokens(step)).backward()
        a = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        b = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert a.item() == pytest.approx(b.item(), rel=1e-5)
        for o in (optimizer, torch_optimizer):
            o.step()
            o.zero_grad()
    for (_, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_norm_that_is_not_a_number_clips_as_torch_does(wrapped: Wrapped) -> None:
    """One NaN makes the coefficient NaN, and with it every gradient: nothing of it goes unnoticed."""
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m in (model, reference):
        m(tokens()).backward()
        m.blocks[2].up.bias.grad = torch.full((4 * WIDTH,), torch.nan)
    assert optimizer.clip_grad_norm_(0.1).isnan()
    assert nn.utils.clip_grad_norm_(reference.parameters(), 0.1).isnan()
    for o in (optimizer, torch_optimizer):
        o.step()
    for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_a_sharded_gradient_raises_for_what_it_cannot_answer(wrapped: Wrapped) -> None:
    model, _ = wrapped
    model(tokens()).backward()
    grad = model.blocks[0].up.weight.grad
    for use in (lambda: grad + 1, lambda: grad.sum(), lambda: grad.clone(), lambda: grad.abs()):
        with pytest.raises(GradientError, match=r"infinity\.gradient"):
            use()


def test_zero_grad_without_none_means_zero_gradients(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m, o in ((model, optimizer), (reference, torch_optimizer)):
        train(m, o, 1)
        m(tokens(5)).backward()
        o.zero_grad(set_to_none=False)
        o.step()  # momentum and decay go on
        o.step()
    for (_, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_dropping_one_gradient_skips_one_parameter(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m, o in ((model, optimizer), (reference, torch_optimizer)):
        m(tokens()).backward()
        m.blocks[0].up.weight.grad = None
        o.step()
        m(tokens(1)).backward()
        m.blocks[1].up.bias.grad = torch.full((4 * WIDTH,), 0.5)  # a gradient of the user's own
        o.step()
    for (_, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_autograd_grad_leaves_p_grad_alone(wrapped: Wrapped) -> None:
    model, _ = wrapped
    reference, _ = build()
    with infinity.gathered(model):
        (a,) = torch.autograd.grad(model(tokens()), [model.blocks[0].up.weight])
    (b,) = torch.autograd.grad(reference(tokens()), [reference.blocks[0].up.weight])
    assert torch.equal(a, b)
    assert model.blocks[0].up.weight.grad is None


def test_frozen_between_steps_and_edited_groups(config: infinity.Config) -> None:
    def groups(model: Net) -> torch.optim.Optimizer:
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)

    torch.manual_seed(0)
    reference = Net()
    torch_optimizer = groups(reference)
    model = copy.deepcopy(reference)
    wrapped_model, optimizer = infinity.wrap(model, groups(model), config)
    runs: list[tuple[Any, Any]] = [(reference, torch_optimizer), (wrapped_model, optimizer)]
    for m, o in runs:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(o, 8)
        for step in range(8):
            m.blocks[1].requires_grad_(step % 3 != 1)
            o.param_groups[1]["betas"] = (0.8, 0.9 + step / 100)
            m(tokens(step)).backward()
            o.step()
            scheduler.step()
            o.zero_grad()
    for (_, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    infinity.close(optimizer)


# -- state dicts ------------------------------------------------------------------------------


def test_state_dicts_travel_both_ways(config: infinity.Config) -> None:
    reference, torch_optimizer = build()
    train(reference, torch_optimizer)
    model, optimizer = infinity.wrap(*build(seed=9), config.replace(host_memory="64MiB"))
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(torch_optimizer.state_dict())
    assert same(model.state_dict(), reference.state_dict())
    saved = optimizer.state_dict()
    expected = torch_optimizer.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(saved["state"][index][key], value), (index, key)
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)

    back, back_optimizer = build(seed=3)
    back.load_state_dict(model.state_dict())
    back_optimizer.load_state_dict(optimizer.state_dict())
    assert train(back, back_optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)
    infinity.close(optimizer)


def test_wrap_takes_over_an_optimizer_that_has_run(config: infinity.Config) -> None:
    reference, torch_optimizer = build()
    train(reference, torch_optimizer)
    model, started = build()
    train(model, started)
    model, optimizer = infinity.wrap(model, started, config)
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)
    infinity.close(optimizer)


def test_a_state_dict_of_another_model_is_refused_and_nothing_changes(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    train(model, optimizer, 1)
    before = model.state_dict()
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:-1]
    with pytest.raises(StateDictError):
        optimizer.load_state_dict(state)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateDictError):
        optimizer.load_state_dict(state)
    assert same(model.state_dict(), before)


def test_a_state_dict_that_does_not_fit_is_refused(config: infinity.Config) -> None:
    engine_config = config.replace(host_memory="2MiB", chunk_elements=65536)
    model, optimizer = infinity.wrap(*build(), engine_config)
    train(model, optimizer, 1)
    engine_of(model).budget = infinity.api.checks.Budget(device=0, host=0)  # type: ignore[attr-defined]
    with pytest.raises(BudgetError, match="host_memory"):
        optimizer.state_dict()
    assert len(model.state_dict()) > 0  # it fits the leases that nobody uses
    infinity.close(optimizer)


# -- errors at wrap, before anything is touched ---------------------------------------------------


def test_a_model_is_wrapped_once(wrapped: Wrapped, config: infinity.Config) -> None:
    model, _ = wrapped
    with pytest.raises(WrapError, match="already"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.AdamW(p, capturable=True),
    ],
)
def test_other_optimizers_are_refused(make: Any, config: infinity.Config) -> None:
    model, _ = build()
    with pytest.raises(OptimizerTypeError):
        infinity.wrap(model, make(model.parameters()), config)
    assert not isinstance(model.embed.weight, ReleasedParameter)


def test_optimizer_and_model_must_agree(config: infinity.Config) -> None:
    model, _ = build()
    with pytest.raises(WrapError, match="optimizer does not have it"):
        infinity.wrap(model, torch.optim.AdamW(model.head.parameters()), config)
    other, _ = build()
    with pytest.raises(WrapError, match="model does not have"):
        infinity.wrap(model, torch.optim.AdamW([*model.parameters(), *other.parameters()]), config)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(WrapError, match="no values"):
        infinity.wrap(empty, torch.optim.AdamW(empty.parameters()), config)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"device_memory": "10KiB"}, "device_memory"), ({"host_memory": "10KiB"}, "host_memory")],
)
def test_a_run_that_cannot_fit_is_refused_untouched(
    config: infinity.Config, change: dict[str, Any], name: str, tmp_path: Path
) -> None:
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=name):
        infinity.wrap(model, optimizer, config.replace(**change))
    assert same(model.state_dict(), before)
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_is_refused_untouched(config: infinity.Config, tmp_path: Path) -> None:
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DirectoryError, match="nowhere"):
        infinity.wrap(model, optimizer, config.replace(nvme=tmp_path / "nowhere"))
    assert same(model.state_dict(), before)
    assert train(model, optimizer, 1)


def test_a_directory_in_use_is_refused(wrapped: Wrapped, config: infinity.Config) -> None:
    with pytest.raises(DirectoryError, match="use"):
        infinity.wrap(*build(), config)


def test_units_that_do_not_exist_are_refused(config: infinity.Config) -> None:
    with pytest.raises(ConfigError, match="Blok"):
        infinity.wrap(*build(), config.replace(units=["Blok"]))


# -- errors later --------------------------------------------------------------------------------


def test_replaced_parameters_are_noticed(wrapped: Wrapped) -> None:
    model, _ = wrapped
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(4 * WIDTH, WIDTH))
    with pytest.raises(ParameterChangedError, match="replaced"):
        model(tokens())


def test_a_replaced_module_is_noticed(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    unused = model.blocks[1].up
    model.blocks[1].up = nn.Linear(WIDTH, 4 * WIDTH)
    with pytest.raises(ParameterChangedError, match=r"blocks\.1\.up\.weight"):
        model(tokens())
    model.blocks[1].up = unused
    train(model, optimizer, 1)


def test_an_option_that_is_set_later_is_refused(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(OptimizerTypeError, match="amsgrad"):
        train(model, optimizer, 1)
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.step()
    assert optimizer.steps == 1


def test_whoever_would_reset_the_state_is_told_how(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    train(model, optimizer, 2)
    param = model.head.weight
    for use in (
        lambda: optimizer.state.clear(),
        lambda: optimizer.state[param]["exp_avg"].zero_(),
        lambda: optimizer.state.pop(param),
        lambda: setattr(optimizer, "state", {}),
    ):
        with pytest.raises(StateDictError, match="lies on its tiers"):
            use()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, 1)
    assert all(int(s["step"]) == 1 for s in optimizer.state_dict()["state"].values())


def test_added_and_removed_parameters_are_noticed(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    model.extra = nn.Linear(3, 3)
    with pytest.raises(ParameterChangedError, match=r"extra\.weight"):
        model(tokens())
    del model.extra
    train(model, optimizer, 1)
    del model.unused.bias
    with pytest.raises(ParameterChangedError, match=r"removed after `wrap`: 'unused\.bias'"):
        model(tokens())
    model = infinity.unwrap(model)  # the cure
    assert train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 1)


def test_blocks_compile(config: infinity.Config) -> None:
    model, optimizer = build()
    reference, torch_optimizer = build()
    model, wrapped_optimizer = infinity.wrap(model, optimizer, config)
    for i, block in enumerate(model.blocks):
        model.blocks[i].forward = torch.compile(block.forward, backend="aot_eager")
    assert train(model, wrapped_optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)
    infinity.close(wrapped_optimizer)


def test_a_hugging_face_model_loads_trains_and_generates(config: infinity.Config, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    torch.manual_seed(0)
    huggingface("llama", tied=True).save_pretrained(folder)
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    results = []
    for offloaded in (False, True):
        if offloaded:
            with infinity.init(config):
                model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if offloaded:
            model, optimizer = infinity.wrap(model, optimizer, config)
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        text = model.generate(batch["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0)
        results.append((losses, text.tolist()))
    infinity.close(optimizer)
    assert results[0][1] == results[1][1]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)


def test_unfreezing_what_has_no_state_is_refused(config: infinity.Config) -> None:
    model, _ = build()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, wrapped_optimizer = infinity.wrap(model, optimizer, config)
    train(model, wrapped_optimizer, 1)
    model.blocks[0].requires_grad_(True)
    with pytest.raises(ParameterChangedError, match="frozen at `wrap`"):
        model(tokens())
    infinity.close(wrapped_optimizer)


def test_autocast_and_grad_scaler_are_refused(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    with pytest.raises(PrecisionError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(tokens())).backward()
    with pytest.raises(PrecisionError, match="GradScaler"):
        scaler.step(optimizer)


def test_fp16_without_scale_is_refused(config: infinity.Config) -> None:
    model, optimizer = infinity.wrap(*build(), config.replace(dtype="fp16"))
    model(tokens()).backward()
    with pytest.raises(PrecisionError, match="scale"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.scale(model(tokens())).backward()
    optimizer.step()
    infinity.close(optimizer)


def test_add_param_group_is_refused(wrapped: Wrapped) -> None:
    with pytest.raises(WrapError, match="param group"):
        wrapped[1].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_after_close_everything_raises(config: infinity.Config) -> None:
    model, optimizer = infinity.wrap(*build(), config)
    train(model, optimizer, 1)
    infinity.close(model)
    for use in (lambda: model(tokens()), optimizer.step, optimizer.state_dict):
        with pytest.raises(ClosedError):
            use()


def test_an_exception_in_the_loop_leaves_a_usable_model(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        model(tokens())
    handle.remove()
    loss = model(tokens())
    loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError("mine too")))
    with pytest.raises(KeyError, match="mine too"):
        loss.backward()
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)


def test_an_empty_batch_and_a_step_without_gradients(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    optimizer.step()
    optimizer.zero_grad()
    before = model.state_dict()
    optimizer.step()
    assert same(model.state_dict(), before)


def test_a_forgotten_model_gives_back_its_threads_and_its_arena(
    config: infinity.Config, tmp_path: Path
) -> None:
    def use() -> weakref.ref[Any]:
        model, optimizer = infinity.wrap(*build(), config)
        train(model, optimizer, 1)
        return weakref.ref(engine_of(model))

    before = threading.active_count()
    engine = use()
    gc.collect()
    assert engine() is None
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
    infinity.close(infinity.wrap(*build(), config)[1])  # the directory is free again


def test_eval_generation_and_inference_mode(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m, o in ((model, optimizer), (reference, torch_optimizer)):
        train(m, o, 2)
        m.eval()
    with torch.no_grad():
        assert model(tokens(7)).item() == pytest.approx(reference(tokens(7)).item(), rel=1e-5)
    with torch.inference_mode():
        assert model(tokens(7)).item() == pytest.approx(reference(tokens(7)).item(), rel=1e-5)
    model.train()
    reference.train()
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)


def test_what_a_forward_under_inference_mode_fetches_may_be_filled_by_another_thread(
    wrapped: Wrapped,
) -> None:
    """torch forbids that for tensors that are made under inference_mode. A host device does not ask torch."""
    model, optimizer = wrapped
    device = engine_of(model).device
    h2d, targets = device.h2d, []

    def noting(target: torch.Tensor, source: torch.Tensor, *after: Any, **options: Any) -> Any:
        target.copy_(target.clone())  # as a device of its own does, on the thread that loads
        targets.append(target)
        return h2d(target, source, *after, **options)

    device.h2d = noting
    model.eval()
    with torch.inference_mode():
        model(tokens(7))
    model.train()
    train(model, optimizer, 2)
    assert targets
    assert not any(target.is_inference() for target in targets)


def test_metrics_are_figures(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    train(model, optimizer, 2)
    values = infinity.metrics(optimizer)
    assert values["steps"] == 2
    assert values["grad_norm"] > 0
    assert values["nvme/written(TB)"] > 0
    assert all(isinstance(v, float) for v in values.values())
