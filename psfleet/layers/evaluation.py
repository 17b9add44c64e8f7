"""Measures of predictions as parts of a program."""

from typing import Any

from psfleet.errors import ConfigError
from psfleet.program.ops import metric
from psfleet.program.variable import Variable, apply

__all__ = ["accuracy", "auc"]


def accuracy(
    input: Variable, label: Variable, k: int = 1, correct: Any = None, total: Any = None
) -> Variable:
    """The share of the batch whose label [n, 1] is among the k largest of input [n, classes]."""
    return apply(metric.Accuracy(k), input, label)


def auc(
    input: Variable,
    label: Variable,
    curve: str = "ROC",
    num_thresholds: int = 2**12 - 1,
    topk: int = 1,
    slide_steps: int = 1,
) -> tuple[Variable, Variable, list[Variable]]:
    """The area under the ROC curve of scores in [0, 1].

    Returns:
        The AUC over all runs of the program so far, that of the batch, and an empty list where the
        reference has its state variables.
    """
    if curve != "ROC":
        raise ConfigError(f"curve is {curve!r}; only 'ROC' is available")
    return (
        apply(metric.AreaUnderCurve(num_thresholds, True), input, label),
        apply(metric.AreaUnderCurve(num_thresholds, False), input, label),
        [],
    )
