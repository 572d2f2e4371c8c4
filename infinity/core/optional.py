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
    """Return the error for a package that cannot be imported. It names the package that causes this."""
    while error.__cause__ is not None:
        error = error.__cause__
    blamed = _blamed(package, error)
    through = "" if blamed == package else f", which {package} imports,"
    again = f"pip install --force-reinstall {blamed}"
    if blamed.startswith("torch"):  # built for one version of torch
        again += ", in the version that belongs to this torch"
    leave = "" if blamed == package else f"; or, if nothing needs it, pip uninstall {blamed}"
    return DataError(
        f"{blamed}{through} is installed, but cannot be imported",
        expected=f"a {blamed} that fits the other packages",
        found=f"{type(error).__name__}: {error}",
        cure=again + leave,
    )


def _blamed(package: str, error: BaseException) -> str:
    """Return the package whose code `package` was calling when `error` was raised; else `package` itself."""
    modules = []
    trace = error.__traceback__
    while trace is not None:
        modules.append(trace.tb_frame.f_globals.get("__name__", "").split(".")[0])
        trace = trace.tb_next
    last = max((i for i, name in enumerate(modules) if name == package), default=-1)
    others = (name for name in modules[last + 1 :] if name not in ("importlib", "infinity", ""))
    return next((name for name in others if last >= 0), package)
