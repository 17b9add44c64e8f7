"""Micro-batches, the messages between stages, and the norm of all stages' gradients."""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np

from psfleet.errors import ConfigError, ShapeError
from psfleet.parameters import gradients
from psfleet.parameters.parameter import SparseGrad
from psfleet.program.operation import Array, Gradient
from psfleet.program.ops.loss import AreaUnderCurve
from psfleet.program.variable import Variable
from psfleet.stages.links import exchange, here, links, next_step
from psfleet.stages.schedule import even_sizes


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
    parts, start = [], 0
    for size in sizes:
        parts.append(
            {v: array[start : start + size] if _is_open(v) else array for v, array in feeds.items()}
        )
        start += size
    return parts


def combine(variable: Variable, values: Sequence[Array], fractions: Sequence[float]) -> Array:
    """A result of the batch: samples side by side; of single numbers the mean over the samples.

    An accumulated AUC and whole numbers are those of the last micro-batch.
    """
    if _is_open(variable):
        return np.concatenate(values)
    metric = variable.record is not None and isinstance(variable.record.op, AreaUnderCurve)
    if metric or variable.dtype.kind != "f" or len(values) == 1:
        return np.array(values[-1])
    mean = np.average(np.stack(values).astype(np.float64), axis=0, weights=fractions)
    return np.asarray(mean, variable.dtype)


def _is_open(variable: Variable) -> bool:
    return bool(variable.shape) and variable.shape[0] is None


def settled(value: Gradient | None) -> Gradient | None:
    """A value as it would arrive at another process: the same layout, so the same bits."""
    if isinstance(value, np.ndarray) and not value.flags.forc:
        return np.ascontiguousarray(value)
    return value


def pack(value: Gradient | None) -> list[Array]:
    """A value or gradient as arrays: none, one, or ids and rows (and shows and clicks)."""
    if value is None:
        return []
    if not isinstance(value, SparseGrad):
        return [value]
    return [value.ids, value.rows, *([] if value.scores is None else [value.scores])]


def unpack(arrays: Sequence[Array]) -> Gradient | None:
    """Unpack a packed gradient."""
    if len(arrays) > 1:
        return SparseGrad(*arrays)
    return arrays[0] if arrays else None


def shared_norms(names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Inside the block a global norm is over the parameters of all stages of this worker.

    Args:
        names: Names of all of them, in the order in which one process would add them up.
    """
    if here().processes == 1:
        return contextlib.nullcontext()
    places = {name: i for i, name in enumerate(names)}

    def gather(own: list[str], squares: list[float]) -> list[float]:
        place, far, tag = here(), links(), f"norm/{next_step()}"
        if max(place.copies) > 1:
            raise ConfigError(
                "clipping by the global norm needs whole gradients, and copies of a stage "
                "have parts of them; clip each gradient by its norm or use no copies"
            )
        mine = np.array([[places[name] for name in own], squares], np.float64)
        parts = exchange(place, far, tag, range(place.processes), [mine])
        whole = np.concatenate([part for [part] in parts], axis=1)
        return [float(square) for square in whole[1, np.argsort(whole[0], kind="stable")]]

    return gradients.gathering(gather)
