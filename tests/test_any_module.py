"""Any `nn.Module`: what plain torch takes, the engine takes, or says what to write instead."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import io
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import (
    ClosedError,
    GradientError,
    ParameterChangedError,
    ParameterError,
    PrecisionError,
    ReleasedParameterError,
    WrapError,
)
from infinity.core.sizes import MiB, Tier

from .cgroup import run_limited
from .offloaded import config_for
from .quick import quick
from .test_doors import assert_close, least

WIDTH, CLASSES, LAYERS = 64, 96, 3
Losses = list[torch.Tensor]


class Block(nn.Module):
    """x (batch, width) → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """tokens (batch,) → a loss: embedding, blocks, and what the subclass makes of the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(self.hidden(tokens)), tokens)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.wte.weight)  # the head of many models


class Holder(nn.Module):
    """Has parameters and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) / 8)
        self.bias = nn.Parameter(torch.zeros(CLASSES))


class HolderModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.gains = nn.ModuleList(Holder() for _ in range(3))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for gain in self.gains:
            x = x + torch.tanh(F.linear(x, gain.weight, gain.bias)) @ gain.weight
        return F.linear(x, self.holder.weight, self.holder.bias)


class ListModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(3))
        self.dict = nn.ParameterDict(
            {
                "head": nn.Parameter(torch.randn(CLASSES, WIDTH) / 8),
                "bias": nn.Parameter(torch.zeros(CLASSES)),
            }
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return x @ self.dict["head"].t() + self.dict["bias"]


class PastTheBlock(Model):
    """As in diffusers' DiT, whose forward calls a part of its first block."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.blocks[0].up(x.mean(0))
        return super().logits(self.blocks[-1].norm(x) * (1 + shift))


class WeightNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.head = torch.nn.utils.weight_norm(nn.Linear(WIDTH, CLASSES))
            for block in self.blocks:
                torch.nn.utils.weight_norm(block.up)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Parametrized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES))
        self.other = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.other(x), self.head.weight)  # computed from two parameters


class Fused(torch.autograd.Function):
    """Cross entropy of a linear head in pieces, as the fused heads of Liger and TRL are: the gradients are
    made in forward, and only they are kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = x.new_zeros(())
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for rows in torch.arange(len(x)).chunk(3):
            logits = x[rows] @ weight.t()
            log = logits.log_softmax(-1)
            loss -= log[torch.arange(len(rows)), targets[rows]].sum() / len(x)
            grad = (log.exp() - F.one_hot(targets[rows], weight.shape[0])) / len(x)
            grad_x[rows] = grad @ weight
            grad_weight += grad.t() @ x[rows]
        ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, grad * grad_weight, None


class Cut(torch.autograd.Function):
    """The same as cut-cross-entropy has it: slices of the weight in forward and once more in backward."""

    how = "saved"

    @classmethod
    def keep(cls, ctx: Any, *tensors: torch.Tensor) -> None:
        ctx.save_for_backward(*tensors)

    @classmethod
    def kept(cls, ctx: Any) -> Any:
        return ctx.saved_tensors

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = [x @ weight[i : i + 32].t() for i in range(0, weight.shape[0], 32)]
        log = torch.cat(parts, 1).log_softmax(-1)
        cls.keep(ctx, x, weight, targets, log)
        return -log[torch.arange(len(x)), targets].mean()

    @classmethod
    def backward(cls, ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, targets, log = cls.kept(ctx)
        logits = grad * (log.exp() - F.one_hot(targets, weight.shape[0])) / len(x)
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for i in range(0, weight.shape[0], 32):
            grad_x += logits[:, i : i + 32] @ weight[i : i + 32]
            grad_weight[i : i + 32] = logits[:, i : i + 32].t() @ x
        return grad_x, grad_weight, None


class CutByAttribute(Cut):
    """Keeps the weight itself as an attribute."""

    @classmethod
    def keep(cls, ctx: Any, *tensors: torch.Tensor) -> None:
        ctx.kept = tensors

    @classmethod
    def kept(cls, ctx: Any) -> Any:
        return ctx.kept


class CutByAddress(Cut):
    """Reads what lies at the addresses of two parameters, as a Triton kernel does."""

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return Cut.forward.__func__(cls, ctx, x, at_address(weight), targets)

    @classmethod
    def keep(cls, ctx: Any, *tensors: torch.Tensor) -> None:
        ctx.kept = tensors

    @classmethod
    def kept(cls, ctx: Any) -> Any:
        return ctx.kept


def at_address(tensor: torch.Tensor) -> torch.Tensor:
    values = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(values, dtype=torch.float32).view(tensor.shape).clone()


class FusedModel(Model):
    """The head's own forward is never called."""

    function: Any = Fused

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.hidden(tokens), self.lm_head.weight, tokens)


class CutModel(FusedModel):
    function = Cut


class CutByAttributeModel(FusedModel):
    function = CutByAttribute


class CutByAddressModel(FusedModel):
    function = CutByAddress


class TiedFusedModel(FusedModel):
    function = Cut

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.wte.weight


def patched() -> nn.Module:
    """A plain model whose forward somebody replaced afterwards."""
    model = HeadModel()

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return Cut.apply(model.hidden(tokens), model.head.weight, tokens)  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    return model


class HeadModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class TwoAddresses(Model):
    """A kernel that is given addresses in two units at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Holder(), Holder()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return BothByAddress.apply(self.hidden(tokens), self.one.weight, self.two.weight, tokens)  # type: ignore[no-any-return]


class BothByAddress(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        one.sum()  # it is there from here on
        n = one.numel()
        places = [one.data_ptr(), two.data_ptr()]
        values = [torch.frombuffer((ctypes.c_float * n).from_address(p), dtype=torch.float32) for p in places]
        weight = (values[0] + values[1]).view(one.shape)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            loss = F.cross_entropy(leaves[0] @ leaves[1].t(), targets)
        ctx.grads = torch.autograd.grad(loss, leaves)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.grads[0], grad * ctx.grads[1], grad * ctx.grads[1], None


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the weight of a child": Model,
    "holders without a forward": HolderModel,
    "ParameterList and ParameterDict": ListModel,
    "a part of a block": PastTheBlock,
    "weight_norm": WeightNorm,
    "parametrizations": Parametrized,
    "a fused head": FusedModel,
    "a fused head that slices in backward": CutModel,
    "a fused head with the weight as an attribute": CutByAttributeModel,
    "a fused head that takes addresses": CutByAddressModel,
    "a tied fused head": TiedFusedModel,
    "a patched forward": patched,
    "addresses in two units": TwoAddresses,
}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(CLASSES, (12,), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, steps: int = 3) -> Losses:
    losses = []
    for step in range(steps):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@functools.cache
def by_torch(make: Callable[[], nn.Module]) -> Losses:
    """Losses and parameters of plain torch. Several tests have them: only for looking at."""
    model, optimizer = built(make)
    return [*train(model, optimizer), *(p.detach() for p in model.parameters())]


def values(model: Any) -> Losses:
    """The parameters of a wrapped model, in their order."""
    found = []
    for p in model.parameters():
        with infinity.gathered(p):
            found.append(p.detach().clone())
    return found


def built(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    params = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(params, lr=1e-2, eps=1e-2)


def wrapped(folder: Path, make: Callable[[], nn.Module] = HeadModel, **settings: Any) -> tuple[Any, Any]:
    return infinity.wrap(*built(make), config_for(folder, **settings))


def budgeted(make: Callable[[], nn.Module], folder: Path, budget: str, **settings: Any) -> infinity.Config:
    config = config_for(folder, **{"device_memory": "64MiB", **settings})
    if budget == "least":
        config = config.replace(device_memory=least(lambda: built(make)[0], config, "device_memory"))
    return config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("budget", "where"),
    quick(itertools.product(["least", "large"], ["host", "nvme"]), [("least", "nvme"), ("large", "host")]),
)
@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_used_outside_its_own_module(name: str, budget: str, where: str, tmp_path: Path) -> None:
    make = MODELS[name]
    wanted = by_torch(make)
    config = budgeted(
        make, tmp_path, budget, **dict.fromkeys(("parameters", "optimizer_state", "gradients"), where)
    )
    for update in ("sync", "overlap"):
        model, optimizer = built(make)
        model, optimizer = infinity.wrap(model, optimizer, config.replace(update=update))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(refer to|units are used at once).*", RuntimeWarning)
            assert_close([*train(model, optimizer), *values(model)], wanted)
        infinity.close(model)


def padded(model: nn.Module, step: int) -> torch.Tensor:
    """The output of a transformer of torch's for (2, 3, WIDTH), the last place of which is padding."""
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step))
    padding = torch.tensor([[False, False, False], [False, False, True]])
    if isinstance(model, nn.MultiheadAttention):
        return model(x, x, x, key_padding_mask=padding)[0]  # type: ignore[no-any-return]
    if isinstance(model, nn.Transformer):
        return model(x, x, src_key_padding_mask=padding)  # type: ignore[no-any-return]
    return model(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


FAST: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "an encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 3), None),
    "an encoder, cut below its layers": (lambda: nn.TransformerEncoder(encoder_layer(), 3), ["Linear"]),
    "a layer, cut": (encoder_layer, ["Linear", "LayerNorm"]),
    "attention, cut": (lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True), ["out_proj"]),
    "encoder and decoder": (
        lambda: nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
        None,
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", FAST)
def test_torch_finds_its_fast_paths(name: str, tmp_path: Path) -> None:
    """A forward of torch's own looks, before it calls them, at the weights of modules below it. A fast path
    of it has zeros where the input is padded."""
    make, units = FAST[name]

    def run(model: Any, optimizer: Any) -> Losses:
        found = []
        for step in range(2):
            loss = padded(model.train(), step).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            for _ in range(2):
                with torch.no_grad():
                    found.append(padded(model.eval(), 7))
        return found

    wanted = run(*built(make))
    first = None
    for where, budget in (("nvme", "least"), ("host", "large"), ("device", "large")):
        rest = "host" if where == "device" else where
        places = {"parameters": where, "optimizer_state": rest, "gradients": rest}
        config = budgeted(make, tmp_path, budget, **places, units=units)
        model, optimizer = infinity.wrap(*built(make), config)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # no more at once than planned
            found = run(model, optimizer)
        assert_close(found, wanted)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        infinity.close(model)


def test_what_is_used_outside_its_module_is_fetched_ahead_from_the_second_round_on(tmp_path: Path) -> None:
    """As often as in a model that calls its head."""
    missed = {}
    for make in (HeadModel, FusedModel, CutByAttributeModel):
        model, optimizer = built(make)
        config = budgeted(make, tmp_path, "least")
        room = 4 * 2 * WIDTH * (WIDTH + 1) * 4  # of four linear layers
        model, optimizer = infinity.wrap(
            model, optimizer, config.replace(device_memory=int(config.device_memory or 0) + room)
        )
        engine, counts = engine_of(model), []
        for _ in range(2):
            train(model, optimizer)
            counts.append(engine.residency.missed)
        head = next(u.index for u in engine.units if u.layout.name.endswith("head"))
        assert engine.residency.schedule.recorded().count(head) >= 1
        missed[make] = counts[1] - counts[0]
        infinity.close(model)
    assert max(missed.values()) <= missed[HeadModel] + 2, missed


def test_outside_of_a_forward_it_is_an_error_with_a_cure_that_works(tmp_path: Path) -> None:
    def program(model: Any, gather: Callable[[Any], Any]) -> torch.Tensor:
        x = model.hidden(tokens(0)) if not gather else hidden(model, tokens(0))
        with gather(model.lm_head) if gather else nullcontext():
            loss = CutByAttribute.apply(x, model.lm_head.weight, tokens(0))
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def hidden(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ReleasedParameterError, match=r"gathered\(params\)"):
            CutByAttribute.apply(torch.randn(12, WIDTH), model.lm_head.weight, batch)
        return model.hidden(batch)  # type: ignore[no-any-return]

    model, optimizer = built(FusedModel)
    wanted = [program(model, None), *(p.grad for p in model.parameters())]  # type: ignore[arg-type]
    config = budgeted(FusedModel, tmp_path, "least")
    model, optimizer = built(FusedModel)
    model, optimizer = infinity.wrap(model, optimizer, config)
    found = [program(model, infinity.gathered), *(infinity.gradient(p) for p in model.parameters())]
    infinity.close(model)
    assert_close(found, wanted)  # type: ignore[arg-type]


def test_addresses_that_a_forward_asks_for_hold_until_its_scope_ends(tmp_path: Path) -> None:
    """Also over the least budget: nobody can count them."""

    class Addresses(TwoAddresses):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.one.weight.sum()
            n, places = CLASSES * WIDTH, [self.one.weight.data_ptr(), self.two.weight.data_ptr()]
            self.blocks[0].up.weight.sum()
            parts = [
                torch.frombuffer((ctypes.c_float * n).from_address(p), dtype=torch.float32) for p in places
            ]
            return parts[0] - parts[1]

    model, optimizer = built(Addresses)
    wanted = model(tokens(0)).clone()
    model, _ = infinity.wrap(model, optimizer, budgeted(Addresses, tmp_path, "least"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*units are used at once.*", RuntimeWarning)
        for _ in range(2):
            assert torch.equal(model(tokens(0)).clone(), wanted)
    engine = engine_of(model)
    assert not any(u.in_use for u in engine.units)
    infinity.close(model)


# -- operators that edit a scope's input ---------------------------------------------------------


class Editing(nn.Module):
    """x (batch, width) → the same; `how` edits x."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.out, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "first":
            return self.out(self.lin(self.relu(x)))
        if self.how == "twice":
            return self.out(x.add_(0.5).mul_(1.5)) + x
        if self.how == "added":
            x += self.lin(x.clone())
            return self.out(x)
        if self.how == "part":
            x[:, : WIDTH // 2] *= 2
            return self.out(self.lin(x))
        return self.relu(x)  # "returned": what it returns is what it was given


class EditingNet(nn.Module):
    """The inputs of blocks are used after them, too, as edited."""

    def __init__(self, how: str, view: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Editing(how) for _ in range(LAYERS))
        self.tail, self.view = nn.Linear(WIDTH, CLASSES), view
        self.watch: Callable[[int], None] = lambda block: None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for i, block in enumerate(self.blocks):
            x.register_hook(lambda grad, i=i: self.watch(i))  # just before what the block is given
            x = x * 0.5
            if self.view:
                x = x.view(2, -1, WIDTH).flatten(0, 1)
            x = block(x) + 0.5 * x
        return F.cross_entropy(self.tail(x), tokens)


@pytest.mark.parametrize("view", quick([False, True], [True]))
@pytest.mark.parametrize("how", ["first", "twice", "added", "part", "returned"])
def test_an_operator_that_edits_a_scopes_input(how: str, view: bool, tmp_path: Path) -> None:
    """As in torch; and each unit is let go of when its own backward ends."""

    def make() -> nn.Module:
        return EditingNet(how, view)

    model, optimizer = built(make)
    wanted = [*train(model, optimizer), *(p.detach() for p in model.parameters())]
    for budget in ("least", "large"):
        model, optimizer = built(make)
        model, optimizer = infinity.wrap(model, optimizer, budgeted(make, tmp_path, budget))
        engine, kept = engine_of(model), []

        def watch(block: int, engine: Any = engine, kept: list[Any] = kept) -> None:
            kept.extend(u.layout.name for u in engine.units if u.users and f"s.{block}" in u.layout.name)

        model.watch = watch
        assert_close([*train(model, optimizer), *values(model)], wanted)
        assert not kept
        assert engine.residency.peak <= engine.footprint.working_nbytes + engine.footprint.prefetch_nbytes
        infinity.close(model)


def test_edits_of_inputs_that_torch_refuses_are_refused(tmp_path: Path) -> None:
    model, optimizer = built(lambda: Editing("first"))
    plain, _ = built(lambda: Editing("first"))
    model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path))
    leaf = torch.randn(6, WIDTH, requires_grad=True)
    for x in (lambda: leaf, lambda: leaf[:3], lambda: (leaf * 1).split(3)[0]):
        for net in (plain, model):
            with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad|multiple views"):
                net(x())
    for net in (plain, model):
        y = (leaf * 1).exp()  # keeps its result
        net(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    infinity.close(model)


# -- calls that change nothing, or look at a wrapped model as at a plain one ----------------------


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
def test_casts_and_moves_that_change_nothing_work(parameters: str, tmp_path: Path) -> None:
    """What Lightning's teardown calls; others are refused, and training goes on."""
    model, optimizer = wrapped(tmp_path, parameters=parameters)
    model(tokens(0)).backward()
    for same in (
        *(model.cpu, model.float, lambda: model.to("cpu"), lambda: model.to(torch.float32)),
        *(lambda: model.type(torch.float32), lambda: model.to(tokens(0).float())),
        lambda: model.type("torch.FloatTensor"),
    ):
        assert same() is model
    with pytest.raises((ParameterChangedError, GradientError)):
        model.share_memory()
    optimizer.step()
    optimizer.zero_grad()
    if parameters != "device":
        for other in (model.half, model.double, model.bfloat16, lambda: model.to(torch.float16)):
            with pytest.raises(ParameterChangedError, match="after `wrap`"):
                other()
    wanted, plain = built(HeadModel)
    train(wanted, plain, 1)
    model(tokens(1)).backward()
    assert_close(values(model), [p.detach() for p in wanted.parameters()])
    infinity.close(model)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("gradients", ["device", "host", "nvme"])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
def test_clip_grad_value(update: str, gradients: str, foreach: bool | None, tmp_path: Path) -> None:
    def run(model: Any, optimizer: Any, gradient: Any) -> Losses:
        found = []
        for step in range(3):
            model(tokens(step)).backward()
            model(tokens(step + 10)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.002, foreach=foreach)
            found += [gradient(p) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    model, optimizer = built(HeadModel)
    wanted = [*run(model, optimizer, lambda p: p.grad.clone()), *(p.detach() for p in model.parameters())]
    model, optimizer = wrapped(tmp_path, gradients=gradients, update=update)
    assert_close([*run(model, optimizer, infinity.gradient), *values(model)], wanted)
    infinity.close(model)


def test_clip_grad_value_hides_no_overflow(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, dtype="fp16", loss_scale=2.0**24)
    optimizer.scale(model(tokens(0)) * 1e6).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    infinity.close(model)


def test_a_second_fp16_step_on_the_same_gradients(tmp_path: Path) -> None:
    """As with one whose gradients stay; an unscaled backward is found as before."""
    results = []
    for dtype in ("fp32", "fp16"):
        model, optimizer = wrapped(tmp_path, dtype=dtype, loss_scale=128.0)
        optimizer.scale(model(tokens(0))).backward()
        optimizer.step()
        optimizer.step()
        results.append([v.float() for v in values(model)])
        if dtype == "fp16":
            model(tokens(1)).backward()
            with pytest.raises(PrecisionError, match="not scaled"):
                optimizer.step()
        infinity.close(model)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_copies_of_a_wrapped_model_say_what_to_do_instead(parameters: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, parameters=parameters)
    train(model, optimizer)
    state = model.state_dict()
    for copy_of in (copy.deepcopy, pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
        for thing in (model, model.blocks, model.head, optimizer):
            if parameters == "device" and copy_of is copy.deepcopy and thing is not optimizer:
                continue  # the values are there
            with pytest.raises(ParameterError, match="state_dict"):
                copy_of(thing)
    plain, _ = built(HeadModel)
    plain.load_state_dict(state)  # the first cure
    assert_close([p.detach() for p in plain.parameters()], values(model))
    found = values(model)
    infinity.unwrap(model)  # the second
    infinity.close(model)  # as in a `finally`
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert_close([p.detach() for p in copied.parameters()], found)
        train(copied, torch.optim.AdamW(copied.parameters()))


def test_gathered_takes_parameters_of_several_models(tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
    student, _ = wrapped(tmp_path / "student")
    teacher, _ = wrapped(tmp_path / "teacher", HolderModel)
    pairs = list(zip(student.blocks.parameters(), teacher.blocks.parameters(), strict=True))
    with infinity.gathered([p for pair in pairs for p in pair], write=True), torch.no_grad():
        for p, q in pairs:
            p.add_(1)
            q.lerp_(p, 0.5)
    for p, q in pairs:
        with infinity.gathered([p, q]):
            p.detach(), q.detach()
    one, two = built(HeadModel)[0], built(HolderModel)[0]
    for p, q in zip(one.blocks.parameters(), two.blocks.parameters(), strict=True):
        p.data.add_(1)
        q.data.lerp_(p.data, 0.5)
    assert_close(values(student), [p.detach() for p in one.parameters()])
    assert_close(values(teacher), [p.detach() for p in two.parameters()])
    infinity.close(student)
    infinity.close(teacher)


def test_lazy_modules_are_refused_and_the_cure_works(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(WrapError, match=r"model\(batch\)"):
        infinity.wrap(model, optimizer, config_for(tmp_path))
    batch = torch.randn(2, 3)
    with torch.no_grad():
        model(batch)
    model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path))  # type: ignore[assignment]
    model(batch).sum().backward()
    optimizer.step()
    infinity.close(model)


@pytest.mark.parametrize("budget", ["least", "large"])
def test_torch_func_through_a_wrapped_model(budget: str, tmp_path: Path) -> None:
    """Of inputs it works; for parameters the error names what does, and that works."""

    def make() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(LAYERS)))

    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))

    def of_inputs(model: Any) -> Losses:
        gradient = torch.func.grad(lambda y: model(y).square().sum())
        return [
            *(gradient(x), torch.func.vjp(model, x)[1](x)[0], torch.func.jvp(model, (x,), (x,))[1]),
            *(torch.func.vmap(gradient)(x), torch.func.vmap(model)(x)),
        ]

    plain, _ = built(make)
    wanted = of_inputs(plain)
    names = dict(plain.named_parameters())

    def loss(params: Any, model: Any) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    by_name = torch.func.grad(loss)({n: p.detach() for n, p in names.items()}, plain)
    model, _ = infinity.wrap(*built(make), budgeted(make, tmp_path, budget))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(refer to|units are used at once).*", RuntimeWarning)
        assert_close(of_inputs(model), wanted)
    with infinity.gathered(model):
        params = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ParameterChangedError, match=r"torch.autograd.grad\(loss, parameters\)"):
        torch.func.grad(loss)(params, model)
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert_close(list(found), list(by_name.values()))
    infinity.close(model)


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_the_optimizer_from_before_wrap_says_which_to_use(parameters: str, tmp_path: Path) -> None:
    model, old = built(HeadModel)
    model, optimizer = infinity.wrap(model, old, config_for(tmp_path, parameters=parameters))
    model(tokens(0)).backward()
    for other in (old, torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=1.0)):
        with pytest.raises(WrapError, match=r"optimizers=\(optimizer, scheduler\)"):
            other.step()
    for call in (old.state_dict, lambda: old.load_state_dict(optimizer.state_dict())):
        with pytest.raises(WrapError, match="the optimizer that `wrap` returned"):
            call()
    for set_to_none in (False, True):  # means the same
        old.zero_grad(set_to_none)
        for p in model.parameters():
            assert (p.grad is None) == set_to_none
            assert set_to_none or not infinity.gradient(p).any()
    assert_close([*train(model, optimizer), *values(model)], [*train(*built(HeadModel)), *trained()])
    infinity.close(model)


