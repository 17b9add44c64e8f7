"""Files of a snapshot on disk: safetensors files written page by page, and folders left by killed saves.

TensorWriter writes a file whose tensors do not fit into memory together. All shapes are given first, so
that the header can be written before the data. Pages of several tensors may then come in any order:

    | length of the header, u64 | header: JSON, filled with spaces to 8 bytes | tensor | tensor | ...

A save of `model` writes a folder beside it and at the end moves the folder to `model`. If the process is
killed before that, one of these folders is left:

    .model.<process>.<random>.partial    an unfinished folder; the next save removes it
    .model.<process>.<random>.old        the earlier snapshot, moved away where the system cannot exchange two
                                         folders. If there is no `model`, the next save or load puts it back;
                                         else the next save removes it.

A save holds a lock on its folder, which the kernel releases when the process dies. So a folder that is
still locked belongs to a running save, and any other folder was left by a killed one.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from psfleet.core.base.errors import CheckpointError
from psfleet.core.base.files import regular, sync
from psfleet.core.base.json_documents import Format

SHARD = Format("shard of a snapshot")
HEADER = "psfleet"  # key in the metadata of a safetensors file, whose value is psfleet's own JSON document
SERVER = "server"
"""Name of the tensor with a server's state other than its tables (psfleet.core.net.server_state)."""

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Dtypes of safetensors files, by their names in NumPy."""
_CHUNK = 512 << 10  # bytes of a checksum between two rests
# Files and tensors from this many bytes on are written and read in a thread beside the one that makes or
# checks the content. Smaller ones start no thread.
_LARGE = 16 << 20
# Bytes that the thread writes or reads at a time.
_BUFFER = 4 << 20
# Reads and writes around the page cache begin and end at multiples of this, in the file and in memory.
_BLOCK = 4096


class TensorWriter:
    """Writer of a safetensors file, page by page. Each tensor grows along its first axis until it has its
    final shape.

        writer = TensorWriter(path, {"value": ("float32", (2, 16))}, {})
        writer.append("value", rows)
        sha256, size = writer.finish()

    A large file goes around the page cache: filling the cache with it takes more processor time than all else
    (0.4 to 3.5 s for each GB, against 0.05 s), and pushes out what other programs read. So each large tensor
    gathers its pages in a buffer, and a thread writes full buffers while the caller makes the next pages:

        file     | header | tensor a              | tensor b ...
        blocks   |........|......|................|.......
                       cache: parts of blocks at both ends of a tensor
                                around the cache: whole blocks between them

    Args:
        path: Path of the new file. It must not exist.
        tensors: Dtype and final shape of each tensor by name.
        metadata: Metadata of the header: texts by key.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[DTypeLike, Sequence[int]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._path = path
        self._ends: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        start = 0
        for name, (dtype, shape) in tensors.items():
            kind = np.dtype(dtype)
            end = start + kind.itemsize * int(np.prod(shape, dtype=np.int64))
            header[name] = {
                "dtype": NAMES[kind.name],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            self._ends[name] = end
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        self._ends = {name: end + begin for name, end in self._ends.items()}
        self._at = {
            name: header[name]["data_offsets"][0] + begin for name in tensors
        }  # offset in the file of each tensor's next page
        self._size = begin + start
        self._opened = contextlib.ExitStack()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._opened.callback(os.close, self._file)
        self._uncached: int | None = None  # the same file, around the page cache
        self._gathered: dict[str, _Gathered] = {}
        self._written: Future[None] | None = None  # what the thread was given last
        if self._size >= _LARGE:
            self._uncached = os.open(path, os.O_RDWR)
            self._opened.callback(os.close, self._uncached)
            _go_around_cache(self._uncached)
            # Closed first, which waits for the thread: a file that is closed leaves its number to others.
            self._disk = self._opened.enter_context(ThreadPoolExecutor(1, "psfleet-disk"))
        _write(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def append(self, name: str, page: NDArray[Any]) -> None:
        """Write the next rows of a tensor.

        Raises:
            CheckpointError: The tensor would have more rows than its final shape.
        """
        content = np.ascontiguousarray(page).reshape(-1).view(np.uint8)
        at, end = self._at[name], self._ends[name]
        self._at[name] = at + len(content)
        if self._at[name] > end:
            raise CheckpointError(
                f"tensor {name!r} of {str(self._path)!r} has more than was announced"
            )
        if name not in self._gathered and (self._uncached is None or end - at < _LARGE):
            _write(self._file, content.data, at)
        else:
            self._gather(name, content, at)

    def _gather(self, name: str, content: NDArray[np.uint8], at: int) -> None:
        """Add the next bytes of a large tensor to its buffer, and have the thread write full buffers."""
        if name not in self._gathered:
            first = min(-at % _BLOCK, len(content))
            _write(self._file, content.data[:first], at)
            if self._at[name] % _BLOCK and len(content) == first:
                return  # this page did not reach the first whole block
            self._gathered[name] = _Gathered(at + first)
            content = content[first:]
        gathered = self._gathered[name]
        while len(content):
            content = gathered.add(content)
            if gathered.filled == _BUFFER:
                self._write_behind(gathered.take(_BUFFER))
        if self._at[name] == self._ends[name]:
            del self._gathered[name]
            whole = gathered.filled // _BLOCK * _BLOCK
            tail = gathered.buffer[whole : gathered.filled]  # a part of a block: through the cache
            _write(self._file, tail.data, gathered.offset + whole)
            if whole:
                self._write_behind(gathered.take(whole))

    def _write_behind(self, content: tuple[NDArray[np.uint8], int]) -> None:
        """Have the thread write bytes at an offset, once it has written the bytes before.

        Raises:
            OSError: The bytes before could not be written.
        """
        if self._written is not None:
            self._written.result()
        self._written = self._disk.submit(self._write_uncached, *content)

    def _write_uncached(self, content: NDArray[np.uint8], at: int) -> None:
        assert self._uncached is not None
        try:
            _write(self._uncached, content.data, at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _write(self._file, content.data, at)  # this file system has larger blocks

    def finish(self, between: Callable[[], None] | None = None) -> tuple[str, int]:
        """Make the file durable, and read it back to compute its checksum.

        Args:
            between: Function that is called after each half MiB. A server uses it to slow the writing down
                in favour of training.

        Returns:
            SHA-256 of the file in hexadecimal, and its length in bytes.

        Raises:
            CheckpointError: A tensor has fewer rows than its final shape.
        """
        short = [name for name, at in self._at.items() if at != self._ends[name]]
        if short:
            raise CheckpointError(
                f"tensors {short} of {str(self._path)!r} have less than was announced"
            )
        if self._written is not None:
            self._written.result()
        os.fsync(self._file)
        return digest(self._path, between, cached=False), self._size


class _Gathered:
    """Bytes of one large tensor that wait for the thread that writes.

    There are two buffers: the caller fills one while the thread writes the other.

    Attributes:
        offset: Offset in the file of the first byte of `buffer`, a multiple of _BLOCK.
        buffer: Buffer that is being filled, uint8 [_BUFFER].
        filled: Number of bytes in `buffer`.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.buffer, self._next_buffer = _aligned(), _aligned()
        self.filled = 0

    def add(self, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Copy as many bytes as fit into the buffer, and return those that do not fit."""
        count = min(len(content), _BUFFER - self.filled)
        self.buffer[self.filled : self.filled + count] = content[:count]
        self.filled += count
        return content[count:]

    def take(self, count: int) -> tuple[NDArray[np.uint8], int]:
        """Return the first `count` bytes and their offset in the file, and continue with the other buffer.

        Have the thread write them before the next call, which gives this buffer out again.
        """
        content = self.buffer[:count], self.offset
        self.buffer, self._next_buffer = self._next_buffer, self.buffer
        self.offset, self.filled = self.offset + count, 0
        return content


def write_arrays(where: str | Path, arrays: Mapping[str, NDArray[Any]], document: Any) -> None:
    """Write a safetensors file with these arrays, and with a JSON document in its metadata."""
    save_file(dict(arrays), where, {HEADER: json.dumps(document)})


def read_arrays(where: str | Path, kind: Format) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read a safetensors file of psfleet. Returns the fields of the document in its metadata, and the
    arrays by name.

    Raises:
        Misfit: The document has another format or version.
        OSError, SafetensorError, ValueError: The file cannot be read, or is no safetensors file.
    """
    with regular(Path(where)), safe_open(where, "numpy") as file:
        fields = kind.parse((file.metadata() or {}).get(HEADER, "null"))
        return fields, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def digest(where: Path, between: Callable[[], None] | None = None, *, cached: bool = True) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    Args:
        between: Function called after each half MiB.
        cached: If False, a large file is read around the page cache, from the disk. Else it is in the cache
            afterwards.
    """
    checksum = hashlib.sha256()
    with regular(where) as stream:
        for buffer in _buffers(stream.fileno(), cached):
            for start in range(0, len(buffer), _CHUNK):
                checksum.update(buffer[start : start + _CHUNK])
                if between is not None:
                    between()
    return checksum.hexdigest()


def _buffers(file: int, cached: bool) -> Iterator[memoryview]:
    """Yield a file buffer by buffer. Of a large file, a thread reads the next one meanwhile."""
    size, at = os.fstat(file).st_size, 0
    if size < _LARGE:
        chunk = memoryview(bytearray(_CHUNK))
        while count := os.preadv(file, [chunk], at):
            yield chunk[:count]
            at += count
        return
    if not cached:
        _go_around_cache(file)
    next_buffer, buffer = _aligned().data, _aligned().data
    with ThreadPoolExecutor(1, "psfleet-disk") as disk:
        read = disk.submit(_read, file, next_buffer, at)
        while count := read.result():
            buffer, next_buffer, at = next_buffer, buffer, at + count
            if at < size:
                read = disk.submit(_read, file, next_buffer, at)
            yield buffer[:count]
            if at >= size:
                break


def _read(file: int, buffer: memoryview, at: int) -> int:
    try:
        return os.preadv(file, [buffer], at)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # This file system has larger blocks.
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
        return os.preadv(file, [buffer], at)


def _go_around_cache(file: int) -> None:
    """Have an open file read and written around the page cache, if its file system can do that."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)


def _aligned() -> NDArray[np.uint8]:
    """Return a buffer that begins at a page of memory, as direct reads and writes need."""
    return np.frombuffer(mmap.mmap(-1, _BUFFER), np.uint8)


def _write(file: int, content: memoryview, at: int) -> None:
    while content:
        count = os.pwrite(file, content, at)
        content, at = content[count:], at + count


def place_of(path: str | Path) -> Path:
    """Return the real path of a snapshot's folder, with all symbolic links followed.

    The folder need not exist.

    Raises:
        OSError: The links form a circle.
    """
    target = Path(os.path.realpath(path))
    target.is_symlink() and os.stat(
        target
    )  # a link that is left is part of a circle; stat then raises
    return target


def beside(place: Path, kind: str) -> Path:
    """Return an unused path beside `place`, for a folder that will replace `place` or was there before."""
    return place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}.{kind}")


def put_back(place: Path) -> bool:
    """Move the earlier snapshot back to `place` if a killed save has moved it away. Returns True if
    it did.
    """
    for old in [] if place.exists() else _found(place, "old"):
        with contextlib.suppress(OSError):  # another process is faster, or may not write here
            old.rename(place)
            sync(place.parent)
            return True
    return False


def clear(place: Path) -> None:
    """Remove the folders that killed saves have left beside a snapshot."""
    put_back(place)  # first, so that the earlier snapshot is not removed below
    for folder in (*_found(place, "partial"), *_found(place, "old")):
        with contextlib.suppress(OSError), _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _found(target: Path, kind: str) -> list[Path]:
    pattern = f".{glob.escape(target.name)}.*.{kind}"
    return sorted(path for path in target.parent.glob(pattern) if path.is_dir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Return a context manager that locks a folder.

    Raises:
        OSError: Another process has the lock, so its save is still running.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
