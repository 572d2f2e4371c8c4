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
from collections.abc import Iterator
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

from .command_line import mounted, need_root
from .offloaded import wrap_adamw
from .planned import planned
from .quick import covering

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
    "too little host memory": ["--host-memory", "2MiB", "--device-memory", "16MiB", *CHUNKS],
    "too little device memory": ["--host-memory", "64MiB", "--device-memory", "128KiB", *CHUNKS],
    "too little of both": ["--host-memory", "1MiB", "--device-memory", "128KiB", *CHUNKS],
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
        check_cures(capsys, [*SMALL, *SHORT, *BUDGETS[case], "--nvme", drive])


def test_budgets_without_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    host = ["--host-memory", "2MiB", "--device-memory", "16MiB", *CHUNKS]
    found = check_cures(capsys, [*SMALL, *SHORT, *host])
    assert any("--nvme DIR" in words for words in found) or any("--host-memory" in words for words in found)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["optimizer-state", "parameters", "gradients"])
def test_nvme_without_a_directory(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_cures(capsys, [*SMALL, *SHORT, *CHUNKS, f"--{kind}", "nvme"])
    assert any("--nvme DIR" in words for words in found)


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


@pytest.mark.root
def test_a_drive_with_just_the_room_on_ext4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A file system that takes space for its own notes."""
    need_root()
    image, place = tmp_path / "image", tmp_path / "drive"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MiB)
    subprocess.run(["mkfs.ext4", "-q", "-b", "4096", "-m0", str(image)], check=True, timeout=20)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True, timeout=20)
    try:
        arguments = [*SMALL, *SHORT, *CHUNKS, *ON_NVME, "--nvme", str(place)]
        _, result = command(capsys, "plan", *arguments)
        [there] = result["standing"]
        with (place / "mine").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (there["free"] - there["needed"]) // 4096 * 4096)
        assert command(capsys, "plan", *arguments)[0] == 0
        train(*arguments)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=20)


@pytest.mark.root
def test_two_drives_of_unequal_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is checked; together they would have the room."""
    with drives(3 * MiB, 64 * MiB) as both:
        named = [w for drive in both for w in ("--nvme", drive)]
        check_cures(capsys, [*SMALL, *SHORT, *CHUNKS, *ON_NVME, *named])
        budgets = ["--host-memory", "5MiB", "--device-memory", "2MiB"]
        check_cures(capsys, [*SMALL, *SHORT, *CHUNKS, *ON_NVME, *named, *budgets])


@pytest.mark.root
@pytest.mark.parametrize("order", [1, -1])
def test_scratch_goes_where_there_is_room(order: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The smaller drive has room for its arena and for nothing else, whether it comes first or last."""
    with drives(64 * MiB, 64 * MiB) as both:
        named = [w for drive in both for w in ("--nvme", drive)]
        _, result = command(capsys, "plan", *SMALL, *SHORT, *CHUNKS, *ON_NVME, *named)
    sizes = [result["standing"][0]["arenas"], 64 * MiB][::order]
    sizes[0 if order == 1 else 1] = result["standing"][0 if order == 1 else 1]["arenas"]
    with drives(*sizes) as both:
        named = [w for drive in both for w in ("--nvme", drive)]
        arguments = [*SMALL, *SHORT, *CHUNKS, *ON_NVME, *named]
        assert command(capsys, "plan", *arguments)[0] == 0
        train(*arguments)


def test_no_room_where_a_model_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory is named: the model stands in the directory for temporary files."""
    with drives(MiB) as [drive]:
        monkeypatch.setenv("TMPDIR", drive)
        monkeypatch.setattr("tempfile.tempdir", drive)
        arguments = [*SMALL, *SHORT]
        code, result = command(capsys, "plan", *arguments)
        cure = result["problems"][0]["cure"]
        monkeypatch.undo()
    assert code == 1
    [(words, room)] = alternatives(cure)
    with drives(room) as [drive]:
        train(*applied(arguments, words, drive))


def test_a_directory_that_is_misspelt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "no such" / "run")
    arguments = [*SMALL, *SHORT, *CHUNKS, *ON_NVME, "--nvme", missing]
    code, result = command(capsys, "plan", *arguments)
    assert (code, result["error"]["type"]) == (2, "DirectoryError")
    subprocess.run(result["error"]["cure"], shell=True, check=True, timeout=20)
    train(*arguments)


def test_activations_and_device_are_one_sum(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--device", "cpu", "--preset", "10m", "--batch", "131072", "--sequence", "1024"]
    found = check_cures(capsys, large, trains=False)
    assert any("--recompute" in words or "--batch" in words for words in found)


def test_activations_beside_the_device_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = tmp_path / "machine.yaml"
    machine.write_text("{device: {memory: 64MiB}, host: {memory: 8GiB}}")
    arguments = ["--preset", "10m", "--machine", str(machine), "--device-memory", "60MiB"]
    code, result = command(capsys, "plan", *arguments)
    assert code == 1
    assert [p["tier"] for p in result["problems"]] == ["device"]
    check_cures(capsys, arguments, trains=False)


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
    "too little of both": {"host_memory": "1MiB", "device_memory": "200KiB"},
    "a second copy": {
        **{"host_memory": "2MiB", "device_memory": "8MiB", "update": "delayed"},
        **{"optimizer_state": "nvme", "gradients": "nvme"},
    },
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


@covering
@pytest.mark.root
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", WRAPS)
def test_wrap(case: str, named: bool, tmp_path: Path) -> None:
    given = {"device": "cpu", "chunk_elements": 65536, **WRAPS[case]}
    if not named and "nvme" in given.values():
        return  # without a directory there is no such configuration
    check_wrap(infinity.Config(**given, nvme=tmp_path if named else None), BudgetError)


@pytest.mark.root
def test_wrap_on_a_full_drive() -> None:
    places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme")
    budgets = {"device": "cpu", "chunk_elements": 65536, "host_memory": "64MiB", "device_memory": "8MiB"}
    with drives(3 * MiB, 64 * MiB) as both:
        for directories in (both[:1], both):
            config = infinity.Config(**places, **budgets, nvme=directories)
            found = check_wrap(config, DirectoryError)
            assert found[0].startswith("free ")
            assert any("nvme=" in words for words in found)


@pytest.mark.root
def test_freeing_what_a_full_drive_says_is_enough() -> None:
    places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme")
    config = {"device": "cpu", "chunk_elements": 65536, "host_memory": "64MiB", "device_memory": "8MiB"}
    with drives(12 * MiB) as [drive]:
        used = Path(drive, "mine")
        used.write_bytes(bytes(8 * MiB))
        with pytest.raises(DirectoryError) as caught:
            train_once(infinity.Config(**places, **config, nvme=drive))
        assert caught.value.errno == errno.ENOSPC
        size = re.match(r"free ([\d.]+ \w+) there", str(caught.value.cure))
        assert size is not None
        with used.open("r+b") as file:
            file.truncate(8 * MiB - parse_size(size[1]) - 64 * 1024)  # it is printed with two digits
        train_once(infinity.Config(**places, **config, nvme=drive))


def test_nvme_without_a_directory_in_config(tmp_path: Path) -> None:
    places = dict.fromkeys(("parameters", "optimizer_state"), "nvme")
    with pytest.raises(ConfigError) as caught:
        infinity.Config(device="cpu", **places)  # type: ignore[arg-type]
    for words, _ in alternatives(str(caught.value.cure)):
        changed = settings(words.replace("/path/on/a/drive", str(tmp_path)), "")
        train_once(infinity.Config(**{"device": "cpu", **places, **changed}))


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
