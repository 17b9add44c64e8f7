"""What runtimes have in common whose tables are only read: those of a checkpoint, and of a running job."""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import TableConflict, UsageError
from psfleet.runtime.interface import Gradient, TableState
from psfleet.schema.table import TableSpec

__all__ = ["ReadOnlyRuntime"]

Floats = NDArray[np.float32]


class ReadOnlyRuntime:
    """The part of psfleet.runtime.interface.Runtime that would change a table: all of it is refused.

    Attributes:
        source: Whose tables they are, for messages.
        instead: What to do to change them.
    """

    source: str
    instead: str

    def open(self, name: str) -> TableSpec:
        """See Runtime.open."""
        raise NotImplementedError

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Find the table: what is declared of its optimizer and its first values does not count.

        Raises:
            UnknownTable: There is no such table.
            TableConflict: It has another kind or shape.
        """
        found = self.open(spec.name)
        if (found.kind, found.shape) != (spec.kind, spec.shape):
            raise TableConflict(
                f"table {spec.name!r} of {self.source} is {found.kind} of shape {found.shape}, and the "
                f"script declares it {spec.kind} of shape {spec.shape}"
            )
        return found.key

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
