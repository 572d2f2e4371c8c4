"""Every error that infinity raises.

::

    InfinityError
    ├── ConfigError (ValueError)         a setting is unknown, contradictory or not available
    │   └── BudgetError                  a run does not fit the memory or disk space that it may use
    ├── BuildError (ImportError)         a native module is missing or does not fit this machine
    ├── WrapError (ValueError)           `wrap` does not support a model or an optimizer
    │   └── OptimizerTypeError           the optimizer, or one of its options, is not supported
    ├── ParameterError (RuntimeError)    a use of a parameter that offloading does not support
    │   ├── ReleasedParameterError       its values are not on the device at this moment
    │   ├── ParameterChangedError        added, replaced, cast, moved or edited after `wrap`
    │   └── GradientError                a use of a gradient that its shards do not support
    ├── PrecisionError (RuntimeError)    autocast, or an unscaled fp16 backward
    ├── StateDictError (ValueError)      a state dict does not fit the model or the optimizer
    ├── StorageError (OSError)           the storage of a tier failed
    │   ├── DirectoryError               an NVMe directory is missing, full, read-only or in use
    │   ├── TransferError                the system reported an error for a read or a write
    │   │   ├── ShortTransferError       it moved fewer bytes than requested
    │   │   └── DeadlineError            it did not finish in time; its buffer is quarantined
    │   └── CorruptionError              bytes read differ from the bytes written (CRC mismatch)
    ├── OutOfMemoryError (MemoryError)   the host or the device ran out of memory during a run
    ├── BackendError (RuntimeError)      an I/O backend is unknown or does not work here
    ├── ClosedError (RuntimeError)       the engine or one of its parts is closed, or was forked
    ├── ThreadError (RuntimeError)       another thread holds the engine lock for too long
    ├── RankError (RuntimeError)         another rank failed, exited, or did not arrive in time
    │   └── DivergenceError              the ranks do not make the same calls
    └── DataError (ValueError)           training data, a model directory or a checkpoint of another program
                                         cannot be used

A message says what was expected, what was found and what to change (`cure`).
"""

from __future__ import annotations

import errno as numbers

from .system_errors import cure as limit_cure
from .system_errors import reason

__all__ = [
    "BackendError",
    "BudgetError",
    "BuildError",
    "ClosedError",
    "ConfigError",
    "CorruptionError",
    "DataError",
    "DeadlineError",
    "DirectoryError",
    "DivergenceError",
    "GradientError",
    "InfinityError",
    "OptimizerTypeError",
    "OutOfMemoryError",
    "ParameterChangedError",
    "ParameterError",
    "PrecisionError",
    "RankError",
    "ReleasedParameterError",
    "ShortTransferError",
    "StateDictError",
    "StorageError",
    "ThreadError",
    "TransferError",
    "WrapError",
]


class InfinityError(Exception):
    """Base of all errors of this package.

    Args:
        what: one sentence that names the subject and the problem.
        expected: the expected value or state.
        found: the value or state that was found.
        cure: what the user can change.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        cure: str | None = None,
    ) -> None:
        self.what = what
        self.expected = expected
        self.found = found
        self.cure = cure
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.found is not None:
            lines.append(f"  found: {self.found}")
        if self.cure is not None:
            lines.append(f"  to change: {self.cure}")
        return "\n".join(lines)


class ConfigError(InfinityError, ValueError):
    """A setting is unknown, contradictory or not available here."""


class BudgetError(ConfigError):
    """A run does not fit the memory or the disk space that it may use."""


class BuildError(InfinityError, ImportError):
    """A native module is missing or does not fit this machine; or another package is installed as well."""


class WrapError(InfinityError, ValueError):
    """`wrap` does not support a model or an optimizer; or a call needs a wrapped model."""


class OptimizerTypeError(WrapError):
    """The optimizer, or one of its options, is not supported."""


class ParameterError(InfinityError, RuntimeError):
    """The program used a parameter in a way that offloading does not support."""


class ReleasedParameterError(ParameterError):
    """A parameter's values are not on the device at this moment."""


class ParameterChangedError(ParameterError):
    """The program added, replaced, cast, moved or edited a parameter after `wrap`."""


class GradientError(ParameterError):
    """The program used a gradient in a way that its shards do not support."""


class PrecisionError(InfinityError, RuntimeError):
    """The program uses autocast, or an fp16 backward of an unscaled loss; or a dtype is not supported."""


class StateDictError(InfinityError, ValueError):
    """A state dict does not fit the model or the optimizer."""


class StorageError(InfinityError, OSError):
    """The storage of a tier failed.

    `errno` is the system's error number where there is one, `path` the file, `offset` and
    `nbytes` the range in it, in bytes.
    """

    def __init__(
        self,
        what: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        expected: object = None,
        found: object = None,
        cure: str | None = None,
    ) -> None:
        if errno in (numbers.EMFILE, numbers.ENFILE):  # whatever the file is: the limit is the cause
            expected, found, cure = None, reason(errno), limit_cure(errno, "")
        super().__init__(what, expected=expected, found=found, cure=cure)
        self.errno = errno
        self.path = path
        self.offset = offset
        self.nbytes = nbytes


class DirectoryError(StorageError):
    """An NVMe directory is missing, full, read-only, in use or not a directory."""


class TransferError(StorageError):
    """The system reported an error for a read, a write or a sync."""


class ShortTransferError(TransferError):
    """A transfer moved fewer bytes than requested, and could not be continued."""


class DeadlineError(TransferError):
    """A transfer did not finish before its deadline; its buffer is quarantined."""


class CorruptionError(StorageError):
    """Bytes that were read differ from the bytes that were written."""


class OutOfMemoryError(InfinityError, MemoryError):
    """The host or the device ran out of memory during a run."""


class BackendError(InfinityError, RuntimeError):
    """An I/O backend is unknown or does not work on this machine."""


class ClosedError(InfinityError, RuntimeError):
    """The engine, or one of its parts, is closed or belongs to another process."""


#: The cure of uses of a model in a fork of the process that wrapped it: a fork has no thread of the engine.
OF_A_FORK = (
    "use the model in the process that wrapped it; this process is a fork, and may wrap a separate model"
)


class ThreadError(InfinityError, RuntimeError):
    """Another thread holds the engine lock for too long, or two threads wait for each other."""


class RankError(InfinityError, RuntimeError):
    """Another rank failed, exited, or did not arrive in time."""


class DivergenceError(RankError):
    """The ranks do not make the same calls."""


class DataError(InfinityError, ValueError):
    """Training data, a model directory or a checkpoint of another program cannot be used."""
