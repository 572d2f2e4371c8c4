"""The architectures that are in use train as in torch: everything on NVMe, at the least budget that is
accepted. Where one does what it cannot, the error says what to write. Only `make test-all` runs them: they
need packages that nothing else needs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.autograd.containers import cast
from infinity.core.errors import BudgetError, ParameterChangedError, ReleasedParameterError

from .architectures import ARCHITECTURES
from .offloaded import config_for

pytestmark = [
    pytest.mark.architectures,
    pytest.mark.filterwarnings("ignore:.*something outside of the engine refers:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*more units are used at once:RuntimeWarning"),
]

NEEDED = [name for name in ("transformers", "diffusers", "timm") if importlib.util.find_spec(name) is None]
STEPS = 3
# AdamW's `eps` is large, so that a gradient that is zero but for rounding (that of a key's bias, say) moves
# nothing.
RATE, EPS = 1e-3, 1e-2
Losses = list[float]
Tensors = dict[str, torch.Tensor]


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or, where it has none, one in which all of its outputs have a part."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    return torch.stack([t.square().mean() for t in tensors(output) if t.requires_grad]).sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS, weight_decay=0.1)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[name].build().train()


def train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Losses:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 + step)  # of the batch and of dropout
        loss = loss_of(model(**ARCHITECTURES[name].feed()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def at_the_least_budget(model: nn.Module, config: infinity.Config) -> infinity.Config:
    """Return `config` with as little memory as a refusal says is needed."""
    for setting in ("device_memory", "host_memory"):
        with pytest.raises(BudgetError) as refusal:
            infinity.wrap(model, optimizer_of(model), config.replace(**{setting: 4096}))
        needed = re.search(r"\((\d+) bytes\)", str(refusal.value.expected))
        assert needed is not None
        config = config.replace(**{setting: int(needed[1])})
    return config


def by_torch(name: str) -> tuple[Losses, Tensors]:
    model = build(name)
    losses = train(name, model, optimizer_of(model))
    return losses, {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextlib.contextmanager
def offloaded(name: str, folder: Path) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    config = config_for(folder)
    with infinity.init(config):
        model = build(name)
    config = at_the_least_budget(model, config)
    model, optimizer = infinity.wrap(model, optimizer_of(model), config)
    try:
        yield model, optimizer
    finally:
        infinity.close(model)


def by_engine(name: str, folder: Path) -> tuple[Losses, Tensors]:
    with offloaded(name, folder) as (model, optimizer):
        losses = train(name, model, optimizer)
        left = dict(model.named_buffers())
        for n, p in model.named_parameters():
            with infinity.gathered(p):
                left[n] = p.detach().clone()
    return losses, left


@pytest.fixture(autouse=True)
def _means() -> None:
    if NEEDED:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {', '.join(NEEDED)}: make test-all")
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str, tmp_path: Path) -> None:
    losses, wanted = by_torch(name)
    found_losses, found = by_engine(name, tmp_path)
    torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=0.0)
    assert found.keys() == wanted.keys()
    for n, value in wanted.items():
        torch.testing.assert_close(
            found[n], value.detach(), rtol=1e-5, atol=1e-4 * RATE, msg=lambda m, n=n: f"{n}: {m}"
        )


@torch.no_grad()
def captioned(model: Any) -> torch.Tensor:
    """BLIP-2 reads a parameter in `generate`, before any forward."""
    batch = ARCHITECTURES["BLIP-2"].feed()
    return model.generate(batch["pixel_values"], batch["input_ids"], max_new_tokens=4, do_sample=False)  # type: ignore[no-any-return]


@torch.no_grad()
def evaluated(model: Any) -> torch.Tensor:
    """RWKV divides its weights in place at the first forward of an evaluation."""
    return model.eval()(**ARCHITECTURES["RWKV"].feed()).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "use", "error", "cure"),
    [
        ("BLIP-2", captioned, ReleasedParameterError, "with infinity.gathered(params):"),
        ("RWKV", evaluated, ParameterChangedError, "with infinity.gathered(params, write=True):"),
    ],
)
def test_what_an_architecture_cannot_do_says_what_to_write(
    name: str, use: Callable[[Any], torch.Tensor], error: type[Exception], cure: str, tmp_path: Path
) -> None:
    def seeded(model: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return use(model)

    wanted = seeded(build(name))
    with offloaded(name, tmp_path) as (model, _):
        with pytest.raises(error, match=re.escape(cure)):
            seeded(model)
        with infinity.gathered(model.parameters(), write="write" in cure):
            torch.testing.assert_close(seeded(model), wanted, rtol=1e-5, atol=1e-6)


OF_TRANSFORMERS = [n for n, a in ARCHITECTURES.items() if a.build.__qualname__.startswith("hf.")]
#: RWKV changes its weights at its first forward; XLNet cannot be used in bf16.
NOT_USED = {("RWKV", "fp32"), ("RWKV", "bf16"), ("XLNet", "bf16")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in OF_TRANSFORMERS for d in ("fp32", "bf16") if (n, d) not in NOT_USED],
)
def test_a_directory_that_is_only_used(name: str, dtype: str, tmp_path: Path) -> None:
    """The bits of transformers' own, with parameters that are read where they are."""
    model = build(name).eval()
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model.to(kind).save_pretrained(tmp_path / "model")
    plain = type(model).from_pretrained(tmp_path / "model", dtype=kind).eval()
    (tmp_path / "nvme").mkdir()
    config = config_for(tmp_path / "nvme", dtype=dtype, output_dtype=None)
    used = infinity.inference(tmp_path / "model", config)
    torch.manual_seed(1)
    batch = cast(ARCHITECTURES[name].feed(), kind)
    try:
        with torch.no_grad():
            wanted, found = tensors(plain(**batch)), tensors(used(**batch))
        assert all(plan.place for plan in engine_of(used).tiers.plans)
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0, equal_nan=True)
    finally:
        infinity.close(used)
