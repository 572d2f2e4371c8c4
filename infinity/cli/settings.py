"""What `train` and `plan` are told, by options, by a YAML file, or both.

A file has the sections ``model``, ``data``, ``train`` and ``engine``; its names are those of the
options with underscores, and an option on the command line wins. The defaults of the first three
sections are the fields of the dataclasses here, those of ``engine`` are `Config`'s.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import click

from infinity.core.config import Config, unknown_setting
from infinity.core.errors import ConfigError
from infinity.core.sizes import format_size
from infinity.core.yaml_file import read_yaml

from .options import FIGURE, is_figure

#: The share of the text, at its end, that is kept for validation.
VALIDATION: Final = 0.05
#: The dtype of a built-in model, unless a run says otherwise.
BUILT_IN_DTYPE: Final = "bf16"
SCHEDULES = ("constant", "cosine", "wsd")
F = TypeVar("F", bound=Callable[..., Any])


def _setting(default: Any, text: str, flag: str | None = None) -> Any:
    """A field with what `--help` says of it, and its option where that is not the name with dashes."""
    return field(default=default, metadata={"option": (text, flag)})


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model: a preset with dimensions of one's own, or a Hugging Face directory."""

    preset: str = _setting(
        "30m",
        "10m, 30m, 125m, 350m, 760m, 1.5b, 2.7b, 6.7b or 13b parameters, or a published shape such as "
        "llama-3.1-8b, qwen2.5-72b, mixtral-8x7b (another name lists them all).",
    )
    layers: int | None = _setting(None, "Number of blocks.")
    width: int | None = _setting(None, "Width of the residual stream.")
    heads: int | None = _setting(None, "Attention heads.")
    vocab: int | None = _setting(None, "Size of the vocabulary (bytes need 256).")
    context: int | None = _setting(None, "Longest sequence that the model can take.")
    mlp: str | None = _setting(None, "gelu or swiglu.")
    positions: str | None = _setting(None, "rotary or learned.")
    tied: bool | None = _setting(None, "Use the embedding as the head.", "--tied/--untied")
    kv_heads: int | None = _setting(None, "Heads of keys and values; default: as many as heads.")
    inner: int | None = _setting(None, "Width of the MLP; default: four times the width, SwiGLU 8/3 times.")
    experts: int | None = _setting(None, "MLPs in each block, of which a token passes two; 0: no mixture.")
    init_from: str | None = _setting(None, "A Hugging Face directory (config, safetensors, tokenizer).")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which text."""

    path: str | None = _setting(
        None, "A file, directory or glob; default: Python's standard library.", "--data"
    )
    validation: float = _setting(VALIDATION, "Share of the text that is kept for validation.")
    eval_data: str | None = _setting(
        None, "A held-out text to evaluate on; default: what --validation keeps."
    )

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            _wrong("data", "validation", "a share of the text, from 0 to below 1", self.validation)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How to train. Sizes in tokens and sequences; `warmup` None: a tenth of the steps, at most 100."""

    steps: int = _setting(100, "Optimizer steps.")
    batch: int = _setting(8, "Sequences in one forward.")
    sequence: int = _setting(256, "Tokens in a sequence.")
    accumulation: int = _setting(1, "Forwards and backwards per step.")
    lr: float = _setting(1e-3, "Highest learning rate.")
    schedule: str = _setting("cosine", "constant, cosine or wsd (warmup-stable-decay).")
    warmup: int | None = _setting(None, "Steps in which the rate rises; default: a tenth, at most 100.")
    decay_fraction: float = _setting(0.1, "wsd: share of the steps, at the end, in which the rate falls.")
    min_lr: float = _setting(0.1, "What cosine and wsd end at, as a share of --lr.")
    weight_decay: float = _setting(0.1, "Of matrices; vectors do not decay.")
    beta1: float = _setting(0.9, "Of AdamW.")
    beta2: float = _setting(0.95, "Of AdamW.")
    seed: int = _setting(0, "Of the weights and of the batches.")
    recompute: bool = _setting(False, "Compute blocks again in the backward.", "--recompute/--no-recompute")
    sample_tokens: int = _setting(160, "Tokens of text to generate at the end.")
    prompt: str | None = _setting(None, "What that text begins with.")
    eval_every: int | None = _setting(None, "Steps between evaluations; default: one at the end.")
    eval_batches: int = _setting(4, "Batches of an evaluation, the same ones each time.")
    log_every: int = _setting(1, "Steps between lines, where there is no terminal.")
    json_log: str | None = _setting(None, "A file that gets one JSON object per step.")
    peak_tflops: float | None = _setting(
        None, "TFLOP/s of one device by its data sheet, for mfu in the log; known of A100, H100 and H200."
    )
    trace: str | None = _setting(None, "Record where time goes, into this file (see `infinity trace`).")
    output: str | None = _setting(
        None,
        "A directory for checkpoints; default: a new one in runs/, in the first directory of --nvme or here.",
    )
    save: bool = _setting(True, "Keep what is trained, at least at the end.", "--save/--no-save")
    save_every: int | None = _setting(None, "Steps between checkpoints; default: one at the end.")
    save_minutes: float | None = _setting(None, "Minutes between checkpoints; SIGUSR1 asks for one, too.")
    keep_last: int = _setting(2, "Checkpoints that are kept; older ones are removed.")
    resume: bool = _setting(
        False, "Go on from the newest checkpoint in --output, bit for bit.", "--resume/--no-resume"
    )
    overwrite: bool = _setting(
        False, "Replace these two files if an earlier run wrote them.", "--overwrite/--no-overwrite"
    )

    def __post_init__(self) -> None:
        try:
            (self.prompt or "").encode()
        except UnicodeEncodeError:
            _wrong("train", "prompt", "text in UTF-8", self.prompt)
        if not self.seed < 1 << 64:  # what torch's generators take
            _wrong("train", "seed", "at least 0, and below 2^64", self.seed)
        if self.output == "":
            _wrong("train", "output", "a directory", self.output)
        for name, told in {
            "output": self.output,
            "save_every": self.save_every,
            "save_minutes": self.save_minutes,
            "resume": self.resume,
        }.items():
            if told and not self.save:
                _wrong("train", name, "a run that saves (without --no-save)", told)
        least = {"steps": 1, "batch": 1, "sequence": 1, "accumulation": 1, "sample_tokens": 0, "log_every": 1}
        least |= {"save_every": 1, "save_minutes": 0, "keep_last": 1, "eval_every": 1, "eval_batches": 1}
        for name, low in {**least, "seed": 0, "lr": 0, "weight_decay": 0, "warmup": 0, "min_lr": 0}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                _wrong("train", name, f"at least {low}, and finite", value)
        if self.schedule not in SCHEDULES:
            _unknown("schedule", self.schedule, SCHEDULES)
        if not 0 <= self.decay_fraction <= 1:
            _wrong("train", "decay_fraction", "a share of the steps, from 0 to 1", self.decay_fraction)
        if self.peak_tflops is not None and not is_figure(self.peak_tflops):
            _wrong("train", "peak_tflops", FIGURE, self.peak_tflops)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                _wrong("train", name, "a number from 0 to below 1", getattr(self, name))

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch * self.sequence * self.accumulation

    def lr_factor(self, step: int) -> float:
        """Return what the learning rate is multiplied with in step `step` (from 0)."""
        begin = self.warmup_steps
        if step < begin:
            return (step + 1) / begin
        if self.schedule == "wsd":
            begin = max(begin, self.steps - round(self.decay_fraction * self.steps))
        if self.schedule == "constant" or step < begin:
            return 1.0
        done = min(1.0, (step - begin) / max(1, self.steps - begin))
        left = 1 - done if self.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * done))
        return self.min_lr + (1 - self.min_lr) * left


