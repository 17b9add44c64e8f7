"""The sparse gradients that a weight collects of pooled rows."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psfleet.kernels.bags import RowBags
from psfleet.parameters.pooled_gradient import PooledGradient
from psfleet.runtime.pooled_ids import PooledIds, joined_ids
from psfleet.torch.table_weight import TableWeight, as_tensor

__all__ = ["GradientBags"]

Floats = NDArray[np.float32]

_MOST = 2**30  # numbers of bags begin anew before they get there


class GradientBags:
    """Which bag stands behind each index of a weight's sparse gradient.

    As GradientIds, but for what was pooled of the rows of a table for any id: an index is a number of a bag.
    """

    def __init__(self, weight: TableWeight) -> None:
        self._weight = weight
        self._of: list[PooledIds] = []
        self._first = 0  # the number of the first bag

    def __bool__(self) -> bool:
        """Whether there has been a gradient since the last one that was forgotten."""
        return bool(self._of)

    def sparse(self, gradient: PooledGradient) -> Tensor:
        """The gradient of the weight that this one makes up."""
        first = self._first + sum(map(len, self._of))
        self._of.append(gradient.of)
        return _sparse(self._weight, first, gradient.values)

    def gradient(self) -> PooledGradient | None:
        """What the weight's `.grad` holds; None where it has none.

        Bags that the gradient no longer names are forgotten.
        """
        grad = self._weight.grad
        if grad is None:
            self._of, self._first = [], 0
            return None
        indices = grad._indices()[0].cpu().numpy()
        values = grad._values().detach().cpu().numpy()
        lowest = indices.min(initial=_MOST)
        while len(self._of) > 1 and lowest >= self._first + len(self._of[0]):
            self._first += len(self._of.pop(0))  # of an earlier step
        found = PooledGradient(joined_ids(self._of), values)
        ends = self._first, self._first + len(found.of)
        if not np.array_equal(indices, np.arange(*ends)):
            found = _chosen(found, indices - self._first)
        elif ends[1] < _MOST:
            return found
        self._of, self._first = [found.of], 0
        self._weight.grad = _sparse(self._weight, 0, found.values)
        return found


def _chosen(found: PooledGradient, indices: NDArray[np.int64]) -> PooledGradient:
    """Some of the bags, whose numbers are given with the values: the gradients of their rows."""
    of, named = found.of, np.zeros(len(found.of), np.bool_)
    named[indices] = True
    whole = np.zeros((len(of), found.values.shape[1]), np.float32)
    np.add.at(whole, indices, found.values)
    lengths = np.concatenate([part.lengths for part in of.parts])
    kept = np.repeat(named, lengths)
    ids, rows = of.ids[kept], PooledGradient(of, whole).rows[kept]
    return PooledGradient(PooledIds(ids, (RowBags(np.ones(len(ids), np.int64)),)), rows)


def _sparse(weight: TableWeight, first: int, values: Floats) -> Tensor:
    indices = torch.arange(first, first + len(values))[None]
    return torch.sparse_coo_tensor(indices, as_tensor(values), weight.shape, check_invariants=False)