def trained() -> Losses:
    model, optimizer = built(HeadModel)
    train(model, optimizer)
    return [p.detach() for p in model.parameters()]


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    address = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=address)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("parameters", ["device", "nvme"])
def test_distributed_wrappers_are_refused_on_either_side(
    parameters: str, process_group: Any, tmp_path: Path
) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    config = config_for(tmp_path, parameters=parameters)
    model, optimizer = built(HeadModel)
    around: Any = DistributedDataParallel(model)
    with pytest.raises(WrapError, match=r"model\.module"):
        infinity.wrap(around, optimizer, config)
    model, optimizer = infinity.wrap(around.module, optimizer, config)  # the cure
    with pytest.raises(WrapError, match="DistributedDataParallel around a wrapped model"):
        DistributedDataParallel(model)
    assert_close([*train(model, optimizer), *values(model)], [*train(*built(HeadModel)), *trained()])
    infinity.close(model)

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    sharded, _ = built(HeadModel)
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(WrapError, match="DTensor"):
        infinity.wrap(sharded, torch.optim.AdamW(sharded.parameters()), config)
    if parameters == "nvme":
        model, _ = wrapped(tmp_path)
        with pytest.raises(ReleasedParameterError, match="train it as it is"):
            fully_shard(model, mesh=mesh)
        infinity.close(model)


