"""Finding the units of a model, and the modules at whose boundaries they are loaded and released.

A *scope* is a module with hooks: the engine unshards the units that it needs before its forward, and
releases them after it. By default, units are: each of a group of sibling modules of one class
(the blocks of a ModuleList or Sequential), with everything below it; each other subtree that has
no such group, as high up as possible below the root; and the parameters that a module in between owns
directly. The frozen parameters of such a subtree are a unit of their own: they never change, so they stay on
the device if there is room, whatever the rest does (low-rank adapters train some thousandths of a block).
A tied parameter belongs to the unit that has it first; every scope that uses it needs that unit.

Some torch modules read parameters of their submodules before these begin, to choose a fast path, which they
do not take for released parameters. They are scopes, too, which load the parameters that they read.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from infinity.core.errors import ConfigError, PrecisionError
from infinity.core.sizes import ITEMSIZES, dtype_name
from infinity.planning.partition import ParamSpec, matched

from .param import plain_name

#: What adapters put between a layer's name and its parameters.
_INSERTED: Final = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


@dataclass
class UnitMembers:
    """The parameters of one unit, by name, in registration order."""

    name: str
    params: dict[str, nn.Parameter] = field(default_factory=dict)


@dataclass(eq=False)  # a scope owns claims: identity is what counts
class Scope:
    """A module with hooks and the indices of the units that its forward needs."""

    name: str
    of: weakref.ref[nn.Module]  # a claim that an interrupt has left keeps no model that is dropped
    units: tuple[int, ...]
    inspected_units: tuple[int, ...] = ()  # units that it looks at first, present until the next scope begins
    working_set: tuple[int, ...] = ()  # with what the modules around it need

    @property
    def module(self) -> nn.Module:
        """The module, whose hooks have the scope."""
        module = self.of()
        assert module is not None
        return module


def discover(model: nn.Module, names: Sequence[str] | None) -> tuple[list[UnitMembers], list[Scope]]:
    """Return the units and scopes of `model`; `names` (of classes or modules) overrides.

    Raises:
        ConfigError: a name of `names` matches no module that has parameters.
    """
    roots = list(_find("", model, is_root=True) if names is None else _named(model, names))

    units: list[UnitMembers] = []
    owner: dict[int, int] = {}  # id of a parameter → unit
    scopes: list[Scope] = []

    for name, module, whole in roots:
        found = module.named_parameters(prefix=name) if whole else _direct(name, module)
        params = list(found)
        for trainable, kind in ((True, ""), (False, " (frozen)")):
            fresh = {n: p for n, p in params if id(p) not in owner and p.requires_grad is trainable}
            if not fresh:
                continue
            apart = kind and any(owner.get(id(p)) == len(units) - 1 for _, p in params)
            units.append(UnitMembers((name or "(root)") + (kind if apart else ""), {}))
            for n, p in fresh.items():
                if id(p) not in owner:
                    owner[id(p)] = len(units) - 1
                    units[-1].params[n] = p
        needs = tuple(dict.fromkeys(owner[id(p)] for _, p in params))
        if needs:
            scopes.append(Scope(name, weakref.ref(module), needs))

    _add_looks(model, [name for name, _, whole in roots if whole], owner, scopes)
    _add_working_sets(scopes)
    return units, scopes


def _looked_at(module: nn.Module) -> nn.Module | None:
    """Return what torch asks `has_torch_function` of, with all below it, in a forward of `module`."""
    if isinstance(module, nn.TransformerEncoder):
        return next(iter(module.layers), None)
    return module if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)) else None


def _add_looks(model: nn.Module, whole: Sequence[str], owner: dict[int, int], scopes: list[Scope]) -> None:
    known = {scope.name: scope for scope in scopes}
    for name, module in model.named_modules():
        below = _looked_at(module)
        if below is None or any(w in ("", name) or name.startswith(w + ".") for w in whole):
            continue  # nothing, or a scope around it has all of it present
        if name not in known:
            scopes.append(Scope(name, weakref.ref(module), ()))
        scope = known.get(name, scopes[-1])
        found = dict.fromkeys(owner[id(p)] for p in below.parameters())
        scope.inspected_units = tuple(unit for unit in found if unit not in scope.units)


def _find(name: str, module: nn.Module, *, is_root: bool = False) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (name, module, whether the whole subtree is meant) in registration order."""
    children = [(n, c) for n, c in module.named_children() if _has_params(c)]
    direct = next(iter(module.parameters(recurse=False)), None) is not None
    container = not _has_forward(module) or isinstance(module, nn.Sequential)
    if not is_root and not container and not _has_blocks(module):
        yield name, module, True
        return
    if direct:
        yield name, module, False
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        classes = Counter(type(c) for _, c in children)
    else:
        classes = Counter()
    for child_name, child in children:
        path = f"{name}.{child_name}" if name else child_name
        if classes[type(child)] > 1 and _has_forward(child):
            yield path, child, True
        else:
            yield from _find(path, child)


def _has_forward(module: nn.Module) -> bool:
    # What torch.compile returns has one of its own, not its class.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_blocks(module: nn.Module) -> bool:
    for child in module.modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            classes = Counter(type(c) for c in child.children() if _has_params(c))
            if any(n > 1 for n in classes.values()):
                return True
    return False


def _has_params(module: nn.Module) -> bool:
    return next(iter(module.parameters()), None) is not None


