"""Files of `torch.save` and other pickles, read without running any code that they name.

[Note: no code from pickles] A pickle is a program for a small stack machine, and Python's own reader imports
and calls whatever the program names. `values_of` is another reader of the same programs. It imports nothing.
It knows containers, numbers and strings. A few names stand for functions that the caller passes. Every other
name is a `Global`, which is only a name, and what a program makes of one is a `Record`: it says which class
it is of, and what the program gave it. No size in a file is trusted: nothing is allocated that is larger than
the file, and each instruction is at least one byte of it.

`TorchFile` reads a file of `torch.save` since torch 1.6: a zip archive with one pickle, and one uncompressed
entry for each storage. It reads tensors piece by piece, from where they are. The archive has a CRC-32 of each
entry. A file that was written without checksums has zeros there, and is not checked.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from infinity.core.errors import CorruptionError
from infinity.core.sizes import format_size
from infinity.hardware.descriptor import Descriptor

from .folder import failed

#: What the caller knows of the names in a pickle: what to call with the arguments that the file has for it.
Known: TypeAlias = Mapping[str, Callable[..., Any]]

_PICKLE_LIMIT: Final = 256 << 20  # bytes of a pickle, which is read as a whole
_INT_LIMIT: Final = 64  # bytes of an integer
_KEY_DEPTH: Final = 8  # tuples in tuples, as the key of a dict
_PIECE: Final = 1 << 20  # bytes that are read at once where nobody needs them but the checksum


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a pickle, of a class or a function that is not imported."""

    name: str


