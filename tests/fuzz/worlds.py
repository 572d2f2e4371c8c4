"""The two worlds that a program runs in: plain torch with fp32 masters, and the engine.

Both answer the same calls, so that a program is written once. Gradients are fp32, unscaled; what a world
cannot do raises there, and the comparison sees the difference.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.core.errors import BudgetError, StateDictError
from infinity.optim.lion import Lion

from .. import inner
from ..masters import DTYPES, Masters
from ..reference import cast
from .build import Json, Root, build


def groups_of(model: nn.Module, config: Json) -> list[Json]:
    params = [p for p in model.parameters()]
    if config["groups"] == 1:
        return [{"params": params, "weight_decay": 0.1}]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def patterns_of(model: nn.Module, config: Json) -> list[str]:
    """Return those of the patterns for moments in fp32 that match something."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return [pattern for pattern in config["state_fp32"] if any(fnmatchcase(n, pattern) for n in names)]


def make_optimizer(model: nn.Module, config: Json) -> torch.optim.Optimizer:
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "AdamW": partial(torch.optim.AdamW, foreach=False),
        "Adam": partial(torch.optim.Adam, foreach=False),
        "SGD": torch.optim.SGD,
        "momentum": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
        "Adagrad": torch.optim.Adagrad,
        "Lion": Lion,
    }
    return kinds[config["optimizer"]](groups_of(model, config), lr=1e-3)


class World:
    """What both have."""

    offloaded: bool
    model: Root
    config: Json
    aliases: dict[str, Any]
    saved: dict[str, Any]

    def __init__(self) -> None:
        self.aliases, self.saved = {}, {}

    def named(self, *, trainable: bool = False) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad or not trainable}


