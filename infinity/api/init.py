"""`init`: builds a model as usual, but keeps its parameters in a scratch file, not in memory.

[Note: scratch] torch calls a hook whenever a module registers a parameter. The hook copies
the parameter's bytes into an extent of an unnamed file, maps that extent, and makes the mapping the
parameter's `data`: same object, same shape, strides and dtype, so initialization draws the same
random numbers and writes the same values. At most one parameter (during its copy) is in anonymous
memory, besides those of less than a page. The rest is page cache, which the kernel writes back and drops
when memory is short.

- The extent's blocks are allocated before it is mapped: a full disk is then an error here, and not
  a SIGBUS at some later store.
- The storage owns the mapping. When the last tensor over it is gone, the engine unmaps the extent and
  returns its blocks to the file system (a punched hole), so no code has to count users.
- Parameters that share all their bytes share the extent, hence tied weights stay tied. Parameters that share
  a part of their bytes are separated; an extent remembers the source of its bytes, so that `wrap` finds such
  a pair.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import shlex
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from infinity.core.config import Config
from infinity.core.errors import DirectoryError, StorageError
from infinity.core.sizes import ALIGNMENT, MiB, ceil_to
from infinity.core.system_errors import cure, reason
from infinity.hardware.comm import numbers
from infinity.hardware.probe import nameless_file
from infinity.hardware.tuned import bandwidths
from infinity.planning.machine import LEAST_SCRATCH, roomiest

from .this_machine import temporary_directory

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
#: transformers' loader otherwise copies parameters ahead in threads, as many as it likes.
_HF_ONE_BY_ONE: Final = "HF_DEACTIVATE_ASYNC_LOAD"
#: Bytes moved between two calls of malloc_trim(3).
_TRIM_EVERY: Final = 32 * MiB

# Python's own mmap keeps a file descriptor for each mapping, and a model has thousands.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@contextlib.contextmanager
def init(config: Config, mesh: object = None) -> Iterator[None]:
    """Build a model without ever holding all of its parameters in anonymous memory.

    Values and the states of the random number generators after the block are those of an ordinary
    construction. `init` keeps parameters on the CPU, of any dense dtype, in unnamed scratch files in the NVMe
    directories. It puts each parameter where there is most space. If `config` names no directory, the files
    are in the directory for temporary files. `wrap` takes the parameters over and frees the space of the
    files. `AutoModelForCausalLM.from_pretrained` works inside the block. If a tensor shares memory with a
    parameter before the module registers the parameter, the two no longer share memory afterwards; if the
    tensor is a parameter too, `wrap` refuses the two.

    With several ranks (those of `mesh`, as in `wrap`), only the first rank keeps values. On the others,
    parameters are on the meta device, and `wrap` gives them the first rank's values.

    Raises:
        DirectoryError: the directory is missing, read-only, not a directory or full.
        ConfigError: `nvme` contains ``{local_rank}``, and the number of this rank on its machine is unknown;
            or `wrap` does not accept the mesh.
    """
    rank, local_rank = numbers(mesh)
    if rank:
        with without_values():
            yield
        return
    config = config.for_rank(rank, local_rank)
    backing = _Backing(config.directories or (temporary_directory(),))
    handle = register_module_parameter_registration_hook(backing.on_registration)
    before = os.environ.get(_HF_ONE_BY_ONE)
    os.environ[_HF_ONE_BY_ONE] = "1"
    try:
        yield
        backing.sweep()
    finally:
        handle.remove()
        if before is None:
            os.environ.pop(_HF_ONE_BY_ONE, None)
        else:
            os.environ[_HF_ONE_BY_ONE] = before


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Build modules whose parameters are on the meta device, and whose buffers have values."""
    made = WeakIdKeyDictionary()

    def on_registration(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta or nn.parameter.is_lazy(param):
            return None
        if param not in made:
            made[param] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        return made[param]  # type: ignore[no-any-return]

    handle = register_module_parameter_registration_hook(on_registration)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def scratch_extent(tensor: torch.Tensor) -> ScratchExtent | None:
    """Return the extent of the scratch file that holds `tensor`, or None."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    return _extents.get(tensor.untyped_storage().data_ptr())


def origin(tensor: torch.Tensor) -> tuple[int, int]:
    """Return which storage `tensor` was in when it was made, and at which byte: what shared its memory
    there shared it before it was moved to a scratch file."""
    extent = scratch_extent(tensor)
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if extent is None or extent.source is None:
        return tensor.untyped_storage()._cdata, begin
    storage, first = extent.source
    return storage.cdata, first + begin


def release(tensor: torch.Tensor) -> None:
    """Let the pages of `tensor` go from this process, after its values were taken over.

    Its values stay readable. Its extent is given back when the last tensor over it is gone.
    Nothing happens for a tensor that is not in a scratch file.
    """
    extent = scratch_extent(tensor)
    if extent is not None:
        extent.drop_pages()


class ScratchFile:
    """A nameless file in `directory`; extents are appended, and go back one by one.

    Raises:
        DirectoryError: no file can be made there.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.end = 0
        try:
            self.fd = nameless_file(directory)
        except OSError as error:
            raise DirectoryError(
                f"cannot create a scratch file in {directory!r}",
                errno=error.errno,
                path=directory,
                expected="a writable directory",
                found=os.strerror(error.errno or 0),
                cure=f"mkdir -p {shlex.quote(directory)}"
                if error.errno == errno.ENOENT
                else "name a directory in nvme= that this user may write to",
            ) from error
        self._close = weakref.finalize(self, _close, self.fd)
        self._close.atexit = False  # extents that go later must not find another file at its number

    @property
    def allocated(self) -> int:
        """Bytes on disk."""
        return os.fstat(self.fd).st_blocks * 512

    def free(self) -> float:
        """Return the bytes free for this user on its file system."""
        system = os.fstatvfs(self.fd)
        return float(system.f_bavail * system.f_frsize) if system.f_blocks else math.inf

    def new_extent(
        self, nbytes: int, source: tuple[StorageWeakRef, int] | None = None
    ) -> tuple[ScratchExtent, torch.Tensor]:
        """Return a new extent and `nbytes` of it as a uint8 tensor of zeros. `source`: the storage whose
        bytes it is for, and the first of them.

        Raises:
            DirectoryError: the directory's file system is full.
            StorageError: the kernel refused the mapping.
        """
        length = ceil_to(nbytes, ALIGNMENT)
        offset = self.end
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError as error:
            raise DirectoryError(
                f"the scratch file in {self.directory!r} cannot grow",
                errno=error.errno,
                path=self.directory,
                offset=offset,
                nbytes=length,
                expected=f"{length} more bytes: room for the whole model as it is built",
                found=f"{reason(error.errno)}, after {offset} bytes",
                cure=cure(
                    error.errno,
                    "name a directory in nvme= (without one: in TMPDIR) that has room for the model as "
                    "it is built, and for what is placed there",
                ),
            ) from error
        self.end = offset + length
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, length, protection, mmap.MAP_SHARED, self.fd, offset)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise StorageError(
                "a part of the scratch file cannot be mapped",
                errno=number,
                path=self.directory,
                offset=offset,
                nbytes=length,
                expected="one mapping for each parameter",
                found=os.strerror(number),
                cure="name a directory first in nvme= whose file system can map files; or, if the model fits "
                "host memory, build it without `init`: `wrap` needs no mapping"
                if number == errno.ENODEV
                else "raise vm.max_map_count, or `ulimit -v`",
            )
        extent = ScratchExtent(self, offset, nbytes, address, length, source)
        _extents[address] = extent
        # Storages hold `owner`; when the last of them goes, so does the mapping.
        owner = (ctypes.c_char * nbytes).from_address(address)
        extent._owner.append(weakref.ref(owner))
        weakref.finalize(owner, extent._free).atexit = False
        return extent, _tensor_over(owner)


