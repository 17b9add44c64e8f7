"""Prediction service of one process: gRPC on one port, HTTP with JSON on another.

PredictionServer opens the ports, connects both protocols with one PredictionService, and in a thread looks
for new versions of its models once a second. psfleet's own HTTP/2 server accepts connections on both ports,
with the same limits as on a parameter server. `psfleet serve` is the command for this class.
"""

import contextlib
import ipaddress
import socket
import threading
from dataclasses import replace
from functools import partial
from typing import Any, Self

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.logs import RateLimitedLog, log_of
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.base.threads import ServiceThread
from psfleet.core.base.validation.annotations import (
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    checked,
)
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.connection_limits import HANDSHAKE, connection_limit
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.tls_sockets import accepts
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.http2.server_connection import ServerSettings
from psfleet.serving.batcher import Batcher
from psfleet.serving.grpc_service import GrpcPrediction, refusal
from psfleet.serving.http_app import HttpApp, HttpListener
from psfleet.serving.model import Model, ModelVersion, ServedModel, VersionedModel
from psfleet.serving.service import PredictionService, ServingMetrics

_log = log_of(__name__)

_MOST = 64 << 20  # maximum bytes of a message
_LOOK = 1.0  # seconds between two checks for new versions
_GRACE = 5.0  # seconds that `close` gives running requests to finish
_BACKLOG = 1024  # maximum number of connections that wait to be accepted
_LIMITS = ServerLimits()


@checked
class PredictionServer:
    """Service that sends predictions and rows to other processes, from its construction until `close`.

        with psfleet.serving.Server({"ctr": psfleet.serving.load("model")}) as server:
            print(server.http_address, server.grpc_address)

    Args:
        models: Models by name. New versions of a VersionedModel become active while the service runs.
        host: Address to listen on. Any address but loopback needs `tls` or `insecure`.
        port: Port of gRPC. 0 means any free port.
        http_port: Port of HTTP. 0 means any free port.
        tls: Folder of a server's credentials, as `psfleet certs` makes it, or "" for a service without TLS.
            With TLS, client and service show certificates, and each call carries the token of the
            credentials.
        insecure: True to permit any address without TLS and token.
        max_batch: Maximum number of samples in a batch, and therefore in a request.
        max_delay: Maximum number of seconds that a request waits for other requests, so that batches get
            larger.
        max_queue: Maximum number of waiting requests of a model. Further requests are refused, and the
            client is told when to try again.
        follow_versions: True to load new versions in the folder of a VersionedModel, and to make them active.

    Attributes:
        grpc_address, http_address: Addresses, such as "127.0.0.1:8500".

    Raises:
        ConfigError: The port is in use, other machines could call the service without credentials, or the
            extra `serve` is not installed.
        PsfleetError: A model cannot be loaded.
    """

    def __init__(
        self,
        models: dict[str, Model | VersionedModel],
        host: str = "127.0.0.1",
        port: NonNegativeInt = 0,
        http_port: NonNegativeInt = 0,
        *,
        tls: str = "",
        insecure: bool = False,
        max_batch: PositiveInt = 1024,
        max_delay: NonNegative = 0.0,
        max_queue: PositiveInt = 100,
        follow_versions: bool = True,
    ) -> None:
        if not models:
            raise ConfigError("there is no model to serve; name one")
        self._access = _access(host, tls, insecure)
        metrics = ServingMetrics()

        def version_of(name: str, number: int, model: Model) -> ModelVersion:
            observe = partial(metrics.observe, name)
            batcher = Batcher(model, max_batch, max_delay, max_queue, observe)
            return ModelVersion(number, model, batcher)

        entries = [_served(name, model, version_of) for name, model in models.items()]
        self.service = PredictionService(entries, metrics)
        self._calls = GrpcPrediction(self.service)
        credentials = self._access.credentials
        app = HttpApp(self.service, credentials)
        settings = ServerSettings(
            message=_MOST,
            connections=connection_limit(_LIMITS),
            handshakes=_LIMITS.handshakes,
            streams=_LIMITS.streams,
            incoming=_LIMITS.incoming,
            handshake=HANDSHAKE,
        )
        calls = replace(settings, refuse=refusal(credentials)) if credentials else settings
        with contextlib.ExitStack() as stack:
            stack.callback(self._calls.close)
            grpc, self.grpc_address = _listening("gRPC", host, port)
            stack.callback(grpc.close)
            http, self.http_address = _listening("HTTP", host, http_port)
            stack.pop_all()
        say = RateLimitedLog(_log).say  # limited, because any client can cause messages
        self._servers = (
            Http2Server(
                grpc, accepts(self._access, self.grpc_address), self._calls.behaviors, calls, say
            ),
            HttpListener(
                app.connection,
                http,
                accepts(self._access, self.http_address, "http/1.1"),
                {},
                settings,
                say,
            ),
        )
        self._closing = threading.Event()
        self._watching = ServiceThread(self._watch, "versions")
        for server in self._servers:
            server.start()
        if follow_versions:
            self._watching.start()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK):
            for model in self.service.models.values():
                model.refresh()

    def close(self) -> None:
        """Reply to running requests, then close the ports. Safe to call twice."""
        self._closing.set()
        self._calls.stop()
        stopping = [ServiceThread(server.stop, "stopping", (_GRACE,)) for server in self._servers]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        self._calls.close()
        if self._watching.ident is not None:
            self._watching.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _listening(protocol: str, host: str, port: int) -> tuple[socket.socket, str]:
    """Return a listening socket and its address with the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{protocol} cannot listen on {host}:{port}: {error.strerror}; choose another port"
        ) from None
    return listener, f"{host}:{listener.getsockname()[1]}"


def _served(name: str, model: Model | VersionedModel, version_of: Any) -> ServedModel:
    if isinstance(model, Model):
        return ServedModel(name, lambda: [1], lambda number: version_of(name, number, model))
    return ServedModel(
        name, model.numbers, lambda number: version_of(name, number, model.load(number))
    )


def _access(host: str, tls: str, insecure: bool) -> Access:
    if tls:
        return Access(Credentials.read(tls))
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not (is_loopback or insecure):
        raise ConfigError(
            f"cannot listen on {host!r} without credentials; name their folder with tls (`psfleet certs` "
            "makes one), or say insecure where every host on the network is trusted"
        )
    return Access(insecure=True)
