"""The settings of DeepSpeed as settings of `Config`: every key is mapped, noted or refused.

What a key means, its default, and which keys there are is as in DeepSpeed 0.19.8. ``"auto"`` is what
transformers' Trainer fills in.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from infinity.core.config import Config
from infinity.core.errors import ConfigError

#: Schedulers of DeepSpeed, which `scheduler_from` makes.
SCHEDULERS: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
#: Those of torch that it takes as well.
_OF_TORCH: Final = (
    *("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CyclicLR"),
    *("CosineAnnealingLR", "CosineAnnealingWarmRestarts", "OneCycleLR"),
)
_AUTO: Final = "auto"
_TIERS: Final = {"none": "device", "cpu": "host", "nvme": "nvme"}


#: By key: whether a value turns it on, and what to change then.
_Refused: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]


def _words(text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), "")


#: Keys of the file that need no setting, with what takes their place; "": nothing that a user would miss.
_NOTED: Final[Mapping[str, str]] = {
    **_words("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer managed_gradient_accumulation"),
    **_words("dump_state disable_allgather disable_python_gc log_level vocabulary_size timers comms_logger"),
    **_words("seq_parallel_communication_data_type use_data_before_expert_parallelism datastates_ckpt"),
    "steps_per_print": "your loop prints what it needs; `infinity.metrics(optimizer)` returns the figures",
    "wall_clock_breakdown": "`infinity.trace(optimizer, file)` records where the time of a step goes",
    "memory_breakdown": "`infinity plan` shows the memory on each tier",
    "flops_profiler": "`bound` in `infinity.metrics(optimizer)` says what bounds a step",
    "autotuning": "`infinity plan --fit` finds a placement and `infinity tune` the settings of a drive",
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet"),
        "your loop logs the figures of `infinity.metrics(optimizer)`",
    ),
    "communication_data_type": "gradients travel in the compute dtype, or in fp32 if they were accumulated",
    "prescale_gradients": "the gradients of ranks are averaged in fp32, so nothing has to be scaled first",
    "gradient_predivide_factor": "the gradients of ranks are averaged in fp32",
    "dataloader_drop_last": "your data loader decides this: `drop_last`",
    "pipeline": "there is no pipeline parallelism; without a PipelineModule DeepSpeed ignores this key too",
    "checkpoint": "`infinity.save` and `infinity.load` have their own arguments",
    "data_types": "gradients of several backwards are added in fp32, and buffers keep their dtype",
    "aio": "`infinity tune` finds block_bytes and queue_depth of this engine for your drive",
    "compile": "call `torch.compile` on the blocks of the model",
}


def _enabled(value: Any) -> bool:
    return bool(value.get("enabled", False) if isinstance(value, Mapping) else value)


def _there(value: Any) -> bool:
    return bool(value.get("enabled", bool(value)) if isinstance(value, Mapping) else value)


#: Keys of the file that change the result or the parallelism.
_REFUSED: Final[_Refused] = {
    "torch_autocast": (_enabled, 'use "bf16": {"enabled": true}; the engine casts parameters and inputs'),
    "tensor_parallel": (
        lambda v: isinstance(v, Mapping) and v.get("autotp_size", 0) not in (0, 1, _AUTO),
        "leave it out: there is no tensor parallelism; ZeRO uses all ranks",
    ),
    "expert_parallel": (_enabled, "leave it out: there is no expert parallelism; ZeRO uses all ranks"),
    "sequence_parallel_size": (lambda v: v not in (0, 1, _AUTO), "leave it out: no sequence parallelism"),
    "hybrid_engine": (_enabled, "leave it out: there is one engine, for training"),
    "weight_quantization": (_there, "leave it out: weights are not quantized"),
    "msamp": (_enabled, 'use "bf16": {"enabled": true}: there is no fp8'),
    "data_efficiency": (_enabled, "leave it out, and order and shorten samples in your data loader"),
    "gradient_allreduce_op": (
        lambda v: str(v).lower() == "sum",
        'use "mean", and multiply the loss by the number of ranks',
    ),
    **dict.fromkeys(
        (
            *("amp", "compression_training", "quantize_training", "sparse_gradients", "eigenvalue"),
            *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning"),
            *("progressive_layer_drop", "nebula"),
        ),
        (_there, "leave it out: recent versions of DeepSpeed do not have it either"),
    ),
}

#: The same in `zero_optimization`. Some keys have a second name, without ``stage3_``.
_ZERO_NOTED: Final[Mapping[str, str]] = {
    **_words("contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce"),
    **_words("allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm elastic_checkpoint"),
    **_words("load_from_fp32_weights sub_group_size legacy_stage1 round_robin_gradients parameter_alignment"),
    **_words("ignore_unused_parameters memory_efficient_linear pipeline_loading_checkpoint"),
    **_words("override_module_apply log_trace_cache_warnings enable_sanity_checks"),
    **_words("save_muon_momentum_buffer_in_memory cpu_offload_use_pin_memory"),
    **_words("stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"),
    **_words("stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold"),
    **_words("stage3_model_persistence_threshold stage3_module_granularity_threshold"),
    **_words("stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"),
    **_words("stage3_prefetch_bucket_size gather_16bit_weights_on_model_save max_live_parameters"),
    **_words("max_reuse_distance param_persistence_threshold model_persistence_threshold"),
    **_words("module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"),
    **_words("prefetch_bucket_size"),
    "zero_hpz_partition_size": "parameters are gathered from all ranks; there are no secondary shards",
    "zero_quantized_weights": "parameters are gathered in the compute dtype: exact, and with more bytes",
    "zero_quantized_gradients": "gradients are reduced exactly, and with more bytes",
    "leaf_module": "the engine finds the units; `Config(units=[...])` names classes where it should not",
}
_ZERO_REFUSED: Final[_Refused] = {
    "zenflow": (bool, 'leave it out; `Config(update="delayed")` is another way to hide the update'),
    "zero_quantized_nontrainable_weights": (
        bool,
        "leave it out, and plan for frozen weights in the compute dtype",
    ),
    "mics_shard_size": (lambda v: v not in (-1, 0), "leave it out: stage 3 shards over all ranks"),
    "mics_hierarchical_params_gather": (bool, "leave it out: stage 3 shards over all ranks"),
    "zeropp_loco_param": (bool, "leave it out: gradients are reduced exactly"),
}
#: Keys of the two offload blocks that need no setting.
_OFFLOAD_NOTED: Final = (
    *("pin_memory", "buffer_count", "buffer_size", "pipeline_read", "pipeline_write", "fast_init"),
    *("super_offload", "cpuadam_cores_perc"),
)
#: Keys of `activation_checkpointing` that need no setting.
_ACTIVATIONS_NOTED: Final = (
    *("partition_activations", "contiguous_memory_optimization", "number_checkpoints"),
    *("synchronize_checkpoint_boundary", "profile"),
)
#: Optimizers: the class that takes the place of each, its options with DeepSpeed's defaults.
_ADAM: Final = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_OPTIMIZERS: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    "adam": ("adamw", "torch.optim.AdamW", _ADAM),
    "adamw": ("adamw", "torch.optim.AdamW", _ADAM),
    "lion": ("lion", "infinity.optim.Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
    "adagrad": ("adagrad", "torch.optim.Adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    "sgd": ("sgd", "torch.optim.SGD", {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}),
}
#: Options of these that choose an implementation, and not a result.
_IMPLEMENTATION: Final = ("torch_adam", "fp32_optimizer_states", "set_grad_none", "foreach", "fused")
#: What Trainer fills in for ``"auto"``.
_FILLED: Final = {
    "lr": "learning_rate",
    "betas": "(adam_beta1, adam_beta2)",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}

_MASTERS: Final = (
    "DeepSpeed rounds the initial parameters to {dtype} before it copies them to the masters. Here the "
    "masters have the values of the model at `wrap`. To begin with DeepSpeed's masters, convert the model to "
    "{dtype} before `wrap`"
)
_SCALING: Final = (
    "call `optimizer.scale(loss).backward()`. Every overflow halves the scale; 2000 steps without "
    "overflow double it, up to 2^24. DeepSpeed doubles it after {window} steps (loss_scale_window). It "
    "halves it from overflow number {first} on (hysteresis), and raises an error at a scale of "
    "{least:g} (min_loss_scale). DeepSpeed's scheduler does not count a step that overflows: call "
    "`scheduler.step()` only if not `optimizer.step_was_skipped`"
)
_NOT_FINITE: Final = (
    "DeepSpeed skips a step whose gradients are not all finite, by default since version 0.19.3: "
    "Config(skip_nonfinite=True). Its scheduler does not count such a step: call `scheduler.step()` only if "
    "not `optimizer.step_was_skipped`"
)
_IN_CPU: Final = (
    "DeepSpeed keeps so many elements of the parameters in host memory; here all are on NVMe. To split "
    "them, write Config(parameters={{'host': share, 'nvme': 1 - share}}), where share is {most:g} divided by "
    "the number of parameters"
)
_BATCHES: Final = (
    "your data loader makes the batches. In DeepSpeed, train_batch_size is train_micro_batch_size_per_gpu × "
    "gradient_accumulation_steps × ranks. If a step has several backwards, divide each loss by their number, "
    "and call `optimizer.step()` after the last one"
)


class Translation(NamedTuple):
    """What a file says: settings of `Config`, sentences about the rest, and what only a loop uses.

    Attributes:
        settings: of `Config`.
        notes: what has no setting, and what takes its place.
        total: sequences of all ranks in a step; None: unknown.
        batch: sequences of a rank in one forward; None: unknown.
        accumulation: backwards in a step; None: unknown.
        optimizer: its name as in `infinity plan --optimizer`; None: the file has none.
        optimizer_class: the name of its class; "": the file has none.
        optimizer_options: of this class; ``"auto"`` where the arguments do not fill one in.
    """

    settings: dict[str, Any]
    notes: list[str]
    total: int | None
    batch: int | None
    accumulation: int | None
    optimizer: str | None
    optimizer_class: str
    optimizer_options: dict[str, Any]


def read_deepspeed(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a file of DeepSpeed, or a copy of those in a dict.

    Raises:
        ConfigError: the file cannot be read, is not JSON (comments and trailing commas are allowed), or names
            a key twice.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [key for key, _ in pairs]
        twice = next((key for key in names if names.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is there twice")
        return dict(pairs)

    try:
        with open(os.path.expanduser(source), encoding="utf-8") as file:
            found = json.loads(_without_comments(file.read()), object_pairs_hook=once)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {str(source)!r}",
            expected="the JSON object of DeepSpeed's settings",
            found=str(error) or type(error).__name__,
            cure="name the file that `deepspeed.initialize(config=...)` or `deepspeed_config_file` names",
        ) from error
    return found


def _without_comments(text: str) -> str:
    """Return JSON without what DeepSpeed, which reads Hjson, allows beside it."""
    string = r'"(?:\\.|[^"\\])*"'
    text = re.sub(rf"({string})|//[^\n]*|#[^\n]*|/\*.*?\*/", lambda m: m[1] or " ", text, flags=re.S)
    return re.sub(rf"({string})|,(?=\s*[}}\]])", lambda m: m[1] or "", text)


def has_settings(settings: Mapping[str, Any]) -> bool:
    """Return whether a dict has any key of DeepSpeed's settings."""
    return any(key in known for key in settings for known in (_NOTED, _REFUSED, _TAKEN))


