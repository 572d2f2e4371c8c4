"""What several ranks must agree on before they build one engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from infinity.core.config import Config
from infinity.core.errors import ConfigError, DivergenceError
from infinity.core.sizes import Tier
from infinity.hardware.watch import differences
from infinity.planning.partition import ParamSpec

if TYPE_CHECKING:  # a plan checks what is available with several ranks, without torch
    import torch

    from infinity.hardware.ranks import Comm

#: Settings that may differ between ranks: where a rank has its drives and its devices.
OWN: Final = ("nvme", "device", "host_memory", "device_memory", "threads")


def check_ranks(world: int, config: Config, *, trains: bool) -> None:
    """Raise `ConfigError` for features that are not available yet with several ranks."""
    refused = None
    if config.update in ("delayed", "backward"):
        refused = f'update="{config.update}"', 'update="overlap"'
    elif not trains:
        refused = "`infinity.inference`", "run it in one process for each copy of the model"
    if refused is not None:
        raise ConfigError(
            f"{refused[0]} is not available with several ranks yet",
            expected='training, with update="overlap" or update="sync"',
            found=f"{refused[0]} on {world} ranks",
            cure=refused[1],
        )


def check_matrices(config: Config) -> None:
    """Raise `ConfigError` for features that are not available yet with Muon."""
    refused = None
    if config.update == "delayed":
        refused = 'update="delayed"', 'update="overlap"'
    elif config.optimizer_state_dtype == "8bit":
        refused = 'optimizer_state_dtype="8bit"', 'optimizer_state_dtype="bf16"'
    if refused is not None:
        raise ConfigError(
            f"Muon is not available with {refused[0]} yet",
            expected='update="overlap", "sync" or "backward", and moments in fp32 or bf16',
            found=refused[0],
            cure=refused[1],
        )


def check_split(specs: Iterable[Sequence[ParamSpec]], config: Config) -> None:
    """Raise `ConfigError` if masters are to be split, and no trainable parameter is in bf16."""
    dtypes = {str(s.dtype).removeprefix("torch.") for each in specs for s in each if s.trainable}
    if config.split_master and dtypes and "bfloat16" not in dtypes:
        raise ConfigError(
            "split_master=True cannot be used",
            expected="compute parameters in bf16, which are the upper halves of the master weights",
            found=f"trainable parameters in {', '.join(sorted(dtypes))}",
            cure='dtype="bf16", or leave split_master out',
        )


def check_stage(world: int, config: Config) -> None:
    """Raise `ConfigError` for a placement that a ZeRO stage does not support."""
    shares = config.placements["parameters"]
    away = [tier for tier, share in shares.items() if share and tier is not Tier.DEVICE]
    if world > 1 and config.zero_stage < 3 and away:
        raise ConfigError(
            f"ZeRO stage {config.zero_stage} keeps parameters on the device after their first use in a step",
            expected='parameters="device"',
            found=f"some on {away[0]}",
            cure='parameters="device", or zero_stage=3',
        )


def check_same(
    comm: Comm,
    units: Sequence[tuple[str, Sequence[ParamSpec]]],
    buffers: Iterable[tuple[str, torch.Tensor]],
    config: Config,
) -> None:
    """Raise `DivergenceError` unless all ranks have the same model and the same settings."""
    names = [name for name in sorted(vars(config)) if name not in (*OWN, "placements")]
    _compare(comm, "settings", {name: repr(getattr(config, name)) for name in names})
    model = {f"{unit}: {s.name}": repr(s) for unit, specs in units for s in specs}
    model |= {f"the buffer {name}": f"{tuple(b.shape)}, {b.dtype}" for name, b in buffers}
    _compare(comm, "models", model)


def _compare(comm: Comm, what: str, mine: Mapping[str, str]) -> None:
    """Raise `DivergenceError` unless all ranks have the same values, by name and in one order. Collective."""
    said = json.dumps(mine).encode()
    if len({*comm.exchange(f"wrap: the {what}", hashlib.sha256(said).digest())}) == 1:
        return
    told = [json.loads(each) for each in comm.exchange(f"wrap: the {what}, which differ", said)]
    raise DivergenceError(
        f"the ranks have different {what}",
        expected=f"on all ranks the same; only {', '.join(OWN)} may differ" if what == "settings" else None,
        found=differences(told),
        cure="build the same model, with the same Config, on every rank",
    )


def seed(comm: Comm) -> None:
    """Give every rank random numbers of its own: rank r's seed is rank 0's, plus r."""
    import torch

    first = comm.exchange("the seed", torch.initial_seed().to_bytes(8, "little"))[0]
    torch.manual_seed((int.from_bytes(first, "little") + comm.rank) % (1 << 64))


def check_source(comm: Comm, source: int) -> None:
    """Raise `ConfigError` unless `source` is one of the ranks."""
    if not 0 <= source < comm.world:
        raise ConfigError(
            "`gathered` names a rank that does not exist",
            expected=f"a rank from 0 to {comm.world - 1}",
            found=f"source={source!r}",
            cure="source=0",
        )
