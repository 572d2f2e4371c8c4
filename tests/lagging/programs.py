"""What users do with a model on a device: each program trains it, and returns tensors on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.errors import ParameterError, ReleasedParameterError

from .cuda import world

#: What a program is given.
Batch = tuple[torch.Tensor, torch.Tensor]


class Loop:
    """A model under training. `device` is where its inputs go."""

    def __init__(self, model: Any, optimizer: Any, device: str) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.losses: list[torch.Tensor] = []

    def batch(self) -> Batch:
        return torch.randn(512, 64).to(self.device), torch.randint(0, 8, (512,)).to(self.device)

    def loss(self, batch: Batch, model: Any = None) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy((model or self.model)(x).float(), y)

    def backward(self) -> None:
        loss = self.loss(self.batch())
        scaled = self.optimizer.scale(loss) if hasattr(self.optimizer, "loss_scale") else loss
        scaled.backward()
        self.losses.append(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.losses.append(self.loss(self.batch(), self.model.eval()))
        self.model.train()


def accumulate(loop: Loop) -> None:
    """Two backwards a step, and an edit, with what sees it."""
    for step in range(4):
        loop.backward()
        loop.backward()
        loop.optimizer.step()
        if step == 2:
            with infinity.gathered(loop.model.head.bias, write=True), torch.no_grad():
                loop.model.head.bias.add_(0.125)
        loop.optimizer.zero_grad()


def streams(loop: Loop) -> None:
    """Training and evaluation on a stream of the user's, and evaluation on the default one at once: neither
    waits for what the other does with parameters."""
    default = torch.cuda.current_stream() if loop.device != "cpu" else None
    own = torch.cuda.Stream() if default is not None else None
    for _ in range(4):
        batches = [loop.batch() for _ in range(4)]
        if own is not None:
            own.wait_stream(default)
        with _on(own):
            for batch in batches[:2]:
                loss = loop.loss(batch)
                loss.backward()
                loop.losses.append(loss.detach())
            loop.step()
        for batch in batches[2:]:
            for stream in (own, default):
                with _on(stream), torch.no_grad():
                    loop.losses.append(loop.loss(batch))
        x = batches[0][0].to(loop.model.head.weight.dtype)
        if own is not None:
            own.wait_stream(default)
        for (
            block
        ) in loop.model.blocks:  # one loads it, the other uses it, and the first has another in its place
            for stream in (own, default):
                with _on(stream), torch.no_grad():
                    loop.losses.append(block(x))
    if default is not None:
        default.wait_stream(own)


def _on(stream: Any) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def within(loop: Loop) -> None:
    """One unit's parts on two streams, and so its gradients in one backward."""
    own = torch.cuda.Stream() if loop.device != "cpu" else None
    for block in loop.model.blocks:
        forward = block.down.forward

        def beside(x: torch.Tensor, forward: Callable[..., Any] = forward) -> Any:
            default = torch.cuda.current_stream() if own is not None else None
            if own is not None:
                own.wait_stream(default)
            with _on(own):
                y = forward(x)
            if default is not None:
                default.wait_stream(own)
            return y

        block.down.forward = beside
    accumulate(loop)
    loop.backward()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    loop.step()


def beside(loop: Loop) -> None:
    """Every third layer is recomputed, and its input saved, on another stream than made that input."""
    model, own = loop.model, torch.cuda.Stream() if loop.device != "cpu" else None

    def forward(x: torch.Tensor) -> Any:
        for n, block in enumerate([*model.blocks] * 3):
            here = torch.cuda.current_stream() if own is not None else None
            other = own if n % 3 == 1 else None
            if other is not None:
                other.wait_stream(here)
            with _on(other):
                x = checkpoint(block, x, use_reentrant=False)
            if here is not None and other is not None:
                here.wait_stream(other)
        return model.head(x)

    model.forward = forward
    accumulate(loop)


def routes(loop: Loop) -> None:
    """What was loaded ahead is not what is used: another part of the model is, or none."""
    for step in range(4):
        loop.backward()
        loop.step()
        x = torch.randn(8, 64).to(loop.device, loop.model.head.weight.dtype)
        with torch.no_grad():
            loop.losses.append(loop.model.blocks[3 - step](x))
        with infinity.gathered(loop.model.blocks[step].up.weight):
            loop.losses.append(loop.model.blocks[step].up.weight.detach().clone())


def interleaved(loop: Loop) -> None:
    """Forwards on two streams, then their backwards, one of them twice."""
    default = torch.cuda.current_stream() if loop.device != "cpu" else None
    own = torch.cuda.Stream() if default is not None else None
    for _ in range(2):
        batches = [loop.batch() for _ in range(2)]
        if own is not None:
            own.wait_stream(default)
        losses = []
        for stream, batch in zip((own, default), batches, strict=True):
            with _on(stream):
                losses.append(loop.loss(batch))
        for stream, loss, again in zip((own, default, own), (*losses, losses[0]), (1, 0, 0), strict=True):
            with _on(stream):
                loss.backward(retain_graph=bool(again))
        if default is not None:
            default.wait_stream(own)
        loop.losses += [loss.detach() for loss in losses]
        loop.step()


