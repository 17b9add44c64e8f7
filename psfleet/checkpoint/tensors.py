"""Safetensors files that are written piece by piece, and what saves leave whose process was killed.

length u64, header JSON filled up with spaces to a multiple of 8 bytes, the tensors side by side

    .model.<process>.<random>.partial    written, and not at its place: removed by the next save
    .model.<process>.<random>.old        moved away, only where two folders cannot be exchanged: removed, or
                                         put back by the next save or load if nothing has taken its place

A folder is left over when nobody holds a lock on it: the kernel takes that back from a process that dies.
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
HEADER = "psfleet"  # under this name the metadata of a safetensors file has psfleet's own document
SERVER = "server"
"""The tensor with what a server is beside its tables: a body of state.proto, as bytes."""

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
"""Names of dtypes in safetensors files, by NumPy's."""
_CHUNK = 512 << 10  # bytes that are read at a time


class TensorWriter:
    """A safetensors file whose tensors grow along their first axis until they are full.

    Args:
        path: The file; it must not exist.
        tensors: Dtype and final shape of each tensor.
        metadata: Text that the header carries.
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
        }  # where the next page goes
        self._size = begin + start
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        _write(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def append(self, name: str, page: NDArray[Any]) -> None:
        """The next rows of a tensor."""
        content = np.ascontiguousarray(page).reshape(-1).view(np.uint8).data
        at = self._at[name]
        self._at[name] = at + len(content)
        if self._at[name] > self._ends[name]:
            raise CheckpointError(
                f"tensor {name!r} of {str(self._path)!r} has more than was announced"
            )
        _write(self._file, content, at)

    def finish(self, between: Callable[[], None] | None = None) -> tuple[str, int]:
        """Make the file durable; its SHA-256 in hexadecimal and its length.

        `between` is called now and then while the file is read for that.

        Raises:
            CheckpointError: A tensor is not full.
        """
        short = [name for name, at in self._at.items() if at != self._ends[name]]
        if short:
            raise CheckpointError(
                f"tensors {short} of {str(self._path)!r} have less than was announced"
            )
        os.fsync(self._file)
        return digest(self._path, between), self._size


def write_arrays(where: str | Path, arrays: Mapping[str, NDArray[Any]], document: Any) -> None:
    """Write a whole safetensors file with a document in its metadata."""
    save_file(dict(arrays), where, {HEADER: json.dumps(document)})


def read_arrays(where: str | Path, kind: Format) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The fields of the document in a safetensors file's metadata, and its arrays.

    Raises:
        Misfit: It is of another format or version.
        OSError, SafetensorError, ValueError: It cannot be read, or is no such file.
    """
    with regular(Path(where)), safe_open(where, "numpy") as file:
        fields = kind.parse((file.metadata() or {}).get(HEADER, "null"))
        return fields, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def digest(where: Path, between: Callable[[], None] | None = None) -> str:
    """The SHA-256 of a file in hexadecimal; `between` is called after each part of it."""
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
    """Return the real path of the folder at `path`, with all symbolic links followed, also a dangling one.

    Raises:
        OSError: The links lead round in a circle.
    """
    place = Path(os.path.realpath(path))
    place.is_symlink() and os.stat(place)  # says that there is a circle
    return place


def beside(place: Path, kind: str) -> Path:
    """A name that nothing has, for a folder that is to come to `place` or was there."""
    return place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}.{kind}")


def put_back(place: Path) -> bool:
    """Put back what was moved away from a place where nothing is; whether there was something."""
    for old in [] if place.exists() else _found(place, "old"):
        with contextlib.suppress(OSError):  # another process is faster, or may not write here
            old.rename(place)
            sync(place.parent)
            return True
    return False


def clear(place: Path) -> None:
    """Remove what dead processes have left beside a place."""
    put_back(place)
    for folder in (*_found(place, "partial"), *_found(place, "old")):
        with contextlib.suppress(OSError), _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _found(place: Path, kind: str) -> list[Path]:
    pattern = f".{glob.escape(place.name)}.*.{kind}"
    return sorted(path for path in place.parent.glob(pattern) if path.is_dir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within, this process has the folder; an OSError says that another one has."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
