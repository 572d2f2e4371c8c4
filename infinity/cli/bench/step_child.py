"""A contestant of `bench step`, in a process of its own: infinity, plain torch or DeepSpeed.

    python -m infinity.cli.bench.step_child '{"contestant": "torch", …}'

It builds its model, says that it is ready, and for every line takes as many steps as the line says: a
*turn*. A step is forward, backward, `step()` and `zero_grad()`. What goes on behind the last step of a
turn is waited for, so that nobody works in another's turn.

With DeepSpeed it may run under another interpreter, whose environment has DeepSpeed and torch: nothing
of this package that needs a native module is imported at the top.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Final

from .contest import forget_peak, lines, status, tell

#: One AdamW for everybody.
ADAMW: Final[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PACKAGES: Final = ("torch", "transformers", "deepspeed", "infinity-offload")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained: ``gpt``, the built-in one, or ``gpt2``, that of transformers, without dropout."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    kind: str = "gpt"

    @property
    def parameters(self) -> int:
        """The number of parameters (of ``gpt2``: without biases and norms)."""
        from infinity.cli.model import parameters_of

        if self.kind == "gpt":
            return parameters_of(self._shape())
        return (12 * self.layers * self.width + self.vocab + self.context) * self.width

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest unit: a block, or an embedding."""
        return max(12 * self.width, self.vocab, self.context) * self.width

    def activations(self, batch: int, tokens: int, itemsize: int) -> int:
        """Return bytes of the activations of one forward and backward, at their peak."""
        from infinity.cli.model import activations_of

        return activations_of(self._shape(), batch, tokens, itemsize, recompute=False).peak

    def build(self) -> Any:
        """Return the module, with the values of seed 0."""
        import torch

        torch.manual_seed(0)
        if self.kind == "gpt":
            from infinity.cli.model import GPT

            return GPT(self._shape())
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=self.layers,
                n_embd=self.width,
                n_head=self.heads,
                vocab_size=self.vocab,
                n_positions=self.context,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
            )
        )

    def loss_of(self, batch: int, tokens: int, device: Any) -> Callable[[Any], Any]:
        """Return what computes the loss of a model on the one batch of every step."""
        import torch

        random = torch.Generator().manual_seed(1)
        data = torch.randint(0, self.vocab, (batch, tokens), generator=random).to(device)
        if self.kind == "gpt":
            targets = data.roll(-1, 1)
            return lambda model: model(data, targets).loss
        return lambda model: model(input_ids=data, labels=data).loss

    def _shape(self) -> Any:
        from infinity.cli.model import GPTShape

        return GPTShape(
            layers=self.layers, width=self.width, heads=self.heads, vocab=self.vocab, context=self.context
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one contestant does. `threads` None: what each takes by itself.

    `settings` are of `infinity.Config`, or for DeepSpeed ``state`` (cpu, nvme), ``parameters`` (device,
    nvme) and what `deepspeed_configuration` takes.
    """

    contestant: str
    model: Model
    tokens: int
    batch: int = 1
    dtype: str = "fp32"
    device: str = "cpu"
    directory: str = "."
    threads: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> str:
        """Return the task as the child's argument."""
        return json.dumps({**asdict(self), "settings": dict(self.settings)})

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task that `as_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "model": Model(**values["model"])})


class Contestant:
    """A model that can take steps.

    Args:
        step: `step()` and `zero_grad()` of its optimizer.
        settle: waits for what goes on behind the last step.
        engine: infinity's, for its figures.
        numel: parameters, where the model does not say.
    """

    def __init__(
        self,
        model: Any,
        step: Callable[[], None],
        *,
        backward: Callable[[Any], None] | None = None,
        settle: Callable[[], None] = lambda: None,
        engine: Any = None,
        close: Callable[[], None] = lambda: None,
        device: Any = "cpu",
        numel: int | None = None,
    ) -> None:
        self.model = model
        self.step = step
        self.backward = backward if backward is not None else lambda loss: loss.backward()
        self.settle = settle
        self.engine = engine
        self.close = close
        self.device = device
        self.numel = numel if numel is not None else sum(p.numel() for p in model.parameters())

    def moved(self) -> tuple[int, int]:
        """Return bytes that the store read and wrote so far."""
        stats = self.engine.store.stats() if self.engine is not None else ()
        return sum(s.bytes_read for s in stats), sum(s.bytes_written for s in stats)


def build_infinity(task: Task) -> Contestant:
    """Return the wrapped model."""
    import torch

    import infinity
    from infinity.api.engine import engine_of

    config = infinity.Config(
        nvme=task.directory,
        device=task.device,
        dtype=task.dtype,
        threads=task.threads,
        **task.settings,
    )
    with infinity.init(config):
        model = task.model.build()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    model, wrapped = infinity.wrap(model, optimizer, config)
    engine = engine_of(model)

    def step() -> None:
        wrapped.step()
        wrapped.zero_grad()

    def settle() -> None:
        engine.quiesce()
        engine.store.flush()

    return Contestant(
        model,
        step,
        settle=settle,
        engine=engine,
        close=lambda: infinity.close(wrapped),
        device=engine.device.torch_device,
    )


def build_torch(task: Task) -> Contestant:
    """Return the model on the device and torch's fused AdamW."""
    import torch

    model = task.model.build().to(task.device)
    if task.dtype == "bf16":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(model, step, device=task.device)


def deepspeed_configuration(
    task: Task,
    *,
    state: str,
    parameters: str,
    sub_group: int = 100_000_000,
    buffer_size: int = 60_000_000,
    buffer_count: int = 40,
) -> dict[str, Any]:
    """Return DeepSpeed's settings: ZeRO-3, as its documentation recommends for one process; on NVMe
    the optimizer goes through its pipelined swapper."""
    optimizer: dict[str, Any] = {"device": state, "pin_memory": task.device != "cpu"}
    if state == "nvme":
        optimizer |= {
            "nvme_path": task.directory,
            "buffer_count": 8,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": sub_group,
        "offload_optimizer": optimizer,
        "stage3_param_persistence_threshold": 0,
    }
    if parameters != "device":
        zero["offload_param"] = {
            "device": parameters,
            "pin_memory": False,
            "nvme_path": task.directory,
            "buffer_size": buffer_size,
            "buffer_count": buffer_count,
            "max_in_cpu": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": task.batch,
        "bf16": {"enabled": task.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": zero,
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def build_deepspeed(task: Task) -> Contestant:
    """Return DeepSpeed's engine."""
    deepspeed: Any = importlib.import_module("deepspeed")

    if task.model.kind == "gpt2":
        # Not later: within zero.Init torch's constructors are others, which an import trips over.
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401

    config = deepspeed_configuration(task, **task.settings)
    deepspeed.init_distributed("gloo" if task.device == "cpu" else None)
    if task.settings["parameters"] == "device":
        model = task.model.build()
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = task.model.build()
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Contestant(engine, engine.step, backward=engine.backward, device=engine.device, numel=numel)


BUILDERS: Final[dict[str, Callable[[Task], Contestant]]] = {
    "infinity": build_infinity,
    "torch": build_torch,
    "deepspeed": build_deepspeed,
}


def turn(who: Contestant, loss_of: Callable[[Any], Any], count: int, *, apart: bool) -> dict[str, Any]:
    """Take `count` steps; return what they took. Times in seconds, sizes in bytes.

    ``intervals`` are from the end of one `step()` to the end of the next: from the second on, each has
    the update of the step before behind it. ``seconds`` is the turn by its number of steps, what goes on
    behind the last step included.

    Args:
        apart: wait for a device after forward and backward, so that their times are their own. That
            would undo an overlap, so only torch is measured so.
    """
    import torch

    cuda = torch.device(who.device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    wait: Callable[[], Any] = torch.cuda.synchronize if cuda and apart else (lambda: None)
    parts = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    losses, intervals = [], []
    moved = who.moved()
    begin = last = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        loss = loss_of(who.model)
        wait()
        after_forward = time.perf_counter()
        who.backward(loss)
        wait()
        after_backward = time.perf_counter()
        who.step()
        wait()
        losses.append(loss.item())
        end = time.perf_counter()
        parts["forward"] += after_forward - start
        parts["backward"] += after_backward - after_forward
        parts["step"] += end - after_backward
        intervals.append(end - last)
        last = end
        del loss
    who.settle()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    store = [(b - a) / count for a, b in zip(moved, who.moved(), strict=True)]
    return {
        "seconds": seconds / count,
        "intervals": intervals,
        **{name: value / count for name, value in parts.items()},
        "losses": losses,
        "store_read": store[0],
        "store_written": store[1],
        "peak_rss": status(os.getpid()).get("VmHWM", 0),
        "device_peak": torch.cuda.max_memory_allocated() if cuda else 0,
    }


def serve(task: Task) -> None:
    """Build one contestant; then take as many steps as each line says."""
    import torch

    if task.threads is not None:
        torch.set_num_threads(task.threads)
    imports = status(os.getpid())
    who = BUILDERS[task.contestant](task)
    loss_of = task.model.loss_of(task.batch, task.tokens, who.device)
    tell(
        {
            "params": who.numel,
            "threads": torch.get_num_threads(),
            "anonymous_at_imports": imports.get("RssAnon", 0),
            "versions": versions(),
        }
    )
    forget_peak()  # not what building took, which is freed by now: what steps take
    for line in lines():
        tell(turn(who, loss_of, int(line), apart=task.contestant == "torch"))
    who.close()


def versions() -> dict[str, str]:
    """Return the versions of this interpreter and of what of `PACKAGES` it has."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    serve(Task.from_json(sys.argv[1]))
