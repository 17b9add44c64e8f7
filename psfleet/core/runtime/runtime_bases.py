"""Bases of runtimes: one that hands every call to another runtime, and one whose tables are only read."""

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
    """Return an attribute that is this method of the runtime below, so that no call lies between."""
    return cast(F, property(attrgetter(f"_fleet.{method.__name__}")))


class ForwardingRuntime:
    """Implements psfleet.core.engine.interface.Runtime; see there what each method does.

    Only `pull_ahead` is not handed on, but a plain pull: else a subclass that changes `pull` alone would
    return other values when it reads ahead. Nor does it take bags, which its subclasses would have to know.

    Args:
        fleet: The runtime that gets the calls. What only it has can be asked of this runtime too.
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
    """The part of psfleet.core.engine.interface.Runtime that would change a table: all of it is refused.

    Attributes:
        source: Name of the tables' owner, for messages.
        instead: Advice on how to change them.
    """

    source: str
    instead: str

    def open(self, name: str) -> TableSpec:
        raise NotImplementedError

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Find the table: what is declared of its optimizer and its first values does not count.

        Raises:
            UnknownTable: There is no such table.
            TableConflict: It has another kind or shape.
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
        """Refused, as all that changes a table."""
        self.refuse("be pushed to")

    def write_table(self, table: int, state: TableState) -> NoReturn:
        """Refused."""
        self.refuse("be written to")

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> NoReturn:
        """Refused."""
        self.refuse("be shrunk")

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> NoReturn:
        """Refused."""
        self.refuse("be saved")

    def load(self, path: str) -> NoReturn:
        """Refused."""
        self.refuse("be loaded into")

    def refuse(self, what: str) -> NoReturn:
        """Raise UsageError: the tables cannot `what`."""
        raise UsageError(
            f"the tables of {self.source} can be read only, and cannot {what}; {self.instead}"
        )
