"""GradientNormHistograms: distribution of each table's gradient norms, for the dashboard and for alerts.

`NonFiniteCheck` squares every gradient that a worker pushes, to see whether all numbers are finite. The norms
come from the same sums of squares, so that gradients are read only once. With PSFLEET_ON_NAN=ignore nothing
is squared, and there are no norms.
"""

import math

from psfleet.core.base.observability.exposition import NormHistogram


class GradientNormHistograms:
    """Norms of one worker's gradients by table. The gradient of a step may come in several parts.

    Attributes:
        tables: Histogram of each table, over the steps that are complete and finite.
    """

    def __init__(self) -> None:
        self.tables: dict[str, NormHistogram] = {}
        self._step = 0
        self._squares: dict[str, float] = {}  # sums of squares of the present step, by table

    def begin_step(self, step: int) -> None:
        """Add the norms of the step before to the histograms, if `step` is a new step."""
        if step == self._step:
            return
        for table, square in self._squares.items():
            if (norms := self.tables.get(table)) is None:
                norms = self.tables[table] = NormHistogram()
            if square < math.inf:
                norms.counts[int(square * norms.UNIT).bit_length()] += 1
                norms.total += square**0.5
            else:  # finite numbers whose squares overflow
                norms.counts[-1] += 1
        self._step, self._squares = step, {}

    def add_square(self, table: str, square: float) -> None:
        """Add the sum of squares of a gradient, or of a part of it, to the present step."""
        self._squares[table] = self._squares.get(table, 0.0) + square

    def drop_step(self) -> None:
        """Leave the present step out of the histograms, because a value was not finite."""
        self._squares = {}
