"""DistributedOptimizer for torch: one push and one pull for each step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from psfleet import runtime as runtimes
from psfleet.errors import UsageError
from psfleet.runtime import Gradient, Read, Runtime, TableState, is_trained
from psfleet.torch.formulas import formula_of
from psfleet.torch.planning import Dense, Optimizers, Plan, Sparse, array_of, listed
from psfleet.torch.rows import exclusively
from psfleet.torch.weights import as_tensor

__all__ = ["DistributedOptimizer"]


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

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers = None,
        *,
        name: str = "",
        runtime: Runtime | None = None,
    ) -> None:
        given = listed(optimizers)
        groups = [group for optimizer in given for group in optimizer.param_groups]
        kinds = [type(optimizer) for optimizer in given for _ in optimizer.param_groups]
        plan = Plan(model, groups, kinds, name)
        self.runtime = runtime or runtimes.active()
        for optimizer in given:
            optimizer.step = _refuse_step  # type: ignore[method-assign]
        super().__init__(groups or [{"params": []}], {})
        self._groups = plan.groups
        self._dense, self._sparse = self._make(plan)
        self.refresh()
        model.register_load_state_dict_post_hook(self._loaded)  # type: ignore[no-untyped-call]

    def _make(self, plan: Plan) -> tuple[list[Dense], list[Sparse]]:
        """The tables, with the values of worker 0, unless they are trained already."""
        joins_late = is_trained(self.runtime, plan.tables(self.runtime))
        later = self.runtime.worker_index > 0 and not joins_late
        if later:  # the first to make a dense table gives its value: let that be worker 0
            self.runtime.barrier()
        dense, sparse = plan.make(self.runtime)
        if not joins_late:
            if self.runtime.worker_num > 1 and not later:
                self.runtime.barrier()
            exclusively(self.runtime, lambda: _fill(sparse))
        for each in sparse:
            each.rows.content = None
        return dense, sparse

    # -- training ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        samples: int = 0,
        loss: float | None = None,
    ) -> Any:
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
        for (each, ids), array in zip(ahead, arrays[len(self._dense) :], strict=True):
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
            raise UsageError(
                "add_param_group was called on a distributed optimizer, whose tables are "
                "made already; pass every parameter to the optimizers it is made of"
            )
        super().add_param_group(param_group)

    # -- parts of a step -----------------------------------------------------------------------

    def _gradients(self) -> list[Gradient]:
        gradients = []
        for dense in self._dense:
            grad = dense.parameter.grad
            if grad is not None:
                gradients.append(
                    Gradient(dense.spec.key, array_of(grad), None, float(dense.group["lr"]))
                )
        found = [sparse.rows.gradient(sparse.rate()) for sparse in self._sparse]
        return gradients + [gradient for gradient in found if gradient is not None]

    def _check_groups(self) -> None:
        for made in self._groups:
            if formula_of(made.kind, made.group, rows=made.rows) != made.formula:
                now = formula_of(made.kind, made.group, rows=made.rows).rule
                raise UsageError(
                    f"an option of torch.optim.{made.kind.__name__} has changed: {now} "
                    f"instead of {made.formula.rule}; on the servers only 'lr' may change"
                )

    # -- values --------------------------------------------------------------------------------

    def _write(self) -> None:
        for dense in self._dense:
            state = self.runtime.read_table(dense.spec.key)
            values = [array_of(dense.parameter), *state.values[1:]]
            self.runtime.write_table(dense.spec.key, TableState(state.step, values))

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        self.upload()


def _fill(tables: Iterable[Sparse]) -> None:
    for sparse in tables:
        sparse.rows.fill()


def _refuse_step(closure: Any = None) -> Any:
    raise UsageError(
        "step() was called on an optimizer whose parameters are on the servers; "
        "call it on the optimizer that psfleet.torch returned"
    )
