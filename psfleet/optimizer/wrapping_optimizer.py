"""Optimizers around another one, such as those of pipelines and of recompute."""

from typing import Any, ClassVar

from psfleet.optimizer.optimizer import Optimizer

__all__ = ["COMMON", "WrappingOptimizer"]

COMMON = frozenset({"__class__", "_inner", "minimize"})


class WrappingOptimizer(Optimizer):
    """Its methods and attributes are those of the wrapped optimizer, but for the names in `own`.

    Args:
        optimizer: The wrapped one.
        values: Of own attributes.
    """

    own: ClassVar[frozenset[str]] = COMMON

    def __init__(self, optimizer: Optimizer, **values: Any) -> None:
        for name, value in {"_inner": optimizer, **values}.items():
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).own:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)
