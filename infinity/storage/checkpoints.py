"""Checkpoints in a directory: which are complete, and how one becomes complete atomically.

`root/step-<n>/` is a checkpoint when it has an index, which names its files. Each save gives its files names
of its own (with a random word), and puts the index in place last, by a rename, when every other
byte would survive a power failure. So a directory has the earlier checkpoint or the new one, and never a
part of either. A save that was killed leaves files that no index names.

[Note: whose a file is] During a save its directory has a mark, an empty file whose name has the
save's word. The engine removes only files with the word of a mark, and files that one of its indexes named.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from infinity.core.errors import CorruptionError, DirectoryError
from infinity.core.sizes import format_size
from infinity.hardware.aio import crc32c
from infinity.hardware.descriptor import Descriptor

from .folder import failed, kind_of, lock_directory, pwrite, sync, unlock

INDEX: Final = "index.json"
#: What makes a checkpoint of what has these names.
_OF_OTHERS: Final = {
    "`infinity import-deepspeed` makes one of a checkpoint of DeepSpeed": {"latest", "zero_to_fp32.py"},
    "`infinity import-dcp` makes one of a checkpoint of FSDP2": {".metadata", "pytorch_model_fsdp_0"},
}
FORMAT: Final = 1
_INDEX_LIMIT: Final = 1 << 30
_LOOKS: Final = 100
_STEP: Final = re.compile(r"step-(\d{1,15})")
_ASIDE: Final = "damaged-"
_FILE: Final = re.compile(r"[a-z_]+-([0-9a-f]{8})\.safetensors")
_MARK: Final = re.compile(r"incomplete-([0-9a-f]{8})")
_AGAIN: Final = "copy this checkpoint again from its source"
_TEMPORARY: Final = re.compile(r"index-([0-9a-f]{8})\.tmp")


class Found(NamedTuple):
    """A whole checkpoint. `counter` is higher the later it was saved, `content` is its index."""

    path: str
    step: int
    counter: int
    content: dict[str, Any]

    def file(self, stem: str) -> str | None:
        """Return the path of the file `stem`; None: there is none."""
        name = self.content["files"].get(stem)
        return None if name is None else os.path.join(self.path, name)


def find(path: str) -> Found:
    """Return the checkpoint at `path`, or of those below it the one that was completed last.

    Raises:
        DirectoryError: there is none.
        CorruptionError: its index cannot be used.
    """
    if _has_index(path):
        try:
            return _read(path)
        except CorruptionError as error:
            error.cure = instead(path) if error.cure == _AGAIN else error.cure
            raise
    found = list_checkpoints(path)
    if not found:
        there = _listing(path)
        inner = os.path.join(path, "infinity")  # of checkpoint-<n> of a Trainer, or of Lightning's
        name = inner if os.path.isdir(inner) else "the directory that you passed to `infinity.save`"
        raise DirectoryError(
            f"no checkpoint in {path}",
            path=path,
            expected=f"a directory with {INDEX}, or a directory of such directories, step-<n>",
            found=f"{', '.join(there[:8]) or 'nothing'}" if os.path.isdir(path) else "no directory",
            cure=f"name {name}; an incomplete directory of a run that was killed is not a checkpoint"
            + "".join(f"; {cure}" for cure, names in _OF_OTHERS.items() if not names.isdisjoint(there))
            + "".join(f"; copy {INDEX} of {lost} again from its source" for lost in _without_index(path)),
        )
    for lost in _without_index(path):
        warnings.warn(
            f"{lost} has lost its {INDEX} and is not a checkpoint any more: the newest is {found[-1].path}. "
            f"To use {lost}, copy its {INDEX} again from its source",
            RuntimeWarning,
            stacklevel=2,
        )
    return found[-1]


def list_checkpoints(root: str, *, damaged: bool = True) -> list[Found]:
    """Return the whole checkpoints below `root`, the one that was completed last at the end.

    Raises:
        DirectoryError, CorruptionError: one cannot be looked at, or its index cannot be used; not if such
            are left out (`damaged`).
    """
    for _ in range(_LOOKS):  # a save may put one in place and remove another one meanwhile
        seen, found, wrong = _indexes(root, damaged=damaged), [], None
        for name in seen:
            try:
                found.append(_read(os.path.join(root, name)))
            except (CorruptionError, DirectoryError) as error:
                wrong = wrong or error
        if _indexes(root, damaged=damaged) == seen:
            break
    if damaged and wrong is not None:
        if isinstance(wrong, CorruptionError) and wrong.cure == _AGAIN:
            wrong.cure = instead(os.path.dirname(str(wrong.path)))
        raise wrong
    return sorted(found, key=lambda f: f.counter)


def check_root(path: str) -> None:
    """Raise `DirectoryError` if `path` is a checkpoint: none is ever made inside of another."""
    if _has_index(path):
        raise DirectoryError(
            f"{path} is a checkpoint, and cannot contain other checkpoints",
            path=path,
            expected="a directory of checkpoints, or a new one",
            found=INDEX,
            cure=f"name its parent, {os.path.dirname(os.path.abspath(path))}, or another directory",
        )


def check_shared(path: str, rank: int) -> None:
    """Raise `DirectoryError` unless this rank sees a file that the first rank sees."""
    folder, name = os.path.split(path)
    if name not in _listing(folder):  # some file systems know only then what others have just made there
        raise DirectoryError(
            f"{folder} is not one directory for all ranks",
            path=path,
            expected="a directory on a file system that all nodes share",
            found=f"rank {rank} does not see what rank 0 sees there",
            cure="name a directory that all nodes share",
        )


def aside(root: str, path: str) -> tuple[str, str] | None:
    """Return the checkpoint below `root` that `path` is, or is a part of, and what it may be called so that
    it counts no more, is not removed and stands in nobody's way; None if it is none."""
    name = os.path.relpath(path, root).split(os.sep)[0]
    if not _STEP.fullmatch(name):
        return None
    free = _ASIDE + name
    while os.path.lexists(os.path.join(root, free)):
        free = _ASIDE + free
    return os.path.join(root, name), os.path.join(root, free)


