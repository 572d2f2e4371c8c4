"""`inference`: a model for inference only, with its parameters on the tiers that have room."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch import nn

from infinity.core.config import Config
from infinity.core.errors import CorruptionError, DataError, DirectoryError, WrapError
from infinity.hardware.aio import Ring
from infinity.storage.checkpoints import Found, find
from infinity.storage.tensor_file import read_all
from infinity.storage.weights import FileTensor, Weights

from . import hugging_face
from .adapters import check_not_adapters
from .checkpoint import Progress, check_whole, naming_another, open_saved, path_of, reading_ring
from .engine import Engine

_TEXT: Final = re.compile(r"[\w-]+(\.[\w-]+)*\.(json|txt|model|jinja)")


def inference(
    model: nn.Module | str | os.PathLike[str],
    config: Config,
    *,
    weights: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Any:
    """Return a model for inference only: without an optimizer, without gradients, in evaluation mode.

    Its parameters are on the tiers that `config` names. They are on the device while the model uses them.
    After `inference` has returned, the engine writes nothing. `infinity.close` shuts the engine down.

    Args:
        model: a model, which `inference` takes over as `wrap` does; or a directory. The directory is a
            Hugging Face directory (config.json and safetensors files, of transformers or diffusers); or a
            checkpoint of `infinity.save` of such a model; or a directory of checkpoints, for the one that was
            completed last. From a directory, the values go straight to their tiers; the whole model is never
            in memory.
        config: budgets, the compute dtype (None: each parameter keeps the dtype of its file; trained
            parameters of a checkpoint are fp32 there), and the placement of `parameters`.
        weights: such a directory, with the values of a model that you built. `inference` ignores the values
            that the model has. Its parameters may be on the meta device (as
            `accelerate.init_empty_weights()` makes them), but its buffers may not. `inference` replaces the
            Parameter objects of the model.
        progress: a function that `inference` calls with the bytes that it has read, and all bytes.

    Raises:
        WrapError, BudgetError, DirectoryError, ConfigError, BackendError: as `wrap`.
        DataError: the directory has no model, only a part of one, or one that transformers does not know.
        CorruptionError: the files of the directory are damaged.
    """
    if not isinstance(config, Config):
        raise WrapError(
            "inference takes a Config",
            expected="infinity.Config(...)",
            found=type(config).__name__,
            cure="inference(model, infinity.Config(...))",
        )
    with contextlib.ExitStack() as stack:
        values, kept = None, frozenset[str]()
        if isinstance(model, nn.Module):
            if weights is not None:
                _check_buffers(model)
                tie = getattr(model, "tie_weights", None)
                if callable(tie) and any(p.is_meta for p in model.parameters()):
                    tie()  # accelerate unties parameters when it takes their values
                values = _weights_at(path_of(weights), model, stack)
        else:
            if weights is not None:
                raise WrapError(
                    "`weights` needs a model that you built",
                    expected="inference(model, config, weights=directory), or inference(directory, config)",
                    found="two directories",
                    cure="leave weights out",
                )
            model, values = _built(path_of(model), config, stack)
            kept = hugging_face.kept(model, config.compute_dtype or hugging_face.dtype_of(model.config))
        if values is not None:
            values.progress = progress
        engine = _stand(model, config, values, kept)
        engine.keep(stack.pop_all())  # files that parameters are read from while the model is used
        return model


def _stand(model: nn.Module, config: Config, values: Weights | None, kept: Collection[str]) -> Engine:
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if module.training:
                undo.callback(setattr, module, "training", True)
        model.eval()
        if values is not None:
            _drop_values(model, undo, values if config.dtype is None else None)
        trainable = [p for p in model.parameters() if p.requires_grad]
        for param in trainable:
            undo.callback(param.requires_grad_)
            param.requires_grad_(False)
        with torch.inference_mode(False):  # as in `wrap`
            engine = Engine(model, None, config, values, kept, frozen=trainable)
        undo.pop_all()
    return engine


def _drop_values(model: nn.Module, undo: contextlib.ExitStack, values: Weights | None) -> None:
    """Replace parameters by such that have a shape and a dtype, and no memory for it; not on the meta device,
    from which a parameter cannot be moved. The dtype is that which `values` have; None: as it is."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None or nn.parameter.is_lazy(param):
                continue
            if param not in made:
                full = f"{prefix}.{name}" if prefix else name
                found = param.dtype if values is None else values.dtype_of(full)
                dtype = found if found.is_floating_point else param.dtype
                data = torch.empty((), dtype=dtype, device="cpu").expand(param.shape)
                made[param] = nn.Parameter(data, param.requires_grad)
                made[param].__class__ = type(param)
                made[param].__dict__.update(param.__dict__)
            undo.callback(module._parameters.__setitem__, name, param)
            module._parameters[name] = made[param]


def _check_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise WrapError(
                f"the buffer {name!r} has no values",
                expected="buffers with values",
                found="one on the meta device",
                cure="build the model inside `with accelerate.init_empty_weights():`, which keeps the values "
                "of buffers, and not inside `with torch.device('meta'):`; or build it on the CPU",
            )


# -- directories -----------------------------------------------------------------------------


