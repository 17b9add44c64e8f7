"""Adding rows into a dense array."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.parameters.gradients import PooledGradient, joined_gradients
from psfleet.parameters.parameter import SparseGrad
from psfleet.program.operation import Array, Context, Gradient, Record

if TYPE_CHECKING:
    from psfleet.program.variable import Variable


def scatter_rows(ids: NDArray[np.int64], rows: Array, shape: tuple[int, ...]) -> Array:
    """Zeros of `shape` with rows[i] added to row ids[i], those of one id in their order.

    Sorted and summed in runs: several times faster than np.add.at.
    """
    out: NDArray[Any] = np.zeros(shape, rows.dtype)
    if len(ids) == 0:
        return out
    order = np.argsort(ids, kind="stable")
    in_order = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
    out[in_order[starts]] = np.add.reduceat(rows[order], starts, axis=0)
    return out


def ancestors(targets: "Iterable[Variable]") -> list[Record]:
    """Every record that the targets are computed by, in order of execution."""
    records: set[Record] = set()
    waiting = [target.record for target in targets if target.record is not None]
    while waiting:
        record = waiting.pop()
        if record not in records:
            records.add(record)
            waiting += [v.record for v in record.inputs if v.record is not None]
    return sorted(records, key=lambda record: record.serial)


def summed(first: Gradient, second: Gradient) -> Gradient:
    """The sum of two gradients of one parameter."""
    if isinstance(first, PooledGradient) and isinstance(second, PooledGradient):
        return joined_gradients([first, second])
    if isinstance(first, SparseGrad) and isinstance(second, SparseGrad):
        counts = first.scores is not None or second.scores is not None
        return SparseGrad(
            np.concatenate([first.ids, second.ids]),
            np.concatenate([first.rows, second.rows]),
            np.concatenate([first.counted(), second.counted()]) if counts else None,
        )
    if isinstance(first, SparseGrad) and isinstance(second, np.ndarray):
        first = dense_rows(first, second.shape)
    elif isinstance(second, SparseGrad) and isinstance(first, np.ndarray):
        second = dense_rows(second, first.shape)
    total: Gradient = first + second  # type: ignore[operator]  # both are arrays
    return total


def dense_rows(grad: SparseGrad, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array that a gradient by rows stands for; rows of a repeated id are summed in order."""
    return scatter_rows(grad.ids, grad.rows, shape)


class BackwardPass:
    """Gradients on their way from the loss to the leaves.

    Attributes:
        gradients: By variable; those of leaves are left when the sweep is over.
    """

    def __init__(self, seeds: "dict[Variable, Gradient]") -> None:
        self.gradients = dict(seeds)
        self._own: set[Variable] = set()  # gradients without another reference: summed in place

    def run(
        self, records: Sequence[Record], contexts: dict[Record, Context], keep: bool = False
    ) -> None:
        """Go back through records; a context is let go as soon as it is used, unless `keep`."""
        for record in reversed(records):
            context = contexts[record] if keep else contexts.pop(record)
            gradient = self.gradients.pop(record.output, None)
            if gradient is not None:
                self.step(record, context, gradient)

    def step(self, record: Record, context: Context, gradient: Gradient) -> None:
        """Hand a record's output gradient on to its inputs."""
        parts = record.op.backward(context, gradient)  # type: ignore[arg-type]  # only leaves are sparse
        for variable, need, part in zip(record.inputs, context.needs, parts, strict=True):
            if need and part is not None:
                self.add(variable, part)

    def add(self, variable: "Variable", part: Gradient) -> None:
        """Add to a variable's gradient."""
        before = self.gradients.get(variable)
        if before is None:
            self.gradients[variable] = part
        elif (
            variable in self._own
            and isinstance(before, np.ndarray)
            and isinstance(part, np.ndarray)
        ):
            before += part
        else:
            self.gradients[variable] = summed(before, part)
            if isinstance(before, np.ndarray) and before.ndim:
                self._own.add(variable)
