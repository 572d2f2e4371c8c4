"""Errors for code that treats a wrapped model as a plain one: other optimizers, copies, wrappers of
models."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from infinity.core.errors import (
    ParameterChangedError,
    ParameterError,
    PrecisionError,
    ReleasedParameterError,
    WrapError,
)
from infinity.core.stack import frames
from infinity.params.instead import cure_of_pickling
from infinity.params.param import ReleasedParameter, any_sharded, sharded_of

_CURE = (
    "use the optimizer that `wrap` returned, `model, optimizer = infinity.wrap(model, optimizer, config)`; "
    "train with `offloaded(Trainer)` of infinity.integrations.transformers in place of a Trainer"
)
#: What to do in place of a copy of a wrapped object, and of a pickle of it.
_COPIED = (
    "for an average of weights (EMA, SWA) copy the model before `wrap`, and later copy its newest values "
    "into that copy, `infinity.copy_to(model, plain)`; or copy its `state_dict()`; or turn the model into a "
    "plain one, `infinity.unwrap(model)`, and copy that"
)
_PICKLED = (
    "save its `state_dict()`, and load that into a newly built one; or turn the model into a plain one, "
    "`infinity.unwrap(model)`, and pickle that"
)


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `WrapError` if an optimizer that has never heard of an engine is about to update parameters
    that one has."""
    if getattr(optimizer, "is_offloaded", False) or not any_sharded():
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            sharded = sharded_of(param)
            if sharded is not None:
                raise WrapError(
                    "this optimizer is not the one that `wrap` returned",
                    expected="step() of the optimizer that `wrap` returned",
                    found=f"step() of another {type(optimizer).__name__} that has {sharded.name!r}",
                    cure=_CURE,
                )


register_optimizer_step_pre_hook(_refuse_step)


def is_guard(hook: object) -> bool:
    """Return whether a hook is the one that refuses state dicts of an optimizer that was wrapped."""
    return hook is _refuse_state


def _refuse_state(optimizer: torch.optim.Optimizer, *_: Any) -> NoReturn:
    raise WrapError(
        "`wrap` has taken over the state of this optimizer",
        expected="state_dict() and load_state_dict() of the optimizer that `wrap` returned",
        found=f"those of the {type(optimizer).__name__} from before `wrap`",
        cure=_CURE,
    )


class _Taken(defaultdict[Any, Any]):
    """What the optimizer from before `wrap` has as its `state`, if that was empty. It is true: torch's
    functions for distributed checkpoints would begin a false one by a step at a rate of 0. The step raises an
    error, and would leave that rate in the groups, which our optimizer has, too."""

    optimizer: torch.optim.Optimizer

    def __bool__(self) -> bool:
        return True

    def __missing__(self, param: Any) -> NoReturn:
        _refuse_state(self.optimizer)


def refuse_copies(name: str, *_: Any) -> NoReturn:
    """Raise the error of `copy.deepcopy`, `pickle` and `torch.save` of what `wrap` returned, a `name`."""
    raise ReleasedParameterError(
        f"a wrapped {name} cannot be copied or pickled: the object does not hold its values",
        expected="`state_dict()`, which holds them",
        found="copy.deepcopy, pickle or torch.save of the object itself",
        cure=_COPIED
        if any(frame.f_globals.get("__name__") == "copy" for frame in frames())
        else cure_of_pickling(_PICKLED),
    )


def not_for_training(found: str) -> ParameterError:
    """Return the error of what would train a model of `infinity.inference`, or edit it."""
    return ParameterError(
        "this model is for inference",
        expected="forwards only: it has no optimizer and no gradients, and its parameters are read-only",
        found=found,
        cure="build the model inside `with infinity.init(config):` and train the model that "
        "`infinity.wrap(model, optimizer, config)` returns; `infinity.unwrap(model)` turns this one into a "
        "plain model again",
    )


