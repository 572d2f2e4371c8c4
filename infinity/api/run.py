"""`Run`: a training loop that saves checkpoints, stops cleanly on a signal, and resumes where it stopped."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from types import TracebackType
from typing import Any, Final

import torch

from infinity.core.errors import (
    BackendError,
    ConfigError,
    CorruptionError,
    DirectoryError,
    InfinityError,
)
from infinity.core.signals import ENDING, SAVED, Ended
from infinity.core.system_errors import cure, reason
from infinity.storage.checkpoints import check_root, list_checkpoints
from infinity.storage.folder import cure_of_path

from .checkpoint import path_of
from .claimed import claimed, going_on
from .engine import engine_of
from .load import load
from .save import save
from .together import agree, agree_on_path, together
from .user_state import check_named, encode, is_tokenizer
from .wanted import Wanted, check_minutes

_OWN: Final = "infinity.Run"  # what a checkpoint has of the run, beside the user's state


class Run:
    """A training run in a directory of checkpoints: a `with` block around its loop.

    ::

        with infinity.Run(optimizer, "runs/1", state={"scheduler": scheduler}, save_every=500) as run:
            for step in run.steps(10_000):       # resumes after the newest whole checkpoint in runs/1
                loss = model(batch(step))
                loss.backward()
                optimizer.step(); scheduler.step(); optimizer.zero_grad()

    The run saves at the end of a step, when no gradients wait for an `optimizer.step()`: every `save_every`
    steps, every `save_minutes` minutes, after a SIGUSR1, and after the last step. If a save before the last
    one fails, a warning gives the reason, and the run goes on.

    These events end a run:

    - SIGTERM, or SIGHUP when a terminal is lost: the run finishes and saves the current step and leaves the
      loop. The end of the block raises SystemExit(75), "try again later". While the block begins or before
      the first step, the run makes that step first. After the last step, these signals do what they do
      without a run.
    - A second SIGTERM, a second later or more, or Ctrl-C: the run ends now, by SystemExit(143) or
      KeyboardInterrupt (exit code 130).
    - An exception: the run does not save the step that raised, and the exception propagates.

    In the last two cases the run prints on stderr how many steps are lost and which checkpoint is whole.
    Saved checkpoints stay whole, whatever ends the run.

    ``break``, or an exception that the program catches inside of the block, may leave a step before its end.
    If the step has called `optimizer.step()`, it counts. If not, a further loop over `steps` begins with it
    again; call `zero_grad` first, because its gradients stay. A block that ends without an exception saves
    all steps that count.

    On the main thread the run sets signal handlers, unless the program has its own handler or ignores the
    signal. At the end it restores the old handlers. After a SIGHUP it ignores further SIGHUPs. After the
    block it ignores SIGUSR1, which would kill the process otherwise.

    With several ranks, use the run in the same way on all of them. A signal or a clock on one rank counts for
    all ranks; an exception on one rank ends all. The first rank writes the messages.

    Args:
        optimizer: as `wrap` returned it.
        path: the directory of checkpoints, the same on all ranks. The run creates it if it does not exist,
            and locks it while the block lasts. None: the run saves nothing, and signals do what they do
            without a run.
        state: further values to save and load, by name: see `save` and `load`.
        save_every: steps between checkpoints. save_minutes: minutes between them; 0: after each step.
        keep_last: the number of checkpoints that stay, as in `save`. None: all stay.
        resume: whether the run resumes from the newest checkpoint in `path`. None: if there is one.

    A step is one body of the loop; it may be a part of an optimizer's step (gradient accumulation). The run
    counts bodies. A checkpoint's name, step-<n>, has the number of the optimizer's steps.

    A run has one block. `steps` and `save` work inside of it only.

    Attributes:
        begin: number of completed steps when the block began; step: of steps completed now; kept: of saved
            steps.
        state: the loaded `state`, as `load` returned it.
        saved: the newest checkpoint; None: there is none.
        id: the id of the run; it stays the same when the run resumes.
        stopped: whether a signal has ended the run before its last step.
        incomplete: errors that explain why checkpoints before the last one are missing; one of a kind.

    The ``with`` statement raises the errors below before the first step. If the last save failed, the end of
    the block raises its error, of a class that `save` raises; it says how many steps are lost.

    Raises:
        ConfigError: an argument is not valid, there is a checkpoint with ``resume=False``, or the run has had
            its block.
        StateDictError: `save` does not support `state`, or the checkpoint does not fit.
        DirectoryError: another active run, perhaps of this process, uses the directory; or the directory is
            not writable, is itself a checkpoint, or has no checkpoint with ``resume=True``.
        CorruptionError: the newest checkpoint is damaged; `cure` has the command that moves it aside.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        path: str | os.PathLike[str] | None,
        *,
        state: MutableMapping[str, Any] | None = None,
        save_every: int | None = None,
        save_minutes: float | None = None,
        keep_last: int | None = None,
        resume: bool | None = None,
    ) -> None:
        for name, value in (("save_every", save_every), ("keep_last", keep_last)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(
                    f"{name}={value!r} is not valid", expected="None, or an integer ≥ 1", cure=f"{name}=2"
                )
        check_minutes(save_minutes)
        if resume is not None and type(resume) is not bool:  # 0 and 1 are equal to these
            raise ConfigError(
                f"resume={resume!r} is not valid", expected="None, True or False", cure="resume=None"
            )
        check_named(state)
        self.engine = engine_of(optimizer)
        self.optimizer = optimizer
        self.root = None if path is None else os.path.abspath(path_of(path))
        self.begin = self.step = self.kept = 0
        self.state: dict[str, Any] = {}
        self.saved: str | None = None
        self.id = secrets.token_hex(4)
        self.stopped = False
        self.lost: InfinityError | None = None  # why the last save failed
        self.incomplete: list[InfinityError] = []
        self.first = self.engine.comm.rank == 0
        self._given: MutableMapping[str, Any] = {} if state is None else state
        self._every, self._keep_last = save_every, keep_last
        self._resume = resume
        self._asked = Wanted(self.engine, save_minutes)
        self._stack = contextlib.ExitStack()
        self._block = "has not begun"  # what became of the block; "": it is under way
        self._total = 0
        self._inside = False  # whether the body of the loop runs
        self._open = False  # whether a step has begun that does not count yet
        self._due = False  # whether a save is, which waits
        self._put_off: int | None = None  # until the optimizer has made more steps than these
        self._before = (0, 0)  # as of `_made`, when it began
        self._kinds: set[tuple[type, int | None]] = set()

    # -- the block --------------------------------------------------------------------------

    def __enter__(self) -> Run:
        if self._block != "has not begun":
            raise ConfigError(
                "an infinity.Run has one `with` block, and this one has had it",
                expected="a new Run for each block",
                found=f"a run whose block {self._block or 'is under way'}",
                cure="with infinity.Run(…) as run, which resumes from the newest checkpoint in its directory",
            )
        with contextlib.ExitStack() as stack:
            if self.root is not None:  # a load may take minutes, in which a signal would kill the process
                stack.callback(self._asked.give_back)
                self._asked.take()
            self._take(stack)
            stack.callback(setattr, self, "_block", "has ended")
            self._block = ""
            self._stack = stack.pop_all()
        return self

    def _check_inside(self, call: str) -> None:
        """Raise `ConfigError` outside of the block, where nothing is resumed or locked."""
        if self._block:
            raise ConfigError(
                f"{call} works only inside the `with` block of its run",
                expected="the block, which resumes the run and locks its directory",
                found=f"a run whose block {self._block}",
                cure=f"with infinity.Run(…) as run, and {call} in the block",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)
        if error is not None:
            if isinstance(error, Ended) or not isinstance(error, SystemExit):
                self.engine.comm.post(error)
            if words := self._last_words():
                self._say(words)
            return
        if self.lost is not None:
            gone = self.step - self.kept
            self.lost.what = f"{gone} of the {self.step} steps are lost: {self.lost.what}"
            raise self.lost
        if self._asked.end:
            raise SystemExit(SAVED)
        self._asked.pass_on()  # of a signal after which the block has made no step

    def _leave(self, error: BaseException | None) -> None:
        """End what the block has open; save what a loop that was left has made."""
        with self._stack:
            self._inside = False
            if error is None and self._is_left():
                self._end_step(last=True)
            elif error is None and self.root is not None and self.step > self.kept and self.lost is None:
                if self.engine.gradients.are_new:
                    self._tell_of_gradients()
                self._save_last()
                self._asked.agreed()  # of a signal that came before

    def _is_left(self) -> bool:
        """Return whether something has left a step before its end, but behind its `optimizer.step()`."""
        return self._open and not self._inside and self._made() != self._before

    def _take(self, stack: contextlib.ExitStack) -> None:
        """Lock the directory until `stack` ends, and resume from its newest checkpoint."""
        comm, root = self.engine.comm, self.root
        if root is None:
            return
        agree_on_path(comm, "a run", root)
        encode({k: v for k, v in self._given.items() if not is_tokenizer(v)}, {})  # or it is refused
        stack.enter_context(claimed(comm, root, functools.partial(check_root, root)))
        self.id = agree(comm, "the id of a run", self.id)[0]
        look = functools.partial(self._find, root) if self.first else bool
        found = together(comm, "the checkpoint that a run goes on from", look)[0]
        if found:
            with going_on(root):
                self.state = load(self.optimizer, found, state=self._given)
            own = self.state.pop(_OWN, {})
            self.id = own.get("id", self.id)
            self.begin = self.step = self.kept = own.get("step", self.engine.optimizer.steps)
            self.saved = found

    def _find(self, root: str) -> str:
        """Return the checkpoint that the run goes on from; "": it begins."""
        with going_on(root):
            there = list_checkpoints(root)
        if not there and self._resume:
            names = sorted(name for name in os.listdir(root) if not name.startswith("."))
            raise DirectoryError(
                f"there is no checkpoint in {root}, and resume=True requires one",
                errno=errno.ENOENT,
                path=root,
                expected="the directory of an earlier run, with whole checkpoints step-<n>",
                found=", ".join(names[:8]) + " …" * (len(names) > 8) or "nothing",
                cure="resume=None, which begins a run where there is none; or the path of that earlier run",
            )
        if there and self._resume is False:
            raise ConfigError(
                f"{root} has the checkpoints of another run",
                expected="a separate directory for each run, so that no run mixes or removes another's "
                "checkpoints",
                found=os.path.basename(there[-1].path),
                cure="resume=None to resume that run, or another directory",
            )
        return there[-1].path if there else ""

    # -- the loop ---------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number (from 0) of each remaining step of `total`. When the body of the loop ends, the
        step is complete, and the run saves if a checkpoint is due.

        Raises:
            ConfigError: `total` is not an integer ≥ 0; or the block of the run is not under way.
        """
        self._check_inside("run.steps(…)")
        if type(total) is not int or total < 0:
            raise ConfigError(f"steps({total!r}) is not valid", expected="an integer ≥ 0", cure="steps(1000)")
        return self._go_through(total)

    def _go_through(self, total: int) -> Iterator[int]:
        self._check_inside("run.steps(…)")
        self._total = total
        if self.root is not None:
            self._asked.take()
        self._inside = False
        if self._is_left():
            self._end_step(last=self.step + 1 >= total)
        while self.step < total and not self.stopped:
            self._inside = self._open = True
            self._before = self._made()
            try:
                yield self.step
            finally:  # something may have left the loop
                self._inside = False
            self._check_inside("run.steps(…)")
            self._end_step(last=self.step + 1 >= total)
        if not self.stopped:
            self._asked.give_back(ENDING)
            self._asked.pass_on()

    def save(self) -> None:
        """Save now; inside of a step, when it is over. Raises as `infinity.save`, and ConfigError outside of
        the block of the run."""
        self._check_inside("run.save()")
        if self.root is None or self._inside:
            self._asked.save = True
            return
        if self._is_left():
            self._count()
        state = {**self._given, _OWN: {"step": self.step, "id": self.id}}
        self.saved = save(self.optimizer, self.root, state=state, keep_last=self._keep_last)
        self.kept = self.step

    def _made(self) -> tuple[int, int]:
        return self.engine.optimizer.steps, self.engine.optimizer.skipped_steps

    def _count(self) -> None:
        self._open = False
        self.step += 1

    def _end_step(self, last: bool) -> None:
        self._count()
        if self.root is None:
            return
        gradients, steps = self.engine.gradients, self.engine.optimizer.steps
        waits = gradients.are_new  # for an `optimizer.step()` that is to come
        due = self._due or (self._every is not None and self.step % self._every == 0)
        asked, self._due = self._asked.agreed(due)
        if not (last or asked or self._due):
            return
        if waits and not last and self._put_off in (None, steps):
            self._put_off = steps
            return
        if waits:
            self._tell_of_gradients()
        self._due, self._put_off = False, None
        if last or asked:
            self._save_last()
            self._asked.agreed()  # of a signal that came meanwhile
        elif (error := self._failed()) is not None:
            self._say(f"no checkpoint of step {self.step}: the run goes on")
            self._fail(error)
        if asked and not last:
            self.stopped = True
            self._say(f"{asked}: ended after {self.step} of {self._total} steps")

    def _tell_of_gradients(self) -> None:
        self._say(f"step {self.step} is saved without the gradients that no `optimizer.step()` has used")

    # -- saves ------------------------------------------------------------------------------

    def _save_last(self) -> None:
        self.lost = error = self._failed()
        if error is None:
            return
        usual = "make room there, or look after its drive"
        if isinstance(error, BackendError) and error.cure:
            usual = error.cure
        then = f"`{self._command()}` makes the lost steps again" if self.saved else "train again"
        error.cure = f"{cure(getattr(error, 'errno', None), usual)}; then {then}"
        self.incomplete.append(error)

    def _failed(self) -> InfinityError | None:
        """Save; return why that failed, where the system has refused something. What is trained is whole."""
        assert self.root is not None
        try:
            self.save()
        except CorruptionError:
            raise
        except (OSError, BackendError) as error:
            if isinstance(error, InfinityError):
                error.cure = cure(getattr(error, "errno", None), error.cure or "") or None
                return error
            return DirectoryError(
                f"cannot save into {self.root}",
                errno=error.errno,
                path=self.root,
                found=reason(error.errno),
                cure=cure(error.errno, cure_of_path(error.errno)),
            )
        return None

    # -- words ------------------------------------------------------------------------------

    def _last_words(self) -> str:
        """Return what is lost and what is whole, where this ends before its end."""
        if self.root is None:
            return ""
        step = self.step + self._is_left()
        gone = step - self.kept
        words = f"{gone} of the {step} steps are lost. " if gone else ""
        if not self.saved:
            return f"{words}There is no checkpoint." if words else ""
        made = os.path.basename(self.saved).removeprefix("step-")
        counts = f"{self.kept} steps" + (f" of the loop, {made} of the optimizer" * (made != str(self.kept)))
        return (
            f"{words}The newest whole checkpoint is {self.saved}, after {counts}; "
            f"`{self._command()}` goes on from it."
        )

    def _command(self) -> str:
        """Return what goes on with this run."""
        return f"infinity.Run(optimizer, {self.root!r})"

    def _say(self, text: str) -> None:
        if self.first:
            with contextlib.suppress(OSError, AttributeError):  # a terminal that has hung up hears nothing
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()

    def _fail(self, error: InfinityError) -> None:
        """Keep and show why a checkpoint on the way is missing. One of a kind is shown, and kept, once: a run
        of a week may fail each hour in the same way."""
        kind = (type(error), getattr(error, "errno", None))
        if kind not in self._kinds:
            self._kinds.add(kind)
            self.incomplete.append(error)
            if self.first:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
