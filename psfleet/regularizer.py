"""Weight decay that the servers add to the gradient, after the worker's clipping.

Pass one of these to an optimizer (`weight_decay=`) or to a single parameter, whose own decay then applies.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.validation.annotations import NonNegative, check, checked
from psfleet.core.engine.schema.table import DecaySpec

__all__ = [
    "L1Decay",
    "L1DecayRegularizer",
    "L2Decay",
    "L2DecayRegularizer",
    "WeightDecay",
    "as_decay",
    "as_regularizer",
]


Floats = NDArray[np.float32]


class WeightDecay:
    """Base of the regularizers.

    Attributes:
        coeff: Strength, at least 0. `regularization_coeff` is its older name.
    """

    @checked
    def __init__(
        self, coeff: NonNegative = 0.0, *, regularization_coeff: NonNegative | None = None
    ) -> None:
        self.coeff = float(coeff if regularization_coeff is None else regularization_coeff)

    @property
    def decay(self) -> DecaySpec:
        """The form in which a table carries it."""
        raise NotImplementedError

    def gradient(self, value: Floats) -> Floats:
        """Return the term that it adds to the gradient at these weights."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.coeff})"


class L1Decay(WeightDecay):
    """Adds coeff * sign(w) to the gradient."""

    @property
    def decay(self) -> DecaySpec:
        """The form in which a table carries it."""
        return DecaySpec(l1=self.coeff)

    def gradient(self, value: Floats) -> Floats:
        """coeff * sign(w)."""
        return np.float32(self.coeff) * np.sign(value)


class L2Decay(WeightDecay):
    """Adds coeff * w to the gradient: no factor 2 or 1/2."""

    @property
    def decay(self) -> DecaySpec:
        """The form in which a table carries it."""
        return DecaySpec(l2=self.coeff)

    def gradient(self, value: Floats) -> Floats:
        """coeff * w."""
        return np.float32(self.coeff) * value


def as_regularizer(value: Any, owner: str) -> WeightDecay | None:
    """A regularizer from what a script may give: one, a number (L2) or None."""
    if value is None or isinstance(value, WeightDecay):
        return value
    return L2Decay(check(owner, "weight_decay", value, NonNegative))


def as_decay(regularizer: WeightDecay | None) -> DecaySpec:
    """Return the decay that a table has for it."""
    return regularizer.decay if regularizer else DecaySpec()


L1DecayRegularizer = L1Decay
L2DecayRegularizer = L2Decay
