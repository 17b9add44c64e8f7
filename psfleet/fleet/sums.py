"""Values combined over all workers (`fleet.util`, `fleet.metrics.sum` and others), and statistics summed over
all servers.

Methods that combine values of workers are collectives: every worker must call them, in the same order, and
each call waits for all workers. One worker alone can read the statistics of servers.
"""

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
    """Methods of a Fleet that Util uses."""

    def worker_index(self) -> int:
        """This worker's index, from 0."""

    def worker_num(self) -> int:
        """Return the number of workers that train."""

    def is_later_stage(self) -> bool:
        """Return whether this process is a stage of a worker's pipeline other than the first stage."""

    def barrier_worker(self) -> None:
        """Send this worker's pushes, then wait until every worker has called this."""


@checked
class Util:
    """Collectives and small helpers for a script, available as `fleet.util`.

        total = fleet.util.all_reduce(np.array([loss_sum, count]))

    Every worker must call a collective (`all_reduce`, `all_gather`, `barrier`), and each call waits for all
    workers.
    """

    def __init__(self, fleet: _FleetView) -> None:
        self._fleet = fleet

    @property
    def worker_index(self) -> int:
        """Index of this worker, from 0."""
        return self._fleet.worker_index()

    def all_reduce(
        self, input: ArrayLike, mode: str = "sum", comm_world: str = "worker"
    ) -> NDArray[Any]:
        """Combine an array of each worker element by element, and return the result on every worker.

            total = fleet.util.all_reduce(np.array([loss_sum, count]))

        Every worker must call this. It waits for all workers.

        Args:
            input: Array of this worker. All workers' arrays must have the same shape.
            mode: "sum", "max" or "min". Sums are computed in the order of the workers.
            comm_world: Must be "worker". Accepted because Paddle has it.
        """
        if comm_world != "worker":
            raise UsageError(f"comm_world is {comm_world!r}; only 'worker' has values to reduce")
        values = np.asarray(input)
        # All pipeline stages of a worker pass the same values. A sum must contain them only once.
        if mode == "sum" and self._fleet.is_later_stage():
            values = np.zeros_like(values)
        return active().all_reduce(values, mode)

    def all_gather(self, input: ArrayLike, comm_world: str = "worker") -> list[NDArray[Any]]:
        """Return a list with every worker's array, in the order of the workers, on every worker.

        Every worker must call this, with arrays of the same shape.
        """
        value = np.asarray(input)
        index, workers = self._fleet.worker_index(), self._fleet.worker_num()
        values = np.zeros((workers, *value.shape), value.dtype)
        values[index] = value
        return list(self.all_reduce(values, "sum", comm_world))

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until all workers have called this."""
        self._fleet.barrier_worker()

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """Return this worker's share of a list of files.

            files = fleet.util.get_file_shard(sorted(glob("data/*.txt")))

        The shares are consecutive parts of the list. Their lengths differ by one file at most.
        """
        if isinstance(files, str):
            raise UsageError(f"files is the string {files!r}; it must be a list of file names")
        index, workers = self._fleet.worker_index(), self._fleet.worker_num()
        length, longer = divmod(len(files), workers)
        start = index * length + min(index, longer)
        return list(files[start : start + length + (index < longer)])

    def print_on_rank(self, message: str, rank_id: int) -> None:
        """Print a message on the worker with index `rank_id` only."""
        if self._fleet.worker_index() == rank_id and not self._fleet.is_later_stage():
            print(message, flush=True)


class MetricSums(Generic[P, R]):
    """Type of `psfleet.fleet.metrics`, which can be called and also has methods.

        scores = fleet.metrics([Auc()])                # FleetMetrics, updated during training
        auc = fleet.metrics.auc(positives, negatives)  # Paddle's function: combines counts of all workers

    Every worker must call a method, with its own counts, and gets the value over all workers. An input may
    be an array, a number or a program variable that has a value. `scope` is ignored. `util` replaces the
    fleet's `Util`. Both are Paddle's arguments.
    """

    def __init__(self, make: Callable[P, R], util: Util) -> None:
        self._make = make
        self._util = util

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._make(*args, **kwargs)

    def sum(self, input: ArrayLike, scope: None = None, util: Any = None) -> NDArray[Any]:
        """Return the sum over all workers, element by element."""
        return self._reduced("sum", input, "sum", util)

    def max(self, input: ArrayLike, scope: None = None, util: Any = None) -> NDArray[Any]:
        """Return the largest value of all workers, element by element."""
        return self._reduced("max", input, "max", util)

    def min(self, input: ArrayLike, scope: None = None, util: Any = None) -> NDArray[Any]:
        """Return the smallest value of all workers, element by element."""
        return self._reduced("min", input, "min", util)

    def auc(
        self, stat_pos: ArrayLike, stat_neg: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """Return the area under the ROC curve over all workers, or 0.5 if all samples are of one class.

        Args:
            stat_pos, stat_neg: This worker's numbers of positive and negative samples in each bin of the
                score, lowest score first.
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
        """Return the mean absolute error over all workers.

        Args:
            abserr: This worker's sum of absolute errors.
            total_ins_num: This worker's number of samples.
        """
        return self._ratio("mae", abserr, total_ins_num, util)

    def mse(
        self, sqrerr: ArrayLike, total_ins_num: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """Return the mean squared error over all workers.

        Args:
            sqrerr: This worker's sum of squared errors.
            total_ins_num: This worker's number of samples.
        """
        return self._ratio("mse", sqrerr, total_ins_num, util)

    def rmse(
        self, sqrerr: ArrayLike, total_ins_num: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """Return the root of the mean squared error over all workers. Takes the arguments of `mse`."""
        return math.sqrt(self._ratio("rmse", sqrerr, total_ins_num, util))

    def acc(
        self, correct: ArrayLike, total: ArrayLike, scope: None = None, util: Any = None
    ) -> float:
        """Return the share of correct samples over all workers.

        Args:
            correct: This worker's number of correctly predicted samples.
            total: This worker's number of samples.
        """
        return self._ratio("acc", correct, total, util)

    def _ratio(self, name: str, part: ArrayLike, whole: ArrayLike, util: Any) -> float:
        """Return the ratio of two sums over all workers, or NaN if the second is 0."""
        sums = [float(self._reduced(name, counts, "sum", util).flat[0]) for counts in (part, whole)]
        return sums[0] / sums[1] if sums[1] else math.nan

    def _reduced(self, name: str, input: Any, mode: str, util: Any) -> NDArray[Any]:
        value = getattr(input, "value", input)  # a variable without a value has None
        array = np.asarray(value)
        if array.dtype.kind not in "fiu" or not array.size:
            raise UsageError(
                f"fleet.metrics.{name} got {input!r}; give numbers, such as what exe.run has fetched"
            )
        total: NDArray[Any] = (util or self._util).all_reduce(array, mode)
        return total


def print_table_stat(table: str | None) -> None:
    """Print rows, bytes and updates of one table, or of all tables if `table` is None."""
    for name, entry in table_stat().items():
        if table in (None, name):
            print(
                f"table {name}: {entry['count']:,} {entry['unit']} on {entry['servers']} server(s), "
                f"{entry['bytes'] / 2**20:,.1f} MiB, {entry['step']:,} updates",
                flush=True,
            )


def table_stat() -> dict[str, dict[str, Any]]:
    """Return, for each table name, the number of rows or values, bytes, updates and servers."""
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
    """Return the number of pushes by staleness, summed over the servers, sorted by staleness."""
    total: dict[int, int] = {}
    for server in active().stats():
        for age, count in server.get("staleness", {}).items():
            total[age] = total.get(age, 0) + count
    return dict(sorted(total.items()))
