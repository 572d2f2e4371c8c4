"""Settings from YAML files."""

from __future__ import annotations

import os
from typing import Any

from .errors import ConfigError


def read_yaml(path: str | os.PathLike[str], *, expected: str, cure: str) -> Any:
    """Return what a YAML (or JSON) file holds.

    Raises:
        ConfigError: the file is not readable, is not YAML, or names a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a mapping that names a key twice: YAML forbids it, and PyYAML would take the last value."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None and twice != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"{twice!r} is there twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return yaml.load(file, Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {os.fspath(path)!r}",
            expected=expected,
            found=str(error) or type(error).__name__,
            cure=cure,
        ) from error
