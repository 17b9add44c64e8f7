"""PipelineOptimizer: a program cut into sections, run in micro-batches by stages."""

from collections.abc import Iterable, Sequence
from typing import Any

from psfleet.environment import read_environment
from psfleet.errors import ConfigError, UsageError
from psfleet.optimizer.base import Optimizer
from psfleet.strategy import Pipeline, resolve

__all__ = ["PipelineOptimizer", "asked_by_launcher", "pipelining"]

_OWN = frozenset(
    {
        "__class__",
        "_cut",
        "_inner",
        "apply_gradients",
        "apply_optimize",
        "asked",
        "concurrency_list",
        "cut_list",
        "minimize",
        "place_list",
        "queue_size",
        "sections",
        "start_cpu_core_id",
        "sync_steps",
    }
)


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
        concurrency_list: For each section how many copies of it run; may be left out. In a job the
            strategy's `copies` decide.
        queue_size: How many micro-batches may wait before a section.
        sync_steps: Steps between two synchronisations of copies.
        start_cpu_core_id: The first CPU core to bind to.

    Attributes:
        sections: After `minimize`: psfleet.program.sections.Section, in the order of a step.
        asked: The strategy's part `pipeline`; None: as the launcher says.

    Raises:
        ConfigError: A list has another length than 2k - 1, or a number is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cut_list: Sequence[Any] | None = None,
        place_list: Sequence[Any] | None = None,
        concurrency_list: Sequence[int] | None = None,
        queue_size: int = 30,
        sync_steps: int = 1,
        start_cpu_core_id: int = 0,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"PipelineOptimizer: optimizer is {optimizer!r}, it must be an optimizer"
            )
        cuts = list(cut_list or ())
        count = 2 * len(cuts) - 1
        for name, said in (("place_list", place_list), ("concurrency_list", concurrency_list)):
            if said is not None and cuts and len(said) != count:
                raise ConfigError(
                    f"PipelineOptimizer: {len(cuts)} cuts make {count} sections, but "
                    f"{name} has {len(said)} entries"
                )
        for name, value, least in (
            ("queue_size", queue_size, 1),
            ("sync_steps", sync_steps, 1),
            ("start_cpu_core_id", start_cpu_core_id, 0),
            ("concurrency_list", min(concurrency_list or [1]), 1),
        ):
            if value < least:
                raise ConfigError(
                    f"PipelineOptimizer: {name} is {value}, it must be at least {least}"
                )
        own: dict[str, Any] = {
            "_inner": optimizer,
            "cut_list": cuts,
            "place_list": list(place_list or []),
            "concurrency_list": list(concurrency_list or [1] * max(count, 1)),
            "queue_size": queue_size,
            "sync_steps": sync_steps,
            "start_cpu_core_id": start_cpu_core_id,
            "sections": [],
            "asked": None,
        }
        for attribute, own_value in own.items():
            object.__setattr__(self, attribute, own_value)

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        grad_clip: Any = None,
        *,
        parameter_list: Iterable[Any] | None = None,
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Cut the program and let the wrapped optimizer minimize the loss. As Optimizer.minimize.

        Raises:
            UsageError: A cut is empty, not part of the loss, or behind a later one.
        """
        if grad_clip is not None:
            self._inner._grad_clip = grad_clip
        chosen = parameters if parameter_list is None else parameter_list
        pairs = self._inner.backward(loss, startup_program, chosen, no_grad_set)
        return self.apply_optimize(loss, startup_program, pairs), pairs

    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Second part of minimize, as Optimizer.apply_gradients."""
        return self.apply_optimize(None, None, params_grads)

    def apply_optimize(
        self, loss: Any, startup_program: Any, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Second part of minimize: cut the program, and update at the end of each run."""
        passes = {getattr(gradient, "backward_pass", None) for _, gradient in params_grads}
        found = passes.pop()
        if found is None or passes:
            raise UsageError(
                "a pipeline needs the gradients of one loss, as minimize() makes them; "
                "what is computed at once cannot be cut: build a program and minimize() its "
                "loss, or train without a pipeline"
            )
        self._cut(found)
        operations: list[Any] = self._inner.apply_optimize(loss, startup_program, params_grads)
        return operations

    def _cut(self, backward: Any) -> None:
        from psfleet.pipeline.pipelining import Pipelining
        from psfleet.program.sections import split

        sections = split(backward.loss, self.cut_list or [[backward.loss]])
        object.__setattr__(self, "sections", sections)
        parts = [section.records for section in sections if section.forward]
        asked = self.asked or asked_by_launcher() or Pipeline()
        backward.pipeline = Pipelining(
            asked.schedule,
            asked.stages,
            asked.micro_batches,
            asked.per_stage,
            parts if self.cut_list else None,
            min(self.queue_size, asked.queue_size),
        )

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


def pipelining(optimizer: Optimizer, asked: Pipeline) -> Optimizer:
    """The optimizer with a pipeline as a strategy asks for it; one of its own keeps its cuts."""
    inner: Any = optimizer
    while inner is not None:
        if isinstance(inner, PipelineOptimizer):
            object.__setattr__(inner, "asked", asked)
            return optimizer
        inner = object.__getattribute__(inner, "__dict__").get("_inner")
    made = PipelineOptimizer(optimizer)
    object.__setattr__(made, "asked", asked)
    return made


def asked_by_launcher() -> Pipeline | None:
    """What the launcher's strategy says of pipelines."""
    return resolve(None, read_environment().strategy).pipeline
