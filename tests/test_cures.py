"""Cures are literal: each that `plan` and `wrap` print for budgets and places is applied as it is printed,
and then it fits. Drives are small file systems in memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli.main import run
from infinity.core.errors import BudgetError, ConfigError, DirectoryError
from infinity.core.sizes import MiB, parse_size
from infinity.storage.memory import HostMapping

from .command_line import mounted
from .offloaded import wrap_adamw
from .planned import planned

pytestmark = pytest.mark.usefixtures("own_environment")

EXAMPLE = str(Path(__file__).parents[1] / "docs" / "machine.yaml")
#: 0.5 M parameters: 2 MB as it is built, 9 MB on NVMe.
SMALL = ["--device", "cpu", "--dtype", "bf16", "--layers", "2", "--width", "128", "--heads", "4"]
SHORT = ["--batch", "2", "--sequence", "32"]
ON_NVME = ["--parameters", "nvme", "--optimizer-state", "nvme", "--gradients", "nvme"]
CHUNKS = ["--chunk-elements", "65536"]


@contextlib.contextmanager
def drives(*sizes: int) -> Iterator[list[str]]:
    """Directories on file systems of so many bytes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(mounted("-t", "tmpfs", "-o", f"size={size}", "none")) for size in sizes]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a command line; return its exit code, and what it says as JSON."""
    capsys.readouterr()
    code = run([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def train(*arguments: str) -> None:
    """Train a step as `plan` was told; it has to fit."""
    with planned(*arguments) as made:
        made.step()


def alternatives(cure: str) -> list[tuple[str, int]]:
    """Return the alternatives of a cure, and the bytes that must be free in DIR for each."""
    found = []
    for text in cure.split(", or "):
        room = re.search(r" \(DIR with (\w+) free\)$", text)
        found.append((text[: room.start()] if room else text, parse_size(room[1]) if room else 0))
    return found


def applied(arguments: list[str], text: str, directory: str) -> list[str]:
    """Return a command line with the options of a cure in the place of those of the same name."""
    words = [directory if word == "DIR" else word for word in shlex.split(text)]
    names = {word for word in words if word.startswith("--")}
    assert names, text
    kept: list[str] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        alone = position + 1 == len(arguments) or arguments[position + 1].startswith("--")
        if word not in names:
            kept += arguments[position : position + (1 if alone else 2)]
        position += 1 if alone else 2
    return [*kept, *words]


def check_cures(
    capsys: pytest.CaptureFixture[str], arguments: list[str], *, trains: bool = True
) -> list[str]:
    """`plan` refuses; each alternative of the cure fits, and trains."""
    code, result = command(capsys, "plan", *arguments)
    assert code == 1
    [cure] = {p["cure"] for p in result["problems"]}
    found = alternatives(cure)
    for words, room in found:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(drives(room))[0] if room else ""
            code, result = command(capsys, "plan", *applied(arguments, words, directory))
            assert (code, result["problems"]) == (0, []), words
            if trains:
                train(*applied(arguments, words, directory))
    return [words for words, _ in found]


BUDGETS = {
    "no directory": ["--parameters", "nvme", *CHUNKS],
    "too little host memory": ["--host-memory", "2MiB", "--device-memory", "16MiB", *CHUNKS],
    "too little device memory": ["--host-memory", "64MiB", "--device-memory", "128KiB", *CHUNKS],
    "chunks that are too large": [*ON_NVME, "--host-memory", "3MiB", "--device-memory", "16MiB"],
    "a second copy": [
        *("--update", "delayed", "--optimizer-state", "nvme", "--gradients", "nvme", *CHUNKS),
        *("--host-memory", "2MiB", "--device-memory", "16MiB"),
    ],
}


@pytest.mark.root
@pytest.mark.parametrize("case", BUDGETS)
def test_budgets(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with drives(64 * MiB) as [drive]:
        named = [] if case == "no directory" else ["--nvme", drive]
        found = check_cures(capsys, [*SMALL, *SHORT, *BUDGETS[case], *named])
    assert named or any("--nvme DIR" in words for words in found)


@pytest.mark.root
def test_a_drive_without_room_for_the_model_as_it_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    """The arena alone would fit: 9 MB, and 2 MB of scratch."""
    with drives(64 * MiB) as [large]:
        _, result = command(capsys, "plan", *SMALL, *SHORT, *CHUNKS, *ON_NVME, "--nvme", large)
    [there] = result["standing"]
    assert there["scratch"] >= 4 * 0.99 * result["parameters"]
    for short in (0, 4096):
        with drives(there["needed"] - short) as [drive]:
            arguments = [*SMALL, *SHORT, *CHUNKS, *ON_NVME, "--nvme", drive]
            if short:
                check_cures(capsys, arguments)
            else:
                assert command(capsys, "plan", *arguments)[0] == 0
                train(*arguments)


@pytest.mark.integration
def test_a_70_b_model_is_not_sent_round_in_circles(capsys: pytest.CaptureFixture[str]) -> None:
    """Host, then NVMe, then host again: here each cure is for all tiers at once."""
    arguments = ["--preset", "llama-3.1-70b", "--machine", EXAMPLE, "--batch", "1"]
    found = check_cures(capsys, arguments, trains=False)
    assert any("nvme" in words for words in found)


# -- wrap ----------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))


def settings(text: str, directory: str) -> dict[str, Any]:
    """Return what a cure in the words of `Config` says."""
    return eval(f"dict({text})".replace('"DIR"', repr(directory)))  # type: ignore[no-any-return]


WRAPS: dict[str, dict[str, Any]] = {
    "too little host memory": {"host_memory": "1MiB", "device_memory": "8MiB"},
    "too little device memory": {"host_memory": "64MiB", "device_memory": "200KiB"},
    "chunks that are too large": {
        **dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme"),
        **{"host_memory": "1MiB", "device_memory": "8MiB", "chunk_elements": 1 << 20},
    },
}


def train_once(config: infinity.Config) -> None:
    model = net()
    model, optimizer = wrap_adamw(model, config)
    try:
        model(torch.randn(2, 256)).float().sum().backward()
        optimizer.step()
    finally:
        infinity.close(model)


def check_wrap(config: infinity.Config, kind: type[ConfigError | DirectoryError]) -> list[str]:
    with pytest.raises(kind) as caught:
        train_once(config)
    assert caught.value.cure
    found = alternatives(caught.value.cure)
    for words, room in found:
        if words.startswith("free "):
            continue
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(drives(room))[0] if room else ""
            train_once(config.replace(**settings(words, directory)))
    return [words for words, _ in found]


@pytest.mark.root
@pytest.mark.parametrize("case", WRAPS)
def test_wrap(case: str, tmp_path: Path) -> None:
    given = {"device": "cpu", "chunk_elements": 65536, **WRAPS[case]}
    config = infinity.Config(**given, nvme=tmp_path if "nvme" in given.values() else None)
    check_wrap(config, BudgetError)


@pytest.mark.root
def test_wrap_on_a_full_drive() -> None:
    """Each cure works, and freeing what it says is enough."""
    given = dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme")
    given |= {"device": "cpu", "host_memory": "64MiB", "device_memory": "8MiB"}
    with drives(3 * MiB, 64 * MiB) as both:
        for directories in (both[:1], both):
            config = infinity.Config(**given, chunk_elements=65536, nvme=directories)
            found = check_wrap(config, DirectoryError)
            assert found[0].startswith("free ")
            assert any("nvme=" in words for words in found)
    with drives(12 * MiB) as [drive]:
        config, used = infinity.Config(**given, chunk_elements=65536, nvme=drive), Path(drive, "mine")
        used.write_bytes(bytes(8 * MiB))
        with pytest.raises(DirectoryError) as caught:
            train_once(config)
        assert caught.value.errno == errno.ENOSPC
        size = re.match(r"free ([\d.]+ \w+) there", str(caught.value.cure))
        assert size is not None
        os.truncate(used, 8 * MiB - parse_size(size[1]) - 64 * 1024)  # it is printed with two digits
        train_once(config)


def test_memory_that_the_system_does_not_have() -> None:
    with pytest.raises(BudgetError) as caught:
        HostMapping(1 << 46)
    assert f"{(1 << 46) // 1024} KiB more" in str(caught.value.cure)


@pytest.mark.root
def test_init_on_a_full_drive() -> None:
    """The cure is a directory with room for the model as it is built: 1.5 MB."""
    with drives(MiB, 2 * MiB) as [small, large]:
        with pytest.raises(DirectoryError) as caught, infinity.init(infinity.Config(nvme=small)):
            net()
        assert "has room for the model as it is built" in str(caught.value.cure)
        for directories in (large, [small, large]):
            with infinity.init(infinity.Config(nvme=directories)):
                model = net()
            del model


# -- in the words of who asks -----------------------------------------------------------------------


def test_an_address_is_no_path(nvme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The cure of file:// is the path in it; that of others, a path of this machine."""
    before = sorted(os.listdir())
    model = torch.nn.Linear(4, 4)
    model, optimizer = infinity.wrap(
        model, torch.optim.AdamW(model.parameters()), infinity.Config(device="cpu")
    )
    path = os.path.join(nvme, "with a space")
    os.mkdir(path)
    calls: list[Callable[[str], object]] = [
        lambda p: infinity.Config(nvme=p),
        lambda p: infinity.save(optimizer, p),
        lambda p: infinity.load(optimizer, p),
        lambda p: infinity.Run(optimizer, p),
        lambda p: infinity.export(model, os.path.join(p, "model")),
        lambda p: trace(optimizer, os.path.join(p, "trace.json")),
    ]
    for call in calls:
        for address in ("s3://bucket/x", "hdfs://host/x", "gs://x"):
            with pytest.raises(
                ConfigError, match=r"is an address, and the engine.*\n.*\n.*\n.*a path, such as"
            ):
                call(address)
        with pytest.raises(ConfigError) as caught:
            call(f"file://{path.replace(' ', '%20')}")
        assert str(caught.value.cure).startswith(f"the path '{path}")
        call(path)  # the cure
    infinity.close(optimizer)
    assert run(["plan", *SMALL, "--nvme", "s3://bucket/x"]) == 2
    assert "is an address" in capsys.readouterr().err
    assert run(["import-dcp", "s3://bucket/x", nvme]) == 2
    assert "is an address" in capsys.readouterr().err
    assert sorted(os.listdir()) == before


def test_a_tilde_is_the_users_directory(
    nvme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "home" / "x y"
    config = infinity.Config(nvme="~/x y", device="cpu", optimizer_state="nvme")
    assert config.directories == (str(there),)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(DirectoryError) as caught, infinity.init(config):
        pass
    subprocess.run(str(caught.value.cure), shell=True, check=True, timeout=20)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    assert infinity.save(optimizer, "~/saved") == str(tmp_path / "home" / "saved" / "step-0")
    infinity.load(optimizer, "~/saved")
    infinity.export(model, "~/model")
    trace(optimizer, "~/trace.json")
    infinity.close(optimizer)
    assert sorted(p.name for p in (tmp_path / "home").iterdir()) == ["model", "saved", "trace.json", "x y"]
    run(["doctor", "--json", "~/x y"])
    assert f"{there}: free" in capsys.readouterr().out
    assert not (tmp_path / "~").exists()


def trace(optimizer: torch.optim.Optimizer, path: str) -> None:
    with infinity.trace(optimizer, path):
        pass
