"""Dynamic batching: requests of many clients that arrive at about the same time are predicted together.

Batching needs no thread of its own. A thread with a request puts it into the queue and waits for the lock
`_running`. The thread that gets the lock makes a batch of all waiting requests and computes it. A thread
that gets the lock later usually finds its prediction done. While one batch is computed, requests for the
next batch queue up:

    thread A   submit -- lock -- predict [A]                    -> result
    thread B      submit -- wait ............. predict [B, C]   -> result
    thread C        submit -- wait ........................ lock -> result is there already

If a batch fails, each of its requests is predicted alone, so that only the faulty request gets the error.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from psfleet.core.base.errors import LimitExceeded, PsfleetError, ShapeError, UsageError
from psfleet.core.base.validation.annotations import NonNegative, PositiveInt, checked
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.feature_sets.feature_values import by_feature
from psfleet.data.feature_sets.jagged import Jagged, array_of, joined
from psfleet.data.feature_sets.value_types import typed


class QueueFull(LimitExceeded):
    """Error of a request that is refused because too many requests wait.

    Attributes:
        seconds: Estimated number of seconds after which the client should try again.
    """

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class PendingPrediction:
    """Request for predictions that waits in a Batcher, and later has the predictions or an error.

    Args:
        batch: Values of the inputs by name, all with the same number of samples.
    """

    __slots__ = ("arrived", "batch", "done", "error", "samples", "values")

    def __init__(self, batch: dict[str, Any], samples: int) -> None:
        self.batch = batch
        self.samples = samples
        self.arrived = time.monotonic()
        self.done = False
        self.values: Any = None
        self.error: Exception | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Names, dtypes and shapes of the inputs. Requests are batched together only if these are equal."""
        return tuple(sorted((name, *_kind(value)) for name, value in self.batch.items()))

    def finish(self, values: Any, error: Exception | None = None) -> None:
        """Set the predictions, or the error if there is one."""
        self.values, self.error, self.done = values, error, True

    def result(self) -> Any:
        """Return the predictions, or raise the error that was set. Call it once `done` is True."""
        if self.error is not None:
            raise self.error
        return self.values


