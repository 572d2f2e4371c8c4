"""What `train` and `plan` are told, by options, by a YAML file, or both.

A file has the sections ``model``, ``data``, ``train`` and ``engine``; its names are those of the
options with underscores, and an option on the command line wins. The defaults of the first three
sections are the fields of the dataclasses here, those of ``engine`` are `Config`'s.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import click

from infinity.core.config import Config, Directories, Size, Tiers, unknown_setting
from infinity.core.errors import ConfigError, InfinityError
from infinity.core.paths import local_path
from infinity.core.sizes import format_size
from infinity.core.yaml_file import read_yaml
from infinity.planning.parts import ADAM

from .options import FIGURE, is_figure

#: The share of the text, at its end, that is kept for validation.
VALIDATION: Final = 0.05
#: The dtype of a preset, unless a run says otherwise.
PRESET_DTYPE: Final = "bf16"
Schedule: TypeAlias = Literal["constant", "cosine", "wsd"]
OptimizerName: TypeAlias = Literal["adamw", "lion", "sgd", "adagrad", "muon"]
#: What each keeps of every element, by name; Muon, of what it leaves to AdamW.
MOMENTS: Final[Mapping[OptimizerName, Sequence[str]]] = {
    "adamw": ADAM,
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
    "adagrad": ("sum",),
    "muon": ADAM,
}
F = TypeVar("F", bound=Callable[..., Any])


def _setting(
    default: Any, text: str, flag: str | None = None, *, least: int | None = None, below: float = math.inf
) -> Any:
    """A field, with what `--help` says of it, its option where name and type do not say it, and its range."""
    return field(default=default, metadata={"help": text, "flag": flag, "range": (least, below)})


def _check_ranges(section: str, settings: Any) -> None:
    """Raise `ConfigError` where a value is out of the range of its field."""
    for each in dataclasses.fields(settings):
        value, (least, below) = getattr(settings, each.name), each.metadata["range"]
        if value is not None and least is not None and not least <= value < below:
            share = f"a share, from {least} to below {below}"
            expected = share if below < math.inf else f"at least {least}, and finite"
            _wrong(section, each.name, expected, value)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model of transformers: a preset with dimensions of one's own, or a Hugging Face directory."""

    preset: str = _setting(
        "30m",
        "A Llama of 10m, 30m, 125m, 350m, 760m, 1.5b, 2.7b, 6.7b or 13b parameters, or a published model, "
        "such as llama-3.1-8b, qwen2.5-72b, mixtral-8x7b (another name lists them all).",
    )
    layers: int | None = _setting(None, "Number of blocks.")
    width: int | None = _setting(None, "Width of the residual stream.")
    heads: int | None = _setting(None, "Attention heads.")
    vocab: int | None = _setting(None, "Size of the vocabulary (bytes need 256).")
    context: int | None = _setting(None, "Longest sequence that the model can take.")
    tied: bool | None = _setting(None, "Use the embedding as the head.", "--tied/--untied")
    kv_heads: int | None = _setting(None, "Heads of keys and values; default: as in the preset.")
    inner: int | None = _setting(None, "Width of the MLP; default: as in the preset, or 8/3 of --width.")
    experts: int | None = _setting(
        None, "MLPs in each block, of which a token passes two, as in Mixtral; 0: no mixture."
    )
    init_from: str | None = _setting(None, "A Hugging Face directory (config, safetensors, tokenizer).")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which text."""

    path: str | None = _setting(
        None, "A file, directory or glob; default: Python's standard library.", "--data"
    )
    validation: float = _setting(
        VALIDATION, "Share of the text that is kept for validation.", least=0, below=1
    )
    eval_data: str | None = _setting(
        None, "A held-out text to evaluate on; default: what --validation keeps."
    )
    tokenizer: str | None = _setting(
        None, "A directory with a tokenizer; default: that of --init-from, or else tokens are bytes."
    )

    def __post_init__(self) -> None:
        _check_ranges("data", self)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How to train. Sizes in tokens and sequences; `warmup` None: a tenth of the steps, at most 100."""

    steps: int = _setting(100, "Optimizer steps.", least=1)
    batch: int = _setting(8, "Sequences in one forward.", least=1)
    sequence: int = _setting(256, "Tokens in a sequence.", least=1)
    accumulation: int = _setting(1, "Forwards and backwards per step.", least=1)
    optimizer: OptimizerName = _setting(
        "adamw", "What updates the parameters; muon: AdamW what is no inner matrix."
    )
    lr: float = _setting(1e-3, "Highest learning rate.", least=0)
    schedule: Schedule = _setting(
        "cosine", "How the rate goes on behind the warmup; wsd: stable, then it decays."
    )
    warmup: int | None = _setting(
        None, "Steps in which the rate rises; default: a tenth, at most 100.", least=0
    )
    decay_fraction: float = _setting(0.1, "wsd: share of the steps, at the end, in which the rate falls.")
    min_lr: float = _setting(0.1, "What cosine and wsd end at, as a share of --lr.", least=0)
    weight_decay: float = _setting(0.1, "Of matrices; vectors do not decay.", least=0)
    beta1: float = _setting(0.9, "Of AdamW and Lion; the momentum of SGD.", least=0, below=1)
    beta2: float = _setting(0.95, "Of AdamW and Lion.", least=0, below=1)
    seed: int = _setting(0, "Of the weights and of the batches.", least=0)
    recompute: bool = _setting(False, "Compute blocks again in the backward.")
    sample_tokens: int = _setting(160, "Tokens of text to generate at the end.", least=0)
    prompt: str | None = _setting(None, "What that text begins with.")
    eval_every: int | None = _setting(None, "Steps between evaluations; default: one at the end.", least=1)
    eval_batches: int = _setting(4, "Batches of an evaluation, the same ones each time.", least=1)
    log_every: int = _setting(1, "Steps between lines, where there is no terminal.", least=1)
    json_log: str | None = _setting(None, "A file that gets one JSON object per step.")
    peak_tflops: float | None = _setting(
        None, "TFLOP/s of one device by its data sheet, for mfu in the log; known of A100, H100 and H200."
    )
    trace: str | None = _setting(None, "Record where time goes, into this file, for ui.perfetto.dev.")
    output: str | None = _setting(
        None,
        "A directory for checkpoints; default: a new one in runs/, in the first directory of --nvme or here.",
    )
    save: bool = _setting(True, "Keep what is trained, at least at the end.")
    save_every: int | None = _setting(None, "Steps between checkpoints; default: one at the end.", least=1)
    save_minutes: float | None = _setting(
        None, "Minutes between checkpoints; SIGUSR1 asks for one, too.", least=0
    )
    keep_last: int = _setting(2, "Checkpoints that are kept; older ones are removed.", least=1)
    resume: bool = _setting(False, "Go on from the newest checkpoint in --output, bit for bit.")
    overwrite: bool = _setting(False, "Replace these two files if an earlier run wrote them.")

    def __post_init__(self) -> None:
        _check_ranges("train", self)
        try:
            (self.prompt or "").encode()
        except UnicodeEncodeError:
            _wrong("train", "prompt", "text in UTF-8", self.prompt)
        if not self.seed < 1 << 64:  # what torch's generators take
            _wrong("train", "seed", "at least 0, and below 2^64", self.seed)
        if self.output == "":
            _wrong("train", "output", "a directory", self.output)
        if self.output is not None:
            local_path(self.output, "--output", "runs/1")
        for name in ("output", "save_every", "save_minutes", "resume"):
            if getattr(self, name) and not self.save:
                _wrong("train", name, "a run that saves (without --no-save)", getattr(self, name))
        if self.schedule not in get_args(Schedule):
            _unknown("schedule", self.schedule, get_args(Schedule))
        if self.optimizer not in MOMENTS:
            _unknown("optimizer", self.optimizer, tuple(MOMENTS))
        if not 0 <= self.decay_fraction <= 1:
            _wrong("train", "decay_fraction", "a share of the steps, from 0 to 1", self.decay_fraction)
        if self.peak_tflops is not None and not is_figure(self.peak_tflops):
            _wrong("train", "peak_tflops", FIGURE, self.peak_tflops)

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
        begin, last = self.warmup_steps, self.steps - 1
        if step < begin:
            return (step + 1) / begin
        if self.schedule == "wsd":
            if not self.decay_fraction:
                return 1.0
            # The last step with the whole rate; a long decay is shortened to what the warm-up leaves.
            begin = max(begin, self.steps - max(1, round(self.decay_fraction * self.steps))) - 1
        if self.schedule == "constant" or step <= begin < last:
            return 1.0
        done = min(1.0, (step - begin) / (last - begin)) if begin < last else 1.0
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
        """Return the engine's configuration. A preset is in bf16, unless the run says otherwise.

        Raises:
            ConfigError: a setting is unknown, or contradicts another.
        """
        engine = {**self.engine, **changes}
        if self.model.init_from is None and engine.get("dtype") is None:
            engine["dtype"] = PRESET_DTYPE
        if engine.get("update") == "backward" and engine.get("accumulation") is None:
            engine["accumulation"] = self.train.accumulation
        return Config(**engine)

    def as_dict(self) -> dict[str, Any]:
        """Return the run as a YAML file would say it."""
        return {
            **{name: dataclasses.asdict(getattr(self, name)) for name in ("model", "data", "train")},
            "engine": dict(self.engine),
        }