def config_from(
    source: str | os.PathLike[str] | Mapping[str, Any], arguments: Any = None
) -> tuple[Config, list[str]]:
    """Return the `Config` that a settings file of DeepSpeed means, and notes about the rest of the file.

    A note is a sentence: a key, its value, and what takes its place here. Every key is in the `Config`, in a
    note or in the error.

    Args:
        source: the file, or its content as a dict.
        arguments: the TrainingArguments with which `Trainer` fills in ``"auto"``; an object with some of
            their attributes will do. `Trainer` then also clips the gradients, so `max_grad_norm` is None.

    Raises:
        ConfigError: the file cannot be read; or the engine lacks some of the settings. The error names all of
            these.
    """
    found = translate(source, arguments)
    return Config(**found.settings), found.notes


def translate(source: str | os.PathLike[str] | Mapping[str, Any], arguments: Any = None) -> Translation:
    """Return what settings of DeepSpeed mean here.

    Args:
        source: a file, or its content.
        arguments: what `Trainer` fills in for ``"auto"``: TrainingArguments, or an object with some of their
            attributes.

    Raises:
        ConfigError: the file cannot be read; or the engine lacks some of the settings. The error names all.
    """
    return _Reader(read_deepspeed(source), arguments).translation()


class _Block:
    """A mapping in the file, whose keys are taken one by one, so that each is looked at."""

    def __init__(self, reader: _Reader, values: Any, path: str) -> None:
        self.path, self._reader = path, reader
        if values is None or values == _AUTO:
            values = {}
        if not isinstance(values, Mapping):
            reader.refuse(path, values, "write an object: {...}")
            values = {}
        self.values = dict(values)

    def key(self, name: str) -> str:
        """Return the key as messages have it, with the blocks that it is in."""
        return f"{self.path}.{name}" if self.path else name

    def block(self, name: str) -> _Block:
        """Take a mapping; an empty one if the key is missing."""
        return _Block(self._reader, self.values.pop(name, None), self.key(name))

    def flag(self, name: str, default: bool = False, auto: bool | None = None) -> bool:
        """Take true or false; `auto` takes the place of ``"auto"``."""
        value = self.values.pop(name, None)
        if value == _AUTO:
            value = auto
        if value is None:
            return default
        if not isinstance(value, bool):
            self._reader.refuse(self.key(name), value, "write true or false")
            return default
        return value

    def number(self, name: str, default: Any, least: float = 0, *, whole: bool = False) -> Any:
        """Take a number of at least `least`; ``"auto"`` is the default."""
        value = self.values.pop(name, None)
        if value is None or value == _AUTO:
            return default
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not right or value < least or (whole and value != int(value)):
            kind = "an integer" if whole else "a number"
            self._reader.refuse(self.key(name), value, f"write {kind} of at least {least:g}")
            return default
        return int(value) if whole else float(value)

    def leave(self, names: Iterable[str]) -> None:
        """Take keys that need no setting, and that nobody would miss."""
        self._reader.left += [self.key(name) for name in names if self.values.pop(name, None) is not None]

    def rest(self, noted: Mapping[str, str], refused: _Refused) -> None:
        """Take keys by two tables."""
        for name in [each for each in self.values if each in noted or each in refused]:
            value = self.values.pop(name)
            if name in refused:
                on, cure = refused[name]
                if on(value):
                    self._reader.refuse(self.key(name), value, cure)
                    continue
            elif noted[name] and value not in (False, None, _AUTO, {}) and _there(value):
                self._reader.note(self.key(name), value, noted[name])
                continue
            self._reader.left.append(self.key(name))

    def end(self, known: Iterable[str] = ()) -> None:
        """Refuse the keys that are left: DeepSpeed does not have them in this block."""
        for name, value in self.values.items():
            close = difflib.get_close_matches(name, list(known), 1)
            cure = f"did you mean {close[0]!r}?" if close else "remove it; DeepSpeed has no such key"
            self._reader.refuse(self.key(name), value, cure)