# -- state dicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
@pytest.mark.parametrize("update", ["overlap", "delayed"])
def test_tied_parameters_share_storage_in_a_state_dict(update: str, parameters: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(
        tmp_path, TiedFusedModel, parameters=parameters, update=update, delay_warmup_steps=0
    )
    train(model, optimizer)
    state, again = model.state_dict(), model.state_dict()
    tied, other = state["wte.weight"], state["lm_head.weight"]
    assert tied.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert_close([tied, again["wte.weight"]], [values(model)[0]] * 2)
    if parameters != "device":
        tied.zero_()  # a copy
        assert not other.any()
        assert again["lm_head.weight"].any()
        with pytest.raises(ParameterChangedError, match=r"'wte\.weight'"):
            model.state_dict()
        assert model.state_dict()["lm_head.weight"].any()
    assert set(model.lm_head.state_dict()) == {"weight"}
    infinity.close(model)


def test_a_submodules_state_dict_is_charged_for_itself_alone(tmp_path: Path) -> None:
    model, _ = wrapped(tmp_path, TiedFusedModel)
    states, asked = engine_of(model).states, []
    make_room = states.make_room
    states.make_room = lambda params: asked.append({s.name for s in params}) or make_room(params)
    block, names = model.blocks[0], {n for n, _ in model.named_parameters()}
    for module in (model, block, block.up, model.wte):
        module.state_dict(prefix="some.where.")
    assert asked == [
        names,
        *({n for n in names if n.startswith(f"blocks.0.{part}")} for part in ("", "up.")),
        {"wte.weight"},
    ]
    infinity.close(model)


@pytest.mark.parametrize("parameters", ["host", "nvme"])
def test_leases_that_nobody_needs_give_way_to_a_state_dict(parameters: str, tmp_path: Path) -> None:
    """At a budget that leases fill: what read-ahead and pipelines do without is lent for as long as the
    copies live, in whatever form; training goes on beside them with the same values."""
    config = config_for(tmp_path, parameters=parameters, optimizer_state="nvme", gradients="nvme")
    model, _ = infinity.wrap(*built(HeadModel), config)
    most = engine_of(model).footprint.total(Tier.HOST)
    infinity.close(model)
    model, optimizer = infinity.wrap(*built(HeadModel), config.replace(host_memory=most))
    pool = engine_of(model).pool
    assert engine_of(model)._room() == 0
    train(model, optimizer)
    model(tokens(7)).backward()  # reads ahead
    state = model.state_dict()
    part, copied = state["head.weight"][1:].view(-1), {n: v.clone() for n, v in state.items()}
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in state.values())
    used = sum(q.in_use for q in pool.stats().values())
    assert used >= sum(v.nbytes for v in state.values())
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    assert all(torch.equal(state[n], v) for n, v in copied.items())
    leaf = model.blocks[0].norm.state_dict()
    assert_close(list(leaf.values()), [p for p in values(model.blocks[0].norm)])
    del state, leaf
    train(model, optimizer)  # takes them home, but one
    assert torch.equal(part, copied["head.weight"][1:].view(-1))
    del part
    found = [*train(model, optimizer), *values(model)]
    pool.stats()  # takes home what came back since
    assert not any(q.borrowed for q in pool._quotas.values())
    infinity.close(model)

    model, optimizer = built(HeadModel)
    train(model, optimizer)
    model(tokens(7)).backward()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    train(model, optimizer)
    assert_close(found, [*train(model, optimizer), *(p.detach() for p in model.parameters())])


