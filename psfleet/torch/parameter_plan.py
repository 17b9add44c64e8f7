"""Plan of a distributed optimizer: the table, rule and learning rate that each torch parameter gets.

psfleet.torch.convert builds a ParameterPlan before it changes anything. The plan refuses a model or an
optimizer that the servers could not train exactly as torch would, so an error leaves neither a table on the
servers nor a half-converted model. Then the plan creates the tables. It returns a DenseBinding for each
dense parameter and a SparseBinding for each embedding. At every step, the optimizer in
psfleet.torch.optimizers asks these bindings for gradients and learning rates. Everything runs in the thread
of the training script.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.engine.schema.table import TableSpec, key_of
from psfleet.core.graph.parameters.parameter import note_dense_rows
from psfleet.core.graph.parameters.parameter_client import ParameterClient
from psfleet.optimizer.optimizer import Optimizer as FleetOptimizer
from psfleet.torch.embedding_rows import EmbeddingRows
from psfleet.torch.embeddings import TableModule
from psfleet.torch.rule_mapping import RuleMapping, formula_of, slots_of
from psfleet.torch.table_weight import TableWeight, as_tensor

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


_living: "weakref.WeakSet[DenseBinding]" = weakref.WeakSet()
"""Bindings of all optimizers in use, to notice that a model is converted a second time.

The references are weak, so that a script may drop a model and its optimizer and convert another model.
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class DenseBinding:
    """Connection between a dense parameter and its table on the servers.

    Attributes:
        group: The optimizer's parameter group, whose "lr" is the learning rate.
        version: Torch's change counter of the parameter (`_version`) when it last got values from the
            servers. A higher count at the next step means that the script has changed the parameter in
            place.
    """

    parameter: nn.Parameter
    spec: TableSpec
    group: dict[str, Any]
    version: int = -1

    def set(self, values: NDArray[np.float32]) -> None:
        """Copy values from the servers into the parameter."""
        self.parameter.copy_(as_tensor(values))
        self.version = self.parameter._version

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return float(self.group["lr"])

    def gradient(self) -> NDArray[np.float32] | None:
        """Return the gradients summed since zero_grad, or None if no backward pass has run.

        Raises:
            UsageError: The gradient is sparse or not float32, or the script has changed the parameter in
                place, so that its values differ from those on the servers.
        """
        grad = self.parameter.grad
        if self.parameter._version != self.version:
            raise UsageError(
                f"parameter {self.spec.name!r} was changed in place since the last step, which the servers "
                "did not see: leave max_norm out of embeddings; after a change by hand call opt.upload() to "
                "make the values the fleet's, or opt.refresh() to bring the fleet's"
            )
        if grad is None:
            return None
        if grad.is_sparse:
            raise UsageError(
                f"parameter {self.spec.name!r} has a dense table and got a sparse gradient; look its rows up "
                "with nn.Embedding(sparse=True), which becomes a table of rows, or with sparse=False"
            )
        self.check_type(grad)
        return array_of(grad)

    def check_type(self, values: Tensor) -> None:
        """Refuse values that `.half()` or a similar call has converted from float32 to another dtype."""
        if values.dtype != torch.float32:
            raise UsageError(
                f"parameter {self.spec.name!r} has become {values.dtype}, and servers hold torch.float32; "
                "leave out .half(), .bfloat16() and .double(), and compute in 16 bits with "
                "torch.autocast"
            )


