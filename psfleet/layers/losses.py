"""Losses, and accuracy and AUC as layers.

A loss has one value for each sample. `layers.mean` makes the scalar that an optimizer minimizes:

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
    """Return (input - label)^2, elementwise."""
    return apply(loss.SquareError(), input, label)


@checked
def cross_entropy(
    input: Variable, label: Variable, soft_label: bool = False, ignore_index: int = -100
) -> Variable:
    """Return the cross entropy -log(probability of the label), shape [..., 1].

    Args:
        input: Probabilities [..., classes].
        label: Class numbers, int64 [..., 1]. With `soft_label` probabilities in the shape of `input`.
        soft_label: True if `label` has probabilities.
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
    """Return the loss only."""


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
    """Return the loss and the softmax."""


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
    """Return cross_entropy(softmax(logits), label), computed without overflow.

    Args:
        logits: Scores [..., classes] before the softmax.
        label, soft_label, ignore_index: As in cross_entropy.
        numeric_stable_mode: Accepted for Paddle scripts. The result is always computed without overflow.
        return_softmax: True to return (loss, softmax).
        axis: Axis of the classes.
    """
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
    """Return the binary cross entropy of sigmoid(x), elementwise, computed without overflow.

    Args:
        x: Scores before the sigmoid.
        label: float32 in [0, 1], in the shape of x.
        ignore_index: Elements with this label get the loss 0.
        name: Name of the operation.
        normalize: True to divide by the number of elements that are not ignored.
    """
    return apply(loss.SigmoidCrossEntropy(float(ignore_index), normalize), x, label, name=name)


@checked
def log_loss(
    input: Variable, label: Variable, epsilon: float = 1e-4, name: str | None = None
) -> Variable:
    """Return -label * log(input + epsilon) - (1 - label) * log(1 - input + epsilon), elementwise."""
    return apply(loss.LogLoss(float(epsilon)), input, label, name=name)


@checked
def accuracy(
    input: Variable, label: Variable, k: PositiveInt = 1, correct: Any = None, total: Any = None
) -> Variable:
    """Return the share of the batch whose label is among the k classes with the largest values.

    Args:
        input: Scores [n, classes].
        label: Class numbers, int64 [n, 1].
        k: Number of classes to consider.
        correct, total: Accepted for Paddle scripts, without effect.
    """
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
    """Return the area under the ROC curve, of all runs so far and of the batch.

        auc_so_far, batch_auc, _ = layers.auc(chance, label)

    Args:
        input: Scores in [0, 1].
        label: Labels 0 or 1.
        curve: Must be "ROC".
        num_thresholds: Number of thresholds on the score. Scores between the same two thresholds count as
            equal.
        topk, slide_steps: Accepted for Paddle scripts, without effect.

    Returns:
        The AUC over all runs so far, the AUC of the batch, and [] in place of Paddle's state variables.
    """
    if curve != "ROC":
        raise ConfigError(f"curve is {curve!r}; only 'ROC' is available")
    return (
        apply(AreaUnderCurve(num_thresholds, True), input, label),
        apply(AreaUnderCurve(num_thresholds, False), input, label),
        [],
    )
