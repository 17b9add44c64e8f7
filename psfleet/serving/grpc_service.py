"""gRPC side of a prediction service: predictions, rows, versions, health and reflection.

Calls arrive in the thread of their connection (psfleet's own HTTP/2 server). This thread puts a prediction
into the model's queue. It computes the queued predictions only after it has read all calls that arrived
together, so that they share a batch. Calls that may wait for long, such as loading a version, run in a pool
of threads.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from psfleet.core.base.errors import PsfleetError, ShapeError, UsageError, optional_module
from psfleet.core.net.connections import error_statuses
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.token_check import is_permitted
from psfleet.core.net.http2.calls import Behavior, IncomingCall, Streaming
from psfleet.core.net.v1 import serving_pb2 as messages
from psfleet.data.feature_sets.jagged import as_jagged
from psfleet.serving.batcher import PendingPrediction, QueueFull
from psfleet.serving.model import ModelVersion
from psfleet.serving.service import PredictionService

_PUSHBACK = "grpc-retry-pushback-ms"
_MOST_WAITING = (
    32  # threads for calls that wait for further requests (max_delay), or load a version
)
_KINDS = {"ids": np.int64, "texts": object, "numbers": np.float32}
_SERVICE = messages.DESCRIPTOR.services_by_name["Prediction"].full_name


def serving_module(name: str) -> Any:
    """Import a module of the extra `serve`.

    Raises:
        ConfigError: The module is not installed.
    """
    return optional_module(name, "a prediction service needs", name, "serve")


class GrpcPrediction:
    """Handlers of the gRPC services psfleet.v1.Prediction, health and server reflection."""

    def __init__(self, service: PredictionService) -> None:
        self._service = service
        self._waiting = ThreadPoolExecutor(_MOST_WAITING, "prediction")
        health, health_names = serving_module("grpc_health.v1.health"), ("", _SERVICE)
        self._health_messages = serving_module("grpc_health.v1.health_pb2")
        self._health = health.HealthServicer()
        for name in health_names:
            self._health.set(name, self._health_messages.HealthCheckResponse.SERVING)
        reflection = serving_module("grpc_reflection.v1alpha.reflection")
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._reflection = reflection.ReflectionServicer(names)
        self._reflection_messages = serving_module("grpc_reflection.v1alpha.reflection_pb2")
        self.behaviors: dict[str, Behavior | Streaming] = {
            f"/{_SERVICE}/Predict": self._predict,
            f"/{_SERVICE}/LookUp": self._replying("look_up", messages.LookUpRequest, self._look_up),
            f"/{_SERVICE}/Models": self._replying("", messages.ModelsRequest, self._models),
            f"/{_SERVICE}/Route": self._route_apart,
            f"/{health.SERVICE_NAME}/Check": self._guarded(self._check),
            f"/{health.SERVICE_NAME}/Watch": Streaming(
                self._guarded(self._watch), lambda call: None
            ),
            f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Streaming(
                self._guarded(self._reflect), IncomingCall.close
            ),
        }
        """Handler of each call, by the call's path."""

    def stop(self) -> None:
        """Notify clients that watch the service's health that it is going to stop."""
        self._health.enter_graceful_shutdown()

    def close(self) -> None:
        """End the threads. Call this when no more calls can arrive."""
        self._waiting.shutdown()

    def _replying(
        self, method: str, kind: Any, handle: Callable[[Any], Any]
    ) -> Callable[[bytes, IncomingCall], None]:
        """Return a handler that parses a request, calls `handle` and replies at once. An error becomes a
        gRPC status.
        """

        def behave(content: bytes, call: IncomingCall) -> None:
            name = ""
            try:
                request = _parsed(kind, content)
                name = getattr(request, "model", "")
                reply = handle(request).SerializeToString()
            except Exception as error:  # a model may raise anything, and the service must go on
                self._fail(call, method, name, error)
            else:
                self._count(method, name, "ok")
                call.end(reply)

        return behave

    def _predict(self, content: bytes, call: IncomingCall) -> None:
        """Put a prediction into its model's queue, so that it shares a batch with predictions that arrive
        with it.
        """
        name = ""
        try:
            request = _parsed(messages.PredictRequest, content)
            name = request.model
            inputs = {message.name: _values(message) for message in request.inputs}
            prediction = self._service.prepare(name, request.version, inputs)
            pending = PendingPrediction(prediction.batch, prediction.samples)
            batcher = prediction.version.batcher
            batcher.submit(pending)
        except Exception as error:
            self._fail(call, "predict", name, error)
            return
        settle = partial(self._settle, name, prediction.version, pending, call)
        # `settle` blocks for up to max_delay to wait for further requests. The connection's thread must
        # read these requests, so it must not block. Without a delay, this thread calls `settle` after it
        # has read all calls.
        if batcher.max_delay:
            self._waiting.submit(settle)
        else:
            call.connection.later.append(settle)

    def _settle(
        self, name: str, version: ModelVersion, pending: PendingPrediction, call: IncomingCall
    ) -> None:
        try:
            outputs = version.batcher.settle(pending)
            reply = messages.PredictReply(freshness=_freshness(version))
            for output, values in outputs.items():
                array = np.asarray(values, np.float32)
                reply.outputs.add(name=output, values=array.reshape(-1).tolist(), shape=array.shape)
            content = reply.SerializeToString()
        except Exception as error:
            self._fail(call, "predict", name, error)
            return
        self._count("predict", name, "ok")
        call.end(content)

    def _route_apart(self, content: bytes, call: IncomingCall) -> None:
        """Handle Route, the call that sends a share of the requests to a version, in another thread.

        The call may load the version, which would delay other calls of the connection.
        """
        self._waiting.submit(
            self._replying("route", messages.RouteRequest, self._route), content, call
        )

    def _count(self, method: str, model: str, code: str) -> None:
        models = self._service.models
        name = model or next(iter(models))
        if method and name in models:
            self._service.metrics.count(name, method, code)

    def _fail(self, call: IncomingCall, method: str, model: str, error: Exception) -> None:
        self._count(method, model, type(error).__name__)
        if not isinstance(error, PsfleetError):
            error = PsfleetError(f"the model failed: {error!r:.200}")
        code, details, metadata = error_statuses.status_of(error)
        # A gRPC client with a retry policy waits for this time before it repeats the call.
        if isinstance(error, QueueFull):
            metadata = ((_PUSHBACK, str(max(1, round(error.seconds * 1e3)))),)
        call.set_trailing_metadata(metadata)
        call.refuse(code.value[0], details)

    def _guarded(self, take: Behavior) -> Behavior:
        def guarded(content: bytes, call: IncomingCall) -> None:
            try:
                take(content, call)
            except Exception as error:
                self._fail(call, "", "", error)

        return guarded

    def _check(self, content: bytes, call: IncomingCall) -> None:
        request = _parsed(self._health_messages.HealthCheckRequest, content)
        call.end(self._health.Check(request, call).SerializeToString())

    def _watch(self, content: bytes, call: IncomingCall) -> None:
        def send(status: Any) -> None:
            if status is not None:
                call.write(status.SerializeToString())
                if status.status == self._health_messages.HealthCheckResponse.NOT_SERVING:
                    call.close()  # no message follows

        self._health.Watch(_parsed(self._health_messages.HealthCheckRequest, content), call, send)

    def _reflect(self, content: bytes, call: IncomingCall) -> None:
        """Reply to one request in a stream of server reflection."""
        request = _parsed(self._reflection_messages.ServerReflectionRequest, content)
        for reply in self._reflection.ServerReflectionInfo(iter([request]), call):
            call.write(reply.SerializeToString())

    def _look_up(self, request: Any) -> Any:
        ids = np.array(request.ids, np.int64)
        version, rows = self._service.look_up(request.model, request.version, request.table, ids)
        return messages.LookUpReply(
            rows=rows.tobytes(), dim=rows.shape[1], freshness=_freshness(version)
        )

    def _route(self, request: Any) -> Any:
        self._service.model(request.model).route(request.version, request.percentage)
        return self._models(request)

    def _models(self, request: Any) -> Any:
        reply = messages.ModelsReply()
        for model in self._service.models.values():
            versions = reply.models.add(name=model.name).versions
            for number, version, percentage in model.versions():
                entry = versions.add(loaded=version is not None, percentage=percentage)
                entry.freshness.version = number
                if version is not None:
                    entry.freshness.CopyFrom(_freshness(version))
                    entry.bytes = version.model.rows.bytes
        return reply


