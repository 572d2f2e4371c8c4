"""Commands that run as one process."""

from __future__ import annotations

import os

from infinity.core.errors import ConfigError


def check_alone(what: str) -> None:
    """Raise `ConfigError` if this is one of several processes of a job (torchrun)."""
    if (world := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
        raise ConfigError(
            f"{what} does not run on several ranks yet",
            expected="one process",
            found=f"WORLD_SIZE={world}",
            cure="start it without torchrun; or `infinity.wrap` a model in a script of your own",
        )