@dataclass(frozen=True)
class RunSettings:
    """Everything that a run is told. `engine` holds what is not left to `Config`'s defaults."""

    model: ModelSettings
    data: DataSettings
    train: TrainSettings
    engine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def default(cls) -> RunSettings:
        """Return the run that nothing is said of."""
        return cls(ModelSettings(), DataSettings(), TrainSettings())

    def config(self, **changes: Any) -> Config:
        """Return the engine's configuration. A built-in model is in bf16, unless the run says otherwise.

        Raises:
            ConfigError: a setting is unknown, or contradicts another.
        """
        engine = {**self.engine, **changes}
        if self.model.init_from is None and engine.get("dtype") is None:
            engine["dtype"] = BUILT_IN_DTYPE
        if engine.get("update") == "backward" and engine.get("accumulation") is None:
            engine["accumulation"] = self.train.accumulation
        return Config(**engine)

    def as_dict(self) -> dict[str, Any]:
        """Return the run as a YAML file would say it."""
        return {
            **{name: dataclasses.asdict(getattr(self, name)) for name in ("model", "data", "train")},
            "engine": dict(self.engine),
        }


class Option(NamedTuple):
    """One setting: its section and name, its kind, and what `--help` says."""

    section: str
    name: str
    kind: str  # int, float, str, flag, size, place, dirs or names
    help: str
    flag: str | None = None  # where it is not the name with dashes

    @property
    def flags(self) -> str:
        """The option on the command line."""
        return self.flag or "--" + self.name.replace("_", "-")


