"""RecomputeOptimizer: less memory for activations, the same gradients."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from psfleet.errors import UsageError
from psfleet.optimizer.optimizer import Optimizer
from psfleet.optimizer.wrapping_optimizer import COMMON, WrappingOptimizer
from psfleet.strategy import RecomputeSettings
from psfleet.validation.annotations import checked

__all__ = ["RecomputeOptimizer", "recomputing"]


class RecomputeOptimizer(WrappingOptimizer):
    """An optimizer whose backward pass drops what lies between checkpoints and computes it again.

    Everything but `backward` and `minimize` is the wrapped optimizer's own.

    Args:
        optimizer: Updates the parameters.
    """

    own = COMMON | {"_checkpoints", "_set_checkpoints", "backward"}

    @checked
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, _checkpoints=None)

    def _set_checkpoints(self, checkpoints: Any) -> None:
        """Say what to keep.

        Args:
            checkpoints: Variables, parameters, or names of variables or layers; or
                psfleet.program.backward.Automatic(budget): the first run chooses. Data and parameters
                are kept anyway: among the checkpoints they change nothing.
        """
        object.__setattr__(self, "_checkpoints", checkpoints)

    @checked
    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[tuple[Any, Any]]:
        """As the wrapped optimizer's, with recomputing.

        Raises:
            UsageError: No checkpoints were set, or the loss has a value already.
        """
        from psfleet.program.backward import append_backward

        if self._checkpoints is None:
            raise UsageError("RecomputeOptimizer has no checkpoints; call _set_checkpoints first")
        if getattr(loss, "value", None) is not None:
            raise UsageError("the loss has a value already; recompute works in programs")
        chosen = self._inner._parameters if parameter_list is None else parameter_list
        return list(append_backward(loss, chosen, no_grad_set, callbacks, self._checkpoints))


def recomputing(optimizer: Optimizer, settings: RecomputeSettings) -> RecomputeOptimizer:
    """The optimizer with recomputing as a strategy asks for it."""
    from psfleet.program.backward import Automatic

    wrapped = RecomputeOptimizer(optimizer)
    wrapped._set_checkpoints(list(settings.checkpoints) or Automatic(settings.budget))
    return wrapped
