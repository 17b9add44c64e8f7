"""Binds parameters to tables: creates a table for each parameter, and caches the values last pulled.

A parameter's value is read many times per step but pulled only once. The cache is dropped by this worker's
own push, by a collective operation of all workers, and with several workers at the start of each step
(`prefetch`). If two optimizers train a parameter in turn, each has a table for it; the value is copied from
one table to the other when the optimizer changes.

Moving averages, such as the means of batch_norm, are dense tables too, but no optimizer trains them. The
values of a step are sent with the step's push (`note`). Everything runs in the thread that trains.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.threads import deferred
from psfleet.core.engine.gradients import Grad, SparseElements, SparseGrad, gradient_of
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.runtime_interface import Asked, Gradient, PooledIds, Runtime, is_trained
from psfleet.core.engine.schema.entry import EvictionStreamEntry, part_of
from psfleet.core.engine.schema.table import DecaySpec, TableSpec
from psfleet.core.graph.parameters.parameter import Parameter, check_rows
from psfleet.core.graph.parameters.parameter_client import ParameterClient, are_equal
from psfleet.core.graph.parameters.parameter_gradients import densify
from psfleet.core.graph.parameters.table_kind import (
    AveragedBinding,
    LazyBinding,
    has_any_id,
    placement_of,
)
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.stages import here

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
_LOOKUPS = 8  # look-ups of one sparse table whose rows are cached within a step


_pushes = 0  # pushes of this process, in all runtimes that it has had


class TableOwner(Protocol):
    """Owner of a table: the optimizer that updates it. The table gets the owner's rule and decay."""

    lazy: bool
    every_row: bool
    streams_evictions: bool

    def rule(self, parameter: Parameter | None = None) -> Rule: ...
    def decay(self, parameter: Parameter | None = None) -> DecaySpec: ...
    def lender(self, parameter: Parameter) -> "TableOwner": ...


class ValueCache(Protocol):
    """Cache of values that were read from tables, to be registered with `watch`."""

    def drop_values(self) -> None:
        """Drop all values, because every table may have changed."""


@dataclass(slots=True, eq=False)
class BoundTable:
    """Table of one parameter under one optimizer, with the values that were last pulled.

    Attributes:
        value: Value of a dense table as last pulled, or None if it may have changed since.
        rows: Look-ups of a sparse table in this step. Each is a pair of the ids (or bags of ids), and their
            rows (or pooled rows).
    """

    key: int
    spec: TableSpec
    parameter: Parameter
    owner: TableOwner
    value: Floats | None = None
    rows: list[tuple[Asked, Floats]] = field(default_factory=list)

    def drop_pulled(self) -> None:
        """Drop the pulled values, because the table may have changed."""
        self.value = None
        self.rows.clear()

    @property
    def is_bounded(self) -> bool:
        """True if the parameter is dense, or sparse with a fixed number of rows."""
        return not has_any_id(self.parameter)

    def all_ids(self) -> Ids:
        """Return every id of a sparse table with a fixed number of rows, int64 [rows]."""
        return np.arange(self.parameter.shape[0], dtype=np.int64)


