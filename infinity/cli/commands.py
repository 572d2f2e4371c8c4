"""What the commands take that import torch, which takes seconds: what they do is imported when arguments are
right."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Mapping
from typing import Any, Final

import click

from .ending import close_on_signals
from .options import device_option, directories_argument, json_option, named
from .settings import OPTIONS, RunCommand, read_values, run_of, run_options

#: Settings of the engine that `generate` takes.
_GENERATES: Final = (
    *("device", "dtype", "parameters", "nvme", "device_memory", "host_memory", "units"),
    *("chunk_elements", "block_bytes", "queue_depth", "aio_backend"),
)


def refuse(config_file: str | None, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where settings are wrong by themselves. Of several ranks one has to tell that, so
    these look when they have met; and those of a run that goes on are beside its checkpoint."""
    if any(name in os.environ for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")):
        return
    values = read_values(config_file, given)
    if not values["train"].get("resume"):
        run_of(values)


def _imported(name: str) -> Any:
    """Import a module; from then on signals close what it has open, and until then they end all at once."""
    module = importlib.import_module(name)
    close_on_signals()
    return module


@click.command("train", cls=RunCommand)
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; the rest on stderr.")
def train_command(config_file: str | None, as_json: bool, **given: Any) -> int:
    """Train a language model of transformers on text: a preset, or one from a directory.

    Without arguments: a Llama of 30 million parameters on the sources of Python's standard library.
    On several ranks: `torchrun --nproc-per-node N -m infinity train ...` or `srun infinity train ...`;
    --batch is each rank's then, and losses and figures of steps are those of all. What was trained is
    saved as a checkpoint; --resume goes on from one. SIGTERM and SIGHUP (a connection that is lost) save
    after the step under way; a second SIGTERM, like Ctrl-C, ends at once; SIGUSR1 saves, and the run goes on.
    Exit code 1 when it was trained but the log, the trace, what it prints or a checkpoint, on the way or at
    the end, is not complete (then it says how many steps are lost, and which checkpoint is whole), 75 when
    SIGTERM or SIGHUP has ended it and nothing is lost: all is saved, or the first step had not begun.
    """
    refuse(config_file, given)
    return int(_imported("infinity.cli.train").train_command(config_file, as_json, given))


def _finite(context: click.Context, option: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


@click.command("generate", cls=RunCommand)
@click.argument("directory", metavar="DIR")
@click.option("--prompt", "text", help="Text to go on from.")
@click.option(
    "--prompts", "file", metavar="FILE", help="One prompt a line; JSON strings in a .jsonl; - is stdin."
)
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="To write, at most.")
@click.option(
    "--batch", "at_once", type=click.IntRange(1), default=8, show_default=True, help="Prompts at once."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    callback=_finite,
    default=0.0,
    show_default=True,
    help="0: the likeliest token.",
)
@click.option(
    "--seed",
    "drawn",
    type=click.IntRange(0, (1 << 64) - 1),  # what torch's generators take
    default=0,
    show_default=True,
    help="Of what is drawn.",
)
@functools.partial(
    run_options, options=[o for o in OPTIONS if o.section == "engine" and o.name in _GENERATES]
)
@json_option
def generate_command(**given: Any) -> Any:
    """Write text with the model in DIR: a Hugging Face directory, or checkpoints of infinity.

    Parameters are read from where --parameters says while they are used, so the model may be larger than the
    device and than memory. At the end: tokens per second, and what bounds them.
    """
    return _imported("infinity.cli.generate").generate_command(**given)


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
    return _imported("infinity.cli.imports").import_deepspeed_command(**given)


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
    return _imported("infinity.cli.imports").import_dcp_command(**given)


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

    They are kept per drive, and `auto` uses them; the YAML that is printed goes into a configuration.
    Needs an otherwise idle machine, and a gigabyte of free space for the time it takes. Exit code 1 when the
    result cannot be kept; it is printed then, too.
    """
    return _imported("infinity.cli.tune").tune_command(**given)
