"""Optimizers that wrap another optimizer: RecomputeOptimizer, LookAhead and PipelineOptimizer.

RecomputeOptimizer and PipelineOptimizer pass every call on to the wrapped optimizer except the few methods
that they change, so that code which reads the learning rate or the state works with both. LookAhead is an
optimizer with its own state, the slow weights.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.base.validation.annotations import (
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Range,
    checked,
)
from psfleet.core.engine.eviction_reader import EvictionReader
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.engine.schema.table import DecaySpec
from psfleet.core.graph.parameters.binding import BoundTable, BoundTables, tables
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.stages import StagePosition, here
from psfleet.core.runtime.strategy import PipelineSettings, RecomputeSettings, resolve
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Optimizer, Pairs
from psfleet.optimizer.outgoing_gradients import GradientScaler

COMMON = frozenset({"__class__", "_inner", "minimize"})


Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class WrappingOptimizer(Optimizer):
    """Base of wrappers. All attributes are the wrapped optimizer's, except those whose names are in `own`."""

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


class RecomputeOptimizer(WrappingOptimizer):
    """Optimizer that saves memory: it drops activations, and computes them again in the backward pass.

        optimizer = RecomputeOptimizer(Adam(0.001))
        optimizer._set_checkpoints([hidden1, hidden2])  # the activations to keep
        optimizer.minimize(loss)

    Methods and attributes except `backward`, `minimize` and `load` are the wrapped optimizer's.

    Args:
        optimizer: Optimizer that updates the parameters.
    """

    own = COMMON | {"_checkpoints", "_set_checkpoints", "backward", "load"}

    @checked
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, _checkpoints=None)

    def _set_checkpoints(self, checkpoints: Any) -> None:
        """Choose the activations to keep.

        Args:
            checkpoints: Variables, or names of variables or layers. Data and parameters are always kept, so
                naming them changes nothing. With psfleet.core.graph.program.backward.Automatic(budget) the
                first run chooses the activations.
        """
        from psfleet.core.graph.program.backward import check_checkpoints

        check_checkpoints(checkpoints)
        object.__setattr__(self, "_checkpoints", checkpoints)

    @checked
    def load(self, stat_dict: dict[str, Any]) -> None:
        """Raise UsageError, as in Paddle. Use `set_state_dict`.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "RecomputeOptimizer.load is not supported; call load or set_state_dict of the "
            f"{type(self._inner).__name__} that it wraps"
        )

    @checked
    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[tuple[Any, Any]]:
        """Differentiate as the wrapped optimizer does, and compute dropped activations again.

        Raises:
            UsageError: No checkpoints were set, or the loss is eager.
        """
        from psfleet.core.graph.program.backward import append_backward

        if self._checkpoints is None:
            raise UsageError("RecomputeOptimizer has no checkpoints; call _set_checkpoints first")
        if getattr(loss, "value", None) is not None:
            raise UsageError("the loss has a value already; recompute works in programs")
        targets = self._inner._parameters if parameter_list is None else parameter_list
        return list(append_backward(loss, targets, no_grad_set, callbacks, self._checkpoints))


def recomputing(optimizer: Optimizer, settings: RecomputeSettings) -> RecomputeOptimizer:
    """Return a RecomputeOptimizer around the optimizer, with the strategy's settings."""
    from psfleet.core.graph.program.backward import Automatic

    wrapper = RecomputeOptimizer(optimizer)
    wrapper._set_checkpoints(list(settings.checkpoints) or Automatic(settings.budget))
    return wrapper


