"""The engine of one wrapped model: all of its parts, and how they are connected. Wiring only."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from infinity.autograd import saved
from infinity.autograd.activations import Activations
from infinity.autograd.hooks import Hooks
from infinity.autograd.phases import CLOSED, UNWRAPPED, Phases
from infinity.core.commits import Commits
from infinity.core.config import Config
from infinity.core.errors import BudgetError, DirectoryError, OutOfMemoryError, StorageError, WrapError
from infinity.core.sizes import Tier
from infinity.core.spans import Recorder
from infinity.grads.gradient_chunks import ChunkGradients
from infinity.grads.gradients import Gradients
from infinity.grads.rank_gradients import RankGradients
from infinity.hardware import cpu_adam
from infinity.hardware.aio import RingSettings
from infinity.hardware.comm import connect
from infinity.hardware.cores import node_for
from infinity.hardware.device import Device, open_device
from infinity.hardware.ranks import PATIENCE, Alone, Comm
from infinity.optim import misuse
from infinity.optim.backward_update import Parts
from infinity.optim.blocks import Blocks
from infinity.optim.chunk_io import Tiers
from infinity.optim.edits import Edits
from infinity.optim.optimizer import OffloadOptimizer
from infinity.optim.rules import Rule, matrices_of, rule_of
from infinity.optim.state_io import States
from infinity.optim.update import Updater
from infinity.params.cache import Cache
from infinity.params.discover import Scope, UnitMembers, discover, param_specs
from infinity.params.load import Loader
from infinity.params.param import ShardedParam
from infinity.params.publish import Publisher
from infinity.params.residency import Residency
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates
from infinity.params.uses import Uses
from infinity.planning.footprint import LEAST_BUFFERS, Footprint, demand, within
from infinity.planning.partition import ParamSpec, partition
from infinity.planning.parts import alignment_of, is_made_once, moments_of, plan_chunks
from infinity.planning.placement import assign
from infinity.storage.heap import PinnedHeap
from infinity.storage.in_place import find_places
from infinity.storage.interrupt import GRACE, interrupted
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Store
from infinity.storage.weights import Weights

from .checks import check_model
from .closing import Reaper, wait_for_dropped
from .no_sync import NoSync
from .ranks import check_matrices, check_ranks, check_same, check_split, check_stage
from .refusal import add_cure
from .state_dict import install
from .take_over import give_memory, take_over
from .this_machine import budget_here, threads_of

_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
_NUMBERS = itertools.count()  # in the order in which they are made: the same on all ranks


class Engine:
    """Everything that one wrapped model has. Made by `wrap`, and by `inference`, without an optimizer: then
    every parameter is frozen. `weights`: where the values are, if not in the parameters; `kept`: names of
    parameters that stay fp32; `frozen`: what is trainable again when the model is plain."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        weights: Weights | None = None,
        kept: Collection[str] = (),
        mesh: object = None,
        *,
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        rule = None if optimizer is None else rule_of(optimizer)
        self.config = config
        self.number = next(_NUMBERS)
        self._kept = contextlib.ExitStack()  # closed when all else is
        self.params: dict[nn.Parameter, ShardedParam] = {}
        self.matrix_owners: Comm = Alone()
        self._frozen = frozen
        self.model = weakref.ref(model)  # the model holds the engine, by its hooks
        self.recorder = Recorder()
        wait_for_dropped()
        device = open_device(config.device, self.recorder)
        reach = functools.partial(
            connect,
            mesh,
            timeout=config.rank_timeout,
            patience=PATIENCE,
        )
        comm = reach(device=device.torch_device)
        try:
            groups = check_model(model, optimizer, first=comm.rank == 0)
            give_memory(model)
            self._make(model, optimizer, device, comm, groups, rule, weights, kept, reach)
        except BaseException as error:
            for each in (comm, self.matrix_owners):
                each.post(error)
                each.close()
            for sharded in self.params.values():
                sharded.forget()
            raise
        self._kept.callback(self.matrix_owners.close)

    def _make(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: Device,
        comm: Comm,
        groups: Any,
        rule: Rule | None,
        weights: Weights | None,
        kept: Collection[str],
        reach: Callable[..., Comm],
    ) -> None:
        config = self.config = self.config.for_rank(comm.rank, comm.local_rank)
        if comm.world > 1:
            check_ranks(comm.world, config, trains=optimizer is not None)
            check_stage(comm.world, config)
        cpu_adam.set_threads(threads_of(config, staged=device.staged))
        node = node_for(device.torch_device, config.directories)

        members, scopes = discover(model, config.units)
        matrices = matrices_of(optimizer, rule)
        fp32 = config.fp32_moments if optimizer is not None else ()
        specs = param_specs(model, members, groups, config.compute_dtype, kept, matrices, fp32)
        if matrices:
            check_matrices(config)
        check_split(specs, config)
        units = [(m.name, s) for m, s in zip(members, specs, strict=True)]
        if comm.world > 1:
            check_same(comm, units, model.named_buffers(remove_duplicate=False), config)
        if matrices and comm.world > 1 and config.zero_stage > 0:
            self.matrix_owners = reach(device=torch.device("cpu"), apart=True)  # [Note: whole at its owner]
            self.matrix_owners.be_punctual()
        self.budget = budget_here(config, device, comm)
        sets = [s.working_set for s in scopes]
        whole, aligned, placements = config.zero_stage == 0, alignment_of(config), config.placements
        moments = moments_of(rule.moments if rule is not None else (), config)
        sizes = config.chunk_sizes(staged=device.staged)
        for size in sizes:
            layouts = partition(
                units, size, rank=comm.rank, world=comm.world, replicated=whole, alignment=aligned
            )
            assignment = assign(
                layouts, placements["parameters"], placements["optimizer_state"], placements["gradients"]
            )
            files = None
            if weights is not None:
                files = find_places([u for u in layouts if assignment.copies[u.index] is Tier.NVME], weights)
            plans = plan_chunks(
                layouts,
                assignment,
                moments,
                staged=device.staged,
                delayed=config.update == "delayed",
                split=config.split_master,
                once=is_made_once(config, comm.world),
                places=files.places if files is not None else None,
            )
            wanted = demand(layouts, plans, sets, config, staged=device.staged)
            if size == sizes[-1] or wanted.leaves_room(self.budget):
                break
        try:
            self.footprint: Footprint = within(wanted, config, self.budget, staged=device.staged)
        except BudgetError as error:
            if comm.world == 1:
                add_cure(error, units, sets, moments, config, device)
            raise
        pins = device if device.staged else None
        with contextlib.ExitStack() as undo:
            pool = PinnedPool(
                {n: (q.buffer_nbytes, q.buffers) for n, q in self.footprint.quotas.items()},
                pins=pins,
                node=node,
                keep=LEAST_BUFFERS,
            )
            undo.callback(pool.close)
            make_store = functools.partial(
                Store,
                [plan.parts for plan in plans],
                directories=config.directories,
                pool=pool,
                rings=RingSettings(
                    config.aio_backend,
                    config.block_bytes,  # type: ignore[arg-type]
                    config.queue_depth,
                ),
                pins=pins,
                recorder=self.recorder,
                node=node,
                files=files,
            )
            try:
                store = make_store()
            except DirectoryError as error:
                if comm.world == 1:
                    add_cure(error, units, sets, moments, config, device)
                raise
            undo.callback(store.close)
            self.commits = Commits(staged=device.staged, carry=device.carry)
            undo.callback(self.commits.close)
            heap = None
            if config.activations == "host":
                heap = PinnedHeap(self.footprint.activation_nbytes, pins=pins, node=node)
                undo.callback(heap.close)
            undo.callback(device.close)  # first: copies under way use that memory
            self._build(
                *(model, optimizer, members, specs, layouts, scopes, plans),
                *(store, pool, heap, device, comm, rule, weights),
            )
            undo.pop_all()

    def _build(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        members: list[UnitMembers],
        specs: list[list[ParamSpec]],
        layouts: Any,
        scopes: list[Scope],
        plans: Any,
        store: Store,
        pool: PinnedPool,
        heap: PinnedHeap | None,
        device: Device,
        comm: Comm,
        rule: Rule | None,
        weights: Weights | None,
    ) -> None:
        self.device, self.store, self.pool, self.comm = device, store, pool, comm
        owners = Alone() if self.config.zero_stage == 0 else comm  # of units: each rank has the whole
        stage = self.config.zero_stage if owners.world > 1 else 0
        units, uses = [], Uses(len(layouts))
        for layout, member, unit_specs in zip(layouts, members, specs, strict=True):
            sharded = [
                ShardedParam(p, spec, layout.index, i)
                for i, (p, spec) in enumerate(zip(member.params.values(), unit_specs, strict=True))
            ]
            self.params.update({s.param: s for s in sharded})
            placed = plans[layout.chunks[0].id].copy_tier is Tier.DEVICE
            units.append(
                ParamUnit(
                    *(layout, sharded, device, owners, uses),
                    placed=placed,
                    stage=stage,
                    trains=optimizer is not None,
                )
            )
        self.units = units
        self.updates = Updates(self.recorder, self.config.accumulation)
        self.loader = Loader(store, pool, device, plans, self.updates)
        capacity = self.footprint.working_nbytes + self.footprint.prefetch_nbytes
        publisher = Publisher(store, device)
        cache = Cache(units, uses, self.loader, capacity, device, self.updates, publisher, self.recorder)
        self.residency = Residency(
            *(units, uses, cache, device, self.updates, publisher, self.recorder, self.commits),
            stage=stage,
        )
        room = max(0, self.budget.host - self.footprint.total(Tier.HOST))
        waits = comm.world > 1 and stage < 2
        chunks = ChunkGradients(
            *(units, plans, store, pool, device, self.updates, self.recorder), comes_and_goes=waits
        )
        of_ranks = functools.partial(RankGradients, waits=waits)
        self.gradients: Gradients = (of_ranks if comm.world > 1 else Gradients)(
            *(units, chunks, comm, self.updates, self.commits),
            room=self.footprint.gradients_nbytes,
            spare=room,
            once=is_made_once(self.config, comm.world),
            scale=self.config.loss_scale if self.config.compute_dtype is torch.float16 else 1.0,
        )
        self.tiers = Tiers(units, plans, store, pool, device, self.gradients, publisher)
        self.updater = Updater(self.tiers, self.updates, self.loader, self.recorder, self.matrix_owners)
        self.states = States(self.tiers, self.updater, self.residency, comm, room, self.commits)
        self.edits = Edits(self.tiers, self.states, comm, self.commits)
        self.activations = (
            Activations(device, heap, [u.storage for u in units], self.commits) if heap is not None else None
        )
        state = optimizer.state if optimizer is not None else {}
        take_over(model, state, rule, units, self.states, device, comm, weights)
        stay = sum(u.layout.gathered_nbytes for u in units if u.on_device)
        # Gradients of a unit are freed and made again all the time: that much the heap may keep.
        heap_nbytes = 2 * max(u.layout.gradient_nbytes for u in units)
        device.reuse(capacity + stay, self.footprint.gradients_nbytes, heap_nbytes)
        parts = Parts(
            *(self.tiers, self.residency, self.gradients, comm, self.states, self.edits),
            *(self.updates, self.updater),
        )
        trains = optimizer is not None
        self.phases = Phases(self, parts, self.recorder, self.activations, trains=trains)
        self.hooks = Hooks(
            model,
            scopes,
            self.phases,
            self.residency,
            self.gradients,
            list(self.params.values()),
            compute_dtype=self.config.compute_dtype,
            activations=self.activations,
        )
        self._handles: list[Any] = [*install(model, self)]
        if comm.world > 1:
            self._handles.append(NoSync(model, self.gradients, self.config.zero_stage))
        self._unguard = misuse.guard(model, optimizer, ranks=comm.world > 1)
        self._shut = False
        self._optimizer: OffloadOptimizer | None = None
        if optimizer is not None and rule is not None:
            self._optimizer = OffloadOptimizer(
                optimizer, parts, self.config, self.params, rule=rule, lifecycle=self.phases
            )
            self.phases.attach(self._optimizer.backward_update)
        token, blocks = self.phases.token, self.phases.blocks
        ends = functools.partial(
            _shut_down,
            *(token, blocks, self.updater, self.loader, self.gradients, store, pool, device),
            *(comm, self.activations, self._kept, self.hooks.keys),
        )
        self._reaper = Reaper(self, ends, sum(unit.layout.gathered_nbytes for unit in self.units))
        _ENGINES.add(self)

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def check_trains(self) -> None:
        """Raise `ParameterError` if the model is for inference."""
        if self._optimizer is None:
            raise misuse.not_for_training("a call that needs its optimizer")

    @property
    def optimizer(self) -> OffloadOptimizer:
        """The optimizer. Raises as `check_trains`."""
        self.check_trains()
        assert self._optimizer is not None
        return self._optimizer

    def publish(self) -> None:
        """Make the newest values visible everywhere: see `OffloadOptimizer.publish`."""
        if self._optimizer is not None:
            self._optimizer.publish()
        else:
            self.phases.finish()

    def check_not_resumed(self) -> None:
        """Raise `StateDictError` if a load of the model after its optimizer would lose values."""
        if self._optimizer is not None:
            self.phases.finish()
            self._optimizer.check_not_resumed()

    def keep(self, stack: contextlib.ExitStack) -> None:
        """Close `stack` when all else is closed."""
        self._kept.push(stack)

    def let_go(self) -> None:
        """Remove all hooks from the model and its old optimizer; from here on it is a plain model."""
        self.phases.close(UNWRAPPED)
        self.hooks.remove()
        for handle in self._handles:
            handle.remove()
        self._unguard()
        for param in self._frozen:
            param.requires_grad_()
        _ENGINES.discard(self)

    def close(self) -> None:
        """Finish transfers, end the threads, remove what is on NVMe. The parameters stay released.

        Waits for the update of the last step as long as the drives' deadline allows. While a
        KeyboardInterrupt propagates (in a ``finally``) the drives have half a second; then `close` gives
        outstanding transfers up.

        Raises:
            StorageError: a transfer did not finish, or a file was not removed; or the update of the last step
                failed, and no call since has raised it. The error names the units that were not updated.
            OutOfMemoryError: this update ran out of memory, also if an earlier call has raised this.
        """
        if self._shut:
            return
        hurry = interrupted()
        try:
            try:
                if hurry:
                    self.store.give_up(GRACE)
                elif not self.updates.failed and self.phases.usable and self.residency.has_two_versions:
                    self.publish()  # what is on the device is the newest then
                    self.residency.resume_all()
            finally:
                self.phases.close(CLOSED)
                self._shut = True
                self._reaper.close()
                self.tiers.drop_memory()
                self.commits.close()
            if not hurry:
                self.updates.check_once()
        except (StorageError, OutOfMemoryError) as error:
            names = [self.units[index].layout.name for index in self.updates.units]
            if names:
                error.found = f"{error.found}; never updated: {', '.join(names)}"
            raise


