"""ZeroMQ over TCP for the processes of one job only: CURVE, with keys that follow from its token.

Both ends of a link hold the same pair of keys, made from the job's token, and each takes nobody else's: who
has not the token can neither read, nor write, nor pose as a stage (https://rfc.zeromq.org/spec/26).
"""

import hashlib
import hmac

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from psfleet.errors import ConfigError
from psfleet.wire.connections.access import Access


class CurveAuthenticator:
    """Keys of a job, and the thread that turns others away."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", token: str) -> None:
        secret = hashlib.sha256(b"psfleet stages " + token.encode()).digest()
        self._secret = z85.encode(secret)
        self._public = zmq.curve_public(self._secret)
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this public key (Z85) may connect; called by the authenticator."""
        return hmac.compare_digest(key, self._public)

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Encrypt what goes through the socket; before it binds or connects."""
        socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        if socket.type == zmq.PULL:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self._public

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._guard.stop()


def curve_for(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoints: tuple[str, ...], access: Access
) -> CurveAuthenticator | None:
    """Return the authenticator of links between these endpoints; None: they need none.

    Raises:
        ConfigError: One is TCP and there are no credentials.
    """
    strange = [endpoint for endpoint in endpoints if not endpoint.startswith(("ipc:", "inproc:"))]
    if not strange or (access.insecure and access.credentials is None):
        return None
    if access.credentials is None:
        raise ConfigError(
            f"stages cannot meet at {strange[0]!r}: TCP needs credentials; name their folder in "
            "PSFLEET_TLS, use ipc:// on one host, or say PSFLEET_INSECURE=1"
        )
    return CurveAuthenticator(context, access.credentials.token)
