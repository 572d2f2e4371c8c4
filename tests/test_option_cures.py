"""Cures in the words of the command line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import infinity
from infinity.cli.main import run
from infinity.core.config import Config
from infinity.core.errors import ConfigError, DirectoryError

from .command_line import words

pytestmark = pytest.mark.usefixtures("own_environment")


def test_cures_are_in_the_words_of_who_asked(nvme: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(optimizer_state="nvme")
    assert raised.value.cure == 'nvme="/path/on/a/drive", or optimizer_state="host"'
    small = ["--layers", "1", "--width", "64", "--heads", "2", "--device", "cpu"]
    command = ["plan", *small, "--optimizer-state", "nvme"]
    assert run([*command, "--json"]) == 1
    assert "--nvme DIR" in json.loads(capsys.readouterr().out)["problems"][0]["cure"]
    assert run([*command, "--nvme", nvme]) == 0
    assert run([*command, "--optimizer-state", "host"]) == 0


def test_an_address_is_no_path(nvme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The cure of file:// is the path in it; that of others, a path of this machine."""
    before = sorted(os.listdir())
    model = torch.nn.Linear(4, 4)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), Config(device="cpu"))
    path = os.path.join(nvme, "with a space")
    os.mkdir(path)
    calls: list[Callable[[str], object]] = [
        lambda p: Config(nvme=p),
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
    assert run(["plan", *words(nvme), "--nvme", "s3://bucket/x"]) == 2
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
    config = Config(nvme="~/x y", device="cpu", optimizer_state="nvme")
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
