"""`export`: writes a model to files for other programs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from infinity.core.commits import Commits
from infinity.core.errors import ConfigError, CorruptionError, StateDictError, WrapError
from infinity.core.sizes import parse_dtype, parse_size
from infinity.hardware.ranks import Alone, Comm
from infinity.params.param import plain_name
from infinity.storage.checkpoints import Found, check_shared, find
from infinity.storage.folder import Folder
from infinity.storage.shards import Shards
from infinity.storage.tensor_file import TensorFile
from infinity.storage.tensor_header import Spec

from . import ties
from .adapters import Merged, adapted_name, adapters_of, adapts_itself, base_of, has_adapters
from .checkpoint import (
    Progress,
    check_free,
    check_whole,
    interruptible,
    library_of,
    naming_another,
    open_saved,
    path_of,
    reading_ring,
    settle,
    texts_of,
    writing_ring,
    wrong_index,
)
from .engine import Engine, model_of
from .module_state import ModuleValues, engine_in, state_of
from .together import agree_on_path, guarded, together

_WHAT: Final = "an export"  # what ranks do together
_PIECE: Final = 4 << 20  # bytes of a checkpoint that are in memory at once
#: The names that a checkpoint may give its texts.
_TEXT: Final = re.compile(r"[\w-]+(\.[\w-]+)*\.(json|txt|jinja|model)")
_CONFIG: Final = "config.json"


def export(
    model: nn.Module | torch.optim.Optimizer | str | os.PathLike[str],
    path: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    tokenizer: Any = None,
    merge_adapters: bool = False,
    progress: Progress | None = None,
) -> str:
    """Write a model as safetensors files, chunk by chunk through one buffer in pinned host memory.

    The kind of model decides what `export` writes:

    - transformers or diffusers: the files that `from_pretrained` reads, with the configurations. Tensors have
      the names that the model uses now.
    - timm: the files that `timm.create_model("local-dir:…", pretrained=True)` reads.
    - PEFT: the adapters, for `PeftModel.from_pretrained`. For a diffusers model with adapters: the adapters,
      for `load_lora_adapter(path, prefix=None, use_safetensors=True)`.
    - any other module: its state dict, for `safetensors.torch.load_model`.

    `export` writes tied parameters once. With delayed updates it writes the newest values.

    With several ranks, the export of a module is a collective: each rank writes its part of every parameter
    into one directory that all share, at the first rank's path. One rank alone exports a checkpoint.

    Args:
        model: as `wrap` returned it, a part of it, or a plain module; or the optimizer of `wrap`. Or the path
            of a checkpoint of `infinity.save`; or a directory of checkpoints, for the one that was completed
            last.
        path: the directory that `export` creates. It may exist if it is empty.
        dtype: of all parameters: "fp32" (the masters), "bf16" or "fp16". None: the compute dtype of each
            parameter; for a plain module the dtypes that it has; for a checkpoint the dtype that its
            config.json names, or else fp32 (without a config.json, frozen parameters have the compute dtype
            of their run). Buffers keep their dtypes.
        max_shard_size: bytes of parameters and buffers in a file; a larger tensor gets a file of its own.
            Adapters are always in one file.
        tokenizer: a tokenizer or a processor with `save_pretrained`: `export` writes its files, too. It
            always writes the tokenizer files of a checkpoint.
        merge_adapters: for a PEFT model: write the base model merged with the active adapters, layer by
            layer, as its `merge_and_unload` does in that dtype. The model stays as it is.
        progress: a function that `export` calls, on another thread, with the bytes that this rank has written
            and all bytes of the model. It may not use the model.

    Returns:
        The directory. It becomes complete atomically. If anything ends the export earlier, the directory does
        not look complete.

    Raises:
        ConfigError: an argument is not valid.
        WrapError: `model` is neither a module nor a path.
        StateDictError: safetensors files do not support one of the tensors; or `model` is a checkpoint of a
            PEFT model.
        ParameterError: a `gathered(write=True)` block is editing parameters.
        CorruptionError: the checkpoint differs from what was saved.
        DirectoryError: there is no checkpoint; or the directory is not empty, is not writable, or its drive
            has no room.
        TransferError: a drive reports an error.
        RankError: a rank is gone, or makes another call. Any other error on one rank raises an error of the
            same class on all.
    """
    model = model_of(model)
    engine = engine_in(model) if isinstance(model, nn.Module) else None
    with contextlib.ExitStack() as stack:
        if engine is not None:
            comm, commits = engine.comm, engine.commits
        else:
            comm, commits = Alone(), Commits()
            stack.callback(commits.close)

        def begin() -> tuple[str, _Content, dict[str, str]]:
            target = os.path.abspath(path_of(path, "model"))
            wanted = None if dtype is None else parse_dtype(dtype)
            limit = parse_size(max_shard_size, "max_shard_size")
            files = stack.enter_context(_saved(tokenizer))
            if isinstance(model, nn.Module):
                return target, _of_module(model, wanted, limit, merge_adapters), files
            if not isinstance(model, (str, os.PathLike)):
                raise WrapError(
                    "export takes a model",
                    expected="a torch.nn.Module, or the path of a checkpoint",
                    found=type(model).__name__,
                    cure="infinity.export(model, path)",
                )
            found = find(path_of(model))
            stack.enter_context(naming_another(found))
            content = _of_checkpoint(found, wanted, limit, stack)
            _check_merge(merge_adapters, False)
            return target, content, files

        given = guarded(comm, _WHAT, begin, commits.run)
        return interruptible(commits, lambda told: _Writing(engine, comm, *given, told).run(), progress, comm)


@dataclass(frozen=True)
class _ExportPart:
    """Tensors in files of one name, and what fills them."""

    stem: str
    tensors: Mapping[str, Spec]
    fill: Callable[[Shards], None]
    limit: int | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Content:
    """All that is written; the last of the texts says that it is whole."""

    parts: list[_ExportPart]
    texts: dict[str, str]


class _Writing:
    """One export. Each rank writes what it has of every parameter; the first one all else, and decides."""

    def __init__(
        self,
        engine: Engine | None,
        comm: Comm,
        path: str,
        content: _Content,
        files: Mapping[str, str],
        told: Progress,
    ) -> None:
        self._engine = engine
        self._comm = comm
        self._path = path
        self._content = content
        self._copied = {name: source for name, source in files.items() if name not in content.texts}
        self._told = told
        self._stack = contextlib.ExitStack()
        self._folder: Folder
        self._shards: list[Shards] = []
        self._done = self._total = 0

    def run(self) -> str:
        """Write; return the directory."""
        comm = self._comm
        agree_on_path(comm, _WHAT, self._path)
        with self._stack:
            made = together(comm, "the files of an export", self._begin)[0]
            together(comm, "the parts of an export", lambda: self._fill(*made))
            together(comm, "the end of an export", self._end)
        return str(made[0])

    def _begin(self) -> tuple[str, str, str] | None:
        """Take over edits; on the first rank, make the directory, and the files that all ranks write; return
        its path, the word of its files, and the path of one."""
        if self._engine is not None:
            settle(self._engine)
        if self._comm.rank:
            return None
        self._folder = self._stack.enter_context(Folder(self._path))
        self._open(self._path)
        check_free(self._path, self._total, "the model", "or export elsewhere, or in another dtype")
        for name, source in self._copied.items():
            self._folder.copy(name, source)
        if self._comm.world > 1:
            for shards in self._shards:
                shards.make()
        return self._path, self._folder.word, self._shards[0].paths[0]

    def _open(self, path: str) -> None:
        made = writing_ring(path)
        ring = self._stack.enter_context(made if self._engine is None else self._engine.store.beside(made))
        rank = self._comm.rank if self._comm.world > 1 else None
        for p in self._content.parts:
            shards = Shards(
                self._folder,
                ring,
                p.stem,
                p.tensors,
                limit=p.limit,
                tied=p.tied,
                metadata=p.metadata,
                told=self._tell,
                rank=rank,
            )
            self._shards.append(self._stack.enter_context(shards))
        self._total = sum(s.nbytes for s in self._shards)

    def _fill(self, path: str, word: str, some: str) -> None:
        if self._comm.rank:
            check_shared(some, self._comm.rank)
            self._folder = Folder(path, word)
            self._open(path)
        for part, shards in zip(self._content.parts, self._shards, strict=True):
            part.fill(shards)
            shards.finish()

    def _end(self) -> None:
        if self._comm.rank == 0:
            for name, text in self._content.texts.items():
                self._folder.write(name, text)
            self._told(self._done, self._total)
            self._folder.commit()

    def _tell(self, nbytes: int) -> None:
        self._comm.check()
        self._done += nbytes
        self._told(self._done, self._total)


@contextlib.contextmanager
def _saved(tokenizer: Any) -> Iterator[dict[str, str]]:
    """Lend the files of a tokenizer: name → path."""
    if tokenizer is None:
        yield {}
        return
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ConfigError(
            "the tokenizer cannot be saved",
            expected="an object with `save_pretrained`, such as a tokenizer or a processor of transformers",
            found=type(tokenizer).__name__,
            cure="leave tokenizer out",
        )
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer.save_pretrained(temporary)
        found = [os.path.join(folder, name) for folder, _, names in os.walk(temporary) for name in names]
        yield {os.path.relpath(path, temporary): path for path in sorted(found)}


def _check_merge(asked: bool, possible: bool) -> None:
    if asked and not possible:
        raise ConfigError(
            "merge_adapters=True, but the model has no adapters",
            expected="a PEFT model",
            found="a model without adapters",
            cure="merge_adapters=False",
        )


# -- modules ---------------------------------------------------------------------------------


def _of_module(model: nn.Module, dtype: torch.dtype | None, limit: int, merge: bool) -> _Content:
    """Return what is to be written of a module."""
    inner = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    values = ModuleValues(inner, dtype)
    adapted = has_adapters(inner)
    _check_merge(merge, adapted)
    if adapted and not merge:
        return _adapters(inner, values)
    merged = Merged(inner, values) if merge else None
    if merged is not None:
        inner, sources, specs, contents = base_of(inner), merged.sources, merged.specs, merged.contents
    else:
        sources = {plain_name(name): value for name, value in state_of(inner).items()}
        specs = {name: values.spec(name, value) for name, value in sources.items()}
        contents = ties.contents_of(inner)
    texts = texts_of(inner, contents)
    config = json.loads(texts[_CONFIG]) if _CONFIG in texts else {}
    tied = ties.left_out(inner, contents, untied=ties.is_untied(config))
    if tied is None:
        tied = _tied(inner, sources)
    dropped = {*tied, *(getattr(inner, "_keys_to_ignore_on_save", None) or ())}
    sources = {name: value for name, value in sources.items() if name not in dropped}
    specs = {name: spec for name, spec in specs.items() if name not in dropped}

    def fill(shards: Shards) -> None:
        values.write(shards, sources)
        for name, value in merged.layers(specs) if merged is not None else ():
            if values.is_first:
                shards.write(name, 0, value)

    if dtype is None:
        floating = (d for d, _ in specs.values() if d.is_floating_point)
        given = values.engine.config.compute_dtype if values.engine is not None else None
        dtype = given or next(floating, None)
    if _CONFIG in texts and library_of(config) == "transformers":
        texts[_CONFIG] = _edited(config, dtype)
    return _Content([_part_of(config, specs, fill, limit, tied)], texts)


def _part_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, Spec],
    fill: Callable[[Shards], None],
    limit: int,
    tied: Mapping[str, str],
) -> _ExportPart:
    """Return the files of a model's tensors as the library reads them that has written its config.json."""
    library = library_of(config)
    stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
    return _ExportPart(stem, tensors, fill, None if library == "timm" else limit, tied)


