"""NonFiniteCheck: notices a loss or a gradient with NaN or infinity before it is pushed.

PSFLEET_ON_NAN says what happens then: `say` writes one line and pushes the values, `stop` raises an error,
`skip` pushes the step without its gradients, and `ignore` does not look.
"""

import math
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.environment import on_nan
from psfleet.core.engine.gradient_norm_histograms import GradientNormHistograms
from psfleet.core.engine.kernels.generate import static_kernels
from psfleet.core.engine.kernels.initial_values import address_of

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
NamedValues = tuple[str, Floats, Ids | None]
"""Name of a table, contiguous values, and their rows or elements, or None for those of the whole table."""

_log = log_of(__name__)
_SHORT = 1024  # values whose squares are summed before a BLAS has begun
_LARGEST = float(np.finfo(np.float32).max)


class SkippedGradients(Exception):
    """Signal that a step is to be pushed without its gradients; the code that lays out the push does so."""


class NonFiniteCheck:
    """Checks what one worker pushes.

    Args:
        worker: Rank of the worker.

    Attributes:
        found: Number of steps in which something was not finite.
        first: Sentence about the first such step, and its time in seconds since 1970, or None so far.
        norms: Norms of the gradients that were checked.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._policy = on_nan()
        self.found = 0
        self.first: tuple[str, float] | None = None
        self.norms = GradientNormHistograms()
        self._last_found = 0  # step

    def check_push(
        self, step: int, loss: float | None, gradients: Iterable[NamedValues], is_step: bool = True
    ) -> None:
        """Check one push, or a part of it.

        Args:
            step: Number of the step, from 1.
            loss: Loss of the step, or None if it is not known.
            gradients: The gradients to push.
            is_step: False for a sum of steps that were checked before.

        Raises:
            UsageError: Something is not finite, and the policy is stop; the push must not be made.
            SkippedGradients: Something is not finite, and the policy is skip.
        """
        if self._policy == "ignore":
            return None
        self.norms.begin_step(step)
        if loss is not None and not math.isfinite(loss):
            return self._report(step, f"the loss is {loss}", is_step)
        for table, values, ids in gradients:
            square = _sum_of_squares(values)
            self.norms.add_square(table, square)
            # The sum of squares needs one pass and no temporary array, and is finite only if every value is.
            # A second pass is needed only if it overflows.
            if not (square < math.inf or np.isfinite(values).all()):
                fault = f"the gradient for table {table!r} {_first_non_finite(values, ids)}"
                return self._report(step, fault, is_step)
        return None

    def _report(self, step: int, fault: str, is_step: bool) -> None:
        """Count a value that is not finite, and do what the policy says."""
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
    """Return the sum of the squares; infinite or NaN if a value is, or if they overflow float32."""
    if values.size > _SHORT:
        flat = values.reshape(-1)
        return float(np.vdot(flat, flat))  # unlike `dot` it does not warn when it overflows
    total: float = static_kernels("arrays", "summed").summed(address_of(values), values.size)
    return total if total <= _LARGEST else math.inf


def _first_non_finite(values: Floats, ids: Ids | None) -> str:
    """Return `has nan for id 17` of rows, `has nan at element 17` of a dense gradient."""
    rows = values.reshape(len(values), -1)
    row, column = np.argwhere(~np.isfinite(rows))[0]
    if ids is not None and values.ndim > 1:
        return f"has {rows[row, column]} for id {ids[row]}"
    element = ids[row] if ids is not None else row * rows.shape[1] + column
    return f"has {rows[row, column]} at element {element}"
