"""Models of transformers and diffusers: the structure that a directory describes, and the places of its
values.

[Note: names in files] Where the files have a tensor for each parameter, by its name and in its shape, the
engine reads them. Some models have other names in files, or combine several tensors into a parameter
(experts). Only transformers knows these rules, and offers them by `from_pretrained` alone: that loads such a
model.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from infinity.core.config import Config
from infinity.core.errors import DataError
from infinity.core.optional import broken, optional
from infinity.hardware.aio import Ring
from infinity.params.discover import fp32_patterns
from infinity.storage.tensor_file import TensorFile
from infinity.storage.weights import FileTensor, Weights

from .adapters import adapters_differ, check_not_adapters
from .checkpoint import library_of
from .init import init, without_values

#: What files are called: those of transformers, and of diffusers.
_STEMS: Final = ("model", "diffusion_pytorch_model")
_INDEX_LIMIT: Final = 100_000_000
_SHOWN: Final = 8  # names in a message


def is_directory_of_a_model(path: str) -> bool:
    """Return whether a directory has a config.json, as transformers writes it."""
    return os.path.isfile(os.path.join(path, "config.json"))


def read_config(directory: str) -> Any:
    """Return the configuration of the model in a directory: of one of diffusers a dict. Nothing of the
    directory is executed.

    Raises:
        DataError: transformers or diffusers is not there, or cannot be imported, or cannot read it, or it is
            of a quantized model.
    """
    config: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):  # the library says what is wrong with it
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    library = library_of(config) if isinstance(config, dict) else "transformers"
    if library == "timm":
        raise DataError(
            f"the model in {directory!r} is a timm model",
            expected="a model of transformers or diffusers, or a model that you built",
            found=f"the architecture {config['architecture']!r}",
            cure=f"infinity.inference(timm.create_model({'local-dir:' + directory!r}), config, "
            f"weights={directory!r})",
        )
    if library == "transformers":
        auto = imported("transformers", "AutoConfig")
        try:
            config = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a file that is not what it should be makes of its parser
            raise unreadable(directory, error) from error
    if config.get("quantization_config") if library == "diffusers" else _is_quantized(config):
        raise DataError(
            f"the model in {directory!r} is quantized",
            expected="parameters in a floating-point dtype",
            found="a quantization_config",
            cure="use the model from before the quantization, or save it dequantized",
        )
    return config


def dtype_of(config: Any) -> torch.dtype:
    """Return the dtype that a configuration names; fp32, if it names none."""
    named = getattr(config, "dtype", None)
    return named if isinstance(named, torch.dtype) else torch.float32


def _is_quantized(config: Any) -> bool:
    return bool(getattr(config, "quantization_config", None))


def imported(library: str, name: str) -> Any:
    """Return what a library has under a name: None, if nothing.

    Raises:
        DataError: the library is not there, or its import fails, as where packages are of versions that do
            not go together.
    """
    optional(library, "hf" if library == "transformers" else None)
    try:
        return getattr(importlib.import_module(library), name, None)
    except Exception as error:  # transformers imports only now what has the name
        raise broken(library, error) from error


def structure(directory: str, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model that `config` describes: its buffers have values, its parameters, in `dtype`, have
    none.

    Raises:
        DataError: it cannot be built.
    """
    kind = class_of(directory, config)
    try:
        with without_values():
            if isinstance(config, dict):
                return _in_dtype(kind.from_config(config), dtype)
            model: Any = _constructed(kind, config, dtype)
    except Exception as error:
        raise unreadable(directory, error) from error
    for name in kept(model, dtype, parameters=False):
        owner, _, own = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        buffers[own] = buffers[own].float()
    if os.path.isfile(os.path.join(directory, "generation_config.json")) and model.can_generate():
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except Exception as error:
            raise unreadable(directory, error) from error
    return model.eval()  # type: ignore[no-any-return]


