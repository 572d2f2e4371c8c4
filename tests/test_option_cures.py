"""Cures in the words of the command line."""

from __future__ import annotations

import json
import os

import pytest

from infinity.cli.main import run
from infinity.cli.settings import in_options
from infinity.core.config import Config
from infinity.core.errors import ConfigError

from .command_line import words

pytestmark = pytest.mark.usefixtures("own_environment")


def test_no_name_is_no_data(text: str, nvme: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(text, nvme, "--steps", "1")
    for option, cure in (
        ("--data", "name one with --data, or leave --data out"),
        ("--json-log", "name a file with --json-log, or leave it out"),
        ("--trace", "name a file with --trace, or leave it out"),
        ("--nvme", "--nvme DIR"),
    ):
        assert run(["train", *command, option, ""]) == 2
        assert f"to change: {cure}" in capsys.readouterr().err
    assert os.listdir(nvme) == []


def test_cures_are_in_the_words_of_who_asked(
    text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(optimizer_state="nvme")
    assert raised.value.cure == 'nvme="/path/on/a/drive", or optimizer_state="host"'
    small = ["--layers", "1", "--width", "64", "--heads", "2", "--device", "cpu", "--data", text, "--no-save"]
    small += ["--steps", "1", "--batch", "1", "--sequence", "8", "--sample-tokens", "0"]
    command = ["train", *small, "--optimizer-state", "nvme"]
    assert run([*command, "--json"]) == 2
    shown = capsys.readouterr()
    cure = json.loads(shown.out)["error"]["cure"]
    assert "--nvme DIR" in cure
    assert "nvme=" not in cure
    assert f"to change: {cure}" in shown.err
    assert run([*command, "--nvme", nvme]) == 0
    assert run([*command, "--optimizer-state", "host"]) == 0
    capsys.readouterr()
    assert run([*command, "--nvme", nvme, "--activation-memory", "1MiB"]) == 2
    assert "to change: --activations host, or leave --activation-memory out" in capsys.readouterr().err
    assert run([*command, "--nvme", f"{nvme}/missing"]) == 2
    assert "nvme=" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('nvme="/path/on/a/drive", or parameters="host"', "--nvme DIR, or --parameters host"),
        ("name another first in nvme=", "name another first in --nvme DIR"),
        ("make /a/host_memory, or correct the setting nvme", "make /a/host_memory, or correct --nvme"),
        ('gradients={"host": 0.3, "nvme": 0.7}', "--gradients host:0.3,nvme:0.7"),
        ('units=["Block"]', "--unit Block"),
        ("raise host_memory, or lower chunk_elements", "raise --host-memory, or lower --chunk-elements"),
        ("place parameters elsewhere", "place parameters elsewhere"),
        ("nvme=None", "no --nvme"),
    ],
)
def test_settings_are_said_as_options(text: str, said: str) -> None:
    assert in_options(text) == said
