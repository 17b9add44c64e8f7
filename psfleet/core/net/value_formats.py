"""Formats of values on the wire, one class each: float32, float16, bfloat16 and int8.

bfloat16 keeps the range of float32 and three decimal digits. int8 divides values into blocks: a row of a
sparse table, or 256 consecutive values of a dense array. A block has one scale, and each value is stored as
a multiple of it (a code from -127 to 127):

    scale of block 0 f32 | scale of block 1 ... | code of value 0 i8 | code of value 1 ...
    value = code * scale

docs/wire.md explains how rounding errors are treated. To add a format, add a class here, a number in
protos/psfleet/v1/frame.proto, and a choice in psfleet.core.base.settings.kinds.
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
from psfleet.core.engine.kernels import number_formats
from psfleet.core.engine.kernels.hashing import GOLDEN, hash_ids
from psfleet.core.engine.kernels.number_formats import (
    decode_int8,
    encode_int8,
    encode_int8_drawn,
    encode_int8_fed,
)
from psfleet.core.engine.runtime_interface import Precision
from psfleet.core.net.v1 import frame_pb2

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Draw = tuple[int, int, int]
"""Table key, worker seat and push number. int8's random rounding is a function of these three numbers."""

SCALE_BLOCK = 256
"""Number of values of a dense array that share a scale. Each server's slice begins at a multiple of this."""
# Narrowest row for int8. A narrower row, with its scale of 4 bytes, would need no fewer bytes than bfloat16.
_LEAST = 5
_NO_SCALES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class CompressedValues:
    """Compressed values in a buffer: first the scales of all blocks, then a code for each value.

    Attributes:
        shape: [n, dim] for rows, where each row is a block, or [n] for a dense array.
        scales: float32 [blocks]; empty if the format has no scales.
        codes: Flat array with a code for each value.
    """

    format: "WireFormat"
    shape: tuple[int, ...]
    scales: Floats
    codes: NDArray[Any]

    @staticmethod
    def over(
        buffer: NDArray[np.uint8], form: Precision | Format, shape: Sequence[int]
    ) -> "CompressedValues":
        """Return the compressed values that a buffer contains, or will contain, without copying it.

        Args:
            buffer: Memory that begins at a multiple of 4 bytes.
            shape: Shape of the values, [n, dim] or [n].
        """
        return FORMATS[form].over(buffer, tuple(shape))

    @staticmethod
    def size_of(form: Precision | Format, shape: Sequence[int]) -> int:
        """Return the number of bytes that values of this shape need."""
        return FORMATS[form].size(shape)

    def pack(self, values: Floats) -> None:
        """Compress values of this shape into the buffer, each to the nearest representable value.

        The array must be contiguous.
        """
        self.format.encode(values.reshape(-1), self)

    def unpack(self, out: Floats | None = None) -> Floats:
        """Return the decompressed values, as float32 of this shape. Writes them to `out` if it is given."""
        values = np.empty(self.shape, np.float32) if out is None else out
        self.format.decode(self, values.reshape(-1))
        return values