def instead(path: str) -> str:
    """Return what to do about the checkpoint at `path`, which is damaged."""
    path = os.path.abspath(path)
    others: list[Found] = []
    with contextlib.suppress(DirectoryError):
        others = [f for f in list_checkpoints(os.path.dirname(path), damaged=False) if _is_complete(f)]
    counter = next((f.counter for f in others if f.path == path), None)
    others = [f for f in others if f.path != path]
    others = [f for f in others if counter is None or f.counter < counter] or others
    if others:
        newest = others[-1]
        return f"{_AGAIN}; or load {newest.path}, of {newest.step} steps of the optimizer"
    return f"{_AGAIN}; there is no other whole checkpoint in {os.path.dirname(path)}: else begin a new run"


def _is_complete(found: Found) -> bool:
    """Return whether a checkpoint has all files that its index names."""
    return all(os.path.isfile(os.path.join(found.path, name)) for name in found.content["files"].values())


def _has_index(path: str) -> bool:
    try:
        os.lstat(os.path.join(path, INDEX))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # it may be the newest: to go on from another would lose steps
        raise failed("look into", path, error) from error
    return True


def _without_index(root: str) -> list[str]:
    """Return the checkpoints below `root` that have lost their index. One whose save is under way, or was
    killed, has a mark."""
    lost = []
    for path in (os.path.join(root, name) for name in _listing(root) if _STEP.fullmatch(name)):
        names = [] if _has_index(path) else _listing(path)
        if any(map(_FILE.fullmatch, names)) and not any(map(_MARK.fullmatch, names)):
            lost.append(path)
    return lost


def _indexes(root: str, *, damaged: bool) -> dict[str, tuple[int, int]]:
    """Return the directories below `root` that have an index, and what tells each index from any other.

    Raises:
        DirectoryError: one cannot be looked at, and is not left out (`damaged`).
    """
    found = {}
    for name in filter(_STEP.fullmatch, _listing(root)):
        try:
            status = os.lstat(os.path.join(root, name, INDEX))
            found[name] = status.st_ino, status.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:  # it may be the newest: to go on from another would lose steps
            if damaged:
                raise failed("look into", os.path.join(root, name), error) from error
    return found


