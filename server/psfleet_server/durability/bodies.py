"""Bodies of records that hold arrays: how they lie in the log, and on the way to a standby.

A head with its length, then arrays, each filled up to a multiple of 8 bytes, so that they can be used
where they are read.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.wire.frame import ALIGNMENT
from psfleet.wire.segments import Piece
from psfleet.wire.v1.frame_pb2 import Header
from psfleet_server.durability.log import Part

__all__ = ["LENGTH", "frame", "pack_arrays", "pack_json", "split", "unpack_arrays"]

LENGTH = struct.Struct("<Q")


def pack_json(**said: Any) -> bytes:
    """A body, or a head, that is JSON."""
    return json.dumps(said).encode()


def pack_arrays(said: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Part]:
    """JSON with its length, then arrays, each filled up to a multiple of 8 bytes."""
    shapes = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = pack_json(**said, arrays=shapes)
    head += b" " * (-(LENGTH.size + len(head)) % ALIGNMENT)
    return [LENGTH.pack(len(head)), head, *map(_filled_up, arrays.values())]


def unpack_arrays(body: memoryview) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What `pack_arrays` was given; the arrays lie in the body."""
    (length,) = LENGTH.unpack_from(body)
    at = LENGTH.size + length
    said = json.loads(bytes(body[LENGTH.size : at]))
    arrays = {}
    for name, dtype, shape in said["arrays"]:
        arrays[name] = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
        at += arrays[name].nbytes
        at += -at % ALIGNMENT
    return said, arrays


def frame(header: Header, pieces: Iterable[Piece]) -> list[Part]:
    """A header with its length, then the pieces, each filled up to a multiple of 8 bytes."""
    arrays: list[Part] = []
    for piece in pieces:
        header.segments.append(piece.segment)
        arrays += [*piece.arrays, bytes(-sum(a.nbytes for a in piece.arrays) % ALIGNMENT)]
    head = header.SerializeToString()
    return [LENGTH.pack(len(head)), head, bytes(-len(head) % ALIGNMENT), *arrays]


def split(body: memoryview) -> tuple[bytes, memoryview]:
    """The header and the payload of what `frame` made."""
    (length,) = LENGTH.unpack_from(body)
    end = LENGTH.size + length
    return bytes(body[LENGTH.size : end]), body[end + -length % ALIGNMENT :]


def _filled_up(column: NDArray[Any]) -> bytes:
    """The column's bytes up to a multiple of 8."""
    content = column.tobytes()
    return content + bytes(-len(content) % ALIGNMENT)
