"""Predictions over HTTP and JSON."""

import importlib
import json
import math
import re
from typing import Any
from urllib.parse import unquote

from numpy.typing import NDArray

from psfleet.errors import AccessDenied, PsfleetError, UnknownTable, UsageError
from psfleet.http2.socket_transport import Transport
from psfleet.serving.batcher import QueueFull
from psfleet.serving.grpc_service import serving_module
from psfleet.serving.http_connection import LONGEST, HttpConnection, HttpRequest, Reply
from psfleet.serving.service import PredictionService, UnknownModel
from psfleet.serving.versions import ModelVersion, ServedModel
from psfleet.wire.connections.credentials import Credentials

_MODEL = re.compile(r"/v1/models/([^/:]+)(?:/versions/([0-9]{1,18}))?(:predict)?")
_OPEN = (b"/healthz", b"/readyz")
_TEXT, _JSON = "text/plain; version=0.0.4", "application/json"


try:  # of the extra `serve`: a third of the time of json
    _orjson: Any = importlib.import_module("orjson")
    _loads, _dumps = _orjson.loads, _orjson.dumps
except ImportError:
    _loads, _dumps = json.loads, lambda document: json.dumps(document).encode()


class _TooLarge(UsageError):
    """A request has too many bytes."""


class _NoSuchPath(UsageError):
    """Nothing is at this path."""


class _WrongMethod(UsageError):
    """There is something at this path, for another method."""


_STATUS: dict[type[Exception], int] = {
    QueueFull: 503,
    UnknownModel: 404,
    UnknownTable: 404,
    _NoSuchPath: 404,
    _WrongMethod: 405,
    _TooLarge: 413,
    AccessDenied: 401,
    UsageError: 400,
}


class HttpApp:
    """Requests of HTTP to a prediction service.

    Args:
        service: Service whose models it offers.
        credentials: Credentials whose token, or that of readers, every call must carry; None: it needs none.
    """

    def __init__(self, service: PredictionService, credentials: Credentials | None = None) -> None:
        self._service = service
        self._credentials = credentials
        serving_module("httptools")  # before the port is open

    def connection(self, transport: Transport) -> HttpConnection:
        """The server's end of a connection."""
        text = f"the request has more than {LONGEST:,} bytes, or long headers; send it in parts"
        return HttpConnection(transport, self._check, self._reply_to, _failure(_TooLarge(text)))

    def _check(self, request: HttpRequest) -> Reply | None:
        if self._credentials is None or request.path in _OPEN:
            return None
        tokens = [value for name, value in request.headers if name == b"authorization"]
        if len(tokens) == 1 and self._credentials.allows(tokens[0], reads=True):
            return None
        return _failure(
            AccessDenied(
                "the call carries no token or another one; send the header authorization: Bearer TOKEN"
            )
        )

    def _reply_to(self, request: HttpRequest) -> Reply:
        try:
            path = unquote(request.path.partition(b"?")[0].decode("ascii", "replace"))
            return self._reply(path, request)
        except Exception as error:  # of the model: the service goes on
            return _failure(error)

    def _reply(self, path: str, request: HttpRequest) -> Reply:
        if (match := _MODEL.fullmatch(path)) is not None:
            name, version, verb = match.groups()
            if verb:
                _check_method(request.method, "POST", path)
                return self._predict(name, int(version or 0), request.body)
            _check_method(request.method, "GET", path)
            return _json(status_of(self._service.model(name)))
        _check_method(request.method, "GET", path)
        if request.path in _OPEN:
            return 200, b"ok\n", "text/plain", []
        if path == "/metrics":
            return 200, self._service.measured(), _TEXT, []
        if path == "/v1/models":
            return _json({"models": [status_of(m) for m in self._service.models.values()]})
        raise _NoSuchPath(f"there is nothing at {path!r:.80}; POST /v1/models/NAME:predict")

    def _predict(self, name: str, version: int, content: bytes) -> Reply:
        code = "ok"
        try:
            prediction = self._service.prepare(name, version, _inputs(content))
            values = prediction.version.batcher.predict(prediction.batch, prediction.samples)
        except Exception as error:
            code = type(error).__name__
            raise
        finally:
            if name in self._service.models:
                self._service.metrics.count(name, "predict_json", code)
        predictions: Any = {key: _plain(value) for key, value in values.items()}
        predictions = predictions[""] if list(predictions) == [""] else predictions
        return _json({"predictions": predictions, **freshness_of(prediction.version)})


def _inputs(content: bytes) -> Any:
    """The inputs by name from a document with "inputs" by name, or "instances" by sample."""
    try:
        document = _loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is no JSON: {error}") from None
    if not isinstance(document, dict) or len(document.keys() & {"inputs", "instances"}) != 1:
        raise UsageError(
            'the body must be an object with "inputs", values by name, or "instances", a list of samples'
        )
    unknown = sorted(document.keys() - {"inputs", "instances"})
    if unknown:
        raise UsageError(f"the body has the unknown field {unknown[0]!r:.80}")
    if "inputs" in document:
        return document["inputs"]
    samples = document["instances"]
    if not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
        raise UsageError('"instances" must be a list of objects, each with values by name')
    if not samples:
        raise UsageError('"instances" is empty; send at least one sample')
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: [_value(sample.get(name)) for sample in samples] for name in names}


def _value(value: Any) -> Any:
    return [] if value is None else value


def _plain(values: NDArray[Any]) -> Any:
    return (values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values).tolist()


def freshness_of(version: ModelVersion) -> dict[str, Any]:
    """Return where values come from, for a document."""
    rows = version.model.rows
    age = rows.age
    document = {"version": version.number, "cut": rows.cut}
    return document if age is None else {**document, "age": round(age, 6)}


def status_of(model: ServedModel) -> dict[str, Any]:
    """The versions of a model, for a document."""
    versions = []
    for number, version, percentage in model.versions():
        entry: dict[str, Any] = {"version": number, "loaded": version is not None}
        if version is not None:
            entry |= {**freshness_of(version), "bytes": version.model.rows.bytes}
        versions.append({**entry, "percentage": percentage})
    return {"name": model.name, "versions": versions}


def _check_method(method: str, expected: str, path: str) -> None:
    if method != expected:
        raise _WrongMethod(f"{path!r:.80} takes {expected}, and the request is {method!r:.20}")


def _json(document: Any, status: int = 200) -> Reply:
    return status, _dumps(document), _JSON, []


def _failure(error: Exception) -> Reply:
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    text = str(error) if isinstance(error, PsfleetError) else f"the model failed: {error!r:.200}"
    reply = _json({"error": text}, status)
    if isinstance(error, QueueFull):
        return *reply[:3], [(b"retry-after", str(math.ceil(error.seconds)).encode())]
    return reply
