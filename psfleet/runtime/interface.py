"""The only door from the library to a fleet: what a trainer script can ask of its parameters.

Two runtimes stand behind it: `psfleet.embedded.runtime` (a shard in this process) and
`psfleet_worker.cluster_runtime` (the servers of a cluster). They give the same bits.
"""

import atexit
import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError, UsageError
from psfleet.kernels.bags import RowBags, spread_parts
from psfleet.platform.value_class import value_class
from psfleet.runtime.evicted_ids import EvictedIds
from psfleet.runtime.script_end import forget_exit, has_failed
from psfleet.schema.table import OWN, TableSpec
from psfleet.settings.choices import Format
from psfleet.settings.environment import check_alone

__all__ = [
    "ClosedRuntime",
    "Format",
    "Gradient",
    "Parts",
    "PendingPull",
    "PendingPush",
    "Precision",
    "PushCounter",
    "Read",
    "Runtime",
    "TableState",
    "active",
    "hold",
    "is_active",
    "is_held",
    "is_trained",
    "let_go",
    "load_runtime",
    "missing_table",
    "passes",
    "provide",
    "pushes",
    "use",
    "with_counts",
]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Precision = Literal["float32", "bfloat16", "float16"]


@value_class
class Read:
    """What to pull from one table.

    Attributes:
        table: The table's key.
        ids: Sparse: any number of ids, repeats allowed, any shape. Dense: None.
        format: How a server is to send the values; runtimes set it as their strategy says.
        bags: Sparse, for a runtime that `pools`: the ids' rows are pooled by these, one after the other, and
            the values are float32 [all bags, dim]. None: a row for each id.
    """

    table: int
    ids: Ids | None = None
    format: Format = "float32"
    bags: Sequence[RowBags] | None = None


@value_class
class Gradient:
    """One table's part of a push.

    Attributes:
        table: The table's key.
        values: Sparse: float32 [n, dim], row i belongs to ids[i]. Dense: float32 of the table's shape,
            or [k] with ids.
        ids: Sparse: int64 [n], repeats allowed (their rows are summed in order). Dense: None, or int64
            [k], ascending: the positions in the flattened array that values belong to; the gradient is
            zero everywhere else.
        learning_rate: The rate of this push.
        precision: How the values travel. In 16 bits they are rounded, embedded too, after rows of
            repeated ids were summed.
        scale: What they are multiplied by before they are rounded, and divided by afterwards.
        bags: Sparse, for a runtime that `pools`: values are float32 [all bags, dim], the gradients of what a
            Read with these bags gives. None: a row for each id.
    """

    table: int
    values: Floats
    ids: Ids | None = None
    learning_rate: float = 0.0
    precision: Precision = "float32"
    scale: float = 1.0
    bags: Sequence[RowBags] | None = None

    def spread(self) -> "Gradient":
        """The gradient with a row for each id."""
        if self.bags is None:
            return self
        return replace(self, values=spread_parts(self.values, self.bags), bags=None)

    def untravelled(self) -> "Gradient":
        """The gradient as it is when it does not travel."""
        return replace(self, precision="float32", scale=1.0)


@dataclass(slots=True)
class TableState:
    """The whole content of one table, weights and optimizer state.

    Attributes:
        step: How many updates the table has had.
        values: Weights first, then one array per state slot, in the rule's order. Dense: the table's
            shape. Sparse: [n, dim], rows in ascending order of id.
        ids: Sparse: int64 [n], ascending. Dense: None.
        touched: Sparse: int64 [n], the table's step when each row was last pushed. Left out of a
            write: as if the last update had named them.
        scores: Sparse: float32 [n, TableSpec.scores], see psfleet.tables.row_data.RowData.
    """

    step: int
    values: list[Floats]
    ids: Ids | None = None
    touched: Ids | None = None
    scores: Floats | None = None


class PendingPush(Protocol):
    """A push under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return once every server has acknowledged the push.

        Async mode: it is applied. Sync mode: it is held for its round, which closes when all workers
        have pushed and this one pulls or flushes.

        Raises:
            DeadlineExceeded: Not acknowledged within `timeout` seconds (None: the runtime's own).
        """