def _tied(model: nn.Module, sources: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return which names are left out, and under which name each is written: as `save_pretrained` does it, of
    tied names those that transformers ties by itself; of a module of another kind all but the first."""
    names: dict[int, list[str]] = {}
    for name, value in sources.items():
        if isinstance(value, nn.Parameter):
            names.setdefault(id(value), []).append(name)
    declared = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in model.named_modules()
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    found = {}
    for group in names.values():
        kept = group[:1]
        if hasattr(model, "_tied_weights_keys"):
            free = [name for name in group if not any(re.search(pattern, name) for pattern in declared)]
            kept = free or kept
        found.update({name: kept[0] for name in group if name not in kept})
    return found


def _edited(config: Any, dtype: torch.dtype | None) -> str:
    """Return a configuration as text that says in which dtype the parameters are."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    said = {} if dtype is None else {key: str(dtype).removeprefix("torch.")}
    return json.dumps({**config, **said}, indent=2, sort_keys=True) + "\n"


def _adapters(model: nn.Module, values: ModuleValues) -> _Content:
    parts, texts = [], {}
    of_diffusers = adapts_itself(model)
    for adapter in sorted(adapters_of(model), key=lambda a: not a.folder):  # the default one last
        prefix = f"{adapter.folder}/" if adapter.folder else ""
        specs = {name: values.spec(name, value) for name, value in adapter.sources.items()}
        fill = functools.partial(values.write, sources=adapter.sources)
        # diffusers has a name, and a place for the configuration, of its own.
        stem = "pytorch_lora_weights" if of_diffusers else "adapter_model"
        said = {"lora_adapter_metadata": adapter.config} if of_diffusers else {}
        parts.append(_ExportPart(f"{prefix}{stem}", specs, fill, metadata=said))
        if of_diffusers:
            continue
        texts[f"{prefix}adapter_config.json"] = adapter.config
    return _Content(parts, texts)


# -- checkpoints -----------------------------------------------------------------------------


def _of_checkpoint(
    found: Found, dtype: torch.dtype | None, limit: int, stack: contextlib.ExitStack
) -> _Content:
    """Return what is to be written of a checkpoint, whose files stay open until `stack` ends."""
    index = found.content
    check_whole(found)
    try:
        texts, tied = _texts_of(found), {t: n for n, p in index["parameters"].items() for t in p["tied"]}
        ring = stack.enter_context(reading_ring())
        files = {}
        for stem in ("parameters", "buffers"):
            if (file := open_saved(found, stem, ring)) is not None:
                files[stem] = stack.enter_context(file)
        there = files["parameters"].entries if "parameters" in files else {}
        if lacking := index["parameters"].keys() ^ there.keys():
            raise KeyError(min(lacking))
    except (KeyError, TypeError, AttributeError) as error:
        raise wrong_index(found.path, error) from error
    config = texts.pop(_CONFIG, None)
    if config is not None:
        _check_no_adapters(found, index["parameters"])
        if library_of(config) == "transformers":
            dtype = dtype or _dtype_of(config)
            texts[_CONFIG] = _edited(config, dtype)
        else:
            dtype = dtype or torch.float32
            texts[_CONFIG] = json.dumps(config, indent=2) + "\n"
    specs: dict[str, Spec] = {}
    sources: dict[str, tuple[TensorFile, str]] = {}
    for stem, file in files.items():
        # In the order of the model, whatever that of the file.
        for name in index["parameters"] if stem == "parameters" else file.entries:
            entry = file.entries[name]
            cast = entry.dtype.is_floating_point and stem == "parameters" and dtype
            specs[plain_name(name)] = cast or entry.dtype, entry.shape
            sources[plain_name(name)] = file, name
    tied = {plain_name(alias): plain_name(name) for alias, name in tied.items()}
    if config is not None and ties.is_untied(config):  # then each name has to be in the files
        specs |= {alias: specs[name] for alias, name in tied.items()}
        sources |= {alias: sources[name] for alias, name in tied.items()}
        tied = {}

    def fill(shards: Shards) -> None:
        memory = torch.empty(_PIECE, dtype=torch.uint8)
        for name, (file, saved) in sources.items():
            entry = file.entries[saved]
            numel, count = entry.nbytes // entry.dtype.itemsize, _PIECE // entry.dtype.itemsize
            for first in range(0, numel, count):
                piece = memory.view(entry.dtype)[: numel - first]
                file.read(saved, first, piece)
                shards.write(name, first, piece)

    return _Content([_part_of(config or {}, specs, fill, limit, tied)], texts)


def _texts_of(found: Found) -> dict[str, Any]:
    """Return the texts of a checkpoint; its config.json as values."""
    texts = dict(found.content.get("texts", {}))
    wrong = ""
    for name, text in texts.items():
        if not _TEXT.fullmatch(name) or name.startswith("model.safetensors") or not isinstance(text, str):
            wrong = f"{name!r}: {text!r:.200}"
    if not wrong and _CONFIG in texts:
        with contextlib.suppress(ValueError, RecursionError):
            texts[_CONFIG] = json.loads(texts[_CONFIG])
        if not isinstance(texts[_CONFIG], dict):
            wrong = f"{_CONFIG}: {texts[_CONFIG]!r:.200}"
    if wrong:
        raise CorruptionError(
            f"the index of {found.path} has texts that no version of infinity writes",
            path=found.path,
            expected="configurations and tokenizer files, under their usual names",
            found=wrong,
            cure="copy this checkpoint again from its source; or load another one, if there is one",
        )
    return texts


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a configuration names, if it is one in which a model computes; fp32 otherwise."""
    try:
        return parse_dtype(config.get("dtype") or config.get("torch_dtype") or "fp32")
    except ConfigError:
        return torch.float32


def _check_no_adapters(found: Found, names: Any) -> None:
    adapted = adapted_name(names)
    if adapted is not None:
        raise StateDictError(
            f"the checkpoint {found.path} is of a PEFT model",
            expected="a checkpoint without adapters: only the model knows which tensors belong to an adapter",
            found=repr(adapted),
            cure="build and wrap the model as its run does, call infinity.load(optimizer, checkpoint), then "
            "infinity.export(model, path); add merge_adapters=True for the merged model",
        )
