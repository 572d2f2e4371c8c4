"""Any `nn.Module`: what plain torch takes, the engine takes, or says what to write instead."""

from __future__ import annotations

import ctypes
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
from infinity.core.errors import ReleasedParameterError
from infinity.surface.engine import engine_of

from .offloaded import config_for
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


def train(
    model: Any, optimizer: Any, steps: int = 3, after: Callable[[int], None] = lambda step: None
) -> Losses:
    losses = []
    for step in range(steps):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        after()
    return losses


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


def budgeted(make: Callable[[], nn.Module], folder: Path, budget: str, **settings: Any) -> infinity.Config:
    config = config_for(folder, **{"device_memory": "64MiB", **settings})
    if budget == "least":
        config = config.replace(device_memory=least(lambda: built(make)[0], config, "device_memory"))
    return config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize("budget", ["least", "large"])
@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_used_outside_its_own_module(name: str, budget: str, where: str, tmp_path: Path) -> None:
    make = MODELS[name]
    model, optimizer = built(make)
    wanted = [*train(model, optimizer), *(p.detach() for p in model.parameters())]
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
            x = x * 0.5
            if self.view:
                x = x.view(2, -1, WIDTH).flatten(0, 1)
            x.register_hook(lambda grad, i=i: self.watch(i))
            x = block(x) + 0.5 * x
        return F.cross_entropy(self.tail(x), tokens)


@pytest.mark.parametrize("view", [False, True])
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
