"""Losses and measures of predictions.

A loss has one value for each sample; `layers.mean` makes the scalar that an optimizer minimizes:

    loss = layers.mean(layers.log_loss(chance, label))
"""

from typing import Any, Literal, overload

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.graph.program.ops import loss
from psfleet.core.graph.program.ops.activation import Softmax
from psfleet.core.graph.program.ops.loss import Accuracy, AreaUnderCurve
from psfleet.core.graph.program.variable import Variable, apply

__all__ = [
    "accuracy",
    "auc",
    "cross_entropy",
    "log_loss",
    "sigmoid_cross_entropy_with_logits",
    "softmax_with_cross_entropy",
    "square_error_cost",
]


@checked
def square_error_cost(input: Variable, label: Variable) -> Variable:
    """(input - label)^2, elementwise."""
    return apply(loss.SquareError(), input, label)


@checked
def cross_entropy(
    input: Variable, label: Variable, soft_label: bool = False, ignore_index: int = -100
) -> Variable:
    """-log of the probability that `input` [..., classes] gives to the label: [..., 1].

    Args:
        label: int64 [..., 1], or with `soft_label` probabilities in input's shape.
        ignore_index: Label whose samples get the loss 0.
    """
    return apply(loss.CrossEntropy(soft_label, ignore_index), input, label)


@checked
@overload
def softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: Literal[False] = False,
    axis: int = -1,
) -> Variable:
    """The cost alone."""


@checked
@overload
def softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    *,
    return_softmax: Literal[True],
    axis: int = -1,
) -> tuple[Variable, Variable]:
    """The cost and the softmax."""


@checked
def softmax_with_cross_entropy(
    logits: Variable,
    label: Variable,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Variable | tuple[Variable, Variable]:
    """cross_entropy of softmax(logits), computed without overflow. With `return_softmax` also returns the
    softmax."""
    cost = apply(loss.SoftmaxCrossEntropy(soft_label, ignore_index, axis), logits, label)
    return (cost, apply(Softmax(axis), logits)) if return_softmax else cost


@checked
def sigmoid_cross_entropy_with_logits(
    x: Variable,
    label: Variable,
    ignore_index: int = -100,
    name: str | None = None,
    normalize: bool = False,
) -> Variable:
    """The binary cross entropy of sigmoid(x), elementwise, without overflow.

    Args:
        label: float32 in [0, 1], in x's shape.
        ignore_index: Label whose values get the loss 0.
        normalize: True to divide by the number of values that are not ignored.
    """
    return apply(loss.SigmoidCrossEntropy(float(ignore_index), normalize), x, label, name=name)


@checked
def log_loss(
    input: Variable, label: Variable, epsilon: float = 1e-4, name: str | None = None
) -> Variable:
    """-label * log(input + epsilon) - (1 - label) * log(1 - input + epsilon), elementwise."""
    return apply(loss.LogLoss(float(epsilon)), input, label, name=name)


@checked
def accuracy(
    input: Variable, label: Variable, k: PositiveInt = 1, correct: Any = None, total: Any = None
) -> Variable:
    """Fraction of the batch whose label [n, 1] is among the k largest of input [n, classes]."""
    return apply(Accuracy(k), input, label)


@checked
def auc(
    input: Variable,
    label: Variable,
    curve: str = "ROC",
    num_thresholds: PositiveInt = 2**12 - 1,
    topk: int = 1,
    slide_steps: int = 1,
) -> tuple[Variable, Variable, list[Variable]]:
    """Area under the ROC curve of scores in [0, 1].

    Returns:
        The AUC over all runs of the program so far, the AUC of the batch, and an empty list in the place of
        Paddle's state variables.
    """
    if curve != "ROC":
        raise ConfigError(f"curve is {curve!r}; only 'ROC' is available")
    return (
        apply(AreaUnderCurve(num_thresholds, True), input, label),
        apply(AreaUnderCurve(num_thresholds, False), input, label),
        [],
    )
