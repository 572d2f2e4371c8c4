"""What is trained: the built-in GPT, or a model from a Hugging Face directory.

Each can say what planning needs to know without being built, be built, and write text.
"""

from __future__ import annotations

import abc
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infinity.core.config import Config
from infinity.core.errors import ConfigError, DataError
from infinity.core.optional import broken, optional
from infinity.core.sizes import ITEMSIZES, dtype_name
from infinity.planning.partition import ParamSpec
from infinity.planning.planner import Model

from .settings import ModelSettings, RunSettings
from .shape import Activations, GPTShape, activations_of, idle_of, shape_from, units_of

if TYPE_CHECKING:  # it takes seconds, and a plan of the built-in model needs none: imported where one is made
    import torch
    from torch import nn

_DIMENSIONS = (
    *("layers", "width", "heads", "vocab", "mlp", "positions", "tied", "kv_heads", "inner", "experts"),
)


class Workload(abc.ABC):
    """A causal language model that can be planned, built and trained."""

    name: str
    tokenizer: Any = None  # of Hugging Face; None: tokens are bytes
    vocab: int
    context: int
    attention: int | None = None  # layers × heads × width of a head; None: what a token passes is not known
    _call: Mapping[str, Any] = MappingProxyType({})  # what a forward is told besides the tokens

    @abc.abstractmethod
    def planned(self, config: Config) -> Model:
        """Return what planning needs to know; nothing is built."""

    @abc.abstractmethod
    def scratch(self) -> list[int]:
        """Return the bytes of each parameter as `build` makes it, in that order; nothing is built."""

    @abc.abstractmethod
    def dtype(self, config: Config) -> str:
        """Return the short name of the dtype of most parameters, and of activations."""

    @abc.abstractmethod
    def activations(self, config: Config, batch: int, sequence: int, recompute: bool) -> Activations:
        """Return the activations of one forward and backward, in bytes."""

    @abc.abstractmethod
    def build(self, recompute: bool) -> nn.Module:
        """Return the model with its values, ready to be trained."""

    def logits(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return (batch, sequence, vocab) for tokens, (batch, sequence)."""
        logits: torch.Tensor = model(tokens, **self._call).logits
        return logits

    def loss(self, model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of `targets`, (batch, sequence)."""
        from torch.nn import functional as F

        return F.cross_entropy(self.logits(model, tokens).flatten(0, 1).float(), targets.flatten())


class BuiltIn(Workload):
    """The GPT of `infinity.cli.model`, over bytes."""

    def __init__(self, settings: ModelSettings, sequence: int) -> None:
        shape = shape_from(
            settings.preset,
            **{n: getattr(settings, n) for n in _DIMENSIONS},
            context=settings.context if settings.context is not None else max(1024, sequence),
        )
        if shape.vocab < 256:
            raise ConfigError(
                "the vocabulary is too small for bytes",
                expected="at least 256",
                found=shape.vocab,
                cure="leave out --vocab",
            )
        _check_context(shape.context, sequence)
        self.shape = shape
        self.vocab, self.context = shape.vocab, shape.context
        self.attention = shape.layers * shape.width
        self.name = f"GPT, {shape.layers} blocks × {shape.width} wide, {shape.heads} heads"

    def planned(self, config: Config) -> Model:
        """See `Workload`. In closed form, unless units are named."""
        if config.units is not None:
            import torch

            from .model import GPT

            with torch.device("meta"):
                return planned_from(GPT(self.shape), config)
        dtype = self.dtype(config)
        units = [
            (name, [ParamSpec(n, s, dtype, True, _group(len(s))) for n, s in params])
            for name, params in units_of(self.shape)
        ]
        alone = [(i,) for i in range(len(units))]
        again = [0] if self.shape.tied else []
        return Model(units, [*alone, (0,)] if again else alone, idle_of(self.shape), again)

    def scratch(self) -> list[int]:
        """See `Workload`. A tied head is made, too, before it goes."""
        shapes = [s for _, params in units_of(self.shape) for _, s in params]
        if self.shape.tied:
            shapes.append((self.shape.vocab, self.shape.width))
        return [math.prod(s) * ITEMSIZES["fp32"] for s in shapes]

    def dtype(self, config: Config) -> str:
        """See `Workload`."""
        return dtype_name(config.dtype or "fp32")

    def activations(self, config: Config, batch: int, sequence: int, recompute: bool) -> Activations:
        """See `Workload`; exact without experts (see [Note: activations])."""
        itemsize = ITEMSIZES[self.dtype(config)]
        return activations_of(self.shape, batch, sequence, itemsize, recompute=recompute)

    def build(self, recompute: bool) -> nn.Module:
        """See `Workload`."""
        from .model import GPT

        return GPT(self.shape, recompute=recompute)


class HuggingFace(Workload):
    """A causal language model from a directory: config, safetensors and, if it is there, tokenizer."""

    _call = MappingProxyType({"use_cache": False})

    def __init__(self, directory: str, sequence: int) -> None:
        path = Path(directory).expanduser()
        if not (path / "config.json").is_file():
            raise DataError(
                f"there is no model in {directory!r}",
                expected="a Hugging Face directory: config.json, *.safetensors and a tokenizer",
                found="no config.json" if path.is_dir() else "no directory",
                cure="check --init-from",
            )
        AutoConfig, AutoModelForCausalLM, AutoTokenizer = optional(
            "transformers", "hf", "AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"
        )
        self._path = str(path)
        try:
            self.hf_config: Any = AutoConfig.from_pretrained(self._path, local_files_only=True)
            text: Any = self.hf_config.get_text_config()
            self._dimensions = (int(text.num_hidden_layers), int(text.hidden_size))
            self._heads = int(text.num_attention_heads)
            self._hidden = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
            if not re.search(r"expert\w*':", str(text.to_dict())):  # a mixture's keys, wherever they are
                width = getattr(text, "head_dim", None) or self._dimensions[1] // self._heads
                self.attention = self._dimensions[0] * self._heads * int(width)
            self.vocab = int(text.vocab_size)
            self.context = int(getattr(text, "max_position_embeddings", None) or sequence)
            has_tokenizer = any(path.glob("tokenizer*")) or (path / "vocab.json").is_file()
            self.tokenizer: Any = (
                AutoTokenizer.from_pretrained(self._path, local_files_only=True) if has_tokenizer else None
            )
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise _unreadable(directory, error) from error
        if type(self.hf_config) not in AutoModelForCausalLM._model_mapping:
            raise DataError(
                f"the model in {directory!r} is no causal language model of transformers",
                expected="one that AutoModelForCausalLM has; code in the directory is never executed",
                found=", ".join(getattr(self.hf_config, "architectures", None) or [])
                or type(self.hf_config).__name__,
                cure="name the directory of a causal language model; in Python, `infinity.wrap(model, "
                "optimizer, config)` trains others, too",
            )
        if self.tokenizer is None and self.vocab < 256:
            raise DataError(
                f"the model in {directory!r} has no tokenizer, and too few tokens for bytes",
                expected="a tokenizer, or a vocabulary of at least 256",
                found=f"a vocabulary of {self.vocab}",
                cure="put the model's tokenizer beside it",
            )
        _check_context(self.context, sequence)
        self.name = f"{self.hf_config.model_type} from {directory}"

    @functools.cached_property
    def _structure(self) -> nn.Module:
        import torch

        from infinity.api.hugging_face import dtype_keyword

        [AutoModelForCausalLM] = optional("transformers", "hf", "AutoModelForCausalLM")
        try:
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(
                    self.hf_config, **{dtype_keyword(): self._own_dtype}
                )
        except Exception as error:  # whatever a configuration that is not what it should be makes of it
            if isinstance(error, ImportError):
                raise broken("transformers", error) from error
            raise _unreadable(self._path, error) from error
        return model

    def planned(self, config: Config) -> Model:
        """See `Workload`. The model's structure is made on the meta device, without values."""
        return planned_from(self._structure, config)

    def scratch(self) -> list[int]:
        """See `Workload`. In the dtype of the checkpoint, or fp32 where it does not say."""
        return [p.numel() * self._own_dtype.itemsize for p in self._structure.parameters()]

    @property
    def _own_dtype(self) -> torch.dtype:
        import torch

        return getattr(self.hf_config.get_text_config(), "dtype", None) or torch.float32

    def dtype(self, config: Config) -> str:
        """See `Workload`."""
        return dtype_name(config.dtype or self._own_dtype)

    def activations(self, config: Config, batch: int, sequence: int, recompute: bool) -> Activations:
        """See `Workload`; an estimate: the built-in GPT's of the same dimensions."""
        layers, width = self._dimensions
        heads = self._heads if width % (2 * self._heads) == 0 else 1
        shape = GPTShape(layers=layers, width=width, heads=heads, vocab=self.vocab, context=self.context)
        itemsize = (config.compute_dtype or self._own_dtype).itemsize
        base = activations_of(shape, batch, sequence, itemsize, recompute=recompute)
        # The MLP's own width, with the three tensors of a gated one.
        wider = (4 * self._hidden - 2 * shape.hidden) * batch * sequence * itemsize
        extra = max(0, wider) * (1 if recompute else layers)
        return base._replace(saved=base.saved + extra, peak=base.peak + extra)

    def build(self, recompute: bool) -> nn.Module:
        """See `Workload`. Only safetensors are read: nothing is ever unpickled."""
        import transformers

        from infinity.api.hugging_face import dtype_keyword

        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self._path, local_files_only=True, use_safetensors=True, **{dtype_keyword(): "auto"}
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"the weights in {self._path!r} cannot be read",
                expected="*.safetensors that fit config.json",
                found=f"{type(error).__name__}: {error}",
                cure="save the model with save_pretrained(safe_serialization=True)",
            ) from error
        model.config.use_cache = False
        if recompute:
            _recompute(model)
        model.train()
        return model  # type: ignore[no-any-return]


