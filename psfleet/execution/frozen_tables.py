"""Parameters of a program that predicts: they are never updated."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import TableConflict
from psfleet.parameters.parameter import Parameter, check_rows
from psfleet.rules.momentum import SGD
from psfleet.runtime.interface import Asked, Read, Runtime, TableState
from psfleet.schema.table import TableSpec, key_of

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class FrozenTables:
    """Tables of a runtime as a program reads them. Implements psfleet.parameters.parameter.Binding."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __contains__(self, name: str) -> bool:
        return key_of(name) in self.runtime.specs()

    def add(self, parameter: Parameter, ids: Ids, rows: Floats) -> None:
        """Make a sparse parameter's table of these rows."""
        start, seed = parameter.initializer, parameter.seed
        spec = TableSpec(
            parameter.name, "sparse", (parameter.shape[1],), SGD(), initializer=start, seed=seed
        )
        self.runtime.create(spec)
        self.runtime.write_table(spec.key, TableState(0, [rows], ids))
        parameter.binding = self

    def bind(self, parameter: Parameter) -> None:
        """Let a parameter read its table.

        Raises:
            TableConflict: The table has another shape.
        """
        spec = self.runtime.specs()[key_of(parameter.name)]
        shape = parameter.shape if spec.kind == "dense" else parameter.shape[1:]
        if (*shape,) != spec.shape:
            raise TableConflict(
                f"table {spec.name!r} is {spec.kind} of shape {spec.shape}, and the program's parameter is "
                f"of shape {(*parameter.shape,)}"
            )
        parameter.binding = self

    def value(self, parameter: Parameter) -> Floats:
        """The whole value."""
        spec = self.runtime.specs()[key_of(parameter.name)]
        if spec.kind == "sparse":
            return self.lookup(parameter, np.arange(parameter.shape[0]))
        return self.runtime.pull([Read(spec.key)])[0]

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Rows of a sparse parameter."""
        check_rows(parameter, ids)
        key = key_of(parameter.name)
        if self.runtime.specs()[key].kind == "dense":
            rows: Floats = self.value(parameter)[ids]
            return rows
        return self.runtime.pull([Read(key, ids)])[0]

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Nothing to bring: the rows are here."""