# ---- options ----


def parse_placement(value: Any) -> Any:
    """Return ``"host:0.3,nvme:0.7"`` as a mapping; anything else as it is (`Config` checks it).

    Raises:
        ConfigError: a share is not a number.
    """
    if not isinstance(value, str) or ":" not in value:
        return value
    try:
        shares = [part.partition(":") for part in value.split(",")]
        return {tier.strip(): float(share) for tier, _, share in shares}
    except ValueError as error:
        raise ConfigError(
            f"the placement {value!r} cannot be read",
            expected="a tier, or shares that sum to 1: host:0.3,nvme:0.7",
            found=str(error),
            cure="host:0.3,nvme:0.7",
        ) from None


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)  # YAML reads 3e-4 as text


class Kind(NamedTuple):
    """What the type of a field means to its option, and to a YAML file."""

    read: Callable[[Any], Any]  # raises ValueError or TypeError for a value that is none
    expected: str = ""
    type: Any = click.STRING
    metavar: str | None = None
    note: str = ""  # what `--help` adds
    many: bool = False  # whether the option may be given again


_LIST: Final = Kind(lambda v: [v] if isinstance(v, str) else v, note=" May be given again.", many=True)
#: By the type of a field; any may be None.
_KINDS: Final[dict[Any, Kind]] = {
    int | None: Kind(partial(_exactly, int), "an integer", click.INT),
    float | None: Kind(_number, "a number", click.FLOAT),
    bool | None: Kind(partial(_exactly, bool), "true or false", None),
    str | None: Kind(str),
    Size | None: Kind(lambda v: v, metavar="SIZE"),
    Tiers | None: Kind(
        parse_placement,
        metavar="PLACE",
        note=" One of device, host, nvme; or shares such as host:0.3,nvme:0.7.",
    ),
    Directories | None: _LIST._replace(metavar="DIR"),
    Sequence[str] | None: _LIST._replace(metavar="NAME"),
}