@dataclass(frozen=True, eq=False)
class ScratchExtent:
    """`nbytes` at `offset` of `file`, mapped at `address` (`length` bytes, whole pages)."""

    file: ScratchFile
    offset: int
    nbytes: int
    address: int
    length: int
    # Held, it keeps the storage's identity from being used again.
    source: tuple[StorageWeakRef, int] | None = None
    pid: int = field(default_factory=os.getpid, init=False)
    _owner: list[weakref.ref[ctypes.Array[ctypes.c_char]]] = field(
        default_factory=list, init=False, repr=False
    )

    def tensor(self) -> torch.Tensor | None:
        """Return one more uint8 tensor over the extent, or None when it was given back."""
        owner = self._owner[0]()
        return None if owner is None else _tensor_over(owner)

    def drop_pages(self) -> None:
        """Take the pages out of this process; they are read back from the file when touched."""
        _libc.madvise(self.address, self.length, mmap.MADV_DONTNEED)

    def punch(self) -> None:
        """Give the blocks back to the file system: the values are zeros from now on."""
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        # Where the file system cannot, the space comes back when the file is closed.
        _libc.fallocate(self.file.fd, mode, self.offset, self.length)

    def _free(self) -> None:
        _extents.pop(self.address, None)
        _libc.munmap(self.address, self.length)
        if self.pid == os.getpid():  # a forked child shares the file with its parent
            self.punch()


