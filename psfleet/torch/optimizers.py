"""DistributedOptimizer for torch: trains a model whose weights are on the servers, with one push and one
pull a step.

`convert()` makes it from torch's optimizers. parameter_plan plans and checks the tables, rule_mapping finds
the servers' rule for each optimizer, model_hooks acts when the model is loaded, saved or run, and
optimizer_state_dicts reads and writes the optimizer's state dicts.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psfleet import fleet
from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import LossValue, checked
from psfleet.core.engine.gradients import Grad, SparseGrad, gradient_of
from psfleet.core.engine.runtime_interface import Gradient, Runtime, is_trained
from psfleet.core.graph.parameters.binding import watch
from psfleet.core.graph.parameters.parameter_client import ParameterClient
from psfleet.core.runtime.process_runtime import active, check_none_waits
from psfleet.core.runtime.strategy import Settings
from psfleet.optimizer.optimizer import Optimizer as FleetOptimizer
from psfleet.optimizer.outgoing_gradients import GradientMerger, GradientScaler
from psfleet.torch import optimizer_state_dicts
from psfleet.torch.embedding_rows import EmbeddingRows
from psfleet.torch.model_hooks import ModelHooks, SharedByCopies
from psfleet.torch.parameter_plan import (
    DenseBinding,
    Optimizers,
    ParameterPlan,
    SparseBinding,
    array_of,
    listed,
)
from psfleet.torch.strategy_support import check_strategy, recompute
from psfleet.torch.table_weight import untraced

Pair = tuple[DenseBinding | SparseBinding, Grad]
Ids = NDArray[np.int64]
_key_of = operator.attrgetter("spec.key")


@checked
class DistributedOptimizer(SharedByCopies, torch.optim.Optimizer):
    """torch optimizer that sends gradients to the servers, which hold the parameters and update them.

        opt = DistributedOptimizer(model, torch.optim.Adam(model.parameters(), lr=1e-3))
        loss_fn(model(x), y).backward()
        opt.step()

    `step()` sends all gradients in one push and gets the new dense parameters in one pull. The parameter
    groups are those of the given optimizers, so torch's schedulers can change the learning rates. All other
    options are fixed once the tables exist. All workers must make the optimizer with the same model, and
    training starts from the values of worker 0.

    Of the fleet's strategy, the parts gradient_merge, amp, localsgd and recompute take effect.

    Args:
        model: Model whose parameters and embeddings are trained. Their names become the tables' names.
        optimizers: One torch optimizer, or several for disjoint parameters. Their state moves to the
            servers, and their own step() then raises an error. None if every embedding has a psfleet
            optimizer.
        name: Prefix of the tables' names, to tell two models apart.
        runtime: Runtime that holds the tables. By default the fleet's.

    Raises:
        ConfigError: The servers have no exact rule for an optimizer or an option, or the strategy has a
            part that torch's optimizers do not support. Nothing was changed.
        UsageError: The optimizers do not fit the model. Nothing was changed.
    """

    _cut = False  # True if the model is split over pipeline stages

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers = None,
        *,
        name: str = "",
        runtime: Runtime | None = None,
    ) -> None:
        settings = fleet.settings()
        check_strategy(settings, cut=self._cut)
        originals = listed(optimizers)
        groups = [group for optimizer in originals for group in optimizer.param_groups]
        kinds = [type(optimizer) for optimizer in originals for _ in optimizer.param_groups]
        states = {p: state for optimizer in originals for p, state in _begun(optimizer.state)}
        plan = ParameterPlan(model, groups, kinds, name, states)
        self._prepare(model, settings)
        self._client = ParameterClient(runtime or active())
        self.runtime = self._client.runtime
        super().__init__(groups or [{"params": []}], _shared_defaults(originals))
        self._plan = plan
        self._settings = settings
        merge, amp = settings.gradient_merge, settings.amp
        self._merger: GradientMerger[DenseBinding | SparseBinding] | None = (
            GradientMerger(merge) if merge is not None else None
        )
        self._scaler = GradientScaler(amp) if amp is not None else None
        self._dense, self._sparse = self._make(plan, states)
        for optimizer in originals:
            _retire(optimizer)
        self._modules: list[nn.Module] | None = (
            None  # modules that this process trains, or None for all
        )
        self._narrow()
        owners = [
            binding.owner for binding in self._sparse if isinstance(binding.owner, FleetOptimizer)
        ]
        self._owners = list({id(owner): owner for owner in owners}.values())
        self._stale = False  # True if the model may have older values than the servers
        self.refresh()
        watch(self)
        self._hooks = ModelHooks(model, self._freshen, self._write_loaded)

    def _prepare(self, model: nn.Module, settings: Settings) -> None:
        """Change the model's forward pass if the strategy has `recompute`.

        Its blocks then drop their activations, and compute them again in the backward pass.
        """
        if settings.recompute is not None:
            recompute(model, settings.recompute)

    def _make(
        self, plan: ParameterPlan, states: Mapping[Tensor, Any]
    ) -> tuple[list[DenseBinding], list[SparseBinding]]:
        """Create the tables with worker 0's values and state. If trained tables exist, join them and write
        nothing.
        """
        joins_late = is_trained(self.runtime, plan.tables(self.runtime))
        dense, sparse = self._client.create(plan.make, joins_late)
        # A worker that joins a running job must not write: the tables have trained values, and its model
        # initial ones.
        if not joins_late:
            writes = [binding.rows.fill for binding in sparse]
            writes += optimizer_state_dicts.begun(self.runtime, dense, sparse, states)
            self._client.exclusively(lambda: _all(writes))
        for binding in sparse:
            binding.rows.content = None
        return dense, sparse

    def _wake(self, parameters: Collection[Tensor] = ()) -> None:
        """Create tables for parameters that were frozen until now."""
        if not self._plan.waking(parameters):
            return
        joins_late = is_trained(self.runtime, self._plan.dense_tables(self.runtime))
        tables = self._client.create(self._plan.make_dense, joins_late)
        self._dense = [*self._dense, *tables]
        self._narrow()
        self._bring(tables, [])

    @untraced
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        samples: int = 0,
        loss: LossValue | None = None,
    ) -> Any:
        """Push all gradients, then pull the new dense values. With gradient_merge, only every k-th call
        pushes.

        Args:
            closure: Function that computes the loss again, as in any torch optimizer.
            samples: Number of samples of this step, for the progress display.
            loss: Loss of this step, for the progress display. If it is NaN, --on-nan decides what happens.

        Returns:
            The closure's result.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._wake()
        if self._hooks.is_changed:
            self.upload()
        self._check_groups()
        push = self._merged(samples)
        if push is None:
            self._bring([], self._ahead())
        else:
            self._push(*push, loss)
        return value

    @torch.no_grad()
    def push_merged(self) -> None:
        """Push the gradients that gradient_merge has collected so far, from fewer than k steps.

        Call it after the last step, on every worker.
        """
        if self._merger is not None and (self._merger.waiting or self.runtime.worker_num > 1):
            self._push(*self._merger.take_waiting(), None)

    def _push(self, pairs: Sequence[Pair], samples: int, loss: float | None) -> None:
        self._client.send(self._gradients(pairs), samples, loss)
        for owner in self._owners:
            owner.advance()
        self.refresh()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does, including those of embeddings that have a psfleet optimizer."""
        super().zero_grad(set_to_none)
        for sparse in self._sparse:
            sparse.rows.weight.grad = None

    def clear_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as zero_grad() does."""
        self.zero_grad(set_to_none)

    def refresh(self) -> None:
        """Pull the dense parameters now, in one call together with the rows that prefetch() predicts."""
        self._bring(self._own, self._ahead())
        self._stale = len(self._own) < len(self._dense)

    def drop_values(self) -> None:
        """Mark all values in the model as out of date, so that its next forward pass pulls them."""
        self._stale = True
        for sparse in self._sparse:
            sparse.rows.forget()

    def upload(self) -> None:
        """Write the model's dense parameters into the tables, after the script has changed them.

            with torch.no_grad():
                model.fc.weight.clamp_(-1, 1)
            opt.upload()

        Every worker must call it. The values of worker 0 are written, and the optimizer state is kept.
        """
        self._hooks.is_changed = False
        self._client.exclusively(self._write)
        self.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise a UsageError: parameters cannot be added once the tables exist."""
        if hasattr(self, "_dense"):
            raise UsageError(
                "add_param_group was called on a distributed optimizer, whose tables are "
                "made already; pass every parameter to the optimizers it is made of"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the present optimizer state, read from the servers, in a layout that torch's optimizers
        can load too.

        Three entries are added to torch's layout: `tables` has the state of embeddings whose ids are any
        int64 or that have a psfleet optimizer, `loss_scaling` the state of amp, and `psfleet` the version
        of the layout.

        Raises:
            UsageError: A state dict cannot hold the state. The message says how to save it instead.
        """
        optimizer_state_dicts.check_saved(self._settings, self.runtime.worker_num)
        if self._merger is not None:
            check_none_waits(self._merger.waiting, "a state dict")
        # Torch's own state_dict() makes the layout, so that the layout fits every version of torch.
        # `self.state` has the servers' state only during this call, as training never reads it.
        self.state.update(optimizer_state_dicts.entries(self.runtime, self._dense, self._sparse))
        try:
            state = super().state_dict()
        finally:
            self.state.clear()
        state[optimizer_state_dicts.HEADER] = optimizer_state_dicts.version()
        tables = optimizer_state_dicts.table_entries(self._sparse)
        if tables:
            state["tables"] = tables
        if self._scaler is not None:
            state["loss_scaling"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write a saved optimizer state into the tables: one of `state_dict()`, or of the torch optimizer
        before its conversion.

        Every worker must call it, and the state of worker 0 is written. A parameter without saved state
        gets initial state, as in torch.

        Raises:
            UsageError, ShapeError: The state belongs to another model, other optimizers or other options.
                Nothing was changed.
        """
        # Torch's own load_state_dict() checks and parses the state. The result is then taken out of this
        # object again, because nothing may change before the checks below have passed.
        groups = self.param_groups
        try:
            super().load_state_dict(state_dict)
            new_groups, states = self.param_groups, dict(self.state)
        finally:
            self.param_groups = groups
            self.state = defaultdict(dict)
        optimizer_state_dicts.check_version(state_dict)
        tables = state_dict.get("tables", {})
        self._wake(dict(_begun(states)))
        writes = optimizer_state_dicts.prepared(
            self.runtime, self._dense, self._sparse, states, tables
        )
        self._check_groups(new_groups)
        for group, new in zip(groups, new_groups, strict=True):
            group.update(new)  # in place, because schedulers and bindings refer to the group
        for table in self._sparse:
            schedule = tables.get(table.spec.name, {}).get("schedule")
            if schedule is not None and isinstance(table.owner, FleetOptimizer):
                table.owner.set_state_dict(schedule)
        if self._scaler is not None and "loss_scaling" in state_dict:
            self._scaler.set_state_dict(state_dict["loss_scaling"])
        if self._merger is not None:
            self._merger.drop_waiting()
        self._client.exclusively(lambda: _all(writes))
        self.refresh()

    def narrow(self, modules: Iterable[nn.Module]) -> None:
        """Train only these modules in this process. The values of all others are pulled when the whole
        model is used.
        """
        self._modules = list(modules)
        self._narrow()

    def _narrow(self) -> None:
        """Choose the tables that this process trains."""
        self._own, self._own_rows = self._dense, self._sparse
        if self._modules is not None:
            stage_parameters = {id(p) for part in self._modules for p in part.parameters()}
            self._own = [dense for dense in self._dense if id(dense.parameter) in stage_parameters]
            self._own_rows = [
                sparse for sparse in self._sparse if id(sparse.rows.weight) in stage_parameters
            ]

    def _merged(self, samples: int) -> tuple[list[Pair], int] | None:
        """Return the gradients to push and their number of samples, or None if gradient_merge does not push
        yet.
        """
        pairs: list[Pair] = []
        bindings: list[DenseBinding | SparseBinding] = [*self._own, *self._own_rows]
        for binding in bindings:
            grad = binding.gradient()
            if grad is not None:
                pairs.append((binding, grad))
        if self._merger is None:
            return pairs, samples
        # Copies, because zero_grad() may set the memory of these gradients to zero before they are pushed.
        return self._merger.take([(binding, _copied(grad)) for binding, grad in pairs], samples)

    def _gradients(self, pairs: Sequence[Pair]) -> list[Gradient]:
        """Return the gradients as the push sends them, scaled by amp if it is on."""
        gradients = [gradient_of(binding.spec.key, grad, binding.rate()) for binding, grad in pairs]
        if self._scaler is None:
            return gradients
        outgoing = self._scaler.take(
            [(binding, pushed) for (binding, _), pushed in zip(pairs, gradients, strict=True)]
        )
        return [gradient for _, gradient in outgoing]

    @torch.no_grad()
    def _bring(
        self, bindings: Sequence[DenseBinding], ahead: Sequence[tuple[EmbeddingRows, Ids]]
    ) -> None:
        """Pull dense parameters, and rows for the next lookups, in one call."""
        keys = [*map(_key_of, bindings)]
        values, rows = self._client.pull(keys, [(rows_state.key, ids) for rows_state, ids in ahead])
        for dense, array in zip(bindings, values, strict=True):
            dense.set(array)
        for (rows_state, ids), array in zip(ahead, rows, strict=True):
            rows_state.hold(ids, array)

    def _ahead(self) -> list[tuple[EmbeddingRows, Ids]]:
        """Drop all cached lookups, and return the predicted lookups of the next step: the rows and ids of
        each.
        """
        ahead: list[tuple[EmbeddingRows, Ids]] = []
        for sparse in self._own_rows:
            sparse.rows.forget()
            for ids in sparse.rows.expected():
                ahead.append((sparse.rows, ids))
        return ahead

    def _check_groups(self, groups: Sequence[dict[str, Any]] | None = None) -> None:
        """Refuse options that differ from those that the tables were made with. The learning rate may differ.

        Args:
            groups: Parameter groups to check, or None for this optimizer's.
        """
        for settings in self._plan.groups:
            if groups is None:
                settings.check(settings.group)
                continue
            group_index = next(
                i for i, own_group in enumerate(self.param_groups) if own_group is settings.group
            )
            settings.check(settings.group | groups[group_index], " of the state dict")

    @untraced
    def _freshen(self, is_forward: bool) -> None:
        """Pull values of the model that are out of date, before it computes or is saved."""
        for dense in self._own if is_forward else ():
            dense.check_type(dense.parameter)
        if self._hooks.is_changed:
            self.upload()
        if self._stale:
            self._bring(self._dense, [])
            self._stale = False

    def _write(self) -> None:
        for dense in self._dense:
            self._client.set_weights(dense.spec, array_of(dense.parameter))

    def _write_loaded(self, model: nn.Module) -> None:
        """Write the values that the model has just loaded into the tables."""
        model_parameters = {id(parameter) for parameter in model.parameters()}
        for dense in self._dense:
            if id(dense.parameter) not in model_parameters:
                raise UsageError(
                    f"parameter {dense.spec.name!r} of the model is another object than the one that "
                    "was converted, so it would not be trained; load without assign=True, and "
                    "convert again if you have replaced a module"
                )
        self.upload()


def _all(writes: Iterable[Callable[[], None]]) -> None:
    for write in writes:
        write()


def _begun(states: Mapping[Tensor, Any]) -> Iterator[tuple[Tensor, Any]]:
    for parameter, state in states.items():
        if state and float(state.get("step", 1)):  # Adagrad has state before its first step
            yield parameter, state


def _shared_defaults(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the options that all the optimizers have, with the defaults of the first optimizer.

    Torch's schedulers read them to find out which options exist.
    """
    if not optimizers:
        return {}
    first, *other_defaults = (optimizer.defaults for optimizer in optimizers)
    return {key: first[key] for key in first if all(key in defaults for defaults in other_defaults)}


def _retire(optimizer: torch.optim.Optimizer) -> None:
    """Make a converted torch optimizer raise an error in calls that would have no effect or return
    old state.
    """
    for name in ("step", "state_dict", "load_state_dict", "add_param_group"):
        setattr(optimizer, name, _refusal(getattr(optimizer, name)))
    optimizer.state.clear()
    # A scheduler made before the conversion warns unless its optimizer has stepped. It may still set the
    # learning rates, so prevent the warning.
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _copied(grad: Grad) -> Grad:
    if isinstance(grad, SparseGrad):
        return grad.with_rows(grad.rows.copy())
    return np.array(grad)


def _refusal(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # keeps the mark that tells schedulers the method is wrapped
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise UsageError(
            f"{method.__name__}() was called on an optimizer whose parameters are on the servers; "
            "call it on the optimizer that psfleet.torch returned"
        )

    return refuse
