"""Which rank of a job this process is, by the variables of its launcher: torchrun, or SLURM's srun.

[Note: a step of SLURM] A batch script has SLURM's variables too, and is one process. Processes of srun have
the variables of a *step*, whose number of tasks is the number of ranks. torchrun's variables take precedence:
srun may have started torchrun, once on each node.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from infinity.core.errors import ConfigError

#: Ports that jobs of one node are spread over, by their number.
_PORTS: Final = range(15_000, 30_000)


class RankPlace(NamedTuple):
    """A rank among those of its job, and among those of its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


@dataclass(frozen=True)
class Launch:
    """One process of a job. `local_rank`: its number on its node, None: not said; `address`, `port`: where
    rank 0 is met; `by`: which variables say so."""

    rank: int
    world: int
    local_rank: int | None
    address: str
    port: int
    by: str


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return which rank this process is; None: it is alone.

    Raises:
        ConfigError: a variable is missing, or is not what it has to be.
    """
    said = environment.get("WORLD_SIZE") or ""
    if said:
        if not said.isdecimal():
            raise ConfigError(
                "WORLD_SIZE is not a number", found=said, cure="start with torchrun, or unset it"
            )
        if int(said) <= 1:
            return None
        names = "RANK", "MASTER_ADDR", "MASTER_PORT"
        if lacking := [n for n in names if not environment.get(n)]:
            raise ConfigError(
                f"WORLD_SIZE is {said}, but {' and '.join(lacking)} "
                f"{'is' if len(lacking) == 1 else 'are'} not in the environment",
                cure="start every rank with torchrun, which sets them; or unset WORLD_SIZE to train alone",
            )
        rank, port = _number(environment, "RANK"), _number(environment, "MASTER_PORT")
        local = _number(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else None
        return Launch(rank, int(said), local, environment["MASTER_ADDR"], port, "torchrun")
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks.isdecimal() or int(tasks) <= 1 or not environment.get("SLURM_PROCID"):
        return None
    address = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if environment.get("MASTER_PORT"):
        port = _number(environment, "MASTER_PORT")
    else:
        job, step = (environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID"))
        port = _PORTS[(int(job) * 31 + int(step)) % len(_PORTS)] if (job + step).isdecimal() else _PORTS[0]
    rank, local = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    return Launch(rank, int(tasks), local, address, port, "srun")


def first_host(nodes: str) -> str:
    """Return the first of SLURM's list of nodes: ``a[07-09,12],b`` → ``a07``.

    Raises:
        ConfigError: there is none.
    """
    found = re.match(r"([^,\[\s]+)(?:\[(\w+)[^\]]*\](?:([^,\[\s]+))?)?", nodes)
    if found is None:
        raise ConfigError(
            "SLURM does not say on which nodes the ranks run",
            expected="SLURM_STEP_NODELIST, which srun sets",
            found=repr(nodes),
            cure="export MASTER_ADDR=HOST, the name of rank 0's node, before srun",
        )
    return "".join(part or "" for part in found.groups())


def _number(environment: Mapping[str, str], name: str) -> int:
    said = environment.get(name, "")
    if not said.isdecimal():
        raise ConfigError(
            f"{name} is not a number",
            expected="the number that torchrun or srun sets",
            found=repr(said),
            cure="start every rank with torchrun or srun",
        )
    return int(said)


def this_node() -> bytes:
    """Return what tells this machine from all others, as long as it runs."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()}".encode()


def among(nodes: Sequence[bytes], rank: int) -> tuple[int, int]:
    """Return the number of a rank on its node, and how many there are: as torchrun says, else by the node of
    each rank."""
    said = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if all(s.isdecimal() for s in said):
        return int(said[0]), int(said[1])
    return nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