def _parsed(kind: Any, content: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError:
        raise UsageError(f"the request is no {kind.DESCRIPTOR.full_name}") from None


def _values(message: Any) -> Any:
    """Convert one input in a message to an array or to bags (lists of ids)."""
    contents = {"ids": message.ids, "texts": message.texts, "numbers": message.numbers}
    fields = [name for name, content in contents.items() if content]
    if len(fields) > 1:
        raise ShapeError(f"the input {message.name!r} has {' and '.join(fields)}; give one of them")
    field = fields[0] if fields else "ids"
    values = np.array(contents[field], _KINDS[field])
    if len(message.lengths):
        parts = {"values": values, "lengths": np.array(message.lengths, np.int64)}
        weights = {"weights": message.weights} if len(message.weights) else {}
        return as_jagged(message.name, {**parts, **weights})
    if shape := tuple(message.shape):
        if math.prod(shape) != len(values):
            raise ShapeError(
                f"the input {message.name!r} has {len(values)} values and the shape {list(shape)}"
            )
        return values.reshape(shape)
    return values


def _freshness(version: ModelVersion) -> Any:
    rows = version.model.rows
    return messages.Freshness(version=version.number, cut=rows.cut, age=rows.age)


def refusal(credentials: Credentials) -> Callable[[str, str], str]:
    """Return a function that checks a call's path and authorization, and returns "" or the reason for a
    refusal.

    The token of the credentials permits every call. The token for readers permits every call except Route,
    which changes the shares of the versions.
    """

    def refuse(path: str, authorization: str) -> str:
        if is_permitted(credentials, authorization, only_reads=not path.endswith("/Route")):
            return ""
        return (
            "the call carries no token, another one, or to change versions that of readers; use the "
            "credentials of this service"
        )

    return refuse