class PlainWorld(World):
    """Plain torch: parameters in the compute dtype, fp32 masters beside them, one-step delay if asked for."""

    offloaded = False

    def __init__(self, tree: Json, config: Json, seed: int) -> None:
        super().__init__()
        self.tree = tree
        self.start(config, seed)

    def start(self, config: Json, seed: int) -> None:
        """Begin anew with another model."""
        self.config = config
        self.dtype = DTYPES[config["dtype"]]
        self.model = build(self.tree, seed)
        self.optimizer = make_optimizer(self.model, config)
        self.masters = Masters(
            *(self.model, self.optimizer, self.dtype),
            split=config["split_master"],
            form=config["state_dtype"],
            exact=config["state_fp32"],
        )
        self.names = {p: n for n, p in self.masters.params.items()}
        self.learns = {p for p in self.model.parameters() if p.requires_grad}
        self.sums: dict[Any, torch.Tensor] = {}
        self.factors: dict[Any, float] = {}
        self.scale_now = config["loss_scale"] if self.dtype is torch.float16 else 1.0
        self.good = self.steps = 0
        self.norm = float("nan")
        self.resumed = False  # the optimizer has loaded a state, and no step came after it
        self.past: dict[Any, torch.Tensor] = {}
        self.late: dict[Any, torch.Tensor] = {}  # newer values than those that training uses
        if self.dtype is not torch.float32:
            for p in self.learns:
                p.register_post_accumulate_grad_hook(self._collect)
            self.model.register_forward_pre_hook(
                lambda _, args, kwargs: (cast(args, self.dtype), cast(kwargs, self.dtype)), with_kwargs=True
            )

    def _collect(self, p: torch.Tensor) -> None:
        grad = p.grad
        if grad is None:  # of an input that a recomputation did not use
            return
        old = self.sums.get(p)
        self.sums[p] = grad.float() if old is None else old + grad.float()
        p.grad = None

    # -- the loop

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale_now if self.dtype is torch.float16 else loss

    def raw(self, p: Any) -> torch.Tensor | None:
        """The gradient with the loss scale and without factors, fp32."""
        return p.grad.detach() if self.dtype is torch.float32 and p.grad is not None else self.sums.get(p)

    def gradient(self, p: Any) -> torch.Tensor | None:
        raw = self.raw(p)
        return None if raw is None else raw.float() * self.factors.get(p, 1.0) / self.scale_now

    def take_grads(self, params: Iterable[Any]) -> dict[Any, Any]:
        """Take the gradients away and return them, as `p.grad` objects or what stands for them."""
        out: dict[Any, Any] = {}
        for p in params:
            out[p] = p.grad if self.dtype is torch.float32 else self.sums.pop(p, None)
            p.grad = None
        return out

    def put_grad(self, p: Any, grad: Any) -> None:
        if self.dtype is torch.float32:
            p.grad = grad
        elif grad is None:
            self.sums.pop(p, None)
        else:
            self.sums[p] = grad

    def zero_grad(self, how: str) -> None:
        if how == "zeros" and self.dtype is not torch.float32:
            self.sums = {p: torch.zeros_like(g) for p, g in self.sums.items()}
        elif how == "zeros":
            self.optimizer.zero_grad(set_to_none=False)
        else:
            self.optimizer.zero_grad()
            self.sums.clear()
        self.factors.clear()

    def _norm(self) -> float:
        grads = [(g, self.factors.get(p, 1.0)) for p in self.learns if (g := self.raw(p)) is not None]
        return math.sqrt(sum(float((g.double() * f).square().sum()) for g, f in grads)) / self.scale_now

    def clip(self, limit: float, *, torchs: bool) -> float:
        norm = self._norm()
        factor = min(1.0, limit / (norm + 1e-6)) if norm == norm else norm
        if torchs:
            # Each gradient's norm is of squares summed in double, as ours is; what torch makes of these
            # is its own, in fp32. A bit of the factor more or less would show in low precision.
            grads = [g for p in self.model.parameters() if (g := self.gradient(p)) is not None]
            norms = [torch.linalg.vector_norm(g.double()).float() for g in grads]
            total = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))
            norm, factor = float(total), float(torch.clamp(limit / (total + 1e-6), max=1.0))
        for p in self.learns:
            if self.raw(p) is not None:
                self.factors[p] = self.factors.get(p, 1.0) * factor
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        self._step()
        return loss

    @torch.no_grad()
    def _step(self) -> None:
        self.norm = self._norm()
        self.resumed = False
        self._publish()
        fp16 = self.dtype is torch.float16
        if (fp16 or self.config.get("skip_nonfinite")) and not math.isfinite(self.norm):
            if fp16:
                self.scale_now, self.good = max(self.scale_now / 2, 2.0**-14), 0
            return
        limit = self.config["max_grad_norm"]
        clip = 1.0 if limit is None else min(1.0, limit / (self.norm + 1e-6))
        delayed = self.config["update"] == "delayed" and self.steps >= self.config["warmup"]
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                raw = self.raw(p)
                if raw is None or p not in self.learns:
                    continue
                factor = self.factors.get(p, 1.0) * clip / self.scale_now
                self.masters.update(self.names[p], raw.float().contiguous(), factor)
                self._updated(p, delayed)
        self.steps += 1
        if self.dtype is torch.float16:
            self.good += 1
            if self.good == self.config["loss_scale_window"]:
                self.scale_now, self.good = min(self.scale_now * 2, 2.0**24), 0

    def _updated(self, p: Any, delayed: bool) -> None:
        self.past[p] = p.detach().clone()
        if delayed:
            self.late[p] = self.masters.values[self.names[p]].to(p.dtype)
            torch.autograd.graph.increment_version([p])
        else:
            p.copy_(self.masters.copy(self.names[p]))

    @torch.no_grad()
    def _publish(self) -> None:
        for p, value in self.late.items():
            self.past[p] = p.detach().clone()
            p.copy_(value)
        self.late.clear()

    def flush(self) -> None:
        self._publish()

    def info(self) -> dict[str, float]:
        return {"scale": self.scale_now, "norm": self.norm}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """`eval()` shows the newest values."""
        self.model.eval()
        with self._newest(), torch.no_grad():
            yield
        self.model.train()

    @contextlib.contextmanager
    def _newest(self) -> Iterator[None]:
        shown = {p: p.detach().clone() for p in self.late}
        for p, value in self.late.items():
            p.data.copy_(value)
        yield
        for p, value in shown.items():
            p.data.copy_(value)

    def beside(self, params: Any) -> Any:
        """Where the engine has gathered `params` meanwhile."""
        return contextlib.nullcontext()

    def showing_newest(self) -> Any:
        """What a graph made inside `gathered` goes backward with."""
        return self._newest()

    # -- values

    def newest(self, p: Any) -> torch.Tensor:
        return self.late.get(p, p.detach()).clone()

    def candidates(self, p: Any) -> list[torch.Tensor]:
        """What an alias of `p` may show: the value that counts, and where there are two versions, both."""
        old = self.past.get(p)
        return [self.newest(p), p.detach().clone(), *([] if old is None else [old])]

    @contextlib.contextmanager
    def gathered(self, params: Any, write: bool = False) -> Iterator[None]:
        if not write:
            with self._newest():
                yield
            return
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        self._publish()
        try:
            yield
        finally:
            for p in params:
                self.masters.take(self.names[p], p.detach())

    # -- state dicts

    def save_model(self) -> Json:
        with self._newest():
            return {k: v.clone() for k, v in self.model.state_dict().items()}

    @torch.no_grad()
    def load_model(self, saved: Json) -> None:
        """Raises what an engine does that would drop the older values that its optimizer has just loaded."""
        if self.resumed and self.late:
            raise StateDictError("the model comes before its optimizer, with delayed updates")
        self._publish()
        self.model.load_state_dict(saved)
        for name, p in self.masters.params.items():
            self.masters.take(name, p.detach(), loaded=True)

    def save_optimizer(self) -> Json:
        return {
            "masters": self.masters.saved(),
            "fronts": {self.names[p]: p.detach().clone() for p in self.learns if self.late},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "scale": (self.scale_now, self.good, self.steps),
        }

    @torch.no_grad()
    def load_optimizer(self, saved: Json) -> None:
        self._publish()
        masters, fronts = self.masters, saved["fronts"]
        values, masters.moments, masters.steps = copy.deepcopy(saved["masters"])
        for p in self.learns:
            name = self.names[p]
            if p.dtype is torch.float32 and name not in fronts:
                continue  # the copy is the master, and comes with the model
            masters.values[name].copy_(values[name])
            p.copy_(masters.copy(name))
        for name, front in fronts.items():
            self.late[masters.params[name]] = masters.params[name].detach().clone()
            masters.params[name].copy_(front)
        for group, old in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(old)
        scale, self.good, self.steps = saved["scale"]
        self.resumed = True
        if self.dtype is torch.float16:
            self.scale_now = scale

    def state_of(self, name: str) -> dict[str, torch.Tensor | None]:
        return {"master": self.masters.values[name], **self.masters.wide(name)}

    def close(self) -> None:
        pass


