"""The schedulers of DeepSpeed, as a `LambdaLR` of torch with the same learning rates."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LambdaLR

from infinity.core.errors import ConfigError

from .settings import SCHEDULERS, read_deepspeed

#: The learning rate of a step, which counts from 0; for a group of parameters.
_Rate = Callable[[int], float]
#: The parameters of each scheduler, with their defaults; None: there is no default.
_WARMUP: Final = {"warmup_min_lr": 0.0, "warmup_num_steps": 1000, "warmup_type": "log"}
_PARAMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "WarmupLR": {**_WARMUP, "warmup_max_lr": "lr"},
    "WarmupDecayLR": {**_WARMUP, "warmup_max_lr": 0.001, "total_num_steps": None},
    "WarmupCosineLR": {
        **{"total_num_steps": None, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000},
        **{"cos_min_ratio": 0.0001, "warmup_type": "log"},
    },
    "OneCycle": {
        **{"cycle_min_lr": None, "cycle_max_lr": None, "decay_lr_rate": 0.0, "cycle_first_step_size": 2000},
        **{"cycle_second_step_size": "first", "cycle_first_stair_count": 0, "decay_step_size": 0},
        **{"cycle_second_stair_count": "first", "cycle_momentum": True, "cycle_min_mom": 0.8},
        **{"cycle_max_mom": 0.9, "decay_mom_rate": 0.0},
    },
    "LRRangeTest": {
        **{"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0},
        "lr_range_test_staircase": False,
    },
}
#: Parameters that may be a list, with a value for each param group.
_PER_GROUP: Final = (
    *("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"),
    "lr_range_test_min_lr",
)
#: Numbers of steps that may not be 0.
_COUNTS: Final = ("warmup_num_steps", "total_num_steps", "cycle_first_step_size", "lr_range_test_step_size")
#: Parameters that may be negative.
_SIGNED: Final = ("decay_mom_rate", "lr_range_test_step_rate")


def scheduler_from(
    source: str | os.PathLike[str] | Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    arguments: Any = None,
    *,
    steps: int | None = None,
) -> LambdaLR:
    """Return a scheduler with the learning rates of the block `scheduler` in a settings file of DeepSpeed.

    DeepSpeed's schedulers begin one step late: the first two steps of a warm-up have its lowest rate. Call
    `step()` after each `optimizer.step()`, as usual. OneCycle also sets the ``betas``, unless
    ``cycle_momentum`` is false.

    Args:
        source: the file, or its content as a dict.
        optimizer: of the wrapped model, or the one that `wrap` gets.
        arguments: the TrainingArguments that fill in ``"auto"``. A learning rate in the block `optimizer`
            goes before theirs.
        steps: number of steps in the training, for ``"auto"`` in ``total_num_steps``. None: ``max_steps`` of
            the arguments.

    Raises:
        ConfigError: there is no such block, or the scheduler or one of its parameters is wrong.
    """
    settings = read_deepspeed(source)
    block = settings.get("scheduler")
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or kind not in SCHEDULERS:
        raise ConfigError(
            "these settings of DeepSpeed have no scheduler that is DeepSpeed's own",
            expected=f"scheduler.type: {', '.join(SCHEDULERS)}",
            found="no scheduler" if block is None else repr(kind),
            cure="create a scheduler of torch.optim.lr_scheduler",
        )
    given = block.get("params") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            "scheduler.params cannot be used",
            expected="an object: {...}",
            found=repr(given),
            cure="correct scheduler.params",
        )
    own = settings.get("optimizer")
    named = own.get("params") if isinstance(own, Mapping) else None
    rate = named.get("lr") if isinstance(named, Mapping) else None
    params = _params(kind, given, arguments, steps, rate if _is_number(rate) else None)
    rates = [_rate(kind, params, optimizer, index) for index in range(len(optimizer.param_groups))]
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0  # LambdaLR multiplies it by the rate, which is exact for 1
    return LambdaLR(optimizer, rates)


def _params(
    kind: str, given: Mapping[str, Any], arguments: Any, steps: int | None, rate: float | None
) -> dict[str, Any]:
    """Return all parameters of a scheduler, checked; `rate`: of the block `optimizer`, if it names one."""
    known = _PARAMS[kind]
    if unknown := [name for name in given if name not in known]:
        _wrong(unknown[0], given[unknown[0]], f"parameters of {kind}: {', '.join(known)}", "remove it")
    total = given.get("total_num_steps")
    total = _filled(arguments, "max_steps", steps) if total in (None, "auto") else total
    if total is not None:
        _check("total_num_steps", total, None)
    filled = {
        "total_num_steps": total,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": _filled(arguments, "learning_rate", rate),
        "warmup_num_steps": _warmup_steps(arguments, total),
    }
    params = {**known, **{name: value for name, value in given.items() if value is not None}}
    for name, value in params.items():
        if value in (None, "auto"):
            params[name] = filled.get(name)
        if params[name] is None:
            cure = "give `steps`" if name == "total_num_steps" else "write one, or give Trainer's `arguments`"
            _wrong(name, value, "a value", cure)
        _check(name, params[name], known[name])
    return params


def _filled(arguments: Any, name: str, said: Any = None) -> Any:
    """Return a value of the arguments that is set (`max_steps` is -1 if it is not)."""
    value = getattr(arguments, name, None) if said is None else said
    return value if value and value > 0 else None


def _warmup_steps(arguments: Any, steps: int | None) -> Any:
    """Return the steps of the warm-up as Trainer fills them in."""
    if steps is None or not hasattr(arguments, "get_warmup_steps"):
        return _filled(arguments, "warmup_steps")
    return max(1, arguments.get_warmup_steps(steps))


def _check(name: str, value: Any, default: Any) -> None:
    least = 1 if name in _COUNTS else -math.inf if name in _SIGNED else 0
    right, expected = False, "a finite number" if least == -math.inf else f"a number of at least {least}"
    if name == "warmup_type":
        right, expected = value in ("log", "linear"), '"log" or "linear"'
    elif isinstance(default, bool):
        right, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, str) and value == default:
        right = True
    else:
        many = value if name in _PER_GROUP and isinstance(value, (list, tuple)) else (value,)
        right = all(_is_number(each) and each >= least for each in many)
    if not right:
        _wrong(name, value, expected, f"correct scheduler.params.{name}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _wrong(name: str, value: object, expected: str, cure: str) -> None:
    raise ConfigError(
        f"scheduler.params.{name} cannot be used", expected=expected, found=repr(value), cure=cure
    )


def _rate(kind: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer, index: int) -> _Rate:
    """Return the rates of one param group."""

    def of(name: str) -> float:
        """Return a parameter that may have a value for each group."""
        value = params[name]
        if not isinstance(value, Sequence) or isinstance(value, str):
            return float(value)
        if len(value) != len(optimizer.param_groups):
            expected = f"{len(optimizer.param_groups)} values, one for each param group"
            _wrong(name, value, expected, f"correct scheduler.params.{name}")
        return float(value[index])

    lr = float(optimizer.param_groups[index]["lr"])
    if kind == "LRRangeTest":
        least, size = of("lr_range_test_min_lr"), params["lr_range_test_step_size"]
        rise, stairs = params["lr_range_test_step_rate"], params["lr_range_test_staircase"]
        return lambda step: least * (1 + rise * (math.floor(step / size) if stairs else step / size))
    if kind == "OneCycle":
        return _one_cycle(params, of, optimizer, index)
    share = _warmup_share(kind, params)
    if kind == "WarmupCosineLR":
        return lambda step: lr * share(step - 1) if step else 0.0
    low = of("warmup_min_lr")
    high = lr if params["warmup_max_lr"] == "lr" else of("warmup_max_lr")
    rise = high - low
    return lambda step: low + rise * share(step - 1) if step else low


def _warmup_share(kind: str, params: Mapping[str, Any]) -> Callable[[int], float]:
    """Return the share of the highest rate as a function of the number of finished steps, less one."""
    warmup, total = max(2, params["warmup_num_steps"]), params.get("total_num_steps", 0)
    inverse_log = 1.0 / math.log(warmup)
    cosine = kind == "WarmupCosineLR"

    def share(step: int) -> float:
        if step < warmup:
            risen = inverse_log * math.log(step + 1) if params["warmup_type"] == "log" else step / warmup
            if not cosine:
                return risen
            least = params["warmup_min_ratio"]
            return float(least + risen * (1.0 - least))
        if cosine:
            progress = min(1.0, (step - warmup + 1) / max(1, total - warmup))
            least = params["cos_min_ratio"]
            fallen = (1 + math.cos(math.pi * progress)) / 2
            return max(0.0, float(least + (1.0 - least) * fallen))
        if kind == "WarmupDecayLR":
            return max(0.0, float(total - step) / float(max(1.0, total - warmup)))
        return 1.0

    return share


def _one_cycle(
    params: Mapping[str, Any], of: Callable[[str], float], optimizer: torch.optim.Optimizer, index: int
) -> _Rate:
    first = float(params["cycle_first_step_size"])
    second = first if params["cycle_second_step_size"] == "first" else float(params["cycle_second_step_size"])
    total, ratio = first + second, first / (first + second)
    half, other = params["cycle_first_stair_count"], params["cycle_second_stair_count"]
    stairs: tuple[int, int] = (half, half if other == "first" else other)
    low, high, decay = of("cycle_min_lr"), of("cycle_max_lr"), float(params["decay_step_size"])
    slopes: dict[str, float] = {"lr": params["decay_lr_rate"], "mom": params["decay_mom_rate"]}

    def height(step: int) -> float:
        """Return how much of the way to the top a step has gone."""
        x = 1.0 + step / total - math.floor(1 + step / total)
        count = stairs[0] if x <= ratio else stairs[1]
        if count > 0:
            inside = step % total
            at = inside * count / first if inside <= first else (total - inside) * count / second
            return math.floor(at) / count
        return x / ratio if x <= ratio else (x - 1) / (ratio - 1)

    def decayed(step: int, name: str) -> float:
        """Return the factor of a step after the cycle."""
        return 1 + slopes[name] * ((step - total) / decay) if decay and slopes[name] else 1.0

    def rate(step: int) -> float:
        inside = step - 1 < total
        if params["cycle_momentum"] and "betas" in optimizer.defaults:
            least, most = of("cycle_min_mom"), of("cycle_max_mom")
            momentum = most - (most - least) * height(step) if inside else most * decayed(step, "mom")
            # A LambdaLR sets rates only; DeepSpeed sets 0.99 as well.
            optimizer.param_groups[index]["betas"] = (momentum if step else least, 0.99)
        if not inside:
            return low / decayed(step, "lr")
        return low + (high - low) * height(step) if step else low

    return rate