_PLACE = "device, host, nvme, or shares such as host:0.3,nvme:0.7."
_ENGINE: Final = (
    Option("engine", "device", "str", "cpu, cuda or cuda:N."),
    Option(
        "engine", "dtype", "str", "fp32, bf16 or fp16. Without it bf16, of --init-from the checkpoint's own."
    ),
    Option("engine", "parameters", "place", f"Where parameters are: {_PLACE}"),
    Option("engine", "optimizer_state", "place", "Where fp32 masters and moments are."),
    Option("engine", "gradients", "place", "Where gradients wait for the update."),
    Option("engine", "activations", "str", "Where inputs of checkpointed blocks wait: device or host."),
    Option("engine", "activation_memory", "size", "What these may take of host memory."),
    Option("engine", "nvme", "dirs", "A directory on an NVMe drive; may be given again.", "--nvme"),
    Option("engine", "device_memory", "size", "What the engine may place on the device."),
    Option("engine", "host_memory", "size", "What the engine may take of host memory."),
    Option("engine", "prefetch_memory", "size", "What units loaded ahead may take on the device."),
    Option(
        "engine",
        "update",
        "str",
        "overlap, sync, delayed or backward (in the backward itself; nothing can be clipped).",
    ),
    Option("engine", "delay_warmup_steps", "int", "Steps before updates are delayed."),
    Option("engine", "read_ahead_memory", "size", "Host memory for state read during the backward."),
    Option("engine", "max_grad_norm", "float", "Clip the global norm of the gradients to this."),
    Option("engine", "units", "names", "A module or class that is a unit; may be given again.", "--unit"),
    Option(
        "engine",
        "chunk_elements",
        "int",
        "Elements of a chunk, a multiple of 65,536; default: 2 Mi with anything on NVMe, else 4 Mi.",
    ),
    Option("engine", "update_depth", "int", "Chunks in the update at once."),
    Option("engine", "block_bytes", "size", "Largest single I/O request."),
    Option("engine", "queue_depth", "int", "Requests in the kernel at once, per directory."),
    Option("engine", "aio_backend", "str", "auto, libaio, syscall, uring or threads."),
    Option("engine", "io_deadline", "float", "Seconds after which a transfer is an error."),
    Option("engine", "threads", "int", "Threads of the CPU's Adam."),
    Option("engine", "loss_scale", "float", "fp16: the first loss scale."),
    Option("engine", "zero_stage", "int", "What several ranks share out, 0 to 3 (ZeRO)."),
    Option("engine", "rank_timeout", "float", "Seconds that a rank waits for others."),
)
_SECTIONS: dict[str, Any] = {"model": ModelSettings, "data": DataSettings, "train": TrainSettings}
_KINDS: Final = {"int": "int", "float": "float", "str": "str", "bool": "flag"}
OPTIONS: tuple[Option, ...] = (
    *(
        Option(section, f.name, _KINDS[f.type.split()[0]], *f.metadata["option"])
        for section, kind in _SECTIONS.items()
        for f in dataclasses.fields(kind)
    ),
    *_ENGINE,
)


