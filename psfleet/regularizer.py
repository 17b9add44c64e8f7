"""Weight decay, which the servers add to the gradients.

    from psfleet.optimizer import Adam
    from psfleet.regularizer import L2Decay

    optimizer = Adam(0.001, weight_decay=L2Decay(1e-5))

Workers clip their gradients before they send them, so weight decay is not clipped.
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
        coeff: Factor of the decay, at least 0. `regularization_coeff` is an older name of the argument.
    """

    @checked
    def __init__(
        self, coeff: NonNegative = 0.0, *, regularization_coeff: NonNegative | None = None
    ) -> None:
        self.coeff = float(coeff if regularization_coeff is None else regularization_coeff)

    @property
    def decay(self) -> DecaySpec:
        """This decay as the setting of a table."""
        raise NotImplementedError

    def gradient(self, value: Floats) -> Floats:
        """Return the array that this decay adds to the gradient, given the weights."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.coeff})"


class L1Decay(WeightDecay):
    """Adds coeff * sign(w) to the gradient."""

    @property
    def decay(self) -> DecaySpec:
        return DecaySpec(l1=self.coeff)

    def gradient(self, value: Floats) -> Floats:
        return np.float32(self.coeff) * np.sign(value)


class L2Decay(WeightDecay):
    """Adds coeff * w to the gradient, without a factor 2 or 1/2."""

    @property
    def decay(self) -> DecaySpec:
        return DecaySpec(l2=self.coeff)

    def gradient(self, value: Floats) -> Floats:
        return np.float32(self.coeff) * value


def as_regularizer(value: Any, owner: str) -> WeightDecay | None:
    """Return a regularizer from a script's argument: a regularizer, a number for L2Decay, or None.

    Args:
        value: Argument of the script.
        owner: Name of the optimizer or parameter, for messages.

    Raises:
        ConfigError: The value is something else, or a negative number.
    """
    if value is None or isinstance(value, WeightDecay):
        return value
    return L2Decay(check(owner, "weight_decay", value, NonNegative))


def as_decay(regularizer: WeightDecay | None) -> DecaySpec:
    """Return a regularizer as the setting of a table. None gives a setting without decay."""
    return regularizer.decay if regularizer else DecaySpec()


L1DecayRegularizer = L1Decay
L2DecayRegularizer = L2Decay
