"""The optimizer that `wrap` returns: a `torch.optim.Optimizer` over shards."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn

from infinity.core import handlers
from infinity.core.commits import commit
from infinity.core.config import Config
from infinity.core.errors import (
    GradientError,
    OptimizerTypeError,
    PrecisionError,
    StateDictError,
    WrapError,
)
from infinity.core.stack import broadcast_has_model, is_for_checkpoint, is_prepared_now
from infinity.grads.sharded_grad import ShardedGrad
from infinity.hardware.ranks import told
from infinity.params.eager import eager
from infinity.params.instead import cure_of_library
from infinity.params.param import ShardedParam

from .backward_update import BackwardUpdate, Parts
from .loading import OURS, NoState, counts_of, hooked, match
from .misuse import Prepared, is_between_steps, is_guard, refuse_copies
from .rules import Rule
from .state_io import bump
from .update import ParamUpdate, chunk_updates
from .whole import agree_on_broadcast, agree_on_step, agree_on_values

#: With ``update="delayed"``: first updates that are made without delay.
DELAY_WARMUP_STEPS: Final = 40
#: fp16: steps without overflow after which the loss scale doubles.
LOSS_SCALE_WINDOW: Final = 2000
#: What of a state dict changes the copies.
_COPIED: Final = ("master", "front")


def _counted(
    present: Mapping[ShardedParam, ShardedGrad], options: Mapping[ShardedParam, ParamUpdate], clip: float
) -> dict[tuple[int, int], ParamUpdate]:
    """Count an update of each parameter; return its scalars, by unit and parameter."""
    updates: dict[tuple[int, int], ParamUpdate] = {}
    alike: dict[tuple[int, int, float], ParamUpdate] = {}  # nearly all of a group are
    for sharded, grad in present.items():
        of_group = options[sharded]
        sharded.step += of_group.step
        key = id(of_group), sharded.step, grad.factor
        if key not in alike:
            alike[key] = of_group._replace(step=max(sharded.step, 1), grad_scale=grad.factor * clip)
        updates[sharded.unit, sharded.index] = alike[key]
    return updates


def _clip(limit: float, norm: float) -> float:
    """Return torch's clip coefficient, which is NaN if the norm is."""
    clip = limit / (norm + 1e-6)
    return 1.0 if clip > 1.0 else clip


class Lifecycle(Protocol):
    """What an optimizer tells of itself (see `Phases`)."""

    def step(self) -> None:
        """A step begins: wait for all that it waits for."""

    def stepped(self, seconds: float) -> None:
        """A step has returned to the user after `seconds`."""

    def reset_abandoned(self) -> None:
        """End what a forward or a backward that raised has left under way."""

    def finish(self) -> None:
        """End what forwards and backwards have left under way, and wait for every update."""

    def lose(self, found: str) -> None:
        """Refuse to go on until a load succeeds, because of what was `found`."""


#: Where torch keeps the hooks of an optimizer's state dicts.
_STATE_HOOKS: Final = tuple(
    f"_optimizer_{call}_{when}_hooks"
    for call in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
)


class OffloadOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is on the tiers that Config names.

    It keeps the param group dicts of the optimizer that was wrapped, so schedulers work whether you create
    them before or after `wrap`.

    Attributes:
        delayed_from: with ``update="delayed"``: the number of first updates that are made without delay.
    """

    is_offloaded: Final = True  # tells it from other optimizers over the same parameters

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Parts,
        config: Config,
        params: Mapping[nn.Parameter, ShardedParam],
        *,
        rule: Rule,
        lifecycle: Lifecycle,
    ) -> None:
        self.commits = parts.residency.commits
        self._sealed = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._state = NoState()
        self._state.names = self._names
        # Those of steps are the same ones: a handle removes them, wherever they were registered. The wrapped
        # optimizer refuses state dicts, by hooks of ours.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        for name in _STATE_HOOKS:
            theirs = getattr(optimizer, name)
            getattr(self, name).update((key, hook) for key, hook in theirs.items() if not is_guard(hook))
        self._sealed = True
        self._wrapped = weakref.ref(optimizer)
        self._tiers, self._residency, self._gradients = parts.tiers, parts.residency, parts.gradients
        self._comm, self._states = parts.comm, parts.states
        self._edits, self._updater = parts.edits, parts.updater
        self._config = config
        self._params = params
        self._known = {id(param): sharded for param, sharded in params.items()}  # no hash of torch's
        self.rule = rule
        self._fp16 = config.compute_dtype is torch.float16
        self._skips = self._fp16 or config.skip_nonfinite  # steps whose gradients are not finite
        self._good_steps = 0
        self._scale_window = LOSS_SCALE_WINDOW
        self.delayed_from = DELAY_WARMUP_STEPS
        self._scaled = False
        self._lifecycle = lifecycle
        self.backward_update = BackwardUpdate(self, parts) if config.update == "backward" else None
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.step_was_skipped = False  # the last one; accelerate's name, by which schedulers wait
        self._of_accelerate = False
        self._steps = 0
        self._resumed: int | None = None  # the steps that a state dict had, if one was loaded

    # -- what a user calls ------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> NoState:
        """Without entries: the state is on its tiers, and `state_dict()` reads it."""
        return self._state

    @state.setter
    def state(self, value: object) -> None:
        if self._sealed and value is not self._state:
            self._state.clear()  # says what to write

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the loss scale (fp16; the identity for fp32 and bf16)."""
        self._scaled = True
        return loss * self.loss_scale if self._fp16 else loss

    @property
    def loss_scale(self) -> float:
        """The loss scale in use (1.0 unless fp16)."""
        return self._gradients.scale

    @property
    def steps(self) -> int:
        """The number of completed steps. An interrupt never leaves a step half done, so after an interrupt in
        `step` this number tells whether the step took place."""
        return self._steps

    @eager  # and without torch.no_grad: an interrupt inside of that leaves grad mode off
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, as torch's optimizer would.

        fp16: `step` skips the update if gradients overflow, and halves the loss scale. With
        ``Config(skip_nonfinite=True)`` it skips the update in any dtype if a gradient has an Inf or NaN.
        `step_was_skipped` tells whether the last one was skipped.

        Raises:
            PrecisionError: an fp16 backward of a loss that was not scaled.
            StorageError: a transfer failed; the error names the parameter's chunk.
            OutOfMemoryError: this update, or the one before, ran out of memory; the error names the unit.
                Load the last checkpoint then.
        """
        self.commits.check_handler()
        start = time.perf_counter()
        if self._of_accelerate and is_between_steps():
            return None
        if self.backward_update is not None:
            self.backward_update.check_outside("`step()`")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            start = time.perf_counter()
        self._lifecycle.step()
        # What an interrupt ends before this call has not happened, and what it ends after it has.
        is_made = self.backward_update is not None and self.backward_update.pending
        self.commits.run(self._take_update if is_made else self._start_update)
        self._finish_step()
        if (wrapped := self._wrapped()) is not None:
            vars(wrapped)["_opt_called"] = True  # a scheduler of that optimizer warns where it is missing
        self._lifecycle.stepped(time.perf_counter() - start)
        return loss

    # [Note: prepared by accelerate] accelerate puts an optimizer of its own around one that it prepares, with
    # a copy of the whole state. That one neither asks ours whether a step was skipped nor has `scale`. So
    # `prepare` finds ours marked as prepared, and takes it as it is; it does what accelerate's would do.

    @property
    def _is_accelerate_prepared(self) -> bool:
        """What accelerate asks first when it prepares an optimizer. A read by others changes nothing."""
        if not is_prepared_now():
            return self._of_accelerate
        self._of_accelerate = bool(Prepared())
        return self._of_accelerate

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """What accelerate sets at the end."""

    @property
    def optimizer(self) -> OffloadOptimizer:
        """What accelerate asks a prepared optimizer for, when it looks for that of a scheduler: this one."""
        if not self._of_accelerate:  # some libraries go on until an optimizer has no other inside
            raise AttributeError("optimizer")
        return self

    @commit
    def _finish_step(self) -> None:
        """Wait for the guarantees of the end of a step. The step is complete, and a retry would make another
        one: if the device has no memory for this work, the next use of a unit raises the error."""
        at_once = self._config.update in ("sync", "backward")
        if at_once:
            self._updater.wait()
        with contextlib.suppress(torch.OutOfMemoryError):
            if at_once:
                self._residency.resume_all()
            self._residency.refresh()
            if not at_once:
                self._residency.prefetch()

    def _take_update(self) -> None:
        """Take the update of the last backward as this step's update: [Note: behind the backward]."""
        assert self.backward_update is not None
        self.backward_update.check_options()
        if (wrong := self.backward_update.changed()) is not None:
            self._lifecycle.lose(
                f"a step whose gradients or parameters have changed behind its update ({wrong.found})"
            )
            raise wrong
        grads = (s.param.grad for s in self.backward_update.params)
        # The last that waits: an interrupt ends it before.
        self.grad_norm = self._gradients.norm(grads)  # type: ignore[arg-type]
        self._gradients.stepped()
        self.backward_update.forget()
        self._steps += 1

    def _start_update(self) -> None:
        with told(self._comm):
            present = self._check_step()
        changing = {s.unit for s in present}
        edited = self._edits.found()
        agree_on_step(self._comm, [*present], self.param_groups)
        self._edits.agree(edited, self._residency)
        norm = self._gradients.norm(present.values())
        self._edits.check_delayed()
        options = self.options()
        self._residency.wait_loaded(changing)  # what is loaded ahead is freed below
        with handlers.whole():
            self._make_step(present, norm, changing, options)

    def _make_step(
        self,
        present: Mapping[ShardedParam, ShardedGrad],
        norm: float,
        changing: set[int],
        options: Mapping[ShardedParam, ParamUpdate],
    ) -> None:
        """Begin the update of a step, or skip it: no interrupt comes in the middle."""
        self._scaled = False
        self._gradients.stepped()
        self.grad_norm = norm
        published = self._residency.publish()  # what the update before this one has made
        bump(published)
        self.step_was_skipped = self._skips and not math.isfinite(norm)
        if self.step_was_skipped:
            if self._fp16:
                self._gradients.rescale(max(self.loss_scale / 2, 2.0**-14))
                self._good_steps = 0
            self.skipped_steps += 1
            return
        clip = 1.0 if self._config.max_grad_norm is None else _clip(self._config.max_grad_norm, norm)
        self._edits.adopt_all()
        # What does not change stays on the device: frozen units, and those without gradients.
        self._residency.reshard_all(changing)
        updates = _counted(present, options, clip)  # with the scalars of now: `scheduler.step()` edits them
        matrices = [s for s in present if s.spec.matrix]
        order = self._residency.cache.forward_order()
        if matrices and self._comm.world > 1 and self._config.zero_stage < 3:
            order = [*self._residency.units]  # forwards may differ, and the order of rounds must not
        work = chunk_updates(self._tiers, order, updates)
        # Versions first: a graph from before the step must fail, whatever becomes of the update.
        bump([*present])
        if self.delaying:
            # The next forward uses what has just been published ([Note: two versions]).
            self._updater.post(work, delayed=True)
        else:
            # [Note: behind the next forward] Units are updated in the order of the forward; each
            # is waited for where it is used, and everything by the next step; with "sync" by the end
            # of this one, or after an interrupt by the next. Posted first: who looks at a parameter in
            # between, on another thread, finds something to wait for.
            self._updater.post(work, matrices=len([s for s in matrices if s.spec.numel]))
            self._residency.expect_updates({u.chunk.unit for u in work})
        self._steps += 1
        if self._fp16:
            self._good_steps += 1
            if self._good_steps >= self._scale_window:
                self._good_steps = 0
                self._gradients.rescale(min(self._gradients.scale * 2, 2.0**24))

    def _check_step(self) -> dict[ShardedParam, ShardedGrad]:
        """Return the gradients of the parameters that have one; raise where a step cannot be made."""
        for index, group in enumerate(self.param_groups):  # users edit groups as the run goes
            self.rule.check(group, f"param group {index}")
        present = self._present()
        self._residency.check_blocks({s.unit for s in present})
        self._edits.check_unseen()
        if self._fp16 and present and not self._scaled and self._gradients.are_new:
            raise PrecisionError(
                "the fp16 gradients come from a loss that was not scaled",
                expected="`optimizer.scale(loss).backward()`",
                found="`loss.backward()`",
                cure="scale the loss, or train in bf16",
            )
        return present

    @property
    def delaying(self) -> bool:
        """Whether the next update is made one step late (``update="delayed"``, after its warm-up)."""
        return self._config.update == "delayed" and self._steps >= self.delayed_from

    @commit
    def flush(self) -> None:
        """Wait for every update. The next forward uses the newest parameters, also with delayed updates. If
        this changes parameters, an older graph cannot run its backward any more, as after a step in torch,
        and edits outside of `gathered` are lost.

        Raises:
            ParameterError: the call would change parameters inside a `gathered` block.
            StorageError: an update failed.
        """
        self._lifecycle.finish()
        bump(self._residency.publish())
        self._residency.refresh()

    @commit
    def publish(self) -> None:
        """`flush`, unless edits would be lost.

        Raises:
            ParameterChangedError: edits would be lost. Also all errors of `flush`.
        """
        self._lifecycle.finish()
        self._edits.check_delayed()
        self.flush()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; with ``set_to_none=False`` set them to zero, so that `step` updates their
        parameters all the same."""
        if self._of_accelerate and is_between_steps():
            return
        self.commits.check_handler()
        if self.backward_update is not None:
            self.backward_update.check_stepped("`zero_grad()`")
        if self.commits.mine:  # a forward or a backward of this thread has raised
            self.commits.run(self._lifecycle.reset_abandoned)
        params = [p for g in self.param_groups for p in g["params"]]
        if set_to_none:
            with torch._C.DisableTorchFunctionSubclass():
                for param in params:
                    param.grad = None
                left = [param for param in self._params if param.grad is not None]
            if not left:
                self._gradients.clear()
            else:  # of those that are in no group any more the gradient stays
                self._gradients.wait()
                self._gradients.reconcile()
            return
        for param in params:
            if param.grad is not None:
                param.grad.zero_()
        self._gradients.send_all()

    @commit
    def clip_grad_norm_(self, limit: float) -> torch.Tensor:
        """Clip the global 2-norm of all gradients to `limit`; return the norm before clipping, fp32."""
        self._lifecycle.finish()
        grads = self._present().values()
        norm = self._gradients.norm(grads)
        clip = _clip(limit, norm)
        for grad in grads:
            grad.scale_by(clip)
        return torch.tensor(norm, dtype=torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `WrapError` after `wrap`: the layout of the state is fixed then."""
        if getattr(self, "_sealed", False):
            raise WrapError(
                "you cannot add a param group after `wrap`",
                expected="all groups in the optimizer that you pass to `wrap`",
                found="add_param_group",
                cure=cure_of_library(
                    "give the optimizer all groups before `wrap`; after `wrap` freeze what it does not train "
                    "yet, `requires_grad_(False)`, and unfreeze it later"
                ),
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copies(type(self).__name__)

    def __deepcopy__(self, memo: Any) -> Any:
        refuse_copies(type(self).__name__)

    # -- the step ---------------------------------------------------------------------------

    def _present(self) -> dict[ShardedParam, ShardedGrad]:
        """Return the gradients of the parameters that have one; settle what the user did to `p.grad`."""
        params = []
        for group in self.param_groups:
            for param in group["params"]:
                sharded = self._known.get(id(param))
                if sharded is not None:
                    params.append(sharded)
                elif param.grad is not None:
                    raise GradientError(
                        "a param group has a parameter that the optimizer did not have at `wrap`",
                        expected="the parameters that the optimizer had at `wrap`",
                        found=f"a parameter of shape {tuple(param.shape)}",
                        cure="wrap the model with the optimizer that has all parameters",
                    )
        return self._gradients.present(params)

    def options(self) -> dict[ShardedParam, ParamUpdate]:
        """Return the options that the param groups set for each parameter, without its step and its factor.

        Raises:
            OptimizerTypeError: an option is not supported.
        """
        options = {}
        for index, group in enumerate(self.param_groups):  # users edit groups as the run goes
            self.rule.check(group, f"param group {index}")
            rule = self.rule.of(group)
            ours = [s for p in group["params"] if (s := self._known.get(id(p))) is not None]
            if [s for s in ours if s.spec.trainable and bool(s.spec.matrix) is not rule.whole]:
                raise OptimizerTypeError(
                    "a param group has changed use_muon after `wrap`, which laid out its state",
                    expected=f"use_muon={not rule.whole}, as at `wrap`",
                    found=f"use_muon={rule.whole} in param group {index}",
                    cure="restore it; or build the optimizer with other groups before `wrap`",
                )
            of_group = ParamUpdate(
                lr=float(group.get("lr", 0.0)),
                weight_decay=float(group.get("weight_decay", 0.0)),
                step=rule.advance(group),
                grad_scale=1.0,
                maximize=bool(group.get("maximize", False)),
                options=rule.options(group),
            )
            options.update(dict.fromkeys(ours, of_group))
        return options

    # -- state dicts ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's AdamW: exp_avg and exp_avg_sq in fp32 on the host, `step`
        as a float32 tensor. If the compute dtype is not fp32, it also holds ``master``, then also for
        parameters that were never updated. With delayed updates, if the next forward uses a value that is not
        the newest, it also holds ``front``, in the compute dtype: the values that the next forward uses, of
        all parameters. The key ``infinity`` holds values that torch's format has no place for: the number of
        steps, the number of skipped steps, and with fp16 the loss scale and the steps since it changed.

        Raises:
            BudgetError: the state dict does not fit the memory that `host_memory` leaves.
            DivergenceError: torch's `set_state_dict` calls it with ``broadcast_from_rank0=True``, and only
                some ranks have given it a state dict of the model.
            ParameterChangedError: the program edited a parameter in place while its update was delayed.
        """
        return self.commits.run(self._make_state_dict)

    def _make_state_dict(self) -> dict[str, Any]:
        self._lifecycle.finish()
        # What reads a distributed checkpoint reads what such a state dict names, and nothing else: one of an
        # optimizer that has made no step names all that a later one has.
        whole = is_for_checkpoint()
        if whole and (has_model := broadcast_has_model()) is not None:
            # Every rank comes here before the first broadcast of torch's.
            agree_on_broadcast(self._comm, has_model)
        self._states.check_room(always=whole)
        self._edits.check_unseen()
        self._edits.check_delayed()
        self._edits.adopt_all()
        try:
            kept = [s for s in self._params.values() if s.spec.trainable]
            two = {*self._states.fronts(always=whole)}
            kept = [s for s in kept if whole or s.step or s.spec.dtype is not torch.float32 or s in two]
            for sharded, values in self._states.read(kept, two).items():
                dict.__setitem__(self.state, sharded.param, values)
            state = super().state_dict()
        finally:
            dict.clear(self.state)
        return {**state, OURS: self.counts()}

    def _names(self, param: nn.Parameter) -> list[str]:
        """Return the names of what a state dict for a distributed checkpoint has of a parameter."""
        sharded = self._params.get(param)
        if sharded is None or not sharded.spec.trainable:
            return []
        two = self._residency.has_two_versions
        names = ["step", *self._states.kinds_of(sharded)]
        names += ["master"] if two or sharded.spec.dtype is not torch.float32 else []
        return names + (["front"] if two else [])

    def counts(self) -> dict[str, float]:
        """Return counts that torch's optimizers do not have: steps, skipped steps, and with fp16 the loss
        scale and the steps since it changed."""
        counts: dict[str, float] = {"steps": self.steps, "skipped_steps": self.skipped_steps}
        if self._fp16:
            counts.update(loss_scale=self.loss_scale, good_steps=self._good_steps)
        return counts

    def set_counts(self, counts: Mapping[str, float]) -> None:
        """Continue from `counts`; a count that it does not have stays."""
        self._steps = int(counts.get("steps", self._steps))
        self.skipped_steps = int(counts.get("skipped_steps", self.skipped_steps))
        if self._fp16 and "loss_scale" in counts:
            self._gradients.rescale(float(counts["loss_scale"]))
            self._good_steps = int(counts.get("good_steps", 0))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this optimizer, or of torch's AdamW or Adam over the same groups. If it has
        masters, the parameters get their values. If it has a ``front``, and this optimizer delays updates,
        the next forward uses the front: load the model's state dict, with the newest values, before. If it
        ends early (a drive that fails, an interrupt), the engine raises an error until a load succeeds.

        Raises:
            StateDictError: the groups or shapes do not fit; nothing has changed.
            ParameterError: a `gathered` block is open for parameters that would change.
        """
        with hooked(self, state_dict) as given:
            pairs = match(given, self.param_groups, self._params, self.rule)
            counts = counts_of(given)
            self._load(given, pairs, counts)

    @commit
    def _load(
        self,
        state_dict: Mapping[str, Any],
        pairs: Sequence[tuple[ShardedParam, Mapping[str, Any]]],
        counts: Mapping[str, float],
    ) -> None:
        values = {f"{s.name}: {kind}": v for s, of_one in pairs for kind, v in of_one.items()}
        agree_on_values(self._comm, "optimizer.load_state_dict", values)
        self.publish()
        self._edits.adopt_all()
        written = [s for s, of_one in pairs if any(of_one.get(kind) is not None for kind in _COPIED)]
        self._residency.reshard_all({s.unit for s in written})
        try:
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
                group.update({k: v for k, v in saved.items() if k != "params"})
            self._states.write(pairs, self.rule.steps)
        except BaseException:
            self._lifecycle.lose("a load_state_dict of the optimizer that raised, or was interrupted")
            raise
        self._residency.refresh()
        self.set_counts(counts)
        self._resumed = self._steps

    def check_not_resumed(self) -> None:
        """Raise `StateDictError` if a load of the model would drop the older version that a state dict of the
        optimizer has just brought. No update may be under way."""
        if self._resumed == self._steps and self._states.with_front():
            raise StateDictError(
                "with delayed updates, the optimizer has loaded the values that the next forward will use; "
                "this load would drop them",
                expected="model.load_state_dict(…) first, then optimizer.load_state_dict(…)",
                found="model.load_state_dict(…) after it, and no step between them",
                cure="load the model first; or, to start from the values that you load now, call "
                "`infinity.flush(optimizer)` before this load",
            )
