"""DistributedOptimizer: a local optimizer whose parameters live on the fleet's servers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from psfleet.errors import UsageError
from psfleet.optimizer import program_access
from psfleet.optimizer.amp import GradientScaler
from psfleet.optimizer.gradient_merge import GradientMerger
from psfleet.optimizer.optimizer import Optimizer
from psfleet.optimizer.pipeline_optimizer import pipelining
from psfleet.optimizer.recompute_optimizer import recomputing
from psfleet.optimizer.strategy_rewrite import substitute
from psfleet.strategy import DistributedStrategy, Settings
from psfleet.strategy.adoption import adopt
from psfleet.validation.annotations import Must, checked

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """Wraps an optimizer for a fleet, as `fleet.distributed_optimizer` does.

    Every other method and attribute (`step`, `get_lr`, `state_dict`, ...) is the wrapped optimizer's.

    Args:
        optimizer: The local optimizer.
        strategy: A DistributedStrategy, or settings in the form of a strategy file; what the launcher
            says has the last word. None: the one that `fleet.init` was given. Its dgc, lars and lamb
            put another optimizer in place of this one; its gradient_merge makes one push of several
            steps' gradients; its amp sends them, and multiplies a program's matrices, in 16 bits;
            its recompute drops activations and computes them again; its pipeline cuts the program
            for stages.

    Attributes:
        optimizer: The optimizer that does the work.
        settings: The strategy that counts.
    """

    @checked
    def __init__(
        self,
        optimizer: Annotated[
            Any,
            Must(
                lambda value: isinstance(value, Optimizer),
                "a psfleet optimizer (psfleet.torch.convert takes those of PyTorch)",
            ),
        ],
        strategy: DistributedStrategy | Settings | Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = strategy if isinstance(strategy, Settings) else adopt(strategy)
        self.optimizer = substitute(optimizer, self.settings)
        if self.settings.recompute is not None:
            self.optimizer = recomputing(self.optimizer, self.settings.recompute)
        if self.settings.pipeline is not None:
            self.optimizer = pipelining(self.optimizer, self.settings.pipeline)
        if self.settings.gradient_merge is not None:
            self.optimizer.merger = GradientMerger(self.settings.gradient_merge)
        if self.settings.amp is not None:
            self.optimizer.shorten(GradientScaler(self.settings.amp))

    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> list[tuple[Any, Any]]:
        """First part of minimize: differentiate.

        Returns:
            (parameter, gradient) pairs.
        """
        pairs: list[tuple[Any, Any]] = self.optimizer.backward(
            loss, startup_program, parameter_list, no_grad_set, callbacks
        )
        return pairs

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Second part of minimize: push the gradients to the servers, which update.

        Returns:
            The update operations.
        """
        operations: list[Any] = self.optimizer.apply_gradients(params_grads)
        self._set_products(operations)
        return operations

    def minimize(
        self,
        losses: Any,
        scopes: Any = None,
        startup_programs: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Differentiate the loss and update the parameters on the servers.

        Args:
            losses: One loss variable, or a list with one.
            scopes: Accepted for the reference's sake; psfleet has one scope.
            startup_programs: One program or a list with one.
            parameter_list: Parameters to update; None: all that are trainable.
            no_grad_set: Variables to leave alone.

        Returns:
            (optimize_ops, params_grads).
        """
        result: tuple[list[Any], list[tuple[Any, Any]]] = self.optimizer.minimize(
            _only(losses, "losses"),
            _only(startup_programs, "startup_programs"),
            parameter_list,
            no_grad_set,
        )
        self._set_products(result[0])
        return result

    def _set_products(self, operations: list[Any]) -> None:
        """Let the program that has these updates multiply as the strategy's amp says."""
        if operations and self.settings.amp is not None:
            program_access.set_products(self.settings.amp)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def _only(value: Any, name: str) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise UsageError(
            f"{name} has {len(value)} entries; one loss is minimized at a time, add them up"
        )
    return value[0]
