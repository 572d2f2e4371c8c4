"""The model that a plan is for: a causal language model of transformers, of a preset or from a directory.

It says what planning needs to know without being built. A plan of a preset imports neither torch nor
transformers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.core.config import Config
from infinity.core.errors import ConfigError, DataError
from infinity.core.optional import broken, optional
from infinity.core.sizes import ITEMSIZES, dtype_name
from infinity.planning.partition import ParamSpec, matched
from infinity.planning.planner import Model

from .settings import RunSettings
from .shape import KEYS, OUTER, Activations, activations_of, config_from, idle_of, units_of

if TYPE_CHECKING:  # it takes seconds, and a plan of a preset needs none: imported where one is made
    import torch
    from torch import nn


class Workload:
    """A preset."""

    name: str
    context: int
    shape: Mapping[str, Any]  # by the names of `KEYS`

    def __init__(self, run: RunSettings) -> None:
        given, sequence = run.model, run.train.sequence
        self._optimizer = run.train.optimizer
        shape = config_from(given.preset, **{name: getattr(given, name) for name in KEYS})
        if given.context is None:
            shape[KEYS["context"]] = max(shape[KEYS["context"]], sequence)
        self.context = shape[KEYS["context"]]
        _check_context(self.context, sequence)
        self.shape, self._path = shape, given.preset
        layers, width = (shape[KEYS[name]] for name in ("layers", "width"))
        kind = shape["model_type"].capitalize()
        self.name = f"{kind}, {layers} blocks × {width} wide, {shape[KEYS['heads']]} heads"

    def planned(self, config: Config) -> Model:
        """Return what planning needs to know. In closed form, unless units are named."""
        if config.units is not None:
            return planned_from(self.structure, config, optimizer=self._optimizer)
        dtype, found = self.dtype(config), units_of(self.shape)
        muon = self._optimizer == "muon"
        fp32 = matched(config.fp32_moments, [n for _, params in found for n, _ in params])

        def spec(name: str, shape: tuple[int, ...]) -> ParamSpec:
            inner = muon and len(shape) == 2 and name not in OUTER
            group = _group(len(shape), muon, inner)
            return ParamSpec(name, shape, dtype, True, group, inner, name in fp32)

        units = [(name, [spec(*each) for each in params]) for name, params in found]
        again = [0] if self.shape[KEYS["tied"]] else []
        return Model(units, [(i,) for i in [*range(len(units)), *again]], idle_of(self.shape), again)

    def scratch(self) -> list[int]:
        """Return the bytes of each parameter as the model is built, in that order. A tied head is made, too,
        before it goes."""
        shapes = [s for _, params in units_of(self.shape) for _, s in params]
        if self.shape[KEYS["tied"]]:
            shapes.append(shapes[0])
        return [math.prod(s) * ITEMSIZES["fp32"] for s in shapes]

    def dtype(self, config: Config) -> str:
        """Return the short name of the dtype of most parameters, and of activations."""
        return dtype_name(config.dtype or "fp32")

    def activations(self, config: Config, batch: int, sequence: int, recompute: bool) -> Activations:
        """Return the activations of one forward and backward, in bytes (see [Note: activations])."""
        itemsize = ITEMSIZES[self.dtype(config)]
        return activations_of(self.shape, batch, sequence, itemsize, recompute=recompute)

    @functools.cached_property
    def hf_config(self) -> Any:
        """The configuration, as transformers has it.

        Raises:
            DataError: transformers is not installed, or broken.
        """
        [AutoConfig] = optional("transformers", "hf", "AutoConfig")
        return AutoConfig.for_model(**self.shape)

    @functools.cached_property
    def structure(self) -> nn.Module:
        """The model on the meta device, without values.

        Raises:
            DataError: transformers is not installed, or broken; or it makes no model of the configuration.
        """
        import torch

        from infinity.api.hugging_face import unreadable

        [AutoModelForCausalLM] = optional("transformers", "hf", "AutoModelForCausalLM")
        try:
            AutoModelForCausalLM._model_mapping[type(self.hf_config)]
        except ImportError as error:
            raise broken("transformers", error) from error
        try:
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(self.hf_config, dtype=self.own_dtype)
        except Exception as error:  # whatever a configuration that is not what it should be makes of it
            raise unreadable(self._path, error) from error
        return model

    @property
    def own_dtype(self) -> torch.dtype:
        """The dtype that the configuration names, or fp32."""
        import torch

        return getattr(self.hf_config.get_text_config(), "dtype", None) or torch.float32


class Pretrained(Workload):
    """A model from a Hugging Face directory, whose config.json is read."""

    def __init__(self, directory: str, run: RunSettings) -> None:
        path = Path(directory).expanduser()
        if not (path / "config.json").is_file():
            raise DataError(
                f"there is no model in {directory!r}",
                expected="a Hugging Face directory with a config.json",
                found="no config.json" if path.is_dir() else "no directory",
                cure="check --init-from",
            )
        from infinity.api.hugging_face import read_config, unreadable

        self._path, sequence = str(path), run.train.sequence
        self._optimizer = run.train.optimizer
        self.hf_config = read_config(self._path)
        [AutoModelForCausalLM] = optional("transformers", "hf", "AutoModelForCausalLM")
        if type(self.hf_config) not in AutoModelForCausalLM._model_mapping:
            raise DataError(
                f"the model in {directory!r} is no causal language model of transformers",
                expected="one that AutoModelForCausalLM has; code in the directory is never executed",
                found=", ".join(getattr(self.hf_config, "architectures", None) or [])
                or type(self.hf_config).__name__,
                cure="name the directory of a causal language model; `infinity.wrap` trains others, too",
            )
        try:
            self.shape = _alike(self.hf_config.get_text_config(), sequence)
        except (AttributeError, TypeError) as error:
            raise unreadable(directory, error) from error
        self.context = self.shape[KEYS["context"]]
        _check_context(self.context, sequence)
        self.name = f"{self.hf_config.model_type} from {directory}"

    def dtype(self, config: Config) -> str:
        """See `Workload`. That of the checkpoint, unless `config` has one."""
        return dtype_name(config.dtype or self.own_dtype)

    def planned(self, config: Config) -> Model:
        """See `Workload`. Of the structure."""
        return planned_from(self.structure, config, optimizer=self._optimizer)

    def scratch(self) -> list[int]:
        """See `Workload`. In the dtype of the checkpoint, or fp32 where it does not say."""
        return [p.numel() * self.own_dtype.itemsize for p in self.structure.parameters()]


def _alike(text: Any, sequence: int) -> dict[str, Any]:
    """Return the dimensions of a model of any family, by the names of Llama's: what is estimated of it."""
    found = {key: getattr(text, key, None) for key in KEYS.values()}
    width, heads = int(text.hidden_size), int(text.num_attention_heads)
    usual = {"inner": 4 * width, "kv_heads": heads, "context": sequence, "experts": 0}
    found |= {KEYS[name]: value for name, value in usual.items() if not isinstance(found[KEYS[name]], int)}
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    size = int(getattr(text, "head_dim", None) or width // heads)
    return {**found, "num_experts_per_tok": chosen, "head_dim": size}


def workload_of(run: RunSettings) -> Workload:
    """Return the workload that a run names.

    Raises:
        ConfigError: its dimensions cannot be used.
        DataError: the Hugging Face directory cannot be read.
    """
    return Workload(run) if run.model.init_from is None else Pretrained(run.model.init_from, run)


def planned_from(model: nn.Module, config: Config, *, optimizer: str = "adamw") -> Model:
    """Return what planning needs to know of a model; one on the meta device will do. `optimizer`: of
    `TrainSettings`."""
    from infinity.params.discover import discover, param_specs

    members, scopes = discover(model, config.units)
    numbers, matrices = _numbers(model, muon=optimizer == "muon"), (0,) if optimizer == "muon" else ()
    dtype, patterns = config.compute_dtype, config.fp32_moments
    specs = param_specs(model, members, numbers, dtype, matrices=matrices, fp32_moments=patterns)
    units = [(m.name, s) for m, s in zip(members, specs, strict=True)]
    uses = Counter(unit for scope in scopes for unit in scope.units)
    again = [unit for unit, count in uses.items() for _ in range(count - 1)]
    return Model(units, [s.working_set for s in scopes], again=again)


def _numbers(model: nn.Module, *, muon: bool) -> dict[int, int]:
    """Return the number of the group of each trainable parameter, by id."""
    from infinity.optim.muon import inner_matrices

    inner = {id(param) for param in inner_matrices(model)} if muon else set()
    trainable = (p for p in model.parameters() if p.requires_grad)
    return {id(p): _group(p.ndim, muon, id(p) in inner) for p in trainable}


def _group(ndim: int, muon: bool = False, matrix: bool = False) -> int:
    """Return the number of a parameter's group: those of Muon come first, those that do not decay last."""
    return 0 if matrix else muon + (ndim < 2)


def _check_context(context: int, sequence: int) -> None:
    if sequence > context:
        raise ConfigError(
            "the sequence is longer than the model can take",
            expected=f"at most {context} tokens",
            found=sequence,
            cure=f"--sequence {context}, or, of a preset, --context {sequence}",
        )
