"""The content of a checkpoint, and the common code of `save`, `load` and `export`.

A checkpoint has these safetensors files: ``parameters`` (fp32 masters; for frozen parameters the values in
the compute dtype), one for each moment of the optimizer (``exp_avg`` and ``exp_avg_sq`` of AdamW), in the
dtype in which the run keeps them (in 8 bits the codes, and files such as ``exp_avg_scales``), ``front`` (with
delayed updates: the values that the next forward uses, if they are not the newest), ``buffers``, and
``values``, the tensors of state that is JSON otherwise. It also has an index. It does not depend on the run's
chunks, placement and compute dtype.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from infinity.core.commits import Commits
from infinity.core.errors import (
    ConfigError,
    CorruptionError,
    DirectoryError,
    ParameterError,
    StateDictError,
)
from infinity.core.paths import local_path
from infinity.core.sizes import format_size
from infinity.core.stack import is_inside
from infinity.hardware.aio import Ring, open_ring
from infinity.hardware.ranks import Comm, told
from infinity.hardware.streams import HostStream
from infinity.params.param import ShardedParam
from infinity.storage.checkpoints import Found, instead
from infinity.storage.checksums import RangeCrc, Sums
from infinity.storage.interrupt import GRACE
from infinity.storage.tensor_file import TensorFile, on_host
from infinity.version import __version__

from . import ties
from .engine import Engine

Progress = Callable[[int, int], None]
_R = TypeVar("_R")


class _Stopped(Exception):
    """Nobody waits for this any more."""


def interruptible(
    commits: Commits, call: Callable[[Progress], _R], progress: Progress | None, comm: Comm | None = None
) -> _R:
    """Return what `call` returns. It is one commit, and tells how far it is. It has a thread of its own,
    because the system keeps a thread that closes a file on a drive that answers no more. An interrupt ends it
    where it tells that next, and is raised when it has ended; or before, where a drive does not answer: then
    the next call of the engine waits for it. The other ranks of `comm` end with it."""
    stop = threading.Event()

    def tell(done: int, total: int) -> None:
        if stop.is_set():
            raise _Stopped
        if progress is not None:
            progress(done, total)

    with comm.slowly() if comm is not None else contextlib.nullcontext():
        if commits.is_mine() or is_inside():  # a hook of the user's makes the call
            return commits.run(lambda: call(tell))
        with commits:  # an interrupt would end this in its middle
            task = _files(commits).submit(commits.for_caller(lambda: call(tell)))
        try:
            return cast(_R, task.result())
        except BaseException as error:
            if error is not task.error:
                stop.set()
                if comm is not None:  # or it would wait for the others
                    comm.post(error)
                task.pause(GRACE)  # so that it is over when this raises
            raise
        finally:
            del task  # its error holds this frame


#: The thread of each engine that works on files: one, whose memory malloc gives to the next call.
_FILES: weakref.WeakKeyDictionary[Commits, HostStream] = weakref.WeakKeyDictionary()


def _files(commits: Commits) -> HostStream:
    stream = _FILES.get(commits)
    if stream is None or not stream.is_mine:
        stream = _FILES[commits] = HostStream("files")
        commits.ends.append(stream.let_go)
    return stream


def settle(engine: Engine) -> None:
    """Bring all values of the run up to date: complete the updates, take over the edits.

    Raises:
        ParameterError: a block is editing parameters, or an edit would be lost.
        DivergenceError: ranks have edited their replicas to different values.
    """
    with told(engine.comm):
        engine.phases.finish()
        names = [u.layout.name for u in engine.units if u.writers]
        if names:  # what a block has changed counts when it ends
            raise ParameterError(
                f"a `gathered` block is editing the parameters of unit {names[0]!r}: they cannot be saved or "
                "copied now",
                expected="`infinity.save`, `export` and `copy_to` outside of `gathered(write=True)` blocks",
                found="a block that is still open",
                cure="leave `with infinity.gathered(...)` first",
            )
        engine.edits.check_unseen()
        engine.edits.check_delayed()
        edited = engine.edits.found()
    engine.edits.agree(edited, engine.residency)
    engine.edits.adopt_all()


def check_free(path: str, nbytes: int, what: str, cure: str) -> None:
    """Raise `DirectoryError` unless the drive of `path` has room for `what`, `nbytes`."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise DirectoryError(
            f"no room for {what} in {path}",
            errno=errno.ENOSPC,
            path=path,
            expected=f"{format_size(nbytes)} ({nbytes} bytes)",
            found=f"{format_size(free)} ({free} bytes) free",
            cure=f"make room, {cure}",
        )


