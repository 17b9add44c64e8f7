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
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Name of the tensor with a server's state other than its tables, which is a message of state.proto
as bytes.
"""

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
_CHUNK = 512 << 10  # bytes read at a time for a checksum


class TensorWriter:
    """Writer of a safetensors file, page by page. Each tensor grows along its first axis until it has its
    final shape.

        writer = TensorWriter(path, {"value": ("float32", (2, 16))}, {})
        writer.append("value", rows)
        sha256, size = writer.finish()

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
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        _write(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def append(self, name: str, page: NDArray[Any]) -> None:
        """Write the next rows of a tensor.

        Raises:
            CheckpointError: The tensor would have more rows than its final shape.
        """
        content = np.ascontiguousarray(page).reshape(-1).view(np.uint8).data
        at = self._at[name]
        self._at[name] = at + len(content)
        if self._at[name] > self._ends[name]:
            raise CheckpointError(
                f"tensor {name!r} of {str(self._path)!r} has more than was announced"
            )
        _write(self._file, content, at)

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
        os.fsync(self._file)
        return digest(self._path, between), self._size


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


def digest(where: Path, between: Callable[[], None] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal. `between` is called after each half MiB that is read."""
    checksum, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with regular(where) as stream:
        while size := stream.readinto(chunk):  # type: ignore[attr-defined]  # it is not buffered
            checksum.update(chunk[:size])
            if between is not None:
                between()
    return checksum.hexdigest()


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
