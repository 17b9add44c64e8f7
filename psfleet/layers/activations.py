"""Activation functions. Layers also accept their names, as in `fc(x, 64, act="relu")`."""

from collections.abc import Callable

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.program.ops import activation
from psfleet.core.graph.program.variable import Variable, apply

__all__ = ["log_softmax", "relu", "sigmoid", "softmax", "tanh"]


@checked
def relu(x: Variable, name: str | None = None) -> Variable:
    """Return max(x, 0), elementwise."""
    return apply(activation.Relu(), x, name=name)


@checked
def sigmoid(x: Variable, name: str | None = None) -> Variable:
    """Return 1 / (1 + exp(-x)), elementwise."""
    return apply(activation.Sigmoid(), x, name=name)


@checked
def tanh(x: Variable, name: str | None = None) -> Variable:
    """Return the hyperbolic tangent, elementwise."""
    return apply(activation.Tanh(), x, name=name)


@checked
def softmax(
    input: Variable, use_cudnn: bool = False, name: str | None = None, axis: int = -1
) -> Variable:
    """Return exp(x) / sum(exp(x)), with the sum along an axis."""
    return apply(activation.Softmax(axis), input, name=name)


@checked
def log_softmax(input: Variable, axis: int = -1, name: str | None = None) -> Variable:
    """Return the logarithm of softmax along an axis, computed without overflow."""
    return apply(activation.LogSoftmax(axis), input, name=name)


_BY_NAME: dict[str, Callable[..., Variable]] = {
    layer.__name__: layer for layer in (log_softmax, relu, sigmoid, softmax, tanh)
}


def activate(x: Variable, act: str | None, name: str | None = None) -> Variable:
    """Apply the activation with the name `act`, or return x unchanged if `act` is None."""
    if act is None:
        return x
    if act not in _BY_NAME:
        raise ConfigError(f"act is {act!r}; use {', '.join(_BY_NAME)} or None")
    return _BY_NAME[act](x, name=name)
