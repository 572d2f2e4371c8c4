"""Checks of optimizer state dicts that the engine loads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.core.errors import StateDictError
from infinity.params.param import ShardedParam

from .rules import Rule, foreign

OURS = "infinity"  # the key of a state dict for what torch has no place for


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise StateDictError(
        "the optimizer's state is on its tiers, and not in `optimizer.state`",
        expected="`optimizer.state_dict()` and `optimizer.load_state_dict(…)`",
        found="a use of `optimizer.state`",
        cure="read `optimizer.state_dict()`; to reset the state, load it with an empty state: "
        "`optimizer.load_state_dict({**optimizer.state_dict(), 'state': {}})`",
    )


class NoState(defaultdict[nn.Parameter, dict[str, Any]]):
    """The type of `optimizer.state`: without entries, because the state is on its tiers. A write or a reset,
    and a read of a value, raise an error that says what to write. It has no length, and `in` finds nothing.

    It is true: torch's functions for distributed checkpoints take a false one for state that has not begun,
    and begin it by a step. `optimizer.state[param]` has the names of what a state dict has of a parameter, by
    which these functions sort the entries of a flat state dict.
    """

    names: Callable[[nn.Parameter], Iterable[str]] = staticmethod(_refuse)

    def __bool__(self) -> bool:
        return True

    def __missing__(self, param: nn.Parameter) -> Any:
        return _Names(self.names(param))

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


class _Names(Mapping[str, Any]):
    """What `optimizer.state[param]` has: names, without values."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    __getitem__ = __setitem__ = __delitem__ = _refuse


@contextmanager
def hooked(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Call the hooks of `load_state_dict`, before and after, as torch does; give what is to be loaded."""
    given = dict(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        given = before(optimizer, given) or given
    yield given
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


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
    rule: Rule,
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
    for group, here in zip(groups or (), param_groups, strict=True):
        rule.check_saved(group, "the state dict", here)
    ids = [i for g in groups or () for i in g["params"]]
    params = [(p, rule.of(g)) for g in param_groups for p in g["params"]]
    pairs: list[tuple[ShardedParam, Mapping[str, Any]]] = []
    for index, (param, rule) in zip(ids, params, strict=True):
        sharded = sharded_of[param]
        saved = state_dict["state"].get(index, {}).items()
        # torch's functions for distributed checkpoints give {} for what a flat state dict does not have.
        values = {name: v for name, v in saved if not isinstance(v, Mapping) or v}
        if others := foreign(values, rule):
            raise StateDictError(
                f"the state dict was saved by another optimizer than {rule.kind}",
                expected=" and ".join(rule.moments) or "no moments",
                found=f"{', '.join(others)} of {sharded.name!r}",
                cure=f"load a state dict of {rule.kind}",
            )
        _check_step(values.get("step", 0), sharded.name)
        for key, shape in dict.fromkeys((*rule.moments, "master", "front"), (*sharded.spec.shape,)).items():
            value = values.get(key)
            if value is not None and not isinstance(value, torch.Tensor):
                raise StateDictError(
                    f"{key} of {sharded.name!r} is no tensor",
                    expected=f"a tensor of shape {shape}",
                    found=f"a {type(value).__name__}",
                    cure="load the state dict unchanged",
                )
            if value is not None and tuple(value.shape) != shape:
                raise StateDictError(
                    f"{key} of {sharded.name!r} has another shape",
                    expected=shape,
                    found=tuple(value.shape),
                    cure="load the state dict of the same model",
                )
        pairs.append((sharded, values))
    return pairs


def _check_step(step: Any, name: str) -> None:
    try:
        is_count = float(step) >= 0 and float(step).is_integer()
    except (TypeError, ValueError, RuntimeError):
        is_count = False
    if not is_count:
        raise StateDictError(
            f"step of {name!r} in the state dict is no count",
            expected="the number of updates: 0, 1, 2, …",
            found=repr(step),
            cure="load the state dict unchanged",
        )
