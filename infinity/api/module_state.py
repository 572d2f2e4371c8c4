"""The content of a module's state dict, without building one: names, shapes, and values on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from infinity.core.errors import ParameterError, StateDictError
from infinity.optim.whole import of_owners
from infinity.params.param import ShardedParam, sharded_of
from infinity.storage.shards import Shards
from infinity.storage.tensor_header import Spec

from .engine import Engine, engine_of


def state_of(module: nn.Module, *, recurse: bool = True) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module by name, each name of those that are tied, in
    the order of its state dict. Nothing is read."""
    found: dict[str, torch.Tensor] = {}
    for prefix, inner in module.named_modules(remove_duplicate=False) if recurse else [("", module)]:
        own = {n: b for n, b in inner._buffers.items() if n not in inner._non_persistent_buffers_set}
        for name, value in (*inner._parameters.items(), *own.items()):
            if value is not None:
                found[f"{prefix}.{name}" if prefix else name] = value
    return found


def engine_in(module: nn.Module) -> Engine | None:
    """Return the engine that has parameters of a module, if one has."""
    param = next((p for p in module.parameters() if sharded_of(p) is not None), None)
    return None if param is None else engine_of(param)


class ModuleValues:
    """The newest values of a module: parameters in `dtype`, or in the one that each has; buffers as they are.

    Args:
        module: may be wrapped, or a part of what is wrapped, or a plain one.

    Raises:
        ParameterError: it has parameters of several wrapped models.
        ClosedError: its engine is closed.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.engine = engine_in(module)
        if self.engine is not None:
            self.engine.phases.check()
            sharded = (p for p in module.parameters() if sharded_of(p) is not None)
            if not all(p in self.engine.params for p in sharded):
                raise ParameterError(
                    "the module has parameters of several wrapped models",
                    expected="a module with parameters of one wrapped model",
                    found="a module around two wrapped models",
                    cure="export each of them separately",
                )

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which writes what is not cut."""
        return self.engine is None or self.engine.comm.rank == 0

    def _sharded(self, value: torch.Tensor) -> ShardedParam | None:
        if self.engine is None or not isinstance(value, nn.Parameter):
            return None
        return self.engine.params.get(value)

    def spec(self, name: str, value: torch.Tensor) -> Spec:
        """Return dtype and shape with which a tensor of the module is written.

        Raises:
            StateDictError: it has no values, or none that lie side by side.
        """
        if value.is_meta or value.layout is not torch.strided:
            raise StateDictError(
                f"{name!r} cannot be written",
                expected="a dense tensor with values",
                found="one on the meta device" if value.is_meta else str(value.layout),
                cure="load its values first" if value.is_meta else "make it a dense one",
            )
        cast = isinstance(value, nn.Parameter) and value.is_floating_point() and self._dtype
        return cast or value.dtype, tuple(value.shape)

    def write(self, shards: Shards, sources: Mapping[str, torch.Tensor]) -> None:
        """Write tensors of the module, by name: parameters of an engine chunk by chunk, as they come. Each of
        several ranks writes what it has of them, and the first one all else."""
        names: dict[ShardedParam, list[str]] = {}
        for name, value in sources.items():
            if (sharded := self._sharded(value)) is None:
                if self.is_first:
                    shards.write(name, 0, value.detach())
            else:
                names.setdefault(sharded, []).append(name)
        for sharded, first, piece in self._pieces(names, own=True):
            for name in names[sharded]:
                shards.write(name, first, piece)

    def read(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return whole parameters, on the host. Collective."""
        found = {p: torch.empty(p.shape, dtype=self.spec("", p)[0]) for p in params}
        sharded = {s: p for p in found if (s := self._sharded(p)) is not None}
        for one, first, piece in self._pieces(sharded):
            found[sharded[one]].view(-1)[first : first + piece.numel()].copy_(piece)
        if self.engine is not None:
            of_owners(
                *(self.engine.comm, self.engine.units, "values"),
                {s: found[p].view(-1) for s, p in sharded.items()},
            )
        for param in found.keys() - set(sharded.values()):
            found[param].copy_(param.detach())
        return found

    def _pieces(
        self, params: Iterable[ShardedParam], *, own: bool = False
    ) -> Iterable[tuple[ShardedParam, int, torch.Tensor]]:
        """Yield (parameter, first element, flat values), piece by piece: those of the master where the copy
        is not in the dtype that is asked for."""
        if self.engine is None:
            return
        of: dict[str, list[ShardedParam]] = {"copy": [], "master": []}
        for sharded in params:
            exact = sharded.spec.trainable and self._dtype not in (None, sharded.spec.dtype)
            of["master" if exact else "copy"].append(sharded)
        for kind, chosen in of.items():
            for sharded, segment, pieces in self.engine.states.segments((kind,), chosen, own=own):
                yield sharded, segment.offset, pieces[kind]