def _listing(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise failed("list", path, error) from error


def _read(path: str) -> Found:
    """Read and check an index."""
    name = os.path.join(path, INDEX)

    def wrong(expected: str, found: object, cure: str = _AGAIN) -> CorruptionError:
        return CorruptionError(
            f"{name} is not a readable index of a checkpoint",
            path=name,
            expected=expected,
            found=found,
            cure=cure,
        )

    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise wrong("a file", kind_of(status.st_mode))
            if status.st_size > _INDEX_LIMIT:
                raise wrong(f"at most {format_size(_INDEX_LIMIT)}", f"{status.st_size} bytes")
            with open(fd, "rb", closefd=False) as file:
                text = file.read(status.st_size)
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, CorruptionError):
            raise
        raise failed("read", name, error) from error
    try:
        outer: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = f"{len(text)} bytes that are not JSON: {error}" if text else "an empty file"
        raise wrong("JSON with crc32c and index", found) from error
    if not isinstance(outer, dict) or not isinstance(outer.get("index"), dict) or len(outer) != 2:
        raise wrong("JSON with crc32c and index", f"other JSON: {outer!r:.200}")
    crc = _crc(_dump(outer["index"]))
    if outer.get("crc32c") != crc:
        raise wrong(f"CRC-32C {outer.get('crc32c')}", crc)
    index = outer["index"]
    if index.get("format") != FORMAT:
        version = index.get("infinity")
        raise wrong(
            f"format {FORMAT}",
            f"format {index.get('format')!r}, of infinity {version!r}",
            f"load it with the infinity that saved it, {version!r}",
        )
    numbers = all(type(index.get(key)) is int for key in ("step", "counter"))
    if not numbers or not isinstance(index.get("files"), dict):
        lacking = {key: index.get(key) for key in ("step", "counter", "files")}
        raise wrong("a step, a counter and files", f"{lacking!r:.200}")
    for file in index["files"].values():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise wrong("names of files of its own", repr(file))
    return Found(path, index["step"], index["counter"], index)


def _dump(index: dict[str, Any]) -> bytes:
    return json.dumps(index, separators=(",", ":"), allow_nan=True).encode()


def _crc(text: bytes) -> str:
    memory = ctypes.create_string_buffer(text, len(text))
    return f"{crc32c(ctypes.addressof(memory), len(text)):08x}"


