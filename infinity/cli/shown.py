"""How an error is shown: to a person, and to a machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from infinity.core.errors import InfinityError


def error_as_dict(error: InfinityError) -> dict[str, Any]:
    """Return an error as values that JSON has."""
    texts = {name: getattr(error, name) for name in ("expected", "found")}
    return {
        "type": type(error).__name__,
        "what": error.what,
        **{name: None if text is None else str(text) for name, text in texts.items()},
        "cure": error.cure,
    }


def show_error(error: InfinityError) -> None:
    """Show an error on stderr: in a panel on a terminal, as plain lines elsewhere."""
    if not sys.stderr.isatty():
        click.echo(f"error: {error}", err=True)
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    Console(stderr=True).print(Panel(Text(str(error)), title=type(error).__name__, border_style="red"))
