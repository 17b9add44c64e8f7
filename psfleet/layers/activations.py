"""Activation functions, also usable by name as the argument `act` of a layer."""

from collections.abc import Callable

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.program.ops import activation
from psfleet.core.graph.program.variable import Variable, apply

__all__ = ["log_softmax", "relu", "sigmoid", "softmax", "tanh"]


@checked
def relu(x: Variable, name: str | None = None) -> Variable:
    """max(x, 0)."""
    return apply(activation.Relu(), x, name=name)


@checked
def sigmoid(x: Variable, name: str | None = None) -> Variable:
    """1 / (1 + exp(-x))."""
    return apply(activation.Sigmoid(), x, name=name)


@checked
def tanh(x: Variable, name: str | None = None) -> Variable:
    """The hyperbolic tangent."""
    return apply(activation.Tanh(), x, name=name)


@checked
def softmax(
    input: Variable, use_cudnn: bool = False, name: str | None = None, axis: int = -1
) -> Variable:
    """exp(x) / sum(exp(x)) along an axis."""
    return apply(activation.Softmax(axis), input, name=name)


@checked
def log_softmax(input: Variable, axis: int = -1, name: str | None = None) -> Variable:
    """The logarithm of softmax along an axis."""
    return apply(activation.LogSoftmax(axis), input, name=name)


_BY_NAME: dict[str, Callable[..., Variable]] = {
    layer.__name__: layer for layer in (log_softmax, relu, sigmoid, softmax, tanh)
}


def activate(x: Variable, act: str | None, name: str | None = None) -> Variable:
    """Apply the activation that a layer's `act` names, or return x unchanged for None."""
    if act is None:
        return x
    if act not in _BY_NAME:
        raise ConfigError(f"act is {act!r}; use {', '.join(_BY_NAME)} or None")
    return _BY_NAME[act](x, name=name)
