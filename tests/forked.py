"""Runs a script in a fork of this process: it need not import torch anew."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback


def run_forked(script: str, *arguments: str, seconds: int = 60) -> tuple[int, str]:
    """Run `script` with `arguments` in sys.argv; return its exit code and what it printed.

    The code is negative for a signal, as of `subprocess`; SIGALRM ends it after `seconds`.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            gc.disable()  # what the parent has is the parent's to end
            faulthandler.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            os.close(reading)
            os.dup2(writing, 1)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.argv = ["", *arguments]
            exec(compile(script, "<forked>", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as said:
        output = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output
