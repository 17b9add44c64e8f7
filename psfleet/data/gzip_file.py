"""Gzip files with fast `seek`. Decompression starts at the nearest earlier point, not at the start of the
file.

Python's `gzip` starts at the beginning of the file for each seek backward. A shuffled epoch over n row
groups would then decompress the file n / 2 times (docs/decisions/0023-order-of-rows.md). So reading saves a
point every 64 MiB of decompressed bytes. A point has a copy of zlib's state, and decompression can continue
there.

    compressed     |----offset-----*--------------|
    decompressed   |----position------*------------------|     a GzipPoint, plus the decompressor's state
"""

import bisect
import io
import zlib
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

_BYTES = 1 << 14  # compressed bytes read at once; a point keeps up to this many in its decompressor
_DISTANCE = 64 << 20  # decompressed bytes between two points
_GZIP = 31  # zlib's number for the format, with the largest window


@dataclass(frozen=True, slots=True)
class GzipPoint:
    """Saved state of the decompression at one position, about 60 kB.

    Attributes:
        position: Position in the decompressed file.
        offset: Position in the compressed file of the first byte that `decompressor` has not received.
        decompressor: Copy of zlib's decompressor. Copy it again before use, so that the point stays valid.
    """

    position: int
    offset: int
    decompressor: Any


class GzipFile(io.RawIOBase):
    """Decompressed content of a gzip file as a readable stream. The file may consist of several gzip members.

    Args:
        content: Compressed file, opened for reading. It is closed with this object.
        points: Saved points of the file, in ascending order. Reading adds points to this list. Pass the
            same list to later readers of the file.
    """

    def __init__(self, content: Any, points: list[GzipPoint]) -> None:
        self._content = content
        self._points = points
        self._position = 0
        self._input = b""
        self._decompressor = zlib.decompressobj(_GZIP)

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a gzip file is sought in from its start")
        number = bisect.bisect_right(self._points, offset, key=lambda point: point.position)
        nearest = self._points[number - 1] if number else GzipPoint(0, 0, zlib.decompressobj(_GZIP))
        if not nearest.position <= self._position <= offset:
            self._content.seek(nearest.offset)
            self._position, self._input = nearest.position, b""
            self._decompressor = nearest.decompressor.copy()
        while self._position < offset and self.read(min(_BYTES, offset - self._position)):
            pass
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        try:
            data = self._decompressed(len(buffer))
        except zlib.error as error:
            raise OSError(f"it is not gzip, or damaged: {error}") from None
        buffer[: len(data)] = data
        self._position += len(data)
        last = self._points[-1].position if self._points else 0
        if self._position >= last + _DISTANCE:
            offset = self._content.tell() - len(self._input)
            self._points.append(GzipPoint(self._position, offset, self._decompressor.copy()))
        return len(data)

    def _decompressed(self, limit: int) -> bytes:
        while True:
            if self._decompressor.eof and not self._begin_member():
                return b""
            data: bytes = self._decompressor.decompress(self._input, limit)
            self._input = self._decompressor.unconsumed_tail
            if data:
                return data
            if not self._input and not self._decompressor.eof:
                self._input = self._content.read(_BYTES)
                if not self._input:
                    raise OSError("it ends within its compressed data")

    def _begin_member(self) -> bool:
        """Start the next gzip member, after zeros between members. Returns False if there is none."""
        start = self._decompressor.unused_data.lstrip(b"\0")
        while not start:
            data = self._content.read(_BYTES)
            if not data:
                return False
            start = data.lstrip(b"\0")
        self._input, self._decompressor = start, zlib.decompressobj(_GZIP)
        return True

    @override
    def close(self) -> None:
        if not self.closed:
            self._content.close()
        super().close()
