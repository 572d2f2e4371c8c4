"""PEFT models in files: adapters alone, in PEFT's format, or merged into their base."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.core.errors import ConfigError, DataError, StateDictError
from infinity.params.param import plain_name, sharded_of
from infinity.storage.tensor_header import Spec

from .gathered import gathered
from .module_state import ModuleValues, state_of


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model is one of PEFT, or one of transformers that has adapters."""
    return isinstance(getattr(model, "peft_config", None), dict)


def adapted_name(names: Iterable[str]) -> str | None:
    """Return the first of the names of parameters that is one of a model of PEFT; None: there is none."""
    return next((name for name in names if name.startswith("base_model.") or ".base_layer." in name), None)


def adapters_differ(directory: str, lacking: Iterable[str], there: Iterable[str]) -> DataError | None:
    """Return the error of a model that lacks some parameters in a directory that has others, if what makes
    the difference is that one of the two has adapters; None otherwise."""
    ours, theirs = adapted_name(lacking), adapted_name(there)
    if theirs and not ours:
        return DataError(
            f"the parameters in {directory!r} are those of a PEFT model",
            expected="those of a model without adapters",
            found=repr(theirs),
            cure="build the model as its run does, infinity.inference(get_peft_model(base, peft_config), "
            f"config, weights={directory!r}); or write the merged model where it is trained, "
            "infinity.export(model, path, merge_adapters=True), and use infinity.inference(path, config)",
        )
    if ours and not theirs:
        return DataError(
            f"the parameters in {directory!r} are those of a model without adapters",
            expected="those of a PEFT model, base and adapters",
            found=f"none for {ours!r}",
            cure="load the base before you add adapters, base = from_pretrained(path), inside "
            "`with infinity.init(config):` if it is larger than memory (infinity.export writes such a path "
            "from a checkpoint); then infinity.inference(get_peft_model(base, peft_config), config), without "
            "weights",
        )
    return None


def check_not_adapters(directory: str) -> None:
    """Raise `DataError` if a directory without a model has adapters, as PEFT saves them."""
    if os.path.isfile(os.path.join(directory, "adapter_config.json")):
        raise DataError(
            f"{directory!r} has only adapters of PEFT",
            expected="a model, or a checkpoint of infinity.save",
            found="adapter_config.json",
            cure="load them onto their base, inside `with infinity.init(config):` if that is larger than "
            f"memory: infinity.inference(PeftModel.from_pretrained(base, {directory!r}), config)",
        )


