"""DistributedOptimizer for torch: one push and one pull for each step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from psfleet import runtime as runtimes
from psfleet.errors import UsageError
from psfleet.optimizer.base import Optimizer as FleetOptimizer
from psfleet.runtime import Gradient, Read, Runtime, TableState
from psfleet.tables.spec import TableSpec, key_of
from psfleet.torch.embeddings import TableModule
from psfleet.torch.formulas import Formula, formula_of
from psfleet.torch.rows import Rows, exclusively
from psfleet.torch.weights import TableWeight, as_tensor

__all__ = ["DistributedOptimizer", "Optimizers", "listed"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


@dataclass(frozen=True, slots=True)
class _Dense:
    """A dense parameter, its table, and the group that has its rate."""

    parameter: nn.Parameter
    spec: TableSpec
    group: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Sparse:
    """An embedding's rows and whatever has their rate."""

    rows: Rows
    owner: dict[str, Any] | FleetOptimizer

    def rate(self) -> float:
        owner = self.owner
        return owner.get_lr() if isinstance(owner, FleetOptimizer) else float(owner["lr"])


@dataclass(frozen=True, slots=True)
class _Group:
    """What a parameter group was when its tables were made."""

    kind: type[torch.optim.Optimizer]
    group: dict[str, Any]
    rows: bool
    formula: Formula


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters live on the servers.

    `step()` sends all gradients in one push and brings the new dense parameters in one pull. The
    parameter groups are those of the optimizers it is made of, so torch's schedulers change its
    rates; every other option is fixed once the tables exist. All workers must make it with the same
    model; they start from the values of worker 0.

    Args:
        model: Its parameters and embeddings are found by their names.
        optimizers: One torch optimizer or several, for disjoint parameters. They must not have
            stepped, and cannot any more. None: every embedding has its own psfleet optimizer.
        name: Goes before the names of the tables, to tell two models apart.
        runtime: Where the tables live; default the fleet's.

    Raises:
        ConfigError: An optimizer or option has no exact rule. Nothing was changed.
        UsageError: The optimizers do not fit the model. Nothing was changed.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers = None, *, name: str = "",
                 runtime: Runtime | None = None) -> None:
        given = listed(optimizers)
        groups = [group for optimizer in given for group in optimizer.param_groups]
        self._kinds = [type(optimizer) for optimizer in given for _ in optimizer.param_groups]
        plan = _Plan(model, groups, self._kinds, name)
        self.runtime = runtime or runtimes.active()
        for optimizer in given:
            optimizer.step = _refuse_step  # type: ignore[method-assign]
        super().__init__(groups or [{"params": []}], {})
        self._groups = plan.groups
        later = self.runtime.worker_index > 0
        if later:  # the first to make a dense table gives its value: let that be worker 0
            self.runtime.barrier()
        self._dense, self._sparse = plan.make(self.runtime)
        if self.runtime.worker_num > 1 and not later:
            self.runtime.barrier()
        exclusively(self.runtime, self._fill)
        for sparse in self._sparse:
            sparse.rows.content = None
        self.refresh()
        model.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    # -- training ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int = 0,
             loss: float | None = None) -> Any:
        """Push every gradient, then bring the new values.

        Args:
            closure: Computes the loss anew, as for any torch optimizer.
            samples, loss: Of this step, for the fleet's progress display.

        Returns:
            What the closure returned.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._check_groups()
        self.runtime.push(self._gradients(), samples=samples, loss=loss)
        self.refresh()
        return value

    def clear_grad(self, set_to_none: bool = True) -> None:
        """The same as zero_grad()."""
        self.zero_grad(set_to_none)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the dense parameters, and the rows that a prefetching loader announced, in one pull."""
        rows = [sparse.rows for sparse in self._sparse]
        for each in rows:
            each.forget()
        ahead = [(each, ids) for each in rows for ids in each.expected()]
        reads = [Read(dense.spec.key) for dense in self._dense]
        reads += [each.read(ids) for each, ids in ahead]
        arrays = self.runtime.pull(reads)
        for dense, array in zip(self._dense, arrays, strict=False):
            dense.parameter.copy_(as_tensor(array))
        for (each, ids), array in zip(ahead, arrays[len(self._dense):], strict=True):
            each.hold(ids, array)

    def upload(self) -> None:
        """Make the model's dense parameters, changed by hand, those of the fleet.

        Every worker must call it; the values of worker 0 count. Optimizer state stays.
        """
        exclusively(self.runtime, self._write)
        self.refresh()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, but not after the tables were made."""
        if hasattr(self, "_dense"):
            raise UsageError("add_param_group was called on a distributed optimizer, whose tables are "
                             "made already; pass every parameter to the optimizers it is made of")
        super().add_param_group(param_group)

    # -- parts of a step -----------------------------------------------------------------------

    def _gradients(self) -> list[Gradient]:
        gradients = []
        for dense in self._dense:
            grad = dense.parameter.grad
            if grad is not None:
                gradients.append(Gradient(dense.spec.key, _array(grad), None, float(dense.group["lr"])))
        found = [sparse.rows.gradient(sparse.rate()) for sparse in self._sparse]
        return gradients + [gradient for gradient in found if gradient is not None]

    def _check_groups(self) -> None:
        for made in self._groups:
            if formula_of(made.kind, made.group, rows=made.rows) != made.formula:
                now = formula_of(made.kind, made.group, rows=made.rows).rule
                raise UsageError(f"an option of torch.optim.{made.kind.__name__} has changed: {now} "
                                 f"instead of {made.formula.rule}; on the servers only 'lr' may change")

    # -- values --------------------------------------------------------------------------------

    def _fill(self) -> None:
        for sparse in self._sparse:
            sparse.rows.fill()

    def _write(self) -> None:
        for dense in self._dense:
            state = self.runtime.read_table(dense.spec.key)
            values = [_array(dense.parameter), *state.values[1:]]
            self.runtime.write_table(dense.spec.key, TableState(state.step, values))

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        self.upload()


class _Plan:
    """Checks everything before anything is made."""

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]],
                 kinds: list[type[torch.optim.Optimizer]], prefix: str) -> None:
        self._modules = _tables_of(model)
        self._names = {id(p): _joined(prefix, name) for name, p in model.named_parameters()}
        self._prefix = prefix
        self._group_of: dict[int, tuple[dict[str, Any], Formula]] = {}
        self._parameters: list[nn.Parameter] = []
        self.groups: list[_Group] = []
        for group, kind in zip(groups, kinds, strict=True):
            self._take(group, kind)
        for name, module in self._modules.items():
            if module.optimizer is None and id(module.weight) not in self._group_of:
                raise UsageError(f"no optimizer has the embedding {name!r}; give it `optimizer=`, or pass "
                                 "its weight to a torch optimizer")

    def _take(self, group: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
        own = {id(m.weight) for m in self._modules.values() if m.optimizer is not None}
        formulas: dict[bool, Formula] = {}
        for parameter in group["params"]:
            if id(parameter) in own or not parameter.requires_grad:
                continue
            rows = isinstance(parameter, TableWeight)
            if rows not in formulas:
                formulas[rows] = formula_of(kind, group, rows=rows)
                self.groups.append(_Group(kind, group, rows, formulas[rows]))
            self._admit(parameter)
            self._group_of[id(parameter)] = (group, formulas[rows])
            if not rows:
                self._parameters.append(parameter)

    def _admit(self, parameter: nn.Parameter) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            raise UsageError(f"an optimizer has a parameter of shape {tuple(parameter.shape)} that is not "
                             "in the model")
        if id(parameter) in self._group_of:
            raise UsageError(f"parameter {name!r} is in two optimizers; give it to one")
        if parameter.dtype != torch.float32:
            raise UsageError(f"parameter {name!r} is {parameter.dtype}; servers hold torch.float32")

    def make(self, runtime: Runtime) -> tuple[list[_Dense], list[_Sparse]]:
        """The tables, all new."""
        dense = []
        for parameter in self._parameters:
            group, formula = self._group_of[id(parameter)]
            spec = TableSpec(_free(runtime, self._names[id(parameter)]), "dense",
                             tuple(parameter.shape), formula.rule, formula.decay)
            runtime.create(spec, _array(parameter))
            dense.append(_Dense(parameter, spec, group))
        return dense, [self._make_rows(runtime, path, module)
                       for path, module in self._modules.items()]

    def _make_rows(self, runtime: Runtime, path: str, module: TableModule) -> _Sparse:
        rows = module.table
        name = rows.name or _free(runtime, _joined(self._prefix, path or "embedding"))
        own = module.optimizer
        if own is not None:
            rows.bind(runtime, name, Formula(own.rule(), own.decay()))
            return _Sparse(rows, own)
        group, formula = self._group_of[id(module.weight)]
        rows.bind(runtime, name, formula)
        return _Sparse(rows, group)


def _tables_of(model: nn.Module) -> dict[str, TableModule]:
    """The model's embeddings by their places, each once."""
    tables = {name: module for name, module in model.named_modules()
              if isinstance(module, TableModule)}
    names = [module.table.name for module in tables.values() if module.table.name]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two embeddings are named {twice[0]!r}; use one module in both places")
    return tables


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers, none of which has stepped."""
    if optimizers is None:
        return []
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in given:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is {optimizer!r}; it must be a torch.optim optimizer")
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise UsageError(f"torch.optim.{type(optimizer).__name__} has stepped already; convert it "
                             "before its first step")
    return given


def _refuse_step(closure: Any = None) -> Any:
    raise UsageError("step() was called on an optimizer whose parameters are on the servers; "
                     "call it on the optimizer that psfleet.torch returned")


def _free(runtime: Runtime, name: str) -> str:
    """The name, numbered if this worker has a table of that name."""
    known, number, free = runtime.specs(), 1, name
    while key_of(free) in known:
        number += 1
        free = f"{name}~{number}"
    return free


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _array(value: Tensor) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """The tensor's values without a copy where they lie in main memory."""
    array: np.ndarray[Any, np.dtype[np.float32]] = value.detach().cpu().numpy()
    return array
