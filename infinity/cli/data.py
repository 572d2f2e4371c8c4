"""Real text as batches of tokens, without ever holding it in memory.

A `Corpus` is a list of text files, read as one long stream. Tokens are its bytes, or what a
tokenizer makes of them, which is written once to a nameless file. A batch is a function of
(seed, step, micro-batch) and the rank alone: a run can be repeated from any step.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from infinity.core.errors import DataError, DirectoryError, InfinityError
from infinity.core.sizes import format_size
from infinity.storage.checkpoints import is_checkpoint

from .settings import VALIDATION

#: A file whose first bytes hold a NUL is taken to be binary.
_HEAD: Final = 8192
Tokens = npt.NDArray[np.integer[Any]]


def find_files(source: str | os.PathLike[str] | None, option: str = "--data") -> list[Path]:
    """Return the text files of `source`: a file, a directory (searched whole, hidden files and checkpoints
    left out), a glob, or None for the sources of Python's standard library. `option` names it, for messages.

    The order does not follow the names, so that the end of the stream is no one part of it.

    Raises:
        DataError: nothing is there, or none of it is text.
    """
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in _walk(root) if p.suffix == ".py" and not _outside_stdlib(p.relative_to(root))]
    else:
        name = os.path.expanduser(os.fspath(source))
        if not name:
            raise DataError(
                "the data has no name",
                expected="a file, a directory or a glob",
                found="''",
                cure=f"name one with {option}, or leave {option} out",
            )
        path = Path(name)
        if path.is_file():
            if _is_binary(path):
                raise DataError(
                    f"{name!r} is not text",
                    expected="a text file (UTF-8, or any encoding without NUL bytes)",
                    found="NUL bytes",
                    cure="name a text file, or a directory or glob of them",
                )
            return [path]
        root = path if path.is_dir() else Path(os.path.dirname(name.split("*")[0].split("?")[0]) or ".")
        if path.is_dir():
            found = list(_walk(path))
        elif glob.has_magic(name):
            found = [Path(p) for p in glob.glob(name, recursive=True) if os.path.isfile(p)]
        else:
            raise DataError(
                f"there is no data at {name!r}",
                expected="a file, a directory or a glob",
                found="not a regular file" if path.exists() else "nothing",
                cure=f"check {option}, or leave it out",
            )
    texts = [p for p in found if p.stat().st_size and not _is_binary(p)]
    if not texts:
        raise DataError(
            f"there is no text in {os.fspath(source) if source is not None else 'the standard library'!r}",
            expected="text files that are not empty",
            found=f"{len(found)} files, all empty or binary" if found else "no files",
            cure=f"name a file, a directory or a glob with text: {option} 'texts/**/*.txt'",
        )

    def mixed(path: Path) -> tuple[bytes, str]:
        inside = os.path.relpath(path, root)
        return hashlib.sha256(inside.encode("utf-8", "surrogateescape")).digest(), inside

    return sorted(texts, key=mixed)


def _walk(root: Path) -> Iterable[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if not n.startswith(".")]
        if is_checkpoint(folder):  # of an earlier run: its index is text, too
            continue
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _outside_stdlib(inside: Path) -> bool:
    return any(fnmatch.fnmatch(part, "*-packages") for part in inside.parts)


def _is_binary(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(_HEAD)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{str(path)!r} cannot be read",
        expected="a readable file",
        found=os.strerror(error.errno or 0),
        cure=("change its permissions, or " if isinstance(error, PermissionError) else "")
        + "leave it out of the text",
    )


class ByteStream:
    """The bytes of files, one after the other. Windows are read from disk when they are asked for."""

    vocab = 256

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._edges = list(itertools.accumulate((path.stat().st_size for path in files), initial=0))
        self.length = self._edges[-1]

    def read(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """Return `count` bytes from `start` on.

        Raises:
            DataError: a file cannot be read, or is shorter than it was.
        """
        out = np.empty(count, np.uint8)
        at, end = start, start + count
        while at < end:
            index = bisect.bisect_right(self._edges, at) - 1
            path, offset = self.files[index], at - self._edges[index]
            want = min(end, self._edges[index + 1]) - at
            try:
                with open(path, "rb", buffering=0) as file:
                    got = os.preadv(file.fileno(), [out[at - start : at - start + want].data], offset)
            except OSError as error:
                raise _unreadable(path, error) from error
            if got != want:
                raise DataError(
                    f"{str(path)!r} changed while it was read",
                    expected=f"{want} bytes at offset {offset}",
                    found=f"{got} bytes",
                    cure="train on files that nothing writes to",
                )
            at += want
        return out


class TokenStream:
    """The tokens of files, made once and kept in a nameless file that is mapped.

    Args:
        encode: text → token ids.
        vocab: number of token ids.
        separator: a token between files, or None.
        directory: where the nameless file is made; None: the system's directory for such files.
    """

    def __init__(
        self,
        files: Sequence[Path],
        encode: Callable[[str], Sequence[int]],
        vocab: int,
        *,
        separator: int | None = None,
        directory: str | None = None,
    ) -> None:
        self.files = tuple(files)
        self.vocab = vocab
        dtype = np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
        with _scratch(directory) as file:
            for path in self.files:
                try:
                    text = path.read_text(encoding="utf-8", errors="replace")
                except OSError as error:
                    raise _unreadable(path, error) from error
                ids = list(encode(text))
                if separator is not None:
                    ids.append(separator)
                file.write(np.asarray(ids, dtype).tobytes())
            self.length = file.tell() // dtype.itemsize
            file.flush()
            # The mapping keeps the file alive; its pages are the kernel's to drop.
            self._tokens: Tokens = (
                np.memmap(file, dtype, mode="r", shape=(self.length,)) if self.length else np.empty(0, dtype)
            )

    def read(self, start: int, count: int) -> Tokens:
        """Return `count` tokens from `start` on."""
        return self._tokens[start : start + count]


@contextlib.contextmanager
def _scratch(directory: str | None) -> Iterator[IO[bytes]]:
    """A nameless file in `directory`; what the system says against it is a `DirectoryError`."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            yield file
    except OSError as error:
        if isinstance(error, InfinityError):
            raise
        raise DirectoryError(
            f"the tokens cannot be kept in {directory or tempfile.gettempdir()!r}",
            errno=error.errno,
            path=directory,
            expected="a writable directory with room for 2 to 4 bytes per token",
            found=os.strerror(error.errno or 0),
            cure="make it, make room, or name another with --nvme",
        ) from error


