"""The directory of a run: which run uses it, and what to do if its newest checkpoint is damaged."""

from __future__ import annotations

import contextlib
import functools
import secrets
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.core.errors import CorruptionError, TransferError
from infinity.storage.checkpoints import aside, check_shared, list_checkpoints
from infinity.storage.folder import Claim
from infinity.storage.interrupt import LEAST, asked_apart, interrupted

from .together import together

if TYPE_CHECKING:  # what a plan asks of a directory needs no torch
    from infinity.hardware.ranks import Comm


@contextlib.contextmanager
def claimed(comm: Comm, root: str, check: Callable[[], object]) -> Iterator[None]:
    """Lock `root` for a block, so that no other run uses it: the first rank takes the lock, and
    calls `check`, which raises an error if the run may not use the directory. Collective.

    Raises:
        DirectoryError: another active run uses the directory, it cannot be created, or the nodes do
            not share it.
        InfinityError: an error of `check`. All ranks raise either error, as `together` does.
    """
    stack = contextlib.ExitStack()
    with contextlib.ExitStack() as ends:
        ends.callback(closed_apart, stack.close)
        with contextlib.ExitStack() as marks:

            def take() -> str | None:
                if comm.rank:
                    return None
                stack.enter_context(Claim(root))
                check()
                mark = Path(root, f".infinity-ranks-{secrets.token_hex(4)}")
                if comm.world > 1:
                    marks.callback(mark.unlink, missing_ok=True)
                    mark.touch()
                return str(mark)

            mark = together(comm, "the directory of a run", take)[0]
            sees = functools.partial(check_shared, mark, comm.rank) if comm.rank else bool
            together(comm, "who sees the directory of a run", sees)
        yield


def closed_apart(close: Callable[[], object]) -> None:
    """Call `close`, which unlocks a directory; after an interrupt wait only briefly for its drive."""
    asked_apart(close, lambda: LEAST if interrupted() else None)


@contextlib.contextmanager
def going_on(root: str) -> Iterator[None]:
    """A block that reads a checkpoint in `root`: if it is damaged, the error says how to resume from an older
    one. A run never does this by itself, because the steps between them are lost."""
    try:
        yield
    except (CorruptionError, TransferError) as error:
        if error.path is not None and (names := aside(root, error.path)) is not None:
            damaged, away = names
            older = [f for f in list_checkpoints(root, damaged=False) if f.path != damaged]
            error.cure = (
                "copy it again from its source; or move it aside, "
                f"`mv {shlex.quote(damaged)} {shlex.quote(away)}`, and "
            )
            error.cure += (
                f"the run resumes from {older[-1].path}, after {older[-1].step} steps of the optimizer"
                if older
                else "start a new run, without resuming: there is no other checkpoint"
            )
        raise