class PushCounter(Protocol):
    """Counts something of a worker's steps; each push takes along what has been counted since the last."""

    def leave(self) -> Gradient | None:
        """What leaves with the next push, in a table whose rule counts; None: nothing.

        What left before without `arrived` is in it again: that push was not made.
        """

    def arrived(self) -> None:
        """What left last counts."""


def with_counts(
    gradients: Sequence[Gradient], counters: Sequence[PushCounter]
) -> Sequence[Gradient]:
    """The gradients of a push, and what leaves with it."""
    counts = [counted for counter in counters if (counted := counter.leave()) is not None]
    return [*gradients, *counts] if counts else gradients


class PendingPull(Protocol):
    """A pull under way."""

    def wait(self) -> list[Floats]:
        """The values, as `Runtime.pull` gives them; the same each time it is asked."""


class ClosedRuntime:
    """Stands where something was that is closed: whatever is asked of it is refused.

    Args:
        sentence: What the refusal says.
    """

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self._sentence)


class Runtime(Protocol):
    """Parameters of a fleet as one worker sees them. Not thread-safe: one thread trains."""

    @property
    def worker_index(self) -> int: ...
    @property
    def worker_num(self) -> int: ...
    @property
    def server_num(self) -> int: ...
    @property
    def pools(self) -> bool:
        """Whether reads and gradients may have bags."""

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Make sure the table exists and return its key.

        The first worker's `value` (dense only) becomes the content; later ones are ignored.

        Raises:
            TableConflict: A table of that name has another definition.
        """

    def open(self, name: str) -> TableSpec:
        """The definition of a table that somebody has made; from then on this worker can pull from it.

        Raises:
            UnknownTable: There is none of that name.
        """

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Current values, one array per read: dense in the table's shape, sparse [*ids.shape, dim].

        Sync mode: waits for the round of this worker's last push to close, and commits it.
        A row that no push has touched has its initial value; pulling does not create it.
        """

    @property
    def reads_ahead(self) -> bool:
        """Whether `pull_ahead` reads while the worker computes; else it is a plain pull."""

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """Begin a pull: every push before it is in the values, none after it.

        One at a time: the next one, and whatever else waits for the servers, first waits for this.
        """

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> PendingPush:
        """Send the gradients of one step. At most one gradient per table.

        Args:
            gradients: One per table; in sync mode they make up this worker's part of the round.
            samples: How many samples the step has used, for the progress display.
            loss: The step's loss, for the progress display.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push of this worker is applied on every server."""

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here."""

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """Combine equal-shaped arrays of all workers, in worker order: sum, max or min."""

    def read_table(self, table: int) -> TableState:
        """The whole content of a table, optimizer state included."""

    def write_table(self, table: int, state: TableState) -> None:
        """Set weights, state and step; sparse: of the rows given, leaving the others."""

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """Remove rows that are worth little or not in use; returns how many went.

        Args:
            table: The key of a sparse table; 0: every one.
            threshold, unseen: As for `psfleet.fleet.shrink`.
        """

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        """Of each server up to `limit` evictions of a sparse table, from its position on.

        Does not wait for pushes. Position 0 gives the oldest that the server remembers.

        Raises:
            UsageError: The table does not remember evictions, or a position is beyond its last one.
        """

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Write every table to a folder, which appears whole or not at all; returns where it lies.

        Args:
            path: The folder; empty: where the job keeps its snapshots.
            delta: Only what has changed since the last base or delta.
            base: The next delta says the changes since this one.

        Raises:
            CheckpointError: It cannot be written, or there is no base; what was there is untouched.
        """

    def load(self, path: str) -> None:
        """Set every table from a folder written by `save`, by any number of servers."""

    def specs(self) -> dict[int, TableSpec]:
        """The tables this worker knows, by key."""

    def stats(self) -> list[dict[str, Any]]:
        """One entry per server: tables (name, rows, bytes, step), pushes, samples, loss."""

    def close(self) -> None:
        """Flush, leave the fleet and let go of every resource. Safe to call twice."""


def missing_table(name: str, names: Sequence[str]) -> str:
    """What is said of a table that nobody has made.

    Args:
        name: Its name.
        names: The tables that there are, OWN ones included.
    """
    known = ", ".join(each for each in names if not each.startswith(OWN)) or "none"
    return f"there is no table {name!r}, and without an optimizer none is made; the tables are: {known}"