def _unreadable(directory: str, error: Exception) -> DataError:
    return DataError(
        f"the model in {directory!r} cannot be read",
        expected="the configuration (and tokenizer) of a causal language model",
        found=f"{type(error).__name__}: {error}",
        cure="check the directory, or update transformers",
    )


def _recompute(model: Any) -> None:
    arguments = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the newer name
        model.activation_checkpointing_enable(arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def workload_of(run: RunSettings) -> Workload:
    """Return the workload that a run names.

    Raises:
        ConfigError: its dimensions cannot be used.
        DataError: the Hugging Face directory cannot be read.
    """
    if run.model.init_from is not None:
        return HuggingFace(run.model.init_from, run.train.sequence)
    return BuiltIn(run.model, run.train.sequence)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return optimizer groups of the trainable parameters: matrices decay, vectors do not."""
    groups: list[list[nn.Parameter]] = [[], []]
    for param in model.parameters():
        if param.requires_grad:
            groups[_group(param.ndim)].append(param)
    decays = (weight_decay, 0.0)
    return [{"params": g, "weight_decay": d} for g, d in zip(groups, decays, strict=True) if g]


def planned_from(model: nn.Module, config: Config) -> Model:
    """Return what planning needs to know of a model; one on the meta device will do."""
    from infinity.params.discover import discover, param_specs

    members, scopes = discover(model, config.units)
    groups = {id(p): _group(p.ndim) for p in model.parameters()}
    specs = param_specs(model, members, groups, config.compute_dtype)
    units = [(m.name, s) for m, s in zip(members, specs, strict=True)]
    uses = Counter(unit for scope in scopes for unit in scope.units)
    again = [unit for unit, count in uses.items() for _ in range(count - 1)]
    return Model(units, [s.working_set for s in scopes], again=again)


def _group(ndim: int) -> int:
    return 0 if ndim >= 2 else 1


def _check_context(context: int, sequence: int) -> None:
    if sequence > context:
        raise ConfigError(
            "the sequence is longer than the model can take",
            expected=f"at most {context} tokens",
            found=sequence,
            cure=f"--sequence {context}, or (built-in model) --context {sequence}",
        )


def generate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    prompt: torch.Tensor,
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `count` tokens that follow `prompt`; fewer where the logits are no finite numbers any more.

    Args:
        logits: (1, sequence) tokens → (1, sequence, vocab). Called once per token: there is no
            cache of keys and values, since with offloaded parameters the load is what counts.
        prompt: 1-d, int64, at least one token.
        context: the most tokens that are looked back to.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        with torch.no_grad():
            last = logits(tokens[None, -context:])[0, -1].float().cpu() / temperature
        best = torch.topk(last, min(top_k, last.numel()))
        shares = torch.softmax(best.values, -1)
        if not shares.isfinite().all():  # a run that has diverged
            return
        choice = torch.multinomial(shares, 1, generator=generator)
        token = best.indices[choice]
        tokens = torch.cat((tokens, token.to(tokens.device)))
        yield int(token)
