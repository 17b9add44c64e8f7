"""Sums over all workers and servers: helpers across workers, `fleet.metrics`, statistics of the tables."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.runtime.process_runtime import active
from psfleet.metrics.classification import area_under_curve

P = ParamSpec("P")
R = TypeVar("R")


class _FleetView(Protocol):
    """Part of the fleet that a helper uses."""

    def worker_index(self) -> int:
        """This worker's index, from 0."""

    def worker_num(self) -> int:
        """Return the number of workers that train."""

    def is_later_stage(self) -> bool:
        """Return whether this process is a stage of a pipeline and not the worker's first."""

    def barrier_worker(self) -> None:
        """Flush, then wait until every worker is here."""


@checked
class Util:
    """Small helpers across workers, as `fleet.util`."""

    def __init__(self, fleet: _FleetView) -> None:
        self._fleet = fleet

    @property
    def worker_index(self) -> int:
        """This worker's index."""
        return self._fleet.worker_index()

    def all_reduce(
        self, input: ArrayLike, mode: str = "sum", comm_world: str = "worker"
    ) -> NDArray[Any]:
        """Equal-shaped arrays of all workers combined, in worker order: sum, max or min."""
        if comm_world != "worker":
            raise UsageError(f"comm_world is {comm_world!r}; only 'worker' has values to reduce")
        values = np.asarray(input)
        if mode == "sum" and self._fleet.is_later_stage():  # all stages of a worker bring the same
            values = np.zeros_like(values)
        return active().all_reduce(values, mode)

    def all_gather(self, input: ArrayLike, comm_world: str = "worker") -> list[NDArray[Any]]:
        """Equal-shaped arrays of all workers, in worker order."""
        own = np.asarray(input)
        index, workers = self._fleet.worker_index(), self._fleet.worker_num()
        values = np.zeros((workers, *own.shape), own.dtype)
        values[index] = own
        return list(self.all_reduce(values, "sum", comm_world))

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until every worker is here."""
        self._fleet.barrier_worker()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """This worker's part of a list of files: contiguous, and of equal length but for one."""
        if isinstance(files, str):
            raise UsageError(f"files is the string {files!r}; it must be a list of file names")
        index, workers = self._fleet.worker_index(), self._fleet.worker_num()
        length, longer = divmod(len(files), workers)
        start = index * length + min(index, longer)
        return list(files[start : start + length + (index < longer)])

    def print_on_rank(self, message: str, rank_id: int) -> None:
        """Print on one worker only."""
        if self._fleet.worker_index() == rank_id and not self._fleet.is_later_stage():
            print(message, flush=True)


class MetricSums(Generic[P, R]):
    """Type of `psfleet.fleet.metrics`: called, it makes `FleetMetrics`; its methods are the reference's.

    Every worker calls a method with what it has counted itself, and gets the value over all of them. The
    arguments `scope` and `util` are those of the reference; variables must have values.
    """

    def __init__(self, make: Callable[P, R], util: Util) -> None:
        self._make = make
        self._util = util

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._make(*args, **kwargs)

    def sum(self, input: ArrayLike, scope: None = None, util: Any = None) -> NDArray[Any]:
        """The sum over all workers, in the shape of the input."""
        return self._reduced("sum", input, "sum", util)

    def max(self, input: ArrayLike, scope: None = None, util: Any = None) -> NDArray[Any]:
        """The largest of all workers, element by element."""
        return self._reduced("max", input, "max", util)

    def min(self, input: ArrayLike, scope: None = None, util: Any = None) -> NDArray[Any]:
        """The smallest of all workers, element by element."""
        return self._reduced("min", input, "min", util)

    def auc(
        self, stat_pos: ArrayLike, stat_neg: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """The area under the ROC curve; 0.5 while only one class has been seen.

        Args:
            stat_pos, stat_neg: Positive and negative samples by bin of the score, lowest first.
        """
        positives = self._reduced("auc", stat_pos, "sum", util).reshape(-1)
        negatives = self._reduced("auc", stat_neg, "sum", util).reshape(-1)
        if len(positives) != len(negatives):
            raise UsageError(
                f"fleet.metrics.auc: stat_pos has {len(positives)} bins and stat_neg {len(negatives)}"
            )
        return area_under_curve(negatives.astype(np.float64), positives.astype(np.float64))

    def mae(
        self, abserr: ArrayLike, total_ins_num: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """The mean absolute error, of the sum of errors and the number of samples."""
        return self._ratio("mae", abserr, total_ins_num, util)

    def mse(
        self, sqrerr: ArrayLike, total_ins_num: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """The mean squared error, of the sum of squares and the number of samples."""
        return self._ratio("mse", sqrerr, total_ins_num, util)

    def rmse(
        self, sqrerr: ArrayLike, total_ins_num: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """The root of the mean squared error."""
        return math.sqrt(self._ratio("rmse", sqrerr, total_ins_num, util))

    def acc(
        self, correct: ArrayLike, total: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """The accuracy, of the numbers of right samples and of all."""
        return self._ratio("acc", correct, total, util)

    def _ratio(self, name: str, part: ArrayLike, whole: ArrayLike, util: Any) -> float:
        """The first value of one sum by that of another; nan: no worker has seen a sample."""
        sums = [float(self._reduced(name, each, "sum", util).flat[0]) for each in (part, whole)]
        return sums[0] / sums[1] if sums[1] else math.nan

    def _reduced(self, name: str, input: Any, mode: str, util: Any) -> NDArray[Any]:
        value = getattr(input, "value", input)  # of a variable; None: it has none yet
        array = np.asarray(value)
        if array.dtype.kind not in "fiu" or not array.size:
            raise UsageError(
                f"fleet.metrics.{name} got {input!r}; give numbers, such as what exe.run has fetched"
            )
        total: NDArray[Any] = (util or self._util).all_reduce(array, mode)
        return total


def print_table_stat(table: str | None) -> None:
    """Print rows, bytes and updates of one table, or of all tables if it is None."""
    for name, entry in table_stat().items():
        if table in (None, name):
            print(
                f"table {name}: {entry['count']:,} {entry['unit']} on {entry['servers']} server(s), "
                f"{entry['bytes'] / 2**20:,.1f} MiB, {entry['step']:,} updates",
                flush=True,
            )


def table_stat() -> dict[str, dict[str, Any]]:
    """Return rows or values, bytes, updates and servers of each table, by its name."""
    totals: dict[str, dict[str, Any]] = {}
    active().flush()
    for server in active().stats():
        for table in server["tables"]:
            unit = "rows" if table["kind"] == "sparse" else "values"
            entry = totals.setdefault(
                table["name"], {"count": 0, "bytes": 0, "step": 0, "servers": 0, "unit": unit}
            )
            entry["count"] += table["count"]
            entry["bytes"] += table["bytes"]
            entry["step"] = max(entry["step"], table["step"])
            entry["servers"] += 1
    return totals


def staleness() -> dict[int, int]:
    """Return how many pushes had each age, in updates that came between their pull and them."""
    total: dict[int, int] = {}
    for server in active().stats():
        for age, count in server.get("staleness", {}).items():
            total[age] = total.get(age, 0) + count
    return dict(sorted(total.items()))
