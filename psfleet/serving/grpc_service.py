"""Predictions and rows over gRPC."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from psfleet.errors import AccessDenied, PsfleetError, ShapeError
from psfleet.feature_sets.jagged import Jagged
from psfleet.serving.batching import QueueFull
from psfleet.serving.service import PredictionService
from psfleet.serving.versions import ModelVersion
from psfleet.wire.connections import error_status
from psfleet.wire.connections.access import TOKEN_KEY
from psfleet.wire.connections.credentials import Credentials
from psfleet.wire.v1 import serving_pb2 as messages
from psfleet.wire.v1.serving_pb2_grpc import PredictionServicer

_PUSHBACK = "grpc-retry-pushback-ms"


class GrpcPrediction(PredictionServicer):
    """Implements psfleet.v1.Prediction.

    Args:
        service: Service whose models it offers.
    """

    def __init__(self, service: PredictionService) -> None:
        self._service = service

    def Predict(self, request: Any, context: grpc.ServicerContext) -> Any:
        """See serving.proto."""
        return self._counted("predict", request, context, self._predict, messages.PredictReply)

    def LookUp(self, request: Any, context: grpc.ServicerContext) -> Any:
        """See serving.proto."""
        return self._counted("look_up", request, context, self._look_up, messages.LookUpReply)

    def Models(self, request: Any, context: grpc.ServicerContext) -> Any:
        """See serving.proto."""
        return self._models()

    def Route(self, request: Any, context: grpc.ServicerContext) -> Any:
        """See serving.proto."""
        return self._counted("route", request, context, self._route, messages.ModelsReply)

    def _counted(
        self,
        method: str,
        request: Any,
        context: grpc.ServicerContext,
        handle: Callable[[Any], Any],
        empty: Callable[[], Any],
    ) -> Any:
        """The reply, or none with the status of what went wrong."""
        code = "ok"
        try:
            return handle(request)
        except Exception as error:  # of the model: the service goes on
            code = type(error).__name__
            _fail(context, error)
            return empty()
        finally:
            models = self._service.models
            name = request.model or next(iter(models))
            if name in models:
                self._service.metrics.count(name, method, code)

    def _predict(self, request: Any) -> Any:
        inputs = {each.name: _values(each) for each in request.inputs}
        prepared = self._service.prepare(request.model, request.version, inputs)
        found = prepared.version.batcher.predict(prepared.batch, prepared.samples)
        reply = messages.PredictReply(freshness=_freshness(prepared.version))
        for name, values in found.items():
            array = np.asarray(values, np.float32)
            reply.outputs.add(name=name, values=array.reshape(-1).tolist(), shape=array.shape)
        return reply

    def _look_up(self, request: Any) -> Any:
        ids = np.array(request.ids, np.int64)
        version, rows = self._service.look_up(request.model, request.version, request.table, ids)
        return messages.LookUpReply(
            rows=rows.tobytes(), dim=rows.shape[1], freshness=_freshness(version)
        )

    def _route(self, request: Any) -> Any:
        self._service.model(request.model).route(request.version, request.percentage)
        return self._models()

    def _models(self) -> Any:
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


def _values(given: Any) -> Any:
    """The values of one input."""
    fields = [name for name in ("ids", "texts", "numbers") if len(getattr(given, name))]
    if len(fields) > 1:
        raise ShapeError(f"the input {given.name!r} has {' and '.join(fields)}; give one of them")
    kinds = {"ids": np.int64, "numbers": np.float32, "texts": object}
    field = fields[0] if fields else "ids"
    values = np.array(getattr(given, field), kinds[field])
    if field == "texts":
        values = values.astype(str)
    if len(given.lengths):
        weights = np.array(given.weights, np.float32) if len(given.weights) else None
        return Jagged(values, np.array(given.lengths, np.int64), weights=weights)
    if len(given.shape):
        if int(np.prod(given.shape)) != len(values):
            raise ShapeError(
                f"the input {given.name!r} has {len(values)} values and the shape {list(given.shape)}"
            )
        return values.reshape(list(given.shape))
    return values


def _freshness(version: ModelVersion) -> Any:
    rows = version.model.rows
    return messages.Freshness(version=version.number, cut=rows.cut, age=rows.age)


def _fail(context: grpc.ServicerContext, error: Exception) -> None:
    if not isinstance(error, PsfleetError):
        error = PsfleetError(f"the model failed: {error!r:.200}")
    error_status.failure(context, error)
    if isinstance(error, QueueFull):
        context.set_trailing_metadata(((_PUSHBACK, str(max(1, round(error.seconds * 1e3)))),))


class TokenGate(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Lets calls with the token pass, and with that of readers those that change no version's part.

    Args:
        credentials: Credentials whose token every call must carry.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Give the handler of a call, or the one that refuses it."""
        metadata = handler_call_details.invocation_metadata or ()
        tokens = [value for key, value in metadata if key == TOKEN_KEY]
        reads = not handler_call_details.method.endswith("/Route")
        if len(tokens) == 1 and self._credentials.allows(tokens[0], reads=reads):
            return continuation(handler_call_details)
        return self._refusal


def _refuse(requests: Any, context: grpc.ServicerContext) -> Any:
    error_status.failure(
        context,
        AccessDenied(
            "the call carries no token, another one, or to change versions that of readers; use the "
            "credentials of this service"
        ),
    )
    yield from ()