def base_of(model: Any) -> nn.Module:
    """Return the model that the adapters are in."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert isinstance(base, nn.Module)
    return base


class Adapter(NamedTuple):
    """An adapter: its directory ("" for the default one), its configuration as text, and its tensors by the
    names that PEFT gives them."""

    folder: str
    config: str
    sources: dict[str, torch.Tensor]


def adapters_of(model: Any) -> list[Adapter]:
    """Return the adapters of a model, as `PeftModel.save_pretrained` lays them out.

    Raises:
        StateDictError: what PEFT saves of one is not in the model, but computed.
    """
    import peft

    state = state_of(model)
    diffusers = adapts_itself(model)
    # PEFT chooses by names. What it is given has none but the shapes.
    shown = {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in state.items()}
    by_id = {id(tensor): state[name] for name, tensor in shown.items()}
    found = []
    for name, config in model.peft_config.items():
        with contextlib.ExitStack() as stack:
            if config.is_prompt_learning:  # then PEFT computes it, by a small module
                encoder = model.prompt_encoder[name]
                stack.enter_context(torch.no_grad())
                if ModuleValues(encoder, None).engine is not None:
                    stack.enter_context(gathered(encoder))
            chosen = peft.get_peft_model_state_dict(model, state_dict=dict(shown), adapter_name=name)
            sources = {}
            for key, tensor in chosen.items():
                if tensor.is_meta and id(tensor) not in by_id:
                    raise StateDictError(
                        f"the adapter {name!r} cannot be exported alone",
                        expected="tensors of the model",
                        found=f"{key!r}, which PEFT computes from several tensors",
                        cure="merge_adapters=True",
                    )
                if ".parametrizations." in key and tensor.is_meta:
                    continue  # computed from another parameter, which is here as well
                prefix = "" if hasattr(model, "get_base_model") or diffusers else "base_model.model."
                value = by_id[id(tensor)] if tensor.is_meta else tensor.detach().cpu().clone()
                sources[plain_name(prefix + key)] = value
        text = _text_of_diffusers(config) if diffusers else _config_text(model, config)
        found.append(Adapter("" if name == "default" else name, text, sources))
    return found


def adapts_itself(model: Any) -> bool:
    """Return whether a model is one of diffusers that has adapters without being one of PEFT."""
    return hasattr(model, "load_lora_adapter") and not hasattr(model, "get_base_model")


def _text_of_diffusers(config: Any) -> str:
    values = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return json.dumps(values, indent=2, sort_keys=True)


def _config_text(model: Any, config: Any) -> str:
    base = base_of(model)
    config = copy.copy(config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
            return file.read()


class Merged:
    """What a model is when its active adapters are merged into its base. The model stays as it is: each layer
    that has adapters is copied, and PEFT merges the copy, which is written and dropped.

    Attributes:
        specs: dtype and shape of each tensor, by its name in the base, in the order of the modules.
        sources: those that are tensors of the model; the others come from `layers`.
        contents: a key for the values of each name of a parameter: equal for names that share them.

    Raises:
        ConfigError: PEFT cannot merge them.
    """

    def __init__(self, model: Any, values: ModuleValues) -> None:
        self.sources: dict[str, torch.Tensor] = {}
        self.specs: dict[str, Spec] = {}
        self.contents: dict[str, object] = {}
        self._values = values
        self._layers: dict[str, tuple[nn.Module, set[str]]] = {}
        _check(model)
        self._visit("", base_of(model), set())

    def _visit(self, prefix: str, module: nn.Module, seen: set[nn.Module]) -> None:
        """Go through the modules as PEFT does when it unloads them."""
        if module in seen:
            return
        seen.add(module)
        if _is_layer(module):
            self._add(prefix, module)
            return
        for name, value in state_of(module, recurse=False).items():
            self._stream(prefix + name, value)
        for name, inner in module._modules.items():
            if inner is not None:
                self._visit(f"{prefix}{name}.", inner, seen)

    def _stream(self, name: str, value: torch.Tensor) -> None:
        name = plain_name(name)
        self.sources[name] = value
        self.specs[name] = self._values.spec(name, value)
        if isinstance(value, nn.Parameter):
            self.contents[name] = id(value)

    def _add(self, prefix: str, module: nn.Module) -> None:
        """Find out what becomes of a layer, with a copy of it that has no values."""
        given = _computed(module) | {id(b): b for b in module.buffers()}
        origins: dict[int, Any] = {id(b): b for b in module.buffers()}
        for param in module.parameters():
            dtype, shape = self._values.spec(prefix, param)
            given[id(param)] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False)
            origins[id(given[id(param)])] = param
        unloaded = _unload(copy.deepcopy(module, given), merge=False)
        merges = any(hasattr(m, "base_layer") for m in module.modules())
        for name, value in state_of(unloaded).items():
            origin = origins.get(id(value))
            if origin is not None and not merges:  # a whole module that was trained in the place of another
                self._stream(prefix + name, origin)
                continue
            whole = plain_name(prefix + name)
            self._layers.setdefault(prefix, (module, set()))[1].add(whole)
            self.specs[whole] = value.dtype, tuple(value.shape)
            self.contents[whole] = _ingredients(module), name

    def layers(self, wanted: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, values) of what adapters are merged into, if the name is wanted: one layer at a time
        is in memory, with what PEFT needs to merge it."""
        for prefix, (module, names) in self._layers.items():
            if any(name in wanted for name in names):
                merged = self._merge(prefix, module)
                yield from ((name, value) for name, value in merged if name in wanted)

    def _merge(self, prefix: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        values = self._values.read(module.parameters())
        given = _computed(module) | {id(p): nn.Parameter(v, False) for p, v in values.items()}
        for name, value in state_of(_unload(copy.deepcopy(module, given).cpu(), merge=True)).items():
            yield plain_name(prefix + name), value.detach()


def _is_layer(module: Any) -> bool:
    return hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")


def _computed(layer: nn.Module) -> dict[int, Any]:
    """Return, by id, what a copy of a layer has in the place of tensors that are plain attributes and that
    autograd has computed: torch does not copy them. PEFT keeps such views of adapters that it ties."""
    found: dict[int, Any] = {}

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            found[id(value)] = value.detach()
        elif isinstance(value, dict):
            for inner in value.values():
                look(inner)

    for module in layer.modules():
        look({name: value for name, value in vars(module).items() if not name.startswith("_")})
    return found


def _ingredients(layer: nn.Module) -> tuple[object, ...]:
    """Return what the merged values of a layer depend on: it is equal for layers that are tied, adapters and
    all. PEFT ties adapters by parameters of their own over the same memory, which may be transposed."""

    def place(param: nn.Parameter) -> object:
        if sharded_of(param) is not None or not param.numel():
            return id(param)
        return param.untyped_storage().data_ptr(), param.storage_offset(), param.numel()

    return frozenset(map(place, layer.parameters())), str(vars(layer).get("scaling"))


def _unload(layer: Any, *, merge: bool) -> nn.Module:
    """Return what PEFT leaves of a layer when it unloads it."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        unloaded = layer.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    else:
        if merge:
            layer.merge()
        unloaded = layer.get_base_layer()
    assert isinstance(unloaded, nn.Module)
    return unloaded


def _check(model: Any) -> None:
    why = ""
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        why = "prompts, which are no part of the base's parameters"
    try:
        getattr(getattr(model, "base_model", None), "_check_merge_allowed", lambda: None)()
    except ValueError as error:
        why = str(error)
    if why:
        raise ConfigError(
            "these adapters cannot be merged into their base",
            expected="adapters that PEFT can merge",
            found=why,
            cure="merge_adapters=False, which exports the adapters alone",
        )
