"""Files of `torch.save`, read by torch itself, with ``weights_only=True``.

[Note: no code from pickles] With ``weights_only=True`` torch makes containers, numbers, texts and tensors,
and refuses every other name in a file. Other programs save objects of their own classes besides. Such a class
is not imported: a `Record` stands for it under its name, and keeps what the file has of the object.

Tensors are mapped from the file, and a page of it is read when it is used. The archive has a CRC-32 of each
entry. `load_saved` reads the whole file once to compare them, so that a damaged or unreadable file is an
error before anything of it is used. A file that becomes shorter after that, or a drive that fails then, ends
the process (SIGBUS).
"""

from __future__ import annotations

import errno
import io
import os
import stat
import zipfile
import zlib
from typing import Any, ClassVar, Final, TypeGuard

import torch

from infinity.core.errors import CorruptionError, DataError, InfinityError
from infinity.storage.folder import failed

_PIECE: Final = 1 << 20  # bytes that are read at once for the checksums


class Record:
    """An object of a class that is not imported, as a file has it.

    Attributes:
        name: of its class, or of the function that would make it.
        args: the arguments that the class would get.
        state: what the object would get then; of most classes a dict of its attributes.
    """

    name: ClassVar[str] = ""

    def __new__(cls, *args: Any) -> Record:
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def attribute(self, name: str) -> Any:
        """Return an attribute, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def load_saved(path: str) -> Any:
    """Return what `torch.save` has written into a file: containers, numbers, texts, tensors on the CPU that
    are mapped from the file, and a `Record` for each object of another class. A class that the program has
    allowed before (`torch.serialization.add_safe_globals`) is made by torch. No other thread may load files
    by torch meanwhile: the list of allowed names is one for the process.

    Raises:
        DirectoryError: the file cannot be read.
        CorruptionError: it is not an archive of torch, or not the bytes that were written.
        DataError: torch refuses its content.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _damaged(path, "no regular file")
        return _load(path, path, mmap=True)
    except InfinityError:
        raise
    except OSError as error:
        raise failed("read", path, error) from error


def load_bytes(data: io.BytesIO, path: str) -> Any:
    """Return what `torch.save` has written into `data`, which is a part of the file `path`: see `load_saved`.
    The tensors are in memory."""
    return _load(data, path, mmap=False)


def _load(source: str | io.BytesIO, path: str, *, mmap: bool) -> Any:
    check_archive(source, path)
    data = source.getvalue() if isinstance(source, io.BytesIO) else None

    def begin() -> str | io.BytesIO:
        return path if data is None else io.BytesIO(data)

    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(begin())
        stand_ins = [(type("Record", (Record,), {"name": name}), name) for name in names]
        with torch.serialization.safe_globals(stand_ins):  # type: ignore[arg-type]
            return torch.load(begin(), map_location="cpu", weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # torch raises errors of many kinds for a content that it does not take
        raise refused(path, error) from error


def refused(path: str, error: Exception) -> DataError:
    """Return the error for a content that torch does not load."""
    return DataError(
        f"torch refuses to load {path} with weights_only=True",
        expected="what torch.save writes: values, containers, tensors, and objects of classes",
        found=f"{type(error).__name__}: {_cause(str(error))}"[:300],
        cure="load it by the program that wrote it, and save it again with a newer version of torch; if it "
        "is a copy, copy it again from its source",
    )


def _cause(text: str) -> str:
    """Return the cause in an error of torch, which stands between advice to unpickle without a check."""
    paragraphs = text.split("\n\n")
    return paragraphs[-2].strip() if text.startswith("Weights only load failed") and paragraphs[1:] else text


def check_archive(source: str | io.BytesIO, path: str) -> None:
    """Compare the bytes of a zip archive with the CRC-32s in it. An entry that was written without one has 0,
    and is not compared. `path`: the file that errors name.

    Raises:
        CorruptionError: it is no zip archive, or an entry is damaged.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:  # torch maps the bytes of the file as they are
                    raise _damaged(path, f"{info.filename!r} is compressed")
                with archive.open(info) as file:
                    left = info.file_size if info.CRC else 0
                    while left > 0:
                        left -= len(file.read(_PIECE)) or left
    except InfinityError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise _damaged(path, f"{error}"[:200] or type(error).__name__) from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _damaged(path, "an entry outside of the file") from error  # it seeks to a negative offset


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor on the CPU whose elements are in memory, each at its place. One that
    repeats its elements (`expand`) is not, if it would be larger than 1 MiB: a file can name any size."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    return value.device.type == "cpu" and value.numel() * value.itemsize <= max(
        _PIECE, value.untyped_storage().nbytes()
    )


def part(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return `count` elements of a tensor from element `first` on, in their order, or as many as there are:
    flat. Of a contiguous tensor it is a view."""
    return tensor.detach().reshape(-1)[first : first + count]


def _damaged(path: str, found: str) -> CorruptionError:
    return CorruptionError(
        f"{path} is not a readable file of torch",
        path=path,
        expected="the archive that torch.save writes, with the bytes that were written",
        found=found,
        cure="copy it again from its source; if it is of a version of torch before 1.6, load it by torch and "
        "save it again",
    )
