"""`infinity import-deepspeed` and `import-dcp`: checkpoints of other programs, for `infinity.load` to go on
from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from infinity.api.checkpoint import Progress
from infinity.integrations.foreign import Foreign

from .console import finish, progress


def import_command(
    call: Callable[[str, str, Progress], tuple[str, Foreign]], directory: str, out: str, as_json: bool
) -> None:
    """Import as the parameters of a command say."""
    with progress() as tell:
        path, foreign = call(directory, out, partial(tell, "imported"))
    parameters = foreign.parameters.values()
    result = {
        "path": path,
        "steps": int(foreign.counts["steps"]),
        "parameters": len(parameters),
        "frozen": sum(not p.trainable for p in parameters),
        "without_moments": sum(p.trainable and not p.moments for p in parameters),
        "groups": [{**options, "parameters": len(names)} for options, names in foreign.groups],
        "state": list(foreign.state),
        "left_out": foreign.left_out,
    }
    finish(result, _show, as_json=as_json)


def _show(result: Any) -> None:
    click.echo(
        f"{result['path']}: {result['parameters']} parameters, {result['frozen']} of them frozen, after "
        f"{result['steps']} steps"
    )
    if result["without_moments"]:
        click.echo(f"{result['without_moments']} parameters have no moments: these begin anew")
    for index, group in enumerate(result["groups"]):
        kind = "AdamW" if group["decoupled_weight_decay"] else "Adam, whose weight decay is L2"
        click.echo(
            f"param group {index}: {kind}, {group['parameters']} parameters, lr {group['lr']:g}, "
            f"weight decay {group['weight_decay']:g}"
        )
    for place in result["left_out"]:
        click.echo(f"left out: {place}, an object of a class")
    click.echo(f"load it: state = infinity.load(optimizer, {result['path']!r})")
    if result["state"]:
        click.echo(f"state has: {', '.join(map(str, result['state']))}")