class WireFormat(ABC):
    """Format in which values are sent.

    Attributes:
        name: Name of the format in settings.
        number: Number of the format in messages.
        is_for_pulls: True if servers may send values in this format, False if it is for gradients only.
        has_elements: True if single elements of a dense gradient can be sent in this format, False if only
            whole blocks can be.
        is_finite: True if the format cannot represent infinities and NaN.
        has_feedback: True if the rounding error of a dense gradient can be added to the next gradient.
    """

    name: ClassVar[Precision | Format]
    number: ClassVar[frame_pb2.Precision]
    is_for_pulls: ClassVar[bool] = True
    has_elements: ClassVar[bool] = True
    is_finite: ClassVar[bool] = False
    has_feedback: ClassVar[bool] = False

    @abstractmethod
    def size(self, shape: Sequence[int]) -> int:
        """Return the number of bytes that values of this shape need."""

    @abstractmethod
    def over(self, buffer: NDArray[np.uint8], shape: tuple[int, ...]) -> CompressedValues:
        """Return the compressed values that a buffer contains, or will contain, without copying it."""

    @abstractmethod
    def encode(self, values: Floats, out: CompressedValues) -> None:
        """Compress values [n] into `out`, each to the nearest representable value."""

    @abstractmethod
    def decode(self, compressed: CompressedValues, values: Floats) -> None:
        """Write the decompressed values to `values` [n]."""

    def decode_gradient(self, compressed: CompressedValues, scale: float, table: str) -> Floats:
        """Return the values of a gradient as float32.

        Args:
            scale: Factor that the worker multiplied the values by. Only float16 uses one.
            table: Name of the table, for errors.

        Raises:
            FrameError: The factor, or a scale of a block, has a value that no worker sends.
        """
        del scale, table
        return compressed.unpack()

    def encode_rows(self, rows: Floats, ids: Ids, draw: Draw, out: CompressedValues) -> int | None:
        """Compress rows [n, dim] of a gradient into `out`.

        Returns:
            Index of the first row that the format cannot represent, or None if all rows were compressed.
        """
        del ids, draw
        out.pack(rows)
        return None

    def encode_part(
        self, values: Floats, low: int, draw: Draw, rests: Floats | None, out: CompressedValues
    ) -> None:
        """Compress a slice of a dense gradient into `out`.

        Args:
            values: float32 [n], finite if `is_finite`.
            low: Index of the slice's first element in the dense array, a multiple of SCALE_BLOCK.
            draw: Numbers that determine the random rounding.
            rests: Rounding errors of earlier pushes, float32 [n], which are added to the values and then
                replaced by the errors of this push. None to round at random instead.
        """
        del low, draw, rests
        out.pack(values)

    def for_width(self, width: int) -> Format:
        """Return the format to use when this format is requested for a table with rows of `width` values."""
        del width
        return cast(Format, self.name)


class Float32Format(WireFormat):
    """Uncompressed float32 values."""

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
    """IEEE 754 binary16. Used for gradients that the worker has multiplied by a scale to fit its range."""

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
    """Upper 16 bits of each float32: the same range with less precision."""

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
    """int8 multiples of a scale, one scale for each block of values.

    Gradients are rounded up or down at random, so that the average is right. The random numbers are a hash
    of table, worker, number of the push, id and position. So a push has the same bytes when it is sent
    again, even by another process.
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
        # Blocks are rounded by the same kernel as rows, with the number of the block as the id. The kernel
        # needs whole blocks, so a shorter last block is copied and padded with zeros.
        seed, whole = _rounding_seed(*draw), len(values) // SCALE_BLOCK
        block_numbers = low // SCALE_BLOCK + np.arange(len(out.scales), dtype=np.int64)
        end = whole * SCALE_BLOCK
        rows, scales, codes = values[:end].reshape(-1, SCALE_BLOCK), out.scales, out.codes
        encode_int8_drawn(rows, block_numbers[:whole], seed, scales[:whole], codes[:end])
        if end < len(values):
            last, last_codes = (
                np.zeros((1, SCALE_BLOCK), np.float32),
                np.empty(SCALE_BLOCK, np.int8),
            )
            last[0, : len(values) - end] = values[end:]
            encode_int8_drawn(last, block_numbers[whole:], seed, scales[whole:], last_codes)
            codes[end:] = last_codes[: len(values) - end]

    @override
    def for_width(self, width: int) -> Format:
        return "bfloat16" if width < _LEAST else "int8"


def _blocks(shape: Sequence[int]) -> int:
    """Return the number of blocks that values of this shape have. Each block has its own scale."""
    return shape[0] if len(shape) == 2 else -(-shape[0] // SCALE_BLOCK)


def _block(shape: Sequence[int]) -> int:
    return shape[1] if len(shape) == 2 else SCALE_BLOCK


def _rounding_seed(key: int, seat: int, number: int) -> np.uint64:
    word = (seat * GOLDEN + number) % 2**64
    seed: np.uint64 = hash_ids(np.array([word], np.uint64).view(np.int64))[0] ^ np.uint64(key)
    return seed


FORMATS: dict[Precision | Format, WireFormat] = {
    form.name: form for form in (Float32Format(), Bfloat16Format(), Float16Format(), Int8Format())
}
"""All formats by name."""
NUMBERED: dict[int, WireFormat] = {form.number: form for form in FORMATS.values()}
"""All formats by their number in messages."""
