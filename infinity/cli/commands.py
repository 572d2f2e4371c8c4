"""What the commands take that import torch, which takes seconds: what they do is imported when arguments are
right."""

from __future__ import annotations

import importlib
from typing import Any

import click

from .ending import close_on_signals
from .options import device_option, directories_argument, json_option, named


def _imported(name: str) -> Any:
    """Import a module; from then on signals close what it has open, and until then they end all at once."""
    module = importlib.import_module(name)
    close_on_signals()
    return module


@click.command("import-deepspeed")
@click.argument("directory", metavar="DIR", callback=named)
@click.argument("out", metavar="OUT", callback=named)
@json_option
def import_deepspeed_command(**given: Any) -> Any:
    """Write the checkpoint of DeepSpeed in DIR as one of infinity, below the new directory OUT.

    DIR is what save_checkpoint was given, or a tag below it: ZeRO at stage 1, 2 or 3 with AdamW or Adam, or a
    universal checkpoint. DeepSpeed is not needed, no code in the files runs, and values are copied piece by
    piece. infinity.load goes on from OUT. It returns what else DeepSpeed saved.
    """
    call = _imported("infinity.integrations.deepspeed.checkpoints").import_deepspeed
    return _imported("infinity.cli.imports").import_command(call, **given)


@click.command("import-dcp")
@click.argument("directory", metavar="DIR", callback=named)
@click.argument("out", metavar="OUT", callback=named)
@json_option
def import_dcp_command(**given: Any) -> Any:
    """Write the checkpoint of torch.distributed.checkpoint (FSDP2) in DIR as one of infinity, below the new
    directory OUT.

    DIR has a .metadata file, or is what accelerate saved, with pytorch_model_fsdp_0 and optimizer_0. It has
    the state dicts of a model and of AdamW or Adam. No code in the files runs, and values are copied piece by
    piece. infinity.load goes on from OUT. It returns what else was saved.
    """
    call = _imported("infinity.integrations.dcp").import_dcp
    return _imported("infinity.cli.imports").import_command(call, **given)


@click.command("export")
@click.argument("checkpoint", callback=named)
@click.argument("directory", metavar="DIR", callback=named)
@click.option("--dtype", help="fp32, bf16 or fp16. Default: that of the model's config.json, or else fp32.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Bytes in a file.")
@json_option
def export_command(**given: Any) -> Any:
    """Write the model in CHECKPOINT to a new directory DIR: safetensors files, and of a model of transformers
    all that `from_pretrained` reads.

    CHECKPOINT is what `infinity.save` has made, or a directory of such: then the newest. No model is built,
    so any machine with room on its drive can do it. A DIR with something in it is refused.
    """
    return _imported("infinity.cli.export").export_command(**given)


@click.command("verify")
@click.option("--nvme", "directory", default=".", metavar="DIR", help="On an NVMe drive. Default: here.")
@device_option
@json_option
def verify_command(**given: Any) -> Any:
    """Check that every placement and update mode gives the same bits on this machine.

    It takes a few minutes. What it writes to DIR is gone afterwards. Exit code 1 when a case differs.
    """
    return _imported("infinity.cli.verify").verify_command(**given)


@click.command("tune")
@directories_argument()
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60.0, show_default=True, help="In all.")
@click.option("--store/--no-store", default=True, help="Keep the result, so that auto uses it.")
@json_option
def tune_command(**given: Any) -> Any:
    """Find the smallest I/O settings that are as good as the best, for the drive below each DIR.

    They are kept per drive, and `auto` uses them; the Config that is printed names them.
    Needs an otherwise idle machine, and up to a gigabyte of free space for the time it takes. Exit code 1
    when the result cannot be kept; it is printed then, too.
    """
    return _imported("infinity.cli.tune").tune_command(**given)
