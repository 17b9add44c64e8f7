"""The gradient of pooled rows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.bags import spread_parts
from psfleet.parameters.parameter import SparseGrad
from psfleet.runtime.pooled_ids import PooledIds, joined_ids

__all__ = ["PooledGradient", "joined_gradients"]

Floats = NDArray[np.float32]


class PooledGradient(SparseGrad):
    """The gradient of what was pooled of rows; the rows' own ones are made when they are asked for.

    Args:
        of: The ids and their bags.
        values: float32 [all bags, dim].
    """

    __slots__ = ("_rows", "of", "values")

    of: PooledIds
    values: Floats
    _rows: Floats | None

    def __init__(self, of: PooledIds, values: Floats) -> None:
        parts = {"of": of, "values": values, "ids": of.ids, "scores": None, "_rows": None}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> Floats:
        """A gradient for each id, float32 [n, dim]."""
        if self._rows is None:
            object.__setattr__(self, "_rows", spread_parts(self.values, self.of.parts))
        assert self._rows is not None
        return self._rows


def joined_gradients(parts: Sequence[PooledGradient]) -> PooledGradient:
    """Their sum: the bags of all, one after the other."""
    of = joined_ids([part.of for part in parts])
    return PooledGradient(of, np.concatenate([part.values for part in parts]))
