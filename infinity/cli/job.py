"""The ranks that run one command: what they agree on, and how all end when one fails.

The first error of any rank is the job's. That rank shows it, with its number; the others end without a word,
with an exit code that says that they failed. Of a rank that is gone another one tells.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import click
import torch

from infinity.api.together import agree
from infinity.core.config import Config
from infinity.core.errors import ConfigError, InfinityError
from infinity.hardware.comm import Alone, Comm, Ranks, connect
from infinity.hardware.launch import RankPlace
from infinity.hardware.ranks import PATIENCE

from .ending import Quiet, code_of, ignore_signals
from .settings import read_values

_PATIENCE: Final = 10.0  # seconds in which ranks come without a word


class Job:
    """A command on several ranks, or on one. Attributes: `at`: which rank this is; `first`: whether it is the
    one that shows how the job goes; `last_words`: returns what is said when the job fails."""

    def __init__(self, comm: Comm | None = None) -> None:
        self.comm = comm if comm is not None else Alone()
        self.at = RankPlace(self.comm.rank, self.comm.world, self.comm.local_rank, self.comm.local_world)
        self.first = self.at.rank == 0
        self.last_words: Callable[[], str] = str

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        comm = self.comm
        if not isinstance(comm, Ranks):
            if error is not None:
                self._say_last_words()
            return
        if error is not None:
            teller = comm.settle(error)
            comm.close()
            ignore_signals()  # of torchrun, that ends the ranks which are left
            if teller != self.at.rank:
                raise Quiet(code_of(error) if isinstance(error, KeyboardInterrupt) else 2) from error
            if isinstance(error, InfinityError):
                if not re.match(r"rank \d+: ", error.what):  # what `together` has told names its rank
                    error.what = f"rank {self.at.rank}: {error.what}"
            else:
                click.echo(f"rank {self.at.rank} of {self.at.world}:", err=True)
            self._say_last_words()
        else:
            ignore_signals()
            comm.close()

    def _say_last_words(self) -> None:
        if words := self.last_words():
            click.echo(words, err=True)

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks at once that this one ends, before it closes what it has open."""
        self.comm.post(error)

    def wait(self, what: str) -> None:
        """Wait until all ranks have come to this point of the program, which `what` names. Collective."""
        self.comm.exchange(what)

    def check_same(self, what: str, values: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless all ranks have the same values, by name, as JSON. Collective."""
        told = [json.loads(t) for t in self.comm.exchange(what, json.dumps(values, default=str).encode())]
        for name in values if self.at.world > 1 else ():
            found = [each.get(name) for each in told]
            if any(value != found[0] for value in found):
                raise ConfigError(
                    f"ranks were started with a different {name}",
                    expected="the same settings and the same text for all",
                    found="; ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(found)),
                    cure="start all ranks with one command line, one configuration file and one text",
                )

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum over ranks of each of `values`, added in the order of the ranks. Collective."""
        told = agree(self.comm, "the figures of a step", [*values])
        return [sum(column) for column in zip(*told, strict=True)]

    def most(self, what: str, value: int) -> int:
        """Return the largest of all ranks' values. Collective."""
        return int(max(agree(self.comm, what, value)))


@contextlib.contextmanager
def joined(config_file: str | None, given: Mapping[str, Any]) -> Iterator[Job]:
    """Lend the job that this process is a rank of. Collective: returns when all ranks are there.

    Args:
        config_file, given: of a command that `run_options` decorated.

    Raises:
        ConfigError: the environment lacks what it has to say.
        RankError: a rank has not come in time, or is gone.
    """
    try:
        said = read_values(config_file, given)["engine"].get("rank_timeout")
    except ConfigError:
        said = None  # it is raised again where the settings are read, and told once
    timeout = Config().rank_timeout if said is None else said
    waits = threading.Timer(_PATIENCE, lambda: click.echo("waits for the other ranks", err=True))
    waits.daemon = True
    waits.start()
    try:
        comm = connect(device=torch.device("cpu"), timeout=timeout, patience=PATIENCE)
    finally:
        waits.cancel()
    with Job(comm) as job:
        if job.at.local_world > 1 and torch.cuda.is_available():
            torch.cuda.set_device(job.at.local_rank % torch.cuda.device_count())
        job.wait("the begin of the job")  # from here on all are in the block, and none is told outside of it
        yield job
