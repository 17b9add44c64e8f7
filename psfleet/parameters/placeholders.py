"""What stands where a parameter's table would: a promise of one, or an average to look at."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.parameters.parameter import Parameter, check_rows, fetch
from psfleet.runtime import interface as runtimes
from psfleet.runtime.pooled_ids import Asked, PooledIds
from psfleet.schema.table import key_of

__all__ = ["AveragedBinding", "LazyBinding"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class LazyBinding:
    """Stands in for a parameter's table until the value is needed; then the table is made.

    So a run starts from the value that the fleet has, not from the one that this process would start
    with. Implements psfleet.parameters.parameter.Binding.

    Args:
        take: Makes the table of a parameter.
        early: Make it even if the runtime is embedded and has no such table yet.
    """

    def __init__(self, take: Callable[[Parameter], Any], early: bool) -> None:
        self._take = take
        self._early = early

    def value(self, parameter: Parameter) -> Floats:
        """The whole current value."""
        with self._settled([parameter]):
            return parameter.numpy()

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Current rows of a sparse parameter."""
        with self._settled([parameter]):
            return parameter.lookup(ids)

    def pooled(self, parameter: Parameter, asked: PooledIds) -> tuple[PooledIds, Floats]:
        """What is pooled of them."""
        with self._settled([parameter]):
            return parameter.pooled(asked)

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Make the tables and bring what the step needs."""
        with self._settled([*dense, *(p for p, _ in sparse)]):
            fetch(dense, sparse)

    @contextlib.contextmanager
    def _settled(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        runtime, parameters = runtimes.active(), list({id(p): p for p in parameters}.values())
        for parameter in parameters:
            parameter.binding = None
            if self._early or runtime.server_num or key_of(parameter.name) in runtime.specs():
                self._take(parameter)
        yield
        for parameter in parameters:
            parameter.binding = parameter.binding or self


class AveragedBinding:
    """Shows an average in place of a parameter's value. Implements psfleet.parameters.parameter.Binding.

    While it does, a run of the training program only evaluates.
    """

    read_only = True

    def __init__(self, average: Floats) -> None:
        self._average = average
        average.flags.writeable = False

    def value(self, parameter: Parameter) -> Floats:
        """The average."""
        return self._average

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Rows of the average."""
        check_rows(parameter, ids)
        rows: Floats = self._average[ids]
        return rows

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Nothing: it is all here."""
