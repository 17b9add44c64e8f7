"""One row for each padded sequence of a batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError, ShapeError
from psfleet.program.operation import Array, Context, Gradient, Op, Spec
from psfleet.program.ops.check import need_floats
from psfleet.program.shapes import same

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["POOLS", "SequencePool"]

POOLS = ("sum", "average", "sqrt", "max", "last", "first")
"""sum; sum / n; sum / sqrt(n); the largest of each column; the last step; the first one."""


@dataclass(frozen=True)
class SequencePool(Op, saved="sequence_pool pool pad_value masked"):
    """Inputs: x [batch, time, ...], and a mask [batch, time] if `masked`, else lengths [batch] or [batch, 1].

    Output: [batch, ...]. Steps that are no part of the sequence count for nothing, whatever they hold; a
    sequence without steps gives `pad_value`, through which no gradient flows. Of equal largest values the
    first one has the gradient.
    """

    pool: str = "sum"
    pad_value: float = 0.0
    masked: bool = False

    def __post_init__(self) -> None:
        if self.pool not in POOLS:
            raise ConfigError(f"pool_type is {self.pool!r}, use one of {', '.join(POOLS)}")

    def infer(self, *inputs: Any, **none: Any) -> Spec:
        x: Variable = inputs[0]
        need_floats("sequence_pool", x)
        if len(x.shape) < 2:
            raise ShapeError(
                f"sequence_pool of {x.name!r} {x.shape}: it must be [batch, time, ...]"
            )
        for said in inputs[1:]:
            self._check(x, said)
        return (x.shape[0], *x.shape[2:]), x.dtype

    def _check(self, x: "Variable", said: "Variable") -> None:
        batch, time = x.shape[:2]
        if self.masked and not same(said.shape, (batch, time)):
            raise ShapeError(
                f"sequence_pool of {x.name!r} {x.shape}: mask {said.name!r} is {said.shape}, "
                "it must be [batch, time]"
            )
        if not self.masked and not (same(said.shape, (batch,)) or same(said.shape, (batch, 1))):
            raise ShapeError(
                f"sequence_pool of {x.name!r} {x.shape}: lengths {said.name!r} is {said.shape}, "
                "it must be [batch] or [batch, 1]"
            )
        if not self.masked and said.dtype.kind not in "iu":
            raise ShapeError(
                f"sequence_pool: lengths {said.name!r} have dtype {said.dtype}, they must be int64"
            )

    def forward(self, context: Context, *inputs: Any, **none: Any) -> Array:
        x = inputs[0]
        present = self._present(x, inputs[1:])
        count = present.sum(axis=1)
        context.save(x.shape, present, count, None)
        flat = np.where(
            present[:, :, None], x.reshape(*x.shape[:2], math.prod(x.shape[2:])), x.dtype.type(0)
        )
        if not x.shape[1]:
            out = np.zeros((x.shape[0], flat.shape[2]), x.dtype)
        elif self.pool in ("sum", "average", "sqrt"):
            out = flat.sum(axis=1, dtype=x.dtype) * self._share(count, x.dtype)[:, None]
        else:
            chosen = self._chosen(flat, present)
            context.save(x.shape, present, count, chosen)
            out = np.take_along_axis(flat, chosen, axis=1)[:, 0]
        out[count == 0] = self.pad_value
        result: Array = out.reshape(x.shape[0], *x.shape[2:])
        return result

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        shape, present, count, chosen = context.saved
        rows = gradient.reshape(shape[0], 1, math.prod(shape[2:]))
        out = np.zeros((*shape[:2], rows.shape[2]), gradient.dtype)
        if chosen is None:
            share = self._share(count, gradient.dtype)[:, None, None]
            np.copyto(out, rows * share, where=present[:, :, None])
        else:
            kept = np.where((count > 0)[:, None, None], rows, gradient.dtype.type(0))
            np.put_along_axis(out, chosen, kept, axis=1)
        return [out.reshape(shape), *(None for _ in context.record.inputs[1:])]

    def _present(self, x: Array, said: Sequence[Array]) -> NDArray[np.bool_]:
        """Which steps are part of their sequence: [batch, time]."""
        batch, time = x.shape[:2]
        if not said:
            return np.ones((batch, time), np.bool_)
        if self.masked:
            return np.asarray(said[0] != 0)
        lengths = said[0].reshape(-1)
        wrong = lengths[(lengths < 0) | (lengths > time)]
        if len(wrong):
            raise ShapeError(
                f"sequence_pool: a length is {wrong[0]}; sequences here have 0 to {time} steps"
            )
        return np.asarray(np.arange(time) < lengths[:, None])

    def _share(self, count: NDArray[np.int64], dtype: np.dtype[Any]) -> Array:
        """What each step's row is multiplied by."""
        some = np.maximum(count, 1).astype(dtype)
        if self.pool == "average":
            return np.asarray(1 / some)
        return np.asarray(1 / np.sqrt(some)) if self.pool == "sqrt" else np.ones_like(some)

    def _chosen(self, flat: Array, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The step that gives each value: [batch, 1, width]."""
        if self.pool == "max":
            lowest = flat.dtype.type(-np.inf)
            return np.asarray(np.where(present[:, :, None], flat, lowest).argmax(axis=1)[:, None])
        last = present.shape[1] - 1 - present[:, ::-1].argmax(axis=1)
        step = last if self.pool == "last" else present.argmax(axis=1)
        return np.broadcast_to(step[:, None, None], (len(flat), 1, flat.shape[2]))