def looks(loop: Loop) -> None:
    """What is under way is looked at and changed: gradients, and values and state while an update runs."""
    params = list(loop.model.parameters())
    for step in range(2):
        loop.backward()
        seen = infinity.gradient(loop.model.blocks[step].up.weight)
        assert seen is not None
        loop.losses.append(seen)
        nn.utils.clip_grad_value_(params, 0.001)
        loop.losses.append(nn.utils.clip_grad_norm_(params, 0.1))
        loop.backward()
        loop.step()
        state = loop.optimizer.state_dict()["state"]
        loop.losses += [v.clone() for each in state.values() for v in each.values()]
        loop.losses += [v.detach().clone() for v in loop.model.state_dict().values()]
        loop.evaluate()
        loop.backward()
        loop.optimizer.zero_grad()
    loop.backward()
    nn.utils.clip_grad_value_(params, 0.001)
    loop.optimizer.zero_grad(set_to_none=False)  # in the place of what is being changed
    loop.step()


def behind_steps(loop: Loop) -> None:
    """What comes straight behind a step, while its update runs: each of these is the first once. What comes
    before it may use parameters when the update begins."""
    weight = loop.model.head.weight

    def look() -> None:
        with torch.no_grad(), contextlib.suppress(ReleasedParameterError):  # it is not on the device
            loop.losses.append(torch.mul(weight, 2))

    def block() -> None:
        with infinity.gathered(weight):
            loop.losses.append(weight.detach().clone())

    def state() -> None:
        loop.losses += [v.detach().clone() for v in loop.model.head.state_dict().values()]

    for first in (look, block, state, loop.evaluate, loop.backward):
        for _ in range(2):
            loop.backward()
            nn.utils.clip_grad_value_([weight], 0.001)
            loop.evaluate()
            loop.step()
            first()
    loop.optimizer.zero_grad()


def held(loop: Loop) -> None:
    """The user keeps aliases of parameters, which show new values after each step."""
    for block in loop.model.blocks:
        with infinity.gathered(block.up.weight):
            alias = block.up.weight.detach()
        for _ in range(2):
            loop.backward()
            loop.step()
            loop.losses.append(alias.clone())
        loop.evaluate()


def two_threads(loop: Loop) -> None:
    """Another thread looks at parameters and evaluates a part. Where a backward is under way, it waits."""
    model, seen, errors, others, came_in = loop.model, [], [], [], []
    x = torch.randn(8, 64).to(loop.device, model.head.weight.dtype)

    def look() -> None:
        try:
            with infinity.gathered(model.blocks[0].up.weight):
                seen.append(model.blocks[0].up.weight.detach().clone())
            with torch.no_grad():
                seen.append(model.blocks[1](x))
        except BaseException as error:
            errors.append(error)

    def begin(grad: torch.Tensor) -> None:
        others.append(threading.Thread(target=look, daemon=True))
        others[-1].start()
        others[-1].join(1.0)
        came_in.append(not others[-1].is_alive())

    def watch(module: nn.Module, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(begin)

    handle = model.blocks[2].register_forward_hook(watch)
    for _ in range(2):
        loop.backward()
        others[-1].join(60)
        if others[-1].is_alive():
            raise AssertionError("the other thread waits for good")
        loop.step()
    handle.remove()
    if errors:
        raise errors[0]
    if any(came_in):
        raise AssertionError("another thread has used the model in the middle of a backward")
    loop.losses += seen


def captured(loop: Loop) -> None:
    """A forward that a CUDA graph would record is refused, and the next one is as always."""
    if loop.device != "cpu":
        world().captures = True
        with pytest.raises(ParameterError, match="cannot be recorded"):
            loop.loss(loop.batch())
        world().captures = False
    torch.manual_seed(1)
    loop.backward()
    loop.step()


def left_open(loop: Loop) -> None:
    """The program ends with everything under way."""
    accumulate(loop)
    loop.backward()
    loop.loss(loop.batch())


def raises(loop: Loop) -> None:
    """A forward that raises has had units loaded ahead that nobody uses."""

    def fails(*_: Any) -> None:
        raise InterruptedError

    for _ in range(3):
        loop.backward()
        loop.step()
        for part in (loop.model.blocks[0], loop.model.blocks[1]):
            handle = part.register_forward_pre_hook(fails)
            with contextlib.suppress(InterruptedError):
                loop.loss(loop.batch())
            handle.remove()
            loop.evaluate()


PROGRAMS: dict[str, Callable[[Loop], None]] = {
    p.__name__: p
    for p in (
        *(accumulate, streams, interleaved, within, beside, routes, looks, behind_steps, held),
        *(two_threads, captured, left_open, raises),
    )
}
