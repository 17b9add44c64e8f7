"""A batch as micro-batches, and results of micro-batches as those of the batch."""

from collections.abc import Mapping, Sequence

import numpy as np

from psfleet.errors import ShapeError
from psfleet.program.operation import Array
from psfleet.program.ops.metric import AreaUnderCurve
from psfleet.program.variable import Variable
from psfleet.stages.schedule import even_sizes

__all__ = ["combine", "micro_feeds", "micro_sizes"]


def micro_sizes(feeds: Mapping[Variable, Array], micro_batches: int) -> list[int]:
    """Samples of each micro-batch, see `even_sizes`.

    Raises:
        ShapeError: No feed leaves its first extent open, or those that do differ in length.
    """
    lengths = {v.name: len(array) for v, array in feeds.items() if _is_open(v)}
    if not lengths:
        if micro_batches == 1:
            return [1]
        raise ShapeError(
            "no feed leaves its first extent open, so the batch cannot be cut into "
            f"{micro_batches} micro-batches; declare data with None in front"
        )
    if len(set(lengths.values())) > 1:
        raise ShapeError(
            f"feeds have different numbers of samples: {lengths}; a pipeline cuts all of "
            "them into the same micro-batches"
        )
    return even_sizes(next(iter(lengths.values())), micro_batches)


def micro_feeds(
    feeds: Mapping[Variable, Array], sizes: Sequence[int]
) -> list[dict[Variable, Array]]:
    """The feeds of each micro-batch; one with a fixed first extent goes whole to all."""
    found, start = [], 0
    for size in sizes:
        found.append(
            {v: array[start : start + size] if _is_open(v) else array for v, array in feeds.items()}
        )
        start += size
    return found


def combine(variable: Variable, values: Sequence[Array], shares: Sequence[float]) -> Array:
    """A result of the batch: samples side by side; of single numbers the mean over the samples.

    An accumulated AUC and whole numbers are those of the last micro-batch.
    """
    if _is_open(variable):
        return np.concatenate(values)
    metric = variable.record is not None and isinstance(variable.record.op, AreaUnderCurve)
    if metric or variable.dtype.kind != "f" or len(values) == 1:
        return np.array(values[-1])
    mean = np.average(np.stack(values).astype(np.float64), axis=0, weights=shares)
    return np.asarray(mean, variable.dtype)


def _is_open(variable: Variable) -> bool:
    return bool(variable.shape) and variable.shape[0] is None
