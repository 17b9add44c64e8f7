"""Base classes of runtimes: one forwards every call to another runtime, one refuses every change.

The runtimes of consistency modes, local SGD and read-only access derive from them and override a few methods.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import TableConflict, UnknownTable, UsageError
from psfleet.core.engine.gradient_checks import check_reduction
from psfleet.core.engine.round_plan import Range
from psfleet.core.engine.runtime_interface import (
    FollowedCut,
    PushCounter,
    Read,
    ReadVersion,
    Runtime,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.script_runtime import Cluster, ScriptRuntime
from psfleet.core.runtime.strategy import WireSettings

Floats = NDArray[np.float32]
F = TypeVar("F", bound=Callable[..., Any])


def handed_on(method: F, part: str = "_fleet") -> F:
    """Return an attribute that forwards a method to an inner object, such as the runtime below a wrapper.

    A call of it costs no more than a call of the inner object: an attribute look-up, and no second frame.
    """
    return read_through(f"{part}.{method.__name__}")  # type: ignore[no-any-return]


def read_through(path: str) -> Any:
    """Return a property that reads an attribute of an inner object, such as `_fleet.worker_num`."""
    return property(attrgetter(path))


def refused(method: F, what: str) -> F:
    """Return a method that raises UsageError, because the tables of a ReadOnlyRuntime cannot be changed.

    Args:
        what: End of the sentence "the tables ... cannot", such as "be pushed to".
    """

    def refuse(runtime: "ReadOnlyRuntime", *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"the tables of {runtime.source} can be read only, and cannot {what}; {runtime.instead}"
        )

    return cast(F, refuse)


def pull_parts(reads: Sequence[Read], local: Runtime, fleet: Runtime) -> list[Floats]:
    """Return pulled values in the order of the reads, from two runtimes.

    Args:
        local: Runtime that is used for all tables that it has.
    """
    local_specs = local.specs()
    far = [read for read in reads if read.table not in local_specs]
    if not far:
        return local.pull(reads)
    values = iter(fleet.pull(far))
    return [local.pull([read])[0] if read.table in local_specs else next(values) for read in reads]


class ForwardingRuntime(ScriptRuntime):
    """Runtime that forwards every call to another one. Derive from it to change a few calls.

    A derived class may override only `pull` and `push`, because two things are not forwarded: `pull_ahead`
    calls `pull` of this object, and pooled rows (bags) are not accepted (`pools` is False). A derived class
    that supports these two switches them on.
    """

    pools = False
    reads_ahead = False
    reader_to_device = Runtime.reader_to_device  # None: `pull` and `push` may be overridden

    worker_index: int = read_through("_fleet.worker_index")
    worker_num: int = read_through("_fleet.worker_num")
    server_num: int = read_through("_fleet.server_num")
    passes: bool = read_through("_fleet.passes")
    counters: list[PushCounter] = read_through("_fleet.counters")
    in_round: bool = read_through("_fleet.in_round")
    wire: WireSettings = read_through("_fleet.wire")
    cluster: Cluster | None = read_through("_fleet.cluster")
    pushes: int = read_through("_fleet.pushes")
    version: ReadVersion | None = read_through("_fleet.version")
    cut: FollowedCut | None = read_through("_fleet.cut")
    next_ranges: tuple[Range, ...] = read_through("_fleet.next_ranges")
    create = handed_on(Runtime.create)
    open = handed_on(Runtime.open)
    specs = handed_on(Runtime.specs)
    pull = handed_on(Runtime.pull)
    push = handed_on(Runtime.push)
    push_counts = handed_on(Runtime.push_counts)
    flush = handed_on(Runtime.flush)
    barrier = handed_on(Runtime.barrier)
    all_reduce = handed_on(Runtime.all_reduce)
    read_table = handed_on(Runtime.read_table)
    write_table = handed_on(Runtime.write_table)
    shrink = handed_on(Runtime.shrink)
    evictions = handed_on(Runtime.evictions)
    save = handed_on(Runtime.save)
    load = handed_on(Runtime.load)
    stats = handed_on(Runtime.stats)
    set_mode = handed_on(ScriptRuntime.set_mode)
    scale = handed_on(ScriptRuntime.scale)
    data_steps = handed_on(ScriptRuntime.data_steps)
    close = handed_on(Runtime.close)

    def __init__(self, fleet: ScriptRuntime) -> None:
        self._fleet = fleet

    def _spec_of(self, table: int) -> TableSpec:
        """Return the definition of a table, for `check_gradients`."""
        spec = self._fleet.specs().get(table)
        if spec is None:
            raise UnknownTable(f"table {table:#x} is unknown; create it first")
        return spec


class ReadOnlyRuntime(ScriptRuntime):
    """Base of runtimes that refuse every change of a table with a UsageError.

    It acts as a fleet with one worker: flush and barrier do nothing.

    Args:
        source: Owner of the tables, for messages.
        instead: Advice for messages: how to change the tables.
    """

    pools = False
    worker_index = 0
    worker_num = 1
    server_num = 0
    wire = WireSettings()

    def __init__(self, source: str, instead: str) -> None:
        self.source = source
        self.counters: list[PushCounter] = []
        self.instead = instead

    @override
    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Return the key of an existing table. The declared optimizer and initial values are ignored.

        Raises:
            UnknownTable: There is no such table.
            TableConflict: The table has another kind or shape.
        """
        table = self.open(spec.name)
        if (table.kind, table.shape) != (spec.kind, spec.shape):
            raise TableConflict(
                f"table {spec.name!r} of {self.source} is {table.kind} of shape {table.shape}, and the "
                f"script declares it {spec.kind} of shape {spec.shape}"
            )
        return table.key

    push = refused(Runtime.push, "be pushed to")
    write_table = refused(Runtime.write_table, "be written to")
    shrink = refused(Runtime.shrink, "be shrunk")
    save = refused(Runtime.save, "be saved")
    load = refused(Runtime.load, "be loaded into")
    set_mode = refused(ScriptRuntime.set_mode, "be put into another mode")
    scale = refused(ScriptRuntime.scale, "ask for servers")

    @override
    def flush(self, timeout: float | None = None) -> None:
        pass

    @override
    def barrier(self, timeout: float | None = None) -> None:
        pass

    @override
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        check_reduction(mode)
        return np.array(value)
