"""A loss or a gradient that is no finite number: noticed before it is pushed, and said once."""

import dataclasses
import math
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.kernels.generate import static_kernels
from psfleet.kernels.initial_values import address_of
from psfleet.observability.histograms import NormHistogram
from psfleet.platform.logs import log_of
from psfleet.runtime.interface import Gradient
from psfleet.settings.environment import on_nan

_log = log_of(__name__)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
_SHORT = 1024  # values whose squares are summed before a BLAS has begun
_LARGEST = float(np.finfo(np.float32).max)

NamedValues = tuple[str, Floats, Ids | None]
"""Name of a table, contiguous values, and whose rows or elements they are; None: those of the whole table."""


class SkippedGradients(Exception):
    """Signal that a step is to be pushed without its gradients; the code that lays out the push does so."""


class NonFiniteCheck:
    """Looks at what one worker pushes, as PSFLEET_ON_NAN says: say, stop, skip or ignore.

    Args:
        worker: Its index.

    Attributes:
        found: Steps in which something was not finite.
        first: The first of them in a sentence, and its time in seconds since the epoch; None: there is none.
        norms: By table the norms of its gradients, of finite steps that were looked at whole.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._policy = on_nan()
        self._looks = self._policy != "ignore"
        self.found = 0
        self.first: tuple[str, float] | None = None
        self._last = 0  # step of the last one
        self.norms: dict[str, NormHistogram] = {}
        self._step = 0
        self._squares: dict[str, float] = {}  # by table of the present step

    def look(
        self, step: int, loss: float | None, gradients: Iterable[NamedValues], is_step: bool = True
    ) -> None:
        """Look at one push, or a part of it.

        Args:
            step: Its number, from 1.
            loss: Loss of the step, if it is known.
            gradients: The gradients to push.
            is_step: It is a step by itself, not the sum of some that were looked at.

        Raises:
            UsageError: Something is not finite, and the policy is stop; the push must not be made.
            SkippedGradients: Likewise, and the policy is skip.
        """
        if not self._looks:
            return None
        if step != self._step:
            for name, square in self._squares.items():
                if (norms := self.norms.get(name)) is None:
                    norms = self.norms[name] = NormHistogram()
                if square < math.inf:
                    norms.counts[int(square * norms.UNIT).bit_length()] += 1
                    norms.total += square**0.5
                else:  # finite numbers whose squares overflow
                    norms.counts[-1] += 1
            self._step, self._squares = step, {}
        if loss is not None and not math.isfinite(loss):
            return self._tell(step, f"the loss is {loss}", is_step)
        for name, values, ids in gradients:
            if not self._is_finite(name, values):
                what = f"the gradient for table {name!r} {_first(values, ids)}"
                return self._tell(step, what, is_step)
        return None

    def _is_finite(self, name: str, values: Floats) -> bool:
        """Look in one pass, without memory of its own; and again where squares overflow."""
        square = _squares(values)
        self._squares[name] = self._squares.get(name, 0.0) + square
        return square < math.inf or bool(np.isfinite(values).all())

    def _tell(self, step: int, what: str, is_step: bool) -> None:
        sentence = f"worker {self._worker}, step {step}: {what}"
        is_first = self.first is None
        if is_first:
            self.first = sentence, time.time()
        if is_step and step != self._last:  # a push may come in parts
            self.found += 1
            self._last = step
        self._squares = {}
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


def _squares(values: Floats) -> float:
    """Return the sum of the squares; infinite or NaN if a value is, or if they overflow float32."""
    if values.size > _SHORT:
        flat = values.reshape(-1)
        return float(np.vdot(flat, flat))  # unlike `dot` it does not warn when it overflows
    total: float = static_kernels("squares").summed(address_of(values), values.size)
    return total if total <= _LARGEST else math.inf


def _first(values: Floats, ids: Ids | None) -> str:
    """Say `has nan for id 17` of rows, `has nan at element 17` of a dense gradient."""
    rows = values.reshape(len(values), -1)
    row, column = np.argwhere(~np.isfinite(rows))[0]
    if ids is not None and values.ndim > 1:
        return f"has {rows[row, column]} for id {ids[row]}"
    element = ids[row] if ids is not None else row * rows.shape[1] + column
    return f"has {rows[row, column]} at element {element}"


def without_values(gradient: Gradient) -> Gradient:
    """Return the gradient of the same table that changes nothing by itself: no rows, or no elements."""
    is_dense = gradient.ids is None or gradient.values.ndim == 1
    shape = (0,) if is_dense else (0, gradient.values.shape[1])
    return dataclasses.replace(
        gradient, values=np.zeros(shape, np.float32), ids=np.zeros(0, np.int64), bags=None
    )
