"""Whether this package is the only one that is installed as `infinity`.

Another project, MegaTrain, imports as `infinity`, too. pip puts both into one directory, where the files of
the one that came last count: what runs then is neither. If one of them is elsewhere on the path (an editable
installation), the order of the path decides which one a program gets.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from .errors import BuildError

#: What this package has in its directory, beside native modules.
OURS: Final = frozenset(
    (
        *("__init__.py", "__main__.py", "version.py", "py.typed", "_aio.pyi", "_cpu_adam.pyi"),
        *("api", "autograd", "cli", "core", "grads", "hardware"),
        *("integrations", "optim", "params", "planning", "storage"),
    )
)
_MARK: Final = ("core", "installed.py")  # this file


def check_installed() -> None:
    """Raise `BuildError` if another distribution has put files into the directory of this package, or has a
    package of this name elsewhere on the path. Other copies of this package are no others.

    Only where there are files of others does it ask which distributions are installed, which takes a while.
    """
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ours = hasattr(sys.modules["infinity"], "_HOMES")  # its `__init__.py`
    others = sorted(
        name
        for name in os.listdir(here)
        if name not in OURS and name[0] not in "._" and (name.endswith(".py") or "." not in name)
    )
    for folder in sys.path:
        other = os.path.join(folder or os.curdir, "infinity")
        if os.path.isfile(os.path.join(other, "__init__.py")) and not os.path.isfile(
            os.path.join(other, *_MARK)
        ):
            raise BuildError(
                "two packages on the path are named `infinity`",
                expected=f"this one alone, {here}",
                found=f"another one in {os.path.abspath(other)}",
                cure="pip uninstall the other one, or give each an environment of its own; if it is a "
                "directory of yours, rename it",
            )
    if ours and not others:
        return
    from importlib.metadata import packages_distributions

    names = sorted({*packages_distributions().get("infinity", ())})
    if ours and len(names) < 2:
        return
    raise BuildError(
        "two distributions are installed as `infinity`",
        expected=f"infinity-offload alone in {here}",
        found=f"the distributions {', '.join(names) or '(unknown)'}"
        + (f", which also brought {', '.join(others)}" if others else ""),
        cure="pip uninstall the other one and infinity-offload, then pip install infinity-offload; or give "
        "each an environment of its own",
    )
