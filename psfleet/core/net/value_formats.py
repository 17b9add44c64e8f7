"""Wire formats of gradients and of values that servers send: one class for each.

bfloat16 keeps the range and three digits. int8 keeps a step of 1/127 of the largest value of a row, or
of 256 neighbouring values of a dense array; docs/wire.md says what becomes of the rest. A new format is
a class here, a number in protos/psfleet/v1/frame.proto, and a choice of psfleet.core.base.settings.kinds.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import FrameError
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.interface import Precision
from psfleet.core.engine.kernels import number_formats
from psfleet.core.engine.kernels.hashing import GOLDEN, hash_ids
from psfleet.core.engine.kernels.number_formats import (
    decode_int8,
    encode_int8,
    encode_int8_drawn,
    encode_int8_fed,
)
from psfleet.core.net.v1 import frame_pb2

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Draw = tuple[int, int, int]
"""Key of the table, seat of the worker and number of the push: what drawn values depend on."""

SCALE_BLOCK = 256
"""Values of a dense array that share a scale; parts of servers begin on multiples of it."""
_LEAST = 5  # values of a row: with its scale, a shorter one is no shorter in 8 bits than in 16
_NO_SCALES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class CompressedValues:
    """Values in a buffer: first the scales of all blocks, then a code for each value.

    Attributes:
        format: Format of the values.
        shape: [n, dim] of rows, each of which is a block; or [n] of a dense array.
        scales: float32 [blocks]; none unless the format has scales.
        codes: One for each value.
    """

    format: "WireFormat"
    shape: tuple[int, ...]
    scales: Floats
    codes: NDArray[Any]

    @staticmethod
    def over(
        buffer: NDArray[np.uint8], form: Precision | Format, shape: Sequence[int]
    ) -> "CompressedValues":
        """Make values of what the buffer holds, or is to hold. It begins on a multiple of 4."""
        return FORMATS[form].over(buffer, tuple(shape))

    @staticmethod
    def size_of(form: Precision | Format, shape: Sequence[int]) -> int:
        """Count the bytes that values of this shape take."""
        return FORMATS[form].size(shape)

    def pack(self, values: Floats) -> None:
        """Write values, contiguous and of the shape, each as the nearest that the format can hold."""
        self.format.encode(values.reshape(-1), self)

    def unpack(self, out: Floats | None = None) -> Floats:
        """Read the values, float32 of the shape; written to `out` [*shape] if it is given."""
        values = np.empty(self.shape, np.float32) if out is None else out
        self.format.decode(self, values.reshape(-1))
        return values


class WireFormat(ABC):
    """A format of values on the wire.

    Attributes:
        name: In settings.
        number: In messages.
        is_for_pulls: Servers send values in it; otherwise it is one of gradients only.
        has_elements: Some elements of a dense gradient can travel in it, not only whole blocks.
        is_finite: An infinity or NaN cannot travel in it.
        has_feedback: True if the error of a dense gradient can be added to the next one.
    """

    name: ClassVar[Precision | Format]
    number: ClassVar[frame_pb2.Precision]
    is_for_pulls: ClassVar[bool] = True
    has_elements: ClassVar[bool] = True
    is_finite: ClassVar[bool] = False
    has_feedback: ClassVar[bool] = False

    @abstractmethod
    def size(self, shape: Sequence[int]) -> int:
        """Count the bytes that values of this shape take."""

    @abstractmethod
    def over(self, buffer: NDArray[np.uint8], shape: tuple[int, ...]) -> CompressedValues:
        """Make values of what the buffer holds, or is to hold."""

    @abstractmethod
    def encode(self, values: Floats, out: CompressedValues) -> None:
        """Write values [n], each as the nearest that the format can hold."""

    @abstractmethod
    def decode(self, compressed: CompressedValues, values: Floats) -> None:
        """Write to `values` [n] what the codes stand for."""

    def decode_gradient(self, compressed: CompressedValues, scale: float, table: str) -> Floats:
        """Read values of a gradient that its worker has multiplied by `scale`.

        Raises:
            FrameError: No worker has sent such values.
        """
        del scale, table
        return compressed.unpack()

    def encode_rows(self, rows: Floats, ids: Ids, draw: Draw, out: CompressedValues) -> int | None:
        """Write rows [n, dim] of a gradient; the first one that cannot travel, if there is one."""
        del ids, draw
        out.pack(rows)
        return None

    def encode_part(
        self, values: Floats, low: int, draw: Draw, rests: Floats | None, out: CompressedValues
    ) -> None:
        """Write values [n] of a dense gradient from position `low` on.

        Args:
            values: Finite if the format is.
            low: A multiple of SCALE_BLOCK.
            draw: See `Draw`.
            rests: Errors of earlier pushes, to be added and set anew; None: nothing is kept.
            out: Is written.
        """
        del low, draw, rests
        out.pack(values)

    def for_width(self, width: int) -> Format:
        """Name the format of a table with rows of this width where this one is asked for."""
        del width
        return cast(Format, self.name)


class Float32Format(WireFormat):
    """float32 as it is."""

    name = "float32"
    number = frame_pb2.PRECISION_FLOAT32

    @override
    def size(self, shape: Sequence[int]) -> int:
        return 4 * math.prod(shape)

    @override
    def over(self, buffer: NDArray[np.uint8], shape: tuple[int, ...]) -> CompressedValues:
        return CompressedValues(self, shape, _NO_SCALES, buffer.view(np.float32))

    @override
    def encode(self, values: Floats, out: CompressedValues) -> None:
        out.codes[:] = values

    @override
    def decode(self, compressed: CompressedValues, values: Floats) -> None:
        values[:] = compressed.codes


class Float16Format(WireFormat):
    """IEEE 754 binary16, of gradients that are scaled into its range."""

    name: ClassVar[Precision | Format] = "float16"
    number = frame_pb2.PRECISION_FLOAT16
    is_for_pulls = False
    half: ClassVar[number_formats.Half] = "float16"

    @override
    def size(self, shape: Sequence[int]) -> int:
        return 2 * math.prod(shape)

    @override
    def over(self, buffer: NDArray[np.uint8], shape: tuple[int, ...]) -> CompressedValues:
        codes = buffer[: 2 * math.prod(shape)].view(np.uint16)
        return CompressedValues(self, shape, _NO_SCALES, codes)

    @override
    def encode(self, values: Floats, out: CompressedValues) -> None:
        out.codes[:] = number_formats.encode(values, self.half)

    @override
    def decode(self, compressed: CompressedValues, values: Floats) -> None:
        values[:] = number_formats.decode(compressed.codes, self.half)

    @override
    def decode_gradient(self, compressed: CompressedValues, scale: float, table: str) -> Floats:
        if not 2.0**-126 <= scale < 2.0**127:
            raise FrameError(
                f"table {table!r}: the scale of a gradient is {scale}; "
                "it must be between 2^-126 and 2^127"
            )
        return number_formats.decode(compressed.codes, self.half, scale).reshape(compressed.shape)


class Bfloat16Format(Float16Format):
    """The upper 16 bits of float32, which keep the range."""

    name = "bfloat16"
    number = frame_pb2.PRECISION_BFLOAT16
    is_for_pulls = True
    half = "bfloat16"

    @override
    def encode(self, values: Floats, out: CompressedValues) -> None:
        number_formats.shorten(values, out.codes)

    @override
    def decode(self, compressed: CompressedValues, values: Floats) -> None:
        number_formats.widen(compressed.codes, values)


class Int8Format(WireFormat):
    """Whole numbers of steps; the values of a block share a step.

    A gradient is drawn by a hash of table, worker, number of the push, id and place, so that a push has
    the same bytes wherever and whenever it is packed.
    """

    name = "int8"
    number = frame_pb2.PRECISION_INT8
    has_elements = False
    is_finite = True
    has_feedback = True

    @override
    def size(self, shape: Sequence[int]) -> int:
        return 4 * _blocks(shape) + math.prod(shape)

    @override
    def over(self, buffer: NDArray[np.uint8], shape: tuple[int, ...]) -> CompressedValues:
        start = 4 * _blocks(shape)
        codes = buffer[start : start + math.prod(shape)].view(np.int8)
        return CompressedValues(self, shape, buffer[:start].view(np.float32), codes)

    @override
    def encode(self, values: Floats, out: CompressedValues) -> None:
        encode_int8(values, _block(out.shape), out.scales, out.codes)

    @override
    def decode(self, compressed: CompressedValues, values: Floats) -> None:
        decode_int8(compressed.codes, compressed.scales, _block(compressed.shape), values)

    @override
    def decode_gradient(self, compressed: CompressedValues, scale: float, table: str) -> Floats:
        wrong = compressed.scales[~(np.isfinite(compressed.scales) & (compressed.scales >= 0))]
        if wrong.size:
            raise FrameError(
                f"table {table!r}: a step of the gradient is {wrong[0]}; "
                "it must be a finite number of at least 0"
            )
        return compressed.unpack()

    @override
    def encode_rows(self, rows: Floats, ids: Ids, draw: Draw, out: CompressedValues) -> int | None:
        return encode_int8_drawn(rows, ids, _rounding_seed(*draw), out.scales, out.codes)

    @override
    def encode_part(
        self, values: Floats, low: int, draw: Draw, rests: Floats | None, out: CompressedValues
    ) -> None:
        if rests is not None:
            encode_int8_fed(values, rests, SCALE_BLOCK, out.scales, out.codes)
            return
        # Blocks are drawn as rows are; the last one is filled up with zeros for that.
        seed, whole = _rounding_seed(*draw), len(values) // SCALE_BLOCK
        places = low // SCALE_BLOCK + np.arange(len(out.scales), dtype=np.int64)
        end = whole * SCALE_BLOCK
        rows, scales, codes = values[:end].reshape(-1, SCALE_BLOCK), out.scales, out.codes
        encode_int8_drawn(rows, places[:whole], seed, scales[:whole], codes[:end])
        if end < len(values):
            last, last_codes = (
                np.zeros((1, SCALE_BLOCK), np.float32),
                np.empty(SCALE_BLOCK, np.int8),
            )
            last[0, : len(values) - end] = values[end:]
            encode_int8_drawn(last, places[whole:], seed, scales[whole:], last_codes)
            codes[end:] = last_codes[: len(values) - end]

    @override
    def for_width(self, width: int) -> Format:
        return "bfloat16" if width < _LEAST else "int8"


def _blocks(shape: Sequence[int]) -> int:
    """Count the scales of values of this shape."""
    return shape[0] if len(shape) == 2 else -(-shape[0] // SCALE_BLOCK)


def _block(shape: Sequence[int]) -> int:
    return shape[1] if len(shape) == 2 else SCALE_BLOCK


def _rounding_seed(key: int, seat: int, number: int) -> np.uint64:
    word = (seat * GOLDEN + number) % 2**64
    seed: np.uint64 = hash_ids(np.array([word], np.uint64).view(np.int64))[0] ^ np.uint64(key)
    return seed


FORMATS: dict[Precision | Format, WireFormat] = {
    each.name: each for each in (Float32Format(), Bfloat16Format(), Float16Format(), Int8Format())
}
"""The formats by name."""
NUMBERED: dict[int, WireFormat] = {each.number: each for each in FORMATS.values()}
"""The formats by number."""