class Batcher:
    """Queue of requests, which are predicted in batches. Any thread may call it.

        batcher = Batcher(model, max_batch=256)
        chances = batcher.predict({"user": users}, len(users))

    Args:
        predict: Function from the inputs of a batch to the batch's predictions.
        max_batch: Maximum number of samples in a batch, and therefore in a request.
        max_delay: Maximum number of seconds that a request waits for other requests, so that batches get
            larger.
        max_queue: Maximum number of waiting requests. Further requests are refused.
        observe: Function that is called after each batch with its number of samples, number of requests and
            duration in seconds.
    """

    @checked  # not the other methods, which run for every request
    def __init__(
        self,
        predict: Callable[[dict[str, Any]], Any],
        max_batch: PositiveInt = 1024,
        max_delay: NonNegative = 0.0,
        max_queue: PositiveInt = 100,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self._predict = predict
        self._observe = observe or (lambda samples, requests, seconds: None)
        self.max_batch, self.max_delay, self.max_queue = max_batch, max_delay, max_queue
        self._waiting: deque[PendingPrediction] = deque()
        self._changed = threading.Condition()
        self._running = threading.Lock()
        self._seconds = 0.0  # duration of a batch, as an exponential moving average

    def submit(self, request: PendingPrediction) -> None:
        """Add a request to the queue. `settle` then returns its predictions.

        Raises:
            UsageError: The request has too many samples.
            QueueFull: Too many requests wait.
        """
        if request.samples > self.max_batch:
            raise UsageError(
                f"the batch has {request.samples:,} samples, and the service takes up to "
                f"{self.max_batch:,}; send it in parts"
            )
        with self._changed:
            if len(self._waiting) >= self.max_queue:
                seconds = max(self._seconds * len(self._waiting), 0.01)
                raise QueueFull(
                    f"{len(self._waiting)} requests wait, as many as may; try again in {seconds:.2f} s",
                    seconds,
                )
            self._waiting.append(request)
            self._changed.notify()

    def predict(self, batch: dict[str, Any], samples: int) -> Any:
        """Return the predictions of a batch. It may be computed together with batches of other threads.

        Raises:
            UsageError: The batch does not fit the model, or has too many samples.
            QueueFull: Too many requests wait.
        """
        request = PendingPrediction(batch, samples)
        self.submit(request)
        return self.settle(request)

    def settle(self, request: PendingPrediction) -> Any:
        """Return the predictions of a submitted request. If no other thread has computed them, compute them
        here.
        """
        # Batches are taken from the queue and finished under this lock. So the request is now either done
        # or still in the queue. The loop is for requests that do not fit into the next batch.
        with self._running:
            while not request.done:
                self._wait()
                self._run()
        return request.result()

    def _wait(self) -> None:
        """Wait until the queue has a full batch, or its first request has waited for `max_delay`."""
        with self._changed:
            while self._waiting and self.max_delay:
                seconds = self._waiting[0].arrived + self.max_delay - time.monotonic()
                if seconds <= 0 or sum(r.samples for r in self._waiting) >= self.max_batch:
                    return
                self._changed.wait(seconds)

    def _taken(self) -> list[PendingPrediction]:
        """Remove the oldest requests that fit into one batch from the queue, and return them."""
        with self._changed:
            requests: list[PendingPrediction] = []
            samples = 0
            while self._waiting:
                first = self._waiting[0]
                if requests and (
                    samples + first.samples > self.max_batch or first.kind != requests[0].kind
                ):
                    break
                samples += first.samples
                requests.append(self._waiting.popleft())
            return requests

    def _run(self) -> None:
        requests = self._taken()
        if not requests:
            return
        start = time.monotonic()
        try:
            self._make(requests)
        finally:
            for request in requests:
                # After a KeyboardInterrupt, for example: no waiting thread may hang.
                if not request.done:
                    request.finish(None, PsfleetError("the prediction was interrupted"))
        seconds = time.monotonic() - start
        self._seconds += (seconds - self._seconds) / 8
        self._observe(sum(r.samples for r in requests), len(requests), seconds)

    def _make(self, requests: Sequence[PendingPrediction]) -> None:
        try:
            outputs = self._checked([request.batch for request in requests], requests)
        except Exception as error:
            if len(requests) == 1:
                requests[0].finish(None, error)
                return
            # One request with a bad value makes the whole batch fail. Predict each request alone, so that
            # only the bad request gets the error.
            for request in requests:
                self._make([request])
            return
        start = 0
        for request in requests:
            end = start + request.samples
            request.finish({name: values[start:end] for name, values in outputs.items()})
            start = end

    def _checked(
        self, batches: Sequence[dict[str, Any]], requests: Sequence[PendingPrediction]
    ) -> dict[str, Any]:
        outputs = self._predict(batches[0] if len(batches) == 1 else _together(batches))
        outputs = outputs if isinstance(outputs, Mapping) else {"": outputs}
        samples = sum(request.samples for request in requests)
        for values in outputs.values():
            if len(values) != samples:
                raise ShapeError(
                    f"the model gave predictions of shape {values.shape} for {samples} samples; it must "
                    "give one for each"
                )
        return dict(outputs)


def _kind(value: Any) -> tuple[Any, ...]:
    """Return the properties of a value that must be equal in two requests for their values to be
    concatenated.
    """
    if isinstance(value, Jagged):
        return "jagged", value.values.dtype.kind, value.weights is None
    return "array", value.dtype.kind, value.shape[1:]


def _together(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts = {name: [batch[name] for batch in batches] for name in batches[0]}
    return {
        name: joined(values) if isinstance(values[0], Jagged) else np.concatenate(values)
        for name, values in parts.items()
    }


def samples_of(features: FeatureSet | None, inputs: Any) -> tuple[dict[str, Any], int]:
    """Convert the inputs of a request to arrays and bags (lists of ids), and count the samples.

    Args:
        features: Feature set of the model, or None for a model that takes arrays by name.
        inputs: Values by name, in any form that `psfleet.features.FeatureLookup` takes.

    Returns:
        The converted inputs by name, and the number of samples.

    Raises:
        UsageError: The inputs do not fit the features, or have different numbers of samples.
    """
    if features is not None:
        return by_feature(features, inputs)
    if not isinstance(inputs, Mapping) or not inputs:
        raise UsageError(f"the inputs are {inputs!r:.80}; they must be values by name")
    arrays = {name: _plain(name, value) for name, value in inputs.items()}
    counts = {len(array) for array in arrays.values()}
    if len(counts) > 1:
        raise ShapeError(f"the inputs have {sorted(counts)} samples; a batch has as many of each")
    return arrays, counts.pop()


def _plain(name: str, value: Any) -> Any:
    """Return an input of a program as an array: an array unchanged, and other values as int64 or float32."""
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value, object)
    except ValueError:
        array = np.empty(0, object)
    flat = array_of(array.reshape(-1).tolist()) if array.dtype == object else array.reshape(-1)
    if array.ndim < 1 or flat.dtype.kind not in "iufbO":
        raise ShapeError(f"the input {name!r} is {value!r:.80}; it must be an array of numbers")
    if flat.dtype.kind in "iub" or flat.dtype == np.float32:
        return flat.reshape(array.shape)
    numbers, missing, bad = typed(flat, "float")
    bad |= missing if flat.dtype == object else False
    if bad.any():
        index = int(np.argmax(bad))
        raise ShapeError(
            f"the input {name!r} has {flat[index]!r:.80} in sample {index * len(array) // len(flat)}; it "
            "must be an array of numbers"
        )
    return numbers.reshape(array.shape)
