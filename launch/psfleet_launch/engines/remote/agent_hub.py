"""Agents of a job as the launcher hears them, and the service that they attend."""

import hmac
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import grpc

from psfleet.errors import ConfigError
from psfleet.platform.threads import ServiceThread
from psfleet.settings.declared_settings import ServerLimits
from psfleet.wire.connections.access import TOKEN_KEY, Access
from psfleet.wire.connections.channel import server_options
from psfleet.wire.v1 import agent_pb2 as pb
from psfleet.wire.v1.agent_pb2_grpc import LauncherServicer, add_LauncherServicer_to_server
from psfleet_launch.engines.remote.reachability import QUIET, PeerSocket, Reachability

SILENCE_LIMIT = 10.0
"""Seconds without an answer to a ping after which an agent ends what it has started, and itself."""

_MARGIN = 3.0
"""Seconds more after which the launcher takes it for ended: by then it has had the time to end."""

MOST_AGENTS = 1000
"""Agents of one job; each has threads of the launcher."""

_GRACE = 1.0  # seconds for streams to end


class AgentConnection:
    """One agent as the launcher hears it.

    Attributes:
        ended: It is gone, or is not to be heard any more.
        is_cut_off: Its machine cannot be reached, as far as `look` has seen.
    """

    def __init__(self, peer: str) -> None:
        self.hello = pb.Hello()
        self.ended = False
        self.is_cut_off = False
        self._reachability = Reachability()
        self._socket = PeerSocket(peer)
        self._outbox: queue.SimpleQueue[pb.LauncherMessage | None] = queue.SimpleQueue()
        self._received = time.monotonic()

    @property
    def name(self) -> str:
        """Name of its machine for people."""
        return self.hello.name

    @property
    def is_silent(self) -> bool:
        """It must have given up the connection by now."""
        return time.monotonic() > self._received + SILENCE_LIMIT + _MARGIN

    @property
    def is_recent(self) -> bool:
        """A message has come from it just now."""
        return time.monotonic() < self._received + QUIET

    def look(self) -> bool:
        """Look whether its machine can be reached; whether it is cut off since this look."""
        now, before = time.monotonic(), self.is_cut_off
        if self._reachability.look(now, self._received, self._socket.unanswered):
            self.send(pb.LauncherMessage(probe=True))
        self.is_cut_off = not self._reachability.can_be_reached
        return self.is_cut_off and not before

    def send(self, message: pb.LauncherMessage) -> None:
        """Send a message, after all earlier ones."""
        self._outbox.put(message)

    def receive(self, message: pb.AgentMessage) -> None:
        """Note that it is alive; answer a ping."""
        self._received = time.monotonic()
        if message.HasField("ping"):
            self.send(pb.LauncherMessage(ping=message.ping))

    def end(self) -> None:
        """Let the call end in order once all messages are sent."""
        self._outbox.put(None)

    def close(self) -> None:
        """Let go of what `look` has used."""
        self._socket.close()

    def messages(self) -> Iterator[pb.LauncherMessage]:
        """Yield the messages to send."""
        yield from iter(self._outbox.get, None)


Received = tuple[AgentConnection, pb.AgentMessage | None]
"""A message of an agent; None: its connection has ended."""


class AgentHub(LauncherServicer):
    """Takes the calls of agents.

    Args:
        wake: Called from other threads when there is something to take.
    """

    def __init__(self, access: Access, wake: Callable[[], None]) -> None:
        assert access.credentials is not None
        self._access = access
        self._expected = access.credentials.bearer
        self._wake = wake
        self._received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._connections: list[AgentConnection] = []
        self._pool = ThreadPoolExecutor(MOST_AGENTS, thread_name_prefix="agents")
        self._server: grpc.Server | None = None

    def listen(self, endpoint: str) -> str:
        """Begin to take calls; the endpoint with its port.

        Raises:
            ConfigError: It cannot be had.
        """
        server = grpc.server(
            self._pool,
            options=server_options(ServerLimits()),
            maximum_concurrent_rpcs=MOST_AGENTS,  # else one more would wait without a word
        )
        add_LauncherServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        try:
            port = self._access.listen(server, endpoint)
        except RuntimeError as error:
            raise ConfigError(
                f"the launcher cannot listen for agents on {endpoint!r} ({error}); name an address of this "
                "machine with --listen"
            ) from None
        server.start()
        self._server = server
        return f"{endpoint.rpartition(':')[0]}:{port}"

    def take(self) -> list[Received]:
        """Return the agents' messages since the last call, in order."""
        return [self._received.get() for _ in range(self._received.qsize())]

    def close(self) -> None:
        """End every connection."""
        for connection in self._connections:
            connection.end()
            connection.close()
        if self._server is not None:
            self._server.stop(_GRACE).wait()
            # The server and this object hold each other, and gRPC keeps descriptors until it is collected.
            self._server = None
        self._pool.shutdown()

    def Attend(  # as the service is declared
        self, requests: Iterator[pb.AgentMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.LauncherMessage]:
        """Exchange messages with an agent, in a thread of its own."""
        token = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(str(token).encode(), self._expected.encode()):
            self._put(AgentConnection(""), pb.AgentMessage(notice=_wrong_token(context.peer())))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "its token is not this job's")
        connection = AgentConnection(context.peer())
        self._connections.append(connection)
        if not context.add_callback(connection.end):  # the call has ended already
            connection.end()
        ServiceThread(self._hear, "agent", (connection, requests)).start()
        return connection.messages()

    def _hear(self, connection: AgentConnection, requests: Iterator[pb.AgentMessage]) -> None:
        try:
            for message in requests:
                connection.receive(message)
                if not message.HasField("ping"):
                    self._put(connection, message)
        except Exception:  # gRPC raises a bare Exception when the call has ended
            pass
        finally:
            self._put(connection, None)

    def _put(self, connection: AgentConnection, message: pb.AgentMessage | None) -> None:
        self._received.put((connection, message))
        self._wake()


def _wrong_token(peer: str) -> pb.Notice:
    """Return the notice about an agent with a certificate of this job but another token."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0])
    return pb.Notice(
        text=f"the agent on host {host} has the certificate of this job with another token; "
        "copy the whole file of credentials there again"
    )
