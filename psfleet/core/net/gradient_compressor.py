"""Compresses the gradients of a worker before they are sent, in the format of the `wire` setting.

For each gradient it chooses the format, checks that the format can represent the values, and compresses
them. Rounding errors of dense gradients may be kept and added to the next gradient (error feedback).
value_formats.py has the formats. The worker compresses while it writes a push. An embedded runtime calls
`sent`, so that training in one process gives the same numbers as with servers. A compressor may be used by
only one thread at a time.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.value_formats import FORMATS, CompressedValues

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def value_format(spec: TableSpec, form: Format) -> Format:
    """Return the format for the table's values if `form` is requested. Narrow rows use bfloat16, not int8."""
    return FORMATS[form].for_width(spec.dim if spec.kind == "sparse" else spec.size)


def _gradient_format(spec: TableSpec, form: Format) -> Format:
    """Return the format for the table's gradients if `form` is requested. Counts stay float32."""
    counts = spec.rule.counts or (spec.kind == "sparse" and spec.pushed_scores)
    return "float32" if counts else value_format(spec, form)


def repacked(values: Floats, form: Format) -> Floats:
    """Return the values as a receiver would see them after they were sent in this format, as a new array."""
    compressed = _packed(form, values.shape)
    compressed.pack(values)
    return compressed.unpack()


def _packed(form: Format, shape: Sequence[int]) -> CompressedValues:
    return CompressedValues.over(
        np.empty(CompressedValues.size_of(form, shape), np.uint8), form, shape
    )


class GradientCompressor:
    """Compressor for the gradients of one worker.

    bfloat16 rounds to the nearest value. int8 rounds up or down at random. The random numbers are a hash of
    table, worker, number of the push, id and column, so a push that is sent again has the same bytes. With
    `feeds`, int8 does not round dense gradients at random, but keeps each rounding error and adds it to the
    next gradient.

    Args:
        seat: Seat of the worker (its rank).
        form: Format that the worker's strategy requests.

    Attributes:
        feeds: True to keep rounding errors of dense gradients. False in sync mode, whose results must not
            depend on the memory of one worker.
        saved: Bytes saved so far, compared with float32.
    """

    def __init__(self, seat: int, form: Format, feeds: bool = False) -> None:
        self._seat = seat
        self._form = form
        self.feeds = feeds
        self.saved = 0
        self._rests: dict[int, Floats] = {}

    def form_of(self, spec: TableSpec, gradient: Gradient) -> Format:
        """Return the format in which a gradient is sent; "float32" means uncompressed.

        Only gradients that were computed in float32 are compressed, except for single elements of a dense
        gradient.
        """
        if self._form == "float32":
            return "float32"
        plain = gradient.precision == "float32"
        by_elements = spec.kind == "dense" and gradient.ids is not None
        return _gradient_format(spec, self._form) if plain and not by_elements else "float32"

    def sent(self, number: int, gradients: Sequence[tuple[TableSpec, Gradient]]) -> list[Gradient]:
        """Compress and decompress a push, so that its gradients are as a server would receive them.

        Args:
            gradients: Each gradient with its table. The values are flat arrays; ids of sparse gradients are
                distinct.

        Raises:
            UsageError: A format cannot represent one of the gradients. The compressor is then unchanged.
        """
        forms = [self.form_of(spec, gradient) for spec, gradient in gradients]
        for (spec, gradient), form in zip(gradients, forms, strict=True):
            if FORMATS[form].is_finite:
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
        compressed = _packed(form, values.shape)
        if gradient.ids is None:
            self.part(spec, number, 0, values, compressed)
        else:
            self.rows(spec, number, gradient.ids, values, compressed)
        return compressed.unpack()

    def check(self, spec: TableSpec, values: Floats) -> None:
        """Check that a gradient has no infinity or NaN, which int8 cannot represent.

        Raises:
            UsageError: The gradient has one. Nothing has been compressed.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            # One sum is faster than testing each value. It may overflow although all values are finite, so
            # a bad sum only starts the exact test.
            if np.isfinite(values.sum()):
                return
        bad = values[~np.isfinite(values)]
        if bad.size:
            raise _not_finite(spec, float(bad[0]))

    def rows(
        self, spec: TableSpec, number: int, ids: Ids, rows: Floats, out: CompressedValues
    ) -> None:
        """Compress rows of the gradient of a sparse table.

        Args:
            ids: Distinct ids of the rows.
            rows: float32 [n, dim].

        Raises:
            UsageError: A row has an infinity or NaN. This can happen even after `check`, if gradients of
                one id were added up in between.
        """
        self.saved += rows.nbytes - out.codes.nbytes - out.scales.nbytes
        draw = (spec.key, self._seat, number)
        bad = out.format.encode_rows(rows, ids, draw, out)
        if bad is not None:
            raise _not_finite(spec, float(rows[bad][~np.isfinite(rows[bad])][0]))

    def part(
        self, spec: TableSpec, number: int, low: int, values: Floats, out: CompressedValues
    ) -> None:
        """Compress the slice of a dense gradient that belongs to one server.

        Args:
            low: Index of the slice's first element in the flattened array, a multiple of SCALE_BLOCK.
            values: float32 [n], finite if the format requires it (see `check`).
        """
        self.saved += values.nbytes - out.codes.nbytes - out.scales.nbytes
        has_rests = self.feeds and out.format.has_feedback
        rests = self._rest(spec, low, len(values)) if has_rests else None
        out.format.encode_part(values, low, (spec.key, self._seat, number), rests, out)

    def _rest(self, spec: TableSpec, low: int, count: int) -> Floats:
        rests = self._rests.get(spec.key)
        if rests is None:
            rests = self._rests[spec.key] = np.zeros(spec.size, np.float32)
        return rests[low : low + count]

    def forget(self) -> None:
        """Drop the kept rounding errors. Call this when the tables are set to other values."""
        self._rests.clear()


def _not_finite(spec: TableSpec, value: float) -> UsageError:
    return UsageError(
        f"table {spec.name!r}: the gradient has the value {value}, which cannot travel as int8; "
        "skip such steps, or use wire bf16"
    )
