"""`infinity export`: the model of a checkpoint, in files that other programs read."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import click

from infinity.api.checkpoint import path_of
from infinity.api.export import export
from infinity.core.sizes import format_size, parse_dtype, parse_size
from infinity.storage.checkpoints import find

from .console import finish, progress


def export_command(
    checkpoint: str, directory: str, dtype: str | None, max_shard_size: str, as_json: bool
) -> None:
    """Export as the parameters of the command say."""
    wanted = None if dtype is None else parse_dtype(dtype, "--dtype")
    limit = parse_size(max_shard_size, "--max-shard-size")
    with progress() as tell:
        found = find(path_of(checkpoint))
        path = export(found.path, directory, wanted, limit, progress=partial(tell, "exported"))
    files = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    result = {
        "path": path,
        "checkpoint": found.path,
        "step": found.step,
        "files": dict(sorted(files.items())),
        "bytes": sum(files.values()),
        "load": _how_to_load(path, list(files)),
    }
    finish(result, _show, as_json=as_json)


def _show(result: Any) -> None:
    click.echo(f"the checkpoint {result['checkpoint']}, of {result['step']} steps of the optimizer")
    click.echo(f"{result['path']}: {len(result['files'])} files, {format_size(result['bytes'])}")
    click.echo(f"load it: {result['load']}")
    if "config.json" not in result["files"]:
        click.echo("model: a module like the one that was saved; --init-from does not take its files")


def _how_to_load(path: str, files: list[str]) -> str:
    if "config.json" in files:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            names = json.load(file).get("architectures") or ["AutoModel"]
        return f"transformers.{names[0]}.from_pretrained({path!r})"
    if "model.safetensors" in files:
        return f"safetensors.torch.load_model(model, {os.path.join(path, 'model.safetensors')!r})"
    return f"model.load_state_dict(safetensors.torch.load_file(file), strict=False) for each file in {path!r}"
