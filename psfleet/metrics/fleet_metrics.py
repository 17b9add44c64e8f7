"""FleetMetrics: metrics over the samples of all workers, over the whole run, over a window, and with decay.

Each worker adds its batches to sums in its memory. Its next push sends the sums to a table on the servers,
which any worker can read at any time (docs/metrics.md). A *reading* is one call of `FleetMetrics.read`.
"""

import functools
import hashlib
import operator
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import ConfigError, ShapeError, TableConflict
from psfleet.core.base.forks import check_process
from psfleet.core.base.validation.annotations import Numbers, checked
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.engine.schema.table import OWN
from psfleet.data.feature_sets.jagged import as_jagged
from psfleet.metrics.streaming_metric import Batch, Metric, SumTable

Floats = NDArray[np.float64]


Ids = NDArray[np.int64]
Slices = Sequence[str] | Mapping[str, Sequence[int | str]]
_OTHER = "other"
Tasks = Mapping[str, Sequence[Metric]] | Sequence[Metric]


@dataclass(frozen=True)
class MetricReading:
    """Values of metrics at one time. `read` of FleetMetrics returns them.

    Values are listed by name: "auc", "ctr/auc" for the task ctr, "ctr/auc[mobile]" for the slice mobile of
    the task.

    Attributes:
        run: Values over the whole run.
        window: Values over the samples since the reading `window` readings ago. Empty if the window is 0.
        decayed: Values with decay: samples between two readings have `decay` times the weight of the
            samples in the next such interval. Empty if the decay is 0.
    """

    run: dict[str, float]
    window: dict[str, float] = field(default_factory=dict)
    decayed: dict[str, float] = field(default_factory=dict)


class Readings:
    """Sums of earlier readings, needed to compute sums over a window and sums with decay.

    Takes a fixed amount of memory.

    Args:
        window: Number of readings in the window, or 0 for no window.
        decay: Weight of an interval between two readings relative to the next interval, or 0 for no decay.

    Raises:
        ConfigError: `window` or `decay` is out of range.
    """

    def __init__(self, window: int, decay: float) -> None:
        if window < 0:
            raise ConfigError(f"window is {window}; give a number of readings, or 0 for none")
        if not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay}; it must be at least 0 and below 1")
        self._decay = decay
        self._earlier: deque[Floats] = deque(maxlen=max(window, 1))
        self._last: Floats | None = None
        self._decayed: Floats | None = None

    def window(self, totals: Floats) -> Floats:
        """Return the sums over the window that ends now.

        Args:
            totals: Sums over the whole run.
        """
        full = len(self._earlier) == self._earlier.maxlen
        sums = totals - self._earlier[0] if full else totals
        self._earlier.append(totals)
        return sums

    def decayed(self, totals: Floats) -> Floats:
        """Return the sums with decay.

        Args:
            totals: Sums over the whole run.
        """
        if self._last is None or self._decayed is None:
            self._decayed = totals
        else:
            self._decayed = self._decay * self._decayed + (totals - self._last)
        self._last = totals
        return self._decayed


class MetricSlices:
    """Slices of a FleetMetrics: groups of samples for which every metric is also computed separately.

    Args:
        slices: Names of slices; `update` then gets the number of each sample's slice. Or values of
            features, such as {"device": ["phone", "desktop"]}: then each value is a slice, and all other
            values of the feature share the slice "other".

    Attributes:
        count: Number of slices, or 1 without slices.
        labels: Label of each slice in readings.
        whole: Range of slices that together contain each sample exactly once.

    Raises:
        ConfigError: A value is listed twice, or is called "other".
    """

    def __init__(self, slices: Slices) -> None:
        self._features: dict[str, dict[Any, int]] = {}  # the slice of each value
        if not isinstance(slices, Mapping):
            self.labels = list(slices)
            self.count = max(len(slices), 1)
            self.whole = slice(self.count)
            return
        self.labels = []
        for feature, values in slices.items():
            number_of = {value: len(self.labels) + k for k, value in enumerate(values)}
            if len(number_of) < len(values) or _OTHER in number_of or isinstance(values, str):
                raise ConfigError(
                    f"the slices of feature {feature!r} are {values!r:.80}; give a list of values, each "
                    f"once, and none called {_OTHER!r}, where all values that are not listed are"
                )
            number_of[_OTHER] = len(self.labels) + len(values)
            self._features[feature] = number_of
            self.labels += [f"{feature}={value}" for value in number_of]
        self.count = max(len(self.labels), 1)
        self.whole = slice(len(next(iter(self._features.values()), [_OTHER])))

    def layout(self) -> str:
        """Return a text that identifies the slices. Sums of workers can be added only if their texts are
        equal."""
        return "\n".join(self.labels) if self._features else ""

    def numbered(self, slices: Any, labels: ArrayLike) -> list[Any]:
        """Return a list with an array for each sliced feature: the slice of each sample, int64 [n].

        Without sliced features the list has only the argument `slices`.

        Args:
            slices: Argument of `FleetMetrics.update`.
            labels: Labels of the samples.

        Raises:
            ShapeError: `slices` does not have the features, or not one value for each sample.
        """
        if not self._features:
            return [slices]
        if not isinstance(slices, Mapping):
            raise ShapeError(
                f"slices are {slices!r:.60}; give a mapping with the values of "
                f"{', '.join(self._features)}, such as the features of the batch"
            )
        samples = np.size(labels)
        return [
            self._of_feature(feature, numbers, slices.get(feature), samples)
            for feature, numbers in self._features.items()
        ]

    def _of_feature(
        self, feature: str, number_of: Mapping[Any, int], values: Any, samples: int
    ) -> Ids:
        numbers = np.full(samples, number_of[_OTHER], np.int64)
        if values is None:
            return numbers
        bags = as_jagged(feature, values)
        if len(bags) != samples:
            raise ShapeError(
                f"feature {feature!r} has {len(bags)} samples for {samples} scores; give one for each"
            )
        single = bags.lengths == 1
        starts = np.cumsum(bags.lengths) - bags.lengths
        values = bags.values[starts[single]].tolist()
        numbers[single] = [number_of.get(value, number_of[_OTHER]) for value in values]
        return numbers