def _kind_of(hint: Any) -> Kind:
    for part in get_args(hint | None):
        if get_origin(part) is Literal:
            return _KINDS[str | None]._replace(metavar="|".join(get_args(part)))
    return _KINDS[hint | None]


class Option(NamedTuple):
    """One setting: its section and name, its kind, its option on the command line, and what `--help` says."""

    section: str
    name: str
    kind: Kind
    flags: str
    help: str

    @property
    def variable(self) -> str:
        """The parameter of a command."""
        return "data_path" if self.flags == "--data" else self.name


_SECTIONS: Final[dict[str, Any]] = {
    "model": ModelSettings,
    "data": DataSettings,
    "train": TrainSettings,
    "engine": Config,
}
#: Settings of the engine that are no options: a file can have them. `train` has its own accumulation.
_NO_OPTIONS: Final = ("accumulation", "placements")
#: Of the engine's settings, what commands call or say otherwise.
_SAID: Final[dict[str, dict[str, str]]] = {
    "units": {"flag": "--unit"},
    "dtype": {"default": f"of a preset {PRESET_DTYPE}, else that of the files"},
}


def _described() -> dict[str, str]:
    """Return the first sentence of what `Config` says of each setting, and the one that gives its default."""
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(Config.__doc__ or ""), re.M)
    described = {}
    for name, text in found:
        first, *others = re.split(r"(?<=\.)\s+", text)
        defaults = (each for each in others if each.startswith(("None:", "Default:")))
        described[name] = _plain(" ".join([first, *defaults]))
    return described


