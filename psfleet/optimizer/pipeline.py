"""PipelineOptimizer: a program cut into sections, run in micro-batches by stages."""

from collections.abc import Iterable, Sequence
from typing import Any

from psfleet.errors import ConfigError
from psfleet.optimizer.base import Optimizer

__all__ = ["PipelineOptimizer"]

_OWN = frozenset({
    "__class__", "_inner", "_check", "minimize", "cut_list", "place_list", "concurrency_list",
    "queue_size", "sync_steps", "start_cpu_core_id", "sections"})


class PipelineOptimizer(Optimizer):
    """Cuts the program that it minimizes into 2k - 1 sections at k cuts.

    How many micro-batches, which schedule and how many stages there are is the strategy's matter
    (`psfleet-launch --pipeline`, or the part `pipeline` of a DistributedStrategy). Without one the
    sections run one after the other on the whole batch: the results are those of the program as it
    was. Everything but `minimize` is the wrapped optimizer's own.

    Args:
        optimizer: Updates the parameters.
        cut_list: For each forward piece the variables that it ends with; the last is [loss]. None:
            pieces of about equal work, as many as the strategy's stages need.
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
        own: dict[str, Any] = {"_inner": optimizer, "cut_list": cuts, "place_list": list(place_list or []),
               "concurrency_list": list(concurrency_list or [1] * max(count, 1)),
               "queue_size": queue_size, "sync_steps": sync_steps,
               "start_cpu_core_id": start_cpu_core_id, "sections": []}
        for attribute, own_value in own.items():
            object.__setattr__(self, attribute, own_value)

    def minimize(self, loss: Any, startup_program: Any = None,
                 parameters: Iterable[Any] | None = None, no_grad_set: Iterable[Any] | None = None,
                 grad_clip: Any = None, *, parameter_list: Iterable[Any] | None = None,
                 ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Cut the program and let the wrapped optimizer minimize the loss.

        Returns:
            (optimize_ops, params_grads).

        Raises:
            UsageError: A cut is empty, not part of the loss, or behind a later one.
        """
        from psfleet.pipeline.pipelining import Pipelining
        from psfleet.program.sections import split

        sections = split(loss, self.cut_list or [[loss]])
        object.__setattr__(self, "sections", sections)
        operations, pairs = self._inner.minimize(loss, startup_program, parameters, no_grad_set,
                                                 grad_clip, parameter_list=parameter_list)
        parts = [section.records for section in sections if section.forward]
        wish = Pipelining(parts=parts if self.cut_list else None, queue_size=self.queue_size)
        for _, gradient in pairs:
            gradient.backward_pass.pipeline = wish
        return operations, pairs

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)
