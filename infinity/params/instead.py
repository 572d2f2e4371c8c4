"""What a program may do in place of a use of a released parameter."""

from __future__ import annotations

from typing import Any, Final

from infinity.core.errors import OF_A_FORK

#: In place of a call of an operator with a released parameter.
CURE: Final = (
    "read it inside `with infinity.gathered(params):` (write=True to edit it); for averages and copies of "
    "the whole model use `infinity.copy_to(model, plain)`, with `plain = copy.deepcopy(model)` from before "
    "`wrap`; apply changes of modules (merged adapters, pruning, parametrizations, a resized embedding) "
    "before `wrap`, or to the model that `infinity.unwrap(model)` returns"
)
#: The same in a fork of the process that wrapped the model.
IN_A_FORK: Final = (
    f"{OF_A_FORK}; where a DataLoader forked it, set num_workers=0, or copy the values before the loader "
    "begins: `with infinity.gathered(param): values = param.detach().clone()`"
)
#: In place of a pickle, which a program may also make to give something to a process that it starts.
PICKLED: Final = (
    "save the `state_dict()`, and load that into a newly built one; or turn the model into a plain one, "
    "`infinity.unwrap(model)`, and pickle that. A process that is started gets only what it needs of the "
    "model, such as `model.config`: a DataLoader with num_workers=0 (Trainer: dataloader_num_workers=0) "
    "starts none, and a collator of transformers takes a model without values, "
    '`with torch.device("meta"): empty = type(model)(model.config)`'
)


def said(func: Any) -> str:
    """Return an operator as a program has it: "Tensor.add_", "torch.cat", "Tensor.data"."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    qualified = str(getattr(func, "__qualname__", name))
    return qualified.replace("TensorBase.", "Tensor.").replace("_VariableFunctionsClass.", "torch.")