def _plain(text: str) -> str:
    plain = re.sub(r"[`\"]", "", text).replace("is None", "is unset")
    words = plain.replace("; None:", "; default:").replace("None:", "Default:").split()
    if text.split()[0].rstrip(",:").isalpha():  # neither "cpu" nor fp16
        words[0] = words[0][0].upper() + words[0][1:]
    return " ".join(words)


def _options(section: str, described: Mapping[str, str]) -> Iterator[Option]:
    hints = get_type_hints(_SECTIONS[section], localns={"torch": SimpleNamespace(dtype=str)})
    for each in dataclasses.fields(_SECTIONS[section]):
        if section == "engine" and each.name in _NO_OPTIONS:
            continue
        kind, name = _kind_of(hints[each.name]), each.name.replace("_", "-")
        said = _SAID.get(each.name, {}) if section == "engine" else each.metadata
        flags = f"--{name}/--no-{name}" if kind.type is None else f"--{name}"
        default: Any = said.get("default", each.default)
        if kind.metavar == "SIZE" and default is not None:
            default = format_size(default)
        shown = "" if default in (None, ()) or kind.type is None else f" [{default}]"
        text = said.get("help") or described.get(each.name, "")
        yield Option(section, each.name, kind, said.get("flag") or flags, text + kind.note + shown)


OPTIONS: Final = tuple(option for section in _SECTIONS for option in _options(section, _described()))


# ---- errors in the words of the command line: ``--nvme DIR`` where a program writes ``nvme="..."`` ----

_OF_ENGINE: Final = {option.name: option for option in OPTIONS if option.section == "engine"}
_NAMES: Final = "|".join(sorted(_OF_ENGINE, key=len, reverse=True))
_VALUE: Final = r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[\w.+-]+|"
#: ``name=value``; ``the setting name``; or a name that is no English word.
_SETTING: Final = re.compile(
    rf"(?<![\w./-])(?:(?:the )?setting (?P<called>{_NAMES})\b|(?P<name>{_NAMES})=(?P<value>{_VALUE})"
    rf"|(?P<alone>{'|'.join(name for name in _OF_ENGINE if '_' in name)})\b(?!=))"
)


def in_options(text: str) -> str:
    """Return `text` with each setting of the engine named as an option."""
    return _SETTING.sub(_as_option, text)


def say_in_options(error: InfinityError) -> None:
    """Have an error name settings as options."""
    if not getattr(error, "in_options", True):
        return
    for part in ("what", "expected", "found", "cure"):
        text = getattr(error, part)
        if isinstance(text, str):
            setattr(error, part, in_options(text))


def _as_option(match: re.Match[str]) -> str:
    option = _OF_ENGINE[match["called"] or match["name"] or match["alone"]]
    value, (flag, _, no) = match["value"], option.flags.partition("/")
    if no and (not value or value in ("True", "False")):
        return no if value == "False" else flag
    if value == "None":
        return f"no {option.flags}"
    if option.kind.metavar == "DIR" and value is not None:
        return f"{option.flags} DIR"
    return f"{option.flags} {_as_argument(option, value)}" if value else option.flags


def _as_argument(option: Option, value: str) -> str:
    if value.startswith("{"):
        return re.sub(r"[\s\"'{}]", "", value)
    if option.kind.metavar == "NAME":
        return re.sub(r"[\s\"'\[\]]", "", value).strip(".") or "NAME"
    return value.strip("\"'")


