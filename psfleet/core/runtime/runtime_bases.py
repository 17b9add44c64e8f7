"""Base classes of runtimes: one forwards every call to another runtime, one refuses every change.

A consistency mode, local SGD and read-only runtimes are built on them: each overrides the methods in which it
differs.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import TableConflict, UsageError
from psfleet.core.engine.interface import (
    CompletedPull,
    Gradient,
    PendingPull,
    Read,
    Runtime,
    TableState,
)
from psfleet.core.engine.schema.table import TableSpec

Floats = NDArray[np.float32]
F = TypeVar("F", bound=Callable[..., Any])


def handed_on(method: F) -> F:
    """Return an attribute of a ForwardingRuntime that is this method of the runtime below.

    A call of it costs no more than a call of the runtime below: an attribute look-up, and no second frame.
    """
    return cast(F, property(attrgetter(f"_fleet.{method.__name__}")))


class ForwardingRuntime:
    """Runtime that forwards every call to another one; the base of runtimes that change a few calls.

    Implements psfleet.core.engine.interface.Runtime. Two things are not forwarded, so that a subclass may
    override `pull` and `push` alone: `pull_ahead` is a plain `pull` of this object, and bags are not accepted
    (`pools` is False). A subclass that handles them switches them on.

    Args:
        fleet: Runtime that gets the calls. Its other attributes can be read from this object too.
    """

    pools = False
    reads_ahead = False

    worker_index = property(attrgetter("_fleet.worker_index"))
    worker_num = property(attrgetter("_fleet.worker_num"))
    server_num = property(attrgetter("_fleet.server_num"))
    create = handed_on(Runtime.create)
    open = handed_on(Runtime.open)
    pull = handed_on(Runtime.pull)
    push = handed_on(Runtime.push)
    flush = handed_on(Runtime.flush)
    barrier = handed_on(Runtime.barrier)
    all_reduce = handed_on(Runtime.all_reduce)
    read_table = handed_on(Runtime.read_table)
    write_table = handed_on(Runtime.write_table)
    shrink = handed_on(Runtime.shrink)
    evictions = handed_on(Runtime.evictions)
    save = handed_on(Runtime.save)
    load = handed_on(Runtime.load)
    specs = handed_on(Runtime.specs)
    stats = handed_on(Runtime.stats)
    close = handed_on(Runtime.close)

    def __init__(self, fleet: Runtime) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        return CompletedPull(self.pull(reads))


class ReadOnlyRuntime:
    """Base of runtimes that refuse every change of a table with a UsageError.

    Attributes:
        source: Name of the tables' owner, for messages.
        instead: Advice for messages: how to change the tables.
    """

    source: str
    instead: str

    def open(self, name: str) -> TableSpec:
        raise NotImplementedError

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Return the key of an existing table; the declared optimizer and first values are ignored.

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

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> NoReturn:
        """Raise UsageError."""
        self.refuse("be pushed to")

    def write_table(self, table: int, state: TableState) -> NoReturn:
        """Raise UsageError."""
        self.refuse("be written to")

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> NoReturn:
        """Raise UsageError."""
        self.refuse("be shrunk")

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> NoReturn:
        """Raise UsageError."""
        self.refuse("be saved")

    def load(self, path: str) -> NoReturn:
        """Raise UsageError."""
        self.refuse("be loaded into")

    def refuse(self, what: str) -> NoReturn:
        """Raise UsageError; `what` ends the sentence "the tables cannot ..."."""
        raise UsageError(
            f"the tables of {self.source} can be read only, and cannot {what}; {self.instead}"
        )