def test_a_state_dict_outlives_its_engine(tmp_path: Path) -> None:
    model, _ = wrapped(tmp_path)
    most = engine_of(model).footprint.total(Tier.HOST)
    infinity.close(model)
    model, _ = wrapped(tmp_path, host_memory=most)
    state = model.state_dict()
    infinity.close(model)
    del model
    gc.collect()
    assert_close(list(state.values()), [p.detach() for p in built(HeadModel)[0].parameters()])


# -- unwrap -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_unwrap_gives_a_plain_model_back(dtype: str, update: str, parameters: str, tmp_path: Path) -> None:
    """The same objects, with the masters' values; and it may be wrapped again, and goes on as if it had
    never been unwrapped."""
    settings = {"parameters": parameters, "dtype": dtype, "update": update, "delay_warmup_steps": 1}
    make = CutModel
    model, optimizer = wrapped(tmp_path, make, **settings)
    params, threads = list(model.parameters()), threading.active_count()
    train(model, optimizer)
    model(tokens(5)).backward()
    state = optimizer.state_dict()
    masters = (
        [state["state"][i].get("master") for i in range(len(params))] if dtype == "bf16" else values(model)
    )
    assert infinity.unwrap(model) is model
    assert threading.active_count() < threads
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    for p, wanted in zip(params, masters, strict=True):
        assert (type(p), p.is_leaf, p.requires_grad, p.grad) == (nn.Parameter, True, True, None)
        assert p.dtype is torch.float32
        assert torch.equal(p, wanted)
    for thing in (optimizer.step, lambda: optimizer.state_dict()):
        with pytest.raises(ClosedError, match="wrap the model again"):
            thing()
    with pytest.raises(WrapError):
        infinity.metrics(optimizer)
    plain = copy.deepcopy(model)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-2))

    old = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    model, optimizer = infinity.wrap(model, old, config_for(tmp_path, **settings))
    optimizer.load_state_dict(state)
    losses = train(model, optimizer)
    found = values(model)
    infinity.unwrap(model)
    model, optimizer = wrapped(tmp_path, make, **settings)
    train(model, optimizer)
    infinity.flush(optimizer)
    assert_close([*losses, *found], [*train(model, optimizer), *values(model)])
    infinity.close(model)