def content_of(
    *,
    crcs: Mapping[str, Any],
    parameters: Mapping[str, Mapping[str, Any]],
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    counts: Mapping[str, float],
    texts: Mapping[str, str],
    state: Any,
    random: Sequence[Any],
    buffers_of_other_ranks: Sequence[Any],
    finite: bool,
) -> dict[str, Any]:
    """Return the content of an index, beside what `Save.commit` adds.

    Args:
        crcs: of each file, the checksums of its tensors.
        parameters: by name, ``step``, ``trainable`` and ``tied``.
        optimizer: the kind of its `Rule`.
        random: the states of the generators of each rank; None: it has none, and a load changes none.
    """
    return {
        "infinity": __version__,
        "crcs": crcs,
        "parameters": parameters,
        "optimizer": optimizer,
        "groups": groups,
        "counts": counts,
        "texts": texts,
        "state": state,
        "random": random[0],
        "random_of_other_ranks": random[1:],
        "buffers_of_other_ranks": buffers_of_other_ranks,
        "finite": finite,
    }


def wrong_index(path: str, error: Exception) -> CorruptionError:
    """Return the error for a checkpoint whose index is incomplete."""
    return CorruptionError(
        f"the index of {path} is not one that any version of infinity writes",
        path=path,
        expected="an index with checksums, parameters, groups, counts and state",
        found=repr(error),
        cure="copy this checkpoint again from its source; or load another one, if there is one",
    )


def path_of(path: str | os.PathLike[str], example: str = "checkpoints") -> str:
    """Return a path as a string, with the user's directory in the place of "~".

    Raises:
        ConfigError: the path is empty, is not a path, or is an address (s3://…).
    """
    try:
        name = os.fsdecode(path)
    except TypeError as error:
        raise ConfigError(
            f"the path of the {example} directory is not a path",
            expected="a str, or a pathlib.Path",
            found=repr(path),
            cure=f'"{example}"',
        ) from error
    if not name:
        raise ConfigError(
            f"the path of the {example} directory is empty",
            expected="a path",
            found=repr(path),
            cure=f'"{example}"',
        )
    return local_path(name, f"the path of the {example} directory", example)


def elements_here(engine: Engine, *, own: bool = False) -> dict[ShardedParam, int]:
    """Return how many elements of each parameter this rank has; `own`: in its slices."""
    found = dict.fromkeys(engine.params.values(), 0)
    for unit in engine.units:
        for chunk in unit.layout.chunks:
            if not own or unit.layout.owner(chunk) == engine.comm.rank:
                for segment in chunk.segments:
                    found[unit.params[segment.param]] += segment.numel
    return found


def pieces_of(engine: Engine, params: Mapping[ShardedParam, str]) -> dict[str, list[RangeCrc]]:
    """Return checksums of what this rank alone has of frozen parameters, by the names that are given."""
    sums = Sums()
    for sharded, segment, pieces in engine.states.segments(("copy",), params, own=True):
        dtype = sharded.spec.dtype
        for begin, piece in on_host(pieces["copy"], dtype):
            first = (segment.offset + begin) * dtype.itemsize
            sums.add(params[sharded], first, piece.data_ptr(), piece.nbytes)
    return sums.take()


