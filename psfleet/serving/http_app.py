"""Predictions over HTTP and JSON: an ASGI application."""

import asyncio
import importlib
import json
import math
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from psfleet.errors import AccessDenied, PsfleetError, UnknownTable, UsageError
from psfleet.serving.batching import Batcher, PendingPrediction, QueueFull
from psfleet.serving.service import PredictionService, UnknownModel
from psfleet.serving.versions import ModelVersion, ServedModel
from psfleet.wire.connections.credentials import Credentials

Reply = tuple[int, bytes, str, list[tuple[bytes, bytes]]]
"""Status, body, type of the content, more headers."""
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_LONGEST = 64 << 20  # bytes of a request
_MODEL = re.compile(r"/v1/models/([^/:]+)(?:/versions/([0-9]{1,18}))?(:predict)?")
_OPEN = ("/healthz", "/readyz")
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
    """ASGI application of a prediction service. One loop runs it.

    Args:
        service: Service whose models it offers.
        credentials: Credentials whose token, or that of readers, every call must carry; None: it needs none.
    """

    def __init__(self, service: PredictionService, credentials: Credentials | None = None) -> None:
        self._service = service
        self._credentials = credentials

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI has it."""
        try:
            reply = await self._reply(scope, receive)
        except Exception as error:  # of the model: the service goes on
            reply = _failure(error)
        status, body, kind, more = reply
        size = str(len(body)).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", size), *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _reply(self, scope: Mapping[str, Any], receive: Receive) -> Reply:
        path, method = scope["path"], scope["method"]
        if self._credentials is not None and path not in _OPEN:
            _check_token(scope, self._credentials)
        if (found := _MODEL.fullmatch(path)) is not None:
            name, version, verb = found.groups()
            if verb:
                _check_method(method, "POST", path)
                return await self._predict(name, int(version or 0), receive)
            _check_method(method, "GET", path)
            return _json(status_of(self._service.model(name)))
        _check_method(method, "GET", path)
        if path in _OPEN:
            return 200, b"ok\n", "text/plain", []
        if path == "/metrics":
            return 200, self._service.measured(), _TEXT, []
        if path == "/v1/models":
            return _json({"models": [status_of(m) for m in self._service.models.values()]})
        raise _NoSuchPath(f"there is nothing at {path!r:.80}; POST /v1/models/NAME:predict")

    async def _predict(self, name: str, version: int, receive: Receive) -> Reply:
        code = "ok"
        try:
            content = await _body(receive)
            inputs = _inputs(content)
            prepared = self._service.prepare(name, version, inputs)
            values = await self._predicted(
                prepared.version.batcher, prepared.batch, prepared.samples
            )
        except Exception as error:
            code = type(error).__name__
            raise
        finally:
            if name in self._service.models:
                self._service.metrics.count(name, "predict_json", code)
        found: Any = {key: _plain(value) for key, value in values.items()}
        found = found[""] if list(found) == [""] else found
        return _json({"predictions": found, **freshness_of(prepared.version)})

    async def _predicted(self, batcher: Batcher, batch: dict[str, Any], samples: int) -> Any:
        """The predictions, made by this loop, or by another thread that makes some just now."""
        loop, own = asyncio.get_running_loop(), threading.get_ident()
        done: asyncio.Future[None] = loop.create_future()

        def set_done() -> None:
            if not done.done():
                done.set_result(None)

        def notify() -> None:
            if threading.get_ident() == own:  # to wake the loop takes two system calls
                set_done()
            else:
                loop.call_soon_threadsafe(set_done)

        request = PendingPrediction(batch, samples, notify)
        batcher.submit(request)
        if batcher.max_delay:
            await asyncio.wait((done,), timeout=batcher.max_delay)
        else:
            await asyncio.sleep(0)  # requests that came with this one go with it
        while not request.done:
            if batcher.turn() is None:
                loop.run_in_executor(None, batcher.drain)
                break
        await done
        return request.result()


async def _body(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise UsageError("the request ended before its body was there")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _LONGEST:
            raise _TooLarge(f"the request has more than {_LONGEST:,} bytes; send it in parts")
        if not message.get("more_body"):
            return b"".join(parts)


def _check_token(scope: Mapping[str, Any], credentials: Credentials) -> None:
    tokens = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(tokens) != 1 or not credentials.allows(tokens[0], reads=True):
        raise AccessDenied(
            "the call carries no token or another one; send the header authorization: Bearer TOKEN"
        )


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


def _value(said: Any) -> Any:
    return [] if said is None else said


def _plain(values: NDArray[Any]) -> Any:
    return (values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values).tolist()


def freshness_of(version: ModelVersion) -> dict[str, Any]:
    """Return where values come from, for a document."""
    rows = version.model.rows
    age = rows.age
    known = {"version": version.number, "cut": rows.cut}
    return known if age is None else {**known, "age": round(age, 6)}


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
    found = _json({"error": text}, status)
    if isinstance(error, QueueFull):
        return *found[:3], [(b"retry-after", str(math.ceil(error.seconds)).encode())]
    return found
