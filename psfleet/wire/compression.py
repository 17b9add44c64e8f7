"""Values that travel in fewer bytes than float32, as a strategy's `wire` says.

bfloat16 keeps the range and three digits. int8 keeps a step of 1/127 of the largest value of a row, or
of 256 neighbouring values of a dense array; docs/wire.md says what becomes of the rest.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels import int8
from psfleet.kernels.float16 import shorten, widen
from psfleet.kernels.hashing import GOLDEN, hash_ids
from psfleet.runtime.interface import Format, Gradient
from psfleet.schema.table import TableSpec

__all__ = ["BLOCK", "CompressedValues", "GradientCompressor", "pack", "repacked", "value_format"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

BLOCK = 256
"""Values of a dense array that share a scale; parts of servers begin on multiples of it."""

_LEAST = 5  # values of a row: with its scale, a shorter one is no shorter in 8 bits than in 16


@dataclass(frozen=True, slots=True)
class CompressedValues:
    """Values in a buffer: first the scales of all blocks (int8), then a code for each value.

    Attributes:
        format: bfloat16 or int8.
        shape: [n, dim] of rows, each of which is a block; or [n] of a dense array.
        scales: float32 [blocks]; none under bfloat16.
        codes: uint16 or int8, one for each value.
    """

    format: Format
    shape: tuple[int, ...]
    scales: Floats
    codes: NDArray[Any]

    @classmethod
    def over(
        cls, buffer: NDArray[np.uint8], form: Format, shape: Sequence[int]
    ) -> "CompressedValues":
        """What the buffer holds, or is to hold. It begins on a multiple of 4."""
        size = math.prod(shape)
        if form == "bfloat16":
            return cls(form, tuple(shape), _NO_SCALES, buffer[: 2 * size].view(np.uint16))
        start = 4 * blocks_of(shape)
        codes = buffer[start : start + size].view(np.int8)
        return cls(form, tuple(shape), buffer[:start].view(np.float32), codes)

    @staticmethod
    def size_of(form: Format, shape: Sequence[int]) -> int:
        """Bytes that values of this shape take."""
        values = math.prod(shape)
        if form == "float32":
            return 4 * values
        return 2 * values if form == "bfloat16" else 4 * blocks_of(shape) + values

    def unpack(self, out: Floats | None = None) -> Floats:
        """The values, float32 of the shape; written to `out` [*shape] if it is given."""
        values = np.empty(self.shape, np.float32) if out is None else out
        if self.format == "bfloat16":
            widen(self.codes, values.reshape(-1))
        else:
            int8.decode(self.codes, self.scales, _block(self.shape), values.reshape(-1))
        return values


_NO_SCALES = np.zeros(0, np.float32)


def blocks_of(shape: Sequence[int]) -> int:
    """How many scales values of this shape have."""
    return shape[0] if len(shape) == 2 else -(-shape[0] // BLOCK)


def _block(shape: Sequence[int]) -> int:
    return shape[1] if len(shape) == 2 else BLOCK


def value_format(spec: TableSpec, wanted: Format) -> Format:
    """How values of the table travel where `wanted` is asked for."""
    if wanted == "float32":
        return wanted
    width = spec.dim if spec.kind == "sparse" else spec.size
    return "bfloat16" if wanted == "int8" and width < _LEAST else wanted


def _gradient_format(spec: TableSpec, wanted: Format) -> Format:
    """How gradients of the table travel where `wanted` is asked for; what is counted is exact."""
    counted = spec.rule.counts or (spec.kind == "sparse" and spec.pushed_scores)
    return "float32" if counted else value_format(spec, wanted)


def pack(values: Floats, packed: CompressedValues) -> None:
    """Write values, contiguous and of its shape, to `packed`: each as the nearest that it can hold."""
    flat = values.reshape(-1)
    if packed.format == "bfloat16":
        shorten(flat, packed.codes)
    else:
        int8.encode(flat, _block(packed.shape), packed.scales, packed.codes)


def repacked(values: Floats, form: Format) -> Floats:
    """What arrives of values, contiguous, that travel in this form."""
    packed = _packed(form, values.shape)
    pack(values, packed)
    return packed.unpack()


def _packed(form: Format, shape: Sequence[int]) -> CompressedValues:
    return CompressedValues.over(
        np.empty(CompressedValues.size_of(form, shape), np.uint8), form, shape
    )


class GradientCompressor:
    """What one worker's gradients become on their way.

    bfloat16: the nearest. int8: drawn by a hash of table, worker, number of the push, id and place, so that
    a push has the same bytes wherever and whenever it is packed. With `feeds` what a push leaves out
    of a dense array is kept here instead, and added to the next one.

    Args:
        seat: Of the worker.
        wanted: The form that its strategy says.

    Attributes:
        feeds: See above. Not in sync mode, whose bits must not depend on what a worker remembers.
        saved: Bytes by which what was packed would have been longer in float32.
    """

    def __init__(self, seat: int, wanted: Format, feeds: bool = False) -> None:
        self._seat = seat
        self._wanted = wanted
        self.feeds = feeds
        self.saved = 0
        self._rests: dict[int, Floats] = {}

    def form_of(self, spec: TableSpec, gradient: Gradient) -> Format:
        """How this gradient is packed; float32: not at all. What says its own precision keeps that."""
        if self._wanted == "float32":
            return "float32"
        plain = gradient.precision == "float32"
        by_elements = spec.kind == "dense" and gradient.ids is not None
        return _gradient_format(spec, self._wanted) if plain and not by_elements else "float32"

    def sent(self, number: int, gradients: Sequence[tuple[TableSpec, Gradient]]) -> list[Gradient]:
        """What arrives of the worker's push `number` at a server that holds all of it.

        Args:
            number: Of the push.
            gradients: Flat, with distinct ids.

        Raises:
            UsageError: One cannot travel in the form that is wanted; the packer is as before.
        """
        forms = [self.form_of(spec, gradient) for spec, gradient in gradients]
        for (spec, gradient), form in zip(gradients, forms, strict=True):
            if form == "int8":
                self.check(spec, gradient.values)
        return [
            dataclasses.replace(
                gradient,
                values=self._arrived(spec, number, gradient, form),
                precision="float32",
                scale=1.0,
            )
            for (spec, gradient), form in zip(gradients, forms, strict=True)
        ]

    def _arrived(self, spec: TableSpec, number: int, gradient: Gradient, form: Format) -> Floats:
        values = gradient.values
        if form == "float32":
            return values
        packed = _packed(form, values.shape)
        if gradient.ids is None:
            self.part(spec, number, 0, values, packed)
        else:
            self.rows(spec, number, gradient.ids, values, packed)
        return packed.unpack()

    def check(self, spec: TableSpec, values: Floats) -> None:
        """Refuse a gradient that int8 cannot bring: one with an infinity or NaN.

        Raises:
            UsageError: It has one. Nothing has been packed.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(values.sum()):
                return
        bad = values[~np.isfinite(values)]
        if bad.size:
            raise _not_finite(spec, float(bad[0]))

    def rows(
        self, spec: TableSpec, number: int, ids: Ids, rows: Floats, packed: CompressedValues
    ) -> None:
        """Pack rows [n, dim], whose ids are distinct, of the worker's push `number`.

        Raises:
            UsageError: A row has an infinity or NaN: gradients that are finite may have such a sum.
        """
        self.saved += rows.nbytes - packed.codes.nbytes - packed.scales.nbytes
        if packed.format == "bfloat16":
            pack(rows, packed)
            return
        salt = _salt(spec.key, self._seat, number)
        bad = int8.encode_drawn(rows, ids, salt, packed.scales, packed.codes)
        if bad is not None:
            raise _not_finite(spec, float(rows[bad][~np.isfinite(rows[bad])][0]))

    def part(
        self, spec: TableSpec, number: int, low: int, values: Floats, packed: CompressedValues
    ) -> None:
        """Pack values [n] of a dense gradient from position `low` of the flattened array on.

        Args:
            spec: Its table.
            number: Of the push.
            low: A multiple of BLOCK.
            values: Finite, see `check`.
            packed: Is written.
        """
        self.saved += values.nbytes - packed.codes.nbytes - packed.scales.nbytes
        if packed.format == "bfloat16":
            pack(values, packed)
        elif self.feeds:
            self._feed(spec, low, values, packed)
        else:
            self._draw(spec, number, low, values, packed)

    def _draw(
        self, spec: TableSpec, number: int, low: int, values: Floats, packed: CompressedValues
    ) -> None:
        """Blocks are drawn as rows are; the last one is filled up with zeros for that."""
        salt, whole = _salt(spec.key, self._seat, number), len(values) // BLOCK
        places = low // BLOCK + np.arange(len(packed.scales), dtype=np.int64)
        end = whole * BLOCK
        rows, scales, codes = values[:end].reshape(-1, BLOCK), packed.scales, packed.codes
        int8.encode_drawn(rows, places[:whole], salt, scales[:whole], codes[:end])
        if end < len(values):
            last, drawn = np.zeros((1, BLOCK), np.float32), np.empty(BLOCK, np.int8)
            last[0, : len(values) - end] = values[end:]
            int8.encode_drawn(last, places[whole:], salt, scales[whole:], drawn)
            codes[end:] = drawn[: len(values) - end]

    def _feed(self, spec: TableSpec, low: int, values: Floats, packed: CompressedValues) -> None:
        rests = self._rests.get(spec.key)
        if rests is None:
            rests = self._rests[spec.key] = np.zeros(spec.size, np.float32)
        mine = rests[low : low + len(values)]
        int8.encode_fed(values, mine, BLOCK, packed.scales, packed.codes)

    def forget(self) -> None:
        """Drop what is kept: the tables were set to something else."""
        self._rests.clear()


def _salt(key: int, seat: int, number: int) -> np.uint64:
    said = (seat * GOLDEN + number) % 2**64
    salt: np.uint64 = hash_ids(np.array([said], np.uint64).view(np.int64))[0] ^ np.uint64(key)
    return salt


def _not_finite(spec: TableSpec, value: float) -> UsageError:
    return UsageError(
        f"table {spec.name!r}: the gradient has the value {value}, which cannot travel as int8; "
        "skip such steps, or use wire bf16"
    )