def test_unwrap_lets_the_old_optimizer_step_again(tmp_path: Path) -> None:
    model, old = built(HeadModel)
    infinity.unwrap(infinity.wrap(model, old, config_for(tmp_path))[0])
    assert old.state_dict()["state"] == {}
    assert_close(
        [*train(model, old), *(p.detach() for p in model.parameters())],
        [*train(*built(HeadModel)), *trained()],
    )


def test_unwrap_inside_gathered_is_refused_and_a_graph_from_before_fails(tmp_path: Path) -> None:
    model, _ = wrapped(tmp_path)
    with infinity.gathered(model.head), pytest.raises(ParameterError, match="leave `with"):
        infinity.unwrap(model)
    loss = model(tokens(0))
    infinity.unwrap(model)
    with pytest.raises(ClosedError, match=r"use it as the plain model"):
        loss.backward()
    model(tokens(0)).backward()  # the cure


def test_after_close_the_cures_work(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    train(model, optimizer)
    saved, found = model.state_dict(), values(model)
    infinity.close(model)
    with pytest.raises(ClosedError, match="build the model anew, load what was saved"):
        model(tokens(0))
    with pytest.raises(WrapError, match=r"infinity.unwrap\(model\)"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    with pytest.raises(ClosedError, match="build the model anew and load"):
        infinity.unwrap(model)
    model, optimizer = built(HeadModel)
    model.load_state_dict(saved)
    model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path))
    assert_close(values(model), found)
    train(model, optimizer)
    infinity.close(model)


