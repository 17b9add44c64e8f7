"""Deaths of a worker at one of its calls, without the end of the process that tests run in."""

import contextlib
import threading

from psfleet.core.base.crash_points import Send
from psfleet.core.base.errors import PsfleetError


class SimulatedDeath(PsfleetError):
    """The worker that makes this call is dead; only its thread does not know yet."""


class DeathFault:
    """Ends one worker at its n-th call, as a kill would; give it to a ClusterRuntime as `inject_faults`.

    Its calls to other servers may be under way. Code that catches SimulatedDeath lets the runtime go with
    `abandon`, and may begin another incarnation in a new runtime.

    Args:
        calls: At which call to any server, from 1.
        sent: That call reaches the server, and the worker dies before it hears the answer.

    Attributes:
        happened: The worker has died.
    """

    def __init__(self, calls: int, sent: bool) -> None:
        self.calls = calls
        self.sent = sent
        self.happened = False
        self._lock = threading.Lock()

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server, until the worker is dead."""

        def mortal_send(method: str, request: bytes, seconds: float) -> bytes:
            now = self._is_now()
            if now and self.sent:
                with contextlib.suppress(PsfleetError):
                    send(method, request, seconds)
            if now or self.happened:
                self.happened = True
                raise SimulatedDeath(
                    f"the worker has died before {method} to server {server} was answered"
                )
            return send(method, request, seconds)

        return mortal_send

    def _is_now(self) -> bool:
        with self._lock:
            self.calls -= 1
            return self.calls == 0
