"""A directory's file system and its drive, as /proc and /sys describe them."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from infinity.core.errors import BuildError
from infinity.hardware.probe import BlockDevice, Mount, drive_of, make_direct, mount_of, nameless_file

MEMORY, NETWORK, DRIVE = "memory", "network", "drive"
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
_OVER_NETWORK: Final = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
    *("orangefs", "panfs", "smb3", "smbfs", "wekafs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.glusterfs"),
    *("fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
)


class DirectoryFacts(NamedTuple):
    """What a directory stands on. Sizes in bytes."""

    path: str
    mount: Mount | None
    drive: BlockDevice | None  #: None: no block device of its own (memory, network, a pool of drives)
    free: int  #: for this user
    total: int
    writable: bool
    direct: bool | None  #: whether files there take O_DIRECT; None: no file can be made
    alignment: int | None  #: of O_DIRECT's offsets; 0: none; None: the kernel does not say
    refusal: int | None = None  #: the error number with which a file cannot be made there

    @property
    def filesystem(self) -> str:
        """The kind of its file system."""
        return self.mount.filesystem if self.mount is not None else "an unknown file system"

    @property
    def kind(self) -> str:
        """What the file system stands on."""
        if self.filesystem in _IN_MEMORY:
            return MEMORY
        return NETWORK if self.filesystem in _OVER_NETWORK else DRIVE

    @property
    def rotational(self) -> bool:
        """Whether the drive is a rotational disk. What a virtual one says of that is a default."""
        drive = self.drive
        return drive is not None and bool(drive.rotational) and not drive.name.startswith(("vd", "xvd"))


def describe_directory(path: str) -> DirectoryFacts:
    """Return what `path` stands on.

    Raises:
        OSError: it is missing, not a directory, or closed to this user.
    """
    with os.scandir(path):  # the errors that a user should see
        pass
    system = os.statvfs(path)
    direct: bool | None = None
    alignment: int | None = None
    refusal: int | None = None
    try:
        fd = nameless_file(path)
    except OSError as error:
        refusal = error.errno
    else:
        try:
            direct = make_direct(fd)
            alignment = _alignment(fd)
        finally:
            os.close(fd)
    return DirectoryFacts(
        path=os.path.abspath(path),
        mount=mount_of(path),
        drive=drive_of(path),
        free=system.f_bavail * system.f_frsize,
        total=system.f_blocks * system.f_frsize,
        writable=direct is not None,
        direct=direct,
        alignment=alignment,
        refusal=refusal,
    )


def _alignment(fd: int) -> int | None:
    try:
        from infinity.hardware.direct_file import dio_offset_align
    except BuildError:  # whoever wants to know what is wrong here asks without the native part, too
        return None
    return dio_offset_align(fd)
