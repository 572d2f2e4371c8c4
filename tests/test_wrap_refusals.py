"""Errors at `wrap`, before anything is touched."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import (
    BudgetError,
    ConfigError,
    DirectoryError,
    GradientError,
    OptimizerTypeError,
    ParameterChangedError,
    ParameterError,
    WrapError,
)
from infinity.params.param import ReleasedParameter

from .offloaded import wrap_adamw
from .small_net import Net, Wrapped, build, same, train


def test_a_model_is_wrapped_once(wrapped: Wrapped, config: infinity.Config) -> None:
    model, _ = wrapped
    with pytest.raises(WrapError, match="already"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.LBFGS(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, capturable=True),
    ],
)
def test_other_optimizers_are_refused(make: Any, config: infinity.Config) -> None:
    model, _ = build()
    with pytest.raises(OptimizerTypeError):
        infinity.wrap(model, make(model.parameters()), config)
    assert not isinstance(model.embed.weight, ReleasedParameter)


@pytest.mark.parametrize("lacking", ["step", "exp_avg", "exp_avg_sq"])
def test_a_state_without_a_moment_is_refused(lacking: str, config: infinity.Config) -> None:
    model, optimizer = build()
    train(model, optimizer, steps=1)
    del optimizer.state[model.head.weight][lacking]
    with pytest.raises(OptimizerTypeError, match=rf"(?s)no {lacking}\b.*state\.clear"):
        infinity.wrap(model, optimizer, config)
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


def test_units_that_do_not_exist_are_refused(config: infinity.Config) -> None:
    with pytest.raises(ConfigError, match="Blok"):
        infinity.wrap(*build(), config.replace(units=["Blok"]))


@pytest.mark.parametrize(
    "compiled",
    [
        lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        lambda: torch.jit.trace(nn.Linear(8, 8), torch.randn(2, 8)),
    ],
)
def test_modules_that_torch_jit_has_compiled_are_refused(compiled: Any, config: infinity.Config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.Sequential(nn.Linear(8, 8), compiled())
    with pytest.raises(WrapError, match=r"'1' is compiled by torch\.jit"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    assert not isinstance(model[0].weight, ReleasedParameter)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_and_the_cure_works(kind: Any, config: infinity.Config) -> None:
    model = nn.Sequential(kind(10, 8, sparse=True), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(WrapError, match=r"model\.0\.sparse = False"):
        infinity.wrap(model, optimizer, config)
    model[0].sparse = False
    model, optimizer = infinity.wrap(model, optimizer, config)
    try:
        model(torch.randint(0, 10, (4, 3))).sum().backward()
        optimizer.step()
    finally:
        infinity.close(model)


@pytest.mark.parametrize("parameters", ["host", "device"])
def test_a_sparse_gradient_of_a_function_is_refused_and_the_next_is_taken(
    parameters: str, config: infinity.Config
) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, 8))

        def forward(self, x: torch.Tensor, sparse: bool) -> torch.Tensor:
            return nn.functional.embedding(x, self.table, sparse=sparse)

    model: Any = Looks()
    model, optimizer = wrap_adamw(model, config.replace(parameters=parameters))
    try:
        x = torch.tensor([1, 2])
        with pytest.raises(GradientError, match="is sparse"):
            model(x, True).sum().backward()
        optimizer.zero_grad()
        model(x, False).sum().backward()
        assert float(infinity.gradient(model.table).sum()) == 16  # two rows of ones
        optimizer.step()
    finally:
        infinity.close(model)


@pytest.mark.parametrize(
    "data",
    [
        lambda: torch.zeros(1).expand(8),
        lambda: torch.randn(15).as_strided((8, 8), (1, 1)),
        lambda: torch.randn(28).as_strided((4, 8), (2, 3)),
    ],
)
def test_parameters_whose_elements_share_memory_are_refused_and_the_cure_works(
    data: Any, config: infinity.Config
) -> None:
    model = nn.Linear(8, 8)
    model.extra = nn.Parameter(data())
    with pytest.raises(WrapError, match="elements of the parameter 'extra' share memory"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    model.extra = nn.Parameter(model.extra.detach().contiguous())
    infinity.close(infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)[0])


@pytest.mark.parametrize(
    "data",
    [
        lambda: torch.randn(8, 4).t(),
        lambda: torch.randn(12).as_strided((4, 2), (2, 3)),  # one inside the other, and no place twice
        lambda: torch.randn(8, 9)[:, ::2],
        lambda: torch.randn(0, 4),
    ],
)
def test_parameters_with_other_strides_are_taken(data: Any, config: infinity.Config) -> None:
    model = nn.Linear(8, 8)
    model.extra = nn.Parameter(data())
    before = model.extra.detach().clone()
    model, _ = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    assert torch.equal(infinity.unwrap(model).extra, before)


@pytest.mark.parametrize("several", [list, tuple, lambda each: dict(enumerate(each))])
def test_several_optimizers_are_refused(several: Any, config: infinity.Config) -> None:
    model, _ = build()
    each = [torch.optim.AdamW([p]) for p in model.parameters()]
    with pytest.raises(OptimizerTypeError, match="a param group for each"):
        infinity.wrap(model, several(each), config)
    with pytest.raises(OptimizerTypeError, match="inference"):
        infinity.wrap(model, None, config)  # type: ignore[arg-type]


@pytest.mark.parametrize("parameters", ["host", "device"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_wrapped_model_is_not_exported_by_torch(
    strict: bool, parameters: str, config: infinity.Config
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    x = torch.randn(3, 8)
    model, optimizer = wrap_adamw(model, config.replace(parameters=parameters))
    try:
        # A strict one is torch's own error, which has what to write.
        with pytest.raises(Exception if strict else ParameterError, match=r"infinity\.unwrap") as caught:
            torch.export.export(model, (x,), strict=strict)
        assert strict or "torch.export" in str(caught.value.found)  # type: ignore[attr-defined]
        model(x).sum().backward()
        optimizer.step()
        wanted = model(x).detach()
        found = torch.export.export(infinity.unwrap(model), (x,), strict=strict).module()(x)
        assert torch.equal(found, wanted)
    finally:
        infinity.close(model)


@pytest.mark.parametrize("parameters", ["host", "device"])
def test_a_wrapped_model_is_not_traced_by_torch(parameters: str, config: infinity.Config) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model, _ = wrap_adamw(model, config.replace(parameters=parameters))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(ParameterError, match=r"infinity\.unwrap"):
                torch.jit.trace(model, torch.randn(3, 8))
        assert model(torch.randn(3, 8)).shape == (3, 2)
    finally:
        infinity.close(model)


def test_parameters_that_torch_would_exchange_are_refused(config: infinity.Config) -> None:
    model, optimizer = build()
    state = copy.deepcopy(model.state_dict())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(WrapError, match=r"set_swap_module_params_on_conversion\(False\)"):
            infinity.wrap(model, optimizer, config)
        torch.__future__.set_swap_module_params_on_conversion(False)
        model, _ = infinity.wrap(model, optimizer, config)
        torch.__future__.set_swap_module_params_on_conversion(True)
        for call in (lambda: model.load_state_dict(state), lambda: model.to("cpu")):
            with pytest.raises(ParameterChangedError, match="exchange"):
                call()
        torch.__future__.set_swap_module_params_on_conversion(False)
        model.load_state_dict(state)
        assert same(model.state_dict(), state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        infinity.close(model)


def test_an_attribute_that_shares_memory_with_a_parameter(config: infinity.Config) -> None:
    """It would keep the values from before the first step."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.alias = self.layer.weight.data

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + x @ self.alias

    model = Shared()
    with pytest.raises(WrapError, match=r"attribute 'alias' shares memory with the parameter 'layer.weight'"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    model.alias = model.alias.clone()
    infinity.close(infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)[0])
    normed = nn.utils.spectral_norm(nn.Linear(8, 8))  # has one that each forward makes anew
    infinity.close(infinity.wrap(normed, torch.optim.AdamW(normed.parameters()), config)[0])


