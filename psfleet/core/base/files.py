"""Atomic and durable file operations, safe reading of small files, and private folders.

Use `replace` for a file that must survive a crash of the machine. Use `let_appear` for a file that must
never be seen half written, but need not survive a crash. `open_own_folder` and `make_private_folder` protect
against other users of the machine.
"""

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


LONGEST_PATH = 107  # bytes of a unix socket's path: sun_path in sys/un.h without the final zero
_ROOM = len("/server.00000")  # added to the path of a private folder
# Only characters that are safe in a path: lists of endpoints use commas, and gRPC parses paths as URIs.
_PLAIN = re.compile(r"/[A-Za-z0-9_./+~-]*")


def replace(where: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically and durably: even after a power cut it has its old or its new content.

    Args:
        write: Called with a path in the same folder, to write the new content there.
    """

    def write_and_sync(draft: Path) -> None:
        write(draft)
        sync(draft)

    let_appear(where, write_and_sync)
    # First the content must be on disk, then the rename: otherwise a power cut could leave the new name
    # with no content. The rename is on disk only once the folder is.
    sync(where.absolute().parent)


def let_appear(where: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that readers see all of it or nothing. Unlike `replace`, does not wait for the disk.

    If writing fails, nothing is left behind.

    Args:
        write: Called with a path in the same folder, to write the content there.
    """
    draft = where.with_name(f".{where.name}.{os.getpid()}")
    try:
        write(draft)
        draft.replace(where)
    except BaseException:  # an interrupt too
        draft.unlink(missing_ok=True)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Swap two files or folders in one step. Returns False if the system or the file system cannot do that.

    Uses renameat2 with RENAME_EXCHANGE: Linux 3.15 and glibc 2.28, on ext4, xfs, btrfs, tmpfs and
    overlayfs, but not on NFS.

    Raises:
        OSError: A path does not exist, or may not be moved.
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
    """Open a regular file for reading. Refuses devices, and pipes, which might block forever.

    Raises:
        OSError: The path cannot be opened, or is not a regular file.
        ValueError: The path is not a valid file name.
    """
    # Open first and check afterwards, so that the file cannot be exchanged in between. O_NONBLOCK keeps the
    # open itself from waiting for the writer of a pipe.
    handle = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb", buffering=0) as file:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(where))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "It is no regular file", str(where))
        yield file


def read_small(where: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or has more than `most` bytes.
        ValueError: The path is not a valid file name.
    """
    with regular(where) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"It has {size:,} bytes, more than {most:,}", str(where))
        return file.read(most + 1)


def read_toml(where: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """Parse a TOML file. Every value of the result can be printed in a message.

    `what`: Name of the file, as the subject of errors.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has a value that Python cannot parse or print.
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
    """Write a file in place and wait until it is on the disk."""
    where.write_bytes(content)
    sync(where)


def sync(where: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(where, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: Exception) -> str:
    """Return the reason why a file operation failed, as part of a sentence.

    Accepts a ValueError too, which Python raises for an invalid file name.
    """
    return str(getattr(error, "strerror", None) or error)


def open_own_folder(where: Path) -> int:
    """Create a folder that this user owns, or open it if it exists. Returns the folder's descriptor.

    Refuses folders that another user may have prepared in a shared place such as /tmp. A symbolic link could
    make this process change another folder of its own user. A folder of another user would let that user read
    and replace the files in it.

    Raises:
        OSError: The folder cannot be made or written, is not a folder, is a symbolic link, or belongs to
            another user.
    """
    with contextlib.suppress(FileExistsError):
        where.mkdir(mode=0o700, parents=True)
    if where.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(where))
    descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Compare with the owner of a new file instead of this user: some file systems map all files to one
        # owner.
        with tempfile.TemporaryFile(dir=f"/proc/self/fd/{descriptor}") as made:
            own_user, owner = os.fstat(made.fileno()).st_uid, os.fstat(descriptor).st_uid
        if own_user != owner:
            raise PermissionError(errno.EPERM, f"it belongs to user {owner}", str(where))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_private_folder() -> Path:
    """Create a folder of mode 0700 for sockets, in TMPDIR or else in /tmp, and return it.

    TMPDIR is not used if its path is too long for sockets, or has characters other than letters, digits and
    _ . / + ~ -.

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