class Save:
    """One running save: a `with` block, which ends in `commit` or leaves nothing.

    Attributes:
        mark: a unique name, which is in `path` during the save.
    """

    def __init__(self, root: str, step: int) -> None:
        self.root = root
        self.step = step
        self.path = os.path.join(root, f"step-{step}")
        self._word = secrets.token_hex(4)
        self._counter = 0
        self.mark = f"incomplete-{self._word}"
        self._temporary = os.path.join(self.path, f"index-{self._word}.tmp")
        self._stays = False  # all of it, whatever comes
        self._lock: Descriptor | None = None

    def __enter__(self) -> Save:
        """Take the root for this save, and remove what killed ones have left in it.

        Raises:
            DirectoryError: the directory is a checkpoint, cannot be made or written, or another process saves
                into it.
        """
        check_root(self.root)
        try:
            os.makedirs(self.root, exist_ok=True)
            self._lock = lock_directory(self.root, "save")
            self._clear()
            # Of the clock, so that a checkpoint of another root counts as what it is; but never back.
            last = max((f.counter for f in list_checkpoints(self.root, damaged=False)), default=0)
            self._counter = max(last + 1, time.time_ns() // 1_000_000)
            os.makedirs(self.path, exist_ok=True)
            _mark(self.path, {self._word, *_words_at(self.path)})
            sync(self.path)
            sync(self.root)
        except BaseException as error:
            self._end()
            if isinstance(error, OSError) and not isinstance(error, (DirectoryError, CorruptionError)):
                raise failed("write", self.path, error) from error
            raise
        return self

    def file(self, stem: str) -> str:
        """Return the path of a file of this checkpoint."""
        return os.path.join(self.path, f"{stem}-{self._word}.safetensors")

    def commit(self, content: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Write the index beside its place, and put it there: the checkpoint is whole then. Every file of it
        is complete, and synced.

        Args:
            content: what the index has beside what this adds.
            files: their names, by stem.

        Raises:
            DirectoryError: the index cannot be put in place; the checkpoint from before, if any, stays.
        """
        added = {"format": FORMAT, "step": self.step, "counter": self._counter, "files": {**files}}
        inner = _dump({**content, **added})
        text = b'{"crc32c":"' + _crc(inner).encode() + b'","index":' + inner + b"}\n"
        try:
            sync(self.path)
            fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                pwrite(fd, text, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            sync(self.path)
            os.rename(self._temporary, os.path.join(self.path, INDEX))
            self._stays = True
            sync(self.path)
            sync(self.root)
        except OSError as error:
            raise failed("write", self.path, error) from error

    def clear(self) -> None:
        """Remove the checkpoint that this one has replaced.

        Raises:
            DirectoryError: it cannot be removed.
        """
        try:
            self._clear_one(self.path)
        except OSError as error:
            raise failed("write", self.path, error) from error

    def newest_finite(self) -> str | None:
        """Return the newest checkpoint of the root whose trained parameters are neither NaN nor infinite."""
        found = reversed(list_checkpoints(self.root, damaged=False))
        return next((one.path for one in found if one.content.get("finite", True)), None)

    def prune(self, keep_last: int) -> list[OSError]:
        """Remove all checkpoints of the root but the `keep_last` that were completed last, and the newest
        finite one; return why some could not be removed."""
        errors = []
        whole = self.newest_finite()
        for old in list_checkpoints(self.root, damaged=False)[:-keep_last]:
            if old.path == whole:
                continue
            try:
                _mark(old.path, _words_at(old.path))
                # Without its index it is no checkpoint, and what is left of it is marked.
                os.unlink(os.path.join(old.path, INDEX))
                sync(old.path)
                self._clear_one(old.path)
            except OSError as error:
                errors.append(error)
        return errors

    def __exit__(self, *_: object) -> None:
        try:
            if not self._stays:
                with contextlib.suppress(OSError):  # what raised is told; the next save clears this up
                    self._clear_one(self.path)
        finally:
            self._end()

    def _end(self) -> None:
        unlock(self._lock)

    def _clear(self) -> None:
        for name in _listing(self.root):
            if _STEP.fullmatch(name):
                with contextlib.suppress(OSError):  # somebody else's
                    self._clear_one(os.path.join(self.root, name))

    def _clear_one(self, path: str) -> None:
        """Remove from a checkpoint's directory what saves that are over left: [Note: whose a file is]."""
        names = _listing(path)
        marks = {m[1]: name for name in names if (m := _MARK.fullmatch(name))}
        if not marks:
            return
        whole = _has_index(path)
        try:
            kept = set(_read(path).content["files"].values()) if whole else set()
        except CorruptionError:
            return  # nobody knows which files it names
        for name in names:
            ours = _FILE.fullmatch(name) or _TEMPORARY.fullmatch(name)
            if ours and ours[1] in marks and name not in kept:
                os.unlink(os.path.join(path, name))
        for name in marks.values():
            os.unlink(os.path.join(path, name))
        if not whole:
            with contextlib.suppress(OSError):  # something else is in it
                os.rmdir(path)


def _words_at(path: str) -> set[str]:
    """Return the words of the files of the checkpoint at `path`; none, if there is none."""
    if not _has_index(path):
        return set()
    try:
        names = set(_read(path).content["files"].values())
    except CorruptionError:
        return set()
    return {m[1] for name in names if (m := _FILE.fullmatch(name))}


def _mark(path: str, words: set[str]) -> None:
    for word in words:
        os.close(os.open(os.path.join(path, f"incomplete-{word}"), os.O_WRONLY | os.O_CREAT, 0o666))