class BoundTables(ParameterClient):
    """Tables of all parameters that use one runtime.

    Implements psfleet.core.graph.parameters.parameter.Binding for these parameters.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        # Tables by id() of the parameter: the table that has its value now. Tables by id() of owner and
        # parameter: every table. A BoundTable refers to both objects, so no other object can get their id().
        self._bound_by_parameter: dict[int, BoundTable] = {}
        self._owned: dict[tuple[int, int], BoundTable] = {}
        self._names: dict[str, int] = {}
        self._pushed: list[BoundTable] = []
        # Values to send with the next push: for each table the sum of the values, their number, and the rate.
        self._along: dict[int, tuple[BoundTable, Floats, int, float]] = {}

    def value(self, parameter: Parameter) -> Floats:
        """Return the whole current value, read-only."""
        bound = self._bound_by_parameter[id(parameter)]
        if bound.spec.kind == "sparse":
            return self.lookup(parameter, bound.all_ids())
        if bound.value is None:
            # This worker's last push has changed all its parameters. A step that reads one of these values
            # will read all, so pull them in one call.
            stale = [s for s in self._pushed if s.spec.kind == "dense" and s.value is None]
            self._fetch(stale if bound in stale else [bound], [])
        assert bound.value is not None
        return bound.value

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Return current rows of a sparse parameter: float32 [*ids.shape, dim]."""
        bound = self._bound_by_parameter[id(parameter)]
        check_rows(parameter, ids)
        if bound.spec.kind == "dense":
            rows: Floats = self.value(parameter)[ids]
            return rows
        return self._looked_up(bound, ids)[1]

    def pooled(self, parameter: Parameter, lookup: PooledIds) -> tuple[PooledIds, Floats]:
        """Return pooled rows of a distributed parameter, as `Parameter.pooled` does."""
        source, values = self._looked_up(self._bound_by_parameter[id(parameter)], lookup)
        assert isinstance(source, PooledIds)
        return source, values

    def _looked_up(self, bound: BoundTable, lookup: Asked) -> tuple[Asked, Floats]:
        """Return a look-up of a sparse table and its rows, from this step's cache if possible."""
        for pair in bound.rows:
            if are_equal(pair[0], lookup):
                return pair
        if len(bound.rows) >= _LOOKUPS:
            bound.rows.clear()
        self._fetch([], [(bound, lookup)])
        return bound.rows[-1]

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Pull all values that a step needs, in one call.

        With several workers, all values are pulled again, because other workers may have changed them. A
        single worker pulls all rows again, but only those dense values that its own pushes have changed.
        """
        whole = {id(p): self._bound_by_parameter[id(p)] for p in dense}
        rows: list[tuple[BoundTable, Asked]] = []
        for parameter, lookup in sparse:
            bound = self._bound_by_parameter[id(parameter)]
            if not isinstance(lookup, PooledIds):
                check_rows(parameter, lookup)
            if bound.spec.kind == "dense":
                whole[id(parameter)] = bound
            else:
                rows.append((bound, lookup))
        for bound in [*whole.values(), *(s for s, _ in rows)]:
            if self.runtime.worker_num > 1 or bound.spec.kind == "sparse":
                bound.drop_pulled()
        rows += [(s, s.all_ids()) for s in whole.values() if s.spec.kind == "sparse"]
        self._fetch([s for s in whole.values() if s.spec.kind == "dense" and s.value is None], rows)

    def read_ahead(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Start to pull the values that the next step needs. They will lack the push of the running step.

        Has an effect in async mode only. In all other modes a step must see the previous step's push.
        """
        if not self.runtime.reads_ahead:
            return
        bound_tables = [self._bound_by_parameter[id(parameter)] for parameter in dense]
        rows = [(self._bound_by_parameter[id(parameter)], lookup) for parameter, lookup in sparse]
        if all(bound.spec.kind == "dense" for bound in bound_tables) and all(
            bound.spec.kind == "sparse" for bound, _ in rows
        ):
            self.begin_pull(
                [bound.key for bound in bound_tables],
                [(bound.key, lookup.copy()) for bound, lookup in rows],
            )

    def _fetch(
        self, dense: Sequence[BoundTable], sparse: Sequence[tuple[BoundTable, Asked]]
    ) -> None:
        if not dense and not sparse:
            return
        sparse = [(bound, lookup.copy()) for bound, lookup in sparse]
        values, rows = self.pull([s.key for s in dense], [(s.key, lookup) for s, lookup in sparse])
        for array in (
            *values,
            *rows,
        ):  # they are returned again for the same ids, so they must not be changed
            array.flags.writeable = False
        for bound, array in zip(dense, values, strict=True):
            bound.value = array
        for (bound, lookup), array in zip(sparse, rows, strict=True):
            bound.rows.append((lookup, array))

    @deferred()
    def push(
        self, gradients: Sequence[tuple[BoundTable, Gradient]], samples: int, loss: float | None
    ) -> None:
        """Push the gradients of one step, and drop the cached values of their tables."""
        global _pushes
        along = [
            (bound, Gradient(bound.key, total / np.float32(count), None, rate))
            for bound, total, count, rate in self._along.values()
        ]
        self._along.clear()
        gradients = [*gradients, *along]
        self.send([g for _, g in gradients], samples, loss)
        _pushes += 1
        self._pushed = [bound for bound, _ in gradients]
        for bound in self._pushed:
            bound.drop_pulled()

    def send_along(self, bound: BoundTable, gradient: Floats, rate: float) -> None:
        """Add a gradient of a dense table to the next push, to be applied with the learning rate `rate`.

        If several gradients of one table are added before a push, their mean is pushed.
        """
        before = self._along.get(bound.key)
        total, count = (gradient, 1) if before is None else (before[1] + gradient, before[2] + 1)
        self._along[bound.key] = bound, total, count, rate

    def bind(self, owner: TableOwner, parameter: Parameter, by_rows: bool = False) -> BoundTable:
        """Return the table in which an optimizer trains the parameter. Makes the table if there is none.

        `by_rows`: True if gradients of the parameter come by rows, so that its new table may be sparse.
        """
        if isinstance(parameter.binding, AveragedBinding):
            raise UsageError(
                f"parameter {parameter.name!r} shows its average; restore() before training on"
            )
        if isinstance(parameter.binding, LazyBinding):
            parameter.binding = None
        bound = self._owned.get((id(owner), id(parameter)))
        if bound is not None and self._bound_by_parameter.get(id(parameter)) is bound:
            parameter.binding = parameter.binding or self
            return bound
        if bound is not None:  # another optimizer has trained the parameter in between
            self._move(parameter, bound)
        else:
            bound = self._make_table(owner, parameter, by_rows)
        self._owned[id(owner), id(parameter)] = bound
        self._bound_by_parameter[id(parameter)] = bound
        parameter.binding = self
        return bound

    def find(self, owner: TableOwner, parameter: Parameter) -> BoundTable | None:
        """Return the parameter's table under this optimizer, or None if the parameter has none."""
        return self._owned.get((id(owner), id(parameter)))

    def parameters(self) -> list[Parameter]:
        """Return all parameters that have a table."""
        return [bound.parameter for bound in self._bound_by_parameter.values()]

    def _make_table(self, owner: TableOwner, parameter: Parameter, by_rows: bool) -> BoundTable:
        spec = self._spec(owner, parameter, by_rows)
        bound = BoundTable(spec.key, spec, parameter, owner)
        if spec.kind == "dense":
            self.runtime.create(spec, _master(parameter))
        elif (parameter.binding is None and parameter._value is None) or is_trained(
            self.runtime, [spec.name]
        ):
            self.runtime.create(spec)
        else:
            self.exclusively(lambda: self._preload(bound))
            self.runtime.create(spec)
        return bound

    def _spec(self, owner: TableOwner, parameter: Parameter, by_rows: bool) -> TableSpec:
        if by_rows and len(parameter.shape) == 2:
            parameter.sparse = True
        streams = owner.streams_evictions
        owner = owner.lender(parameter)
        rule, decay = owner.rule(parameter), owner.decay(parameter)
        where = placement_of(parameter, rule, decay, owner.lazy, owner.every_row)
        shape = parameter.shape if where.kind == "dense" else parameter.shape[1:]
        entry = parameter.entry
        if streams and where.kind == "sparse" and part_of(entry, EvictionStreamEntry) is None:
            stream = EvictionStreamEntry()
            entry = stream if entry is None else entry & stream
        # A name can be in use already: by another optimizer of the parameter, or by an earlier parameter of
        # this name.
        number = self._names[parameter.name] = self._names.get(parameter.name, 0) + 1
        name = parameter.name if number == 1 else f"{parameter.name}~{number}"
        return TableSpec(
            name,
            where.kind,
            tuple(shape),
            rule,
            decay,
            parameter.initializer,
            parameter.seed,
            where.every_row,
            entry,
            servers=parameter.servers,
            precision=parameter.precision,
        )

    def _preload(self, bound: BoundTable) -> None:
        """Write the parameter's present rows to its new sparse table. Runs on worker 0 only."""
        self.runtime.create(bound.spec)
        source = bound.parameter.binding
        if isinstance(source, BoundTables) and not bound.is_bounded:
            state = source.runtime.read_table(source._bound_by_parameter[id(bound.parameter)].key)
            assert state.ids is not None
            ids, rows = state.ids, state.values[0]
        else:
            ids, rows = bound.all_ids(), _master(bound.parameter)
        self.begin_rows(bound.spec, ids, rows)

    def _move(self, parameter: Parameter, bound: BoundTable) -> None:
        """Copy the value from another optimizer's table to this one.

        The optimizer state of this table stays.
        """
        before = self._bound_by_parameter[id(parameter)]
        self.exclusively(lambda: self._copy_value(before, bound))
        bound.drop_pulled()

    def _copy_value(self, source: BoundTable, target: BoundTable) -> None:
        if not target.is_bounded:
            raise UsageError(
                f"parameter {target.parameter.name!r} has rows for any id and is "
                "trained by "
                "two optimizers in turn; use one"
            )
        value = np.array(self.value(source.parameter), np.float32)
        ids = target.all_ids() if target.spec.kind == "sparse" else None
        self.set_weights(target.spec, value, ids)

    def exclusively(self, write: Callable[[], None]) -> None:
        """Call `write` on worker 0 while all workers wait, then drop all pulled values.

        Raises:
            UsageError: Workers are pipelines of several stages, which have different tables.
        """
        if here().processes > 1:
            raise UsageError(
                "optimizer state and values cannot be set from the stages of a pipeline, each "
                "of which knows its own tables only; use fleet.load_model"
            )
        super().exclusively(write)
        self.drop_pulled()

    def drop_pulled(self) -> None:
        """Drop all pulled values, because every table may have changed."""
        super().drop_pulled()
        for bound in self._bound_by_parameter.values():
            bound.drop_pulled()