def _constructed(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return a model of transformers in `dtype`, without the values of its parameters."""
    config = copy.deepcopy(config)
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        if each is not None:
            each.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind(config)
    finally:
        torch.set_default_dtype(before)


def _in_dtype(model: Any, dtype: torch.dtype) -> nn.Module:
    """Cast the buffers of a diffusers model to the dtype that its `from_pretrained` gives them."""
    same = kept(model, dtype, parameters=False)
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            whole = f"{prefix}.{name}" if prefix else name
            if buffer is not None and buffer.is_floating_point() and whole not in same:
                module._buffers[name] = buffer.to(dtype)
    return model.eval()  # type: ignore[no-any-return]


def kept(model: Any, dtype: torch.dtype, *, parameters: bool = True) -> frozenset[str]:
    """Return the names of the parameters, or of the buffers, that the model's library leaves in fp32 in a
    model that is loaded in `dtype`."""
    searched = fp32_patterns(model, dtype)
    tensors = model.named_parameters(remove_duplicate=False) if parameters else model.named_buffers()
    names = (name for name, tensor in tensors if tensor.is_floating_point())
    return frozenset(name for name in names if any(s.search(name) for s in searched))


def load_whole(directory: str, hf_config: Any, config: Config) -> nn.Module:
    """Return the model in a directory as transformers loads it, in scratch files.

    Raises:
        DataError: transformers cannot load it, or some of its parameters have no values.
        DirectoryError: there is no room for scratch files.
    """
    kind = class_of(directory, hf_config)
    told = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    keyword = "torch_dtype" if isinstance(hf_config, dict) else "dtype"
    with init(config):
        try:
            # transformers takes "auto": the dtype of the files. diffusers keeps that where it is told none.
            dtype = config.compute_dtype or (None if isinstance(hf_config, dict) else "auto")
            model, found = kind.from_pretrained(directory, **told, **{keyword: dtype})
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            raise unreadable(directory, error) from error
    if found["missing_keys"]:
        raise missing(directory, sorted(found["missing_keys"]))
    return model.eval()  # type: ignore[no-any-return]


def find_weights(directory: str, model: nn.Module, ring: Ring, stack: contextlib.ExitStack) -> Weights | None:
    """Return where the values of the parameters of `model` are; None: only transformers can tell. Persistent
    buffers get their values. `stack` closes the files.

    Raises:
        DataError: there are no safetensors files, or not all parameters in them.
        CorruptionError: a file is not what it should be.
    """
    files = open_files(directory, ring, stack)
    there = {name: FileTensor(file, name, e.numel) for file in files for name, e in file.entries.items()}
    known = {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
    of_transformers = hasattr(model, "base_model_prefix")
    if of_transformers:
        there = _renamed(there, known, f"{model.base_model_prefix}.")
    tensors: dict[str, FileTensor] = {}
    lacking = []
    for first, names, param in named(model):
        found = [there[name] for name in names if name in there]
        if not found:
            lacking.append(first)
            continue
        if any(tensor.numel != param.numel() for tensor in found):
            raise other_shape(directory, first, param.shape, "another number of elements")
        if not all(same_values(found[0], other) for other in found[1:]):
            return None  # they are not tied after all
        tensors |= dict.fromkeys(names, found[0])
    if lacking:
        saved = [name for file in files for name in file.entries]
        if not of_transformers or adapters_differ(directory, lacking, saved) is not None:
            raise missing(directory, lacking, saved)
        return None  # see [Note: names in files]
    for name, buffer in model.named_buffers():
        if name in known and name in there and buffer.numel() == there[name].numel:
            there[name].file.read(there[name].name, 0, buffer)
    return Weights(tensors)


def _renamed(
    there: Mapping[str, FileTensor], known: Mapping[str, torch.Size], prefix: str
) -> dict[str, FileTensor]:
    """Return the tensors of files by the names that they have in a model of transformers: a model may
    have been saved with a head or without one."""
    found = {}
    for name, tensor in there.items():
        shape = torch.Size(tensor.file.entries[name].shape)
        for target in (name, prefix + name, name.removeprefix(prefix)):
            if known.get(target) == shape:
                found[target] = tensor
                break
    return found


def open_files(directory: str, ring: Ring, stack: contextlib.ExitStack) -> list[TensorFile]:
    """Open the safetensors files of a directory, checked; `stack` closes them.

    Raises:
        DataError: there are none, or their index is none.
        CorruptionError: one is not what the index says.
    """
    files_of = {stem: os.path.join(directory, f"{stem}.safetensors") for stem in _STEMS}
    index = next((p for p in (f"{f}.index.json" for f in files_of.values()) if os.path.lexists(p)), None)
    if index is None:
        one = next(filter(os.path.lexists, files_of.values()), None)
        if one is None:
            check_not_adapters(directory)
            others = sorted(n for n in os.listdir(directory) if n.endswith((".bin", ".pt", ".safetensors")))
            raise DataError(
                f"there are no weights in {directory!r}",
                expected="model.safetensors (of diffusers: diffusion_pytorch_model.safetensors), or "
                "model.safetensors.index.json and the files that it names: infinity never unpickles anything",
                found=", ".join(others[:_SHOWN]) or "none",
                cure="save the model with save_pretrained(safe_serialization=True)",
            )
        return [stack.enter_context(TensorFile.open(one, ring))]
    of = _weight_map(index)
    files = {}
    for name in sorted(set(of.values())):
        files[name] = stack.enter_context(TensorFile.open(os.path.join(directory, name), ring))
    for tensor, name in of.items():
        if tensor not in files[name].entries:
            raise _wrong_index(index, f"{tensor!r} in {name}", "no such tensor")
    for name, file in files.items():  # what the index does not name does not count
        file.entries = {tensor: e for tensor, e in file.entries.items() if of.get(tensor) == name}
    return list(files.values())


def _weight_map(index: str) -> dict[str, str]:
    found: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if os.path.isfile(index) and os.path.getsize(index) <= _INDEX_LIMIT:
            with open(index, encoding="utf-8") as file:
                found = json.load(file)
    of = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(of, dict) or not of:
        raise _wrong_index(index, "JSON with a weight_map", "something else")
    for name in of.values():
        plain = isinstance(name, str) and name == os.path.basename(name) and name.endswith(".safetensors")
        if not plain or "\0" in name:
            raise _wrong_index(index, "names of safetensors files beside it", f"{name!r:.200}")
    return of


def named(model: nn.Module) -> Iterator[tuple[str, list[str], nn.Parameter]]:
    """Yield each parameter with its first name, and all of its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for param, each in names.items():
        yield each[0], each, param


def same_values(first: FileTensor, second: FileTensor, count: int = 1 << 20) -> bool:
    """Return whether two tensors have the same values, bit for bit."""
    if (first.numel, first.dtype) != (second.numel, second.dtype):
        return False
    ours, theirs = (torch.empty(min(count, first.numel), dtype=first.dtype) for _ in range(2))
    for begin in range(0, first.numel, count):
        numel = min(count, first.numel - begin)
        for piece, out in ((first, ours), (second, theirs)):
            piece.file.read(piece.name, begin, out[:numel])
        if not torch.equal(ours[:numel].view(torch.uint8), theirs[:numel].view(torch.uint8)):
            return False
    return True


def class_of(directory: str, config: Any) -> Any:
    """Return the class of transformers, or of diffusers, that a configuration names."""
    if isinstance(config, dict):
        return _class_of_diffusers(directory, config)
    base = imported("transformers", "PreTrainedModel")
    names = [n for n in getattr(config, "architectures", None) or () if isinstance(n, str)]
    for name in names:
        found = imported("transformers", name)
        if isinstance(found, type) and issubclass(found, base):
            return found
    raise DataError(
        f"transformers does not have the model in {directory!r}",
        expected="a class of transformers as `architectures`, in config.json; infinity never executes code "
        "from the directory",
        found=", ".join(names) or "none",
        cure="update transformers; or build the model yourself: infinity.inference(model, config)",
    )


def _class_of_diffusers(directory: str, config: Mapping[str, Any]) -> Any:
    name, base = config["_class_name"], imported("diffusers", "ModelMixin")
    found = imported("diffusers", name) if isinstance(name, str) and name.isidentifier() else None
    if isinstance(found, type) and issubclass(found, base):
        return found
    raise DataError(
        f"diffusers does not have the model in {directory!r}",
        expected="a model of diffusers as `_class_name`, in config.json; infinity never executes code from "
        "the directory",
        found=repr(name),
        cure="update diffusers; or build the model yourself: infinity.inference(model, config, weights=…)",
    )


def unreadable(directory: str, error: Exception) -> DataError:
    """Return the error for a model that its library cannot read or build, or cannot be imported for."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError):
            return broken("transformers", error)
        cause = cause.__cause__ or cause.__context__
    return DataError(
        f"the model in {directory!r} cannot be read",
        expected="config.json and safetensors files of one model that transformers has",
        found=f"{type(error).__name__}: {error}",
        cure="check the directory, or update transformers",
    )


def missing(directory: str, names: Sequence[str], there: Iterable[str] = ()) -> DataError:
    """Return the error for a model with more parameters than its directory, which has those named `there`."""
    if (error := adapters_differ(directory, names, there)) is not None:
        return error
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return DataError(
        f"the files in {directory!r} do not have all parameters of the model",
        expected="a tensor for each",
        found=f"none for {', '.join(names[:_SHOWN])}{more}",
        cure="check config.json, and that all files are there",
    )


def other_shape(directory: str, name: str, expected: Sequence[int], found: object) -> DataError:
    """Return the error for a parameter whose shape differs from the model's."""
    return DataError(
        f"the files in {directory!r} have {name!r} in another shape than the model",
        expected=[*expected],
        found=found,
        cure="check config.json",
    )


def not_tied(directory: str, names: Sequence[str], there: Sequence[str]) -> DataError:
    """Return the error for names that the model ties, and that have different values in its directory."""
    return DataError(
        f"the model ties {', '.join(map(repr, names[:_SHOWN]))}, and their values in {directory!r} differ",
        expected="the same values for names that are tied; or a model in which they are not",
        found=f"the values of {', '.join(map(repr, there[:_SHOWN]))} differ",
        cure="build the model with tie_word_embeddings=False in its configuration, and call "
        f"infinity.inference(model, config, weights={directory!r})",
    )


def _wrong_index(index: str, expected: str, found: str) -> DataError:
    return DataError(
        f"{index} is not an index of safetensors files",
        expected=expected,
        found=found,
        cure="copy the directory again from its source",
    )