def run_options(function: F, options: Sequence[Option] = OPTIONS) -> F:
    """Decorate a command with `--config` and `options`, all of them unset by default."""
    types: dict[str, Any] = {"int": click.INT, "float": click.FLOAT, "flag": None}
    for option in reversed(options):
        text = option.help + _default_text(option)
        if option.kind == "flag":
            decorate = click.option(option.flags, _variable(option), default=None, help=text)
        else:
            decorate = click.option(
                option.flags,
                _variable(option),
                type=types.get(option.kind, click.STRING),
                metavar={"place": "PLACE", "dirs": "DIR", "size": "SIZE"}.get(option.kind),
                multiple=option.kind in ("dirs", "names"),
                default=None,
                help=text,
            )
        function = decorate(function)
    return click.option("--config", "config_file", metavar="FILE", help="A YAML file; options win over it.")(
        function
    )


class RunCommand(click.Command):
    """A command whose `--help` shows the options of a run section by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of the sections."""
        section = {_variable(o): o.section for o in OPTIONS}
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                rows.setdefault(section.get(param.name or "", "options"), []).append(record)
        for name in ("model", "data", "train", "engine", "options"):
            if name in rows:
                with formatter.section(name.capitalize()):
                    formatter.write_dl(rows[name])


Values: TypeAlias = dict[str, dict[str, Any]]


def read_values(config_file: str | None, given: Mapping[str, Any]) -> Values:
    """Return the settings that a file and options name, by section.

    Args:
        given: the parameters of a command that `run_options` decorated.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or wrong.
    """
    values: Values = {"model": {}, "data": {}, "train": {}, "engine": {}}
    if config_file is not None:
        for section, content in _load(config_file).items():
            values[section].update(content)
    for option in OPTIONS:
        value = given.get(_variable(option))
        if value is None or value == ():
            continue
        values[option.section][option.name] = list(value) if isinstance(value, tuple) else value
    for option in OPTIONS:
        settings = values[option.section]
        if option.name in settings:
            settings[option.name] = _coerce(option, settings[option.name])
    return values


def run_of(values: Values) -> RunSettings:
    """Return the run that settings describe.

    Raises:
        ConfigError: one of them is wrong, or they contradict each other.
    """
    run = RunSettings(
        ModelSettings(**values["model"]),
        DataSettings(**values["data"]),
        TrainSettings(**values["train"]),
        values["engine"],
    )
    if run.train.eval_every is not None and not run.data.validation and run.data.eval_data is None:
        raise ConfigError(
            "there is no text to evaluate on",
            expected="--eval-data, or a --validation above 0",
            found=f"--eval-every {run.train.eval_every} alone",
            cure="--eval-data FILE, or leave --eval-every out",
        )
    if run.model.init_from is not None:
        clash = [k for k, v in values["model"].items() if k != "init_from" and v is not None]
        if clash:
            raise ConfigError(
                "a model cannot be read from a directory and have dimensions of its own",
                expected="init_from alone",
                found=", ".join(["init_from", *clash]),
                cure=f"leave out --{clash[0].replace('_', '-')}, or --init-from",
            )
    return run