def suggested(**settings: Any) -> int:
    """Return the MiB of host memory that `wrap` suggests for eight matrices of 1024 × 1024. That is what the
    engine takes: `wrap` succeeds with it, and not with a MiB less."""
    host = dict.fromkeys(("parameters", "gradients", "optimizer_state"), "host")

    def wrapped(memory: int) -> Any:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        given = {"device": "cpu", **host, "device_memory": "64MiB", **settings}
        config = infinity.Config(host_memory=memory << 20, **given)
        return infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)[1]

    with pytest.raises(BudgetError) as caught:
        wrapped(40)
    found = re.search(r'host_memory="(\d+)MiB"', str(caught.value.cure))
    assert found is not None
    infinity.close(wrapped(int(found[1])))
    with pytest.raises(BudgetError):
        wrapped(int(found[1]) - 1)
    return int(found[1])


def test_less_is_suggested_for_moments_in_fewer_bits() -> None:
    budgets = [suggested(optimizer_state_dtype=form) for form in ("fp32", "bf16", "8bit")]
    assert budgets[0] > budgets[1] > budgets[2]


class Rotates(nn.Module):
    """Multiplies by complex numbers, as such or (`pairs`) as pairs of real ones."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        values = torch.randn(4, dtype=torch.complex64)
        self.turn = nn.Parameter(torch.view_as_real(values).clone() if pairs else values)
        self.pairs = pairs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = torch.view_as_complex(self.turn) if self.pairs else self.turn
        x = torch.view_as_complex(self.first(x).view(-1, 4, 2))
        return torch.view_as_real(x * turn).square().mean()


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_a_trained_complex_parameter_trains_as_the_error_says(tier: str, config: infinity.Config) -> None:
    def trained(model: Any, optimizer: Any) -> list[float]:
        drawn, losses = torch.Generator().manual_seed(1), []
        for _ in range(5):
            loss = model(torch.randn(3, 8, generator=drawn))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def made(pairs: bool) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Rotates(pairs)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    config = config.replace(parameters=tier, optimizer_state="host" if tier == "device" else tier)
    model, optimizer = made(False)
    with pytest.raises(WrapError, match=r"nn.Parameter\(torch.view_as_real\(p") as caught:
        infinity.wrap(model, optimizer, config)
    assert "torch.view_as_complex(p) in the forward" in str(caught.value.cure)
    assert "buffer" not in str(caught.value.cure)
    wanted = trained(model, optimizer)
    plain, its_adam = made(True)
    assert trained(plain, its_adam) == wanted  # in torch both have the same bits
    assert torch.equal(torch.view_as_complex(plain.turn.detach()), model.turn.detach())
    pairs, adam = infinity.wrap(*made(True), config)
    assert trained(pairs, adam) == pytest.approx(wanted, rel=1e-5)
    turned = torch.view_as_complex(pairs.state_dict()["turn"])
    torch.testing.assert_close(turned, model.turn.detach(), rtol=1e-5, atol=1e-6)
    infinity.close(adam)


def test_a_frozen_complex_parameter_may_be_a_buffer(config: infinity.Config) -> None:
    torch.manual_seed(0)
    model = Rotates()
    model.turn.requires_grad_(False)
    adam = torch.optim.AdamW(model.first.parameters())
    with pytest.raises(WrapError, match="make it a buffer"):
        infinity.wrap(model, adam, config)
    turn = model.turn.detach()
    wanted = model(torch.ones(3, 8)).item()
    del model.turn
    model.register_buffer("turn", turn)
    model, optimizer = infinity.wrap(model, adam, config)
    assert model(torch.ones(3, 8)).item() == wanted
    infinity.close(optimizer)


def test_a_trained_sparse_parameter_is_made_dense(config: infinity.Config) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(self.weight, x).square().mean()

    model = Sparse()
    with pytest.raises(WrapError, match=r"p\.detach\(\)\.to_dense\(\)"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    model.weight = nn.Parameter(model.weight.detach().to_dense())
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    model(torch.ones(8, 2)).backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["weight"], torch.eye(8))
    infinity.close(optimizer)
