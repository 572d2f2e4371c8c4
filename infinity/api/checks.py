"""Which models `wrap` refuses, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from infinity.core.errors import WrapError
from infinity.params.param import sharded_of, why_not

from .init import extent_elements, origin


def check_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, first: bool = True
) -> dict[int, int]:
    """Return the group of each parameter, by its id; raise `WrapError` for what cannot be wrapped. `first`:
    this is the first rank, whose parameters have values."""
    if not isinstance(model, nn.Module):
        raise WrapError(
            "wrap takes a model",
            expected="an nn.Module",
            found=type(model).__name__,
            cure="wrap(model, optimizer, config)",
        )
    for name, module in model.named_modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            inner = ".".join(("model", *filter(None, [name]), "module"))
            raise WrapError(
                f"the model is wrapped in {type(module).__name__}",
                expected="the plain model: `wrap` finds several ranks by itself, and the engine then reduces "
                "gradients and shards the state",
                found=f"{type(module).__name__} in {name or 'the root'!r}",
                cure=f"pass the model as you built it, without {type(module).__name__}"
                + ("" if type(module).__name__.startswith("Fully") else f": {inner}")
                + "; for several ranks start them with torchrun and choose what the engine shards: "
                "Config(zero_stage=0) for nothing, like DistributedDataParallel, 3 for everything, like FSDP",
            )
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise WrapError(
                f"the module {name or '(root)'!r} is compiled by torch.jit",
                expected="modules in Python, whose parameters the engine can load and release",
                found=f"{type(module).__name__} of {module.original_name}, with parameters",
                cure="build it without torch.jit.script, torch.jit.trace and torch.jit.load; "
                "torch.compile may compile it",
            )
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if embeds and module.weight.requires_grad and optimizer is not None:
            raise WrapError(
                f"the module {name or '(root)'!r} makes sparse gradients",
                expected="dense gradients",
                found=f"{type(module).__name__}(sparse=True)",
                cure=f"{'.'.join(filter(None, ['model', name]))}.sparse = False",
            )
    if optimizer is not None and torch.__future__.get_swap_module_params_on_conversion():
        raise WrapError(
            "torch is set to exchange parameters when a model is cast, moved or loaded",
            expected="parameters that stay the same objects",
            found="torch.__future__.get_swap_module_params_on_conversion() is True",
            cure="torch.__future__.set_swap_module_params_on_conversion(False) before `wrap`; load and cast "
            "the model before, where that needs the exchange",
        )
    param_groups = optimizer.param_groups if optimizer is not None else []
    groups = {id(p): g for g, group in enumerate(param_groups) for p in group["params"]}
    named = list(model.named_parameters(remove_duplicate=True))
    for name, param in named:
        if sharded_of(param) is not None:
            raise WrapError(
                f"the parameter {name!r} belongs to a wrapped model already",
                expected="a model that is wrapped once",
                found="a second wrap",
                cure="keep the model that the first `wrap` returned; or turn it into a plain model first: "
                "`infinity.unwrap(model)`",
            )
        if param.grad is not None:
            raise WrapError(
                f"the parameter {name!r} has a gradient already",
                expected="parameters without gradients",
                found="a gradient of a backward before `wrap`",
                cure="call `optimizer.step()`, if you want to apply it, and `optimizer.zero_grad()` before "
                "`wrap`",
            )
        if nn.parameter.is_lazy(param):
            raise WrapError(
                f"the parameter {name!r} has no shape yet",
                expected="a model whose lazy modules have seen an input",
                found=type(param).__name__,
                cure="call the model once on a batch, `with torch.no_grad(): model(batch)`, before `wrap`",
            )
        if param.is_meta and first:
            raise WrapError(
                f"the parameter {name!r} has no values",
                expected="a model with values",
                found="a parameter on the meta device",
                cure="build the model inside `with infinity.init(config):`",
            )
        if type(param.data) is not torch.Tensor:
            raise WrapError(
                f"the parameter {name!r} is not a plain tensor",
                expected="parameters that are plain tensors",
                found=f"{type(param.data).__name__}, as FSDP's fully_shard or quantization makes it",
                cure="call `wrap` with the model as you built it, before anything else shards or quantizes "
                "it",
            )
        if reason := why_not(param):
            raise WrapError(
                f"the parameter {name!r} is of a class that cannot be offloaded",
                expected="nn.Parameter, or a class that allows subclasses",
                found=f"{type(param).__name__}: {reason}",
                cure="make it an nn.Parameter, before you build the optimizer: nn.Parameter(p.detach())",
            )
        if not param.is_floating_point() or param.layout is not torch.strided:
            raise WrapError(
                f"the parameter {name!r} cannot be offloaded",
                expected="dense floating-point parameters",
                found=f"{param.dtype}, {param.layout}",
                cure=_dense(param)
                if param.requires_grad
                else "make it a buffer, which is not trained either",
            )
        if optimizer is not None and not param.is_meta and _overlaps_itself(param.detach()):
            raise WrapError(
                f"elements of the parameter {name!r} share memory",
                expected="parameters whose elements do not overlap in memory",
                found=f"shape {tuple(param.shape)} with strides {param.stride()}, as expand() or "
                "as_strided() makes it: the engine would separate its elements",
                cure="before you build the optimizer, make the tensor that was expanded the parameter, and "
                "expand it in the forward; or give each element its own memory, "
                "nn.Parameter(p.detach().contiguous())",
            )
        if param.requires_grad and id(param) not in groups:
            raise WrapError(
                f"the parameter {name!r} requires a gradient but the optimizer does not have it",
                expected="every trainable parameter in the optimizer",
                found="a trainable parameter outside it",
                cure=f"pass it to the optimizer, or freeze it: {name}.requires_grad_(False)"
                + ("; infinity.optim.Muon has AdamW for what is no matrix" if _is_muon(optimizer) else ""),
            )
    known = {id(p) for _, p in named}
    for g, group in enumerate(param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise WrapError(
                    f"param group {g} has a parameter that the model does not have",
                    expected="an optimizer over the model's parameters",
                    found=f"a parameter of shape {tuple(param.shape)}",
                    cure="build the optimizer from model.parameters()",
                )
            if optimizer is not None and "front" in optimizer.state.get(param, ()):
                raise WrapError(
                    "the optimizer has loaded the state of delayed updates, but supports only a part of it",
                    expected="an optimizer without such a state",
                    found=f"a second version of a parameter of shape {tuple(param.shape)}",
                    cure="wrap the model with a new optimizer, and load the state dict into what `wrap` "
                    "returns: `optimizer.load_state_dict(…)`",
                )
    if not named:
        raise WrapError(
            "the model has no parameters",
            expected="at least one",
            found="none",
            cure="wrap a model that has some",
        )
    others = [*model.named_buffers(), *_attributes(model)]
    _check_apart(
        [(n, p) for n, p in named if not p.is_meta],
        [(n, t) for n, t in others if id(t) not in known and _has_address(t)],
    )
    if not first:
        _check_attributes(model)
    return groups


def _dense(param: nn.Parameter) -> str:
    """Return what to write for a trained parameter that is complex or sparse."""
    if param.layout is not torch.strided:
        return "before you build the optimizer, make it dense: nn.Parameter(p.detach().to_dense())"
    return (
        "before you build the optimizer, make it pairs of real numbers, nn.Parameter(torch.view_as_real("
        "p.detach()).clone()), and use torch.view_as_complex(p) in the forward; torch trains a complex "
        "parameter as such pairs"
    )


def _is_muon(optimizer: torch.optim.Optimizer | None) -> bool:
    return type(optimizer).__name__ == "Muon"


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are attributes of modules and no parameters or buffers, by name."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and f"{name}_orig" not in module._parameters:  # made anew
                yield ".".join(filter(None, [prefix, name])), value


def _check_attributes(model: nn.Module) -> None:
    for name, value in _attributes(model):
        if value.is_meta:
            raise WrapError(
                f"the attribute {name!r} has no values on this rank",
                expected="tensors on the meta device that are parameters or buffers: these get the first "
                "rank's values",
                found="a tensor that is neither",
                cure="make it a buffer, register_buffer(name, tensor, persistent=False); or build the "
                "model inside `with infinity.init(config):`, which keeps it",
            )


def _has_address(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _check_apart(named: list[tuple[str, nn.Parameter]], buffers: list[tuple[str, torch.Tensor]]) -> None:
    """Raise `WrapError` if a parameter shares memory with another one, or with a buffer: each is to have a
    place of its own."""
    extents: dict[object, list[tuple[int, int, str, torch.Tensor]]] = {}
    names = {name for name, _ in buffers}
    for name, tensor in (*named, *buffers):
        data = tensor.detach()
        nbytes = extent_elements(data) * data.element_size()
        if nbytes:
            storage, offset = origin(data)
            for where, begin in ((data.device, data.data_ptr()), (storage, offset)):
                extents.setdefault(where, []).append((begin, begin + nbytes, name, data))
    for row in extents.values():
        open_: list[tuple[int, int, str, torch.Tensor]] = []
        for extent in sorted(row, key=lambda extent: extent[0]):
            open_ = [other for other in open_ if other[1] > extent[0]]
            for other in open_:
                kept = [s[2] for s in (other, extent) if s[2] in names]
                if len(kept) < 2:
                    _refuse(other, extent, kept)
            open_.append(extent)


def _overlaps_itself(data: torch.Tensor) -> bool:
    """Return whether two elements of a tensor have one place."""
    if data.numel() > extent_elements(data):
        return True
    reach = 0  # of the dimensions so far, from the smallest stride on
    for stride, size in sorted(zip(data.stride(), data.shape, strict=True)):
        if size > 1 and stride <= reach and data.numel():
            # Not one inside the other, which is rare: mark the places, and count them.
            places = torch.zeros(extent_elements(data), dtype=torch.bool, device="cpu")
            places.as_strided(data.shape, data.stride()).fill_(True)
            return int(places.sum()) < data.numel()
        reach += stride * (size - 1)
    return False


def _is_transpose(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.ndim == 2 and first.shape == second.shape[::-1] and first.stride() == second.stride()[::-1]


def _refuse(
    first: tuple[int, int, str, torch.Tensor], second: tuple[int, int, str, torch.Tensor], buffers: list[str]
) -> None:
    (begin, end, name, data), (other_begin, other_end, other, other_data) = first, second
    if buffers:
        param = other if name in buffers else name
        raise WrapError(
            f"the buffer or attribute {buffers[0]!r} shares memory with the parameter {param!r}",
            expected="buffers, and tensors that are attributes of modules, with memory of their own",
            found=f"{min(end, other_end) - other_begin} bytes in which they overlap: the buffer or attribute "
            "would keep the values that they have now",
            cure=f"remove it, and use the detached parameter in its module's forward: "
            f"`model.{param}.detach()`; or, to keep the current values, give it a copy: p.detach().clone()",
        )
    same = begin == other_begin and data.shape == other_data.shape and data.dtype == other_data.dtype
    transposed = begin == other_begin and data.dtype == other_data.dtype and _is_transpose(data, other_data)
    raise WrapError(
        f"the parameters {name!r} and {other!r} share memory, but are not one Parameter",
        expected="parameters with memory of their own; shared values as one Parameter in both places",
        found=f"{min(end, other_end) - other_begin} bytes in which they overlap: the engine would separate "
        "the two",
        cure=(
            f"make them one Parameter (`b.weight = a.weight`, with {name!r} for a.weight), or "
            if same
            else f"to keep them tied, make {other!r} the transpose of {name!r} by "
            "torch.nn.utils.parametrize, before you build the optimizer: `docs/libraries.md` has the lines, "
            "under PEFT; to untie them, "
            if transposed
            else ""
        )
        + f"give {other!r} values of its own: nn.Parameter(p.detach().clone())",
    )
