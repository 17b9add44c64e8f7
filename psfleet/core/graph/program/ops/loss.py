"""Loss operations, with a value for each sample, and metrics of predictions (accuracy, AUC).

Losses of logits use log-softmax or log1p, so that they do not overflow. Losses of probabilities bound the
logarithm.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from psfleet.core.base.errors import IdError, ShapeError
from psfleet.core.graph.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Shape,
    Spec,
    axis_of,
    need_floats,
    same,
)
from psfleet.core.graph.program.ops.activation import log_softmax, sigmoid
from psfleet.metrics import Auc
from psfleet.metrics.classification import share_of_hits

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


# Upper bound of -log(p), the same as in the reference framework.
_WORST = 1e20


def _check_same(layer_name: str, x: "Variable", label: "Variable") -> None:
    need_floats(layer_name, x, label)
    if not same(x.shape, label.shape):
        raise ShapeError(
            f"{layer_name} of {x.name!r} {x.shape} and label {label.name!r} {label.shape}: "
            "the shapes must be equal"
        )


@dataclass(frozen=True)
class SquareError(Op, saved="square_error"):
    """Squared error (x - label)^2, elementwise."""

    def infer(self, x: "Variable", label: "Variable") -> Spec:
        _check_same("square_error_cost", x, label)
        return x.shape, x.dtype

    def forward(self, context: Context, x: Array, label: Array) -> Array:
        difference = x - label
        context.save(difference)
        out: Array = difference * difference
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        part = gradient * (context.saved[0] * 2)
        return part if context.needs[0] else None, -part if context.needs[1] else None


@dataclass(frozen=True)
class SigmoidCrossEntropy(Op, saved="sigmoid_cross_entropy ignore normalize"):
    """Binary cross entropy of logits: -label * log(sigmoid(x)) - (1 - label) * log(1 - sigmoid(x)).

    It is computed as max(x, 0) - x * label + log(1 + e^-|x|), which does not overflow. Labels equal to
    `ignore` give 0. With `normalize`, the loss is divided by the number of all other labels.
    """

    ignore: float = -100
    normalize: bool = False

    def infer(self, x: "Variable", label: "Variable") -> Spec:
        _check_same("sigmoid_cross_entropy_with_logits", x, label)
        return x.shape, x.dtype

    def forward(self, context: Context, x: Array, label: Array) -> Array:
        out: Array = np.maximum(x, 0) - x * label + np.log1p(np.exp(-np.abs(x)))
        keep = None
        skip = label == self.ignore
        if skip.any():
            out[skip] = 0
            keep = ~skip
        count = max(1, x.size - int(np.count_nonzero(skip)))
        scale = x.dtype.type(1 / count) if self.normalize else None
        context.save(x, label, keep, scale)
        return out if scale is None else out * scale

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        x, label, keep, scale = context.saved
        if keep is not None:
            gradient = gradient * keep
        if scale is not None:
            gradient = gradient * scale
        return (
            gradient * (sigmoid(x) - label) if context.needs[0] else None,
            -gradient * x if context.needs[1] else None,
        )


@dataclass(frozen=True)
class LogLoss(Op, saved="log_loss epsilon"):
    """Binary cross entropy of probabilities: -label * log(p + e) - (1 - label) * log(1 - p + e).

    e is `epsilon`, which keeps the logarithms finite.
    """

    epsilon: float = 1e-4

    def infer(self, p: "Variable", label: "Variable") -> Spec:
        _check_same("log_loss", p, label)
        return p.shape, p.dtype

    def forward(self, context: Context, p: Array, label: Array) -> Array:
        e = p.dtype.type(self.epsilon)
        context.save(p, label)
        out: Array = -label * np.log(p + e) - (1 - label) * np.log(1 - p + e)
        return out

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        p, label = context.saved
        e = p.dtype.type(self.epsilon)
        by_p = by_label = None
        if context.needs[0]:
            by_p = gradient * ((1 - label) / (1 - p + e) - label / (p + e))
        if context.needs[1]:
            by_label = gradient * (np.log(1 - p + e) - np.log(p + e))
        return by_p, by_label


@dataclass(frozen=True)
class _ByClass(Op):
    """Base of losses over classes.

    Inputs: x [..., classes, ...], with the classes along `axis`, and labels. Labels are int64 class
    numbers, with extent 1 at the axis or without the axis. With `soft` they are probabilities in the shape
    of x. The output has the shape of x with extent 1 at the axis.
    """

    soft: bool = False
    ignore: int = -100
    axis: int = -1

    def infer(self, x: "Variable", label: "Variable") -> Spec:
        layer_name = type(self).__name__
        need_floats(layer_name, x)
        axis = axis_of(self.axis, x.shape, f"{layer_name} of {x.name!r}")
        shape: Shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        short = x.shape[:axis] + x.shape[axis + 1 :]
        if self.soft:
            _check_same(layer_name, x, label)
        elif label.dtype.kind not in "iu":
            raise IdError(
                f"{layer_name}: label {label.name!r} has dtype {label.dtype}; hard labels are "
                "int64, pass soft_label=True for probabilities"
            )
        elif not same(label.shape, shape) and not same(label.shape, short):
            raise ShapeError(
                f"{layer_name} of {x.name!r} {x.shape}: label {label.name!r} is "
                f"{label.shape}, it must be {shape}"
            )
        return shape, x.dtype

    def _picked(self, x: Array, label: Array) -> tuple[Array, Array]:
        """Return the class numbers with extent 1 at the axis, and a mask of ignored labels.

        The class number of an ignored label is 0.
        """
        axis = self.axis % x.ndim
        label = label.reshape(*x.shape[:axis], 1, *x.shape[axis + 1 :])
        skip = label == self.ignore
        label = np.where(skip, 0, label)
        if label.size and not (label.min() >= 0 and label.max() < x.shape[axis]):
            raise IdError(
                f"{type(self).__name__}: labels are {label.min()} to {label.max()}, "
                f"there are classes 0 to {x.shape[axis] - 1}"
            )
        return label, skip


class CrossEntropy(_ByClass, saved="cross_entropy soft ignore axis"):
    """Cross entropy of probabilities: -log(p[label]), or -sum(label * log(p)) with soft labels."""

    def forward(self, context: Context, p: Array, label: Array) -> Array:
        with np.errstate(divide="ignore"):
            if self.soft:
                context.save(p, label, None)
                logs = np.maximum(np.log(p), -_WORST)
                total: Array = -(label * logs).sum(axis=self.axis, keepdims=True)
                return total
            index, skip = self._picked(p, label)
            likelihood = np.take_along_axis(p, index, self.axis)
            context.save(p, index, skip)
            out = np.minimum(-np.log(likelihood), p.dtype.type(_WORST))
        loss: Array = np.where(skip, p.dtype.type(0), out)
        return loss

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        p, label, skip = context.saved
        if self.soft:
            # A probability may be 0, and the gradient divides by it.
            safe = np.maximum(p, np.finfo(p.dtype).tiny)
            return (
                -gradient * label / safe if context.needs[0] else None,
                -gradient * np.log(safe) if context.needs[1] else None,
            )
        out = np.zeros_like(p)
        likelihood = np.maximum(np.take_along_axis(p, label, self.axis), np.finfo(p.dtype).tiny)
        np.put_along_axis(out, label, np.where(skip, 0, -gradient / likelihood), self.axis)
        return out, None


class SoftmaxCrossEntropy(_ByClass, saved="softmax_cross_entropy soft ignore axis"):
    """Cross entropy of softmax(x)."""

    def forward(self, context: Context, x: Array, label: Array) -> Array:
        logs = log_softmax(x, self.axis)
        if self.soft:
            context.save(logs, label, None)
            total: Array = -(label * logs).sum(axis=self.axis, keepdims=True)
            return total
        index, skip = self._picked(x, label)
        context.save(logs, index, skip)
        return np.where(skip, x.dtype.type(0), -np.take_along_axis(logs, index, self.axis))

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        logs, label, skip = context.saved
        out = np.exp(logs)
        if self.soft:
            total = label.sum(axis=self.axis, keepdims=True)
            return (
                gradient * (out * total - label) if context.needs[0] else None,
                -gradient * logs if context.needs[1] else None,
            )
        # The gradient is softmax(x) - onehot(label), so 1 is subtracted at the label only.
        likelihood = np.take_along_axis(out, label, self.axis)
        np.put_along_axis(out, label, likelihood - 1, self.axis)
        out *= np.where(skip, 0, gradient).astype(out.dtype, copy=False)
        return out, None


@dataclass(frozen=True)
class Accuracy(Op, saved="accuracy k"):
    """Fraction of samples whose label is among the k largest predictions, a single float32."""

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
        return np.asarray(share_of_hits(x, label, self.k), np.float32)


@dataclass(frozen=True)
class AreaUnderCurve(Op, saved="area_under_curve thresholds accumulate"):
    """Area under the ROC curve of scores in [0, 1], a single float32, from a histogram of `thresholds` bins.

    Scores are [n], [n, 1] or [n, 2]; of [n, 2] only the second column is used. With `accumulate`, the result
    includes all earlier runs of the program.
    """

    thresholds: int
    accumulate: bool
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
