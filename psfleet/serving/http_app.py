"""HTTP side of a prediction service: predictions as JSON, versions, metrics and health checks.

    POST /v1/models/NAME:predict                 {"instances": [{"user": 17, "item": [3, 5]}]}
    POST /v1/models/NAME/versions/2:predict      {"inputs": {"user": [17], "item": [[3, 5]]}}
    GET  /v1/models, /v1/models/NAME, /metrics, /healthz, /readyz

Each connection has a thread that reads requests with httptools and replies in the order of the requests
(HttpConnection). HttpApp computes the reply to a request and never raises. Credentials are checked as soon
as the headers are complete, before a body is read, so that a client without credentials cannot fill the
memory.
"""

import importlib
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import AccessDenied, PsfleetError, UnknownTable, UsageError
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.token_check import is_permitted
from psfleet.core.net.http2.connection_admission import ServedConnection
from psfleet.core.net.http2.frames import ConnectionBroken, ErrorCode
from psfleet.core.net.http2.header_blocks import repeated
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.http2.socket_transport import Transport
from psfleet.serving.batcher import QueueFull
from psfleet.serving.grpc_service import serving_module
from psfleet.serving.model import ModelVersion, ServedModel
from psfleet.serving.service import PredictionService, UnknownModel

LONGEST = 64 << 20
"""Maximum size of a request's body, in bytes."""
Reply = tuple[int, bytes, str, list[tuple[bytes, bytes]]]
"""Reply: status, body, content type, and further headers."""
_LONGEST_HEAD = 32 << 10  # maximum bytes of a request's path and headers
_IDLE = 75.0  # seconds without a byte after which a connection is closed
_BUFFER = 64 << 10


_MODEL = re.compile(r"/v1/models/([^/:]+)(?:/versions/([0-9]{1,18}))?(:predict)?")
_OPEN = (b"/healthz", b"/readyz")


@dataclass
class HttpRequest:
    """HTTP request, which is filled in while it is read.

    Attributes:
        path: Path with the query, as the client sent it.
        headers: Headers as (name, value), in the order of the request. Names are in lower case.
        method: HTTP method, such as GET or POST.
        refusal: Reply that refuses the request, or None if the request is accepted.
        keeps_open: True if the connection stays open after the reply.
    """

    path: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    method: str = ""
    body: bytes = b""
    refusal: Reply | None = None
    keeps_open: bool = True