@dataclass(frozen=True, slots=True)
class SparseBinding:
    """Connection between an embedding and its table of rows.

    Attributes:
        owner: Holder of the rows' learning rate: a parameter group of a torch optimizer, or the embedding's
            psfleet optimizer.
    """

    rows: EmbeddingRows
    owner: dict[str, Any] | FleetOptimizer

    @property
    def spec(self) -> TableSpec:
        """Definition of the rows' table."""
        return self.rows.spec

    def gradient(self) -> SparseGrad | None:
        """Return the rows' gradients summed since zero_grad, or None if no backward pass has used
        the rows.
        """
        return self.rows.gradient()

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        owner = self.owner
        return owner.get_lr() if isinstance(owner, FleetOptimizer) else float(owner["lr"])


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Options of a parameter group when its tables were made, to notice changes that would have no effect.

    A table keeps the rule that it was created with; only the learning rate is sent with each push. So a
    scheduler may change "lr". A change of "betas" or "momentum" would be ignored, and `check` refuses it.

    Attributes:
        group: The parameter group itself, whose options a script may change.
        rows: True for rows of embeddings, False for dense parameters.
        options: Copy of the group's options when the tables were made.
    """

    kind: type[torch.optim.Optimizer]
    group: dict[str, Any]
    rows: bool
    formula: RuleMapping
    options: dict[str, Any]

    def check(self, group: dict[str, Any], where: str = "") -> None:
        """Refuse options that would need another rule than the tables have.

        Args:
            group: Options to check, of the parameter group or of a state dict.
            where: Origin of the options, for the message, such as " of the state dict".

        Raises:
            UsageError: An option other than "lr" has changed, and the change matters to the rule.
        """
        if group == {**self.options, "params": group["params"], "lr": group["lr"]}:
            return
        before = {
            key: was
            for key, was in self.options.items()
            if key not in ("params", "lr") and group[key] != was
        }
        if before and formula_of(self.kind, group, rows=self.rows) != self.formula:
            changes = (
                f"{key} changed from {was!r} to {group[key]!r}" for key, was in before.items()
            )
            raise UsageError(
                f"torch.optim.{self.kind.__name__}{where}: {', '.join(changes)}; on the servers "
                "only 'lr' may change, so give the others their values before convert() "
                "(OneCycleLR and CyclicLR: set cycle_momentum=False)"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _UntrainedParameter:
    """Dense parameter that was frozen when the tables were made, and its parameter group."""

    parameter: nn.Parameter
    group: dict[str, Any]
    kind: type[torch.optim.Optimizer]


class ParameterPlan:
    """Tables that a model and its optimizers need. The constructor checks everything before a table is
    created.

    Args:
        model: The model, with its embeddings already replaced by psfleet's (TableModule).
        kinds: Class of each group's optimizer.
        prefix: Prefix of the table names, without the dot; may be empty.
        states: State of each parameter that was trained before the conversion.

    Attributes:
        groups: Settings of each group. A group with both dense parameters and rows has two entries.

    Raises:
        UsageError: A parameter belongs to no optimizer or to two, or the model was converted before.
        ConfigError: psfleet has no rule that computes exactly what an optimizer computes.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        kinds: list[type[torch.optim.Optimizer]],
        prefix: str,
        states: Mapping[Tensor, Any],
    ) -> None:
        self._modules = _tables_of(model)
        self._check_unconverted(model)
        self._renormed = dict(_renormed(model))
        self._untied = _untied(model)
        self._names = {id(p): _joined(prefix, name) for name, p in model.named_parameters()}
        self._prefix = prefix
        self._group_of: dict[int, tuple[dict[str, Any], RuleMapping]] = {}
        self._parameters: list[nn.Parameter] = []
        self._begun = {id(parameter): state for parameter, state in states.items()}
        self._resting: list[_UntrainedParameter] = []
        self.groups: list[GroupSettings] = []
        for group, kind in zip(groups, kinds, strict=True):
            self._take(group, kind)
        for name, module in self._modules.items():
            if module.optimizer is None and id(module.weight) not in self._group_of:
                raise UsageError(
                    f"no optimizer has the embedding {name!r}; give it `optimizer=`, or pass "
                    "its weight to a torch optimizer"
                )
        if not self._parameters and not self._modules:
            raise UsageError(
                "the optimizers train no parameter of the model; give them model.parameters()"
            )

    def _check_unconverted(self, model: nn.Module) -> None:
        """Refuse a model if another distributed optimizer already trains one of its parameters or
        embeddings.
        """
        trained = {id(binding.parameter) for binding in _living}
        names = [name for name, p in model.named_parameters() if id(p) in trained]
        names += [name for name, module in self._modules.items() if module.table.bound]
        if names:
            raise UsageError(
                f"{names[0]!r} of the model has an optimizer already: the model was converted before; use "
                "the model and the optimizer that the first call returned, or build a new model"
            )

    def _take(self, group: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
        self_optimized = {id(m.weight) for m in self._modules.values() if m.optimizer is not None}
        for parameter in group["params"]:
            # An embedding with a psfleet optimizer is updated by that, although `model.parameters()` hands
            # its weight to the torch optimizer too.
            if id(parameter) in self_optimized:
                continue
            if parameter.requires_grad or id(parameter) in self._begun:
                self._join(parameter, group, kind)
            elif not isinstance(parameter, TableWeight):
                self._resting.append(_UntrainedParameter(parameter, group, kind))

    def _join(
        self, parameter: nn.Parameter, group: dict[str, Any], kind: type[torch.optim.Optimizer]
    ) -> None:
        """Add a parameter to the plan, with the rule for the options of its group."""
        if id(parameter) in self._renormed:
            raise ConfigError(self._renormed[id(parameter)])
        rows = isinstance(parameter, TableWeight)
        settings = next((g for g in self.groups if g.group is group and g.rows == rows), None)
        # A group with both dense parameters and rows has two entries, because their rules differ.
        if settings is None:
            formula = formula_of(kind, group, rows=rows)
            settings = GroupSettings(kind, group, rows, formula, dict(group))
            self.groups.append(settings)
        self._admit(parameter)
        self._group_of[id(parameter)] = (group, settings.formula)
        # Translate the state only to raise an error, before any table exists, if it does not fit the rule.
        state = self._begun.get(id(parameter))
        if state is not None:
            slots_of(
                self._names[id(parameter)], settings.formula.rule, tuple(parameter.shape), state
            )
        if not rows:
            self._parameters.append(parameter)

    def waking(self, parameters: Collection[Tensor] = ()) -> bool:
        """Plan tables for parameters that were frozen at the conversion and are to be trained from now on.

        After this call `make_dense` makes tables for these parameters only.

        Args:
            parameters: Parameters for which a loaded state dict has state. These get a table even if they
                are still frozen.

        Returns:
            True if any parameter needs a new table.

        Raises:
            UsageError: A parameter has a sparse gradient. It needs a sparse table, which can only be made
                at the conversion.
        """
        if not self._resting:
            return False
        ids = {id(parameter) for parameter in parameters}
        awake = [r for r in self._resting if r.parameter.requires_grad or id(r.parameter) in ids]
        for resting in awake:
            parameter = resting.parameter
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"the embedding's weight {self._names[id(parameter)]!r} was frozen when the model "
                    "was converted; convert it unfrozen, and freeze it afterwards"
                )
        self._resting = [r for r in self._resting if r not in awake]
        self._parameters = []
        for resting in awake:
            self._join(resting.parameter, resting.group, resting.kind)
        return bool(awake)

    def _admit(self, parameter: nn.Parameter) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            raise UsageError(
                f"an optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                "in the model"
            )
        if id(parameter) in self._group_of:
            raise UsageError(f"parameter {name!r} is in two optimizers; give it to one")
        if parameter.dtype != torch.float32:
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}, and servers hold torch.float32; convert "
                "model.float(), and compute in 16 bits with torch.autocast"
            )

    def dense_tables(self, runtime: Runtime) -> list[str]:
        """Return the names of the dense tables that are planned."""
        return [self._dense_name(runtime, parameter) for parameter in self._parameters]

    def tables(self, runtime: Runtime) -> list[str]:
        """Return the names of all planned tables, dense ones first."""
        rows = [self._rows_name(runtime, *pair) for pair in self._modules.items()]
        return self.dense_tables(runtime) + rows

    def _dense_name(self, runtime: Runtime, parameter: nn.Parameter) -> str:
        return _free(runtime, self._names[id(parameter)])

    def _rows_name(self, runtime: Runtime, path: str, module: TableModule) -> str:
        return module.table.name or _free(runtime, _joined(self._prefix, path or "embedding"))

    def make(self, client: ParameterClient) -> tuple[list[DenseBinding], list[SparseBinding]]:
        """Create all tables, or open them if another worker has created them, and return their bindings."""
        return self.make_dense(client), [
            self._make_rows(client, path, module) for path, module in self._modules.items()
        ]

    def make_dense(self, client: ParameterClient) -> list[DenseBinding]:
        """Create the planned dense tables, or open them if they exist, and return their bindings."""
        runtime, dense = client.runtime, []
        for parameter in self._parameters:
            group, formula = self._group_of[id(parameter)]
            spec = TableSpec(
                self._dense_name(runtime, parameter),
                "dense",
                tuple(parameter.shape),
                formula.rule,
                formula.decay,
            )
            runtime.create(spec, array_of(parameter))
            # An embedding without sparse gradients is a dense table and is sent whole in each step, so
            # recommend sparse=True if it is large.
            if id(parameter) in self._untied:
                instead = "with sparse=True, trained by SparseAdam, Adagrad or SGD"
                name = self._names[id(parameter)]
                note_dense_rows(f"embedding {name!r}", len(parameter), instead)
            dense.append(DenseBinding(parameter, spec, group))
        _living.update(dense)
        return dense

    def _make_rows(self, client: ParameterClient, path: str, module: TableModule) -> SparseBinding:
        rows = module.table
        name = self._rows_name(client.runtime, path, module)
        module_optimizer = module.optimizer
        if module_optimizer is not None:
            rows.bind(
                client,
                name,
                RuleMapping(
                    module_optimizer.rule(), module_optimizer.decay(), module_optimizer.every_row
                ),
            )
            return SparseBinding(rows, module_optimizer)
        group, formula = self._group_of[id(module.weight)]
        rows.bind(client, name, formula)
        return SparseBinding(rows, group)


