"""Launcher's side of the connections to agents: the gRPC service, each agent's messages, and reachability.

A machine need not be lost if its agent is silent: the agent may be stopped or get no processor time, while
the machine's kernel still acknowledges TCP data. So after half a second without a message the launcher
sends a probe. Only if the kernel acknowledges nothing for a second is the machine unreachable: it has no
power, or the network is cut. Decision 20 has the reasons.

    seconds of silence   0.5   probes are sent, and the kernel is asked for acknowledgements
                         1.5   at the earliest: the machine is cut off, and standbys take over
                         10    the agent kills its processes and ends
                         13    the launcher gives the agent up as lost

`AgentHub.attend` runs in threads of gRPC, and `_hear` in a thread of each connection. Both only put
messages into queues. The launcher's main thread reads them with `AgentHub.take`.
"""

import contextlib
import hmac
import os
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import grpc

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.connections.access import TOKEN_KEY, Access
from psfleet.core.net.connections.channel import server_options
from psfleet.core.net.connections.connection_limits import raise_descriptor_limit
from psfleet.core.net.message_codec import encode
from psfleet_launch.engines.remote.agent_messages import (
    ATTEND,
    AgentMessage,
    Hello,
    LauncherMessage,
    Ping,
    Probe,
    read_agent_message,
)
from psfleet_launch.supervision.job_events import Said

QUIET = 0.5
"""Seconds without a message after which the launcher sends a machine probes."""

_SILENT = 1.0  # seconds without an acknowledgement after which a machine cannot be reached
_STEP = 0.25  # seconds between two looks
# Longest time between two calls of `look` that is added to a machine's silence. If the time was longer, the
# launcher itself was suspended, which says nothing about the other machine.
_MOST_SECONDS = 2 * _STEP
_COARSE = 0.05  # seconds of error in the kernel's time since the last acknowledgement
_UNACKED, _LAST_ACK, _SIZE = 24, 56, 60  # offsets in struct tcp_info of linux/tcp.h


SILENCE_LIMIT = 10.0
"""Seconds without a reply to a ping after which an agent kills its processes and ends."""
_MARGIN = 3.0
"""Seconds that the launcher waits in addition, because the agent needs some time to kill its processes."""
MOST_AGENTS = 1000
"""Maximum number of agents of a job. Each agent needs threads in the launcher."""
_GRACE = 1.0  # seconds for streams to end


class Reachability:
    """Decides whether a machine can be reached. The caller passes the time and sends the probes.

    Attributes:
        can_be_reached: False if the machine's kernel has acknowledged nothing for a second.
    """

    def __init__(self) -> None:
        self.can_be_reached = True
        self._looked = 0.0
        self._asked_at: float | None = None
        self._waited = 0.0

    def look(self, at: float, last_message: float, unanswered: Callable[[], float]) -> bool:
        """Update `can_be_reached`, and return whether to send the machine a probe now.

        Args:
            at: Present time, in seconds of any clock.
            last_message: Time of the agent's last message.
            unanswered: Function that returns for how many seconds data has waited for an acknowledgement of
                the machine's kernel. 0 if no data waits, or if this is not known.
        """
        if at - last_message < QUIET:
            self.can_be_reached, self._asked_at = True, None
            return False
        if at - self._looked < _STEP:
            return False
        # `_asked_at` is the time of a probe that was not acknowledged yet. If there is no such probe, or if
        # an acknowledgement has come after it, counting begins again at 0.
        step, self._looked = min(at - self._looked, _MOST_SECONDS), at
        if self._asked_at is None or unanswered() < at - self._asked_at - _COARSE:
            self.can_be_reached, self._asked_at, self._waited = True, at, 0.0
        else:
            self._waited += step
            self.can_be_reached = self._waited < _SILENT
        return True


class PeerSocket:
    """Reads from the kernel whether the peer of one of gRPC's TCP connections acknowledges data.

    gRPC does not expose its sockets, so this class searches this process's descriptors for the socket with
    the peer's address. It uses gRPC's descriptor and not a duplicate, because a duplicate would keep the
    connection open, and wake gRPC, after gRPC has closed it. The number of the descriptor may refer to
    another file later, so it is checked at each use.

    Args:
        peer: Peer as gRPC names it: "ipv4:192.0.2.1:50000" or "ipv6:%5B2001:db8::1%5D:50000".
    """

    def __init__(self, peer: str) -> None:
        host, _, port = peer.partition(":")[2].rpartition(":")
        self._peer = (host.removeprefix("%5B").removesuffix("%5D"), port)
        self._descriptor = -1

    def unanswered(self) -> float:
        """Return the seconds since the peer's last acknowledgement if data waits for one.

        0 if no data waits or if the socket is not found.
        """
        info = self._info(self._descriptor)
        if info is None:
            with contextlib.suppress(OSError):  # no descriptor is left
                for name in os.listdir("/proc/self/fd"):
                    if (info := self._info(int(name))) is not None:
                        self._descriptor = int(name)
                        break
        if info is None:
            return 0.0
        (waiting,) = struct.unpack_from("I", info, _UNACKED)
        (milliseconds,) = struct.unpack_from("I", info, _LAST_ACK)
        return milliseconds / 1000 if waiting else 0.0

    def _info(self, descriptor: int) -> bytes | None:
        """Return the kernel's `struct tcp_info` of a descriptor, or None if it is not the peer's socket."""
        with contextlib.suppress(OSError, ValueError):  # the descriptor is closed, or no socket
            end = socket.socket(fileno=descriptor)
            try:
                if _address(end) == self._peer:
                    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            finally:
                end.detach()  # gRPC owns the descriptor: this object must not close it
        return None


