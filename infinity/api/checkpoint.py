"""What a checkpoint has, for `save` and `load`.

As safetensors files: ``parameters`` (fp32 masters; of frozen parameters the values in the compute dtype),
``exp_avg`` and ``exp_avg_sq`` (fp32), ``front`` (with delayed updates: the values that the next forward uses,
where they are not the newest), ``buffers``, and ``values``, the tensors of what is JSON otherwise; and an
index. What a run is cut into, where its bytes lie and which compute dtype it has are not in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import torch

from infinity.core.config import IO_DEADLINE
from infinity.core.errors import ConfigError
from infinity.hardware.aio import Ring, open_ring
from infinity.params.param import ShardedParam
from infinity.planning.parts import MOMENTS

from .engine import Engine

Progress = Callable[[int, int], None]
#: What a trainable parameter has.
KINDS: Final = ("copy", "master", *MOMENTS)


def path_of(path: str | os.PathLike[str]) -> str:
    """Return a path as a string.

    Raises:
        ConfigError: it has no letters.
    """
    name = os.fsdecode(path)
    if not name:
        raise ConfigError(
            "the directory of checkpoints has no name",
            expected="a directory",
            found=repr(path),
            cure='"checkpoints"',
        )
    return name


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


def writing_ring(path: str) -> Ring:
    """Return a ring for files that are made in directory `path`."""
    return open_ring("checkpoint", path, "auto", None, None, IO_DEADLINE, None)


def reading_ring() -> Ring:
    """Return a ring for files of directories in which nothing may be made."""
    return Ring("checkpoint")