@contextlib.contextmanager
def naming_another(found: Found) -> Iterator[None]:
    """A block that reads a checkpoint: the error of a damaged file names the checkpoint to load instead."""
    try:
        yield
    except CorruptionError as error:
        if error.path is not None and found.path in (error.path, os.path.dirname(error.path)):
            error.cure = instead(found.path)
        raise


def check_whole(found: Found) -> None:
    """Raise `StateDictError` if a model cannot be read from a checkpoint: it has no frozen parameters."""
    if left_out := found.content.get("left_out"):
        raise StateDictError(
            f"the checkpoint {found.path} has no frozen parameters",
            expected="a checkpoint with all parameters",
            found=f"one of save(frozen=False), without {len(left_out)} of them, such as {min(left_out)!r}",
            cure="infinity.load it into the model, built from the same base; and infinity.export(model, …)",
        )


def open_saved(found: Found, stem: str, ring: Ring) -> TensorFile | None:
    """Open the file `stem` of a checkpoint; None: it has none.

    Raises:
        DirectoryError, CorruptionError: see `TensorFile.open`.
        KeyError, TypeError, AttributeError: the index lacks what it must have.
    """
    path = found.file(stem)
    return None if path is None else TensorFile.open(path, ring, found.content["crcs"][stem])


def names_of(engine: Engine) -> dict[ShardedParam, str]:
    """Return the name in the model of each parameter, the first of those that are tied."""
    model = engine.model()
    named = model.named_parameters() if model is not None else ()
    return {engine.params[p]: name for name, p in named if p in engine.params}


def buffers_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of the model, by name."""
    model = engine.model()
    found = {}
    for prefix, module in model.named_modules() if model is not None else ():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    return found


def texts_of(model: Any, contents: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return what a model of transformers, diffusers or timm says of itself, by the name of the file that has
    it there; of a model of PEFT what its base says. `contents`: see `ties.contents_of`; None: the model's."""
    inner = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    if isinstance(getattr(inner, "peft_config", None), dict) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    texts = {}
    for name in ("generation_config", "config"):
        to_json = getattr(getattr(inner, name, None), "to_json_string", None)
        if callable(to_json):
            texts[f"{name}.json"] = str(to_json())
    if "config.json" in texts:
        values = {**json.loads(texts["config.json"]), "architectures": [type(inner).__name__]}
        values = ties.corrected(inner, values, ties.contents_of(inner) if contents is None else contents)
        texts["config.json"] = json.dumps(values, indent=2, sort_keys=True) + "\n"
    elif callable(getattr(inner, "register_to_config", None)) and callable(
        getattr(inner, "to_json_string", None)
    ):
        texts["config.json"] = str(inner.to_json_string())
    elif "timm" in sys.modules and isinstance(getattr(inner, "pretrained_cfg", None), dict):
        texts |= _texts_of_timm(inner)
    return texts


def library_of(config: Mapping[str, Any]) -> str:
    """Return the library that has written a config.json: "diffusers", "timm" or "transformers"."""
    if "_class_name" in config:
        return "diffusers"
    return "timm" if "architecture" in config and "pretrained_cfg" in config else "transformers"


def _texts_of_timm(model: Any) -> dict[str, str]:
    hub = importlib.import_module("timm.models._hub")
    try:
        with tempfile.TemporaryDirectory(prefix="infinity-") as folder:
            path = os.path.join(folder, "config.json")
            hub.save_config_for_hf(model, path)
            with open(path, encoding="utf-8") as file:
                return {"config.json": file.read()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        warnings.warn(
            f"timm cannot describe this {type(model).__name__}, so there is no config.json for it: {error}. "
            "Build it by timm.create_model, with its arguments, and load the values into that.",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def writing_ring(path: str) -> Ring:
    """Return a ring for files that are made in directory `path`."""
    return open_ring("checkpoint", path)


def reading_ring() -> Ring:
    """Return a ring for files of directories in which nothing may be made."""
    return Ring("checkpoint")