class LookAhead(Optimizer):
    """Lookahead (Zhang et al., 2019): every k updates, slow += alpha * (fast - slow), then fast = slow.

        optimizer = LookAhead(SGD(0.1), alpha=0.5, k=5)

    The *fast* weights are the parameters, which the inner optimizer updates. Worker 0 stores the *slow*
    weights. They start as a copy of the fast weights after the first update, as in Paddle. On a cluster all
    workers wait for each other at every k-th update.

    Args:
        inner_optimizer: Optimizer that updates the fast weights.
        alpha: Step of the slow weights toward the fast weights, as a fraction of their difference, in [0, 1].
        k: Number of updates between two moves of the slow weights, at least 1.
        name: Name in error messages.
    """

    works_on_worker = True

    @checked
    def __init__(
        self,
        inner_optimizer: Optimizer,
        alpha: Annotated[float, Range(0, 1)] = 0.5,
        k: PositiveInt = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.alpha = np.float32(alpha)
        self.k = k
        self._parameters = inner_optimizer._parameters
        self._slow: dict[str, tuple[Ids | None, Floats]] = {}
        self._evictions: dict[str, EvictionReader] = {}
        inner_optimizer.streams_evictions = True

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """Return the inner optimizer's update rule for a parameter."""
        return self.inner_optimizer.rule(parameter)

    def decay(self, parameter: Parameter | None = None) -> DecaySpec:
        """Return the inner optimizer's weight decay for a parameter."""
        return self.inner_optimizer.decay(parameter)

    def get_lr(self) -> float:
        """Return the learning rate of the inner optimizer's next update."""
        return self.inner_optimizer.get_lr()

    def current_step_lr(self) -> float:
        """Return the learning rate of the inner optimizer's last update."""
        return self.inner_optimizer.current_step_lr()

    def get_opti_var_name_list(self) -> list[str]:
        """Return the inner optimizer's names and, for each parameter, `name.slow`."""
        slow = [f"{name}.slow" for name in self._slow]
        return self.inner_optimizer.get_opti_var_name_list() + slow

    @checked
    def set_lr(self, value: NonNegative) -> None:
        """Set the inner optimizer's learning rate."""
        self.inner_optimizer.set_lr(value)

    @checked
    def set_lr_scheduler(self, scheduler: Any) -> None:
        """Set the inner optimizer's schedule."""
        self.inner_optimizer.set_lr_scheduler(scheduler)

    def clip_by(self, clip: ClipGradBase) -> None:
        """Set the clip of the inner optimizer, which does the clipping."""
        self.inner_optimizer.clip_by(clip)

    def scale(self, scaler: GradientScaler) -> None:
        """Set the scaler of the inner optimizer, which sends the gradients."""
        self.inner_optimizer.scale(scaler)

    def _bind(self, parameter: Parameter, by_rows: bool = False) -> BoundTable:
        return self.inner_optimizer._bind(parameter, by_rows)

    def _update(self, pairs: Pairs, samples: int, loss: float | None) -> None:
        inner = self.inner_optimizer
        inner.apply_values(pairs, samples, loss)
        home = tables()
        bound_tables = [inner._bind(p) for p, _ in pairs if p.trainable]
        self._known.update({bound.parameter.name: bound.parameter for bound in bound_tables})
        self._updates += 1
        if home.runtime.worker_index == 0:
            for bound in bound_tables:
                name = bound.parameter.name
                if bound.spec.streams_evictions and name not in self._evictions:
                    self._evictions[name] = EvictionReader(home.runtime, bound.spec)
                    _evicted(home, self._evictions[name])
                if name not in self._slow:
                    self._slow[name] = _weights(home, bound)
        if self._updates % self.k == 0:
            home.exclusively(lambda: self._look(home, bound_tables))

    def _look(self, home: BoundTables, bound_tables: list[BoundTable]) -> None:
        for bound in bound_tables:
            name = bound.parameter.name
            state = home.runtime.read_table(bound.key)
            reader = self._evictions.get(name)
            evicted = np.zeros(0, np.int64) if reader is None else _evicted(home, reader)
            slow = _joined(self._slow[name], state, bound, evicted)
            slow += self.alpha * (state.values[0] - slow)
            self._slow[name] = (state.ids, slow)
            state.values[0] = slow
            home.runtime.write_table(bound.key, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and, on worker 0, the slow weights `name.slow` of each
        parameter.

        For a parameter whose rows may have any id, `name.slow_ids` has the ids of the rows.
        """
        self._check_none_waits()
        state = self.inner_optimizer.state_dict()
        for name, (ids, slow) in self._slow.items():
            state[f"{name}.slow"] = slow.copy()
            if ids is not None:
                state[f"{name}.slow_ids"] = ids
        return state

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`."""
        self.inner_optimizer.set_state_dict(state_dict)
        self._updates = self.inner_optimizer._updates
        if self.merger is not None:
            self.merger.drop_waiting()
        self._slow = {
            key.removesuffix(".slow"): (state_dict.get(f"{key}_ids"), np.array(values, np.float32))
            for key, values in state_dict.items()
            if key.endswith(".slow")
        }


def _weights(home: BoundTables, bound: BoundTable) -> tuple[Ids | None, Floats]:
    home.runtime.flush()
    state = home.runtime.read_table(bound.key)
    return state.ids, state.values[0]


def _evicted(home: BoundTables, reader: EvictionReader) -> Ids:
    """Return the ids whose rows were evicted since the last call."""
    if len(reader.position) != max(home.runtime.server_num, 1):
        reader.position = ()  # positions start again when the number of servers changes
    return np.concatenate([np.zeros(0, np.int64), *(eviction.ids for eviction in reader)])


def _joined(
    slow: tuple[Ids | None, Floats], state: TableState, bound: BoundTable, evicted: Ids
) -> Floats:
    """Return the slow weights in the order of the table's rows.

    A row that did not exist at the last move gets its initial values as slow weights. So does a row that was
    removed since then (by eviction or `shrink`) and was created again.

    Args:
        slow: Ids and slow weights after the last move. The ids are None for a dense table.
    """
    ids, values = slow
    if ids is None or state.ids is None:
        return values
    spec = bound.spec
    whole = initial_rows(state.ids, spec.dim, spec.initializer, spec.seed, spec.name)
    stay = np.isin(ids, state.ids) & ~np.isin(ids, evicted)
    whole[np.searchsorted(state.ids, ids[stay])] = values[stay]
    return whole


class PipelineOptimizer(WrappingOptimizer):
    """Optimizer that divides a program into sections, which the stages of a pipeline can run.

        optimizer = PipelineOptimizer(Adam(0.001), cut_list=[[hidden], [loss]])
        optimizer.minimize(loss)

    k cuts give 2k - 1 sections: k of the forward pass (the last one includes its backward part) and k - 1
    of the backward pass. The strategy sets the number of stages, the micro-batches and the schedule
    (`psfleet-launch --pipeline`, or the part `pipeline` of a DistributedStrategy). Without a strategy the
    sections run one after the other on the whole batch, with the results of the undivided program. Methods
    and attributes except `minimize` are the wrapped optimizer's.

    Args:
        optimizer: Optimizer that updates the parameters.
        cut_list: For each forward section the list of variables at its end. The last entry is [loss]. None
            makes sections of about equal work, as many as the strategy's stages need.
        place_list: Device of each section. If given, a stage process whose sections are on CPUPlace pins
            itself to as many cores as its BLAS has threads. Sections on CUDAPlace run on the CPU too, but
            their process is not pinned.
        concurrency_list: Wanted number of copies of each section. In a job the strategy's `copies` is used,
            with a warning if it is smaller.
        queue_size: Number of micro-batches that may wait before a section.
        sync_steps: Number of steps between two synchronisations of copies. Must be 1, because copies share
            their weights on the servers.
        start_cpu_core_id: Number of the first core that the first process is pinned to.

    Attributes:
        sections: Sections after `minimize`, in the order of a step
            (psfleet.core.graph.program.pipeline.cutting.Section).
        asked: Pipeline settings of the script's strategy, or None to use the launcher's settings.

    Raises:
        ConfigError: A list has another length than 2k - 1, or a number is out of range.
    """

    own = COMMON | {
        "_cut",
        "_settle_process",
        "apply_gradients",
        "apply_optimize",
        "asked",
        "concurrency_list",
        "cut_list",
        "place_list",
        "queue_size",
        "sections",
        "start_cpu_core_id",
        "sync_steps",
    }

    @checked
    def __init__(
        self,
        optimizer: Optimizer,
        cut_list: Sequence[Any] | None = None,
        place_list: Sequence[Any] | None = None,
        concurrency_list: Sequence[PositiveInt] | None = None,
        queue_size: PositiveInt = 30,
        sync_steps: PositiveInt = 1,
        start_cpu_core_id: NonNegativeInt = 0,
    ) -> None:
        cuts = [] if cut_list is None else list(cut_list)
        count = 2 * len(cuts) - 1
        for name, entries in (("place_list", place_list), ("concurrency_list", concurrency_list)):
            if entries is not None and cuts and len(entries) != count:
                raise ConfigError(
                    f"PipelineOptimizer: {len(cuts)} cuts make {count} sections, but "
                    f"{name} has {len(entries)} entries"
                )
        if sync_steps > 1:
            raise ConfigError(
                f"PipelineOptimizer: sync_steps is {sync_steps}, but copies of a section have one set "
                "of weights, on the servers, and meet in every step; leave it at 1 (the strategy "
                "gradient_merge makes updates rarer)"
            )
        super().__init__(
            optimizer,
            cut_list=cuts,
            place_list=[] if place_list is None else list(place_list),
            concurrency_list=list(concurrency_list or [1] * max(count, 1)),
            queue_size=queue_size,
            sync_steps=sync_steps,
            start_cpu_core_id=start_cpu_core_id,
            sections=[],
            asked=None,
        )

    @checked
    def apply_optimize(
        self, loss: Any, startup_program: Any, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Divide the program into sections, and add an update at its end: the second part of `minimize`."""
        passes = {getattr(gradient, "backward_pass", None) for _, gradient in params_grads}
        backward = passes.pop() if passes else None
        if backward is None or passes:
            raise UsageError(
                "a pipeline needs the gradients of one loss, as minimize() makes them; "
                "what is computed at once cannot be cut: build a program and minimize() its "
                "loss, or train without a pipeline"
            )
        self._cut(backward)
        operations: list[Any] = self._inner.apply_optimize(loss, startup_program, params_grads)
        return operations

    def _cut(self, backward: Any) -> None:
        from psfleet.core.graph.program.pipeline.cutting import PipelineSpec, split

        sections = split(backward.loss, self.cut_list or [[backward.loss]])
        object.__setattr__(self, "sections", sections)
        parts = [section.records for section in sections if section.forward]
        settings = self.asked or asked_by_launcher() or PipelineSettings()
        backward.pipeline = PipelineSpec(
            settings.schedule,
            settings.stages,
            settings.micro_batches,
            parts if self.cut_list else None,
            min(self.queue_size, settings.queue_size),
        )
        if here().processes > 1 and self.cut_list:
            self._settle_process(here())

    def _settle_process(self, position: StagePosition) -> None:
        """Pin this process to its stage's cores, and warn if there are fewer copies than `concurrency_list`
        has."""
        from psfleet.core.graph.execution.executor import CUDAPlace
        from psfleet.core.graph.program.pipeline.cutting import pin

        parts = len(self.cut_list)
        parts_per_stage = max(parts // position.stages, 1)
        own_parts = range(
            position.stage * parts_per_stage, min((position.stage + 1) * parts_per_stage, parts)
        )
        if self.place_list and not all(
            isinstance(self.place_list[i], CUDAPlace) for i in own_parts
        ):
            pin(position, self.start_cpu_core_id)
        sections = {i for part in own_parts for i in (part, 2 * parts - 2 - part)}
        copies = max((self.concurrency_list[i] for i in sections), default=1)
        if copies > position.copies[position.stage] and position.copy == 0:
            warnings.warn(
                f"concurrency_list asks for {copies} copies of stage {position.stage}, and the job was "
                f"started with {position.copies[position.stage]}; set copies in the strategy's part pipeline",
                stacklevel=2,
            )


def pipelining(optimizer: Optimizer, settings: PipelineSettings) -> Optimizer:
    """Return a PipelineOptimizer around the optimizer, with the strategy's settings. If the optimizer is a
    PipelineOptimizer already, it keeps its cuts.
    """
    inner: Any = optimizer
    while inner is not None:
        if isinstance(inner, PipelineOptimizer):
            object.__setattr__(inner, "asked", settings)
            return optimizer
        inner = object.__getattribute__(inner, "__dict__").get("_inner")
    pipeline = PipelineOptimizer(optimizer)
    object.__setattr__(pipeline, "asked", settings)
    return pipeline


def asked_by_launcher() -> PipelineSettings | None:
    """Return the pipeline settings of the launcher's strategy."""
    return resolve(None, read_environment().strategy).pipeline
