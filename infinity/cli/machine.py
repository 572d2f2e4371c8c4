"""The machine that a run is planned for: this one, or one that a file describes.

A file is YAML (or JSON); docs/machine.yaml is an example. Where one is given, nothing of this machine is
read.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from infinity.api.this_machine import machine_here
from infinity.core.config import Config
from infinity.core.errors import ConfigError
from infinity.core.sizes import parse_size
from infinity.core.yaml_file import read_yaml
from infinity.planning.machine import Drive, Machine

_Lines = Mapping[str, Callable[[Any], Any] | None]
#: Beyond these no figure of a plan would be a number any more.
_LEAST, _MOST = 1e-6, 1e9
_EXAMPLE: Final = "the sections device, host and drives, as docs/machine.yaml has them"


def has_cuda() -> bool:
    """Return whether torch has a CUDA device. See [Note: torch is asked last]."""
    if "torch" not in sys.modules and not _may_have_gpu():
        return False
    import torch

    return torch.cuda.is_available()


def _may_have_gpu() -> bool:
    """[Note: torch is asked last] To import torch takes seconds. It has no CUDA device where there is neither
    the library of NVIDIA's driver, which the CUDA runtime opens by this name, nor a file that drivers make:
    that of NVIDIA, also on Tegra, of AMD, whose devices torch calls CUDA's too, or of WSL. Where one of them
    is, there may still be no device: torch decides."""
    if any(os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "nvmap", "kfd", "dxg")):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def here(config: Config, *, unnamed: bool) -> Machine:
    """Return this machine, for a run of `config`. `unnamed`: its directory only stands for one.

    Raises:
        ConfigError: the device is not here.
        DirectoryError: an NVMe directory cannot be used.
    """
    wanted = config.device or ("cuda" if has_cuda() else "cpu")
    if wanted.startswith("cuda") and not has_cuda():
        raise ConfigError(
            f"the device {wanted!r} is not here",
            expected="a CUDA device, or a description of the machine that has it",
            found="none",
            cure="--machine FILE (docs/machine.yaml is an example), or --device cpu",
        )
    device_memory = None
    if wanted.startswith("cuda"):
        from infinity.hardware.device import open_device  # with torch

        device = open_device(wanted)
        device_memory = device.memory_free()
        device.close()
    return machine_here(config, device_memory, unnamed=unnamed)


def among(
    seen: Callable[[Config], Machine],
    config: Config,
    first: int,
    ranks: int,
    local_rank: int,
) -> Machine:
    """Return the machine as one of its ranks sees it, with how many of them use each drive.

    Args:
        seen: returns the machine for a rank's settings.
        config: with what stands for a rank's numbers in `nvme`.
        first: the first rank of the machine, which has `ranks`.

    Raises:
        DirectoryError: one of the ranks cannot use a directory.
    """
    mine = seen(config.for_rank(first + local_rank, local_rank))
    if ranks == 1:
        return mine
    if any("{" in d for d in config.directories):
        users = Counter({d.system for d in mine.drives})
        for r in set(range(ranks)) - {local_rank}:
            users.update({d.system for d in seen(config.for_rank(first + r, r)).drives})
    else:
        users = Counter({d.system: ranks for d in mine.drives})
    return mine.with_drives(replace(d, ranks=users[d.system]) for d in mine.drives)


def load_machine(path: str) -> Machine:
    """Return the machine that a file describes, with all its drives.

    Raises:
        ConfigError: the file cannot be read, or says something that cannot be.
    """
    cure = "--machine FILE, with FILE one that can be read"
    content = read_yaml(path, expected=f"a YAML or JSON file with {_EXAMPLE}", cure=cure)
    sections = _section(path, "the file", content, dict.fromkeys(("host", "device", "drives", "temporary")))
    device = sections.get("device")
    device = {} if device is None else _section(path, "device", device, _DEVICE)
    host = _section(path, "host", sections["host"], _HOST)
    rows = sections.get("drives") or []
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise _wrong(path, "drives", "a list of drives", rows)
    drives = [_drive(path, "drives", row, _DRIVE) for row in rows]
    if len({d.directory for d in drives}) < len(drives):
        raise _wrong(path, "drives", "different directories", [d.directory for d in drives])
    temporary = sections.get("temporary")
    return Machine(
        host_memory=host["memory"],
        device_memory=device.get("memory"),
        drives=tuple(drives),
        temporary=None if temporary is None else _drive(path, "temporary", temporary, _TEMPORARY),
        name=path,
        link=device.get("link"),
        dram=host.get("bandwidth"),
        tflops=device.get("tflops"),
        network=host.get("network"),
    )


def described(machine: Machine, config: Config, *, unnamed: bool) -> Machine:
    """Return a described machine as a run of `config` sees it: the drives that it names.

    Raises:
        ConfigError: it names a directory, or a device, that the description does not have.
    """
    if config.device is not None and config.device.startswith("cuda") and not machine.staged:
        raise ConfigError(
            f"{machine.name!r} has no device with a memory of its own",
            expected="the section device, with its memory",
            found=f"--device {config.device}",
            cure="--device cpu",
        )
    if config.device == "cpu" and machine.staged:
        machine = replace(machine, device_memory=None, link=None, tflops=None)
    drives = []
    for directory in config.directories:
        if unnamed:
            drives.append(Drive(directory=directory, free=0, system=directory))
            continue
        path = os.path.normpath(directory)
        below = [d for d in machine.drives if os.path.commonpath([d.directory, path]) == d.directory]
        if not below:
            raise ConfigError(
                f"{machine.name!r} has no drive for {directory!r}",
                expected=", ".join(d.directory for d in machine.drives) or "a section drives",
                found=directory,
                cure=" ".join(f"--nvme {d.directory}" for d in machine.drives[:1])
                or "describe the drive under drives",
            )
        drive = max(below, key=lambda d: len(d.directory))
        drives.append(replace(drive, directory=directory))
    return machine.with_drives(drives)


def _section(path: str, name: str, content: object, known: _Lines) -> dict[str, Any]:
    """Return what a section says, read by what `known` has for each line."""
    if not isinstance(content, Mapping):
        raise _wrong(path, name, f"lines of `name: value`: {', '.join(known)}", content)
    found = {}
    for key, value in content.items():
        if key not in known:
            raise _wrong(path, name, f"only {', '.join(known)}", key)
        read = known[key]
        try:
            found[key] = value if read is None or value is None else read(value)
        except ConfigError as error:
            raise _wrong(path, name, f"{key}: {error.expected}", f"{key}: {value!r}") from error
    for key in known:
        if key in _NEEDED and found.get(key) is None:
            raise _wrong(path, name, f"the line {key}", ", ".join(map(str, content)) or "nothing")
    return found


def _drive(path: str, section: str, row: object, known: _Lines) -> Drive:
    found = _section(path, section, row, known)
    return Drive(system=found["directory"], free=found.pop("capacity"), **found)


def _directory(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ConfigError("not a directory", expected="an absolute path")
    return os.path.normpath(value)


def _figure(value: Any) -> float:
    if type(value) not in (int, float) or not _LEAST <= value <= _MOST:
        raise ConfigError("not a figure", expected=f"a number from {_LEAST:g} to {_MOST:g}")
    return float(value)


#: What reads each line of a section; lines that must be there.
_DEVICE: Final[_Lines] = {"memory": parse_size, "link": _figure, "tflops": _figure}
_HOST: Final[_Lines] = {"memory": parse_size, "bandwidth": _figure, "network": _figure}
_TEMPORARY: Final[_Lines] = {"directory": _directory, "capacity": parse_size}
_DRIVE: Final[_Lines] = {**_TEMPORARY, **dict.fromkeys(("read", "write", "endurance"), _figure)}
_NEEDED: Final = ("host", "memory", "directory", "capacity")


def _wrong(path: str, section: str, expected: object, found: object) -> ConfigError:
    return ConfigError(
        f"{path!r} does not describe a machine: {section}",
        expected=expected,
        found=str(found)[:200],
        cure=f"write {_EXAMPLE}",
    )
