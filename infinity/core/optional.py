"""Packages that only some uses need, and what to do if one is missing or broken."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Final

from .errors import DataError

_DISTRIBUTION: Final = "infinity-offload"


def optional(package: str, extra: str | None, *names: str) -> list[Any]:
    """Return the objects `names` of a package, or of a module of it. `extra` is infinity's extra that
    installs it; None: none does.

    Raises:
        DataError: the package is not installed, or it, or a package that it imports, is broken.
    """
    installed = package.partition(".")[0]
    try:
        if importlib.util.find_spec(installed) is None:
            raise DataError(
                f"{installed} is not installed",
                expected=f"the package {installed}",
                found=f"No module named {installed!r}",
                cure=f"pip install '{_DISTRIBUTION}[{extra}]'" if extra else f"pip install {installed}",
            )
        module = importlib.import_module(package)
        return [getattr(module, name) for name in names]  # some import only now what they need
    except DataError:
        raise
    except Exception as error:  # whatever a package that is broken raises
        raise broken(installed, error) from error


def broken(package: str, error: BaseException) -> DataError:
    """Return the error for a package that cannot be imported, with what was raised first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return DataError(
        f"{package} is installed, but cannot be imported",
        expected="packages of versions that go together",
        found=f"{type(error).__name__}: {error}",
        cure=f"pip install --force-reinstall {package}, or the package that the error names",
    )
