"""Compresses the gradients of a worker for the wire, as the `wire` setting of its strategy says.

It chooses a format for each gradient, checks that the values can travel in it, and keeps the error feedback
of dense gradients. value_formats.py has the formats themselves. Used by the worker while it writes a push,
and by an embedded runtime (`sent`) so that training in one process gives the same numbers as with servers.
One thread at a time may use a compressor.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.value_formats import FORMATS, CompressedValues

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def value_format(spec: TableSpec, form: Format) -> Format:
    """Return the format of the table's values if `form` is requested: narrow rows do not use int8."""
    return FORMATS[form].for_width(spec.dim if spec.kind == "sparse" else spec.size)


def _gradient_format(spec: TableSpec, form: Format) -> Format:
    """Return the format of the table's gradients if `form` is requested. Counts must stay exact."""
    counts = spec.rule.counts or (spec.kind == "sparse" and spec.pushed_scores)
    return "float32" if counts else value_format(spec, form)


def repacked(values: Floats, form: Format) -> Floats:
    """Return the values as a receiver would see them after they were sent in this format; contiguous."""
    compressed = _packed(form, values.shape)
    compressed.pack(values)
    return compressed.unpack()


def _packed(form: Format, shape: Sequence[int]) -> CompressedValues:
    return CompressedValues.over(
        np.empty(CompressedValues.size_of(form, shape), np.uint8), form, shape
    )


class GradientCompressor:
    """Compressor of one worker's gradients.

    bfloat16 rounds to the nearest value. int8 rounds up or down at random, where the random numbers are a
    hash of table, worker, number of the push, id and position: a push that is sent again has the same
    bytes. With `feeds`, int8 instead keeps the rounding error of dense gradients and adds it to the next
    one.

    Args:
        seat: Seat of the worker.
        form: Format that the worker's strategy requests.

    Attributes:
        feeds: True to keep rounding errors of dense gradients. Not in sync mode, whose results must not
            depend on what one worker remembers.
        saved: Bytes saved so far, compared with float32.
    """

    def __init__(self, seat: int, form: Format, feeds: bool = False) -> None:
        self._seat = seat
        self._form = form
        self.feeds = feeds
        self.saved = 0
        self._rests: dict[int, Floats] = {}

    def form_of(self, spec: TableSpec, gradient: Gradient) -> Format:
        """Return the format to send a gradient in; "float32" means uncompressed.

        A gradient that already has a precision of its own keeps it.
        """
        if self._form == "float32":
            return "float32"
        plain = gradient.precision == "float32"
        by_elements = spec.kind == "dense" and gradient.ids is not None
        return _gradient_format(spec, self._form) if plain and not by_elements else "float32"

    def sent(self, number: int, gradients: Sequence[tuple[TableSpec, Gradient]]) -> list[Gradient]:
        """Return a push as a server would receive it, for runs without servers.

        Args:
            number: Number of the push.
            gradients: Gradients as flat arrays; sparse ones with distinct ids.

        Raises:
            UsageError: A gradient cannot travel in its format. The compressor is unchanged.
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
        """Raise an error if a gradient has an infinity or NaN, which int8 cannot represent.

        Raises:
            UsageError: It has one. Nothing has been packed.
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
        """Compress rows of a push.

        Args:
            spec: Definition of the table.
            number: Number of the push.
            ids: Ids of the rows, distinct.
            rows: float32 [n, dim].
            out: Receives the compressed rows.

        Raises:
            UsageError: A row has an infinity or NaN. This can happen after `check`, if gradients of one id
                were summed.
        """
        self.saved += rows.nbytes - out.codes.nbytes - out.scales.nbytes
        draw = (spec.key, self._seat, number)
        bad = out.format.encode_rows(rows, ids, draw, out)
        if bad is not None:
            raise _not_finite(spec, float(rows[bad][~np.isfinite(rows[bad])][0]))

    def part(
        self, spec: TableSpec, number: int, low: int, values: Floats, out: CompressedValues
    ) -> None:
        """Compress one server's part of a dense gradient.

        Args:
            spec: Definition of the table.
            number: Number of the push.
            low: Position of the part in the flattened array, a multiple of SCALE_BLOCK.
            values: float32 [n], finite if the format requires it (see `check`).
            out: Receives the compressed values.
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
        """Drop the kept rounding errors, because the tables were set to other values."""
        self._rests.clear()


def _not_finite(spec: TableSpec, value: float) -> UsageError:
    return UsageError(
        f"table {spec.name!r}: the gradient has the value {value}, which cannot travel as int8; "
        "skip such steps, or use wire bf16"
    )
