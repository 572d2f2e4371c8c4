"""A thread that finds no memory at one moment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import infinity

_PACKAGE = os.path.dirname(infinity.__file__)


class Shortage:
    """Raises MemoryError where the `at`th call begins of a function in a file of `folders`, once, on the
    thread that is inside of `here`.

    Attributes:
        fired: where that was; empty: there were not so many calls.
    """

    def __init__(self, at: int, *folders: str) -> None:
        self.fired = ""
        self._left = at
        self._folders = tuple(os.path.join(_PACKAGE, folder) + os.sep for folder in folders)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """A block that the error ends, if it comes."""
        sys.settrace(self._call)
        try:
            yield
        except MemoryError:
            assert self.fired
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if self.fired or not code.co_filename.startswith(self._folders) or code.co_flags & CO_GENERATOR:
            return None
        self._left -= 1
        if self._left < 0:
            path = os.path.relpath(code.co_filename, _PACKAGE)
            self.fired = f"{path}:{frame.f_lineno} {code.co_name}"
            raise MemoryError(self.fired)
        return None
