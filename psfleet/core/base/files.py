"""Files that are on the disk when a function returns, whatever becomes of the machine; private folders."""

import contextlib
import ctypes
import errno
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from psfleet.core.base.errors import ConfigError

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


LONGEST_PATH = 107  # bytes of a unix socket's path: sun_path of sys/un.h, less its end
_ROOM = len("/server.00000")
# Endpoints are listed with commas between them, and gRPC reads a path as a part of a URI.
_PLAIN = re.compile(r"/[A-Za-z0-9_./+~-]*")


def replace(where: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically: readers see the old file or all of the new one.

    Args:
        where: The file.
        write: Writes to the path that it is given, in the same folder.
    """

    def write_and_sync(draft: Path) -> None:
        write(draft)
        sync(draft)

    let_appear(where, write_and_sync)
    sync(where.absolute().parent)


def let_appear(where: Path, write: Callable[[Path], object]) -> None:
    """Write as `replace` does, a file that need not outlive the machine.

    A failed write leaves nothing behind.
    """
    draft = where.with_name(f".{where.name}.{os.getpid()}")
    try:
        write(draft)
        draft.replace(where)
    except BaseException:  # an interrupt too
        draft.unlink(missing_ok=True)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders change places in one step. False: the system or the file system cannot.

    renameat2 with RENAME_EXCHANGE: Linux 3.15 and glibc 2.28, on ext4, xfs, btrfs, tmpfs, overlayfs;
    not on NFS.

    Raises:
        OSError: One of them is not there, or may not be moved.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@contextlib.contextmanager
def regular(where: Path) -> Iterator[IO[bytes]]:
    """Open a file to read it, if it is one: neither a pipe, which might wait for ever, nor a device.

    Raises:
        OSError: It cannot be opened, or is something else.
        ValueError: The path is no name of a file.
    """
    handle = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb", buffering=0) as file:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(where))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "It is no regular file", str(where))
        yield file


def read_small(where: Path, most: int) -> bytes:
    """Return all of a regular file that is known to be small.

    Raises:
        OSError: It cannot be read, is no regular file, or has more than `most` bytes.
        ValueError: The path is no name of a file.
    """
    with regular(where) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"It has {size:,} bytes, more than {most:,}", str(where))
        return file.read(most + 1)


def read_toml(where: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Return the document of a TOML file, `what` for the error. Each value of it can be quoted.

    Raises:
        ConfigError: It cannot be read, is no TOML, or has a value that Python cannot read or print.
    """
    try:
        document = tomllib.loads(Path(where).read_text("utf-8-sig"))
        repr(
            document
        )  # dotted keys may nest more deeply than brackets, and hexadecimal digits be more
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read: it is no TOML: {error}") from None
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else "with too many digits"
        raise ConfigError(f"{what} cannot be read: it has a value {why}") from None
    return document


def write_durably(where: Path, content: bytes) -> None:
    """Write a file in place."""
    where.write_bytes(content)
    sync(where)


def sync(where: Path) -> None:
    """See that a file or a folder is on the disk."""
    handle = os.open(where, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """Explain why a file cannot be had, for a sentence.

    A ValueError says that the path is no name of a file.
    """
    return str(getattr(error, "strerror", None) or error)


def open_own_folder(where: Path) -> int:
    """Make a folder for this user alone, or open one that this user has; return its descriptor.

    Where others may write beside it, they could plant a link to a folder of this user, whose mode and files
    would change, or a folder of theirs, in which they could read and replace what is written.

    Raises:
        OSError: It cannot be made or written, is no folder or a symbolic link, or is another user's.
    """
    with contextlib.suppress(FileExistsError):
        where.mkdir(mode=0o700, parents=True)
    if where.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(where))
    descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Some file systems give all files to one user, so this asks who owns what this process makes.
        with tempfile.TemporaryFile(dir=f"/proc/self/fd/{descriptor}") as made:
            own, owner = os.fstat(made.fileno()).st_uid, os.fstat(descriptor).st_uid
        if own != owner:
            raise PermissionError(errno.EPERM, f"it belongs to user {owner}", str(where))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_private_folder() -> Path:
    """Return a new folder of mode 0700, in TMPDIR, or in /tmp if sockets cannot lie there.

    They cannot where the path is too long, or has other characters than letters, digits and _ . / + ~ -.

    Raises:
        ConfigError: The folder cannot be made.
    """
    try:
        name = os.path.abspath(tempfile.mkdtemp(prefix="psfleet-"))
        if len(name) + _ROOM > LONGEST_PATH or not _PLAIN.fullmatch(name):
            os.rmdir(name)
            name = tempfile.mkdtemp(prefix="psfleet-", dir="/tmp")
    except OSError as error:
        raise ConfigError(
            f"no folder for sockets can be made in {error.filename!r} ({error.strerror}); name another "
            "one in TMPDIR"
        ) from None
    return Path(name)
