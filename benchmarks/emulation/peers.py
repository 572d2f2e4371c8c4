"""Other schedules on the same machine, with almost no Python: torch with all in the GPU's memory, and three
ways to offload, idealised. A call of `step` ends where the peer's own `step()` would return.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import nn

from .machine import Event, Machine, Stream, current_stream, stream
from .models import Llama
from .tracing import Waits

#: Bytes of the CPU's memory that an update moves for each parameter: fp32 master and moments, bf16 gradient
#: and copy.
ADAM: Final = 28
#: Of it, what makes the bf16 copy alone (reads 14, writes 2), and what makes the state afterwards (reads 14,
#: writes 12).
PUBLISH: Final = 16
COMMIT: Final = 26
#: Elements of the real model whose update comes before their copy begins.
_TILE: Final = 1 << 26


class Plain:
    """torch with parameters, gradients and state on the GPU, and a fused AdamW there."""

    def __init__(self, model: Llama, machine: Machine) -> None:
        self.machine, self.waits = machine, Waits()
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    here = torch.empty(parameter.shape, dtype=parameter.dtype, device=machine.device)
                    module._parameters[name] = nn.Parameter(here)
        self.units = [list(unit.parameters()) for unit in model.units()]
        self.parameters = list(itertools.chain.from_iterable(self.units))
        self.numel = sum(p.numel() for p in self.parameters)

    def step(self) -> None:
        """Update all parameters."""
        nbytes = self.numel * self.machine.scale * ADAM
        # A launch of a fused update has some hundred tensors at most; so many launches cost no time.
        torch.ops.emulated.kernels(len(self.parameters) // 64 + 1, nbytes / self.machine.rates.hbm)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def flush(self) -> None:
        """Wait for what runs behind the program's back."""

    def close(self) -> None:
        """End it."""