class _Reader:
    """One file on its way to a `Translation`."""

    def __init__(self, values: dict[str, Any], arguments: Any) -> None:
        self.arguments = arguments
        self.notes: list[str] = []
        self.left: list[str] = []
        self._refused: list[tuple[str, str, str]] = []
        self.settings: dict[str, Any] = {}
        self._file = _Block(self, values, "")

    def refuse(self, key: str, value: object, cure: str) -> None:
        """Have the error name a key."""
        self._refused.append((key, _shown(value), cure))

    def note(self, key: str, value: object, text: str) -> None:
        """Say what becomes of a key."""
        self.notes.append(f"{key} = {_shown(value)}: {text}.")

    def argument(self, name: str) -> Any:
        """Return an attribute of the arguments; None if there is none."""
        return getattr(self.arguments, name, None)

    def translation(self) -> Translation:
        """Return what the file means; raise `ConfigError` with all that is refused."""
        self._dtype()
        self._placement()
        self._clipping()
        batches = self._batches()
        optimizer = self._optimizer()
        self._scheduler()
        self._activations()
        self._file.rest(_NOTED, _REFUSED)
        self._unknown()
        if self._refused:
            raise ConfigError(
                "these settings of DeepSpeed cannot be taken over",
                expected="settings that the engine has",
                found="; ".join(f"{key} = {value}" for key, value, _ in self._refused),
                cure="\n    ".join(f"{key}: {cure}" for key, _, cure in self._refused),
            )
        if self.left:
            self.notes.append(
                f"{', '.join(self.left)}: left out. They are turned off, or the engine needs no such setting."
            )
        return Translation(self.settings, self.notes, *batches, *optimizer)

    def _dtype(self) -> None:
        fp16 = self._file.block("fp16")
        old = self._file.block("bfloat16")
        bf16 = old if old.values and "bf16" not in self._file.values else self._file.block("bf16")
        if bf16 is not old:
            old.leave(list(old.values))
        kinds = {"fp16": fp16, "bf16": bf16}
        autos = [name for name, block in kinds.items() if block.values.get("enabled") == _AUTO]
        on = [n for n, block in kinds.items() if block.flag("enabled", auto=self.argument(n))]
        unknown = [name for name in autos if self.argument(name) is None]
        if unknown and not on:
            self.refuse(
                " and ".join(f"{kinds[name].path}.enabled" for name in unknown),
                _AUTO,
                "give the `arguments` of Trainer, or write true or false",
            )
        if len(on) == 2:
            self.refuse("fp16.enabled and bf16.enabled", True, "turn one of them off")
        dtype = self.settings["dtype"] = on[0] if on else "fp32"
        if dtype == "fp16":
            self._fp16(fp16)
        if dtype == "bf16":
            self._bf16(bf16)
        if dtype != "fp32":
            self.note(kinds[dtype].key("enabled"), True, _MASTERS.format(dtype=dtype))
        fp16.leave(_FP16)
        bf16.leave((*_BF16, *_FP16))  # files have keys of fp16 there, too, which have no effect
        for block in kinds.values():
            block.end((*_FP16, *_BF16))

    def _fp16(self, block: _Block) -> None:
        static = block.number("loss_scale", 0.0)
        if static:
            self.refuse("fp16.loss_scale", static, 'write "loss_scale": 0: the loss scale is dynamic')
        if block.flag("fp16_master_weights_and_grads"):
            self.refuse("fp16.fp16_master_weights_and_grads", True, "leave it out: masters are fp32")
        power = block.number("initial_scale_power", 16, whole=True)
        if power > 127:
            self.refuse("fp16.initial_scale_power", power, "write a power of at most 127: a loss is fp32")
            power = 16
        self.settings["loss_scale"] = 2.0**power
        window = block.number("loss_scale_window", 1000, 1, whole=True)
        hysteresis = block.number("hysteresis", 2, whole=True)
        least = block.number("min_loss_scale", 1)
        self.note("fp16.loss_scale", 0, _SCALING.format(first=max(hysteresis, 1), least=least, window=window))

    def _bf16(self, block: _Block) -> None:
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if block.flag(name):
                self.refuse(
                    block.key(name),
                    True,
                    "leave it out: masters are fp32. Config(split_master=True) and "
                    'Config(optimizer_state_dtype="bf16") take fewer bytes',
                )
        if block.flag("check_grad_overflow", default=True):
            self.settings["skip_nonfinite"] = True
            self.note(block.key("check_grad_overflow"), True, _NOT_FINITE)

    def _placement(self) -> None:
        zero = self._file.values.pop("zero_optimization", None)
        if isinstance(zero, bool):  # an old form
            zero = {"stage": int(zero)}
        block = _Block(self, zero, "zero_optimization")
        stage = block.number("stage", 0, whole=True)
        if stage > 3:
            self.refuse("zero_optimization.stage", stage, "write 0, 1, 2 or 3")
            stage = 3
        state, parameters = block.block("offload_optimizer"), block.block("offload_param")
        for old, of in (("cpu_offload", state), ("cpu_offload_param", parameters)):
            if block.flag(old):
                of.values.setdefault("device", "cpu")
        of_state, of_parameters = (self._tier(each) for each in (state, parameters))
        if of_parameters != "device" and stage < 3:
            self.note(
                parameters.key("device"),
                parameters.values["device"],
                f"parameters stay on the device in stage {stage}; DeepSpeed ignores this key there, too",
            )
            of_parameters = "device"
        ratio = state.number("ratio", 1.0)
        if ratio > 1 or (ratio < 1 and stage < 3):
            self.refuse(state.key("ratio"), ratio, "write a share of at most 1, and use it with stage 3")
            ratio = 1.0
        split = of_state != "device" and ratio < 1
        self.settings |= {
            "zero_stage": stage,
            "parameters": of_parameters,
            "optimizer_state": {of_state: ratio, "device": 1 - ratio} if split else of_state,
            "gradients": "device" if stage < 2 or of_state == "device" else "host",
        }
        self._nvme({state: of_state, parameters: of_parameters}, stage)
        for each in (state, parameters):
            each.values.pop("device", None)
            each.values.pop("nvme_path", None)
            each.leave(_OFFLOAD_NOTED)
            each.end(("device", "nvme_path", "ratio", "max_in_cpu", *_OFFLOAD_NOTED))
        block.rest(_ZERO_NOTED, _ZERO_REFUSED)
        block.end((*_ZERO_NOTED, *_ZERO_REFUSED, "stage", "offload_optimizer", "offload_param"))

    def _tier(self, block: _Block) -> str:
        value = block.values.get("device")
        if value in (None, _AUTO):
            return "device"
        if not isinstance(value, str) or value not in _TIERS:
            self.refuse(block.key("device"), value, 'write "none", "cpu" or "nvme"')
            return "device"
        return _TIERS[value]

    def _nvme(self, tiers: Mapping[_Block, str], stage: int) -> None:
        state, parameters = tiers
        most = parameters.number("max_in_cpu", 1e9)
        on_nvme = [block for block, tier in tiers.items() if tier == "nvme"]
        if not on_nvme:
            return
        paths: list[str] = []
        for block in on_nvme:
            path = block.values.get("nvme_path")
            if isinstance(path, (str, os.PathLike)) and str(path) not in ("", _AUTO):
                paths.append(os.fspath(path))
            else:
                self.refuse(block.key("nvme_path"), path, "name a directory on an NVMe drive")
        self.settings["nvme"] = list(dict.fromkeys(paths))
        if len(self.settings["nvme"]) > 1:
            self.note("nvme_path", paths, "both directories are used for everything that is on NVMe")
        if tiers[state] == "nvme":
            text = f"the state is on NVMe; in stage {stage} DeepSpeed keeps it in host memory"
            if stage == 3:
                text = "gradients are in host memory; Config(gradients='nvme') has them on NVMe, as DeepSpeed"
            self.note(state.key("device"), "nvme", text)
        if tiers[parameters] == "nvme" and most:
            self.note(parameters.key("max_in_cpu"), int(most), _IN_CPU.format(most=most))

    def _clipping(self) -> None:
        """Since 0.19.3 DeepSpeed clips at 1 where the key is missing. Trainer clips by itself."""
        missing = "gradient_clipping" not in self._file.values
        auto = self._file.values.get("gradient_clipping") == _AUTO
        theirs = self.argument("max_grad_norm")
        norm = self._file.number("gradient_clipping", 1.0)
        self.settings["max_grad_norm"] = None
        if theirs is not None:
            if not auto and norm != theirs:
                said = f"{norm:g}" + " (the default)" * missing
                self.refuse(
                    "gradient_clipping",
                    said,
                    f'write "auto", or {theirs:g} as in the arguments: Trainer clips at max_grad_norm',
                )
            else:
                self.note("gradient_clipping", theirs, "Trainer clips; Config(max_grad_norm=None)")
            return
        self.settings["max_grad_norm"] = norm or None
        if missing or auto:
            why = "DeepSpeed clips at 1 then since version 0.19.3; older versions do not clip"
            if auto:
                why = "there are no arguments to fill it in; the default of TrainingArguments is 1"
            self.note("gradient_clipping", _AUTO if auto else None, f"Config(max_grad_norm=1.0), as {why}")

    def _batches(self) -> tuple[int | None, int | None, int | None]:
        names = {
            "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
            "gradient_accumulation_steps": "gradient_accumulation_steps",
        }
        total = self._file.number("train_batch_size", None, 1, whole=True)
        found: list[int | None] = []
        told: dict[str, Any] = {}
        for name, of_trainer in names.items():
            said, theirs = self._file.number(name, None, 1, whole=True), self.argument(of_trainer)
            if said is not None and theirs is not None and said != theirs:
                self.refuse(name, said, f'write "auto", or {theirs} as in the arguments ({of_trainer})')
            if theirs is None and said is not None:
                told[name] = said
            found.append(theirs if said is None else said)
        if total is not None:
            told["train_batch_size"] = total
        if told:
            self.notes.append(f"{', '.join(f'{k} = {v}' for k, v in told.items())}: {_BATCHES}.")
        dtype, kinds = self.settings["dtype"], self._file.values.get("data_types")
        added = kinds.get("grad_accum_dtype") if isinstance(kinds, Mapping) else None
        if (found[1] or 1) > 1 and dtype != "fp32" and added != "fp32":
            text = (
                f"DeepSpeed adds the gradients of several backwards in {dtype}; here they are added in fp32"
            )
            self.note("data_types.grad_accum_dtype", added, text)
        return (total, *found)

    def _optimizer(self) -> tuple[str | None, str, dict[str, Any]]:
        if "optimizer" not in self._file.values:
            return None, "", {}
        block = self._file.block("optimizer")
        kind, params = block.values.pop("type", None), block.block("params")
        block.leave(("legacy_fusion",))
        block.end(("type", "params"))
        if str(kind).lower() not in _OPTIMIZERS:
            self.refuse(
                "optimizer.type",
                kind,
                f"write one of {', '.join(_OPTIMIZERS)}; or leave `optimizer` out, and create one for `wrap`",
            )
            return None, "", {}
        ours, name, options = _OPTIMIZERS[str(kind).lower()]
        options = dict(options)
        if ours == "adamw":
            decoupled = params.flag("adam_w_mode", default=True) or str(kind).lower() == "adamw"
            if not decoupled:
                name = "torch.optim.Adam"
            elif params.values.get("torch_adam") is True:
                options["weight_decay"] = 0.01  # the default of torch's class
        for option in ("bias_correction", "amsgrad", "max_grad_norm"):
            wrong = params.values.pop(option, None)
            if wrong not in ((None, True) if option == "bias_correction" else (None, False)):
                more = ", and write gradient_clipping" if option == "max_grad_norm" else ""
                self.refuse(params.key(option), wrong, f"leave it out{more}")
        for option in ("nesterov",) if ours == "sgd" else ():
            options[option] = params.flag(option)
        params.leave(_IMPLEMENTATION)
        given = {
            option: self._option(option, params.values.pop(option, default))
            for option, default in options.items()
        }
        params.end(options)
        words = ", ".join(
            f"{option}={_FILLED.get(option, option) if value == _AUTO else repr(value)}"
            for option, value in given.items()
        )
        text = f"{name}(parameters, {words})"
        if self.argument("learning_rate") is not None:
            text += (
                ". With DeepSpeed all parameters are in one group, so biases and norms decay, too; the "
                "optimizer of Trainer leaves these out"
            )
        self.note("optimizer.type", kind, text)
        return ours, name, given

    def _option(self, option: str, value: Any) -> Any:
        if value != _AUTO:
            return tuple(value) if isinstance(value, list) else value
        names = re.findall(r"\w+", _FILLED.get(option, option))
        filled = [self.argument(name) for name in names]
        if None in filled:
            return _AUTO
        return tuple(filled) if len(filled) > 1 else filled[0]

    def _scheduler(self) -> None:
        if "scheduler" not in self._file.values:
            return
        block = self._file.block("scheduler")
        kind = block.values.pop("type", None)
        block.values.pop("params", None)
        block.end(("type", "params"))
        if kind in SCHEDULERS:
            text = "scheduler_from(settings, optimizer) has the same rates, step for step"
        elif kind in _OF_TORCH:
            text = f"torch.optim.lr_scheduler.{kind}(optimizer, **params)"
        else:
            self.refuse("scheduler.type", kind, f"write one of {', '.join((*SCHEDULERS, *_OF_TORCH))}")
            return
        self.note("scheduler.type", kind, text)

    def _activations(self) -> None:
        block = self._file.block("activation_checkpointing")
        if block.flag("cpu_checkpointing"):
            self.settings["activations"] = "host"
            self.note(
                block.key("cpu_checkpointing"),
                True,
                "Config(activations='host') moves the inputs of layers that `torch.utils.checkpoint` runs",
            )
        block.leave(_ACTIVATIONS_NOTED)
        block.end(_ACTIVATIONS_NOTED)

    def _unknown(self) -> None:
        """DeepSpeed ignores keys of the file that it does not know. One that is nearly right is a mistake."""
        known = [*_NOTED, *_REFUSED, *_TAKEN]
        for key, value in self._file.values.items():
            close = difflib.get_close_matches(key, known, 1, cutoff=0.8)
            if close:
                self.refuse(key, value, f"did you mean {close[0]!r}?")
            else:
                self.note(key, value, "left out; DeepSpeed does not know this key either")


_FP16: Final = (
    *("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
    *("consecutive_hysteresis", "fp16_master_weights_and_grads"),
)
_BF16: Final = (
    *("immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"),
    "bf16_optimizer_states",
)
_TAKEN: Final = (
    *("fp16", "bf16", "bfloat16", "zero_optimization", "gradient_clipping", "train_batch_size"),
    *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    "activation_checkpointing",
)


def _shown(value: object) -> str:
    if value is None:
        return "(missing)"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
