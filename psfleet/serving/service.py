"""Prediction service without a network protocol: its models, the checks of a request, and its metrics.

grpc_service.py and http_app.py translate their calls to calls of PredictionService, and translate the
results. Any thread may call it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from psfleet.core.base.errors import UsageError
from psfleet.core.base.observability.exposition import encode, merge
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.serving.batcher import samples_of
from psfleet.serving.follower import Follower
from psfleet.serving.model import ModelVersion, ServedModel

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_TIMES = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
_SIZES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000]


class ServingMetrics:
    """Prometheus metrics of the models of one process, in a separate registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._calls = Counter(
            "psfleet_serving_requests",
            "Requests, by what became of them.",
            ["model", "method", "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "psfleet_serving_batch_seconds",
            "Time of a batch.",
            ["model"],
            buckets=_TIMES,
            registry=registry,
        )
        self._samples = Histogram(
            "psfleet_serving_batch_samples",
            "Samples of a batch.",
            ["model"],
            buckets=_SIZES,
            registry=registry,
        )
        self._requests = Counter(
            "psfleet_serving_batched_requests",
            "Requests that went into batches.",
            ["model"],
            registry=registry,
        )
        self._levels = {
            name: Gauge(f"psfleet_serving_{name}", text, ["model", "version"], registry=registry)
            for name, text in (
                ("age_seconds", "Time since the values were the training's."),
                ("cut", "Cut of the training that the values are of."),
                ("bytes", "Memory of rows and dense values."),
                ("percentage", "Part of the requests that the version gets."),
            )
        }
        self._call = cache(lambda *labels: self._calls.labels(*labels))
        self._batch = cache(
            lambda model: (
                self._seconds.labels(model),
                self._samples.labels(model),
                self._requests.labels(model),
            )
        )

    def count(self, model: str, method: str, code: str) -> None:
        """Count a request by its result: "ok", or the name of the error's class."""
        self._call(model, method, code).inc()

    def observe(self, model: str, samples: int, requests: int, seconds: float) -> None:
        """Record a batch: its number of samples, number of requests, and duration in seconds."""
        times, sizes, counts = self._batch(model)
        times.observe(seconds)
        sizes.observe(samples)
        counts.inc(requests)

    def level(self, name: str, model: str, version: int, value: float) -> None:
        """Set a gauge to its present value. The gauges are age_seconds, cut, bytes and percentage."""
        self._levels[name].labels(model, str(version)).set(value)

    def forget_levels(self) -> None:
        """Drop all gauges, so that unloaded versions do not show their last values forever."""
        for gauge in self._levels.values():
            gauge.clear()

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class UnknownModel(UsageError):
    """Error of a request for a model that is not served."""


@dataclass(frozen=True)
class Prepared:
    """Checked request, ready for prediction.

    Attributes:
        version: Version that predicts the request.
        batch: Values of the inputs by name.
    """

    version: ModelVersion
    batch: dict[str, Any]
    samples: int


class PredictionService:
    """Prediction service of one process, without a network protocol.

    Args:
        models: Models, in the order in which clients see them.
    """

    def __init__(self, models: Sequence[ServedModel], metrics: ServingMetrics) -> None:
        self.models: Mapping[str, ServedModel] = {model.name: model for model in models}
        self.metrics = metrics

    def model(self, name: str) -> ServedModel:
        """Return the model of this name. "" means the only model.

        Raises:
            UnknownModel: There is no such model, or the name is "" and there are several models.
        """
        model = next(iter(self.models.values())) if not name and len(self.models) == 1 else None
        model = model or self.models.get(name)
        if model is None:
            names = ", ".join(self.models)
            raise UnknownModel(f"there is no model {name!r:.80}; there are: {names}")
        return model

    def prepare(self, model: str, version: int, inputs: Any) -> Prepared:
        """Check a request and choose the version that predicts it.

        Args:
            model: Name of the model, or "" for the only one.
            version: Number of the version, or 0 to choose by the shares of the versions.
            inputs: Values by name.

        Raises:
            UsageError: The inputs do not fit the model.
        """
        target = self.model(model).choose(version)
        batch, samples = samples_of(target.model.features, inputs)
        return Prepared(target, batch, samples)

    def look_up(self, model: str, version: int, table: str, ids: Any) -> tuple[ModelVersion, Any]:
        """Look up rows of ids in a model's table.

        Args:
            model: Name of the model, or "" for the only one.
            version: Number of the version, or 0 to choose by the shares of the versions.
            ids: The ids, n of them.

        Returns:
            The version whose rows they are, and the rows, float32 [n, dim].

        Raises:
            UsageError: There is no such table, or a value is no id.
        """
        target = self.model(model).choose(version)
        return target, target.model.look_up(table, as_ids(ids, f"table {table!r}"))

    def measured(self) -> bytes:
        """Return all metrics as text, including the present values of all versions and followers."""
        self.metrics.forget_levels()
        follower_metrics: list[Metric] = []
        for model in self.models.values():
            for number, version, percentage in model.versions():
                self.metrics.level("percentage", model.name, number, percentage)
                if version is None:
                    continue
                rows = version.model.rows
                self.metrics.level("cut", model.name, number, rows.cut)
                self.metrics.level("bytes", model.name, number, rows.bytes)
                if rows.age is not None:
                    self.metrics.level("age_seconds", model.name, number, rows.age)
                if isinstance(rows, Follower):
                    follower_metrics += rows.measured(model.name)
        return self.metrics.text() + encode(merge(follower_metrics))
