"""`infinity`: the command line. A verb's module is imported when the verb is used."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from infinity.core.errors import InfinityError
from infinity.core.installed import check_installed
from infinity.core.system_errors import cure, reason
from infinity.version import __version__

from .ending import close_on_signals
from .options import LazyGroup

#: verb → (module of its command, one line of help). A new verb is one more line.
VERBS: Final[dict[str, tuple[str, str]]] = {
    "plan": ("infinity.cli.plan", "Say what a run would take, building nothing."),
    "bench": ("infinity.cli.bench.group", "Measure drives as the engine uses them."),
    "tune": ("infinity.cli.commands", "Find the I/O settings that suit a drive, and keep them."),
    "verify": ("infinity.cli.commands", "Check that all placements and updates give the same bits."),
    "export": ("infinity.cli.commands", "Write the model of a checkpoint for other programs."),
    "import-deepspeed": ("infinity.cli.commands", "Turn a checkpoint of DeepSpeed into one of infinity."),
    "import-dcp": ("infinity.cli.commands", "Turn a checkpoint of FSDP2 into one of infinity."),
    "doctor": ("infinity.cli.doctor", "Look over this machine, and say what to change."),
}

#: What the system says of an output that takes no more.
_OUTPUT: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class _Verbs(LazyGroup):
    """The verbs."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb; from then on signals close what it has open (where that imports more: later)."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and VERBS[cmd_name][0] != "infinity.cli.commands":
            close_on_signals()
        return command


@click.group(
    cls=_Verbs,
    title="Verbs",
    table=VERBS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="infinity")
def cli() -> None:
    """Train PyTorch models whose state does not fit on the device or in host memory."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for an error, 130 for an interrupt.

    An `InfinityError` is shown without a traceback; with ``--json`` also as an object on stdout.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        check_installed()  # what was imported as `infinity` may be another package
        result = cli.main(args=arguments, prog_name="infinity", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except InfinityError as error:
        error.cure = cure(getattr(error, "errno", None), error.cure or "") or None
        show_error(error)
        if "--json" in arguments:
            click.echo(json.dumps({"error": error_as_dict(error)}))
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130


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


def main() -> None:
    """Run the command line of this process and end it. Exit code 2 if stdout takes no more."""
    try:
        code = run()
        if sys.stdout is not None:  # closed before the start
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OUTPUT:
            raise
        click.echo(f"Error: the output cannot be written: {reason(error.errno)}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest when it ends
        code = 2
    sys.exit(code)