class HttpConnection:
    """Server side of one HTTP connection.

    Implements psfleet.core.net.http2.connection_admission.ServedConnection.

    Args:
        check: Function from a request with its path and headers to a reply that refuses it, or None to
            accept it.
        reply_to: Function from a request to its reply. It does not raise.
        too_large: Reply to a request that is too large.
    """

    def __init__(
        self,
        transport: Transport,
        check: Callable[[HttpRequest], Reply | None],
        reply_to: Callable[[HttpRequest], Reply],
        too_large: Reply,
    ) -> None:
        self.transport = transport
        self.is_authenticated = self.is_busy = False
        self._check, self._reply_to, self._too_large = check, reply_to, too_large
        self._httptools = serving_module("httptools")
        self._parser: Any = self._httptools.HttpRequestParser(self)
        self._view = memoryview(bytearray(_BUFFER))
        self._request = HttpRequest()
        self._body = bytearray()  # a list of short parts would take far more memory
        self._size = 0  # bytes of the headers so far, later of the body
        self._whole: list[HttpRequest] = []
        self._last = time.monotonic()
        self._is_ending = False

    def run(self) -> None:
        while True:
            size = self.transport.receive(self._view, self.tick)
            self._last = time.monotonic()
            try:
                self._parser.feed_data(self._view[:size])
            except (self._httptools.HttpParserError, self._httptools.HttpParserUpgrade) as error:
                self._whole.append(self._refused(error))
            # The bytes of one read may contain several pipelined requests. The callbacks have collected them.
            whole, self._whole = self._whole, []
            for request in whole:
                self._send_reply(request)
            self._last = time.monotonic()

    def _refused(self, error: Exception) -> HttpRequest:
        request = self._request
        if request.refusal is None:
            request.refusal = 400, b"the request is no HTTP/1.1\n", "text/plain", []
        request.keeps_open = False
        return request

    def _send_reply(self, request: HttpRequest) -> None:
        self.is_busy = True  # a stopping server waits for busy connections
        status, body, kind, headers = request.refusal or self._reply_to(request)
        keeps_open = request.keeps_open and not self._is_ending
        head = _head(status, kind, int(time.time()))
        for name, value in [*headers, *([] if keeps_open else [(b"connection", b"close")])]:
            head += b"%b: %b\r\n" % (name, value)
        head += b"content-length: %d\r\n\r\n" % len(body)
        self.transport.send([head + body] if request.method != "HEAD" else [head])
        self.is_busy = False
        if request.refusal is not None:
            self._pass_over()
        if not keeps_open:
            raise ConnectionBroken("the connection has ended")

    def _pass_over(self) -> None:
        """Read and drop the remaining bytes of a refused request.

        If the socket were closed with unread bytes, the client would get a reset and might not see the reply.
        """
        # Makes `tick` end the connection as soon as no bytes arrive.
        self._last = time.monotonic() - _IDLE
        for _ in range(LONGEST // _BUFFER):
            self.transport.receive(self._view, self.tick)

    def on_message_begin(self) -> None:
        """Start a new request. httptools calls this method and the following ones during `feed_data`."""
        self._request, self._body, self._size = HttpRequest(), bytearray(), 0

    def on_url(self, url: bytes) -> None:
        """Append a part of the path."""
        self._grow(len(url), _LONGEST_HEAD)
        self._request.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append a header."""
        self._grow(len(name) + len(value), _LONGEST_HEAD)
        self._request.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the credentials, now that all headers are here. Send "100 Continue" if the client waits for
        it.
        """
        request, self._size = self._request, 0
        request.method = self._parser.get_method().decode("ascii")
        request.refusal = self._check(request)
        if request.refusal is not None:
            raise ConnectionRefusedError  # stops the parser; `run` then sends the refusal
        self.is_authenticated = True
        if (b"expect", b"100-continue") in request.headers:
            self.transport.send([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def on_body(self, part: bytes) -> None:
        """Append a part of the body."""
        self._grow(len(part), LONGEST)
        self._body += part

    def on_message_complete(self) -> None:
        """Queue the complete request. `run` replies after all received bytes are parsed."""
        self._request.body = bytes(self._body)
        self._request.keeps_open = self._parser.should_keep_alive()
        self._whole.append(self._request)

    def _grow(self, size: int, limit: int) -> None:
        self._size += size
        if self._size > limit:
            self._request.refusal = self._too_large
            raise OverflowError

    def tick(self) -> None:
        if time.monotonic() - self._last > _IDLE:
            raise ConnectionBroken("the client is silent")

    def newest(self) -> int:
        return 0

    def say_goodbye(self, newest: int, code: ErrorCode, details: str) -> None:
        """Close the connection after the next reply. Other connections may stay open.

        The arguments are for HTTP/2, and have no effect here.
        """
        self._is_ending = True


@lru_cache(64)
def _head(status: int, kind: str, second: int) -> bytes:
    """Return the first lines of a reply. They contain the time in seconds, so they are cached for each
    second.
    """
    date, phrase = formatdate(second, usegmt=True), HTTPStatus(status).phrase
    return f"HTTP/1.1 {status} {phrase}\r\ndate: {date}\r\ncontent-type: {kind}\r\n".encode()


class HttpListener(Http2Server):
    """HTTP/1.1 server on a listening socket, which accepts and limits connections as Http2Server does.

    Args:
        connection: Function from the transport of an accepted connection to the object that serves it.
        arguments: Further arguments of Http2Server.
    """

    def __init__(
        self, connection: Callable[[Transport], ServedConnection], *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._make = connection

    @override
    def _connection(self, transport: Transport, since: float) -> ServedConnection:
        return self._make(transport)


_TEXT, _JSON = "text/plain; version=0.0.4", "application/json"


try:  # orjson comes with the extra `serve`, and takes a third of the time of json
    _orjson: Any = importlib.import_module("orjson")
    _loads, _dumps = _orjson.loads, _orjson.dumps
except ImportError:

    def _finite(number: str) -> float:
        """Parse a number as orjson does, which refuses NaN, Infinity and numbers beyond float64."""
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number:.20} is no number of JSON")
        return value

    def _loads(content: bytes) -> Any:
        return json.loads(content.decode(), parse_float=_finite, parse_constant=_finite)

    def _dumps(document: Any) -> bytes:
        return json.dumps(document).encode()


class _TooLarge(UsageError):
    """Error of a request that has too many bytes."""


class _NoSuchPath(UsageError):
    """Error of a request for a path that does not exist."""


class _WrongMethod(UsageError):
    """Error of a request whose path exists, but not for this method."""


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
    """Replies to the HTTP requests of a prediction service.

    Args:
        credentials: Credentials whose token, or token for readers, every call must carry. With None, calls
            need no token.
    """

    def __init__(self, service: PredictionService, credentials: Credentials | None = None) -> None:
        self._service = service
        self._credentials = credentials
        serving_module("httptools")  # raises before the port is open if httptools is missing

    def connection(self, transport: Transport) -> HttpConnection:
        """Return the server's end of a connection."""
        text = f"the request has more than {LONGEST:,} bytes, or long headers; send it in parts"
        return HttpConnection(transport, self._check, self._reply_to, _failure(_TooLarge(text)))

    def _check(self, request: HttpRequest) -> Reply | None:
        # If a header occurs twice, a proxy might use the first value and this server the second.
        if twice := repeated(name.decode("latin-1") for name, _ in request.headers):
            return _failure(UsageError(f"the request has the header {twice} twice; send it once"))
        if self._credentials is None or request.path in _OPEN:
            return None
        tokens = [value for name, value in request.headers if name == b"authorization"]
        if len(tokens) == 1 and is_permitted(self._credentials, tokens[0], only_reads=True):
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
        except Exception as error:  # a model may raise anything, and the service must go on
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
    """Return the inputs of a request's JSON body, by name.

    Inputs may come by name or by sample: {"inputs": {"user": [17, 42]}} and {"instances": [{"user": 17},
    {"user": 42}]} are the same batch.
    """
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
    if not isinstance(samples, list) or not all(isinstance(item, dict) for item in samples):
        raise UsageError('"instances" must be a list of objects, each with values by name')
    if not samples:
        raise UsageError('"instances" is empty; send at least one sample')
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: [sample.get(name) for sample in samples] for name in names}


def _plain(values: NDArray[Any]) -> Any:
    """Return the values of an output as lists for JSON. NaN and infinities become None, because JSON has no
    such numbers.
    """
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        return np.where(finite, values.astype(object), None).tolist()  # type: ignore[call-overload]
    return values.tolist()


def freshness_of(version: ModelVersion) -> dict[str, Any]:
    """Return a version's number, and the cut and age of its weights, as fields of a JSON document.

    The cut is the number of the training state that the weights are from.
    """
    rows = version.model.rows
    age = rows.age
    document = {"version": version.number, "cut": rows.cut}
    return document if age is None else {**document, "age": round(age, 6)}


def status_of(model: ServedModel) -> dict[str, Any]:
    """Return a model's name and the state of its versions as a JSON document."""
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
