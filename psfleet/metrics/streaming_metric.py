"""Base class of metrics (Metric), checks of their batches, and the table in which the servers add up the
sums.

A metric stores a fixed number of sums over samples and no samples. Its memory does not grow, and the sums
of workers can be added in any order. In a fleet, workers push the sums as rows of a separate table
(SumTable).
"""

import base64
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.base.validation.annotations import Numbers, PositiveInt, checked
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, TableState
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


_WIDTH = 32  # sums of a row
_SALT = 16  # bits of an id whose only purpose is to choose the server of its row


@dataclass(frozen=True, slots=True)
class Batch:
    """Checked samples of one `update`. Predictions, labels and weights are finite, and weights at least 0.

    Attributes:
        predictions, labels: float64 [n].
        weights: float64 [n], or None if all weights are 1.
        slices: Slice of each sample, int64 [n], or None if all samples are in slice 0.
        groups: Group of each sample, [n] of any type that can be sorted, or None if unknown.
        users, items: User and item of each sample, int64 [n], or None if unknown.
    """

    predictions: Floats
    labels: Floats
    weights: Floats | None = None
    slices: Ids | None = None
    groups: NDArray[Any] | None = None
    users: Ids | None = None
    items: Ids | None = None

    @classmethod
    def of(
        cls,
        preds: Numbers,
        labels: Numbers,
        weights: Numbers | None = None,
        slices: Numbers | None = None,
        groups: Numbers | None = None,
        users: Numbers | None = None,
        items: Numbers | None = None,
    ) -> "Batch":
        """Return a Batch from the arguments of `Metric.update`, checked and flattened.

        Raises:
            ShapeError: The arguments differ in length, or a number is not finite or out of range.
        """
        scores = np.asarray(preds)
        if scores.ndim == 2 and scores.shape[1] == 2:
            scores = scores[:, 1]
        predictions = finite_numbers(scores, "prediction")
        n = len(predictions)
        weighted = (
            None if weights is None else _as_many(finite_numbers(weights, "weight"), n, "weights")
        )
        if weighted is not None and n and weighted.min() < 0:
            raise ShapeError(f"weight {weighted.min()} is negative; give weights of at least 0")
        return cls(
            predictions,
            _as_many(finite_numbers(labels, "label"), n, "labels"),
            weighted,
            whole_numbers(slices, n, "slices"),
            None if groups is None else _as_many(np.asarray(groups).reshape(-1), n, "groups"),
            whole_numbers(users, n, "users"),
            whole_numbers(items, n, "items"),
        )

    def __len__(self) -> int:
        return len(self.predictions)

    def weighted(self, values: Floats) -> Floats:
        """Return the values multiplied by the weights of the samples."""
        return values if self.weights is None else values * self.weights

    def check_probabilities(self, what: str) -> None:
        """Check that all predictions are in [0, 1].

        Args:
            what: Name of the metric, for messages.

        Raises:
            ShapeError: A prediction is outside [0, 1].
        """
        low, high = (self.predictions.min(), self.predictions.max()) if len(self) else (0, 0)
        if low < 0 or high > 1:
            raise ShapeError(
                f"{what} needs scores in [0, 1]; they are {low} to {high} (of logits take the sigmoid)"
            )


def finite_numbers(numbers: Numbers, what: str) -> Floats:
    """Return the numbers as float64 [n].

    Raises:
        ShapeError: A number is NaN or infinite. The message quotes it.
    """
    values = np.asarray(numbers, np.float64).reshape(-1)
    if not np.isfinite(values).all():
        position = int(np.argmin(np.isfinite(values)))
        raise ShapeError(f"{what} {position} is {values[position]}; metrics need finite numbers")
    return values


def whole_numbers(numbers: Numbers | None, n: int, what: str) -> Ids | None:
    """Return the numbers as int64 [n], or None for None.

    Args:
        numbers: Whole numbers, or None.
        what: Name of the argument, for messages.

    Raises:
        ShapeError: The numbers are not whole, or there is not one for each sample.
    """
    if numbers is None:
        return None
    values = np.asarray(numbers).reshape(-1)
    if len(values) and values.dtype.kind not in "iu":
        raise ShapeError(f"{what} have dtype {values.dtype}; give whole numbers from 0")
    return _as_many(values.astype(np.int64), n, what)


def _as_many(values: NDArray[Any], n: int, argument: str) -> NDArray[Any]:
    if len(values) != n:
        raise ShapeError(f"there are {len(values)} {argument} for {n} scores; give one for each")
    return values


