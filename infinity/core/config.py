"""`Config`: the one home of every default."""

from __future__ import annotations

import difflib
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from .errors import ConfigError
from .paths import local_path
from .sizes import NORM_BLOCK, GiB, MiB, Tier, parse_precision, parse_size, torch_dtype
from .yaml_file import read_yaml

if TYPE_CHECKING:
    import torch

Placement = Mapping[Tier, float]
#: What a user may give for a size, a placement and directories. The command line knows them by these types.
Size: TypeAlias = int | str
Tiers: TypeAlias = str | Mapping[str, float]
Directories: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Update: TypeAlias = Literal["overlap", "sync", "delayed", "backward"]
AIOBackend: TypeAlias = Literal["auto", "libaio", "syscall", "uring", "threads"]
Activations: TypeAlias = Literal["device", "host"]
StateDtype: TypeAlias = Literal["fp32", "bf16", "8bit"]
UPDATES = get_args(Update)
_CHOICES: Final = {
    "Update": Update,
    "AIOBackend": AIOBackend,
    "Activations": Activations,
    "StateDtype": StateDtype,
}
_CALLED: Final = {"update": "update mode", "aio_backend": "I/O backend"}
#: What a ring takes where neither the user nor `infinity tune` says anything.
BLOCK_BYTES, QUEUE_DEPTH = MiB, 32
#: What a ring takes at most (AIO_MAX_BLOCK, AIO_MAX_DEPTH in csrc/aio/aio.h).
MOST_BLOCK_BYTES, MOST_QUEUE_DEPTH = GiB, 4096
#: What torch takes for a CPU or a CUDA device.
_DEVICE = re.compile("(cpu|cuda)(:(0|[1-9][0-9]*))?")