def _shut_down(
    token: saved.Forwards,
    blocks: Blocks,
    updater: Updater,
    loader: Loader,
    gradients: Gradients,
    store: Store,
    pool: PinnedPool,
    device: Device,
    comm: Comm,
    activations: Activations | None,
    kept: contextlib.ExitStack,
    keys: list[int],
) -> None:
    token.end()
    blocks.close()
    for key in keys:
        saved.unregister(key)

    def hurry(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            store.give_up(GRACE)  # a user who interrupts the wait wants no more of it

    with contextlib.ExitStack() as stack:  # the last pushed goes first; each goes, whatever fails
        stack.callback(kept.close)
        stack.callback(comm.close)
        stack.callback(pool.close)
        stack.callback(store.close)
        stack.callback(device.close)  # after it no copy reads what the ones above unpin
        if activations is not None:
            stack.callback(activations.close)
        for close in (gradients.close, loader.close, updater.close):
            stack.push(hurry)
            stack.callback(close)


def model_of(thing: Any) -> Any:
    """Return the model of an optimizer of `wrap`; anything else as it is."""
    return engine_of(thing).model() if isinstance(thing, torch.optim.Optimizer) else thing


def engine_of(thing: object) -> Engine:
    """Return the engine of a wrapped model, its optimizer, or one of its parameters.

    Raises:
        WrapError: it belongs to no wrapped model.
    """
    inner = getattr(thing, "optimizer", None)  # accelerate gives its users one around ours
    for engine in tuple(_ENGINES):
        if (
            thing is engine.model()
            or (engine.trains and (thing is engine.optimizer or inner is engine.optimizer))
            or (isinstance(thing, nn.Parameter) and thing in engine.params)
        ):
            return engine
    raise WrapError(
        "this belongs to no wrapped model",
        expected="a model, optimizer or parameter of `infinity.wrap`",
        found=type(thing).__name__,
        cure="wrap the model first",
    )