def _address(connected: socket.socket) -> tuple[str, str]:
    """Return host and port of the socket's peer, or ("", "") if it is no connected TCP socket."""
    with contextlib.suppress(OSError):  # a listening socket has no peer
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            host, port = connected.getpeername()[:2]
            return str(host).removeprefix("::ffff:"), str(port)
    return "", ""


class AgentConnection:
    """Launcher's side of the connection of one agent. Messages are received in a separate thread.

    Attributes:
        hello: First message of the agent, which describes its machine.
        ended: True if the agent is lost or was refused. Further messages from it are ignored.
        is_cut_off: True if the machine could not be reached at the last `look`.
    """

    def __init__(self, peer: str) -> None:
        self.hello = Hello()
        self.ended = False
        self.is_cut_off = False
        self._reachability = Reachability()
        self._socket = PeerSocket(peer)
        self._outbox: queue.SimpleQueue[LauncherMessage | None] = queue.SimpleQueue()
        self._received = time.monotonic()

    @property
    def name(self) -> str:
        """Name of the agent's machine, for messages."""
        return self.hello.name

    @property
    def is_silent(self) -> bool:
        """True if the agent has been silent for so long that it must have killed its processes and ended."""
        return time.monotonic() > self._received + SILENCE_LIMIT + _MARGIN

    @property
    def is_recent(self) -> bool:
        """True if the agent has sent a message within the last half second."""
        return time.monotonic() < self._received + QUIET

    def look(self) -> bool:
        """Update `is_cut_off`, and return whether the machine has just become unreachable."""
        now, before = time.monotonic(), self.is_cut_off
        if self._reachability.look(now, self._received, self._socket.unanswered):
            self.send(Probe())
        self.is_cut_off = not self._reachability.can_be_reached
        return self.is_cut_off and not before

    def send(self, message: LauncherMessage) -> None:
        """Queue a message, to be sent after all earlier messages. Does not wait. Any thread may call it."""
        self._outbox.put(message)

    def receive(self, message: AgentMessage) -> None:
        """Record the time of a message, and reply to it if it is a ping."""
        self._received = time.monotonic()
        if isinstance(message, Ping):
            self.send(message)

    def end(self) -> None:
        """End the call once all queued messages are sent. Safe to call twice."""
        self._outbox.put(None)

    def messages(self) -> Iterator[LauncherMessage]:
        """Yield the queued messages, for gRPC to send. Waits for more messages until `end` is called."""
        while (message := self._outbox.get()) is not None:
            yield message


Received = tuple[AgentConnection, AgentMessage | None]
"""Message of an agent, or None when its connection has ended."""


class AgentHub:
    """gRPC server for the agents' calls, with a queue of their messages.

    Args:
        access: Credentials and token that agents must have.
        wake: Function to call, from other threads, when `take` has something to return.
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
        """Begin to accept calls at an endpoint, and return the endpoint with the actual port.

        Raises:
            ConfigError: The address or port cannot be used.
        """
        raise_descriptor_limit()
        server = grpc.server(
            self._pool,
            options=server_options(ServerLimits()),
            maximum_concurrent_rpcs=MOST_AGENTS,  # otherwise one agent more would wait without an error
        )
        service, method = ATTEND[1:].split("/")
        attend = grpc.stream_stream_rpc_method_handler(self.attend, read_agent_message, encode)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {method: attend})]
        )
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
        if self._server is not None:
            self._server.stop(_GRACE).wait()
            # The server and this object refer to each other. Without this line both would exist until the
            # garbage collector runs, with gRPC's file descriptors open.
            self._server = None
        self._pool.shutdown()

    def attend(
        self, requests: Iterator[AgentMessage], context: grpc.ServicerContext
    ) -> Iterator[LauncherMessage]:
        """Handle the call of one agent: check its token, and return an iterator over the messages to send.

        gRPC calls this in a thread of its pool. The thread sends the messages until the call ends.
        """
        token = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(str(token).encode(), self._expected.encode()):
            self._put(AgentConnection(""), _wrong_token(context.peer()))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "its token is not this job's")
        connection = AgentConnection(context.peer())
        self._connections.append(connection)
        # If the call has ended already, end `messages`. Otherwise the pool's thread would wait forever.
        if not context.add_callback(connection.end):  # the call has ended already
            connection.end()
        ServiceThread(self._hear, "agent", (connection, requests)).start()
        return connection.messages()

    def _hear(self, connection: AgentConnection, requests: Iterator[AgentMessage]) -> None:
        try:
            for message in requests:
                connection.receive(message)
                if not isinstance(message, Ping):
                    self._put(connection, message)
        except Exception:  # gRPC raises a bare Exception when the call has ended
            pass
        finally:
            self._put(connection, None)

    def _put(self, connection: AgentConnection, message: AgentMessage | None) -> None:
        self._received.put((connection, message))
        self._wake()


def _wrong_token(peer: str) -> Said:
    """Return a message for the user: an agent has a certificate of this job, but another token."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0])
    return Said(
        None,
        f"the agent on host {host} has the certificate of this job with another token; "
        "copy the whole file of credentials there again",
    )
