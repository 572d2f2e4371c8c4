"""Errors in the words of the command line: ``--nvme DIR`` where a program writes ``nvme="…"``."""

from __future__ import annotations

import re
from typing import Final

from infinity.core.errors import InfinityError

from .settings import OPTIONS, Option

_OF_ENGINE: Final = {option.name: option for option in OPTIONS if option.section == "engine"}
_NAMES: Final = "|".join(sorted(_OF_ENGINE, key=len, reverse=True))
_VALUE: Final = r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|'[^']*'|[\w.+-]+|"
#: ``name=value``; ``the setting name``; or a name that is no English word.
_SETTING: Final = re.compile(
    rf"(?<![\w./-])(?:(?:the )?setting (?P<called>{_NAMES})\b|(?P<name>{_NAMES})=(?P<value>{_VALUE})"
    rf"|(?P<alone>{'|'.join(name for name in _OF_ENGINE if '_' in name)})\b(?!=))"
)


def in_options(text: str) -> str:
    """Return `text` with each setting of the engine named as an option."""
    return _SETTING.sub(_as_option, text)


def say_in_options(error: InfinityError) -> None:
    """Have an error name settings as options."""
    for part in ("what", "expected", "found", "cure"):
        text = getattr(error, part)
        if isinstance(text, str):
            setattr(error, part, in_options(text))


def _as_option(match: re.Match[str]) -> str:
    option = _OF_ENGINE[match["called"] or match["name"] or match["alone"]]
    value = match["value"]
    if value == "None":
        return f"no {option.flags}"
    if option.kind == "dirs" and value is not None:
        return f"{option.flags} DIR"
    return f"{option.flags} {_as_argument(option, value)}" if value else option.flags


def _as_argument(option: Option, value: str) -> str:
    if value.startswith("{"):
        return re.sub(r"[\s\"'{}]", "", value)
    if option.kind == "names":
        return re.sub(r"[\s\"'\[\]]", "", value).strip(".") or "NAME"
    return value.strip("\"'")
