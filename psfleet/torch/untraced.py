"""Functions that torch must run as they are: compilers skip them, and exported graphs cannot have them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from psfleet.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_REASON = (
    "a graph cannot read the values of a converted model, which are on the servers; give torch.export or "
    "torch.jit.trace (torch.jit.script takes no hooks) copy.deepcopy(model), a plain torch model with the "
    "values of now"
)
_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7
_tracing: Callable[[], bool] = cast(Any, torch.jit).is_tracing
_disable: Any = torch.compiler.disable
_NAMED = {"reason": _REASON} if "reason" in inspect.signature(_disable).parameters else {}


def refuse_graph() -> None:
    """Say why the model cannot become a graph."""
    raise UsageError(_REASON)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which torch.compile calls between its graphs, and which no exported graph can have.

    Raises:
        UsageError: It is called to make a graph.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        if _tracing() or _exporting():
            refuse_graph()
        for value in (*arguments, *options.values()):
            if isinstance(value, torch.fx.Proxy):
                refuse_graph()
        return function(*arguments, **options)

    opaque: Callable[P, R] = _disable(run, **_NAMED)
    return opaque