@pytest.mark.parametrize("update", ["overlap", "delayed"])
def test_what_is_on_the_device_is_still_there_after_close(update: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, parameters="device", update=update, delay_warmup_steps=0)
    train(model, optimizer)
    found = values(model)
    infinity.close(model)
    infinity.unwrap(model)
    assert_close([p.detach() for p in model.parameters()], found)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    train(model, optimizer)
    infinity.close(model)


_TOO_LARGE = """
import sys, torch, infinity
from torch import nn
config = infinity.Config(nvme=sys.argv[1], device="cpu", dtype="fp32", device_memory="64MiB",
                         host_memory="120MiB", parameters="nvme", optimizer_state="nvme", gradients="nvme",
                         read_ahead_memory=0)
with infinity.init(config):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
try:
    infinity.unwrap(model)
except infinity.InfinityError as error:
    print(type(error).__name__, error)
with infinity.gathered(model[3].weight):
    first = model[3].weight.detach().clone()
assert torch.equal(model[3].state_dict()["weight"], first)  # the cure: part by part
model(torch.randn(2, 2048)).sum().backward()
optimizer.step()
infinity.close(model)
print("done")
"""


@pytest.mark.slow
def test_unwrap_where_there_is_no_room_changes_nothing(tmp_path: Path) -> None:
    result = run_limited(_TOO_LARGE, str(tmp_path), limit=440 * MiB, timeout=120)
    assert result.rc == 0, result.stderr
    assert "BudgetError the parameters do not fit the host memory that is free" in result.stdout
    assert "part by part" in result.stdout
    assert "done" in result.stdout


