"""What a program may do in place of a use of a released parameter: one cure for each kind of use.

torch tells which operator is called, and the stack tells which library calls it.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from infinity.core.errors import OF_A_FORK
from infinity.core.stack import frames

_READ: Final = (
    "read it inside `with infinity.gathered(params):` (write=True to edit it); to copy or average the whole "
    "model use `infinity.copy_to(model, plain)`"
)
_EDIT: Final = "edit it inside `with infinity.gathered(params, write=True):`"
_AVERAGE: Final = (
    "`plain = copy.deepcopy(model)` before `wrap`; after each step call `infinity.copy_to(model, plain)` and "
    "read the parameters of `plain`"
)
_FORK: Final = (
    f"{OF_A_FORK}; where a DataLoader forked it, set num_workers=0, or copy the values before the loader "
    "begins: `with infinity.gathered(param): values = param.detach().clone()`"
)
_CHANGE: Final = "do this before `wrap`, or to the model that `infinity.unwrap(model)` returns"

#: For what a program gives to a process that is not a fork of it.
_NEW_PROCESS: Final = (
    "give the new process only what it needs of the model, such as `model.config` or a `state_dict()`. A "
    "DataLoader with num_workers=0 (Trainer: dataloader_num_workers=0) starts no process. A collator of "
    "transformers takes a model without values: "
    '`with torch.device("meta"): empty = type(model)(model.config)`'
)


class _Library(NamedTuple):
    """Code that uses parameters: what its module and its functions are called, and the cure."""

    module: str
    functions: str
    cure: str


#: The first one that has a frame on the stack counts.
_LIBRARIES: Final = (
    _Library(
        r"(lightning\.pytorch|pytorch_lightning)\.callbacks\.finetuning",
        "filter_on_optimizer|unfreeze_and_add_param_group",
        "let `configure_optimizers` give the optimizer all parameters, let `freeze_before_training` do "
        "nothing, and let `finetune_function` call only `self.freeze(modules)` or "
        "`self.make_trainable(modules)`",
    ),
    _Library(
        r"trl\.",
        "__init__",
        "build `offloaded(…)` of the trainer's class with the plain model: it wraps the model by itself",
    ),
    _Library(
        r"trl\.trainer\.callbacks",
        ".*",
        'Config(parameters="device") for the model that is trained, and no `wrap` of the other model',
    ),
    _Library(r"peft\.tuners\.", "(un)?merge_adapter", _EDIT),
    _Library(
        r"peft\.tuners\.",
        "(?!forward$).*",
        f"{_CHANGE}; `infinity.export(model, directory, merge_adapters=True)` writes a merged model",
    ),
    _Library(r"transformers\.", "resize_token_embeddings", _CHANGE),
    _Library(
        r"torch\.(distributed\.|ao\.|nn\.utils\.(parametriz|prune|weight_norm|spectral_norm|fusion))",
        ".*",
        _CHANGE,
    ),
    _Library(r"torch\.optim\.swa_utils|diffusers\.training_utils|timm\.utils\.model_ema", ".*", _AVERAGE),
)


def cure_of(*, edits: bool, others: bool, forked: bool) -> str:
    """Return the cure for a call of an operator with a released parameter. `edits`: it would write to one.
    `others`: it would write to other tensors. `forked`: this process is a fork of the one that wrapped."""
    if forked:
        return _FORK
    return cure_of_library(_EDIT if edits else _AVERAGE if others else _READ)


def cure_of_library(otherwise: str) -> str:
    """Return the cure for the library that is calling; `otherwise` where none is that is known here."""
    calls = [(str(f.f_globals.get("__name__")), f.f_code.co_name) for f in frames()]
    for library in _LIBRARIES:
        if any(re.match(library.module, m) and re.fullmatch(library.functions, n) for m, n in calls):
            return library.cure
    return otherwise


def cure_of_pickling(otherwise: str) -> str:
    """Return the cure for a model or a parameter that is being pickled: `otherwise`, but where a process is
    started that gets it."""
    starts = any(str(f.f_globals.get("__name__")).startswith("multiprocessing.popen_") for f in frames())
    return _NEW_PROCESS if starts else otherwise


def said(func: Any) -> str:
    """Return an operator as a program has it: "Tensor.add_", "torch.cat", "Tensor.data"."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__", "__delete__"):
        return f"Tensor.{getattr(owner, '__name__', '?')}"
    qualified = str(getattr(func, "__qualname__", name))
    for long, short in {"TensorBase": "Tensor", "_VariableFunctionsClass": "torch"}.items():
        qualified = re.sub(rf"^{long}\.", f"{short}.", qualified)
    return qualified


def writes_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator writes to; None if it writes nothing."""
    name = str(getattr(func, "__name__", ""))
    if kwargs.get("out") is not None:
        return kwargs["out"]
    in_place = name in ("__set__", "__setitem__") or re.fullmatch(r"__i\w+__|(?!__)\w*[^_]_", name)
    return args[0] if in_place and args else None
