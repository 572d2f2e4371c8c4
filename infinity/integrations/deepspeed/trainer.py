"""Settings of DeepSpeed for transformers' Trainer: its `Config`, its optimizer and its scheduler."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from infinity.core.config import Config
from infinity.core.errors import ConfigError
from infinity.optim.lion import Lion

from .schedulers import scheduler_from
from .settings import SCHEDULERS, config_from, has_settings, read_deepspeed, translate

_Made = TypeVar("_Made")


class TrainerSettings:
    """The settings that an offloaded trainer gets in place of a `Config`.

    Attributes:
        known: whether any of them is a setting of DeepSpeed.
        has_scheduler: whether they name a scheduler.
    """

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self._values = read_deepspeed(source)
        self.known = has_settings(self._values)
        self.has_scheduler = self._values.get("scheduler") is not None

    def config(self, args: Any) -> Config:
        """Return the `Config`, to which the training arguments add the dtype; warn with the notes.

        Raises:
            ConfigError: the settings contradict the arguments, or the engine lacks some of them.
        """
        settings = self._values
        for name, keys in {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}.items():
            block = next((settings[key] for key in keys if key in settings), None)
            if block is None:
                settings[name] = {"enabled": "auto"}
                continue
            said, wanted = isinstance(block, Mapping) and block.get("enabled", False), getattr(args, name)
            if said in (True, False) and said != wanted:
                raise ConfigError(
                    "the settings of DeepSpeed contradict the training arguments",
                    expected=f"{name}={said} in the training arguments, as {name}.enabled in the settings",
                    found=f"TrainingArguments({name}={wanted})",
                    cure=f'{name}={said} in the training arguments; or write "{name}": {{"enabled": "auto"}}',
                )
        said, wanted = settings.get("train_batch_size"), args.per_device_train_batch_size
        wanted *= args.gradient_accumulation_steps * args.world_size
        if said not in (None, "auto", wanted):
            raise ConfigError(
                "the settings of DeepSpeed contradict the training arguments",
                expected=f"train_batch_size {wanted}: per_device_train_batch_size × "
                "gradient_accumulation_steps × ranks, as in the arguments",
                found=f"train_batch_size = {said!r}",
                cure='write "train_batch_size": "auto", or change the arguments',
            )
        config, notes = config_from(settings, args)
        if args.process_index == 0 and notes:
            warnings.warn(
                "these are notes about the settings of DeepSpeed. They speak of a loop of your own: the "
                "trainer creates the optimizer and the scheduler, scales losses and divides them by itself.\n"
                + "\n".join(f"- {note}" for note in notes),
                UserWarning,
                stacklevel=2,
            )
        return config

    def optimizer(self, parameters: Iterable[torch.nn.Parameter], args: Any) -> torch.optim.Optimizer | None:
        """Return the optimizer of the block `optimizer`, with one param group as DeepSpeed has it under
        Trainer; None if there is no such block.

        Raises:
            ConfigError: an option of the optimizer is wrong; or the engine lacks some of the settings.
        """
        found = translate(self._values, args)
        if found.optimizer is None:
            return None
        name = found.optimizer_class.rpartition(".")[2]
        cls = Lion if name == "Lion" else getattr(torch.optim, name)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return _made("optimizer", lambda **options: cls(trained, **options), found.optimizer_options)

    def scheduler(self, optimizer: torch.optim.Optimizer, args: Any, steps: int) -> LRScheduler:
        """Return the scheduler of the block `scheduler`, DeepSpeed's own or one of torch.

        Raises:
            ConfigError: a parameter of the scheduler is wrong.
        """
        block = self._values["scheduler"]
        if block["type"] in SCHEDULERS:
            return scheduler_from(self._values, optimizer, args, steps=steps)
        cls: type[LRScheduler] = getattr(torch.optim.lr_scheduler, block["type"])
        return _made("scheduler", lambda **options: cls(optimizer, **options), block.get("params") or {})


def _made(block: str, cls: Callable[..., _Made], options: Mapping[str, Any]) -> _Made:
    """Return what a class of torch makes of the options in a block."""
    try:
        if "auto" in options.values():
            raise ValueError('Trainer fills in no such "auto"')
        return cls(**options)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{block}.params cannot be used",
            expected="options that this class of torch takes",
            found=f"{options!r}: {error}",
            cure=f"correct {block}.params",
        ) from error
