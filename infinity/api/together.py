"""Calls that succeed on all ranks, or raise on all: a rank's error is told to the others, and who catches it
may go on, together with them. With one rank, a call is a call."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from infinity.core import errors
from infinity.core.errors import ClosedError, ConfigError, InfinityError, RankError, StorageError

if TYPE_CHECKING:  # a plan imports what checks ranks, without torch
    from infinity.hardware.ranks import Comm

_R = TypeVar("_R")
_MORE: Final = ("errno", "path", "offset", "nbytes")  # that a StorageError has


def together(comm: Comm, what: str, call: Callable[[], Any]) -> list[Any]:
    """Return the results of `call` on each rank (JSON values), by rank. Collective; `call` may contain
    collectives only if all ranks make the call.

    Raises:
        InfinityError: on all ranks, if `call` raised on one: that rank raises the original error, the others
            an error of the same class that names the rank; `RankError` if the class is not one of infinity's.
        RankError: a rank is gone, or makes another call.
    """
    return agree(comm, what, guarded(comm, what, call))


def agree(comm: Comm, what: str, value: Any = None) -> list[Any]:
    """Return the value of each rank, by rank; raise the error that another rank has reported by `guarded` in
    the same place. Collective."""
    if comm.world == 1:
        return [value]
    told = [json.loads(t) for t in comm.exchange(what, json.dumps({"value": value}).encode())]
    for rank, each in enumerate(told):
        if "value" not in each:
            raise _error_of(rank, each)
    return [each["value"] for each in told]


def agree_on_path(comm: Comm, what: str, path: str) -> None:
    """Check that all ranks name one directory, an absolute path. Collective.

    Raises:
        ConfigError: they do not; on all ranks.
        InfinityError: as of `agree`.
    """
    told = agree(comm, what, path)
    if len(set(told)) > 1:
        raise ConfigError(
            f"{what}: ranks were given different directories",
            expected="the same path on all ranks",
            found="; ".join(f"rank {rank}: {each}" for rank, each in enumerate(told)),
            cure="name one directory on all ranks: as an absolute path, if they run in different ones",
        )


def guarded(
    comm: Comm,
    what: str,
    call: Callable[[], _R],
    run: Callable[[Callable[[], Any]], Any] = lambda tell: tell(),
) -> _R:
    """Return the result of `call`. If it raises, first report the error to the other ranks, which call
    `agree` next. `run`: runs the call."""
    try:
        return call()
    except (RankError, ClosedError):  # there is nobody to tell
        raise
    except Exception as error:
        said = json.dumps(_said_of(error), default=str).encode()
        with contextlib.suppress(RankError, ClosedError):  # what raised first counts
            if comm.world > 1:
                run(lambda: comm.exchange(what, said))
        raise


def _said_of(error: Exception) -> dict[str, Any]:
    said: dict[str, Any] = {"type": type(error).__name__, "what": str(error)}
    if isinstance(error, InfinityError):
        said["what"] = error.what
        said |= {key: None if (v := getattr(error, key)) is None else str(v) for key in ("expected", "found")}
        said["cure"] = error.cure
    if isinstance(error, StorageError):
        said |= {key: getattr(error, key) for key in _MORE}
    return said


def _error_of(rank: int, said: dict[str, Any]) -> InfinityError:
    """Return the error of another rank."""
    name, what = said.pop("type"), said.pop("what")
    if name not in errors.__all__:
        return RankError(f"rank {rank} failed: {name}: {what}")
    error: InfinityError = getattr(errors, name)(f"rank {rank}: {what}", **said)
    return error
