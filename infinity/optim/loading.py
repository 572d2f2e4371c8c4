"""Checks of optimizers that `wrap` takes over, and of optimizer state dicts that the engine loads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.core.errors import OptimizerTypeError, StateDictError
from infinity.params.param import ShardedParam
from infinity.planning.parts import MOMENTS

_REFUSED = ("amsgrad", "capturable", "differentiable")  # options of torch's optimizers
OURS = "infinity"  # the key of a state dict for what torch has no place for


class NoState(defaultdict[nn.Parameter, dict[str, Any]]):
    """The type of `optimizer.state`: empty, because the state is on its tiers. A read or a reset raises an
    error that says what to write."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise StateDictError(
            "the optimizer's state is on its tiers, and not in `optimizer.state`",
            expected="`optimizer.state_dict()` and `optimizer.load_state_dict(…)`",
            found="a use of `optimizer.state`",
            cure="read `optimizer.state_dict()`; to reset the state, load it with an empty state: "
            "`optimizer.load_state_dict({**optimizer.state_dict(), 'state': {}})`",
        )

    __missing__ = __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


@contextmanager
def hooked(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Call the hooks of `load_state_dict`, before and after, as torch does; give what is to be loaded."""
    given = dict(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        given = before(optimizer, given) or given
    yield given
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def check_optimizer(optimizer: object) -> bool:
    """Return whether weight decay is decoupled (AdamW) or not (Adam).

    Raises:
        OptimizerTypeError: not one of these two, with an option that is not supported, or with a state that
            `wrap` cannot take over.
    """
    if isinstance(optimizer, (list, tuple, dict, set)):
        raise OptimizerTypeError(
            "wrap takes one optimizer",
            expected="one torch.optim.AdamW or torch.optim.Adam over all trainable parameters",
            found=f"a {type(optimizer).__name__} of {len(optimizer)}",
            cure="one optimizer with a param group for each, which may have options of its own: "
            'torch.optim.AdamW([{"params": first, "lr": 1e-3}, {"params": second, "lr": 1e-4}])',
        )
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise OptimizerTypeError(
            "this optimizer cannot be offloaded",
            expected="torch.optim.AdamW or torch.optim.Adam",
            found=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            cure="torch.optim.AdamW(model.parameters(), ...)",
        )
    state = optimizer.state  # type: ignore[attr-defined]
    for index, group in enumerate(optimizer.param_groups):  # type: ignore[attr-defined]
        check_options(group, f"param group {index}")
        for number, param in enumerate(group["params"]):
            _check_state(state.get(param), f"parameter {number} of param group {index}")
    return type(optimizer) is torch.optim.AdamW


def _check_state(state: Mapping[str, Any] | None, whose: str) -> None:
    """Raise `OptimizerTypeError` if the state of a parameter is there, and lacks what `wrap` takes over."""
    if state and (lacking := [name for name in ("step", *MOMENTS) if name not in state]):
        raise OptimizerTypeError(
            f"the optimizer's state of {whose} is not complete",
            expected=f"step, {', '.join(MOMENTS)}; or no state, as before the first step",
            found=f"{', '.join(state)}, and no {', '.join(lacking)}",
            cure="call `optimizer.state.clear()` before `wrap`, so that the moments begin at zero; or load a "
            "whole state dict into the optimizer",
        )


def check_options(group: Mapping[str, Any], found: str) -> None:
    """Raise `OptimizerTypeError` for an option that is not supported."""
    for option in _REFUSED:
        if group.get(option):
            raise OptimizerTypeError(
                f"the option {option!r} is not supported",
                expected=f"{option}=False",
                found=f"{option}=True in {found}",
                cure=f"leave {option} out",
            )


def check_saved_options(group: Mapping[str, Any], saved: str) -> None:
    """Raise `StateDictError` for an option that is not supported; `saved` is what has it."""
    for option in _REFUSED:
        if group.get(option):
            raise StateDictError(
                f"{saved} was saved with {option}=True",
                expected=f"{option}=False",
                found=f"{option}=True",
                cure="load a state dict of a plain Adam or AdamW",
            )


def counts_of(state_dict: Mapping[str, Any]) -> Mapping[str, float]:
    """Return what a state dict has under our own key; nothing, if it is torch's."""
    counts: Mapping[str, float] = state_dict.get(OURS, {})
    for name, value in counts.items() if isinstance(counts, Mapping) else [(OURS, None)]:
        number = isinstance(value, (int, float)) and math.isfinite(value)
        scale = name == "loss_scale" and number and math.frexp(value)[0] == 0.5
        if not scale and (name == "loss_scale" or not number or value < 0 or value % 1):
            raise StateDictError(
                f"{name!r} of the state dict cannot be used",
                expected="a power of two" if name == "loss_scale" else "a count",
                found=repr(counts),
                cure=f"load the state dict unchanged, or without the key {OURS!r}",
            )
    return counts


def match(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    sharded_of: Mapping[nn.Parameter, ShardedParam],
) -> list[tuple[ShardedParam, Mapping[str, Any]]]:
    """Return each parameter with its state.

    Raises:
        StateDictError: groups, options or shapes do not fit.
    """
    groups = state_dict.get("param_groups")
    lengths = [len(g["params"]) for g in param_groups]
    found = [len(g["params"]) for g in groups] if isinstance(groups, list) else None
    if found != lengths:
        raise StateDictError(
            "the state dict has other param groups than the optimizer",
            expected=f"groups of {lengths} parameters",
            found=f"groups of {found} parameters" if found is not None else "no param_groups",
            cure="build the same groups as in the saved state dict",
        )
    for group in groups or ():
        check_saved_options(group, "the state dict")
    ids = [i for g in groups or () for i in g["params"]]
    params = [p for g in param_groups for p in g["params"]]
    pairs = []
    for index, param in zip(ids, params, strict=True):
        sharded = sharded_of[param]
        values = state_dict["state"].get(index, {})
        for key in (*MOMENTS, "master", "front"):
            value = values.get(key)
            if value is not None and tuple(value.shape) != sharded.spec.shape:
                raise StateDictError(
                    f"{key} of {sharded.name!r} has another shape",
                    expected=sharded.spec.shape,
                    found=tuple(value.shape),
                    cure="load the state dict of the same model",
                )
        pairs.append((sharded, values))
    return pairs
