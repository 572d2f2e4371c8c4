"""Muon for matrices, with AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim.adamw import adamw

from infinity.core.errors import ConfigError
from infinity.hardware.muon import COEFFICIENTS, orthogonalize, step_along
from infinity.hardware.muon import Muon as Options

#: The defaults of groups with and without `use_muon`: those of `torch.optim.Muon` and `torch.optim.AdamW`.
_DEFAULTS: Final[Mapping[bool, Mapping[str, Any]]] = {
    True: {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": COEFFICIENTS,
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    },
    False: {"lr": 1e-3, "weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8},
}
_MOST_STEPS: Final = 99  # as in torch


def muon_groups(model: nn.Module, *, head: nn.Module | None = None) -> list[dict[str, Any]]:
    """Return the param groups of `Muon` for a language model, without options: first its inner matrices, with
    ``use_muon=True``; then all else that is trainable, which AdamW updates: embeddings, the head, and what
    has not two dimensions. Either may have no parameters.

    Args:
        head: the layer that makes the output; without it, what `model.get_output_embeddings()` returns.

    Raises:
        ConfigError: neither says what the head is.
    """
    inner = inner_matrices(model, head=head)
    known = {id(param) for param in inner}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return [{"params": inner, "use_muon": True}, {"params": others, "use_muon": False}]


def inner_matrices(model: nn.Module, *, head: nn.Module | None = None) -> list[nn.Parameter]:
    """Return the trainable parameters of two dimensions that are of no embedding and not of the head; see
    `muon_groups`."""
    if head is None:
        heads: Any = getattr(model, "get_output_embeddings", None)
        if heads is None:
            raise ConfigError(
                "the model does not say which layer is its head, which AdamW updates",
                expected="the layer that makes the output",
                found=f"no `head`, and no method get_output_embeddings of {type(model).__name__}",
                cure="muon_groups(model, head=model.head), with the name that the layer has",
            )
        head = heads()
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    outer = {id(p) for m in (*embeddings, *([] if head is None else [head])) for p in m.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in outer]


class Muon(torch.optim.Optimizer):
    """Muon (momentum, orthogonalized by Newton–Schulz) for matrices, and AdamW for all other parameters.

    Each param group says by ``use_muon`` which of the two it is. A group with ``use_muon=True`` has the
    options, the defaults and the arithmetic of `torch.optim.Muon`: lr, weight_decay, momentum, nesterov,
    ns_coefficients, eps, ns_steps, adjust_lr_fn. It keeps one moment, ``momentum_buffer``. Its parameters
    have two dimensions.
    Embeddings and output heads are usually not among them: `muon_groups` returns such groups. A group with
    ``use_muon=False`` has those of `torch.optim.AdamW`: lr, weight_decay, betas, eps. `infinity.wrap`
    offloads both; without `wrap` this runs as any optimizer of torch.

    Args:
        params: dicts that define param groups, each with ``use_muon``.

    Raises:
        ConfigError: a group has no ``use_muon``, an option that it does not know or that is out of its range,
            or, with ``use_muon=True``, a parameter that is no matrix.
    """

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, with its defaults."""
        given = param_group.get("use_muon") if isinstance(param_group, dict) else None
        if not isinstance(given, bool):
            raise ConfigError(
                "a param group of Muon does not say which of the two updates it",
                expected="dicts with use_muon=True (Muon, for matrices) or use_muon=False (AdamW)",
                found=f"use_muon={given!r}",
                cure='Muon([{"params": matrices, "use_muon": True, "lr": 0.02}, '
                '{"params": others, "use_muon": False, "lr": 3e-4}])',
            )
        super().add_param_group({**_DEFAULTS[given], **param_group})
        _check(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["use_muon"]:
                for param in params:
                    self._update_matrix(param, group)
            elif params:
                self._update_others(params, group)
        return loss

    def _update_matrix(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        options = Options(**{name: group[name] for name in Options._fields})
        state, grad = self.state[param], param.grad
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        moment = state["momentum_buffer"]
        moment.lerp_(grad, 1 - options.momentum)
        update = grad.lerp(moment, options.momentum) if options.nesterov else moment
        update = orthogonalize(update.bfloat16(), options)
        scalars = {name: float(group[name]) for name in ("lr", "weight_decay")}
        step_along(param, update, options, param.shape, **scalars)

    def _update_others(self, params: list[torch.Tensor], group: Mapping[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                zeros = (torch.zeros_like(param) for _ in range(2))
                self.state[param] = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))
                self.state[param]["step"] = torch.tensor(0.0)
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _check(group: Mapping[str, Any]) -> None:
    known = _DEFAULTS[group["use_muon"]].keys()
    wrong = [
        f"{name}={group[name]!r}" for name in group.keys() - known - {"params", "use_muon", "initial_lr"}
    ]
    wrong += [f"{name}={group[name]}" for name in ("lr", "weight_decay", "eps") if not group[name] >= 0]
    if group["use_muon"]:
        for name, fits in (
            ("momentum", group["momentum"] >= 0),
            ("ns_steps", 0 <= group["ns_steps"] <= _MOST_STEPS),
            ("ns_coefficients", len(group["ns_coefficients"]) == 3),
            ("adjust_lr_fn", group["adjust_lr_fn"] in (None, "original", "match_rms_adamw")),
        ):
            wrong += [] if fits else [f"{name}={group[name]!r}"]
        wrong += [f"a parameter of shape {tuple(p.shape)}" for p in group["params"] if p.ndim != 2]
    elif not all(0 <= beta < 1 for beta in group["betas"]):
        wrong.append(f"betas={group['betas']}")
    if wrong:
        raise ConfigError(
            f"these options of a param group with use_muon={group['use_muon']} are wrong",
            expected=f"{', '.join(sorted(known))}, of torch.optim.{'Muon' if group['use_muon'] else 'AdamW'}"
            + ("; and parameters of two dimensions" if group["use_muon"] else ""),
            found=", ".join(sorted(wrong)),
            cure='Muon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])',
        )