class ZeroOffload(Plain):
    """ZeRO-Offload: gradients go to the host in the backward. `step` updates on the CPU, tile by tile; the
    copy of each tile to the GPU runs beside the update of the next."""

    def __init__(self, model: Llama, machine: Machine) -> None:
        super().__init__(model, machine)
        self.down, self.up = Stream(), Stream()
        self.host = {p: torch.empty(p.numel(), dtype=torch.bfloat16) for p in self.parameters}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.send)

    def send(self, parameter: nn.Parameter) -> None:
        """Copy a gradient to the host, and drop it."""
        assert parameter.grad is not None
        self.down.wait_event(current_stream().record_event())
        with stream(self.down):
            self.host[parameter].copy_(parameter.grad.view(-1), non_blocking=True)
        parameter.grad = None

    def step(self) -> None:
        with self.waits.of("gradients on their way"):
            self.down.synchronize()
        most = max(1, _TILE // self.machine.scale)
        source = torch.empty(most, dtype=torch.bfloat16)
        target = torch.empty(most, dtype=torch.bfloat16, device=self.machine.device)
        for begin in range(0, self.numel, most):
            count = min(most, self.numel - begin)
            with self.waits.of("the update"):
                self.machine.dram(count * ADAM)
            with stream(self.up):
                target[:count].copy_(source[:count], non_blocking=True)
        with self.waits.of("copies to the GPU"):
            self.up.synchronize()


class FSDP2(ZeroOffload):
    """FSDP2 with CPU offload on one GPU: parameters come from the host for each block, in forward and in
    backward, one block ahead. `step` updates on the CPU when all gradients are there."""

    def __init__(self, model: Llama, machine: Machine) -> None:
        super().__init__(model, machine)
        self._loaded: dict[int, Event] = {}
        # The norm before the head comes with the head, whose forward is next.
        self._modules: Sequence[nn.Module] = [model.embedding, *model.layers, model.head]
        for index, module in enumerate(self._modules):
            module.register_forward_pre_hook(partial(self._forward, index))
            module.register_full_backward_pre_hook(partial(self._backward, index))

    def _load(self, index: int) -> None:
        if not 0 <= index < len(self._modules) or index in self._loaded:
            return
        with stream(self.up):
            for parameter in self.units[index]:
                there = torch.empty(parameter.numel(), dtype=torch.bfloat16, device=self.machine.device)
                there.copy_(self.host[parameter], non_blocking=True)
        self._loaded[index] = self.up.record_event()

    def _use(self, index: int, then: int) -> None:
        self._load(index)
        current_stream().wait_event(self._loaded.pop(index))
        self._load(index + then)

    def _forward(self, index: int, *_: object) -> None:
        if torch._C._current_graph_task_id() == -1:  # in a backward it is there
            self._use(index, 1)

    def _backward(self, index: int, *_: object) -> None:
        self._use(index, -1)

    def step(self) -> None:
        self._loaded.clear()
        with self.waits.of("gradients on their way"):
            self.down.synchronize()
        for parameter in self.parameters:
            with self.waits.of("the update"):
                self.machine.dram(parameter.numel() * ADAM)


class Reflow(ZeroOffload):
    """DeepSpeed's Reflow: as a unit's gradients land in the backward, a worker publishes its new bf16 copy.
    That goes to the GPU at once: it overwrites what the backward needs no more. The worker commits the state
    behind the next forward, and before it publishes the unit again. If the step turns out to be clipped,
    `step` publishes all again.
    """

    def __init__(self, model: Llama, machine: Machine, *, clipped: bool) -> None:
        super().__init__(model, machine)
        self._clipped = clipped
        self._unit = {p: index for index, unit in enumerate(self.units) for p in unit}
        self._sizes = [sum(p.numel() for p in unit) for unit in self.units]
        self._sources = [torch.empty(size, dtype=torch.bfloat16) for size in self._sizes]
        self._targets = [s.to(machine.device) for s in self._sources]
        self._arriving = [len(unit) for unit in self.units]  # gradients that have not arrived
        self._changed = threading.Condition()  # guards the next
        self._landed: deque[tuple[int, Event]] = deque()  # units, and when their gradients are on the host
        self._uncommitted: set[int] = set()
        self._published = 0
        self._working = self._ended = False
        threading.Thread(target=self._work, name="reflow", daemon=True).start()

    def send(self, parameter: nn.Parameter) -> None:
        super().send(parameter)
        index = self._unit[parameter]
        self._arriving[index] -= 1
        if self._arriving[index] == 0:
            self._arriving[index] = len(self.units[index])
            with self._changed:
                self._landed.append((index, self.down.record_event()))
                self._changed.notify_all()

    def _work(self) -> None:
        """Publish units as they land. While none has, commit: first what lands first."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._landed or self._uncommitted)
                if self._ended:
                    return
                landed = self._landed and (self._landed[0][1].query() or not self._uncommitted)
                index, event = self._landed.popleft() if landed else (max(self._uncommitted), None)
                is_old = index in self._uncommitted
                self._uncommitted.discard(index)
                self._working = True
            if is_old:
                self.machine.dram(self._sizes[index] * COMMIT)
            if event is not None:
                event.synchronize()
                self._publish(index)
            with self._changed:
                self._published += event is not None
                self._working = False
                self._changed.notify_all()

    def _publish(self, index: int) -> None:
        self.machine.dram(self._sizes[index] * PUBLISH)
        with stream(self.up):
            self._targets[index].copy_(self._sources[index], non_blocking=True)

    def step(self) -> None:
        with self.waits.of("gradients on their way"):
            self.down.synchronize()
        with self.waits.of("the update"):
            with self._changed:
                self._changed.wait_for(lambda: self._published == len(self.units))
                self._published = 0
            if self._clipped:  # the worker has nothing to do
                for index in range(len(self.units)):
                    self._publish(index)
        with self.waits.of("copies to the GPU"):
            self.up.synchronize()
        with self._changed:
            self._uncommitted.update(range(len(self.units)))
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._landed or self._uncommitted or self._working))

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
