"""`wrap`, and what else a user calls on a wrapped model. Wiring only."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity.core.config import Config
from infinity.core.errors import ClosedError, WrapError
from infinity.core.sizes import GiB, Tier
from infinity.hardware import cpu_adam
from infinity.hardware.device import Device, open_device
from infinity.planning.footprint import Footprint, footprint
from infinity.planning.partition import ParamSpec, assign, partition, plan_chunks
from infinity.storage.pinned import PinnedPool
from infinity.storage.region import PinnedRegion
from infinity.storage.store import Store
from infinity.training.activations import Activations
from infinity.training.copies import Copies
from infinity.training.discover import Scope, UnitMembers, discover
from infinity.training.fetch import Fetcher
from infinity.training.gradients import Gradients
from infinity.training.hooks import Hooks
from infinity.training.optimizer import OffloadOptimizer, check_optimizer
from infinity.training.param import ShardedParam
from infinity.training.pending import Pending
from infinity.training.sharded_grad import ShardedGrad
from infinity.training.state import States
from infinity.training.unit import ParamUnit, Residency
from infinity.training.update import Updater
from infinity.training.visit import Places

from .checks import budget_of, check_model, chunk_specs, param_specs
from .init import release as release_scratch
from .state_dict import install

_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Everything that one wrapped model has. Made by `wrap`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
        decoupled = check_optimizer(optimizer)
        groups = check_model(model, optimizer)
        self.config = config
        self.model = weakref.ref(model)  # the model holds the engine, by its hooks
        device = open_device(config.device)
        if config.threads is not None:
            cpu_adam.set_threads(config.threads)

        members, scopes = discover(model, config.units)
        specs = param_specs(model, members, groups, config.compute_dtype)
        layouts = partition([(m.name, s) for m, s in zip(members, specs, strict=True)], config.chunk_elements)
        placements = config.placements
        assignment = assign(
            layouts, placements["parameters"], placements["optimizer_state"], placements["gradients"]
        )
        plans = plan_chunks(layouts, assignment, delayed=config.update == "delayed")
        self.budget = budget_of(config, device)
        self.footprint: Footprint = footprint(
            layouts, plans, [s.working_set for s in scopes], config, self.budget, staged=device.staged
        )
        with contextlib.ExitStack() as undo:
            pool = PinnedPool(
                {n: (q.slot_nbytes, q.slots) for n, q in self.footprint.quotas.items()},
                register=device.register if device.staged else None,
                unregister=device.unregister if device.staged else None,
            )
            undo.callback(pool.close)
            store = Store(
                chunk_specs(plans),
                directories=config.directories,
                pool=pool,
                backend=config.aio_backend,
                block_bytes=config.block_bytes,  # type: ignore[arg-type]
                queue_depth=config.queue_depth,
                deadline=config.io_deadline,
                register=device.register if device.staged else None,
                unregister=device.unregister if device.staged else None,
            )
            undo.callback(store.close)
            region = None
            if config.activations == "host":
                region = PinnedRegion(
                    self.footprint.activation_nbytes,
                    register=device.register if device.staged else None,
                    unregister=device.unregister if device.staged else None,
                )
                undo.callback(region.close)
            self._build(
                *(model, optimizer, members, specs, layouts, scopes, plans),
                *(store, pool, region, device, decoupled),
            )
            undo.pop_all()

    def _build(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        members: list[UnitMembers],
        specs: list[list[ParamSpec]],
        layouts: Any,
        scopes: list[Scope],
        plans: Any,
        store: Store,
        pool: PinnedPool,
        region: PinnedRegion | None,
        device: Device,
        decoupled: bool,
    ) -> None:
        self.device, self.store, self.pool = device, store, pool
        units = []
        self.params: dict[nn.Parameter, ShardedParam] = {}
        for layout, member, unit_specs in zip(layouts, members, specs, strict=True):
            sharded = [
                ShardedParam(p, spec, layout.index, i)
                for i, (p, spec) in enumerate(zip(member.params.values(), unit_specs, strict=True))
            ]
            self.params.update({s.param: s for s in sharded})
            resident = plans[layout.chunks[0].id].copy_tier is Tier.DEVICE
            units.append(ParamUnit(layout, sharded, device, resident=resident))
        self.units = units
        self.pending = Pending()
        self.fetcher = Fetcher(store, pool, device, plans, self.pending)
        capacity = self.footprint.working_nbytes + self.footprint.prefetch_nbytes
        # Gradients of a unit are freed and made again all the time: that much the heap may keep.
        device.slack = max(device.slack, 2 * max(u.layout.gradient_nbytes for u in units))
        self.copies = Copies(plans, store, device)
        self.residency = Residency(units, self.fetcher, capacity, device, self.pending, self.copies)
        quota = self.footprint.quotas.get("gradient")
        self.gradients = Gradients(
            units, plans, store, pool, device, slots=quota.slots if quota else 0, pending=self.pending
        )
        self.places = Places(units, plans, store, pool, device, self.gradients, self.copies)
        self.updater = Updater(self.places, self.pending, self.fetcher)
        self.states = States(self.places, self._room, self.quiesce)
        self.activations = (
            Activations(device, region, [u.storage for u in units]) if region is not None else None
        )
        self._take_over(model, optimizer)
        self.hooks = Hooks(
            model,
            scopes,
            self.residency,
            self.gradients,
            list(self.params.values()),
            compute_dtype=self.config.compute_dtype,
            output_dtype=self.config.output_dtype,  # type: ignore[arg-type]
            check=self.check,
            on_backward=self._read_ahead,
            activations=self.activations,
        )
        install(model, self)
        self._closed = False
        self.times = {"step": 0.0, "update": 0.0}
        self._last_step_end: float | None = None
        self.optimizer = OffloadOptimizer(
            optimizer,
            places=self.places,
            residency=self.residency,
            gradients=self.gradients,
            states=self.states,
            updater=self.updater,
            update=self.config.update,
            delay_warmup_steps=self.config.delay_warmup_steps,
            params=self.params,
            decoupled=decoupled,
            max_grad_norm=self.config.max_grad_norm,
            compute_dtype=self.config.compute_dtype,
            loss_scale=self.config.loss_scale,
            loss_scale_window=self.config.loss_scale_window,
            before_step=self._before_step,
            after_step=self._after_step,
        )
        self._finalizer = weakref.finalize(
            self,
            _shut_down,
            *(self.updater, self.fetcher, self.gradients, store, pool, device, self.activations),
        )

    def _take_over(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for unit in self.units:
            old = [p.param for p in unit.params]
            moments: dict[int, Mapping[str, Any]] = {}
            for sharded in unit.params:
                saved = optimizer.state.get(sharded.param)
                if saved and sharded.spec.trainable:
                    sharded.step = int(saved["step"])
                    moments[sharded.index] = saved
            data = [p.data for p in old]
            self.states.take_over(unit, moments)
            for param in old:
                param.grad = None
                optimizer.state.pop(param, None)
            for tensor in data:
                release_scratch(tensor)
            del data
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device.torch_device)

    def _room(self) -> int:
        return max(0, self.budget.host - self.footprint.total(Tier.HOST))

    def check(self) -> None:
        """Raise what failed in the background, or that the engine is closed."""
        if self._closed:
            raise ClosedError(
                "the engine of this model is closed",
                expected="an open engine",
                found="close() was called",
                cure="wrap the model again",
            )
        self.pending.check()
        self.store.check()

    def quiesce(self) -> None:
        """Wait until every update is complete and nothing of the state is on its way."""
        self.updater.wait()
        self.updater.drop_ahead()
        self.residency.resume_all()

    def _read_ahead(self) -> None:
        """A backward begins: an update may follow, of the first units first."""
        if not self.pending.busy():
            units = self.residency.forward_order()
            self.updater.read_ahead(c for u in units for c in u.layout.trainable_chunks)

    def _before_step(self) -> None:
        self.check()
        self.hooks.settle()
        self.updater.wait()
        self.residency.resume_all()

    def _after_step(self, seconds: float) -> None:
        if self.activations is not None:
            self.activations.after_step()
        now = time.perf_counter()
        if self._last_step_end is not None:
            self.times["step"] = now - self._last_step_end
        self.times["update"] = seconds
        self._last_step_end = now

    def close(self) -> None:
        """Finish transfers, end the threads, remove what is on NVMe. The parameters stay released.

        Raises:
            StorageError: what is on NVMe could not be finished or removed; or an update behind the
                last step failed, and no call since has said so.
        """
        if not self._closed:
            try:
                if self.copies.two and not self.pending.failed:
                    self.states.check_edits()
                    self.optimizer.flush()  # what is on the device is the newest then
                    self.residency.resume_all()
            finally:
                self._closed = True
                self._finalizer()
            self.pending.check_once()


def _shut_down(
    updater: Updater,
    fetcher: Fetcher,
    gradients: Gradients,
    store: Store,
    pool: PinnedPool,
    device: Device,
    activations: Activations | None,
) -> None:
    with contextlib.ExitStack() as stack:  # the last pushed goes first; each goes, whatever fails
        stack.callback(pool.close)
        stack.callback(store.close)
        stack.callback(device.close)
        if activations is not None:
            stack.callback(activations.close)
        stack.callback(gradients.close)
        stack.callback(fetcher.close)
        stack.callback(updater.close)


# -- what a user calls ----------------------------------------------------------------------


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config
) -> tuple[nn.Module, OffloadOptimizer]:
    """Take over a model's parameters and its optimizer's state; return both.

    The model is the same object, with hooks. The optimizer is a `torch.optim.Optimizer` that
    shares the param groups of the one passed in. From here on parameters are on the device only
    while they are used; read or edit them inside `gathered`.

    Args:
        model: any `nn.Module` with dense floating-point parameters.
        optimizer: `torch.optim.AdamW` or `torch.optim.Adam` over its trainable parameters.
        config: budgets and placements.

    Raises:
        WrapError: the model or the optimizer cannot be taken over.
        BudgetError: the run does not fit; nothing has been touched.
        DirectoryError: an NVMe directory cannot be used; nothing has been touched.
    """
    if not isinstance(config, Config):
        raise WrapError(
            "wrap takes a Config",
            expected="infinity.Config(...)",
            found=type(config).__name__,
            cure="wrap(model, optimizer, infinity.Config(...))",
        )
    engine = Engine(model, optimizer, config)
    _ENGINES.add(engine)
    return model, engine.optimizer


def engine_of(thing: object) -> Engine:
    """Return the engine of a wrapped model, its optimizer, or one of its parameters.

    Raises:
        WrapError: it belongs to no wrapped model.
    """
    for engine in _ENGINES:
        if (
            thing is engine.model()
            or thing is engine.optimizer
            or (isinstance(thing, nn.Parameter) and thing in engine.params)
        ):
            return engine
    raise WrapError(
        "this belongs to no wrapped model",
        expected="a model, optimizer or parameter of `infinity.wrap`",
        found=type(thing).__name__,
        cure="wrap the model first",
    )


@contextlib.contextmanager
def gathered(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False
) -> Iterator[None]:
    """Have the values of `params` on the device inside the block.

    Args:
        params: parameters, or a module for all of its parameters. The units that they are in
            are gathered whole.
        write: whether in-place edits are to be kept (also in the fp32 master).

    Raises:
        ParameterChangedError: they were edited without ``write=True``.
    """
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    elif isinstance(params, nn.Parameter):
        params = [params]
    params = list(params)
    if not params:
        yield
        return
    engine = engine_of(params[0])
    engine.check()
    engine.gradients.wait()
    indices = sorted({engine.params[p].unit for p in params})
    owner = object()
    if write and engine.copies.two:
        engine.optimizer.flush()  # an edit is of the newest, and what comes after it sees it
    engine.residency.acquire(indices, owner, note=False, keep=True, newest=True)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.residency.release, indices, owner)
        if write:
            for index in indices:
                stack.enter_context(engine.states.editing(engine.units[index]))
        yield


def gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient of a parameter: fp32, on the host, unscaled; None if it has none."""
    engine = engine_of(param)
    engine.check()
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, ShardedGrad):
        return grad.detach().float().cpu()
    return engine.gradients.whole(engine.params[param]).div_(engine.optimizer.loss_scale)