def test_a_copy_of_gathered_modules_has_their_values(tmp_path: Path) -> None:
    """Such as one that is kept as an average."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap(model, adam, config_for(tmp_path))
    try:
        with infinity.gathered(model):
            average, whole = copy.deepcopy(model[1]), copy.deepcopy(model)
        with pytest.raises(ReleasedParameterError, match="state_dict"):
            copy.deepcopy(model[1])
        wanted = model.state_dict()
        assert torch.equal(average.weight, wanted["1.weight"])
        assert torch.equal(average.bias, wanted["1.bias"])
        assert torch.equal(whole(torch.ones(2, 8)), model(torch.ones(2, 8)))
        assert all(torch.equal(v, wanted[n]) for n, v in whole.state_dict().items())
    finally:
        infinity.close(optimizer)


class Scaled(nn.Parameter):
    """A parameter with a method and an attribute of its own."""

    factor = 3

    def scaled(self) -> torch.Tensor:
        return self * self.factor


class Counted(Scaled):
    """One that looks at every operator."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.seen += func is torch.Tensor.mul or func is torch.Tensor.__mul__
        return super().__torch_function__(func, types, args, kwargs or {})


class Last(nn.Parameter):
    """One that nobody may derive from."""

    def __init_subclass__(cls) -> None:
        raise TypeError("this is the last")