def _renormed(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the id() of each weight that has `max_norm`, and the error message that refuses it.

    With max_norm, a forward pass shortens rows in place, and the servers would not get the change.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield (
                id(module.weight),
                f"{path or 'embedding'!r} has max_norm={module.max_norm!r}, which shortens rows in the "
                "worker, where the servers do not see it; build it without",
            )


def _untied(model: nn.Module) -> set[int]:
    """Return the id() of each weight that only embeddings use. Such a weight could be a sparse table."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    other_modules = (module for module in model.modules() if not isinstance(module, kinds))
    other_weights = {
        id(parameter) for module in other_modules for parameter in module._parameters.values()
    }
    return {id(m.weight) for m in model.modules() if isinstance(m, kinds)} - other_weights


def _tables_of(model: nn.Module) -> dict[str, TableModule]:
    """Return the model's embeddings by their names in the model. Of embeddings that share a table, only the
    first is returned.

    Raises:
        UsageError: The script has assigned a weight to an embedding, or two tables have the same name.
    """
    tables: dict[str, TableModule] = {}
    for name, module in model.named_modules():
        if not isinstance(module, TableModule):
            continue
        if module.weight is not module.table.weight:
            raise UsageError(
                f"the weight of the embedding {name!r} was replaced, and its rows were not; to tie it "
                "to another one call its share(other)"
            )
        if all(module.table is not table.table for table in tables.values()):
            tables[name] = module
    names = [module.table.name for module in tables.values() if module.table.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two embeddings are named {twice[0]!r}; use one module in both places")
    return tables


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the `optimizers` argument of a caller as a list.

    Raises:
        UsageError: A value is no torch optimizer, or an optimizer has step hooks.
    """
    if optimizers is None:
        return []
    originals: list[Any] = [optimizers]
    if isinstance(optimizers, Iterable) and not isinstance(optimizers, str):
        originals = list(optimizers)
    for optimizer in originals:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is {optimizer!r}; it must be a torch.optim optimizer")
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise UsageError(
                f"torch.optim.{type(optimizer).__name__} has step hooks, which would not run; register "
                "them on the optimizer that convert() returns"
            )
    return originals


def _free(runtime: Runtime, name: str) -> str:
    """Return `name` or, if this worker already has such a table, the first free of `name~2`, `name~3` and
    so on.
    """
    tables, number, free = runtime.specs(), 1, name
    while key_of(free) in tables:
        number += 1
        free = f"{name}~{number}"
    return free


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def array_of(value: Tensor) -> NDArray[np.float32]:
    """Return the tensor's values as an array, which shares the memory of a CPU tensor and otherwise is a
    copy.
    """
    array: NDArray[np.float32] = value.detach().cpu().numpy()
    return array