class Record:
    """What a pickle has of an object whose class is not imported.

    Attributes:
        name: of its class, or of the function that would make it.
        args: what that would get.
        state: what the object would get then; of most classes a dict of its attributes.
        content: what would be put into it, if it is a container.
    """

    __slots__ = ("args", "content", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.content: list[Any] = []

    def attribute(self, name: str) -> Any:
        """Return an attribute, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Wrong(ValueError):
    """A program that no writer of pickles makes: what was expected, and what was found."""


#: What code raises that meets other values than a writer writes.
_OF_DAMAGE: Final = (TypeError, ValueError, AttributeError, LookupError, OverflowError, RuntimeError)
_MARK: Final = object()


class _Machine:
    """The stack machine of one pickle."""

    def __init__(self, data: bytes, known: Known, persistent: Callable[[Any], Any]) -> None:
        self._data = data
        self._at = 0
        self._known = known
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        while (code := self._take(1)) != b".":
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise _Wrong("an instruction of pickle's protocols 2 to 5", f"{code!r}")
            operation(self)
        value = self._pop()
        if self._stack:
            raise _Wrong("one value", f"{len(self._stack) + 1}")
        return value

    # -- bytes ----------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise _Wrong(f"{end} bytes", f"{len(self._data)}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise _Wrong("a name that ends", "none")
        return self._take(end + 1 - self._at)[:-1].decode()

    # -- the stack ------------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or (value := self._stack.pop()) is _MARK:
            raise _Wrong("a value on the stack", "none")
        return value

    def _top(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _to_mark(self) -> list[Any]:
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                values = self._stack[at + 1 :]
                del self._stack[at:]
                return values
        raise _Wrong("a mark on the stack", "none")

    def _push_tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise _Wrong("a value that was kept before", f"number {index}")
        self._push(self._memo[index])

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    # -- containers -----------------------------------------------------------------------------

    def _extend(self, values: Sequence[Any]) -> None:
        target = self._top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update(map(_key, values))
        elif isinstance(target, Record):
            target.content.extend(values)
        else:
            raise _Wrong("a list or a set", type(target).__name__)

    def _set_items(self, values: Sequence[Any]) -> None:
        target = self._top()
        if len(values) % 2:
            raise _Wrong("keys and values", f"{len(values)} of both")
        pairs = [(_key(key), value) for key, value in zip(values[::2], values[1::2], strict=True)]
        if isinstance(target, dict):
            target.update(pairs)
        elif isinstance(target, Record):
            target.content.extend(pairs)
        else:
            raise _Wrong("a dict", type(target).__name__)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    # -- what others would call ------------------------------------------------------------------

    def _global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Wrong("a module and a name", "no strings")
        self._push(Global(f"{module}.{name}"))

    def _call(self, made: Any, args: Any) -> None:
        if not isinstance(made, Global) or not isinstance(args, tuple):
            raise _Wrong("a name and its arguments", f"{type(made).__name__} and {type(args).__name__}")
        function = self._known.get(made.name)
        self._push(Record(made.name, args) if function is None else function(*args))

    def _reduce(self) -> None:
        args, made = self._pop(), self._pop()
        self._call(made, args)

    def _new_with_names(self) -> None:
        named, args, made = self._pop(), self._pop(), self._pop()
        self._call(made, (args, named) if named else args)

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict may have attributes, which nobody needs
            raise _Wrong("an object that has attributes", type(target).__name__)


def _key(value: Any, depth: int = 0) -> Any:
    """Return what may be a key: to hash a tuple of great depth would overflow Python's own stack."""
    if isinstance(value, tuple) and depth < _KEY_DEPTH:
        for each in value:
            _key(each, depth + 1)
    elif value is not None and not isinstance(value, (str, int, float, bytes, frozenset, Record, Global)):
        raise _Wrong("a key that can be hashed", f"{type(value).__name__} in {depth} tuples")
    return value


def _frozen(values: Any = ()) -> frozenset[Any]:
    """Return a frozenset of what has no hash of great depth."""
    if any(isinstance(value, (tuple, frozenset)) for value in values):
        raise _Wrong("a frozenset of plain values", "one of tuples or sets")
    return frozenset(map(_key, values))


def _long(machine: _Machine, count: int) -> None:
    if not 0 <= count <= _INT_LIMIT:
        raise _Wrong(f"an integer of at most {_INT_LIMIT} bytes", f"{count}")
    machine._push(int.from_bytes(machine._take(count), "little", signed=True))


def _text(form: str) -> Callable[[_Machine], None]:
    return lambda m: m._push(m._take(m._number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: str) -> Callable[[_Machine], None]:
    return lambda m: m._push(m._take(m._number(form)))


#: All instructions of the protocols 2 to 5, without those for numbers as text, for the names that a program
#: registers, and for buffers beside the file.
_OPERATIONS: Final[dict[bytes, Callable[[_Machine], object]]] = {
    b"\x80": lambda m: m._take(1),  # the protocol
    b"\x95": lambda m: m._take(8),  # the size of a frame
    b"(": lambda m: m._push(_MARK),
    b"0": lambda m: m._stack.pop() if m._stack else m._pop(),
    b"1": lambda m: m._to_mark(),
    b"2": lambda m: m._push(m._top()),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"J": lambda m: m._push(m._number("i")),
    b"K": lambda m: m._push(m._number("B")),
    b"M": lambda m: m._push(m._number("H")),
    b"\x8a": lambda m: _long(m, m._number("B")),
    b"\x8b": lambda m: _long(m, m._number("i")),
    b"G": lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
    b"\x8c": _text("B"),
    b"X": _text("I"),
    b"\x8d": _text("Q"),
    b"C": _bytes("B"),
    b"B": _bytes("I"),
    b"\x8e": _bytes("Q"),
    b"\x96": _bytes("Q"),
    b")": lambda m: m._push(()),
    b"\x85": lambda m: m._push_tuple(1),
    b"\x86": lambda m: m._push_tuple(2),
    b"\x87": lambda m: m._push_tuple(3),
    b"t": lambda m: m._push(tuple(m._to_mark())),
    b"]": lambda m: m._push([]),
    b"l": lambda m: m._push(m._to_mark()),
    b"a": lambda m: m._extend([m._pop()]),
    b"e": lambda m: m._extend(m._to_mark()),
    b"}": lambda m: m._push({}),
    b"s": lambda m: m._set_item(),
    b"u": lambda m: m._set_items(m._to_mark()),
    b"\x8f": lambda m: m._push(set()),
    b"\x90": lambda m: m._extend(m._to_mark()),
    b"\x91": lambda m: m._push(_frozen(m._to_mark())),
    b"h": lambda m: m._get(m._number("B")),
    b"j": lambda m: m._get(m._number("I")),
    b"q": lambda m: m._put(m._number("B")),
    b"r": lambda m: m._put(m._number("I")),
    b"\x94": lambda m: m._put(len(m._memo)),
    b"c": lambda m: m._global(m._line(), m._line()),
    b"\x93": lambda m: m._global(*reversed((m._pop(), m._pop()))),
    b"Q": lambda m: m._push(m._persistent(m._pop())),
    b"R": lambda m: m._reduce(),
    b"\x81": lambda m: m._reduce(),
    b"\x92": lambda m: m._new_with_names(),
    b"b": lambda m: m._build(),
}


def _ordered(items: Any = ()) -> dict[Any, Any]:
    """Return what a dict is made of by other classes: pairs, as lists or tuples."""
    if not isinstance(items, (list, tuple)) or not all(isinstance(i, (list, tuple)) for i in items):
        raise _Wrong("pairs", type(items).__name__)
    return {_key(key): value for key, value in items}


def _encoded(text: str, _: str) -> bytes:
    """Return the bytes that protocol 2 writes as text."""
    return text.encode("latin-1")


def _empty() -> bytes:
    """Return the bytes that protocol 2 does not write as text."""
    return b""


def _set(values: Any = ()) -> set[Any]:
    return {_key(value) for value in values}


_BUILTINS: Final[Known] = {"dict": _ordered, "set": _set, "frozenset": _frozen, "bytes": _empty}
#: Names of which values are made, whoever reads.
_ALWAYS: Final[Known] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *_: {},
    "_codecs.encode": _encoded,
    "torch.Size": tuple,
    **{f"builtins.{name}": function for name, function in _BUILTINS.items()},
    **{f"__builtin__.{name}": function for name, function in _BUILTINS.items()},  # in protocol 2
}


def values_of(
    data: bytes, path: str, known: Known | None = None, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Return the value of a pickle: [Note: no code from pickles]. `path`, of its file, is for messages.

    Args:
        known: the functions to call for further names. They must not trust their arguments. Usual errors of
            Python in them, such as TypeError, count as damage.
        persistent: the same for what the pickle only refers to; None: it may refer to nothing.

    Raises:
        CorruptionError: it is not a pickle, or one that no writer makes.
    """

    def refers(_: Any) -> Any:
        raise _Wrong("values", "references to others")

    try:
        return _Machine(data, {**_ALWAYS, **(known or {})}, persistent or refers).run()
    except _OF_DAMAGE as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> CorruptionError:
    wrong = isinstance(error, _Wrong) and len(error.args) == 2
    return CorruptionError(
        f"{path} is not a readable file of torch",
        path=path,
        expected=error.args[0] if wrong else "what torch writes",
        found=error.args[1] if wrong else f"{error}"[:200],
        cure="copy it again from its source",
    )


# -- files of torch ------------------------------------------------------------------------------

_STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES: Final = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex64"),
    )
}


def dtype_of(value: Any) -> torch.dtype | None:
    """Return the dtype that a `Global` names, if it is one that is known here."""
    return _DTYPES.get(value.name) if isinstance(value, Global) else None


class _Bytes(io.RawIOBase):
    """The bytes of a file from `begin` on, `nbytes` of them; as a file that cannot be written."""

    def __init__(self, path: str, begin: int, nbytes: int | None) -> None:
        super().__init__()
        self.path = path
        self._begin = begin
        self._at = 0
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = Descriptor(lambda: os.open(path, flags))
            there = os.fstat(self._file.number).st_size
        except OSError as error:
            raise failed("read", path, error) from error
        self.size = there - begin if nbytes is None else nbytes
        if not 0 <= begin <= begin + self.size <= there:
            self.close()
            raise _damaged(path, _Wrong(f"{begin + self.size} bytes", f"{there}"))

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self.size))
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self.size - self._at)
        data = bytearray(left if count is None or count < 0 else min(count, left))
        self.fill(self._at, memoryview(data))
        self._at += len(data)
        return bytes(data)

    def fill(self, at: int, out: memoryview) -> None:
        """Read the bytes from `at` on into `out`.

        Raises:
            CorruptionError: there are not so many.
            DirectoryError: they cannot be read.
        """
        end = at + len(out)
        if at < 0 or end > self.size:
            raise _damaged(self.path, _Wrong(f"bytes {at} to {end}", f"{self.size} bytes"))
        while len(out):
            try:
                count = os.preadv(self._file.number, [out], self._begin + at)
            except OSError as error:
                raise failed("read", self.path, error) from error
            if not count:
                raise _damaged(self.path, _Wrong("a file that keeps its size", "one that became shorter"))
            out, at = out[count:], at + count


def read_pickle(path: str, known: Known | None = None) -> Any:
    """Return the value of a file that is a pickle: see `values_of`.

    Raises:
        DirectoryError: it cannot be read.
        CorruptionError: it is not a pickle.
    """
    with contextlib.closing(_Bytes(path, 0, None)) as source:
        if source.size > _PICKLE_LIMIT:
            raise _damaged(path, _Wrong(f"at most {format_size(_PICKLE_LIMIT)}", format_size(source.size)))
        return values_of(source.read(), path, known)


class _Storage:
    """The bytes of one entry of an archive. Its checksum follows the reads, which mostly come in order."""

    def __init__(self, source: _Bytes, begin: int, nbytes: int, crc: int) -> None:
        self._source = source
        self._begin = begin
        self.nbytes = nbytes
        self.expected = crc
        self._crc = 0
        self._until = 0  # where the bytes end that the checksum has

    def read(self, at: int, out: memoryview) -> None:
        """Read the bytes from `at` on into `out`."""
        self._skip(at)
        self._source.fill(self._begin + at, out)
        if at <= self._until < at + len(out):
            self._crc = zlib.crc32(out[self._until - at :], self._crc)
            self._until = at + len(out)

    def _skip(self, end: int) -> None:
        """Have the bytes before `end` in the checksum."""
        if not self.expected:
            return
        bounce = memoryview(bytearray(min(_PIECE, max(0, end - self._until))))
        while self._until < end:
            piece = bounce[: end - self._until]
            self._source.fill(self._begin + self._until, piece)
            self._crc = zlib.crc32(piece, self._crc)
            self._until += len(piece)

    def check(self, name: str) -> None:
        """Raise `CorruptionError` unless all bytes are those that were written."""
        self._skip(self.nbytes)
        if self.expected and self._crc != self.expected:
            raise _damaged(
                self._source.path,
                _Wrong(f"CRC-32 {self.expected:08x} of {name}", f"{self._crc:08x}"),
            )


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor of a file, whose values are there. `first` is its first element in its storage."""

    storage: _Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def crc(self) -> int:
        """The CRC-32 that its file has of its storage; 0: none."""
        return self.storage.expected

    def read(self, first: int, out: torch.Tensor) -> None:
        """Read the elements from element `first` on into `out`, a tensor of its dtype, contiguous on the CPU.

        Raises:
            CorruptionError, DirectoryError: there are not so many, or they cannot be read.
        """
        if not 0 <= first <= first + out.numel() <= self.numel or out.dtype is not self.dtype:
            raise _damaged(
                self.storage._source.path,
                _Wrong(
                    f"elements {first} to {first + out.numel()} of {out.dtype}", f"{self.numel}, {self.dtype}"
                ),
            )
        if not self._is_contiguous():
            out.view(-1).copy_(self._strided().reshape(-1)[first : first + out.numel()])
        elif out.numel():
            _fill(self.storage, (self.first + first) * self.dtype.itemsize, out)

    def part(self, first: int, count: int) -> torch.Tensor:
        """Return `count` elements from element `first` on, or as many as there are, as a flat tensor."""
        out = torch.empty(max(0, min(count, self.numel - first)), dtype=self.dtype)
        self.read(first, out)
        return out

    def whole(self) -> torch.Tensor:
        """Return the tensor in memory."""
        return self.part(0, self.numel).view(self.shape)

    def _is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    def _strided(self) -> torch.Tensor:
        span = torch.empty(_span(self.shape, self.stride), dtype=self.dtype)
        _fill(self.storage, self.first * self.dtype.itemsize, span)
        return span.as_strided(self.shape, self.stride)


def _fill(storage: _Storage, at: int, out: torch.Tensor) -> None:
    storage.read(at, out.view(-1).view(torch.uint8).numpy().data)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of a storage a tensor reaches over."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class TorchFile:
    """A file of `torch.save`, or the part of a file that is one. A `with` block, after which its tensors are
    no more.

    Args:
        known: see `values_of`.

    Attributes:
        value: what was saved, with a `SavedTensor` for each tensor.

    Raises:
        DirectoryError: it cannot be opened.
        CorruptionError: it is not a file of torch, or not all of one.
    """

    def __init__(
        self, path: str, known: Known | None = None, begin: int = 0, nbytes: int | None = None
    ) -> None:
        self.path = path
        self._source = _Bytes(path, begin, nbytes)
        self._storages: dict[str, _Storage] = {}
        try:
            self._entries = self._entries_of()
            if self._text("byteorder", b"little") != b"little":
                raise _Wrong("a file of a machine with the byte order little", "another one")
            tensors: dict[str, Callable[..., Any]] = {
                "torch._utils._rebuild_tensor_v2": self._tensor,
                "torch._utils._rebuild_tensor_v3": self._tensor_of_bytes,
                "torch._utils._rebuild_parameter": lambda data, *_: data,
                "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
                "torch._tensor._rebuild_from_type_v2": self._of_type,
            }
            self.value = values_of(self._text("data.pkl"), path, {**tensors, **(known or {})}, self._storage)
        except (*_OF_DAMAGE, zipfile.BadZipFile, struct.error, EOFError) as error:
            self.close()
            raise _damaged(path, error) from error
        except BaseException:
            self.close()
            raise

    def _entries_of(self) -> dict[str, _Storage]:
        """Return the entries of the archive by name, without the archive's own name before it."""
        entries: dict[str, _Storage] = {}
        with zipfile.ZipFile(self._source) as archive:
            for info in archive.infolist():
                head = bytearray(30)
                self._source.fill(info.header_offset, memoryview(head))
                name, extra = struct.unpack("<HH", head[26:])
                begin = info.header_offset + 30 + name + extra
                plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
                fits = 0 <= info.file_size == info.compress_size <= self._source.size - begin
                if head[:4] != b"PK\x03\x04" or not plain or not fits:
                    raise _Wrong("an archive whose entries are not compressed", repr(info.filename)[:200])
                inner = info.filename.partition("/")[2]
                if inner in entries:
                    raise _Wrong("each entry once", repr(inner)[:200])
                entries[inner] = _Storage(self._source, begin, info.file_size, info.CRC)
        return entries

    def _text(self, name: str, default: bytes | None = None) -> bytes:
        entry = self._entries.get(name)
        if entry is None and default is not None:
            return default
        if entry is None or entry.nbytes > _PICKLE_LIMIT:
            raise _Wrong(
                f"{name} of at most {format_size(_PICKLE_LIMIT)}",
                "none" if entry is None else format_size(entry.nbytes),
            )
        data = bytearray(entry.nbytes)
        entry.read(0, memoryview(data))
        entry.check(name)
        return bytes(data)

    def _storage(self, reference: Any) -> tuple[_Storage, torch.dtype]:
        kind, made, key, _, count = reference
        module, _, name = made.name.rpartition(".") if isinstance(made, Global) else ("", "", "")
        dtype = torch.uint8 if name == "UntypedStorage" else _STORAGES.get(name)
        if kind != "storage" or dtype is None or not module.startswith("torch") or not isinstance(key, str):
            raise _Wrong("a storage of torch", "a reference to something else")
        entry = self._entries.get(f"data/{key}")
        if entry is None or type(count) is not int or entry.nbytes != count * dtype.itemsize:
            found = "none" if entry is None else f"{entry.nbytes} bytes"
            raise _Wrong(f"an entry data/{key[:20]} of {count} elements", found)
        self._storages[key] = entry
        return entry, dtype

    def _tensor(self, storage: Any, first: Any, shape: Any, stride: Any, *_: Any) -> SavedTensor:
        entry, dtype = storage
        return self._within(entry, dtype, first, shape, stride)

    def _tensor_of_bytes(
        self, storage: Any, first: Any, shape: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any
    ) -> SavedTensor:
        entry, _ = storage
        if (known := dtype_of(dtype)) is None:
            raise _Wrong("a dtype that is known here", str(getattr(dtype, "name", dtype))[:100])
        return self._within(entry, known, first, shape, stride)

    def _within(self, entry: Any, dtype: torch.dtype, first: Any, shape: Any, stride: Any) -> SavedTensor:
        numbers = [first, *shape, *stride]
        if not isinstance(entry, _Storage) or len(shape) != len(stride) or len(shape) > 64:
            raise _Wrong("a tensor of a storage", "something else")
        if not all(type(number) is int and 0 <= number < 1 << 60 for number in numbers):
            raise _Wrong("sizes of a tensor", "other values")
        nbytes = max(entry.nbytes, self._source.size)
        if (first + _span(shape, stride)) * dtype.itemsize > entry.nbytes or (
            math.prod(shape) * dtype.itemsize > nbytes  # the same elements again and again
        ):
            raise _Wrong(f"a tensor within {entry.nbytes} bytes", f"{tuple(shape)} from {first} on")
        return SavedTensor(entry, dtype, tuple(shape), tuple(stride), first)

    def _of_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """Return a tensor of a class of its own, or with attributes: the values of it."""
        name = getattr(function, "name", "")
        if name == "torch._utils._rebuild_tensor_v2":
            return self._tensor(*args)
        if name.startswith("torch._utils._rebuild_parameter"):
            return args[0]
        return Record(name, args)

    def check(self) -> None:
        """Raise `CorruptionError` if a tensor of which something was read is not what was saved."""
        for key, storage in self._storages.items():
            if storage._until:
                storage.check(f"data/{key}")

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
