"""The user's loop: each action, written once, runs in both worlds; what it sees is logged and compared."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from infinity.core.errors import BudgetError

from .build import ForwardFailed, Json, batches, loss_of
from .worlds import World


class Mismatch(Exception):
    """The engine's world differs from plain torch's."""


class Log:
    """What a run sees, in order. `expected` is the plain run's log: then everything is compared."""

    def __init__(self, expected: list[Any] | None, tolerance: tuple[float, float]) -> None:
        self.entries: list[Any] = []
        self.expected = expected
        self.tolerance = tolerance
        self.at: tuple[int, str] = (0, "")

    def __call__(self, label: str, value: Any, *others: Any) -> None:
        """Note a tensor, number, string or None; `others`: what would be right, too."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        if self.expected is None:
            self.entries.append((self.at, label, [value, *others]))
            return
        if len(self.entries) >= len(self.expected):
            raise Mismatch(f"{label}: plain torch does not get here")
        at, wanted, values = self.expected[len(self.entries)]
        self.entries.append(None)
        if (at, wanted) != (self.at, label):
            raise Mismatch(f"{label} of action {self.at[0]}, but plain torch has {wanted} of action {at[0]}")
        problem = self._differs(value, values)
        if problem:
            raise Mismatch(f"{label}: {problem}")

    def _differs(self, value: Any, wanted: list[Any]) -> str | None:
        tensors = [w for w in wanted if isinstance(w, torch.Tensor)]
        if not isinstance(value, torch.Tensor) or not tensors:
            same = any(_equal(value, w) for w in wanted)
            return None if same else f"found {_short(value)}, torch has {_short(wanted[0])}"
        wanted = tensors
        if value.shape != wanted[0].shape or value.dtype != wanted[0].dtype:
            return f"found {_short(value)}, torch has {_short(wanted[0])}"
        best: torch.Tensor | None = None
        for other in wanted:
            a, b = value.double(), other.double()
            atol = self.tolerance[1] * float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
            near = (a == b) | ((a - b).abs() <= self.tolerance[0] * b.abs() + atol) | (a.isnan() & b.isnan())
            best = near if best is None else best | near
        assert best is not None
        if bool(best.all()):
            return None
        worst = (value.double() - wanted[0].double()).abs()
        return (
            f"{int((~best).sum())} of {value.numel()} elements differ, by up to {float(worst.max()):.3g} "
            f"of {float(wanted[0].double().abs().max()):.3g}; zeros found: {int((value == 0).sum())}"
        )


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, float) and isinstance(wanted, float):
        return math.isclose(value, wanted, rel_tol=1e-5) or (math.isnan(value) and math.isnan(wanted))
    return type(value) is type(wanted) and value == wanted


def _short(value: Any) -> str:
    return (
        f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
    )


#: What may be raised by an action beside what torch raises: names of the engine's typed errors.
#: Words restrict where: "delayed" updates or those behind the "backward", a "host" memory that is not large,
#: a bank that returns "itself".
#: Keys are an action, its family, or the theme of the case.
ALLOWED: dict[str, dict[str, str]] = {
    # A second backward before the step, a look at a gradient, an edit: what is updated by then is not undone.
    "*": {"GradientError": "backward", "ParameterError": "backward"},
    "wrap": {"WrapError": "storage"},
    # A module that returns its parameter itself, not a view of it, hands out a released parameter.
    "weight-view": {"ReleasedParameterError": "itself"},
    "autocast": {"PrecisionError": ""},
    "grad-stash": {"GradientError": ""},
    "grad-move": {"GradientError": ""},
    "hold": {"ReleasedParameterError": "", "BudgetError": "host"},
    "read": {"ReleasedParameterError": ""},
    "gathered-graph": {"ParameterError": "delayed backward"},
    "fetch_inside": {"ParameterError": "delayed backward"},
    "save": {"BudgetError": "host"},
    "load": {"BudgetError": "host"},
    "fresh": {"BudgetError": "host"},
    "interrupt": {"InfinityError": ""},
    "after-interrupt": {"InfinityError": ""},
}


class Program:
    """Runs a case's actions in one world."""

    def __init__(self, case: Json, world: World, log: Log, tell: Callable[[Json], None]) -> None:
        self.case, self.world, self.log, self.tell = case, world, log, tell
        self.batches = batches(case["tree"], case["seed"])
        self.interrupted = False

    def run(self) -> str:
        """Return "same", or "typed:NAME" if the engine refused as it may. Raises `Mismatch`."""
        for index, action in enumerate([*self.case["program"], {"do": "final", "family": "final"}]):
            self.log.at = (index, action["do"])
            self.tell({"at": index, "do": action["do"], "family": action["family"]})
            try:
                getattr(self, "do_" + action["do"].replace("-", "_"))(**_arguments(action))
                raised: BaseException | None = None
            except Mismatch:
                raise
            except (Exception, KeyboardInterrupt) as error:
                raised = error
            typed = self._compare_raised(action, raised)
            if typed:
                return typed
            if raised is not None:
                raised.__traceback__ = None
                del raised
                self.world.zero_grad("none")
        return "same"

    def _compare_raised(self, action: Json, raised: BaseException | None) -> str | None:
        log = self.log
        if log.expected is None:
            log("raised", None if raised is None else type(raised))
            return None
        rest = [e for e in log.expected if e[0] == log.at]
        wanted = rest[-1][2][0]
        if raised is None:
            if wanted is not None:
                raise Mismatch(f"torch raises {wanted.__name__}, the engine nothing")
            log("raised", None)
            return None
        names = {c.__name__ for c in type(raised).__mro__}
        if wanted is not None and isinstance(raised, wanted):
            while log.expected[len(log.entries)] is not rest[-1]:
                log.entries.append(None)  # it raised somewhat earlier
            log.entries.append(None)
            return None
        if "InfinityError" in names:
            keys = ("*", self.case["family"], action["family"], action["do"])
            allowed = {name: where for key in keys for name, where in ALLOWED.get(key, {}).items()}
            if self.interrupted:
                allowed.update(ALLOWED["after-interrupt"])
            for name, where in allowed.items():
                if name in names and (
                    not where
                    or self.case["config"]["update"] in where.split()
                    or (where == "itself" and any(b["how"] == where for b in self.case["tree"]["banks"]))
                    or (where == "host" and self.case["config"]["host_memory"] != "large")
                ):
                    return f"typed:{type(raised).__name__}"
        first = str(raised).splitlines()[0] if str(raised) else ""
        if self.case["config"]["update"] == "backward" and "modified by an inplace operation" in first:
            return "typed:RuntimeError"  # of a second backward, which uses parameters before it is noticed
        what = "nothing" if wanted is None else wanted.__name__
        raise Mismatch(f"the engine raises {type(raised).__name__} ({first[:200]}), torch {what}") from raised

    # -- parts

    def loss(self, k: int, **ctx: Any) -> torch.Tensor:
        return loss_of(self.world.model, self.batches[k % len(self.batches)], **ctx)

    def aux(self) -> torch.Tensor | None:
        box = self.world.model.box
        return sum(box[1:], start=box[0]) if box else None

    def param(self, pick: int, *, trainable: bool = True) -> tuple[str, nn.Parameter]:
        named = list(self.world.named(trainable=trainable).items())
        return named[pick % len(named)]

    def params(self, pick: int, count: int) -> list[nn.Parameter]:
        named = list(self.world.named(trainable=True).values())
        return list({id(p): p for p in (named[(pick + 5 * i) % len(named)] for i in range(count))}.values())

    def log_grads(self) -> None:
        if self.case["config"]["update"] == "backward":
            return  # they are gone by now
        for name, p in self.world.named().items():
            self.log(f"gradient of {name}", self.world.gradient(p))

    def finish(self, clip: str | None = None, zero: str = "none", step: bool = True) -> None:
        """What ends a step: clip, step, zero_grad."""
        if clip:
            self.log("norm before clipping", self.world.clip(0.05, torchs=clip == "torch"))
        if step:
            self.world.step()
            self.log("loss scale", self.world.info()["scale"])
            self.log("norm", self.world.info()["norm"])
        self.world.zero_grad(zero)

    # -- training

    def do_train(
        self,
        k: int,
        micro: int = 1,
        aux: str = "ignore",
        clip: str | None = None,
        zero: str = "none",
        grads: bool = False,
        partial: int | None = None,
    ) -> None:
        for i in range(micro):
            loss = self.loss(k + i) / micro
            self.log("loss", loss)
            extra = self.aux()
            if extra is not None and aux == "sum":
                loss = loss + extra
            inputs = None if partial is None else self.params(partial, 3)
            self.world.scale(loss).backward(retain_graph=aux == "after", inputs=inputs)  # type: ignore[no-untyped-call]
            if extra is not None and aux == "after":
                self.world.scale(extra).backward()  # type: ignore[no-untyped-call]
            if extra is not None and aux == "only":
                self.world.zero_grad("none")
                loss = self.loss(k + i)
                extra = self.aux()
                assert extra is not None
                del loss
                self.world.scale(extra).backward()  # type: ignore[no-untyped-call]
        if grads:
            self.log_grads()
        self.finish(clip, zero)

    def do_side_alone(self, k: int) -> None:
        """Only the side channel's loss goes backward; the outputs are dropped."""
        loss = self.loss(k)
        extra = self.aux()
        self.log("loss", loss)
        del loss
        if extra is not None:
            self.log("aux", extra)
            self.world.scale(extra).backward()  # type: ignore[no-untyped-call]
        else:
            self.world.scale(self.loss(k)).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    def do_side_late(self, k: int) -> None:
        """A backward of the side channel's loss after the step: torch refuses it."""
        loss = self.loss(k)
        extra = self.aux()
        late = extra if extra is not None else self.loss(k + 1)
        self.world.scale(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        self.finish()
        self.world.scale(late).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish(step=False)

    def do_double(self, k: int) -> None:
        loss = self.world.scale(self.loss(k))
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    def do_stashed(self, k: int, first: int, between: bool) -> None:
        """Two forwards, then their backwards in some order."""
        losses = [self.loss(k), self.loss(k + 1)]
        if between:
            self.do_eval(k)
        for i in (first, 1 - first):
            self.log("loss", losses[i])
            self.world.scale(losses[i]).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    def do_abandon(self, k: int) -> None:
        self.log("loss", self.loss(k))

    def do_penalty(self, k: int, third: bool = False) -> None:
        """A gradient penalty on the inputs."""
        batch = dict(self.batches[k % len(self.batches)])
        x = batch["x"] = batch["x"].clone().requires_grad_()
        loss = loss_of(self.world.model, batch)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        self.log("gradient of the input", g)
        if third:
            (g,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
            self.log("second gradient of the input", g)
        self.world.scale(loss + g.square().sum()).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    def do_hessian(self, k: int, pick: int, count: int) -> None:
        """Gradients of the gradients of parameters."""
        params = self.params(pick, count)
        loss = self.loss(k)
        grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        for g in grads:
            self.log("gradient", g)
        extra = [g.float().square().sum() for g in grads if g is not None and g.requires_grad]
        self.world.scale(sum(extra, start=loss)).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    def do_asked(self, k: int, pick: int) -> None:
        """torch.autograd.grad of some parameters, then nothing else."""
        for g in torch.autograd.grad(self.loss(k), self.params(pick, 3), allow_unused=True):
            self.log("gradient", g)

    def do_thread(self, k: int) -> None:
        """Forward and backward on a thread of the user's."""
        failed: list[BaseException] = []

        def work() -> None:
            try:
                self.world.scale(self.loss(k)).backward()  # type: ignore[no-untyped-call]
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        self.log_grads()
        self.finish()

    def do_fetch_inside(self, k: int, pick: int) -> None:
        """A forward and backward while some parameters are gathered."""
        with self.world.beside(self.params(pick, 3)):
            self.world.scale(self.loss(k)).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    def do_hooked(self, k: int, how: str) -> None:
        """Forward and backward under hooks on saved tensors that the user sets, or forbids."""
        graph = torch.autograd.graph
        with {
            "identity": lambda: graph.saved_tensors_hooks(lambda t: t, lambda t: t),
            "clone": lambda: graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
            "cpu": lambda: graph.save_on_cpu(),
            "disabled": lambda: graph.disable_saved_tensors_hooks("not here"),
        }[how]():
            loss = self.loss(k)
        self.log("loss", loss)
        self.world.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    def do_closure(self, k: int) -> None:
        """`step` is given a closure."""

        def closure() -> torch.Tensor:
            self.world.zero_grad("none")
            loss = self.loss(k)
            self.world.scale(loss).backward()  # type: ignore[no-untyped-call]
            return loss

        self.log("loss", self.world.step(closure))
        self.world.zero_grad("none")

    def do_eval(self, k: int, twice: bool = False, inference: bool = False) -> None:
        with self.world.evaluating(), torch.inference_mode(inference):
            for i in range(2 if twice else 1):
                self.log("loss in eval", self.loss(k + i))

    def do_lr(self, value: float) -> None:
        for group in self.world.optimizer.param_groups:  # type: ignore[attr-defined]
            group["lr"] = value

    def do_flush(self) -> None:
        self.world.flush()

    def do_look(self) -> None:
        for name, value in sorted(self.world.save_model().items()):
            self.log(f"{name} in the state dict", value)

    def do_freeze(self, pick: int, on: bool) -> None:
        learning = [n for n, p in self.world.named(trainable=True).items()]
        self.world.frozen = getattr(self.world, "frozen", [])  # what was frozen at `wrap` stays so
        chosen = self.world.frozen if on else learning[1:]
        if chosen:
            name = chosen[pick % len(chosen)]
            self.world.named()[name].requires_grad_(on)
            (self.world.frozen.remove if on else self.world.frozen.append)(name)

    # -- failures

    def do_fail(self, k: int, block: int, backward: bool) -> None:
        """A forward or a backward raises; the loop catches it and goes on."""
        try:
            if backward:
                loss = self.loss(k, fail_back=block)
                self.world.scale(loss).backward()  # type: ignore[no-untyped-call]
            else:
                self.loss(k, fail=block)
            self.log("failed", "no")
        except ForwardFailed as error:
            error.__traceback__ = None
            self.log("failed", "yes")
        self.world.zero_grad("none")

    def do_interrupt(self, k: int, at: int, backward: bool) -> None:
        """An exception where CPython could run a signal handler, in the engine's own code."""
        if self.world.offloaded:
            self.interrupted = True
            loss = self.loss(k) if backward else None
            left = at

            def trace(frame: Any, event: str, arg: Any) -> Any:
                nonlocal left
                if event == "call" and "/infinity/" in frame.f_code.co_filename:
                    left -= 1
                    if not left:
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return None

            try:
                sys.settrace(trace)
                if loss is None:
                    self.loss(k)
                else:
                    self.world.scale(loss).backward()  # type: ignore[no-untyped-call]
            except KeyboardInterrupt as error:
                error.__traceback__ = None
            finally:
                sys.settrace(None)
        self.world.zero_grad("none")

    # -- gathered

    def do_gathered_graph(self, pick: int, k: int, how: str, use: str) -> None:
        """A graph is made inside `gathered`, and used after other units have been."""
        _, p = self.param(pick)
        # A forward inside a block uses what every forward uses, or is refused.
        with self.world.beside(p) if how == "loss" else self.world.gathered(p):
            if how == "square":
                y = (p * p).float().sum() + torch.sin(p).float().sum()
            elif how == "matmul":
                x = torch.ones(2, p.shape[-1], dtype=p.dtype, requires_grad=True)
                w = p if p.dim() == 2 else p.unsqueeze(0)
                y = (torch.tanh(F.linear(x, w)) @ w).float().square().sum()
            else:
                y = self.loss(k)
        if use == "forward":
            self.log("loss", self.loss(k))
        elif use == "eval":
            self.do_eval(k)
        elif use == "train":
            z = self.loss(k + 1)
            self.world.scale(z).backward()  # type: ignore[no-untyped-call]
        self.log("value", y)
        with contextlib.nullcontext() if how == "loss" else self.world.showing_newest():
            self.world.scale(y).backward()  # type: ignore[no-untyped-call]
        self.log_grads()
        self.finish()

    # -- aliases

    def do_hold(self, key: str, pick: int, how: str) -> None:
        """Keep something that refers to a weight's memory."""
        held: Any
        if how == "model-state-dict":
            for name, held in self.world.model.state_dict().items():
                if name in self.world.named():
                    then = self._copied(self.world.named()[name], held)
                    self.world.aliases[f"{key} {name}"] = (name, "state-dict", held, then)
            return
        if how == "all":
            for name, p in self.world.named().items():
                with self.world.gathered(p):
                    held = p.detach().cpu()
                self.world.aliases[f"{key} {name}"] = (name, how, held, held.clone())
            return
        name, p = self.param(pick, trainable=False)
        if how == "numpy" and p.dtype is torch.bfloat16:
            how = "detach-cpu"
        owner = name.rpartition(".")
        if how == "state-dict":
            held = self.world.model.get_submodule(owner[0]).state_dict()[owner[2]]
        elif how == "in-forward":
            taken: list[Any] = []
            module = self.world.model.get_submodule(owner[0])
            handle = module.register_forward_pre_hook(
                lambda m, _: taken.append(getattr(m, owner[2]).detach())
            )
            with self.world.evaluating():
                self.loss(0, branch=True, use=True)
            handle.remove()
            held = taken[0] if taken else None
        else:
            with self.world.gathered(p):
                held = {
                    "detach-cpu": lambda: p.detach().cpu(),
                    "data": lambda: p.data,
                    "numpy": lambda: p.detach().numpy(),
                    "view": lambda: p.detach().view(-1)[: p.numel() // 2 + 1],
                    "storage": lambda: p.untyped_storage(),
                    "flat": lambda: nn.utils.parameters_to_vector([p]),
                    "state-dict-inside": lambda: self.world.model.get_submodule(owner[0]).state_dict()[
                        owner[2]
                    ],
                    "clone": lambda: p.detach().clone(),
                    "graph": lambda: p.view(-1)[:3],
                }[how]()
        then = self._copied(p, held) if how == "state-dict" else _now(held, p)
        self.world.aliases[key] = (name, how, held, then)

    def _copied(self, p: Any, held: torch.Tensor) -> torch.Tensor:
        """What a state dict has if it is a copy: the newest values, of the two versions that there may be."""
        return held.clone() if self.world.offloaded else self.world.newest(p)

    def do_read(self, key: str, flush: bool) -> None:
        """What an alias shows: in torch, the parameter as it is now."""
        if flush:
            self.world.flush()
        for found, entry in list(self.world.aliases.items()):
            if found.split(" ")[0] == key:
                self.read_one(*entry, flushed=flush)

    def read_one(self, name: str, how: str, held: Any, then: Any, *, flushed: bool) -> None:
        if held is None:
            return
        p = self.world.named()[name]
        candidates = self.world.candidates(p)
        now = _now(held, p)
        if how in ("clone", "flat"):
            self.log(f"{how} of {name}", now, then)
            return
        if how in ("state-dict", "state-dict-inside"):
            candidates.append(then)  # it may be a copy
        if flushed and self.case["config"]["update"] != "delayed":
            candidates = [c for c in candidates[:1]] + ([then] if how.startswith("state-dict") else [])
        shown = [_part(c, now) for c in candidates]
        self.log(f"alias ({how}) of {name}", now, *(shown if not self.world.offloaded else []))

    def do_drop(self, key: str) -> None:
        for found in [f for f in self.world.aliases if f.split(" ")[0] == key]:
            del self.world.aliases[found]

    # -- edits

    def do_edit(self, pick: int, how: str, check: bool, fails: bool = False) -> None:
        """Edit a parameter inside `gathered(write=True)`, in one of many ways."""
        if how in ("vector-all", "merge"):
            self.edit_several(pick, how)
            return
        name, p = self.param(pick, trainable=False)
        for key in [k for k, v in self.world.aliases.items() if v[0] == name]:
            del self.world.aliases[key]
        random = torch.Generator().manual_seed(pick)
        delta = (torch.randn(p.shape, generator=random) * 0.05).to(p.dtype)
        if how == "numpy" and p.dtype is torch.bfloat16:
            how = "data-copy"
        with contextlib.suppress(ForwardFailed), self.world.gathered(p, write=True), torch.no_grad():
            new = p.detach().clone() + delta
            match how:
                case "add":
                    p.add_(delta)
                case "mul":
                    p.mul_(1.25)
                case "element":
                    p.view(-1)[0] = 0.5
                case "copy":
                    p.copy_(new)
                case "data-copy":
                    p.data.copy_(new)
                case "data-set":
                    p.data = new
                case "data-add":
                    p.data += delta
                case "detach-add":
                    p.detach().add_(delta)
                case "numpy":
                    p.detach().numpy()[:] = new.numpy()
                case "vector":
                    nn.utils.vector_to_parameters(new.reshape(-1), [p])
                case "init":
                    torch.manual_seed(pick)
                    nn.init.normal_(p, std=0.1)
            if fails:
                raise ForwardFailed("after the edit")
        if check:
            self.log(f"{name} after the edit", self.world.newest(p))
            self.log(f"{name} in the state dict", self.world.save_model()[name])

    def edit_several(self, pick: int, how: str) -> None:
        """Edit parameters of more than one unit, as merging adapters or averaging models does."""
        params = list(self.world.named().values())
        self.world.aliases.clear()
        if how == "vector-all":
            params = [p for p in params if p.dtype == params[0].dtype]  # torch would change the others'
            with self.world.gathered(params, write=True):
                vector = nn.utils.parameters_to_vector(params).detach()
                nn.utils.vector_to_parameters((vector * 1.125).to(vector.dtype), params)
            return
        one = params[pick % len(params)]
        other = next(
            (p for p in params if p is not one and p.shape == one.shape and p.dtype == one.dtype), one
        )
        with self.world.gathered([one, other], write=True):
            match pick % 3:
                case 0:
                    one.data += 0.5 * other.data
                case 1:
                    one.data, other.data = other.data, one.data
                case 2:  # with torch, whatever is not copied would be one memory from then on
                    square = other.dim() == 2 and len(set(other.shape)) == 1
                    one.data = one.data.flip(0)
                    other.data = other.data.t().contiguous() if square else one.data.clone()

    # -- state dicts

    def do_save(self, key: str) -> None:
        self.world.saved[key] = (self.world.save_model(), self.world.save_optimizer())

    def do_load(self, key: str, order: str) -> None:
        """Load what was saved, in this order: m(odel), o(ptimizer)."""
        saved = self.world.saved.get(key)
        if saved is None:
            return
        for what in order:
            if what == "m":
                self.world.load_model(saved[0])
            else:
                self.world.load_optimizer(saved[1])

    def do_fresh(self, order: str, config: Json, seed: int) -> None:
        """Save, build another model with other placements, load, and go on with that."""
        self.do_save("fresh")
        self.world.aliases.clear()
        old = dict(self.world.saved)
        self.world.close()
        self.world.saved = old
        self.world.start({**self.case["config"], **config}, seed)  # type: ignore[attr-defined]
        self.do_load("fresh", order)

    # -- gradients

    def do_grad_stash(self, k: int, how: str) -> None:
        """Two tasks' gradients, taken one at a time."""
        params = list(self.world.named(trainable=True).values())
        world: Any = self.world
        world.scale(self.loss(k)).backward()
        first = world.take_grads(params)
        world.scale(self.loss(k + 1)).backward()
        if how == "put-back":
            world.take_grads(params)
            for p in params:
                world.put_grad(p, first[p])
        elif how == "some":
            for p in params[::2]:
                world.put_grad(p, first[p])
        elif how == "none":
            pass
        self.log_grads()
        self.finish()

    def do_grad_move(self, k: int, pick: int) -> None:
        """One parameter's gradient is put on another of the same shape."""
        world: Any = self.world
        world.scale(self.loss(k)).backward()
        named = list(world.named(trainable=True).values())
        one = named[pick % len(named)]
        other = next(
            (p for p in named if p is not one and p.shape == one.shape and p.dtype == one.dtype), one
        )
        grads = world.take_grads([one])
        world.put_grad(other, grads[one])
        self.log_grads()
        self.finish()

    # -- the end

    def do_final(self) -> None:
        """Compare everything, by state dicts."""
        self.do_look()
        for name in list(self.world.named(trainable=True)):
            if self.case["config"]["host_memory"] != "large":
                break  # the least host memory holds no state dict
            try:
                state = self.world.state_of(name)  # type: ignore[attr-defined]
            except BudgetError:
                break
            for key, value in state.items():
                if key == "master" and self.case["config"]["dtype"] == "fp32":
                    continue
                if value is None and key != "master":  # never updated: torch has no state of it
                    value = torch.zeros(self.world.named()[name].numel())
                elif value is not None:
                    value = value.view(-1)
                others = [None] if not self.world.offloaded and key == "master" else []
                self.log(f"{key} of {name}", value, *others)


def _arguments(action: Json) -> Json:
    return {k: v for k, v in action.items() if k not in ("do", "family")}


def _now(held: Any, p: torch.Tensor) -> Any:
    """What something that was held shows, as a tensor of its own."""
    if held is None:
        return None
    if isinstance(held, torch.UntypedStorage):
        return None  # held, not looked at: the engine's storage is a unit's, torch's a parameter's
    if isinstance(held, torch.Tensor):
        return held.detach().clone()
    return torch.from_numpy(held).clone()


def _part(whole: torch.Tensor, like: Any) -> Any:
    if like is None:
        return None
    return whole if whole.shape == like.shape else whole.reshape(-1)[: like.numel()].clone()
