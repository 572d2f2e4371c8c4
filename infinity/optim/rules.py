"""The optimizers that the engine runs: what each keeps of a parameter, and how its options reach the kernel.

A rule is registered here, in `_RULES`. Its arithmetic is in csrc/cpu_adam and, with the same bits, in
hardware/adam_reference.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch

from infinity.core.errors import OptimizerTypeError, StateDictError
from infinity.hardware.cpu_adam import SGD, Adagrad, Adam, Lion
from infinity.hardware.cpu_adam import Options as ElementOptions
from infinity.hardware.muon import Muon
from infinity.planning.matrices import ADAFACTOR, FACTORS, factors_of
from infinity.planning.parts import ADAM, MATRIX

from .muon import Muon as MuonOptimizer
from .own_code import Code, OwnCode, options_of

Group: TypeAlias = Mapping[str, Any]
#: What an update takes of a param group: it goes element by element, or (`Muon`) needs whole matrices.
Options: TypeAlias = ElementOptions | Muon | OwnCode
#: What a message recommends.
FUSED: Final = "torch.optim.AdamW, Adam, SGD or Adagrad, a Lion, or infinity.optim.Muon"
EXPECTED: Final = (
    f"{FUSED}; or, by its own code, RMSprop, Adadelta, Adamax, RAdam, NAdam, ASGD, Rprop or Adafactor"
)
EXAMPLE: Final = "torch.optim.AdamW(model.parameters(), ...)"


@dataclass(frozen=True)
class Rule:
    """One class of optimizers.

    Attributes:
        kind: what a checkpoint calls it. Optimizers of one kind can load each other's state.
        moments: names in `optimizer.state` of what it keeps of a parameter, in the kernel's order.
        needs: options that a param group must have, beside lr and weight_decay.
        options: returns what the kernel takes of a param group, beside lr and weight_decay.
        refused: options that are not supported unless they are false.
        counts: whether the state of a parameter counts its updates, as ``step``.
        whole: whether it updates whole parameters; by its `code`, what it keeps are their factors: see
            `factors_of`, of planning.
        matrices: the rule of groups with ``use_muon``; None: there are none.
        code: of an optimizer that its own code updates: [Note: pieces of a parameter]; None: it has a kernel.
    """

    kind: str
    moments: tuple[str, ...]
    needs: tuple[str, ...]
    options: Callable[[Group], Options]
    refused: tuple[str, ...] = ()
    counts: bool = False
    whole: bool = False
    matrices: Rule | None = None
    code: Code | None = None

    @property
    def has_factors(self) -> bool:
        """Whether its state of a parameter are factors of the whole: see `factors_of`, of planning."""
        return self.whole and self.code is not None

    def of(self, group: Group) -> Rule:
        """Return the rule of a param group: this one, or that of matrices."""
        return self.matrices if self.matrices is not None and group.get("use_muon") else self

    def check(self, group: Group, found: str) -> None:
        """Raise `OptimizerTypeError` for an option that is not supported; `found`: where it is."""
        if (rule := self.of(group)) is not self:
            rule.check(group, found)
            return
        for option, expected in self._unsupported(group):
            raise _not_supported(option, expected, group, found)
        if self.code is not None and (lacking := self.code.without_room(group)):
            raise OptimizerTypeError(
                f"a param group got options after `wrap`, which made no room for {', '.join(lacking)}",
                expected=f"options with which {self.kind} keeps {', '.join(self.moments) or 'no moments'}",
                found=f"options of {found} with which it also keeps {', '.join(lacking)}",
                cure="set them in the groups before `wrap`; they may change afterwards",
            )
        if self.code is None and group.get("momentum") and not self.moments:
            raise OptimizerTypeError(
                "a param group got a momentum after `wrap`, which made no room for momentum_buffer",
                expected="momentum=0, as in all groups at `wrap`",
                found=f"momentum={group['momentum']!r} in {found}",
                cure="set a momentum in one of the groups before `wrap`; it may change afterwards",
            )

    def _unsupported(self, group: Group) -> Iterator[tuple[str, str]]:
        """Yield each option that is set and not supported, and what it has to be."""
        for option in (*_REFUSED, *self.refused):
            if group.get(option):
                yield option, f"{option}=False" if group[option] is True else f"{option}=0"

    def check_dtype(self, dtype: str) -> None:
        """Raise `OptimizerTypeError` if it cannot keep moments in `dtype`."""
        if self.code is not None and dtype != "fp32":
            raise OptimizerTypeError(
                f"moments of {self.kind}, which runs by its own code in PyTorch, are fp32",
                expected='Config(optimizer_state_dtype="fp32")',
                found=f"optimizer_state_dtype={dtype!r}",
                cure=f'optimizer_state_dtype="fp32"; or an optimizer that runs fused: {FUSED}',
            )

    def check_state(self, state: Group, whose: str, group: Group, shape: Sequence[int]) -> None:
        """Raise `OptimizerTypeError` if there is state of a parameter that lacks what `wrap` takes over."""
        kept: tuple[str, ...] = (*(("step",) if self.counts else ()), *self.moments)
        if self.code is not None:
            kept = self._kept(self.code, group, shape)
        if state and (lacking := [name for name in kept if name not in state]):
            raise OptimizerTypeError(
                f"the optimizer's state of {whose} is not complete",
                expected=f"{', '.join(kept)}; or no state, as before the first step",
                found=f"{', '.join(state)}, and no {', '.join(lacking)}",
                cure="call `optimizer.state.clear()` before `wrap`, so that the moments begin at zero; or "
                "load a whole state dict into the optimizer",
            )

    def check_saved(self, group: Group, saved: str, here: Group) -> None:
        """Raise `StateDictError` for options that this rule does not have; `saved` is what has them, and
        `here` the group that gets them."""
        # A torch.optim.Muon has no use_muon, and has matrices alone.
        theirs, ours = (bool(each.get("use_muon", "ns_steps" in each)) for each in (group, here))
        if theirs != ours:
            raise StateDictError(
                f"{saved} has a param group with another use_muon than the optimizer",
                expected=f"use_muon={ours}",
                found=f"use_muon={theirs}",
                cure="build the same groups as in what was saved",
            )
        if (rule := self.of(here)) is not self:
            rule.check_saved(group, saved, group)
            return
        always = ("lr", "weight_decay") if self.code is None else ()
        # Of some optimizers of torch, the options alone tell which one it was.
        lacks = [name for name in (*always, *self.needs, "amsgrad") if name in here and name not in group]
        lacks += [name for name in always if name not in group and name not in lacks]
        if self.code is not None and not lacks:
            lacks = [f"no {name}" for name in _ALL_OPTIONS if name in group and name not in here]
        if lacks:
            raise StateDictError(
                f"{saved} was saved by another optimizer",
                expected=f"param groups with {', '.join(lacks)}",
                found=f"a param group with {', '.join(k for k in group if k != 'params')}",
                cure=f"load a state dict of {self.kind}",
            )
        if self.code is not None and (lacking := self.code.without_room({**here, **group})):
            raise StateDictError(
                f"{saved} has options for which `wrap` made no room",
                expected=f"options with which {self.kind} keeps {', '.join(self.moments) or 'no moments'}",
                found=f"options with which it also keeps {', '.join(lacking)}",
                cure="set them in one of the groups before `wrap`",
            )
        if self.code is None and group.get("momentum") and not self.moments:
            raise StateDictError(
                f"{saved} has a momentum, and `wrap` made no room for momentum_buffer",
                expected="momentum=0, as in all groups at `wrap`",
                found=f"momentum={group['momentum']!r}",
                cure="set a momentum in one of the groups before `wrap`",
            )
        for option, expected in self._unsupported(group):
            raise StateDictError(
                f"{saved} was saved with {option}={group[option]!r}",
                expected=expected,
                found=f"{option}={group[option]!r}",
                cure=f"load a state dict of plain {self.kind}",
            )

    def lacking(self, state: Group, group: Group, shape: Sequence[int]) -> list[str]:
        """Return what saved state of a parameter that was updated lacks, of what its own code needs."""
        if self.code is None or not self.steps(state):
            return []
        return [name for name in self._kept(self.code, group, shape) if state.get(name) is None]

    def _kept(self, code: Code, group: Group, shape: Sequence[int]) -> tuple[str, ...]:
        moments, counters = code.kept(options_of(group))
        return (*counters, *(factors_of(shape) if self.has_factors else moments))

    def shapes_of(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that state of a parameter of `shape` has."""
        shapes = dict.fromkeys((*self.moments, "master", "front"), (*shape,))
        return shapes | (factors_of(shape) if self.has_factors else {})

    def advance(self, group: Group) -> int:
        """Return by how much an update raises the count of a parameter's updates. As in torch, SGD's buffer
        begins in the first update with a momentum, which is not dampened: those before do not count."""
        is_sgd = bool(self.moments) and self.code is None and not self.whole
        return 0 if is_sgd and group.get("momentum") == 0 else 1

    def steps(self, state: Group) -> int:
        """Return the number of updates that saved state of a parameter has behind it. Some optimizers do not
        count them: then what matters is whether there was one."""
        names = (*self.moments, *(self.matrices.moments if self.matrices is not None else ()))
        names += (*self._counters,)
        begun = any(state.get(name) is not None for name in names)
        return int(state.get("step", begun))

    @property
    def _counters(self) -> Mapping[str, Any]:
        return self.code.counters if self.code is not None else {}

    def counters(self, state: Group) -> dict[str, float]:
        """Return the counters of saved state of a parameter, beside those that all optimizers have; nothing,
        where it has not been updated."""
        if not self.steps(state):
            return {}
        return {name: float(state[name]) for name in self._counters if state.get(name) is not None}

    def factors(self, state: Group, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the factors of saved state of a parameter; nothing, where it has not been updated."""
        if not self.has_factors or not self.steps(state):
            return {}
        return {name: state[name].detach().to("cpu", torch.float32, copy=True) for name in factors_of(shape)}

    def factors_of(self, factors: Group, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the factors of a parameter as its optimizer keeps them; before its first update, zeros."""
        if not self.has_factors:
            return {}
        of_shape = factors_of(shape).items()
        return {name: factors[name].clone() if factors else torch.zeros(size) for name, size in of_shape}

    def counters_of(self, step: int, counters: Mapping[str, float], group: Group) -> dict[str, Any]:
        """Return the counters of a parameter as its optimizer keeps them, after `step` updates."""
        if self.code is None:
            return {}
        if not step:  # what an optimizer begins with
            counters = {name: _begins_with(name, group) for name in self.code.counters}
        return {name: self.code.counter(name, value) for name, value in counters.items()}

    def begin(self, moments: Mapping[str, torch.Tensor], group: Group) -> None:
        """Give moments of a parameter that was never updated, in fp32, the values that they begin with."""
        for name in moments if self.code is not None else ():
            if (value := _begins_with(name, group)) != 0.0:
                moments[name].fill_(value)


def _adam(*, decoupled: bool) -> Rule:
    def options(group: Group) -> Adam:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        wanted = bool(group.get("decoupled_weight_decay", decoupled))
        return Adam(beta1, beta2, float(group["eps"]), wanted)

    return Rule("Adam", ADAM, ("betas", "eps"), options, counts=True)


def _sgd(group: Group) -> SGD:
    return SGD(float(group["momentum"]), float(group["dampening"]), bool(group["nesterov"]))


def _adagrad(group: Group) -> Adagrad:
    return Adagrad(float(group["lr_decay"]), float(group["eps"]))


def _lion(group: Group) -> Lion:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Lion(beta1, beta2)


def _muon(group: Group) -> Muon:
    a, b, c = (float(coefficient) for coefficient in group["ns_coefficients"])
    more = int(group["ns_steps"]), (a, b, c), float(group["eps"]), group["adjust_lr_fn"]
    return Muon(float(group["momentum"]), bool(group["nesterov"]), *more)


def _not_supported(option: str, expected: str, group: Group, found: str) -> OptimizerTypeError:
    return OptimizerTypeError(
        f"the option {option!r} is not supported",
        expected=expected,
        found=f"{option}={group[option]!r} in {found}",
        cure=f"leave {option} out",
    )


def _of_code(code: Code, kind: str, optimizer: torch.optim.Optimizer) -> Rule:
    needs, whole = tuple(n for n in optimizer.param_groups[0] if n in _ALL_OPTIONS), kind == ADAFACTOR
    moments = () if whole else (*code.moments,)
    return Rule(kind, moments, needs, lambda group: OwnCode(code, options_of(group)), whole=whole, code=code)


def _begins_with(name: str, group: Group) -> float:
    """Return what a moment or a counter of torch's optimizers is before the first update."""
    value = _BEGINS_WITH.get(name, 0.0)
    return float(group[value]) if isinstance(value, str) else value


#: Where that is not zero: the value, or the option that has it. Of NAdam, ASGD and Rprop.
_BEGINS_WITH: Final[Mapping[str, float | str]] = {
    "mu_product": 1.0,
    "mu": 1.0,
    "eta": "lr",
    "step_size": "lr",
}
#: Whose own code is elementwise, as tests show; but Adafactor's, which gets whole parameters.
_BY_OWN_CODE: Final = (
    torch.optim.Adafactor,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.NAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_REFUSED: Final = ("amsgrad", "capturable", "differentiable")  # options of torch's optimizers
_LION: Final = Rule("Lion", ("exp_avg",), ("betas",), _lion, ("caution", "corrected_weight_decay"))
_MUON: Final = Rule(
    "Muon",
    MATRIX,
    ("momentum", "nesterov", "ns_steps", "ns_coefficients", "eps", "adjust_lr_fn"),
    _muon,
    ("maximize",),
    whole=True,
)
_RULES: dict[type, Rule] = {
    torch.optim.AdamW: _adam(decoupled=True),
    torch.optim.Adam: _adam(decoupled=False),
    torch.optim.SGD: Rule("SGD", ("momentum_buffer",), ("momentum", "dampening", "nesterov"), _sgd),
    torch.optim.Adagrad: Rule(
        "Adagrad", ("sum",), ("lr_decay", "eps"), _adagrad, ("initial_accumulator_value",), counts=True
    ),
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    _RULES[torch.optim.Muon] = _MUON
_RULES[MuonOptimizer] = replace(_RULES[torch.optim.AdamW], kind="Muon", matrices=_MUON)
#: Packages with a class `Lion` of its paper's arithmetic (arXiv 2302.06675, algorithm 2).
_HAVE_LION: Final = ("infinity", "bitsandbytes", "lion_pytorch", "timm")
#: What any rule keeps.
_ALL: Final = frozenset(
    (
        *(name for rule in (*_RULES.values(), _MUON, _LION) for name in rule.moments),
        *("square_avg", "grad_avg", "acc_delta", "exp_inf", "prev", *_BEGINS_WITH, "ax"),
        *FACTORS,
    )
)
#: Options of some of torch's optimizers that tell them apart, unlike those that newer versions of torch add.
_ALL_OPTIONS: Final = tuple(
    dict.fromkeys(
        name
        for kind in (*_RULES, *_BY_OWN_CODE)
        for name in inspect.signature(kind).parameters
        if name not in ("params", "foreach", "fused", "maximize", "capturable", "differentiable")
        and name != "decoupled_weight_decay"
    )
)


def rule_of(optimizer: object, *, elementwise: bool = False) -> Rule:
    """Return the rule of an optimizer. `elementwise`: the caller says that an optimizer of any class updates
    each element by itself, which is probed.

    Raises:
        OptimizerTypeError: the engine does not run it, an option is not supported, or it has a state that
            `wrap` cannot take over.
    """
    if isinstance(optimizer, (list, tuple, dict, set)):
        raise OptimizerTypeError(
            "wrap takes one optimizer",
            expected=f"one of {EXPECTED}, over all trainable parameters",
            found=f"a {type(optimizer).__name__} of {len(optimizer)}",
            cure="one optimizer with a param group for each, which may have options of its own: "
            'torch.optim.AdamW([{"params": first, "lr": 1e-3}, {"params": second, "lr": 1e-4}]); for Muon '
            "with AdamW, infinity.optim.Muon",
        )
    kind = type(optimizer)
    rule = _RULES.get(kind)
    if rule is None and kind.__name__ == "Lion" and kind.__module__.partition(".")[0] in _HAVE_LION:
        rule = _LION
    named = f"{kind.__module__}.{kind.__qualname__}"
    own = rule is None and isinstance(optimizer, torch.optim.Optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or (
        own and kind not in _BY_OWN_CODE and not elementwise
    ):
        raise OptimizerTypeError(
            "this optimizer cannot be offloaded",
            expected=EXPECTED,
            found=named,
            cure="torch.optim.Adafactor, which has other options"
            if kind.__name__ == ADAFACTOR
            else f"{EXAMPLE}; or, if it updates each element by itself, wrap(…, elementwise=True)",
        )
    if rule is None:
        for index, group in enumerate(optimizer.param_groups):
            for option in _REFUSED:
                if group.get(option):
                    raise _not_supported(option, f"{option}=False", group, f"param group {index}")
        code = Code(optimizer)
        if kind not in _BY_OWN_CODE:
            code.probe(optimizer)
        rule = _of_code(code, named if kind not in _BY_OWN_CODE else kind.__name__, optimizer)
    groups = optimizer.param_groups
    if getattr(optimizer, "decoupled_wd", False):  # of lion_pytorch, in no group
        raise OptimizerTypeError(
            "the option 'decoupled_weight_decay' of this Lion is not supported",
            expected="decoupled_weight_decay=False",
            found="decoupled_weight_decay=True",
            cure="leave it out, and divide weight_decay by lr",
        )
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)  # of bitsandbytes
    if bits != 32:
        raise OptimizerTypeError(
            "the option 'optim_bits' of this Lion is not supported",
            expected="optim_bits=32",
            found=f"optim_bits={bits}",
            cure='leave it out; Config(optimizer_state_dtype="8bit") keeps moments in 8 bits',
        )
    if kind is torch.optim.SGD and not any(group["momentum"] for group in groups):
        rule = replace(rule, moments=())
    for index, group in enumerate(groups):
        rule.check(group, f"param group {index}")
        for number, param in enumerate(group["params"]):
            place = f"parameter {number} of param group {index}"
            if rule.of(group).whole and rule.code is None and param.ndim != 2:
                raise OptimizerTypeError(
                    "Muon updates matrices",
                    expected="parameters of two dimensions in groups with use_muon=True",
                    found=f"{place}, of shape {tuple(param.shape)}",
                    cure="put it into a group with use_muon=False of infinity.optim.Muon, for AdamW",
                )
            if param.requires_grad and (state := optimizer.state.get(param)) is not None:
                rule.of(group).check_state(state, place, group, param.shape)
    return rule


def matrices_of(optimizer: torch.optim.Optimizer | None, rule: Rule | None) -> dict[int, str]:
    """Return the param groups whose parameters are updated as a whole, and by what."""
    if optimizer is None or rule is None:
        return {}
    rules = enumerate(rule.of(group) for group in optimizer.param_groups)
    return {index: of_group.kind for index, of_group in rules if of_group.whole}


def foreign(state: Group, rule: Rule) -> list[str]:
    """Return what saved state of a parameter has that only other rules keep."""
    if rule.code is not None:
        ours = {*rule.moments, *rule.code.counters, "step", "master", "front"}
        ours |= {*FACTORS} if rule.has_factors else set()
        return sorted(name for name, value in state.items() if name not in ours and value is not None)
    alike = (r for r in (*_RULES.values(), _LION) if (r.kind, r.whole) == (rule.kind, rule.whole))
    ours = {*rule.moments, *(name for r in alike for name in r.moments)}
    return sorted(k for k in _ALL.difference(ours).intersection(state) if state[k] is not None)
