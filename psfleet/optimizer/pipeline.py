"""PipelineOptimizer: a program cut into sections."""

from collections.abc import Iterable, Sequence
from typing import Any

from psfleet.errors import ConfigError
from psfleet.optimizer.base import Optimizer

__all__ = ["PipelineOptimizer"]


class PipelineOptimizer:
    """Cuts the program that it minimizes into 2k - 1 sections at k cuts.

    In one process the sections run one after the other: the results are those of the program as it
    was. Stage processes take the sections from `sections`.

    Args:
        optimizer: Updates the parameters.
        cut_list: For each forward piece the variables that it ends with; the last is [loss].
        place_list: For each section where it runs; may be left out.
        concurrency_list: For each section how many copies of it run; may be left out.
        queue_size: How many micro-batches may wait before a section.
        sync_steps: Steps between two synchronisations of copies.
        start_cpu_core_id: The first CPU core to bind to.

    Attributes:
        sections: After `minimize`: psfleet.program.sections.Section, in the order of a step.

    Raises:
        ConfigError: A list has another length than 2k - 1, or a number is out of range.
    """

    def __init__(self, optimizer: Optimizer, cut_list: Sequence[Any] | None = None,
                 place_list: Sequence[Any] | None = None,
                 concurrency_list: Sequence[int] | None = None, queue_size: int = 30,
                 sync_steps: int = 1, start_cpu_core_id: int = 0) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"PipelineOptimizer: optimizer is {optimizer!r}, it must be an optimizer")
        cuts = list(cut_list or ())
        count = 2 * len(cuts) - 1
        for name, said in (("place_list", place_list), ("concurrency_list", concurrency_list)):
            if said is not None and cuts and len(said) != count:
                raise ConfigError(f"PipelineOptimizer: {len(cuts)} cuts make {count} sections, but "
                                  f"{name} has {len(said)} entries")
        for name, value, least in (("queue_size", queue_size, 1), ("sync_steps", sync_steps, 1),
                                   ("start_cpu_core_id", start_cpu_core_id, 0),
                                   ("concurrency_list", min(concurrency_list or [1]), 1)):
            if value < least:
                raise ConfigError(f"PipelineOptimizer: {name} is {value}, it must be at least {least}")
        self._optimizer = optimizer
        self.cut_list = cuts
        self.place_list = list(place_list or [])
        self.concurrency_list = list(concurrency_list or [1] * max(count, 1))
        self.queue_size = queue_size
        self.sync_steps = sync_steps
        self.start_cpu_core_id = start_cpu_core_id
        self.sections: list[Any] = []

    def minimize(self, loss: Any, startup_program: Any = None,
                 parameter_list: Iterable[Any] | None = None,
                 no_grad_set: Iterable[Any] | None = None,
                 ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Cut the program and let the wrapped optimizer minimize the loss.

        Returns:
            (optimize_ops, params_grads).
        """
        from psfleet.program.sections import split

        self.sections = split(loss, self.cut_list or [[loss]])
        return self._optimizer.minimize(loss, startup_program, parameter_list, no_grad_set)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)
