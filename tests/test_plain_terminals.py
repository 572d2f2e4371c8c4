"""Terminals without UTF-8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .command_line import old_arena, python, words

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.mark.first
@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "C"],
)
def test_no_terminal_is_too_plain(env: dict[str, str], tmp_path: Path) -> None:
    drive = tmp_path / "größe-大"
    drive.mkdir()
    old_arena(str(drive))
    commands = [
        ["doctor", "DRIVE"],
        ["doctor", "--clean", "DRIVE"],
        ["tune", "DRIVE", "--seconds", "1"],
        ["plan", *words("DRIVE")],
        ["plan", *words("DRIVE/nothing")],
    ]
    code = (
        "import json, sys\n"
        "from infinity.cli.ending import begin\n"
        "from infinity.cli.main import run\n"
        "begin()\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    code = run([word.replace('DRIVE', sys.argv[2]) for word in command])\n"
        "    print('<', code, '>', flush=True)\n"
    )
    done = python("-c", code, json.dumps(commands), str(drive), env=env, text=False)
    shown, err = done.stdout.decode("latin-1"), done.stderr.decode("latin-1")
    assert done.returncode == 0, err
    for name in ("Traceback", "UnicodeEncodeError", "Logging error"):
        assert name not in err + shown
    assert [int(line[2:-2]) for line in shown.splitlines() if line.startswith("< ")] == [0] * 4 + [2]
    assert "MiB \\xd7 " in shown
    assert "×".encode() not in done.stdout
    done = python("-m", "infinity", "doctor", str(drive), env=env, text=False)
    assert b"Traceback" not in done.stderr
    assert b"free: " in done.stdout
