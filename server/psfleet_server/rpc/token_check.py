"""The gate before every handler: a call over TCP must carry the job's token, or that of its readers.

A stranger's call ends before its message is taken in, so it costs no memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psfleet.errors import AccessDenied
from psfleet.wire.connections import error_status
from psfleet.wire.connections.access import TOKEN_KEY, Access, is_tcp
from psfleet.wire.connections.credentials import Credentials
from psfleet_server.rpc.rate_limited_log import RateLimitedLog

_READS = frozenset(
    f"/psfleet.v1.{method}"
    for method in (
        "Followers/ReadChanges",
        "Followers/ReadRows",
        "Metrics/Collect",
        "Shard/Evictions",
        "Shard/ReadState",
        "Shard/Status",
        "Shard/Transport",
    )
)
"""Methods that change nothing, whatever they are called with: a pull may commit a push."""

Handler = Any  # grpc.RpcMethodHandler, generic in its stubs only


def gates(access: Access, endpoint: str) -> "list[grpc.ServerInterceptor[Any, Any]]":
    """Return the interceptors for the handlers of a server at this endpoint."""
    if access.credentials is None or not is_tcp(endpoint):
        return []
    return [_TokenInterceptor(access.credentials)]


class _TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Lets calls with the token pass; about 5 microseconds each."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        # A handler that takes a stream of requests is called before any of them is read.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._log = RateLimitedLog()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        metadata = handler_call_details.invocation_metadata or ()
        tokens = [value for key, value in metadata if key == TOKEN_KEY]
        reads = handler_call_details.method in _READS
        if len(tokens) == 1 and self._credentials.allows(tokens[0], reads=reads):
            return continuation(handler_call_details)
        return self._refusal

    def _refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        tokens = [value for key, value in context.invocation_metadata() if key == TOKEN_KEY]
        few = ("it carries no token", "its token is not this job's")
        what = few[len(tokens)] if len(tokens) < len(few) else f"it carries {len(tokens)} tokens"
        if len(tokens) == 1 and self._credentials.allows(tokens[0], reads=True):
            what = "its token is that of readers, which only follow the job and read its figures"
        self._log.say(f"refused a call from {context.peer()}: {what}")
        error_status.failure(
            context,
            AccessDenied(
                f"the call was refused: {what}; use the credentials of this job (PSFLEET_TLS)"
            ),
        )
        yield from ()
