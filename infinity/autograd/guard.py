"""Checks at the beginning of a forward that the model is as it was at `wrap`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.core.errors import ParameterChangedError
from infinity.params.discover import Scope
from infinity.params.param import ShardedParam, traced_error
from infinity.params.unit import ParamUnit
from infinity.params.uses import Uses

from .saved import autocast_error


class Guard:
    """Looks at a model's parameters, and at autocast, where forwards begin."""

    def __init__(
        self,
        model: nn.Module,
        scopes: Sequence[Scope],
        params: Sequence[ShardedParam],
        units: Sequence[ParamUnit],
        uses: Uses,
        *,
        trains: bool = True,
    ) -> None:
        self._made = "wrap" if trains else "infinity.inference"  # what the model was given to
        self._params = params
        self._known = {id(s.param) for s in params}
        #: Of each module the numbers of its parameters and of its children.
        self._modules = [
            (m, [*map(id, m._parameters.values())], [*map(id, m._modules.values())]) for m in model.modules()
        ]
        self._units = units
        self._uses = uses
        self._device_type = units[0].storage.device.type if units else "cpu"
        self._scope_params: dict[Scope, list[tuple[nn.Module, str, nn.Parameter]]] = {
            s: [
                (m, n, p)
                for m in s.module.modules()
                for n, p in m._parameters.items()
                if isinstance(p, nn.Parameter)
            ]
            for s in scopes
        }

    def check_autocast(self, name: str) -> None:
        """Raise `PrecisionError` where torch.autocast is on as the module `name` begins."""
        if torch.is_autocast_enabled(self._device_type):
            raise autocast_error(f"a forward of {name or 'the model'}", self._device_type)

    def check_traced(self) -> None:
        """Raise `ParameterError` where torch records a forward, to repeat it without the engine."""
        exporting = getattr(torch.compiler, "is_exporting", bool)()  # from torch 2.7 on
        if exporting or torch._C._get_tracing_state() is not None:
            raise traced_error("torch.export" if exporting else "torch.jit.trace")
        if self._device_type != "cpu" and torch.cuda.is_current_stream_capturing():
            raise traced_error("a CUDA graph that is being captured")

    def check_params(self) -> None:
        """Raise `ParameterChangedError` if a parameter was cast, moved (`p.data = t`, but in a block that
        keeps edits) or unfrozen."""
        written = self._uses.writes()
        grad = torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass():
            for sharded in self._params:  # without calls: there are many
                param, spec, unit = sharded.param, sharded.spec, self._units[sharded.unit]
                place = param.storage_offset(), param.stride()
                there = param.untyped_storage()._cdata == unit.storage._cdata and place == sharded.place
                if not there or param.dtype is not spec.dtype or param.shape != spec.shape:
                    sharded.check(None if sharded.unit in written else unit.storage)
                # PEFT unfreezes a reference adapter while it is used
                if grad and not spec.trainable and param.requires_grad:
                    raise self._unfrozen(sharded.name)

    def _unfrozen(self, name: str) -> ParameterChangedError:
        if self._made != "wrap":
            return ParameterChangedError(
                f"the parameter {name!r} requires a gradient, but the model is for inference",
                expected="requires_grad=False",
                found="requires_grad=True",
                cure="`infinity.unwrap(model)`, and `infinity.wrap(model, optimizer, config)` to train it",
            )
        return ParameterChangedError(
            f"the parameter {name!r} was frozen at `wrap` and has no optimizer state",
            expected="requires_grad=False; you may freeze and unfreeze parameters that required a gradient "
            "at `wrap`, and they keep their state",
            found="requires_grad=True",
            cure="wrap with requires_grad=True and freeze after `wrap`; or now "
            '`infinity.save(optimizer, "checkpoints")`, `infinity.unwrap(model)`, `wrap` it again with an '
            "optimizer over all trained parameters, and "
            '`infinity.load(optimizer, "checkpoints", strict=False)`: the others keep their state',
        )

    def check_added(self, model: nn.Module) -> None:
        """Raise `ParameterChangedError` if the model has other parameters than at `wrap`."""
        for module, params, children in self._modules:  # without calls: there are many
            if [*map(id, module._parameters.values())] != params or [
                *map(id, module._modules.values())
            ] != children:
                break
        else:
            return
        known = self._known
        found = [id(p) for p in model.parameters()]
        if len(found) == len(known) and known.issuperset(found):
            return
        if not all(isinstance(p, nn.Parameter) for p in model.parameters()):
            return  # tensors in their place: the scope that has them says what to write
        added = [n for n, p in model.named_parameters() if id(p) not in known]
        names = added or [s.name for s in self._params if id(s.param) not in set(found)]
        raise ParameterChangedError(
            f"parameters were {'added or replaced' if added else 'removed'} after `{self._made}`: "
            f"{', '.join(map(repr, names[:8]))}{' …' * (len(names) > 8)}",
            expected=f"the {len(known)} parameters that the model had at `{self._made}`",
            found=f"{len(found)} parameters",
            cure="build the whole model, with its adapters, and resize, replace or remove modules, before "
            f"`{self._made}`; or `infinity.unwrap(model)`, change it, and pass it to `{self._made}` again",
        )

    def check_scope(self, scope: Scope) -> None:
        """Raise `PrecisionError` where torch.autocast is on as a scope begins; `ParameterChangedError` if a
        parameter of it was replaced or removed."""
        if torch.is_autocast_enabled(self._device_type):
            self.check_autocast(scope.name)
        for module, name, param in self._scope_params[scope]:
            found = module._parameters.get(name)
            if found is param:
                continue
            if found is not None and not isinstance(found, nn.Parameter):
                raise ParameterChangedError(
                    f"the parameter {name!r} of {type(module).__name__} in {scope.name or 'the model'!r} "
                    "is replaced by a tensor",
                    expected="the parameters that the model had at `wrap`",
                    found="other values, such as those of torch.func.functional_call",
                    cure="call the model itself; for gradients of its parameters use loss.backward() or "
                    "torch.autograd.grad(loss, parameters); torch.func.grad of its inputs works",
                )
            raise ParameterChangedError(
                f"the parameter {name!r} of {type(module).__name__} in {scope.name or 'the model'!r} "
                "was replaced or removed after `wrap`",
                expected="the parameters that the model had at `wrap`",
                found="another object",
                cure="build the whole model, and resize, replace or remove modules, before `wrap`; or "
                "`infinity.unwrap(model)`, change it, and wrap it again",
            )