#: A long sequence of tokens, `length` of them, of `vocab` kinds; `read(start, count)` gives some, 1-d.
Stream = ByteStream | TokenStream


class Corpus:
    """Windows of a stream, in two parts: for training, and for validation.

    Args:
        stream: the tokens.
        sequence: tokens of a window.
        seed: chooses which windows make a batch.
        validation: share of the stream, at its end, that is never trained on.
        held_out: the stream of the validation part. That share of `stream` is not trained on all the same.

    Raises:
        DataError: a part is too short for a single window.
    """

    def __init__(
        self,
        stream: Stream,
        sequence: int,
        *,
        seed: int = 0,
        validation: float = VALIDATION,
        held_out: Stream | None = None,
    ) -> None:
        self.stream, self.held_out = stream, held_out
        self.sequence = sequence
        self.seed = seed
        split = stream.length - int(stream.length * validation)
        self._parts: dict[str, tuple[Stream, int, int]] = {"train": (stream, 0, split)}
        if held_out is not None:
            self._parts["validation"] = held_out, 0, held_out.length
        elif validation > 0:
            self._parts["validation"] = stream, split, stream.length
        for name, (source, begin, end) in self._parts.items():
            if end - begin < sequence + 1:
                own = "more --data, a shorter --sequence, or another --validation (0: none)"
                what = f"the text is too short for its {name} part"
                if source is held_out:
                    more = len(held_out.files) - 1
                    names = f"{str(held_out.files[0])!r}" + f" and {more} more files" * (more > 0)
                    what = f"the evaluation text, {names}, is too short for its {name} part"
                raise DataError(
                    what,
                    expected=f"at least {sequence + 1} tokens (a sequence and the token after it)",
                    found=f"{end - begin} of {source.length} tokens",
                    cure=own if source is stream else "a longer --eval-data, or a shorter --sequence",
                )

    @property
    def validates(self) -> bool:
        """Whether there is text that is not trained on."""
        return "validation" in self._parts

    def batch(
        self, size: int, step: int, micro: int = 0, *, part: str = "train", rank: int = 0, world: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and the tokens that follow them, each (size, sequence), int64.

        The same arguments give the same batch, whatever was asked for before. With several ranks it is the
        `rank`-th part of the one that a single rank has with `world` times the size.
        """
        stream, begin, end = self._parts[part]
        key = [self.seed, step, micro, list(self._parts).index(part)]
        starts = np.random.default_rng(key).integers(begin, end - self.sequence, size=size * world)
        starts = starts[rank * size : (rank + 1) * size]
        rows = np.stack([stream.read(int(s), self.sequence + 1) for s in starts]).astype(np.int64)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @functools.cached_property
    def fingerprints(self) -> dict[str, str | None]:
        """What tells the text from others, and the held-out one; of when this was asked for first."""
        held_out = None if self.held_out is None else _fingerprint(self.held_out)
        return {"text": _fingerprint(self.stream), "held-out text": held_out}

    def describe(self) -> str:
        """Return one line for a person."""
        held_out = "" if self.held_out is None else f"; evaluated on {_describe(self.held_out)}"
        return f"{_describe(self.stream)}{held_out}"


def _fingerprint(stream: Stream) -> str:
    found = hashlib.blake2b(digest_size=8)
    for start in np.linspace(0, stream.length, 64, endpoint=False).astype(np.int64):
        count = min(4096, stream.length - int(start))
        found.update(stream.read(int(start), count).astype("<u4").tobytes())
    return f"{stream.length} tokens, {found.hexdigest()}"


def _describe(stream: Stream) -> str:
    files = len(stream.files)
    kind = format_size(stream.length) if stream.vocab == 256 else f"{stream.length:,} tokens"
    return f"{kind} of text in {files} file{'s' if files != 1 else ''}"


def open_stream(
    source: str | os.PathLike[str] | None,
    tokenizer: Any = None,
    *,
    directory: str | None = None,
    option: str = "--data",
) -> Stream:
    """Return the stream of `source` (see `find_files`): bytes, or a Hugging Face tokenizer's tokens.

    Raises:
        DataError: there is no text, or it cannot be read.
    """
    files = find_files(source, option)
    if tokenizer is None:
        return ByteStream(files)

    def encode(text: str) -> Sequence[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[no-any-return]

    return TokenStream(files, encode, len(tokenizer), separator=tokenizer.eos_token_id, directory=directory)
