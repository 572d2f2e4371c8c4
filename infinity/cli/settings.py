"""The settings of `infinity plan`, as options: a model, what trains it, and the fields of `Config`.

The defaults of the first two sections are those of the dataclasses here, the others are `Config`'s.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

from infinity.core.config import Config, Directories, Size, Tiers
from infinity.core.errors import ConfigError
from infinity.core.sizes import format_size
from infinity.planning.parts import ADAM

#: The dtype of a preset, unless an option names another.
PRESET_DTYPE: Final = "bf16"
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


def _setting(default: Any, text: str, flag: str | None = None, *, least: int | None = None) -> Any:
    """A field, with what `--help` says of it, its option where name and type do not say it, and its least
    value."""
    return field(default=default, metadata={"help": text, "flag": flag, "least": least})


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
    vocab: int | None = _setting(None, "Size of the vocabulary.")
    context: int | None = _setting(None, "Longest sequence that the model can take.")
    tied: bool | None = _setting(None, "Use the embedding as the head.", "--tied/--untied")
    kv_heads: int | None = _setting(None, "Heads of keys and values; default: as in the preset.")
    inner: int | None = _setting(None, "Width of the MLP; default: as in the preset, or 8/3 of --width.")
    experts: int | None = _setting(
        None, "MLPs in each block, of which a token passes two, as in Mixtral; 0: no mixture."
    )
    init_from: str | None = _setting(None, "A Hugging Face directory, instead of a preset.")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What trains the model. Sizes in tokens and sequences."""

    steps: int = _setting(100, "Optimizer steps, for the wear of drives.", least=1)
    batch: int = _setting(8, "Sequences in one forward.", least=1)
    sequence: int = _setting(256, "Tokens in a sequence.", least=1)
    accumulation: int = _setting(1, "Forwards and backwards per step.", least=1)
    optimizer: OptimizerName = _setting(
        "adamw", "What updates the parameters; muon: AdamW updates all but inner matrices."
    )
    recompute: bool = _setting(False, "Compute blocks again in the backward.")

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, least = getattr(self, each.name), each.metadata["least"]
            if least is not None and value < least:
                _wrong("train", each.name, f"at least {least}", value)
        if self.optimizer not in MOMENTS:
            _unknown("optimizer", self.optimizer, tuple(MOMENTS))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch * self.sequence * self.accumulation


@dataclass(frozen=True)
class RunSettings:
    """Everything that a run is told. `engine` holds what is not left to `Config`'s defaults."""

    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    engine: Mapping[str, Any] = field(default_factory=dict)

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


class Kind(NamedTuple):
    """What the type of a field means to its option."""

    type: Any = click.STRING
    metavar: str | None = None
    note: str = ""  # what `--help` adds
    many: bool = False  # whether the option may be given again


_LIST: Final = Kind(note=" May be given again.", many=True)
_PLACES: Final = " One of device, host, nvme; or shares such as host:0.3,nvme:0.7."
#: By the type of a field; any may be None.
_KINDS: Final[dict[Any, Kind]] = {
    int | None: Kind(click.INT),
    float | None: Kind(click.FLOAT),
    bool | None: Kind(None),
    str | None: Kind(),
    Size | None: Kind(metavar="SIZE"),
    Tiers | None: Kind(metavar="PLACE", note=_PLACES),
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


_SECTIONS: Final[dict[str, Any]] = {"model": ModelSettings, "train": TrainSettings, "engine": Config}
#: Settings of the engine that are no options here; `accumulation` is one of what trains.
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


def run_options(function: F) -> F:
    """Decorate a command with the options of a run, all of them unset by default."""
    for option in reversed(OPTIONS):
        kind = option.kind
        function = click.option(
            option.flags,
            option.name,
            type=kind.type,
            metavar=kind.metavar,
            multiple=kind.many,
            default=None,
            help=option.help,
        )(function)
    return function


class RunCommand(click.Command):
    """A command whose `--help` shows the options of a run section by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of the sections."""
        section = {o.name: o.section for o in OPTIONS}
        rows: dict[str, list[tuple[str, str]]] = {name: [] for name in (*_SECTIONS, "options")}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                rows[section.get(param.name or "", "options")].append(record)
        for name, records in rows.items():
            if records:
                with formatter.section(name.capitalize()):
                    formatter.write_dl(records)


def read_run(given: Mapping[str, Any], beneath: Mapping[str, Mapping[str, Any]] | None = None) -> RunSettings:
    """Return the run that options describe.

    Args:
        given: the parameters of a command that `run_options` decorated.
        beneath: settings by section, which the options win over.

    Raises:
        ConfigError: a setting is wrong, or two contradict each other.
    """
    values = {section: dict((beneath or {}).get(section, {})) for section in _SECTIONS}
    for option in OPTIONS:
        value = given.get(option.name)
        if value not in (None, ()):
            read = parse_placement if option.kind.metavar == "PLACE" else lambda v: v
            values[option.section][option.name] = list(value) if option.kind.many else read(value)
    run = RunSettings(ModelSettings(**values["model"]), TrainSettings(**values["train"]), values["engine"])
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
