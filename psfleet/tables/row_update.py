"""A rule at work on the rows of a sparse table, in host memory or on a device behind the same interface."""

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.dedup import merge_pushes
from psfleet.kernels.generate import pull_kernels, sparse_kernels
from psfleet.kernels.initial_values import address_of, initializer_arguments
from psfleet.kernels.packed_text import RowFormat
from psfleet.kernels.rule_text import scratch_for
from psfleet.schema.table import TableSpec
from psfleet.tables.host_rows import HostRowMemory

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class DeviceValues(Protocol):
    """float32 [n, width] on a device."""

    def __getitem__(self, mask: NDArray[np.bool_]) -> "DeviceValues":
        """Some of the rows. What they were chosen from is of no use any more."""

    def to_host(self) -> Floats:
        """A copy of the rows in host memory."""


RowValues = Floats | DeviceValues
"""One row of values for each id of a push, wherever they lie."""


class RowUpdate(Protocol):
    """Pulls and pushes of one table. Not thread-safe."""

    def pull_into(self, ids: Ids, out: Floats) -> int:
        """Write the weights of ids to `out`, float32 [n, dim]; of an unknown id its first values.

        Returns:
            How many ids were unknown.
        """

    def mean(self, parts: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, RowValues]:
        """The ids of several pushes, in the order in which they first come, and the means of their gradients.

        Each sum is taken in the order of the pushes, and shows and clicks are summed alone. None of the
        pushes names an id twice. The means are of use for the next `push` only.
        """

    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        """Update the rows of these ids; unknown ones are added first.

        Args:
            ids: int64 [n], no id twice, any alignment.
            gradients: float32 [n, TableSpec.push_width], contiguous, any alignment.
            scalars: Scalars of psfleet.kernels.rule_text.scalars_of.
            step: Number of this update, from 1.
        """

    def rest(self, scalars: Floats, step: int) -> None:
        """Update every row that the push of this step did not name, with a zero gradient."""


def host_pull_kernels(spec: TableSpec) -> ModuleType:
    """The kernels that read a table's rows in host memory."""
    form = RowFormat(spec.rule, spec.dim, spec.precision)
    return pull_kernels(spec.dim, form.plain, 4 * (form.words + spec.scores))


def host_kernels(spec: TableSpec, rests: bool = False) -> ModuleType:
    """The kernel of a table's rule for rows in host memory: of those that a push names, or that rest."""
    return sparse_kernels(
        spec.rule,
        bool(spec.decay.l1),
        bool(spec.decay.l2),
        spec.dim,
        rests,
        spec.pushed_scores,
        spec.counts_frequency,
        spec.precision,
    )


class HostRowUpdate:
    """See RowUpdate."""

    def __init__(self, spec: TableSpec, index: HostRowMemory) -> None:
        rule = spec.rule
        self._index = index
        self._dim = spec.dim
        self._turns = rule.turns
        self._push, self._pull = host_kernels(spec).push, host_pull_kernels(spec).pull
        self._rest = host_kernels(spec, rests=True).rest if spec.every_row else None
        self._initial = initializer_arguments(spec.initializer, spec.seed, spec.name)
        self._ring = np.empty(192, np.int64)
        self._scratch = scratch_for(rule, RowFormat(rule, spec.dim, spec.precision).width)
        self._zeros = np.zeros(spec.dim, np.float32)

    def pull_into(self, ids: Ids, out: Floats) -> int:
        """See RowUpdate."""
        unknown: int = self._pull(
            self._index.address,
            address_of(ids),
            len(ids),
            address_of(out),
            *self._initial,
            address_of(self._ring),
        )
        return unknown

    def mean(self, parts: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, Floats]:
        """See RowUpdate."""
        ids, rows = merge_pushes(parts, 1.0 / len(parts))
        if rows.shape[1] > self._dim:
            counts = [(ids, values[:, self._dim :]) for ids, values in parts]
            rows[:, self._dim :] = merge_pushes(counts, 1.0)[1]
        return ids, rows

    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        """See RowUpdate."""
        assert isinstance(gradients, np.ndarray)
        self._index.expect(len(ids))
        self._push(
            self._index.address,
            address_of(ids),
            len(ids),
            address_of(gradients),
            address_of(scalars),
            (step - 1) % self._turns if self._turns else 0,
            step,
            *self._initial,
            address_of(self._ring),
            address_of(self._scratch),
        )

    def rest(self, scalars: Floats, step: int) -> None:
        """See RowUpdate."""
        assert self._rest is not None
        self._rest(
            self._index.address,
            address_of(scalars),
            (step - 1) % self._turns if self._turns else 0,
            step,
            address_of(self._zeros),
            self._initial[-1],
            address_of(self._scratch),
        )