def is_trained(runtime: Runtime, tables: Collection[str]) -> bool:
    """Whether a push has reached one of these tables.

    A worker that finds so before its first push joins a job under way: it must neither write the
    tables' first rows nor wait for workers that have long done so.

    Args:
        tables: Their names.
    """
    held = (table for server in runtime.stats() for table in server["tables"])
    return any(table["step"] > 0 for table in held if table["name"] in tables)


def load_runtime(name: str, *arguments: Any, **named: Any) -> Runtime:
    """The runtime registered under `name` in the entry-point group `psfleet.runtimes`."""
    for entry in importlib.metadata.entry_points(group="psfleet.runtimes", name=name):
        runtime: Runtime = entry.load()(*arguments, **named)
        return runtime
    raise ConfigError(f"runtime {name!r} is not installed; reinstall psfleet")


Parts = Mapping[str, Mapping[str, Any]]
"""Of a strategy, in the form of a strategy file."""

_active: Runtime | None = None
_make: Callable[[Parts], Runtime] | None = None
_clients = 0  # open ones of the active runtime
_kept = False  # it lives on when the last of them is closed
_lingers = (
    False  # the last of them failed: it lives on until the script's end says whether to leave
)


def active() -> Runtime:
    """The runtime of this process, made when it is first asked for.

    Embedded, unless `fleet.init()` has found a cluster.

    Raises:
        ConfigError: The environment names a fleet, and the script has not called `fleet.init()`.
    """
    global _active, _kept
    if _active is None:
        _active = _make({}) if _make else _alone()
    _kept = True
    return _active


def _alone() -> Runtime:
    check_alone()
    return load_runtime("embedded")


def is_active() -> bool:
    """Whether a runtime has been made and not been let go."""
    return _active is not None


def passes(runtime: Runtime) -> bool:
    """Whether an earlier life of this worker was at the next meeting: what comes before it is done."""
    return bool(getattr(runtime, "passes", False))


def pushes() -> int:
    """How many pushes the script has made, in earlier lives of its worker too; 0: it has no runtime yet."""
    return int(getattr(_active, "pushes", 0))


def provide(make: Callable[[Parts], Runtime] | None) -> None:
    """Say how the next active runtime is made; None: embedded.

    make: Gets what a client asks for, which counts where the script has said nothing.
    """
    global _make
    _make = make


def use(runtime: Runtime | None) -> Runtime | None:
    """Make `runtime` the active one and return the one before it. None: made when next asked for."""
    global _active, _clients, _kept, _lingers
    _active, before = runtime, _active
    _clients, _kept, _lingers = 0, runtime is not None, False
    return before


def hold(make: Callable[[Parts], Runtime], asked: Parts) -> Runtime:
    """The runtime of this process, for one client more, which has `asked` for these settings.

    A process has one seat in its fleet, so all clients and `psfleet.fleet` share one runtime. It is made
    as `fleet.init()` has found, or by `make`.
    """
    global _active, _clients, _lingers
    if _active is None:
        _active = (_make or make)(asked)
        atexit.unregister(_leave)
        atexit.register(_leave)
    _clients += 1
    _lingers = False
    forget_exit()
    return _active


def _leave() -> None:
    """At the end of a script whose seat is still taken: leave, unless it has failed."""
    if (is_held() or _lingers) and not has_failed():
        before = use(None)
        if before is not None:
            before.close()


def is_held() -> bool:
    """Whether a client is open."""
    return _active is not None and _clients > 0


def let_go(runtime: Runtime, timeout: float | None = None) -> None:
    """A client is closed. The runtime is flushed, and closed if nothing else in the process uses it.

    Args:
        timeout: Of a client in whose `with` block something failed: seconds for which a flush waits for
            other workers. It keeps its seat in a fleet until the script ends.
    """
    global _active, _clients, _lingers
    if runtime is _active:
        _clients -= 1
        _lingers = timeout is not None and runtime.server_num > 0
        if _clients or _kept or _make or _lingers:
            runtime.flush(timeout)
            return
        _active = None
    runtime.close()