_extents: dict[int, ScratchExtent] = {}


class _Backing:
    """Moves parameters into scratch files in `directories` as they are registered."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._files: dict[int, ScratchFile] = {}  # one on each file system
        self._weights: dict[int, float] = {}
        weights = (bandwidths(directories) if len(directories) > 1 else None) or [1.0] * len(directories)
        for directory, weight in zip(directories, weights, strict=True):
            file = ScratchFile(directory)
            system = os.stat(directory).st_dev
            self._files.setdefault(system, file)
            self._weights[system] = self._weights.get(system, 0.0) + weight
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._untrimmed = 0
        # Bytes that were moved already. A weak reference keeps the storage's identity from being
        # used again, so an entry can be stale but never wrong.
        self._moved: dict[tuple[int, int, int], tuple[StorageWeakRef, ScratchExtent]] = {}

    def on_registration(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """The hook that torch calls."""
        self.modules.add(module)
        self.back(param)

    def sweep(self) -> None:
        """Move what came in without a registration: `.data = …`, `.bfloat16()`, lazy modules."""
        for module in self.modules:
            for param in module._parameters.values():
                if param is not None:
                    self.back(param)

    def back(self, param: nn.Parameter) -> None:
        """Let `param.data` be a part of the scratch file, with the same values."""
        if nn.parameter.is_lazy(param):
            return  # a lazy module's: `sweep` comes later
        data = param.data
        if type(data) is not torch.Tensor or data.device.type != "cpu" or data.layout is not torch.strided:
            return
        if data.is_quantized or data.is_conj() or data.is_neg():
            return
        nbytes = extent_elements(data) * data.element_size()
        if nbytes < LEAST_SCRATCH or scratch_extent(data) is not None:
            return
        begin = int(data.storage_offset()) * data.element_size()
        with torch.no_grad(), torch.device("cpu"):
            storage = self._bytes(data.untyped_storage(), begin, nbytes)
            view = torch.empty(0, dtype=data.dtype)
            param.data = view.set_(storage, 0, data.shape, data.stride())

    def _bytes(self, source: torch.UntypedStorage, begin: int, nbytes: int) -> torch.UntypedStorage:
        key = (source._cdata, begin, nbytes)
        room = self._moved[key][1].tensor() if key in self._moved else None
        if room is None:
            weak = StorageWeakRef(source)
            extent, room = self._file().new_extent(nbytes, (weak, begin))
            room.copy_(torch.empty(0, dtype=torch.uint8).set_(source, begin, (nbytes,), (1,)))
            self._moved[key] = (weak, extent)
            self._trim(nbytes)
        return room.untyped_storage()

    def _file(self) -> ScratchFile:
        files = list(self._files.values())
        if len(files) == 1:
            return files[0]
        free = [file.free() for file in files]
        return files[roomiest(free, list(self._weights.values()))]

    def _trim(self, nbytes: int) -> None:
        # glibc seldom finds room for torch's aligned blocks among those that were freed, so the
        # heap would grow with the model after all: give its free pages back now and then.
        self._untrimmed += nbytes
        if self._untrimmed >= _TRIM_EVERY:
            self._untrimmed = 0
            if hasattr(_libc, "malloc_trim"):  # another libc may lack it
                _libc.malloc_trim(0)


def _tensor_over(owner: ctypes.Array[ctypes.c_char]) -> torch.Tensor:
    with torch.device("cpu"):
        return torch.frombuffer(owner, dtype=torch.uint8)


def extent_elements(data: torch.Tensor) -> int:
    """Return the elements from the first to the last that a strided tensor reaches."""
    if data.numel() == 0:
        return 0
    return 1 + sum((int(n) - 1) * int(s) for n, s in zip(data.shape, data.stride(), strict=True))


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # its drive may be gone; the file had no name, and nobody misses it
        os.close(fd)