def setting_options(options: Sequence[Option]) -> Callable[[F], F]:
    """Return what decorates a command with `options`, all of them unset by default."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            kind = option.kind
            function = click.option(
                option.flags,
                option.variable,
                type=kind.type,
                metavar=kind.metavar,
                multiple=kind.many,
                default=None,
                help=in_options(option.help),
            )(function)
        return function

    return decorate


def run_options(function: F, options: Sequence[Option] = OPTIONS) -> F:
    """Decorate a command with `--config` and `options`."""
    of_file = click.option(
        "--config", "config_file", metavar="FILE", help="A YAML file; options win over it."
    )
    decorated: F = of_file(setting_options(options)(function))
    return decorated


class RunCommand(click.Command):
    """A command whose `--help` shows the options of a run section by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of the sections."""
        section = {o.variable: o.section for o in OPTIONS}
        rows: dict[str, list[tuple[str, str]]] = {name: [] for name in (*_SECTIONS, "options")}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                rows[section.get(param.name or "", "options")].append(record)
        for name, records in rows.items():
            if records:
                with formatter.section(name.capitalize()):
                    formatter.write_dl(records)


# ---- what is told ----

Values: TypeAlias = dict[str, dict[str, Any]]


def read_values(
    config_file: str | None, given: Mapping[str, Any], beneath: Mapping[str, Mapping[str, Any]] | None = None
) -> Values:
    """Return the settings that a file and options name, by section.

    Args:
        given: the parameters of a command that `run_options` decorated.
        beneath: settings that the file and options win over.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or wrong.
    """
    values: Values = {section: dict((beneath or {}).get(section, {})) for section in _SECTIONS}
    for section, settings in ({} if config_file is None else _load(config_file)).items():
        values[section].update(settings)
    for option in OPTIONS:
        settings, value = values[option.section], given.get(option.variable)
        if value not in (None, ()):
            settings[option.name] = list(value) if isinstance(value, tuple) else value
        value = settings.get(option.name)
        if value is not None:
            try:
                settings[option.name] = option.kind.read(value)
            except ConfigError:
                raise
            except (TypeError, ValueError, OverflowError):
                _wrong(option.section, option.name, option.kind.expected, value)
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


def _names_in(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(_SECTIONS[section]) if field.init]


def _load(path: str) -> Values:
    expected = "a YAML file with the sections model, data, train and engine"
    content = read_yaml(path, expected=expected, cure="name a readable YAML file") or {}
    result: Values = {section: {} for section in _SECTIONS}
    for name, section in content.items() if isinstance(content, dict) else [(type(content).__name__, {})]:
        if name not in _SECTIONS:
            of = next((each for each in _SECTIONS if name in _names_in(each)), None)
            if of is None:
                _unknown(f"section of {path!r}", str(name), _SECTIONS)
            raise ConfigError(
                f"a setting outside of the sections of {path!r}",
                expected=f"the sections {', '.join(_SECTIONS)}, with settings below them",
                found=f"'{of}.{name}' beside them",
                cure=f"move that line below a line `{of}:`, and indent it",
            )
        if not isinstance(section or {}, dict):
            _wrong(path, name, "lines of `name: value`", section)
        result[name] = dict(section or {})
        for key in result[name]:
            if key not in _names_in(name):
                known = [f"{name}.{each}" for each in _names_in(name)]
                raise unknown_setting(f"{name}.{key}", known, f"in {path!r}")
    return result


def _wrong(section: str, name: str, expected: str, found: object) -> NoReturn:
    flags = [o.flags.split("/")[0] for o in OPTIONS if (o.section, o.name) == (section, name)]
    raise ConfigError(
        f"{name} in {section!r} cannot be used",
        expected=expected,
        found=repr(found),
        cure=f"change {flags[0] if flags else name}",
    )


def _unknown(what: str, found: str, known: Iterable[str]) -> NoReturn:
    close = difflib.get_close_matches(found, list(known), n=1, cutoff=0.5)
    raise ConfigError(
        f"unknown {what}",
        expected=", ".join(known),
        found=repr(found),
        cure=f"did you mean {close[0]!r}?" if close else "remove it",
    )