class OffloadedWorld(World):
    """The engine, by its public calls alone."""

    offloaded = True

    def __init__(self, tree: Json, config: Json, seed: int, folder: Path) -> None:
        super().__init__()
        self.tree, self.folder, self.count = tree, folder, 0
        self.start(config, seed)

    def start(self, config: Json, seed: int) -> None:
        """Begin anew with another model and engine."""
        self.config = config
        settings = self.settings(config, seed)
        if config["init"]:
            with infinity.init(settings):
                self.model = build(self.tree, seed)
        else:
            self.model = build(self.tree, seed)
        optimizer = make_optimizer(self.model, config)
        _, self.optimizer = infinity.wrap(self.model, optimizer, settings)

    def settings(self, config: Json, seed: int) -> Any:
        """Return a Config, with the least budgets where these are asked for."""
        folder = self.folder / str(self.count)
        folder.mkdir()
        self.count += 1
        given: Json = {
            "nvme": str(folder),
            "device": "cpu",
            "chunk_elements": 65536,
            "threads": 1,
            "dtype": config["dtype"],
            "parameters": config["parameters"],
            "optimizer_state": config["optimizer_state"],
            "optimizer_state_dtype": config["state_dtype"],
            "split_master": config.get("split_master", False),
            "skip_nonfinite": config.get("skip_nonfinite", False),
            "optimizer_state_fp32": patterns_of(build(self.tree, seed), config),
            "gradients": config["gradients"],
            "update": config["update"],
            "accumulation": 1 if config["update"] == "backward" else None,
            "delay_warmup_steps": config["warmup"],
            "update_depth": config["depth"],
            "max_grad_norm": config["max_grad_norm"],
            "activations": config["activations"],
            "loss_scale": config["loss_scale"],
            "loss_scale_window": config["loss_scale_window"],
            "read_ahead_memory": "4MiB" if config["read_ahead"] else 0,
            **({} if config["prefetch"] else {"prefetch_memory": 0}),
        }
        budgets = {"device_memory": 64 << 20, "host_memory": 64 << 20}
        for name in budgets:
            if config[name] != "large":
                least = self.least(given, {**budgets, name: 1}, name, seed)
                extra = 0 if config[name] == "least" else config["extra"]
                budgets[name] = least + extra
        return inner.config(**given, **budgets)

    def least(self, given: Json, budgets: Json, name: str, seed: int) -> int:
        """Return the least budget that is not refused: the one that the refusal of 1 byte names."""
        model = build(self.tree, seed)
        optimizer = make_optimizer(model, self.config)
        try:
            infinity.wrap(model, optimizer, inner.config(**given, **budgets))
            infinity.close(model)
            return 1
        except BudgetError as refused:
            return int(re.findall(r"\((\d+) bytes\)", refused.expected)[0])

    # -- the loop

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.optimizer.scale(loss)

    def gradient(self, p: Any) -> torch.Tensor | None:
        return infinity.gradient(p)

    def take_grads(self, params: Iterable[Any]) -> dict[Any, Any]:
        out = {}
        for p in params:
            out[p] = p.grad
            p.grad = None
        return out

    def put_grad(self, p: Any, grad: Any) -> None:
        p.grad = grad

    def zero_grad(self, how: str) -> None:
        if how == "zeros":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad()

    def clip(self, limit: float, *, torchs: bool) -> float:
        if torchs:
            return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        return float(self.optimizer.clip_grad_norm_(limit))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure)

    def flush(self) -> None:
        infinity.flush(self.model)

    def info(self) -> dict[str, float]:
        norm = self.optimizer.grad_norm
        return {"scale": self.optimizer.loss_scale, "norm": float("nan") if norm is None else norm}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()

    def beside(self, params: Any) -> Any:
        return self.gathered(params)

    def showing_newest(self) -> Any:
        return contextlib.nullcontext()

    # -- values

    def newest(self, p: Any) -> torch.Tensor:
        with infinity.gathered(p):
            return p.detach().clone()  # type: ignore[no-any-return]

    def candidates(self, p: Any) -> list[torch.Tensor]:
        return []

    def gathered(self, params: Any, write: bool = False) -> Any:
        return infinity.gathered(params, write=write)

    # -- state dicts

    def save_model(self) -> Json:
        try:
            return {k: v.clone() for k, v in self.model.state_dict().items()}
        except BudgetError:  # the least host memory holds no state dict
            values = {n: self.newest(p) for n, p in self.model.named_parameters(remove_duplicate=False)}
            return {**values, **{n: b.clone() for n, b in self.model.named_buffers()}}

    def load_model(self, saved: Json) -> None:
        self.model.load_state_dict(saved)

    def save_optimizer(self) -> Any:
        return self.optimizer.state_dict()

    def load_optimizer(self, saved: Any) -> None:
        self.optimizer.load_state_dict(saved)

    def state_of(self, name: str) -> dict[str, torch.Tensor | None]:
        if not hasattr(self, "_states"):
            self._states = self.optimizer.state_dict()["state"]
        params = [id(p) for g in self.optimizer.param_groups for p in g["params"]]
        state = self._states.get(params.index(id(self.named()[name])), {})
        return {k: state.get(k) for k in ("master", *self.optimizer.rule.moments)}

    def close(self) -> None:
        if self.config["ending"] == "close":
            infinity.close(self.model)
        else:
            self.aliases.clear()
            self.saved.clear()
            del self.model, self.optimizer
            gc.collect()
