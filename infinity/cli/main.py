"""`infinity`: the command line. A verb's module is imported when the verb is used."""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from infinity.core.errors import InfinityError
from infinity.core.installed import check_installed
from infinity.core.signals import ended
from infinity.core.system_errors import cure, reason
from infinity.version import __version__

from .ending import close_on_signals, end_on_signals, leave_signals, say_ended
from .options import LazyGroup
from .shown import error_as_dict, show_error
from .streams import let_go_of_streams

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

#: Verbs that take settings of the engine as options.
_WITH_OPTIONS: Final = ("plan", "verify")


class _Stopped(Exception):
    """An interrupt, or a signal that ends a command: `__cause__`. click would make its own of it."""


class _Verbs(LazyGroup):
    """The verbs. An interrupt ends one as an exception that click leaves alone."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb; from then on signals close what it has open (where that imports more: later)."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and VERBS[cmd_name][0] != "infinity.cli.commands":
            close_on_signals()
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Stopped from error


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
    """Run the command line and return its exit code: 0, 2 for an error, 130 for an interrupt, 128 + its
    number for a signal.

    An `InfinityError` is shown without a traceback; with ``--json`` also as an object on stdout.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        check_installed()  # what was imported as `infinity` may be another package
        result = cli.main(args=arguments, prog_name="infinity", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except InfinityError as error:
        if next((word for word in arguments if word in VERBS), None) in _WITH_OPTIONS:
            importlib.import_module("infinity.cli.settings").say_in_options(error)
        error.cure = cure(getattr(error, "errno", None), error.cure or "") or None
        show_error(error)
        if "--json" in arguments:
            with contextlib.suppress(OSError):  # the error is told on stderr
                click.echo(json.dumps({"error": error_as_dict(error)}))
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except _Stopped as stopped:
        return say_ended(stopped.__cause__)
    except (click.Abort, KeyboardInterrupt) as error:
        return say_ended(error)
    except Exception as error:
        if (came := ended()) is not None:  # an import, say, has made another error of it
            return say_ended(came)
        if isinstance(error, OSError) and error.errno in _OUTPUT:
            return _lost(reason(error.errno))
        raise


def _lost(why: str) -> int:
    with contextlib.suppress(OSError):
        click.echo(f"Error: the output cannot be written: {why}", err=True)
    return 2


def main() -> None:
    """Run the command line of this process and end it."""
    end_on_signals()
    code = run()
    leave_signals()
    if not let_go_of_streams():
        code = code or _lost("its file or device took no more")
    # Who ends a command does not wait until Python has taken torch's modules apart.
    if code > 128 or ended() is not None:
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)
