"""Compression of gradients and values, as a strategy's `wire` says."""

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
    """Return the format of the table's values where `form` is asked for."""
    return FORMATS[form].for_width(spec.dim if spec.kind == "sparse" else spec.size)


def _gradient_format(spec: TableSpec, form: Format) -> Format:
    """Return the format of the table's gradients where `form` is asked for; counts are exact."""
    counts = spec.rule.counts or (spec.kind == "sparse" and spec.pushed_scores)
    return "float32" if counts else value_format(spec, form)


def repacked(values: Floats, form: Format) -> Floats:
    """Return the values as they arrive after they were sent in this form, contiguous."""
    compressed = _packed(form, values.shape)
    compressed.pack(values)
    return compressed.unpack()


def _packed(form: Format, shape: Sequence[int]) -> CompressedValues:
    return CompressedValues.over(
        np.empty(CompressedValues.size_of(form, shape), np.uint8), form, shape
    )


class GradientCompressor:
    """Compressor of one worker's gradients.

    bfloat16: the nearest. int8: drawn by a hash of table, worker, number of the push, id and place, so that
    a push has the same bytes wherever and whenever it is packed. With `feeds` what a push leaves out
    of a dense array is kept here instead, and added to the next one.

    Args:
        seat: Seat of the worker.
        form: The form that its strategy says.

    Attributes:
        feeds: See above. Not in sync mode, whose bits must not depend on what a worker remembers.
        saved: Bytes by which what was packed would have been longer in float32.
    """

    def __init__(self, seat: int, form: Format, feeds: bool = False) -> None:
        self._seat = seat
        self._form = form
        self.feeds = feeds
        self.saved = 0
        self._rests: dict[int, Floats] = {}

    def form_of(self, spec: TableSpec, gradient: Gradient) -> Format:
        """Return the gradient's format; float32: uncompressed.

        A gradient with a precision of its own keeps it.
        """
        if self._form == "float32":
            return "float32"
        plain = gradient.precision == "float32"
        by_elements = spec.kind == "dense" and gradient.ids is not None
        return _gradient_format(spec, self._form) if plain and not by_elements else "float32"

    def sent(self, number: int, gradients: Sequence[tuple[TableSpec, Gradient]]) -> list[Gradient]:
        """Return push `number` of the worker as a server that holds all of it receives it.

        Args:
            number: Number of the push.
            gradients: Flat, with distinct ids.

        Raises:
            UsageError: One cannot travel in the form that is wanted; the compressor is as before.
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
        self, spec: TableSpec, number: int, ids: Ids, rows: Floats, out: CompressedValues
    ) -> None:
        """Pack rows [n, dim], whose ids are distinct, of the worker's push `number`.

        Raises:
            UsageError: A row has an infinity or NaN: gradients that are finite may have such a sum.
        """
        self.saved += rows.nbytes - out.codes.nbytes - out.scales.nbytes
        draw = (spec.key, self._seat, number)
        bad = out.format.encode_rows(rows, ids, draw, out)
        if bad is not None:
            raise _not_finite(spec, float(rows[bad][~np.isfinite(rows[bad])][0]))

    def part(
        self, spec: TableSpec, number: int, low: int, values: Floats, out: CompressedValues
    ) -> None:
        """Pack values [n] of a dense gradient from position `low` of the flattened array on.

        Args:
            spec: Its table.
            number: Number of the push.
            low: A multiple of SCALE_BLOCK.
            values: Finite, see `check`.
            out: Is written.
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
        """Drop what is kept: the tables were set to something else."""
        self._rests.clear()


def _not_finite(spec: TableSpec, value: float) -> UsageError:
    return UsageError(
        f"table {spec.name!r}: the gradient has the value {value}, which cannot travel as int8; "
        "skip such steps, or use wire bf16"
    )