def tables() -> BoundTables:
    """Return the BoundTables of the active runtime."""
    process = current()
    runtime = process.active()
    bound: BoundTables | None = process.bound_tables
    if bound is None or bound.runtime is not runtime:
        bound = process.bound_tables = BoundTables(runtime)
    return bound


def read_ahead(dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]) -> None:
    """Start to pull the next step's values (`BoundTables.read_ahead`), if one runtime has all of them."""
    bindings = {id(p.binding): p.binding for p in [*dense, *(p for p, _ in sparse)]}
    binding = next(iter(bindings.values()), None)
    if len(bindings) == 1 and isinstance(binding, BoundTables):
        binding.read_ahead(dense, sparse)


def has_pushed() -> bool:
    """Return whether this process has pushed any gradient."""
    return _pushes > 0


def watch(watcher: ValueCache) -> None:
    """Register a cache. Every call of `invalidate` then calls the cache's `drop_values`.

    Only a weak reference to the cache is kept.
    """
    current().caches.add(watcher)


def invalidate() -> None:
    """Drop all cached values. Call it when something other than this worker's pushes has changed tables."""
    process = current()
    if process.bound_tables is not None:
        process.bound_tables.drop_pulled()
    for cache in process.caches:
        cache.drop_values()


def as_gradient(bound: BoundTable, grad: Grad | SparseElements, rate: float) -> Gradient:
    """Return a gradient in the form that its table needs: by rows for a sparse table, else as an array."""
    if bound.spec.kind == "sparse" and isinstance(grad, np.ndarray):
        grad = SparseGrad(bound.all_ids(), grad)
    elif bound.spec.kind == "dense" and isinstance(grad, SparseGrad):
        grad = densify(bound.parameter, grad)
    return gradient_of(bound.key, grad, rate)