def _direct(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for n, p in module.named_parameters(recurse=False):
        yield (f"{name}.{n}" if name else n), p


def _named(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules that `names` name, and what is left outside them, module by module."""
    modules = {n: m for n, m in model.named_modules() if _has_params(m)}
    chosen = {n for n, m in modules.items() if n in names or type(m).__name__ in names}
    for name in names:
        if name not in modules and all(type(m).__name__ != name for m in modules.values()):
            raise ConfigError(
                f"units names {name!r}, which the model does not have",
                expected="a module's class, or its name in named_modules()",
                found=repr(name),
                cure="one of " + ", ".join(sorted({type(m).__name__ for m in modules.values()})),
            )

    def inside(n: str) -> bool:
        parents = [n[:i] for i, c in enumerate(n) if c == "."]
        return any(p in chosen for p in parents) or ("" in chosen and n != "")

    for name, module in modules.items():
        if inside(name):
            continue
        if name in chosen:
            yield name, module, True
        elif next(iter(module.parameters(recurse=False)), None) is not None:
            yield name, module, False


def _add_working_sets(scopes: Sequence[Scope]) -> None:
    for scope in scopes:
        around = [
            other
            for other in scopes
            if other is not scope and (other.name == "" or scope.name.startswith(other.name + "."))
        ]
        needed = [u for s in (*around, scope) for u in s.units]
        scope.working_set = tuple(dict.fromkeys([*needed, *scope.inspected_units]))


def param_specs(
    model: nn.Module,
    members: Iterable[UnitMembers],
    groups: Mapping[int, int],
    dtype: torch.dtype | None,
    kept: Collection[str] = (),
    matrices: Collection[int] = (),
    fp32_moments: Sequence[str] = (),
) -> list[list[ParamSpec]]:
    """Return the spec of each unit's parameters, in `dtype`; None: each in its own. `kept`: names of those
    that are fp32 whatever `dtype` is; `matrices`: groups whose parameters are updated as a
    whole; `fp32_moments`: patterns for the names of those whose moments are fp32.

    Raises:
        ConfigError: a pattern matches no trainable parameter.
        PrecisionError: a parameter has a dtype that it cannot be offloaded in, or that needs a loss scale.
    """
    trainable = [plain_name(n) for m in members for n, p in m.params.items() if p.requires_grad]
    fp32 = matched(fp32_moments, trainable)
    trains = any(id(p) in groups and p.requires_grad for member in members for p in member.params.values())
    keep = set() if dtype is None else _fp32_in(model, dtype)

    def precision_of(name: str, param: nn.Parameter) -> str:
        if name in kept or id(param) in keep:
            return "fp32"
        return _own_precision(name, param, trains) if dtype is None else dtype_name(dtype)

    return [
        [
            ParamSpec(
                name,
                tuple(p.shape),
                precision_of(name, p),
                p.requires_grad,
                groups.get(id(p), -1) if p.requires_grad else -1,
                p.requires_grad and groups.get(id(p), -1) in matrices,
                p.requires_grad and plain_name(name) in fp32,
            )
            for name, p in member.params.items()
        ]
        for member in members
    ]


def _fp32_in(model: nn.Module, dtype: torch.dtype) -> set[int]:
    """Return the ids of the parameters that are fp32 in a model that computes in `dtype`."""
    found: set[int] = set()
    for module in model.modules():
        # BatchNorm keeps running statistics with its weights: torch's own autocast leaves them fp32.
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            found.update(map(id, module.parameters(recurse=False)))
        if patterns := fp32_patterns(module, dtype):
            for name, param in module.named_parameters():
                if any(pattern.search(_INSERTED.sub("", plain_name(name))) for pattern in patterns):
                    found.add(id(param))
    return found


def fp32_patterns(module: Any, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Return patterns for the names of the tensors that a module's class wants in fp32 in a model that
    computes in `dtype`. Such a class has the attributes of transformers: `_keep_in_fp32_modules` (for fp16)
    and `_keep_in_fp32_modules_strict` (for fp16 and bf16). A model of diffusers has the first, for both."""
    modules, strict = (
        value if isinstance(value := getattr(module, name, None), (list, tuple, set, frozenset)) else ()
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    )
    patterns: list[str] = []
    if hasattr(module, "register_to_config") and dtype is torch.bfloat16:  # diffusers
        patterns += map(re.escape, modules)
    if dtype is torch.float16:
        patterns += modules
    if dtype in (torch.float16, torch.bfloat16):
        patterns += strict
    return [re.compile(pattern.replace("*", ".*")) for pattern in patterns]


def _own_precision(name: str, param: nn.Parameter, trains: bool) -> str:
    if dtype_name(param.dtype) not in ITEMSIZES:  # what the kernels of the update have
        raise PrecisionError(
            f"the parameter {name!r} is {str(param.dtype).removeprefix('torch.')}",
            expected="fp32, bf16 or fp16",
            found=param.dtype,
            cure='Config(dtype="fp32"), which computes in fp32; or cast it before `wrap`: model.float()',
        )
    if trains and param.dtype is torch.float16:
        raise PrecisionError(
            f"the parameter {name!r} is fp16, and fp16 gradients of an unscaled loss underflow",
            expected='Config(dtype="fp16"), with which `optimizer.scale(loss).backward()` scales the loss',
            found="dtype=None, and a parameter that is torch.float16",
            cure='Config(dtype="fp16") and `optimizer.scale(loss).backward()`; or Config(dtype="bf16")',
        )
    return dtype_name(param.dtype)
