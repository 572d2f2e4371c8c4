"""Errors at `wrap`, before anything is touched."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
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


def test_other_optimizers_are_refused(config: infinity.Config) -> None:
    model, adam = build()
    for several in ([adam], (adam,), {0: adam}):
        with pytest.raises(OptimizerTypeError, match="a param group for each"):
            infinity.wrap(model, several, config)  # type: ignore[arg-type]
    with pytest.raises(OptimizerTypeError, match="inference"):
        infinity.wrap(model, None, config)  # type: ignore[arg-type]
    train(model, adam, steps=1)
    for lacking in ("exp_avg_sq", "step"):
        del adam.state[model.head.weight][lacking]
        with pytest.raises(OptimizerTypeError, match=rf"(?s)no {lacking}\b.*state\.clear"):
            infinity.wrap(model, adam, config)
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


def test_a_run_that_cannot_be_is_refused_untouched(config: infinity.Config, tmp_path: Path) -> None:
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    for change, error, name in (
        ({"device_memory": "10KiB"}, BudgetError, "device_memory"),
        ({"host_memory": "10KiB"}, BudgetError, "host_memory"),
        ({"nvme": tmp_path / "nowhere"}, DirectoryError, "nowhere"),
        ({"units": ["Blok"]}, ConfigError, "Blok"),
    ):
        with pytest.raises(error, match=name):  # type: ignore[arg-type]
            infinity.wrap(model, optimizer, config.replace(**change))
    assert same(model.state_dict(), before)
    assert not list(tmp_path.iterdir())
    assert train(model, optimizer, 1)


class _Shared(nn.Module):
    """Its attribute would keep the values from before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.alias = self.layer.weight.data


def _compiled(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: nn.Sequential(nn.Linear(8, 8), make())


def _with(data: torch.Tensor, *, trained: bool = True) -> Callable[[], Any]:
    def make() -> nn.Module:
        model = nn.Linear(8, 8)
        model.extra = nn.Parameter(data, requires_grad=trained)
        return model

    return make


def _replaced(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], object]:
    return lambda model: setattr(model, "extra", nn.Parameter(change(model.extra.detach())))


_OWN, _TURN = _replaced(torch.clone), torch.randn(4, dtype=torch.complex64)
_JIT = "'1' is compiled by torch.jit"
_TWICE = "elements of the parameter 'extra' share memory"
_ALIAS = "attribute 'alias' shares memory with the parameter 'layer.weight'"
#: The model, what the error says, and the cure, where it is a line.
REFUSED: dict[str, tuple[Callable[[], Any], str, Callable[[Any], object] | None]] = {
    "torch.jit.script": (_compiled(lambda: torch.jit.script(nn.Linear(8, 8))), _JIT, None),
    "torch.jit.trace": (_compiled(lambda: torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8))), _JIT, None),
    "sparse gradients": (
        _compiled(lambda: nn.EmbeddingBag(10, 8, sparse=True)),
        "model.1.sparse = False",
        lambda model: setattr(model[1], "sparse", False),
    ),
    "expanded": (_with(torch.zeros(1).expand(8)), _TWICE, _OWN),
    "strided": (_with(torch.randn(28).as_strided((4, 8), (2, 3))), _TWICE, _OWN),
    "overlapping": (_with(torch.randn(7).as_strided((3, 2), (2, 2))), _TWICE, _OWN),
    "an attribute": (_Shared, _ALIAS, lambda model: setattr(model, "alias", model.alias.clone())),
    "complex": (_with(_TURN), "nn.Parameter(torch.view_as_real(p", _replaced(torch.view_as_real)),
    "complex, frozen": (_with(_TURN, trained=False), "make it a buffer", None),
    "sparse": (_with(torch.eye(8).to_sparse()), "p.detach().to_dense()", _replaced(torch.Tensor.to_dense)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("what", REFUSED)
def test_a_model_is_refused_with_a_cure_that_works(what: str, config: infinity.Config) -> None:
    make, said, cure = REFUSED[what]
    model = make()

    def wrap() -> Any:
        params = [p for p in model.parameters() if p.requires_grad]
        return infinity.wrap(model, torch.optim.AdamW(params), config)

    with pytest.raises(WrapError, match=re.escape(said)):
        wrap()
    assert not any(isinstance(p, ReleasedParameter) for p in model.parameters())
    if cure is not None:
        cure(model)
        infinity.close(wrap()[0])


def test_a_sparse_gradient_of_a_function_is_refused_and_the_next_is_taken(
    config: infinity.Config,
) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, 8))

        def forward(self, x: torch.Tensor, sparse: bool) -> torch.Tensor:
            return nn.functional.embedding(x, self.table, sparse=sparse)

    model: Any = Looks()
    model, optimizer = wrap_adamw(model, config)
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


def test_other_strides_are_taken(config: infinity.Config) -> None:
    model = nn.Linear(8, 8)
    model.turned = nn.Parameter(torch.randn(8, 4).t())
    model.nested = nn.Parameter(torch.randn(12).as_strided((4, 2), (2, 3)))  # no place twice
    model.gaps = nn.Parameter(torch.randn(8, 9)[:, ::2])
    model.empty = nn.Parameter(torch.randn(0, 4))
    before = copy.deepcopy(model.state_dict())
    model, _ = wrap_adamw(model, config)
    assert same(infinity.unwrap(model).state_dict(), before)


@pytest.mark.parametrize("parameters", ["host", "device"])
def test_a_wrapped_model_is_not_exported_by_torch(parameters: str, config: infinity.Config) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    x = torch.randn(3, 8)
    model, optimizer = wrap_adamw(model, config.replace(parameters=parameters))
    try:
        with pytest.raises(ParameterError, match=r"infinity\.unwrap") as caught:
            torch.export.export(model, (x,), strict=False)
        assert "torch.export" in str(caught.value.found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(ParameterError, match=r"infinity\.unwrap"):
                torch.jit.trace(model, x)
        model(x).sum().backward()
        optimizer.step()
        wanted = model(x).detach()
        found = torch.export.export(infinity.unwrap(model), (x,), strict=False).module()(x)
        assert torch.equal(found, wanted)
    finally:
        infinity.close(model)


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
