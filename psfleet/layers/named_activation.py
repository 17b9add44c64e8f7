"""The activation that a layer's `act` names."""

from collections.abc import Callable

from psfleet.errors import ConfigError
from psfleet.layers import activations
from psfleet.program.variable import Variable

_BY_NAME: dict[str, Callable[..., Variable]] = {
    name: getattr(activations, name) for name in activations.__all__
}


def activate(x: Variable, act: str | None, name: str | None = None) -> Variable:
    """The activation that a layer's `act` names; None: x itself."""
    if act is None:
        return x
    if act not in _BY_NAME:
        raise ConfigError(f"act is {act!r}; use {', '.join(_BY_NAME)} or None")
    return _BY_NAME[act](x, name=name)