@checked
class FleetMetrics:
    """Metrics of one or more tasks over the samples of all workers.

        scores = fleet.metrics([Auc(), LogLoss()], window=10)
        scores.update(predictions, labels)  # in each step, before the push
        print(scores.read().run["auc"])

    `fleet.metrics` and `Client.metrics` create it. Only one thread at a time may call `update`; another
    thread may push meanwhile.

    Args:
        runtime: Runtime whose pushes send the sums.
        metrics: Metrics of a single task without a name, or a mapping from names of tasks to their metrics.
        name: Name of this object, unique in the fleet. All workers must pass the same metrics under a name.
        slices: Slices, for which every metric is also computed separately. Either names; `update` then gets
            the number of each sample's slice. Or values of features, such as {"device": ["phone",
            "desktop"]}: then each value is a slice, and all other values of the feature share the slice
            "other".
        window: Number of readings in the window, or 0 for no window.
        decay: Weight of an interval between two readings relative to the next interval, or 0 for no decay.

    Raises:
        ConfigError: Two metrics of a task have the same name, or other metrics exist in the fleet under
            `name`.
    """

    def __init__(
        self,
        runtime: Runtime,
        metrics: Tasks,
        name: str = "metrics",
        slices: Slices = (),
        window: int = 0,
        decay: float = 0.0,
    ) -> None:
        self._runtime = runtime
        self._process = os.getpid()
        self._slices = MetricSlices(slices)
        self._tasks = _named(metrics, self._slices.count)
        self._windows = window, decay
        self._readings = Readings(window, decay)
        layout = "\n".join(f"{key}: {metric.layout()}" for key, metric in self._metrics())
        layout += self._slices.layout()
        size = sum(metric.sums.size for _, metric in self._metrics())
        digest = hashlib.blake2b(layout.encode(), digest_size=8).digest()
        self._sums = SumTable(
            f"{OWN}metrics/{name}",
            size,
            int.from_bytes(digest, "little") >> 1,
            lambda: self._runtime.server_num,
        )
        self._join(name)
        for (_, metric), sums in zip(self._metrics(), self._parts(self._sums.pending), strict=True):
            metric.sums = sums  # a view, so that adding to a metric changes `pending`

    def _join(self, name: str) -> None:
        counters = self._runtime.counters
        if any(getattr(counter, "spec", None) == self._sums.spec for counter in counters):
            raise ConfigError(
                f"this process counts metrics {name!r} already; go on with that object, whose read().window "
                "has one evaluation at a time if it has window=1, or use another name for other metrics"
            )
        try:
            self._runtime.create(self._sums.spec)
        except TableConflict:
            raise ConfigError(
                f"metrics {name!r} exist in this fleet with other tasks, parameters or slices; give all "
                "workers the same, or the new ones another name"
            ) from None
        counters.append(self._sums)

    def update(
        self,
        preds: Numbers,
        labels: Numbers,
        weights: Numbers | None = None,
        slices: Numbers | Mapping[str, Any] | None = None,
        groups: ArrayLike | None = None,
        task: str = "",
        users: Numbers | None = None,
        items: Numbers | None = None,
    ) -> None:
        """Add a batch of this worker. Readings include it after this worker's next push.

        Args:
            preds, labels, weights, groups, users, items: As for `psfleet.metrics.Metric.update`.
            slices: Number of each sample's slice in the list of slices, or None for slice 0. If slices are
                values of features, a mapping from names of features to the samples' values, such as a batch
                of features. A sample with no value or several values is in the slice "other".
            task: Name of the task.

        Raises:
            ConfigError: There is no such task.
            ShapeError: The arrays do not fit together or to the metrics. The batch was not added to any
                metric.
        """
        check_process(self._process, "what metrics count here")
        if task not in self._tasks:
            raise ConfigError(f"task is {task!r}; it must be one of {sorted(self._tasks)}")
        batches = [
            Batch.of(preds, labels, weights, numbers, groups, users, items)
            for numbers in self._slices.numbered(slices, labels)
        ]
        metrics = self._tasks[task].values()
        for metric in metrics:
            for batch in batches:
                metric.check(batch)
        batch_sums = [
            functools.reduce(operator.add, (metric.sums_of(batch) for batch in batches))
            for metric in metrics
        ]
        with self._sums.lock:
            for metric, sums in zip(metrics, batch_sums, strict=True):
                metric.sums += sums

    def publish(self) -> None:
        """Send this worker's sums now. Call it after steps without a push, as in an evaluation.

        Otherwise the sums are sent with the next push. In sync mode every worker must call this, at the
        same step.
        """
        # In sync mode it is this worker's part of a round. A round of `fleet.dataset` may have only one
        # push of each worker. There all workers' sums are added up now, and worker 0's next push carries
        # the total.
        runtime = self._runtime
        runtime.flush()
        if runtime.in_round:
            self._sums.share(runtime.all_reduce, carries=runtime.worker_index == 0)
            return
        runtime.push_counts()
        runtime.flush()

    def read(self) -> MetricReading:
        """Return the metrics over all samples that workers have pushed so far.

            print(scores.read().run["auc"])

        Any worker may call it, and other workers do not wait. This worker's outstanding pushes are sent
        first, which in sync mode waits for the end of their round. `window` and `decay` refer to the calls
        of this method in this process.
        """
        totals = self._sums.totals(self._runtime.read_table(self._sums.spec.key))
        window, decay = self._windows
        return MetricReading(
            self._scores(totals),
            self._scores(self._readings.window(totals)) if window else {},
            self._scores(self._readings.decayed(totals)) if decay else {},
        )

    def _scores(self, totals: Floats) -> dict[str, float]:
        readings: dict[str, float] = {}
        for (key, metric), sums in zip(self._metrics(), self._parts(totals), strict=True):
            prefix = key.removesuffix(metric.name)
            values = {"": metric.scores(sums[self._slices.whole].sum(axis=0))}
            values |= {
                f"[{name}]": metric.scores(part)
                for name, part in zip(self._slices.labels, sums, strict=False)
            }
            for slice_suffix, scores in values.items():
                readings |= {
                    f"{prefix}{label}{slice_suffix}": value for label, value in scores.items()
                }
        return readings

    def _metrics(self) -> list[tuple[str, Metric]]:
        """Return the metrics with their names in readings, such as "ctr/auc"."""
        return [
            (f"{task}/{label}" if task else label, metric)
            for task, metrics in self._tasks.items()
            for label, metric in metrics.items()
        ]

    def _parts(self, flat: Floats) -> list[Floats]:
        """Return the sums of each metric, [slices, size], from the sums of all metrics."""
        shapes = [metric.sums.shape for _, metric in self._metrics()]
        ends = np.cumsum([rows * size for rows, size in shapes])
        parts = np.split(flat, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this worker that were not pushed yet."""
        return {"worker": self._runtime.worker_index, **self._sums.state_dict()}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore sums that were not pushed. The state of another worker is ignored: that worker restores
        it."""
        if state.get("worker") == self._runtime.worker_index:
            self._sums.set_state_dict(state)


def _named(metrics: Tasks, slices: int) -> dict[str, dict[str, Metric]]:
    """Return new metrics by task and name, without samples and with the given number of slices.

    Raises:
        ConfigError: There is no metric, or two metrics of a task have the same name.
    """
    tasks = metrics if isinstance(metrics, Mapping) else {"": metrics}
    tasks_by_name: dict[str, dict[str, Metric]] = {}
    for task, task_metrics in tasks.items():
        by_name = tasks_by_name[task] = {
            metric.name: metric.sliced(slices) for metric in task_metrics
        }
        if len(by_name) < len(task_metrics):
            names = [metric.name for metric in task_metrics]
            raise ConfigError(f"the metrics of task {task!r} are {names}; give each its own name=")
    if not any(tasks_by_name.values()):
        raise ConfigError(f"there are no metrics in {metrics!r}; give at least one")
    return tasks_by_name