def parse_placement(value: Any) -> Any:
    """Return ``"host:0.3,nvme:0.7"`` as a mapping; anything else as it is (`Config` checks it).

    Raises:
        ConfigError: a share is not a number.
    """
    if not isinstance(value, str) or ":" not in value:
        return value
    shares: dict[str, float] = {}
    for part in value.split(","):
        tier, _, share = part.partition(":")
        try:
            shares[tier.strip()] = float(share)
        except ValueError:
            raise ConfigError(
                f"the placement {value!r} cannot be read",
                expected="a tier, or shares that sum to 1: host:0.3,nvme:0.7",
                found=repr(part),
                cure="host:0.3,nvme:0.7",
            ) from None
    return shares


def _load(path: str) -> dict[str, dict[str, Any]]:
    expected = "a YAML file with the sections model, data, train and engine"
    content = read_yaml(path, expected=expected, cure="name a readable YAML file") or {}
    known = [*_SECTIONS, "engine"]
    result: dict[str, dict[str, Any]] = {}
    for name, section in content.items() if isinstance(content, dict) else [(type(content).__name__, {})]:
        if name not in known:
            _check_no_setting(path, str(name))
            _unknown(f"section of {path!r}", str(name), known)
        if not isinstance(section or {}, dict):
            _wrong(path, name, "lines of `name: value`", section)
        result[name] = dict(section or {})
        fields = dataclasses.fields(_SECTIONS.get(name, Config))
        names = [f.name for f in fields if f.init]
        for key in result[name]:
            if key not in names:
                raise unknown_setting(f"{name}.{key}", [f"{name}.{each}" for each in names], f"in {path!r}")
    return result


def _check_no_setting(path: str, name: str) -> None:
    """Raise `ConfigError` where a setting stands beside the sections."""
    for section, kind in {**_SECTIONS, "engine": Config}.items():
        if name in [field.name for field in dataclasses.fields(kind) if field.init]:
            raise ConfigError(
                f"a setting outside of the sections of {path!r}",
                expected=f"the sections {', '.join([*_SECTIONS, 'engine'])}, with settings below them",
                found=f"'{section}.{name}' beside them",
                cure=f"move that line below a line `{section}:`, and indent it",
            )


def _coerce(option: Option, value: Any) -> Any:
    """Return a value from YAML or the command line as the kind that the option wants."""
    if value is None:
        return None
    if option.kind == "place":
        return parse_placement(value)
    if option.kind in ("dirs", "names"):
        return [value] if isinstance(value, str) else value
    wanted = {"int": "an integer", "float": "a number", "flag": "true or false", "str": "text"}
    right = True
    if option.kind == "int":
        right = isinstance(value, int) and not isinstance(value, bool)
    elif option.kind == "float":
        try:
            value = value if isinstance(value, bool) else float(value)  # YAML reads 3e-4 as text
        except (TypeError, ValueError, OverflowError):
            right = False
        right = right and not isinstance(value, bool)
    elif option.kind == "flag":
        right = isinstance(value, bool)
    elif option.kind == "str":
        value = str(value)
    if not right:
        _wrong(option.section, option.name, wanted[option.kind], value)
    return value


def _variable(option: Option) -> str:
    return "data_path" if option.section == "data" and option.name == "path" else option.name


def _default_text(option: Option) -> str:
    fields = {f.name: f.default for f in dataclasses.fields(_SECTIONS.get(option.section, Config))}
    default = fields[option.name]
    if default is None or default is dataclasses.MISSING:
        return ""
    if isinstance(default, bool):
        return ""
    return f" [{format_size(default) if option.kind == 'size' else default}]"


def _wrong(section: str, name: str, expected: str, found: object) -> None:
    flags = [o.flags.split("/")[0] for o in OPTIONS if (o.section, o.name) == (section, name)]
    raise ConfigError(
        f"{name} in {section!r} cannot be used",
        expected=expected,
        found=repr(found),
        cure=f"change {flags[0] if flags else name}",
    )


def _unknown(what: str, found: str, known: Any) -> None:
    close = difflib.get_close_matches(found, list(known), n=1, cutoff=0.5)
    raise ConfigError(
        f"unknown {what}",
        expected=", ".join(known),
        found=repr(found),
        cure=f"did you mean {close[0]!r}?" if close else "remove it",
    )
