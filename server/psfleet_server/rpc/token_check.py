"""The gate before every handler: a call over TCP must carry the job's token.

A stranger's call ends before its message is taken in, so it costs no memory.
"""

import hmac
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psfleet.errors import AccessDenied
from psfleet.wire import error_status
from psfleet.wire.access import TOKEN_KEY, Access, is_tcp
from psfleet_server.rpc.rate_limited_log import RateLimitedLog

__all__ = ["gates"]

Handler = Any  # grpc.RpcMethodHandler, generic in its stubs only


def gates(access: Access, endpoint: str) -> "list[grpc.ServerInterceptor[Any, Any]]":
    """What stands before the handlers of a server at this endpoint."""
    if access.credentials is None or not is_tcp(endpoint):
        return []
    return [_TokenInterceptor(access.credentials.bearer)]


class _TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Lets calls with the token pass; about 5 microseconds each."""

    def __init__(self, bearer: str) -> None:
        self._expected = bearer.encode()
        # A handler that takes a stream of requests is called before any of them is read.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._log = RateLimitedLog()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_KEY and hmac.compare_digest(_bytes(value), self._expected):
                return continuation(handler_call_details)
        return self._refusal

    def _refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        has_one = any(key == TOKEN_KEY for key, _ in context.invocation_metadata())
        what = "its token is not this job's" if has_one else "it carries no token"
        self._log.say(f"refused a call from {context.peer()}: {what}")
        error_status.failure(
            context,
            AccessDenied(
                f"the call was refused: {what}; use the credentials of this job (PSFLEET_TLS)"
            ),
        )
        yield from ()


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "replace")
