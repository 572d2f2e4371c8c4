"""The two worlds that a program runs in: plain torch with fp32 masters, and the engine.

Both answer the same calls, so that a program is written once. Gradients are fp32, unscaled; what a world
cannot do raises there, and the comparison sees the difference.
"""

from __future__ import annotations

import contextlib
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

from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import halves
from infinity.hardware.log_codes import decode
from infinity.planning.parts import SQUARES

from .build import Json, Root, build

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    from infinity.optim.lion import Lion

    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "AdamW": partial(torch.optim.AdamW, foreach=False),
        "Adam": partial(torch.optim.Adam, foreach=False),
        "SGD": torch.optim.SGD,
        "momentum": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
        "Adagrad": torch.optim.Adagrad,
        "Lion": Lion,
    }
    return kinds[config["optimizer"]](groups_of(model, config), lr=1e-3)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in dicts, lists and tuples, as the engine does with the root's inputs."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast(v, dtype) for v in value)
    return value


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
        from infinity.optim.rules import rule_of

        self.config = config
        self.dtype = DTYPES[config["dtype"]]
        self.model = build(self.tree, seed)
        self.masters = {p: p.detach().float().clone() for p in self.model.parameters()}
        self.learns = {p for p in self.model.parameters() if p.requires_grad}
        keep = {
            p
            for m in self.model.modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
            for p in m.parameters()
        }
        self.optimizer = make_optimizer(self.model, config)
        self.rule = rule_of(self.optimizer)
        self.moments: dict[Any, list[torch.Tensor]] = {}  # in the dtype in which the engine keeps them
        self.updates: dict[Any, int] = {}
        self.sums: dict[Any, torch.Tensor] = {}
        self.factors: dict[Any, float] = {}
        self.scale_now = config["loss_scale"] if self.dtype is torch.float16 else 1.0
        self.good = self.steps = 0
        self.norm = float("nan")
        self.resumed = False  # the optimizer has loaded a state, and no step came after it
        self.past: dict[Any, torch.Tensor] = {}
        self.late: dict[Any, torch.Tensor] = {}  # newer values than those that training uses
        if self.dtype is not torch.float32:
            for p in self.model.parameters():
                p.data = p.data.to(torch.float32 if p in keep else self.dtype)
                if self._is_split(p):
                    p.data = self._copy_of(p)
                if p.requires_grad:
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
        from infinity.hardware.adam_reference import reference_segments
        from infinity.hardware.cpu_adam import Segment, rounding_key

        names = {p: n for n, p in self.model.named_parameters()}
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
                self.updates[p] = self.updates.get(p, 0) + 1
                if p not in self.moments:
                    self.moments[p] = self._new_moments(names[p], p)
                factor = self.factors.get(p, 1.0) * clip / self.scale_now
                gradient = raw.float().contiguous().view(-1)
                segment = Segment(
                    *(0, p.numel(), 0, rounding_key(names[p], self.updates[p]), self.updates[p]),
                    *(group["lr"], group["weight_decay"]),
                    grad_scale=factor,
                    maximize=False,
                    options=self.rule.options(group),
                )
                reference_segments(self.masters[p].view(-1), self.moments[p], gradient, None, [segment])
                self._updated(p, delayed)
        self.steps += 1
        if self.dtype is torch.float16:
            self.good += 1
            if self.good == self.config["loss_scale_window"]:
                self.scale_now, self.good = min(self.scale_now * 2, 2.0**24), 0

    def _updated(self, p: Any, delayed: bool) -> None:
        self.past[p] = p.detach().clone()
        if delayed:
            self.late[p] = self.masters[p].to(p.dtype)
            torch.autograd.graph.increment_version([p])
        else:
            p.copy_(self._copy_of(p))

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
                self._adopt(p, p.detach())

    def _halves(self, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The halves of a split master."""
        copy, low = torch.empty(p.numel(), dtype=p.dtype), torch.empty(p.numel(), dtype=torch.int16)
        halves.split(self.masters[p].view(-1), copy, low)
        return copy, low

    def _copy_of(self, p: Any) -> torch.Tensor:
        return self._halves(p)[0].view(p.shape) if self._is_split(p) else self.masters[p]

    def _is_split(self, p: Any) -> bool:
        return bool(self.config.get("split_master")) and p.dtype is torch.bfloat16 and p in self.learns

    def _adopt(self, p: Any, value: torch.Tensor) -> None:
        master = self.masters[p]
        if self._is_split(p):
            flat, low = value.reshape(-1), self._halves(p)[1]
            low[(flat == 0) | ~flat.isfinite()] = 0
            halves.join(flat, low, master.view(-1))
            return
        kept = master.to(p.dtype) == value
        master.copy_(torch.where(kept, master, value.float()))

    # -- state dicts

    def save_model(self) -> Json:
        with self._newest():
            return {k: v.clone() for k, v in self.model.state_dict().items()}

    @torch.no_grad()
    def load_model(self, saved: Json) -> None:
        """Raises what an engine does that would drop the older values that its optimizer has just loaded."""
        from infinity.core.errors import StateDictError

        if self.resumed and self.late:
            raise StateDictError("the model comes before its optimizer, with delayed updates")
        self._publish()
        self.model.load_state_dict(saved)
        for p in self.model.parameters():
            if self._is_split(p):
                kept = self._copy_of(p) == p.detach()
                self.masters[p].copy_(torch.where(kept, self.masters[p], p.detach().float()))
            else:
                self._adopt(p, p.detach())

    def save_optimizer(self) -> Json:
        names = {p: n for n, p in self.model.named_parameters()}
        return {
            "masters": {names[p]: v.clone() for p, v in self.masters.items() if p in self.learns},
            "fronts": {names[p]: p.detach().clone() for p in self.learns if self.late},
            "moments": {names[p]: [m.clone() for m in of_one] for p, of_one in self.moments.items()},
            "updates": {names[p]: n for p, n in self.updates.items()},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "scale": (self.scale_now, self.good, self.steps),
        }

    @torch.no_grad()
    def load_optimizer(self, saved: Json) -> None:
        self._publish()
        named = self.named()
        for n, m in saved["masters"].items():
            if named[n].dtype is torch.float32 and n not in saved["fronts"]:
                continue  # the copy is the master, and comes with the model
            self.masters[named[n]].copy_(m)
            named[n].copy_(self._copy_of(named[n]))
        for n, front in saved["fronts"].items():
            self.late[named[n]] = named[n].detach().clone()
            named[n].copy_(front)
        self.moments = {named[n]: [m.clone() for m in of_one] for n, of_one in saved["moments"].items()}
        self.updates = {named[n]: u for n, u in saved["updates"].items()}
        for group, old in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(old)
        scale, self.good, self.steps = saved["scale"]
        self.resumed = True
        if self.dtype is torch.float16:
            self.scale_now = scale

    def state_of(self, name: str) -> dict[str, torch.Tensor | None]:
        p = self.named()[name]
        kinds, moments = self.rule.moments, self.moments.get(p)
        if moments is None:
            return {"master": self.masters[p], **dict.fromkeys(kinds)}
        if moments and moments[0].dtype is torch.uint8:
            pairs = zip(kinds, moments[: len(kinds)], moments[len(kinds) :], strict=True)
            wide = [decode(*kept, squares=kind in SQUARES) for kind, *kept in pairs]
        else:
            wide = [m.float() for m in moments]
        return {"master": self.masters[p], **dict(zip(kinds, wide, strict=True))}

    def _new_moments(self, name: str, p: Any) -> list[torch.Tensor]:
        numel = p.numel()
        exact = any(fnmatchcase(name, pattern) for pattern in self.config["state_fp32"])
        form = "fp32" if exact else self.config["state_dtype"]
        count = len(self.rule.moments)
        if form != "8bit":
            return [torch.zeros(numel, dtype=DTYPES[form]) for _ in range(count)]
        codes = [torch.zeros(numel, dtype=torch.uint8) for _ in range(count)]
        return codes + [torch.zeros(-(-numel // MOMENT_BLOCK)) for _ in range(count)]

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
        import infinity

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
        from .. import inner

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
        import infinity
        from infinity.core.errors import BudgetError

        from .. import inner

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
        import infinity

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
        import infinity

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
        import infinity

        with infinity.gathered(p):
            return p.detach().clone()  # type: ignore[no-any-return]

    def candidates(self, p: Any) -> list[torch.Tensor]:
        return []

    def gathered(self, params: Any, write: bool = False) -> Any:
        import infinity

        return infinity.gathered(params, write=write)

    # -- state dicts

    def save_model(self) -> Json:
        from infinity.core.errors import BudgetError

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
        import infinity

        if self.config["ending"] == "close":
            infinity.close(self.model)
        else:
            self.aliases.clear()
            self.saved.clear()
            del self.model, self.optimizer
            gc.collect()
