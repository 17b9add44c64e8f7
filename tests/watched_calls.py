"""Calls of a worker to its servers, watched: for `inject_faults` of a ClusterRuntime."""

from collections.abc import Callable

from psfleet.core.base.crash_points import Send

Look = Callable[[int, str, bytes], object]


def _pass_over(server: int, method: str, request: bytes) -> None:
    """See nothing."""


class WatchedCalls:
    """Looks at each call before it is sent and after its reply.

    Args:
        before: Called with server, method and request; what it raises is the error of the call.
        after: Called with the same.

    Attributes:
        methods: Those of all calls, in order.
    """

    def __init__(self, before: Look = _pass_over, after: Look = _pass_over) -> None:
        self.before = before
        self.after = after
        self.methods: list[str] = []

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of a server."""

        def watched(method: str, request: bytes, seconds: float) -> bytes:
            self.before(server, method, request)
            self.methods.append(method)
            reply = send(method, request, seconds)
            self.after(server, method, request)
            return reply

        return watched