def _built(directory: str, config: Config, stack: contextlib.ExitStack) -> tuple[nn.Module, Weights | None]:
    """Return the model in a directory, and where its values are; None: they are in it."""
    if hugging_face.is_directory_of_a_model(directory):
        read = hugging_face.read_config(directory)
        model = hugging_face.structure(directory, read, config.compute_dtype or hugging_face.dtype_of(read))
        values = _of_hugging_face(directory, model, stack)
        if values is None:
            model = hugging_face.load_whole(directory, read, config)
        return model, values
    found = find_model(directory)
    with texts_of(found) as texts:
        if not hugging_face.is_directory_of_a_model(texts):
            raise DataError(
                f"the checkpoint {found.path} does not say what its model is",
                expected="the checkpoint of a transformers model",
                found="no config.json in its index",
                cure="build the model, and read its values: infinity.inference(model, config, "
                f"weights={found.path!r})",
            )
        read = hugging_face.read_config(texts)
        model = hugging_face.structure(texts, read, config.compute_dtype or hugging_face.dtype_of(read))
    return model, _of_checkpoint(found, model, stack)


def _weights_at(directory: str, model: nn.Module, stack: contextlib.ExitStack) -> Weights:
    if not hugging_face.is_directory_of_a_model(directory):
        return _of_checkpoint(find_model(directory), model, stack)
    values = _of_hugging_face(directory, model, stack)
    if values is None:
        raise DataError(
            f"the files in {directory!r} have the parameters of this model in another form",
            expected="a tensor for each parameter, of its name and its shape",
            found="tensors that only transformers can turn into the parameters",
            cure=f"infinity.inference({directory!r}, config)",
        )
    return values


def find_model(directory: str) -> Found:
    """Return the checkpoint at a directory without a config.json, or the newest below it.

    Raises:
        DataError: there is none.
        CorruptionError: its index cannot be used.
    """
    try:
        return find(directory)
    except DirectoryError as error:
        check_not_adapters(directory)
        if not os.path.exists(directory):
            raise DataError(
                f"there is no directory {directory!r}",
                expected="a directory on this machine: `inference` downloads nothing",
                found=error.found or error.what,
                cure="name a directory that exists; or download a repository of the Hugging Face Hub "
                f"first: infinity.inference(huggingface_hub.snapshot_download({directory!r}), config)",
            ) from error
        if os.path.isfile(os.path.join(directory, "model_index.json")):
            raise DataError(
                f"{directory!r} is a whole diffusers pipeline",
                expected="the directory of one model",
                found="model_index.json",
                cure="name the directory of the large model, such as its folder 'transformer' or 'unet', and "
                "pass that model to the pipeline: Pipeline.from_pretrained(directory, transformer=model)",
            ) from error
        raise DataError(
            f"there is no model in {directory!r}",
            expected="a Hugging Face directory (config.json and *.safetensors), or a checkpoint of "
            "infinity.save, or a directory of these",
            found=error.found or error.what,
            cure="name the directory that has these files",
        ) from error


@contextlib.contextmanager
def texts_of(found: Found) -> Iterator[str]:
    """Lend a directory with the texts of a checkpoint: what a model of transformers, and its tokenizer, are
    made from."""
    with tempfile.TemporaryDirectory(prefix="infinity-") as folder:
        texts = found.content.get("texts")
        for name, text in texts.items() if isinstance(texts, dict) else ():
            if _TEXT.fullmatch(name) and isinstance(text, str):
                with open(os.path.join(folder, name), "w", encoding="utf-8", errors="surrogatepass") as file:
                    file.write(text)
        yield folder


def _of_hugging_face(directory: str, model: nn.Module, stack: contextlib.ExitStack) -> Weights | None:
    ring = stack.enter_context(reading_ring())
    return hugging_face.find_weights(directory, model, ring, stack)


def _of_checkpoint(found: Found, model: nn.Module, stack: contextlib.ExitStack) -> Weights:
    stack.enter_context(naming_another(found))
    ring = stack.enter_context(reading_ring())
    try:
        return _in_checkpoint(found, model, ring, stack)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"the index of {found.path} is not one that any version of infinity writes",
            path=found.path,
            expected="an index with checksums and parameters",
            found=repr(error),
            cure="copy this checkpoint again from its source; or load another one, if there is one",
        ) from error


def _in_checkpoint(found: Found, model: nn.Module, ring: Ring, stack: contextlib.ExitStack) -> Weights:
    check_whole(found)
    file = open_saved(found, "parameters", ring)
    if file is None:
        raise KeyError("parameters")
    stack.enter_context(file)
    saved = {tied: name for name, p in found.content["parameters"].items() for tied in (name, *p["tied"])}
    tensors: dict[str, FileTensor] = {}
    lacking = []
    for first, names, param in hugging_face.named(model):
        there = list(dict.fromkeys(saved[n] for n in names if n in saved))
        if not there:
            lacking.append(first)
            continue
        for name in there:
            entry = file.entries[name]
            if entry.shape != tuple(param.shape):
                raise hugging_face.other_shape(found.path, first, param.shape, [*entry.shape])
        tensor, *others = (FileTensor(file, name, file.entries[name].numel) for name in there)
        if not all(hugging_face.same_values(tensor, other) for other in others):
            raise hugging_face.not_tied(found.path, names, there)
        tensors |= dict.fromkeys(names, tensor)
    if lacking:
        raise hugging_face.missing(found.path, lacking, saved)
    buffers = found.file("buffers")
    given = {} if buffers is None else read_all(buffers, ring, found.content["crcs"]["buffers"])
    for name, buffer in model.named_buffers():
        if name in given and given[name].shape == buffer.shape:
            buffer.copy_(given[name])
    return Weights(tensors)
