"""Several plain tables in one call: every table's part is checked before anything is sent."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.optimizer.optimizer import Optimizer
from psfleet.parameters.parameter_client import write_weights
from psfleet.runtime.interface import Gradient, PendingPull, Read, Runtime, as_asked
from psfleet.schema.table import TableSpec
from psfleet.validation.annotations import checked

Floats = NDArray[np.float32]
T = TypeVar("T", bound="ClientTable")


@checked
class ClientTable:
    """Part of a table that a call for several tables uses.

    It is no abstract class: whether a table is one of those takes 2 us, for each table of each call.

    Attributes:
        spec: The table's definition.
        optimizer: Gives the learning rate of each push; None: the table is only read.
    """

    def __init__(self, runtime: Runtime, spec: TableSpec, optimizer: Optimizer | None) -> None:
        self._runtime = runtime
        self.spec = spec
        self.optimizer = optimizer

    def _rate(self) -> float:
        """Return the learning rate of a push.

        Raises:
            UsageError: The table is only read.
        """
        if self.optimizer is None:
            self._refuse("pushed to")
        return self.optimizer.get_lr()

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"table {self.spec.name!r} was opened without an optimizer, so it can be read and not {what}; "
            f"give {self.spec.kind}_table() its optimizer"
        )

    def _write(self, values: Any, ids: NDArray[np.int64] | None = None) -> None:
        """Set weights; see `write` of the tables."""
        if self.optimizer is None:
            self._refuse("written to")
        write_weights(self._runtime, self.spec, values, ids)

    def _read(self, ids: Any) -> Read:
        """Return the table's part of a pull.

        Raises:
            UsageError: `ids` cannot be one.
        """
        raise NotImplementedError

    def _gradient(self, part: Any) -> Gradient:
        """Return the table's part of a push.

        Raises:
            UsageError: `part` cannot be one.
        """
        raise NotImplementedError


class TablesAhead(Generic[T]):
    """Values of several tables on their way, see `Client.pull_ahead`."""

    def __init__(self, ids: Mapping[T, Any], reads: Sequence[Read], pull: PendingPull) -> None:
        self._asked = dict(ids)
        self._reads = reads
        self._awaited = pull

    def wait(self) -> dict[T, Floats]:
        """Return the values by table, as `Client.pull` returns them."""
        return by_table(self._asked, self._reads, self._awaited.wait())


def by_table(
    ids: Mapping[T, Any], reads: Sequence[Read], values: Sequence[Floats]
) -> dict[T, Floats]:
    """Return the values with the tables as keys, in the order of the call.

    Args:
        ids: See `Client.pull`.
        reads: Result of `reads_of`.
        values: The values of each read.
    """
    return {
        table: as_asked(part, read, value)
        for (table, part), read, value in zip(ids.items(), reads, values, strict=True)
    }


def reads_of(runtime: Runtime, ids: Mapping[T, Any]) -> list[Read]:
    """Return the reads for which `Client.pull` asks the runtime.

    Raises:
        UsageError: One of the parts cannot be meant; the error names its table.
    """
    return [table._read(part) for table, part in _parts(runtime, ids, "pull")]


def gradients_of(runtime: Runtime, gradients: Mapping[T, Any]) -> list[Gradient]:
    """Return the gradients that `Client.push` gives to the runtime.

    Raises:
        UsageError: One of the parts cannot be meant; the error names its table.
    """
    return [table._gradient(part) for table, part in _parts(runtime, gradients, "push")]


def _parts(runtime: Runtime, parts: Mapping[T, Any], call: str) -> Sequence[tuple[T, Any]]:
    for table in parts:
        if not isinstance(table, ClientTable):
            raise UsageError(
                f"a key of this {call} is {table!r}; it must be a table, "
                "as sparse_table() and dense_table() return it"
            )
        if table._runtime is not runtime:
            raise UsageError(
                f"table {table.spec.name!r} belongs to another client; {call} it with that one"
            )
    return list(parts.items())
