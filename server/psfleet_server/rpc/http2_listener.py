"""The second endpoint of a server: the methods that carry tensors, over psfleet's own HTTP/2.

It is beside the first one: a unix socket in the same folder, or any free port of the same address.
`Shard/Transport` says where.
"""

import contextlib
import hmac
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from psfleet.errors import ConfigError
from psfleet.http2.calls import Behavior, InboundMessages, IncomingCall
from psfleet.http2.http2_server import Http2Server
from psfleet.http2.server_connection import ServerSettings
from psfleet.observability.exposition import LatencyHistogram
from psfleet.platform.sockets import LONGEST_PATH
from psfleet.settings.declared_settings import ServerLimits
from psfleet.wire.connections.access import Access, is_tcp
from psfleet.wire.connections.channel import HANDSHAKE
from psfleet.wire.connections.tls_sockets import accepts
from psfleet_server.rpc.deferred_reply import DeferredReply, as_psfleet_error
from psfleet_server.rpc.grpcio_admission import BACKLOG
from psfleet_server.rpc.rate_limited_log import RateLimitedLog

MeasuredMethod = tuple[
    Callable[..., Any], LatencyHistogram, bool, Callable[[bytes], bytes | None] | None
]
"""Handler of a call, the histogram of the time from a call to its reply, and whether it returns the reply.

It takes the request, and a DeferredReply if it does not return the reply. The last function, if there is one,
is asked first: it returns the reply at once, or None, with nothing changed.
"""

_SUFFIX = ".h2"


class Http2Listener:
    """Listens from `start` to `stop`.

    Args:
        endpoint: The server's first endpoint, with its port.
        access: With what clients and server prove themselves over TCP.
        limits: Limits on connections and messages.
        messages: Those of all endpoints of this server.
    """

    def __init__(
        self, endpoint: str, access: Access, limits: ServerLimits, messages: InboundMessages
    ) -> None:
        self._endpoint = endpoint
        self._access = access
        self._limits = limits
        self._messages = messages
        self._path = ""
        self._server: Http2Server | None = None

    def start(self, methods: Mapping[str, MeasuredMethod]) -> tuple[int, str]:
        """Begin to answer; the port or else the path, (0, ""): it cannot listen.

        Raises:
            ConfigError: The address cannot be had.
        """
        path = self._endpoint.removeprefix("unix:") + _SUFFIX
        if not is_tcp(self._endpoint) and len(os.fsencode(path)) > LONGEST_PATH:
            return 0, ""
        listener = self._listen(path)
        credentials = self._access.credentials
        bearer = credentials.bearer if credentials and is_tcp(self._endpoint) else ""

        def refuse(path: str, authorization: str) -> str:
            if not bearer or hmac.compare_digest(authorization.encode(), bearer.encode()):
                return ""
            return "the call does not carry this job's token"

        settings = ServerSettings(
            message=self._limits.message,
            connections=self._limits.connections,
            handshakes=self._limits.handshakes,
            streams=self._limits.streams,
            incoming=self._limits.incoming,
            handshake=HANDSHAKE,
            refuse=refuse,
            at_once={name: method[3] for name, method in methods.items() if method[3] is not None},
        )
        behaviors = {name: _answering(*method[:3]) for name, method in methods.items()}
        wrap = accepts(self._access, self._endpoint)
        self._server = Http2Server(
            listener, wrap, behaviors, settings, RateLimitedLog().say, self._messages
        )
        self._server.start()
        return (0, self._path) if self._path else (listener.getsockname()[1], "")

    def stop(self, grace: float) -> None:
        """Answer no more calls; those under way get `grace` seconds."""
        if self._server is not None:
            self._server.stop(grace)
        if self._path:
            Path(self._path).unlink(missing_ok=True)

    def _listen(self, path: str) -> socket.socket:
        try:
            if is_tcp(self._endpoint):
                host = self._endpoint.rpartition(":")[0].strip("[]")
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, 0), family=family, backlog=BACKLOG)
            Path(path).unlink(missing_ok=True)  # of the process that had the first endpoint
            listener = socket.socket(socket.AF_UNIX)
            with contextlib.ExitStack() as stack:
                stack.callback(listener.close)
                listener.bind(path)
                os.chmod(path, 0o600)
                listener.listen(BACKLOG)
                stack.pop_all()
        except OSError as error:
            raise ConfigError(
                f"cannot listen beside {self._endpoint!r}: {error.strerror}; choose another address, "
                "or PSFLEET_TRANSPORT=grpcio"
            ) from None
        self._path = path
        return listener


def _answering(
    method: Callable[..., Any], latency: LatencyHistogram, returns_reply: bool
) -> Behavior:
    def handle(request: bytes, call: IncomingCall) -> None:
        reply = DeferredReply(call, call.end, latency)
        try:
            if returns_reply:
                reply.complete(method(request))
            else:
                method(request, reply)
        except Exception as error:
            reply.fail(as_psfleet_error(error))

    return handle