def _whole(default: Any, least: int, most: int | None = None, *, multiple: int = 1) -> Any:
    """A field for an integer, and which ones may be given."""
    return field(default=default, metadata={"whole": (least, most, multiple)})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the engine may use and where it keeps each kind of state.

    Sizes are bytes or strings such as ``"20GiB"``. A placement is ``"device"``, ``"host"``,
    ``"nvme"`` or a split such as ``{"host": 0.3, "nvme": 0.7}`` (shares of the bytes; they sum
    to 1). After construction every field holds its parsed value: bytes, the name of a dtype, a
    tuple of directories, a mapping from `Tier` to share.

    Args:
        nvme: one directory, or several, for everything that is placed on ``nvme``. The engine writes only
            into a subdirectory of its own in each. ``{local_rank}``, ``{rank}`` and ``{host}`` in a path
            stand for the number of a rank on its machine and in the job, and for the machine's name.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Default: cuda if the machine has it.
        device_memory: bytes that the engine may use on the device (for gathered parameters, their gradients,
            and state that is placed there); activations come on top. Default: the free memory when the engine
            starts, less a tenth. The engine loads units ahead into what is left; by default into half of
            that, and the other half is for activations.
        host_memory: bytes of host memory that the engine may use. Default: the available memory when the
            engine starts (within the cgroup's limit), less a tenth. On a CPU device, `device_memory` and
            `host_memory` share this amount: each gets half, or what the other one leaves.
        parameters: placement of the parameters in the compute dtype, unit by unit.
        optimizer_state: placement of fp32 master weights and moments, chunk by chunk.
        optimizer_state_dtype: form of the optimizer's moments, ``"fp32"``, ``"bf16"`` or ``"8bit"``; the
            master weights are fp32. ``"bf16"`` halves the bytes of the moments, and ``"8bit"`` leaves a
            quarter of them: codes, and a scale for each 256 elements of a parameter. Both round the moments
            stochastically after each update. This changes the result, by rounding errors that are zero on
            average. The bits do not depend on placements, chunks or ranks.
        split_master: with a compute dtype of bf16, keep of each master weight the compute parameter, which is
            its upper half, and its lower 16 bits: 2 bytes per parameter fewer. The master weights stay exact.
            The compute parameters are rounded to nearest, and ties away from zero. If you edit a parameter
            in any other way than by `load` and `load_state_dict`, the lower bits stay: the master weight is
            then within half a unit of bf16's last place of the edit. Not with ``update="delayed"``.
        optimizer_state_fp32: names of the parameters whose moments stay fp32 where `optimizer_state_dtype` is
            ``"bf16"`` or ``"8bit"``. Each is a name as in `named_parameters()`, without the prefix of a
            compiled module, or a shell pattern: ``"*embed*"``, ``"*norm*"``, ``"*.bias"``. A pattern that
            matches no trainable parameter is an error.
        gradients: placement of the gradients between backward and update, chunk by chunk. None: ``"host"``;
            in ZeRO stages 0 and 1 ``"device"``, the only placement that these support.
        activations: where the inputs of checkpointed layers (`torch.utils.checkpoint`) are between their
            forward and their backward: ``"device"`` or ``"host"``. With ``"host"`` the engine copies them to
            the host after the forward, and back before the backward. The bits stay the same. The inputs get a
            quarter of the `host_memory` that the placed state and the smallest set of leases leave, at most
            16 GiB. Inputs that do not fit stay on the device.
        dtype: compute dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``: of all parameters, and of the
            floating-point inputs of the model's forward. The engine does not cast outputs. These parameters
            are fp32 with every `dtype`: those of BatchNorm, and those that the class of a module lists in
            `_keep_in_fp32_modules` (for ``"fp16"``) or in `_keep_in_fp32_modules_strict` (for both 16-bit
            dtypes), as in `from_pretrained` of transformers. None: each parameter keeps its own dtype, and
            the engine does not cast inputs. To train fp16 parameters, set ``"fp16"``: only this setting
            scales the loss.
        max_grad_norm: `step` clips the global 2-norm of the gradients to this value. None: no clipping.
        skip_nonfinite: `step` makes no update if a gradient has an Inf or NaN, in any dtype: parameters,
            moments and their step counts stay. With fp16 the engine always skips such steps.
        units: names of module classes, or of modules as in `named_modules()`, that become units. None: the
            engine finds the units.
        update: where the update runs: behind the next forward (``"overlap"``), in `step()` (``"sync"``),
            beside the next forward and backward, which changes the result (``"delayed"``), or in the last
            backward of a step, where nothing can be clipped (``"backward"``).
            ``"overlap"``: `step()` returns when it has the gradients, their norm and the
            scalars. The update overlaps with the next forward; the engine updates each unit before its use.
            ``"sync"``: `step()` returns when the parameters are updated. Both give the same bits.
            ``"delayed"``: after the first 40 steps, forward and backward overlap with the update of the
            step before, and use the parameters from before that update. This changes the result: AdamW can be
            sensitive to a staleness of one step.
            ``"backward"``: in the last backward of a step, which `accumulation` counts, the engine updates
            each unit as soon as its gradients have arrived. It uses the param groups as they are when that
            backward begins. `step()` waits for the rest. The bits are those of ``"sync"``. Between that
            backward and `step()` you may read gradients and param groups; it is an error to change them, or
            to use the model. Not with fp16, `max_grad_norm` or `skip_nonfinite`, which need the norm of all
            gradients first.
        loss_scale: fp16 only: first dynamic loss scale, a power of two. The engine halves the scale after a
            step that overflows, and doubles it after 2000 steps without overflow.
        chunk_elements: elements of a chunk, a multiple of 65,536. None: 2 Mi with anything on NVMe. Else 16
            Mi if the device has its own memory, and the smallest set of leases takes at most a sixteenth of
            the host memory that `host_memory` leaves beside the state; 4 Mi otherwise.
        block_bytes: largest single I/O request, in bytes, a multiple of 4096 up to 1 GiB. None: the value
            that `infinity tune` found for the drive, else 1 MiB.
        queue_depth: requests in the kernel at once, per directory, up to 4096. None: as tuned, else 32.
        aio_backend: ``"auto"`` or one of the I/O backends.
        threads: threads of the CPU Adam. None: one per core that this process may use (its affinity, its
            cgroup's quota, divided by LOCAL_WORLD_SIZE). If the device is not the CPU, the default is one
            thread fewer per NVMe directory, and at least one fewer.
        zero_stage: what the engine shards over several ranks (ZeRO, arXiv 1910.02054, section 5): 0: nothing;
            1: the optimizer state; 2: gradients too; 3: parameters too. Below 3, parameters are placed on the
            device: the engine gathers them once in a step, and they stay. Below 2, each rank accumulates its
            gradients, in fp32 from the second backward on, and `step()` reduces them over the ranks.
        accumulation: number of backwards in a step, calls of `torch.autograd.grad` included. Then stages 0
            and 1 reduce gradients after the last of them, and not in `step()`; all ranks have to use the same
            layers in that backward. ``update="backward"`` updates in it. With 1, gradients in 16 bits take 2
            bytes of each element in place of 4, on every tier (not in stages 0 and 1 of several ranks), and a
            second gradient of a parameter before `zero_grad()` is an error. None: the number is not known.
        rank_timeout: seconds that a rank waits for another rank that is in a collective, too, or does not
            answer; three times as long in `wrap`, until the first step, and in saves, loads and exports. A
            rank waits without a deadline for another rank that is alive and runs code of its own. Both ranks
            log waits of 30 s and more.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or contradicts another.
    """

    nvme: Directories | None = None
    device: str | None = None
    device_memory: Size | None = None
    host_memory: Size | None = None
    parameters: Tiers = "device"
    optimizer_state: Tiers = "host"
    optimizer_state_dtype: StateDtype = "fp32"
    split_master: bool = False
    optimizer_state_fp32: Sequence[str] = ()
    gradients: Tiers | None = None
    activations: Activations = "device"
    dtype: str | torch.dtype | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    units: Sequence[str] | None = None
    update: Update = "overlap"
    loss_scale: float = 65536.0
    chunk_elements: int | None = _whole(None, NORM_BLOCK, multiple=NORM_BLOCK)
    block_bytes: Size | None = _whole(None, 4096, MOST_BLOCK_BYTES, multiple=4096)
    queue_depth: int | None = _whole(None, 1, MOST_QUEUE_DEPTH)
    aio_backend: AIOBackend = "auto"
    threads: int | None = _whole(None, 1)
    zero_stage: int = _whole(3, 0, 3)
    accumulation: int | None = _whole(None, 1)
    rank_timeout: float = 600.0
    #: parsed placements, by the name of the kind of state
    placements: Mapping[str, Placement] = field(init=False, repr=False, compare=False)

    def __new__(cls, *args: Any, **settings: Any) -> Config:
        known = [f.name for f in fields(cls) if f.init]
        for key in settings:
            if key not in known:
                raise _unknown_setting(key, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "nvme", _directories(self.nvme))
        for each in fields(self):
            value: Any = getattr(self, each.name, None)
            if each.type == "Size" or (each.type == "Size | None" and value is not None):
                put(self, each.name, parse_size(value, each.name))
        if self.dtype is not None:
            put(self, "dtype", parse_precision(self.dtype))
        unset = {"gradients": "device" if self.zero_stage in (0, 1) else "host"}
        given = {f.name: getattr(self, f.name) for f in fields(self) if str(f.type).startswith("Tiers")}
        given = {n: unset.get(n) if v is None else v for n, v in given.items()}
        put(self, "placements", {n: _placement(n, v) for n, v in given.items()})
        if self.units is not None:
            put(self, "units", _names("units", self.units))
        put(self, "optimizer_state_fp32", _names("optimizer_state_fp32", self.optimizer_state_fp32))
        self._check()

    def _check(self) -> None:
        on_nvme = [n for n, tiers in self.placements.items() if tiers.get(Tier.NVME)]
        if on_nvme and not self.nvme:
            raise ConfigError(
                f"{on_nvme[0]} is placed on NVMe, but no directory is named",
                expected="a directory on an NVMe drive",
                found="nvme=None",
                cure='nvme="/path/on/a/drive", or ' + ", ".join(f'{n}="host"' for n in on_nvme),
            )
        if self.zero_stage in (0, 1) and set(self.placements["gradients"]) != {Tier.DEVICE}:
            raise ConfigError(
                f"ZeRO stage {self.zero_stage} keeps whole gradients on the device until the step",
                expected='gradients="device", or unset',
                found=f"gradients={self.gradients!r}",
                cure="zero_stage=2, or leave gradients out",
            )
        for each in fields(self):
            self._check_type(each)
        if self.update == "backward":
            self._check_behind()
        for wrong, expected, found, cure in (
            (
                self.dtype not in (None, "bf16"),
                "compute parameters in bf16, which are the upper halves of the master weights",
                f"dtype={self.dtype!r}",
                'dtype="bf16"',
            ),
            (
                self.update == "delayed",
                "an update without delay: a delayed one has two versions of the compute parameters",
                'update="delayed"',
                'update="overlap"',
            ),
        ):
            if self.split_master and wrong:
                raise ConfigError(
                    "split_master=True cannot be used",
                    expected=expected,
                    found=found,
                    cure=f"{cure}, or leave split_master out",
                )
        if self.device is not None and not _DEVICE.fullmatch(str(self.device)):
            raise ConfigError(
                "unknown device",
                expected='"cpu" or "cuda[:index]"',
                found=repr(self.device),
                cure='device="cuda"',
            )
        if math.frexp(self.loss_scale)[0] != 0.5:
            self._wrong("loss_scale", "a power of two", self.loss_scale, "loss_scale=65536.0")

    def _check_type(self, each: Field[Any]) -> None:
        """Check that a choice, a flag, a number or an integer is one that its field can hold."""
        name, value, kind = each.name, getattr(self, each.name), str(each.type)
        if value is None and kind.endswith(" | None"):
            return
        if kind in _CHOICES and value not in (known := get_args(_CHOICES[kind])):
            raise ConfigError(
                f"unknown {_CALLED.get(name, name)}",
                expected=", ".join(known),
                found=repr(value),
                cure=f'{name}="{_suggest(str(value), known) or known[0]}"',
            )
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind == "bool" and not isinstance(value, bool):
            self._wrong(name, "True or False", value, f"{name}=False")
        if kind.startswith("float") and not (number and value > 0):
            self._wrong(name, "a number > 0" + (" or None" if kind != "float" else ""), value, f"{name}=1.0")
        if "whole" in each.metadata:
            least, most, multiple = each.metadata["whole"]
            within = number and isinstance(value, int) and least <= value <= (value if most is None else most)
            if not within or value % multiple:
                wanted = f"an integer ≥ {least}" if most is None else f"an integer from {least} to {most}"
                wanted += f", a multiple of {multiple}" if multiple > 1 else ""
                default = 1 if name == "accumulation" and self.update == "backward" else each.default
                self._wrong(name, wanted, value, f"{name}={default}")

    def _check_behind(self) -> None:
        """Check what an update behind the backward needs, which comes before the norm is known."""
        for wrong, expected, found, cure in (
            (
                self.accumulation is None,
                "the number of backwards in a step",
                "accumulation=None",
                "accumulation=1",
            ),
            (
                self.dtype == "fp16",
                "no fp16, which skips steps that overflow",
                'dtype="fp16"',
                'dtype="bf16"',
            ),
            (
                self.max_grad_norm is not None,
                "no clipping: it needs the norm of all gradients first",
                f"max_grad_norm={self.max_grad_norm!r}",
                "max_grad_norm=None",
            ),
            (
                self.skip_nonfinite,
                "no skipped steps: they need the norm of all gradients first",
                "skip_nonfinite=True",
                "skip_nonfinite=False",
            ),
        ):
            if wrong:
                raise ConfigError(
                    'update="backward" cannot be used',
                    expected=expected,
                    found=found,
                    cure=f'{cure}, or update="overlap"',
                )

    @staticmethod
    def _wrong(name: str, expected: str, found: object, cure: str) -> None:
        raise ConfigError(f"{name} cannot be used", expected=expected, found=repr(found), cure=cure)

    @property
    def directories(self) -> tuple[str, ...]:
        """The NVMe directories, as given, without duplicates."""
        return self.nvme or ()  # type: ignore[return-value]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """`dtype` as a torch dtype; None if each parameter keeps its own."""
        return None if self.dtype is None else torch_dtype(str(self.dtype))

    @property
    def fp32_moments(self) -> Sequence[str]:
        """`optimizer_state_fp32`; nothing where all moments are fp32."""
        return () if self.optimizer_state_dtype == "fp32" else self.optimizer_state_fp32

    @property
    def elements_per_chunk(self) -> int:
        """`chunk_elements`; if that is None, 2 Mi with anything on NVMe, and 4 Mi otherwise, or more if there
        is room (`chunk_sizes`). Drives are as fast with smaller chunks, which need smaller leases; memory is
        not."""
        if self.chunk_elements is not None:
            return self.chunk_elements
        return (2 if self._uses_nvme else 4) * MiB

    def chunk_sizes(self, *, staged: bool) -> tuple[int, ...]:
        """Return the sizes of chunks that a run takes, the first one whose leases leave room; the last one in
        any case. `staged`: the device has memory of its own. There a chunk costs Python, events and waits:
        with 16 Mi a step takes 9 to 22 % less time than with 4 Mi. On a CPU 3 %. An update on the device of a
        chunk whose gradient or compute parameters are elsewhere takes memory there that is not in the plan,
        so chunks stay small where there may be one."""
        least = self.elements_per_chunk
        is_chosen = self.chunk_elements is not None
        tiers = self.placements
        updates_there = bool(tiers["optimizer_state"].get(Tier.DEVICE))
        in_place = self.update != "delayed" and all(set(t) == {Tier.DEVICE} for t in tiers.values())
        if is_chosen or self._uses_nvme or not staged or (updates_there and not in_place):
            return (least,)
        return 16 * MiB, least

    @property
    def _uses_nvme(self) -> bool:
        return any(tiers.get(Tier.NVME) for tiers in self.placements.values())

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some settings changed. The copy is checked again."""
        return replace(self, **changes)

    def for_rank(self, rank: int, local_rank: int | None) -> Config:
        """Return the settings of one rank: `nvme` then has the numbers of the rank, and this machine's name.

        Raises:
            ConfigError: two directories become one; or a directory needs `local_rank`, which is None.
        """
        if not any("{" in d for d in self.directories):
            return self
        if local_rank is None and any("{local_rank}" in d for d in self.directories):
            raise ConfigError(
                "the number of this rank on its machine is unknown",
                expected="LOCAL_RANK in the environment, as torchrun sets it",
                found="no such variable",
                cure="set LOCAL_RANK, or use {rank} in place of {local_rank} in `nvme`",
            )
        names = {"{rank}": str(rank), "{local_rank}": str(local_rank), "{host}": socket.gethostname()}
        found = []
        for directory in self.directories:
            for name, text in names.items():
                directory = directory.replace(name, text)
            found.append(directory)
        return self.replace(nvme=found)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Config:
        """Read the settings from a YAML file: its section ``engine``, or the whole file.

        Raises:
            ConfigError: the file is missing, is not YAML, or has a wrong setting.
        """
        expected = "a YAML file with a section `engine`"
        content = read_yaml(path, expected=expected, cure="name a readable YAML file")
        if content is None:
            content = {}
        if isinstance(content, Mapping) and isinstance(content.get("engine"), Mapping):
            content = content["engine"]
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"{os.fspath(path)!r} has no settings",
                expected="a mapping",
                found=type(content).__name__,
                cure="write `name: value` lines",
            )
        return cls(**{str(key): value for key, value in content.items()})


def _unknown_setting(name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a setting that is none of `known`."""
    close = _suggest(name, known)
    cure = f"did you mean {close!r}?" if close else "remove it"
    return ConfigError(f"unknown setting {name!r}", expected=", ".join(known), found=repr(name), cure=cure)


def _suggest(word: str, known: Sequence[str]) -> str | None:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return close[0] if close else None


#: Of settings that are names: what they are names of, what is expected, and an example.
_NAMED: Final = {
    "units": ("module", "names of module classes, or of modules as in `named_modules()`, or None", "Block"),
    "optimizer_state_fp32": ("parameter", "shell patterns for names of parameters", "*norm*"),
}


def _names(setting: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(n, str) and n for n in names):
        of, expected, example = _NAMED[setting]
        raise ConfigError(
            f"{setting} names no {of}", expected=expected, found=repr(value), cure=f'{setting}=["{example}"]'
        )
    return names


def _directories(value: Any) -> tuple[str, ...]:
    if value is None or value == ():  # which is what None becomes
        return ()
    if isinstance(value, (str, os.PathLike)):
        value = (value,)
    try:
        names = () if isinstance(value, Mapping) else tuple(os.fspath(v) for v in value)
    except TypeError:
        names = ()
    if not names or not all(isinstance(n, str) and n and "\0" not in n for n in names):
        raise ConfigError(
            "nvme names no directory",
            expected="a path or a list of paths",
            found=repr(value),
            cure='nvme="/mnt/nvme/run1"',
        )
    names = tuple(local_path(n, "nvme", "/mnt/nvme/run1") for n in names)
    twice = {os.path.realpath(n) for n in names}
    if len(twice) != len(names):
        raise ConfigError(
            "an NVMe directory is named twice",
            expected="different directories",
            found=", ".join(names),
            cure="name each directory once",
        )
    return names


def _placement(name: str, value: Any) -> Placement:
    tiers = [t.value for t in Tier]
    if isinstance(value, str):
        value = {value: 1.0}
    if not isinstance(value, Mapping) or not value:
        value = {repr(value): 1.0}
    for tier in value:
        if str(tier) not in tiers:
            close = _suggest(str(tier), tiers)
            raise ConfigError(
                f"{name} is placed on an unknown tier",
                expected=", ".join(tiers),
                found=str(tier),
                cure=f"did you mean {close!r}?" if close else f'{name}="host"',
            )
    shares: dict[Tier, float] = {}
    for tier, share in value.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            shares = {}
            break
        shares[Tier(str(tier))] = float(share)
    if not shares or abs(sum(shares.values()) - 1) > 1e-6:
        raise ConfigError(
            f"the shares of {name} are wrong",
            expected="shares from 0 to 1 that sum to 1",
            found=repr(dict(value)),
            cure=f'{name}={{"host": 0.3, "nvme": 0.7}}',
        )
    return {tier: share for tier, share in shares.items() if share > 0}
