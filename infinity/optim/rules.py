"""The optimizers that the engine runs: what each keeps of a parameter, and how its options reach the kernel.

A rule is registered here, in `_RULES`. Its arithmetic is in csrc/cpu_adam and, with the same bits, in
hardware/adam_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch

from infinity.core.errors import OptimizerTypeError, StateDictError
from infinity.hardware.cpu_adam import SGD, Adagrad, Adam, Lion
from infinity.hardware.cpu_adam import Options as ElementOptions
from infinity.hardware.muon import Muon
from infinity.planning.parts import ADAM, MATRIX

from .muon import Muon as MuonOptimizer

Group: TypeAlias = Mapping[str, Any]
#: What an update takes of a param group: it goes element by element, or (`Muon`) needs whole matrices.
Options: TypeAlias = ElementOptions | Muon
#: The optimizers that `wrap` takes, for messages.
EXPECTED: Final = "torch.optim.AdamW, Adam, SGD or Adagrad, a Lion, or infinity.optim.Muon"
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
        whole: whether it updates whole parameters.
        matrices: the rule of groups with ``use_muon``; None: there are none.
    """

    kind: str
    moments: tuple[str, ...]
    needs: tuple[str, ...]
    options: Callable[[Group], Options]
    refused: tuple[str, ...] = ()
    counts: bool = False
    whole: bool = False
    matrices: Rule | None = None

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
        if group.get("momentum") and not self.moments:
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

    def check_state(self, state: Group, whose: str) -> None:
        """Raise `OptimizerTypeError` if there is state of a parameter that lacks what `wrap` takes over."""
        kept = (*(("step",) if self.counts else ()), *self.moments)
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
        always = ("lr", "weight_decay")
        lacks = [name for name in (*always, *self.needs, "amsgrad") if name in here and name not in group]
        lacks += [name for name in always if name not in group and name not in lacks]
        if lacks:
            raise StateDictError(
                f"{saved} was saved by another optimizer",
                expected=f"param groups with {', '.join(lacks)}",
                found=f"a param group with {', '.join(k for k in group if k != 'params')}",
                cure=f"load a state dict of {self.kind}",
            )
        if group.get("momentum") and not self.moments:
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

    def advance(self, group: Group) -> int:
        """Return by how much an update raises the count of a parameter's updates. As in torch, SGD's buffer
        begins in the first update with a momentum, which is not dampened: those before do not count."""
        is_sgd = bool(self.moments) and not self.whole
        return 0 if is_sgd and group.get("momentum") == 0 else 1

    def steps(self, state: Group) -> int:
        """Return the number of updates that saved state of a parameter has behind it. Some optimizers do not
        count them: then what matters is whether there was one."""
        names = (*self.moments, *(self.matrices.moments if self.matrices is not None else ()))
        begun = any(state.get(name) is not None for name in names)
        return int(state.get("step", begun))


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
#: The moments of all rules.
_ALL: Final = frozenset(name for rule in (*_RULES.values(), _MUON, _LION) for name in rule.moments)


def rule_of(optimizer: object) -> Rule:
    """Return the rule of an optimizer.

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
    if rule is None or not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerTypeError(
            "this optimizer cannot be offloaded",
            expected=EXPECTED,
            found=f"{kind.__module__}.{kind.__qualname__}",
            cure="call `infinity.wrap` first, and pass the optimizer that it returns to `accelerator.prepare`"
            if kind.__module__.partition(".")[0] == "accelerate"
            else f"train with one of these, such as {EXAMPLE}",
        )
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
            if rule.of(group).whole and param.ndim != 2:
                raise OptimizerTypeError(
                    "Muon updates matrices",
                    expected="parameters of two dimensions in groups with use_muon=True",
                    found=f"{place}, of shape {tuple(param.shape)}",
                    cure="put it into a group with use_muon=False of infinity.optim.Muon, for AdamW",
                )
            if param.requires_grad and (state := optimizer.state.get(param)) is not None:
                rule.of(group).check_state(state, place)
    return rule


def matrices_of(optimizer: torch.optim.Optimizer | None, rule: Rule | None) -> frozenset[int]:
    """Return the numbers of the param groups whose parameters are updated as a whole."""
    if optimizer is None or rule is None:
        return frozenset()
    return frozenset(index for index, group in enumerate(optimizer.param_groups) if rule.of(group).whole)


def foreign(state: Group, rule: Rule) -> list[str]:
    """Return what saved state of a parameter has that only other rules keep."""
    alike = (r for r in (*_RULES.values(), _LION) if (r.kind, r.whole) == (rule.kind, rule.whole))
    ours = {*rule.moments, *(name for r in alike for name in r.moments)}
    return sorted(k for k in _ALL.difference(ours).intersection(state) if state[k] is not None)