def metrics(optimizer: OffloadOptimizer) -> dict[str, float]:
    """Return figures of the last step and of memory, under torchtitan's key names where it has
    them: sizes in GiB, times in seconds."""
    engine = engine_of(optimizer)
    stats = engine.store.stats()
    pool = engine.pool.stats()
    activations = engine.activations
    values = {
        "grad_norm": optimizer.grad_norm if optimizer.grad_norm is not None else float("nan"),
        "loss_scale": optimizer.loss_scale,
        "steps": float(optimizer.steps),
        "skipped_steps": float(optimizer.skipped_steps),
        "time_metrics/end_to_end(s)": engine.times["step"],
        "time_metrics/update(s)": engine.times["update"],
        "memory/device(GiB)": (engine.footprint.total(Tier.DEVICE)) / GiB,
        "memory/device_units_peak(GiB)": engine.residency.peak / GiB,
        "memory/host(GiB)": engine.footprint.total(Tier.HOST) / GiB,
        "memory/host_leases_peak(GiB)": sum(q.peak for q in pool.values()) / GiB,
        "memory/nvme(GiB)": engine.footprint.total(Tier.NVME) / GiB,
        "nvme/read(GiB)": sum(s.bytes_read for s in stats) / GiB,
        "nvme/written(TB)": sum(s.bytes_written for s in stats) / 1e12,
        "delayed/drift": engine.updater.drift.value,
        "fetch/units": float(engine.residency.fetches),
        "fetch/hits": float(engine.residency.hits),
        "activations/host(GiB)": activations.peak / GiB if activations is not None else 0.0,
        "activations/kept": float(activations.kept) if activations is not None else 0.0,
    }
    return values


def flush(thing: object) -> None:
    """Wait for every update of a model or optimizer. With ``update="delayed"`` the next forward uses
    the newest parameters then, as it does at the end of the warm-up.

    Raises:
        ParameterError: that would change parameters inside a `gathered` block.
        StorageError: an update failed.
    """
    engine_of(thing).optimizer.flush()


def close(thing: object) -> None:
    """Close the engine of a model or optimizer: finish, end its threads, remove its arenas."""
    engine_of(thing).close()