def _train(module: nn.Module, mode: bool = True) -> nn.Module:
    """`nn.Module.train` of a model that is for inference."""
    if mode:
        raise not_for_training("train()")
    return type(module).train(module, False)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module whose parameters are all on the device, as inside `gathered`, or have others in their
    place in `memo`; without our hooks."""
    if any(isinstance(p, ReleasedParameter) and id(p) not in memo for p in module.parameters()):
        refuse_copies(type(module).__name__)
    mine = module.__dict__
    ours = {name: mine.pop(name) for name in _OURS if name in mine}
    if getattr(mine.get("train"), "func", None) is _train:
        ours["train"] = mine.pop("train")
    hooks = {name: mine[name] for name in _HOOKS if name in mine}
    for name, entries in hooks.items():
        mine[name] = OrderedDict((key, hook) for key, hook in entries.items() if not _is_ours(hook))
    if not hasattr(type(module), "__deepcopy__"):
        mine["__deepcopy__"] = None  # so that a module with a `__getattr__` does not give that of another one
    try:
        made = copy.deepcopy(module, memo)
        made.__dict__.pop("__deepcopy__", None)
        return made
    finally:
        mine.pop("__deepcopy__", None)
        mine.update(ours)
        mine.update(hooks)


def _is_ours(hook: Any) -> bool:
    home = getattr(getattr(hook, "hook", hook), "__module__", None)  # torch wraps some
    return str(home).startswith(f"{__name__.partition('.')[0]}.")


class _Trap:
    """What DistributedDataParallel iterates over before it does anything."""

    def __iter__(self) -> Iterator[str]:
        raise WrapError(
            "DistributedDataParallel does not support a wrapped model",
            expected="the model itself: the engine reduces the gradients of several ranks",
            found="DistributedDataParallel(model)",
            cure="train the model that `wrap` returned as it is; with accelerate call `wrap` on every rank, "
            "before `prepare`",
        )


class Prepared:
    """What accelerate takes for its mark of a model or an optimizer that it has seen, and leaves as it is."""

    def __bool__(self) -> bool:
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        mixed = state().mixed_precision if state is not None and state._shared_state else "no"
        if mixed != "no":
            wanted = "fp16" if mixed == "fp16" else "bf16"
            raise PrecisionError(
                f"accelerate cannot run a wrapped model with mixed precision {mixed}",
                expected='mixed_precision="no": the engine casts, and not torch.autocast',
                found=f"mixed_precision={mixed!r}",
                cure=f'set the compute dtype with Config(dtype="{wanted}"); turn mixed precision off in '
                "accelerate",
            )
        return True


def is_between_steps() -> bool:
    """Return whether accelerate accumulates gradients, so that an optimizer which it prepared makes no step
    and drops no gradients."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and not state().sync_gradients


def _to(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Move nothing from "cpu" to "cpu:1", as libraries ask for on several ranks: torch would copy all."""

    def plain(value: Any) -> Any:
        said = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cpu:"))
        return torch.device("cpu") if said and torch.device(value).type == "cpu" else value

    if torch.__future__.get_swap_module_params_on_conversion():
        raise ParameterChangedError(
            "to() of a wrapped model would exchange its parameters",
            expected="parameters that stay the same objects",
            found="torch.__future__.get_swap_module_params_on_conversion() is True",
            cure="torch.__future__.set_swap_module_params_on_conversion(False)",
        )
    return type(model).to(model, *map(plain, args), **{name: plain(v) for name, v in kwargs.items()})


_DDP = "_ddp_params_and_buffers_to_ignore"
_PREPARED = "_is_accelerate_prepared"
_OURS = ("__reduce_ex__", "__deepcopy__", "to", _DDP, _PREPARED)
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def guard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, ranks: bool = False
) -> Callable[[], None]:
    """Make these raise an error that says what to write: copies of `model` and its modules,
    DistributedDataParallel around it, and the state dicts of the `optimizer` from before `wrap`; without an
    optimizer also `train()`. With several `ranks`, make accelerate, and with it transformers' Trainer, leave
    the model as it is. Return a function that undoes this."""
    ranks = ranks or "LOCAL_RANK" in os.environ  # by which accelerate takes a process for one of several
    handles = []
    if optimizer is not None:
        handles = [
            optimizer.register_state_dict_pre_hook(_refuse_state),
            optimizer.register_load_state_dict_pre_hook(_refuse_state),
        ]
        if not (state := optimizer.state):
            optimizer.state = _Taken()
            optimizer.state.optimizer = optimizer
    modules = [m for m in model.modules() if next(m.parameters(), None) is not None]
    for module in model.modules() if optimizer is None else ():
        module.__dict__["train"] = functools.partial(_train, module)
    for module in modules:
        module.__dict__["__reduce_ex__"] = functools.partial(refuse_copies, type(module).__name__)
        module.__dict__["__deepcopy__"] = functools.partial(_deepcopy, module)
    before = model.__dict__.get(_DDP)
    model.__dict__[_DDP] = _Trap()
    model.__dict__["to"] = functools.partial(_to, model)
    if ranks:
        model.__dict__[_PREPARED] = Prepared()

    def undo() -> None:
        for handle in handles:
            handle.remove()
        if optimizer is not None:
            optimizer.state = state
        for module in modules:
            for name in ("__reduce_ex__", "__deepcopy__"):
                module.__dict__.pop(name, None)
        for module in model.modules() if optimizer is None else ():
            module.__dict__.pop("train", None)
        model.__dict__.pop(_DDP, None)
        model.__dict__.pop("to", None)
        if ranks:
            model.__dict__.pop(_PREPARED, None)
        if before is not None:
            model.__dict__[_DDP] = before

    return undo
