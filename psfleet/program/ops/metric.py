"""Measures of a prediction inside a program; they have no gradient."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from psfleet.errors import IdError, ShapeError
from psfleet.metrics import Auc, accuracy
from psfleet.program.operation import Array, Context, Op, Spec
from psfleet.program.shapes import same

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["Accuracy", "AreaUnderCurve"]


@dataclass(frozen=True)
class Accuracy(Op, saved="accuracy k"):
    """The share of samples whose label is among the k largest predictions, float32 []."""

    k: int = 1
    differentiable = False

    def infer(self, x: "Variable", label: "Variable") -> Spec:
        if len(x.shape) != 2 or not same(x.shape[:1], label.shape[:1]):
            raise ShapeError(
                f"accuracy of {x.name!r} {x.shape} and {label.name!r} {label.shape}: "
                "they must be [n, classes] and [n, 1]"
            )
        if label.dtype.kind not in "iu":
            raise IdError(
                f"accuracy: label {label.name!r} has dtype {label.dtype}, it must be int64"
            )
        return (), np.dtype(np.float32)

    def forward(self, context: Context, x: Array, label: Array) -> Array:
        return np.asarray(accuracy(x, label, self.k), np.float32)


@dataclass(frozen=True)
class AreaUnderCurve(Op, saved="area_under_curve thresholds accumulate"):
    """AUC of scores in [0, 1], [n], [n, 1] or [n, 2] (the second column counts), float32 [].

    `accumulate`: over all runs of the program so far, by a histogram of `thresholds` bins.
    """

    thresholds: int = 4095
    accumulate: bool = True
    differentiable = False

    def infer(self, x: "Variable", label: "Variable") -> Spec:
        if not same(x.shape[:1], label.shape[:1]):
            raise ShapeError(
                f"auc of {x.name!r} {x.shape} and {label.name!r} {label.shape}: "
                "the numbers of samples differ"
            )
        return (), np.dtype(np.float32)

    def forward(self, context: Context, x: Array, label: Array) -> Array:
        auc = Auc(num_thresholds=self.thresholds)
        if self.accumulate:
            auc = context.program.memory.setdefault(context.record.output.name, auc)
        auc.update(x, label)
        return np.asarray(auc.eval(), np.float32)
