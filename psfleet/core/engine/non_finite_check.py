"""NonFiniteCheck: finds NaN or infinity in a loss or a gradient before the worker pushes it.

The setting PSFLEET_ON_NAN decides what happens then: `say` logs one line and pushes the values, `stop` raises
an error, `skip` pushes the step without its gradients, and `ignore` does not check.
"""

import math
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.environment import on_nan
from psfleet.core.engine.device_arrays import DeviceSums
from psfleet.core.engine.gradient_norm_histograms import GradientNormHistograms
from psfleet.core.engine.kernels.dedup import BagSums
from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
NamedValues = tuple[str, Floats, Ids | None]
"""Name of a table, contiguous values, and ids or positions of the values, or None for a whole dense table."""

_log = log_of(__name__)
_SHORT = 1024  # up to this many values, a kernel is faster than calling BLAS
_LARGEST = float(np.finfo(np.float32).max)


class SkippedGradients(Exception):
    """Exception that tells the caller to push a step without its gradients."""


class NonFiniteCheck:
    """Checks the losses and gradients that one worker pushes.

    Attributes:
        found: Number of steps in which a value was not finite.
        first: Sentence about the first such step, and its time in seconds since 1970, or None so far.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._policy = on_nan()
        self.found = 0
        self.first: tuple[str, float] | None = None
        self.norms = GradientNormHistograms()
        self._last_found = 0  # last step that was counted

    def check_push(
        self, step: int, loss: float | None, gradients: Iterable[NamedValues], is_step: bool = True
    ) -> None:
        """Check one push, or a part of it, for values that are not finite.

        Args:
            step: Number of the step, from 1.
            loss: Loss of the step, or None if it is not known.
            is_step: False for a sum of gradients of steps that were checked before.

        Raises:
            UsageError: A value is not finite, and the setting is `stop`; the push must not be made.
            SkippedGradients: A value is not finite, and the setting is `skip`.
        """
        if self._policy == "ignore":
            return None
        self.norms.begin_step(step)
        if loss is not None and not math.isfinite(loss):
            return self._report(step, f"the loss is {loss}", is_step)
        for table, values, ids in gradients:
            if isinstance(values, BagSums | DeviceSums):
                # The sums are not read here, where this is not needed. `add_norms` has their squares.
                if values.are_surely_finite:
                    continue
                values = np.asarray(values)
            square = _sum_of_squares(values)
            self.norms.add_square(table, square)
            # The sum of squares needs one pass and no temporary array, and is finite only if every value is
            # finite. A second pass is needed only if the sum overflows.
            if not (square < math.inf or np.isfinite(values).all()):
                fault = f"the gradient for table {table!r} {_first_non_finite(values, ids)}"
                return self._report(step, fault, is_step)
        return None

    def add_norms(self, gradients: Iterable[tuple[str, Floats]]) -> None:
        """Add the norms of sums that the tables have made while they applied a push that was checked."""
        if self._policy != "ignore":
            for table, values in gradients:
                if isinstance(values, BagSums | DeviceSums) and values.are_surely_finite:
                    self.norms.add_square(table, values.square)

    def _report(self, step: int, fault: str, is_step: bool) -> None:
        """Count a step with a value that is not finite, and act as PSFLEET_ON_NAN says."""
        sentence = f"worker {self._worker}, step {step}: {fault}"
        is_first = self.first is None
        if is_first:
            self.first = sentence, time.time()
        if is_step and step != self._last_found:  # a push may come in parts
            self.found += 1
            self._last_found = step
        self.norms.drop_step()
        if self._policy == "stop":
            raise UsageError(f"{sentence}; it was not pushed (PSFLEET_ON_NAN is stop)")
        if self._policy == "skip":
            if is_first:
                _log.warning(
                    f"psfleet: {sentence}; the gradients of this step are left out, and so are those of "
                    "later ones like it (PSFLEET_ON_NAN is skip)"
                )
            raise SkippedGradients
        if is_first:
            _log.warning(
                f"psfleet: {sentence}, and is pushed as it is; look at the data and the learning rate, or "
                "clip (PSFLEET_ON_NAN=stop ends the script there, skip leaves such steps out, ignore "
                "leaves this line out)"
            )


def _sum_of_squares(values: Floats) -> float:
    """Return the sum of the squares. It is infinite or NaN if a value is, or if the sum overflows float32."""
    if values.size > _SHORT:
        flat = values.reshape(-1)
        return float(np.vdot(flat, flat))  # unlike `dot` it does not warn when it overflows
    total: float = static_kernels("arrays", "summed").summed(address_of(values), values.size)
    return total if total <= _LARGEST else math.inf


def _first_non_finite(values: Floats, ids: Ids | None) -> str:
    """Return words such as `has nan for id 17` for rows, or `has nan at element 17` for a dense gradient."""
    rows = values.reshape(len(values), -1)
    row, column = np.argwhere(~np.isfinite(rows))[0]
    if ids is not None and values.ndim > 1:
        return f"has {rows[row, column]} for id {ids[row]}"
    element = ids[row] if ids is not None else row * rows.shape[1] + column
    return f"has {rows[row, column]} at element {element}"
