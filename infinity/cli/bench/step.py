"""`infinity bench step`: whole steps of one model, for every placement and update mode, beside torch
and DeepSpeed. What is measured is in step_rounds.py, what it is held to in step_bound.py.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from infinity.cli.model import shape_from
from infinity.cli.progress import finite
from infinity.core.config import UPDATES
from infinity.core.errors import ConfigError, DataError
from infinity.core.sizes import format_size
from infinity.hardware.device import open_device

from .io_show import Teller, wide_console
from .step_case import CONTESTANTS, PLACEMENTS, Request, find_deepspeed
from .step_child import Model
from .step_rounds import measure

BOUNDS = (
    "bound, from this run's torch in memory (F forward, B backward), NVMe time N (bytes at the engine's "
    "mixed rate), what forward and backward themselves hide of it H, and the update's kernel A: "
    "sync F + B + max(N − H, A), overlap B + max(F, N − H, A), delayed max(F + B, N, A). "
    "efficiency = bound ÷ seconds."
)


def show(result: Mapping[str, Any]) -> None:
    """Print a table for a person: a line for each placement and contestant."""
    model = result["model"]
    table = Table(
        "placement",
        "contestant",
        "s/step",
        "read",
        "written",
        "B/param",
        "bound",
        "efficiency",
        "× torch",
        "× DeepSpeed",
        "memory",
        box=box.SIMPLE,
        title=f"{model['parameters']:,} parameters, {result['batch']} × {result['tokens']} tokens, "
        f"{result['dtype']}, {result['device']}; "
        f"medians of {result['rounds']} rounds of {result['burst']} steps",
        title_justify="left",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for placement, group in result["placements"].items():
        first = placement
        for name, row in group["table"].items():
            speedups = group["speedups"].get(name, {})
            table.add_row(
                first,
                name,
                f"{row['seconds']:.3f}",
                format_size(round(row["read_bytes"])),
                format_size(round(row["written_bytes"])),
                f"{row['bytes_per_parameter']:.1f}",
                f"{row['bound']:.3f}" if "bound" in row else "",
                f"{row['efficiency']:.0%}" if "efficiency" in row else "",
                *(_ratio(speedups.get(f"of_{peer}")) for peer in ("torch", "deepspeed")),
                format_size(row["peak_rss"]),
            )
            first = ""
        for name in group["errors"]:
            table.add_row(first, name, "failed", style="red")
            first = ""
        table.add_section()
    console = wide_console()
    console.print(table)
    console.print(BOUNDS, markup=False)
    for placement, group in result["placements"].items():
        rate = group["rates"]["nvme_mixed_bytes_per_second"]
        if rate is not None:
            console.print(f"{placement}: the drive's mixed rate was {rate / 1e9:.2f} GB/s", markup=False)
        for name, error in group["errors"].items():
            console.print(f"{placement}: {name} failed: {error['error']}", style="red", markup=False)
    for text in result["warnings"]:
        console.print(f"warning: {text}", style="yellow", markup=False)


def _ratio(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{found['of_medians']:.2f}"


def _chosen(name: str, words: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        if word not in known:
            close = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or known
            raise ConfigError(
                f"unknown --{name}", expected=", ".join(known), found=repr(word), cure=f"--{name} {close[0]}"
            )
    return tuple(dict.fromkeys(words)) or known


@click.command("step")
@click.option("--preset", default="30m", show_default=True, help="Size of the built-in GPT, as in `train`.")
@click.option("--layers", type=int, help="Blocks, instead of the preset's.")
@click.option("--width", type=int, help="Width of the stream.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--vocab", type=int, help="Size of the vocabulary.")
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="In a sequence.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences.")
@click.option("--dtype", type=click.Choice(("fp32", "bf16")), default="fp32", show_default=True)
@click.option("--device", help="cpu, cuda or cuda:N. Default: cuda where there is one.")
@click.option("--directory", default=".", metavar="DIR", help="On the drive to be measured. Default: here.")
@click.option(
    "--placement", multiple=True, help=f"{', '.join(PLACEMENTS)}; may be given again. Default: all."
)
@click.option("--update", multiple=True, help=f"{', '.join(UPDATES)}; may be given again. Default: all.")
@click.option("--contestant", multiple=True, help=f"{', '.join(CONTESTANTS)}; may be given again.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Rounds before.")
@click.option("--burst", type=click.IntRange(min=1), help="Steps of a turn. Default: 4; for sync alone 1.")
@click.option("--threads", type=click.IntRange(min=1), help="Of torch and of the CPU's Adam.")
@click.option(
    "--deepspeed-python",
    envvar="DEEPSPEED_PYTHON",
    metavar="FILE",
    help="An interpreter that has DeepSpeed. Default: this one, if it has.",
)
@click.option("--output", metavar="FILE", help="A JSON file with every sample.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def step_command(
    preset: str,
    layers: int | None,
    width: int | None,
    heads: int | None,
    vocab: int | None,
    tokens: int,
    batch: int,
    dtype: str,
    device: str | None,
    directory: str,
    placement: tuple[str, ...],
    update: tuple[str, ...],
    contestant: tuple[str, ...],
    rounds: int,
    warmup: int,
    burst: int | None,
    threads: int | None,
    deepspeed_python: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Measure whole steps for all placements and update modes, beside torch and DeepSpeed.

    Some minutes with the default size. Needs an otherwise idle machine; what it writes to DIR is gone
    afterwards. Exit code 1 when a case of infinity failed; a peer that fails is reported.
    """
    shape = shape_from(preset, layers=layers, width=width, heads=heads, vocab=vocab)
    opened = open_device(device)
    name = str(opened.torch_device)
    opened.close()
    python = find_deepspeed(deepspeed_python)
    request = Request(
        model=Model(
            layers=shape.layers,
            width=shape.width,
            heads=shape.heads,
            vocab=shape.vocab,
            context=max(shape.context, tokens),
        ),
        directory=os.path.abspath(directory),
        tokens=tokens,
        batch=batch,
        dtype=dtype,
        device=name,
        placements=_chosen("placement", placement, tuple(PLACEMENTS)),
        updates=_chosen("update", update, UPDATES),
        contestants=_chosen("contestant", contestant, CONTESTANTS),
        rounds=rounds,
        warmup=warmup,
        burst=burst,
        threads=threads,
        deepspeed_python=python,
    )
    check_output(output)
    with Teller(quiet=as_json) as tell:
        result = measure(request, tell)
    result["warnings"] = []
    if python is None and "deepspeed" in request.contestants:
        result["warnings"].append("DeepSpeed is not installed: it is not compared (--deepspeed-python)")
    result = clean(result)
    if output is not None:
        Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
    failed = any(n.startswith("infinity") for g in result["placements"].values() for n in g["errors"])
    return 1 if failed else 0


def check_output(path: str | None) -> None:
    """Raise DataError if the file cannot be written: before the minutes that it takes, not after.

    An empty file is left where there was none.
    """
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise DataError(
            f"{path!r} cannot be written",
            expected="a file in a directory that exists",
            found=os.strerror(error.errno or 0),
            cure="change --output",
        ) from error


def clean(value: Any) -> Any:
    """Return `value` with None for every number that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(each) for each in value]
    return finite(value)