class OfClass(nn.Module):
    """A head whose parent uses the weight, one of the classes above."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 16)
        self.head.weight = kind(self.head.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        weight: Any = self.head.weight
        return nn.functional.linear(x, weight.scaled(), self.head.bias)


@pytest.mark.parametrize("parameters", ["nvme", "device"])
@pytest.mark.parametrize("kind", [Scaled, Counted])
def test_parameters_of_a_users_class_stay_that(kind: type[Scaled], parameters: str, tmp_path: Path) -> None:
    found = []
    for offloaded in (False, True):
        model: Any = OfClass(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model.head.weight.tag = "mine"
        if offloaded:
            model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path, parameters=parameters))
        seen = Counted.seen
        for step in range(3):
            assert isinstance(model.head.weight, kind)
            assert (model.head.weight.tag, model.head.weight.factor) == ("mine", 3)
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            assert isinstance(model.head.weight, kind)
            optimizer.zero_grad()
        found.append(({n: v.clone() for n, v in model.state_dict().items()}, Counted.seen - seen))
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], value, rtol=1e-5, atol=1e-6)
    assert type(infinity.unwrap(model).head.weight) is kind


def test_parameters_of_a_class_that_cannot_be_derived_from_are_refused(tmp_path: Path) -> None:
    model = OfClass(Last)
    with pytest.raises(WrapError, match="this is the last"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    assert type(model.head.weight) is Last
    model.head.weight = nn.Parameter(model.head.weight.detach())
    infinity.close(infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))[0])
