"""A loss or a gradient that is no finite number: noticed before it is pushed, and said once."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.platform.notices import say
from psfleet.settings.environment import on_nan

__all__ = ["NonFiniteCheck"]

Floats = NDArray[np.float32]


class NonFiniteCheck:
    """Looks at what one worker pushes, as PSFLEET_ON_NAN says: say, stop or ignore.

    After the first word it looks no more: NaN goes from the weights into everything.

    Args:
        worker: Its index.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._policy = on_nan()
        self._looks = self._policy != "ignore"

    def look(self, step: int, loss: float | None, gradients: Iterable[tuple[str, Floats]]) -> None:
        """Look at one push.

        Args:
            step: Its number, from 1.
            loss: Of the step, if it is known.
            gradients: Names of tables, and contiguous values.

        Raises:
            UsageError: Something is not finite, and the policy is stop; the push must not be made.
        """
        if not self._looks:
            return
        found = _first(loss, gradients)
        if not found:
            return
        sentence = f"worker {self._worker}, step {step}: {found}"
        if self._policy == "stop":
            raise UsageError(f"{sentence}; it was not pushed (PSFLEET_ON_NAN is stop)")
        self._looks = False
        say(
            f"psfleet: {sentence}, and is pushed as it is; look at the data and the learning rate, or "
            "clip (PSFLEET_ON_NAN=stop ends the script there, ignore leaves this line out)"
        )


def _first(loss: float | None, gradients: Iterable[tuple[str, Floats]]) -> str:
    """What is not finite; empty: nothing."""
    if loss is not None and not math.isfinite(loss):
        return f"the loss is {loss}"
    for name, values in gradients:
        if not _is_finite(values):
            bad = values[~np.isfinite(values)]
            return f"the gradient for table {name!r} has {bad[0]}"
    return ""


def _is_finite(values: Floats) -> bool:
    """One pass, without memory of its own; squares that overflow are looked at again."""
    flat = values.reshape(-1)
    with np.errstate(all="ignore"):
        return math.isfinite(np.dot(flat, flat)) or bool(np.isfinite(flat).all())