@checked
class Metric(ABC):
    """Metric over many batches. Base class of all metrics.

        auc = Auc()
        for predictions, labels in batches:
            auc.update(predictions, labels)
        print(auc.result())

    A metric consists of sums over samples, which can be added over batches and processes in any order
    (`merge`). A subclass defines `size`, `sums_of` and `score`.

    Attributes:
        name: Label of the results.
        sums: Sums of each slice, float64 [slices, size]. `score` computes the value of a slice from its sums.
    """

    default_name = "metric"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.default_name
        self.sums = np.zeros((1, self.size))

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of sums of one slice."""

    @abstractmethod
    def sums_of(self, batch: Batch) -> Floats:
        """Return the sums of a batch: float64 [slices, size]."""

    @abstractmethod
    def score(self, sums: Floats) -> float:
        """Return the value for sums, float64 [size], of a slice or of all samples. NaN if it is undefined."""

    def layout(self) -> str:
        """Return a text that identifies the meaning of the sums. Two metrics' sums can be added if it is
        equal."""
        return f"{type(self).__name__} {self.sums.shape}"

    def sliced(self, slices: PositiveInt) -> Self:
        """Return a new metric with the same parameters, without samples, for a number of slices."""
        metric = copy.copy(self)
        metric.sums = np.zeros((slices, self.size))
        return metric

    def update(
        self,
        preds: Numbers,
        labels: Numbers,
        weights: Numbers | None = None,
        slices: Numbers | None = None,
        groups: ArrayLike | None = None,
        users: Numbers | None = None,
        items: Numbers | None = None,
    ) -> None:
        """Add a batch of samples.

            auc.update(predictions, labels)

        Args:
            preds: Predictions [n] or [n, 1], or [n, 2] with the prediction in the second column.
            labels: A label for each sample.
            weights: A number of at least 0 for each sample, or None for weights of 1.
            slices: Slice of each sample, whole numbers from 0, or None for slice 0.
            groups: User, query or session of each sample, for metrics that rank within groups.
            users: User of each sample, whole numbers from 0, for metrics with the argument `users`.
            items: Item of each sample, whole numbers from 0, for `Coverage`.

        Raises:
            ShapeError: The arrays differ in length, or a value is not allowed. Nothing was added.
        """
        self.add(Batch.of(preds, labels, weights, slices, groups, users, items))

    def add(self, batch: Batch) -> None:
        """Add a checked batch.

        Raises:
            ShapeError: The batch does not fit this metric, or has a slice that the metric does not have.
        """
        self.check(batch)
        self.sums += self.sums_of(batch)

    def check(self, batch: Batch) -> None:
        """Check that a batch fits this metric, for example that it has groups.

        Raises:
            ShapeError: The batch does not fit.
        """
        slices = batch.slices
        if (
            slices is not None
            and len(slices)
            and not 0 <= slices.min() <= slices.max() < len(self.sums)
        ):
            raise ShapeError(
                f"slices are {slices.min()} to {slices.max()}; metric {self.name!r} has the slices "
                f"0 to {len(self.sums) - 1}"
            )

    def result(self, slice: int | None = None) -> float:
        """Return the value over the samples of a slice, or over all samples if `slice` is None."""
        return self.score(self.sums.sum(axis=0) if slice is None else self.sums[slice])

    def scores(self, sums: Floats) -> dict[str, float]:
        """Return the values for sums [size] by label: the value, and in some metrics its error."""
        return {self.name: self.score(sums)}

    def merge(self, other: Self) -> None:
        """Add the samples of another metric with the same parameters."""
        if not isinstance(other, Metric) or other.layout() != self.layout():
            raise ConfigError(
                f"metric {self.name!r} is {self.layout()}, and the other is {other!r}; "
                "merge metrics with the same parameters"
            )
        self.sums += other.sums

    def state(self) -> Floats:
        """Return a copy of the sums, float64 [slices, size], for `load`."""
        return self.sums.copy()

    def load(self, state: Numbers) -> None:
        """Replace the sums by sums that `state` has returned."""
        values = np.asarray(state, np.float64)
        if values.shape != self.sums.shape:
            raise ShapeError(
                f"the state of metric {self.name!r} is {values.shape}; it must be {self.sums.shape}"
            )
        self.sums[...] = values

    def reset(self) -> None:
        """Set all sums to zero."""
        self.sums[...] = 0


def sums_by_slice(columns: Sequence[Floats], slices: Ids | None, count: int) -> Floats:
    """Return the sum of each column [n] in each slice, float64 [count, len(columns)].

    Args:
        columns: Terms of each sum, with one term for each sample.
        slices: Slice of each sample, or None if all samples are in slice 0.
    """
    if slices is None:
        sums = np.zeros((count, len(columns)))
        sums[0] = [column.sum() for column in columns]
        return sums
    return np.stack(
        [cast(Floats, np.bincount(slices, column, minlength=count)) for column in columns], axis=1
    )


class SumTable:
    """Sums of one process that were not pushed yet, and the table on the servers to push them to.

    Each 32 sums take two rows of the table. The first has the float32 values of the sums, the second the
    differences to the exact values. (The second is not sent if all are 0, as for whole numbers below
    2**24.) The servers add them with the rule `exact_sum`, which itself stores each value as a pair of
    float32, so a sum has at least 47 bits. All rows are on the same server, so that a push is applied
    completely or not at all and a read is consistent.

    Args:
        layout: Digest of the meaning of the sums. A worker whose digest differs cannot use a table of this
            name.
        servers: Function that returns the present number of servers, or 0 without a cluster.

    Attributes:
        pending: Sums that were not pushed yet, float64 [size]. Hold `lock` to change them.
        lock: Lock for `pending`.
    """

    def __init__(self, name: str, size: int, layout: int, servers: Callable[[], int]) -> None:
        rule, zero = make_rule("exact_sum", {}), InitializerSpec("constant", 0.0)
        self.spec = TableSpec(name, "sparse", (_WIDTH,), rule, initializer=zero, seed=layout)
        self.lock = threading.Lock()
        rows = -(-size // _WIDTH)
        self._rows = np.zeros((rows, _WIDTH))
        self.pending = self._rows.reshape(-1)[:size]
        self._servers = servers
        self._ids, self._dealt = np.zeros(2 * rows, np.int64), 0
        self._left: tuple[Ids, Floats] | None = None
        self._shared: Floats | None = (
            None  # sums of all workers that the next round will add to the table
        )

    def leave(self) -> Gradient | None:
        with self.lock:
            self._shared = None
            self._give_back()
            rows = np.flatnonzero(self._rows.any(axis=1))
            if not len(rows):
                return None
            values = self._rows[rows]
            self._rows[rows] = 0
            self._left = rows, values
        return self._gradient(rows, values)

    def arrived(self) -> None:
        with self.lock:
            self._left = None

    def share(self, reduce: Callable[[Floats], Floats], carries: bool) -> None:
        """Add up the pending sums of all workers, and let one worker's next push send the total.

        All workers must call this, and their next pushes must be in the same round. Otherwise a worker
        could read the same sums twice.

        Args:
            reduce: Function that returns the sum of an array over all workers.
            carries: True if this worker's next push sends the total.
        """
        with self.lock:
            self._give_back()
            local_sums = self.pending.copy()
        total = reduce(local_sums)
        with self.lock:
            self.pending[:] = total if carries else 0
            self._shared = total

    def _give_back(self) -> None:
        if self._left is not None:
            rows, values = self._left
            self._rows[rows] += values
            self._left = None

    def _gradient(self, rows: Ids, values: Floats) -> Gradient:
        large = values.astype(np.float32)
        small = (values - large).astype(np.float32)
        inexact = small.any(axis=1)
        if (servers := self._servers() or 1) != self._dealt:
            self._ids = _ids_on_one_server(len(self._ids), self.spec.key, servers)
            self._dealt = servers
        ids = np.concatenate([self._ids[2 * rows], self._ids[2 * rows[inexact] + 1]])
        return Gradient(self.spec.key, np.concatenate([large, small[inexact]]), ids, 1.0)

    def totals(self, state: TableState) -> Floats:
        """Return the sums, float64 [size], from the complete content of the table.

        The result includes rows that were pushed while the fleet had another number of servers.
        """
        rows = np.zeros_like(self._rows)
        if state.ids is not None and len(state.ids):
            values = np.sum(state.values, axis=0, dtype=np.float64)
            np.add.at(rows, state.ids >> (_SALT + 1), values)
        totals = rows.reshape(-1)[: len(self.pending)]
        return totals if self._shared is None else totals + self._shared

    def state_dict(self) -> dict[str, Any]:
        """Return the sums that were not pushed yet, in a form that JSON can represent."""
        with self.lock:
            positions = np.flatnonzero(self.pending)
            values = self.pending[positions]
        return {"places": _text(positions), "sums": _text(values)}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        positions = np.frombuffer(base64.b64decode(state["places"]), np.int64)
        with self.lock:
            self._left = None
            self.pending[:] = 0
            self.pending[positions] = np.frombuffer(base64.b64decode(state["sums"]), np.float64)


def _text(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _ids_on_one_server(count: int, key: int, servers: int) -> Ids:
    """Return an id for each of the rows 0, 1, 2, ..., such that the same server has all rows.

    Args:
        key: Key of the table, which determines the server.
    """
    ids, missing = np.zeros(count, np.int64), np.arange(count)
    for salt in range(1 << _SALT):
        candidates = missing << _SALT | salt
        is_on_server = owned_by(candidates, key % servers, servers)
        ids[missing[is_on_server]], missing = candidates[is_on_server], missing[~is_on_server]
        if not len(missing):
            break
    return ids