def _master(parameter: Parameter) -> Floats:
    """Return a copy of the value in float32, even if the parameter shows it in 16 bits."""
    bound = parameter.binding
    return np.array(bound.value(parameter) if bound else parameter.numpy(), np.float32)


@dataclass(eq=False)
class _Average:
    """Owner of a table that holds a moving average: average = momentum * average + (1 - momentum) * value.

    This is SGD at the rate r = 1 - momentum, with the gradient -value and L2 decay 1:

        average - r * (-value + 1 * average) = (1 - r) * average + r * value

    The servers apply the decay to the average that they hold. If workers sent average - value instead,
    based on an old average, an average of variances could become negative.
    """

    momentum: float
    lazy: bool = False
    every_row: bool = False
    streams_evictions: bool = False

    def rule(self, parameter: Parameter | None = None) -> Rule:
        return SGD()

    def decay(self, parameter: Parameter | None = None) -> DecaySpec:
        return DecaySpec(l2=1.0)

    def lender(self, parameter: Parameter) -> "_Average":
        return self


@functools.cache
def _average(momentum: float) -> _Average:
    return _Average(momentum)


def promise(parameter: Parameter, momentum: float) -> None:
    """Make a parameter a moving average of the values that `note` gets, by binding it to a suitable table.

    The table is made when the parameter's value is first needed.
    """
    owner = _average(momentum)
    binding = LazyBinding(lambda target: tables().bind(owner, target), early=True)
    parameter.binding = parameter.binding or binding


def note(parameter: Parameter, momentum: float, value: NDArray[Any]) -> None:
    """Add a value to a moving average. The value is sent with this worker's next push.

    Args:
        parameter: Parameter whose value is the average. `promise` was called for it.
        momentum: Factor of the old average. The factor of the value is 1 - momentum.
    """
    bound_tables = tables()
    bound = bound_tables.bind(_average(momentum), parameter)
    bound_tables.send_along(bound, -np.asarray(value, np.float32), 1.0 - momentum)
