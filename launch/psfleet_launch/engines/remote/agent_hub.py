"""Agents of a job as the launcher hears them and reaches them, and the service that they attend.

A process that is stopped, or gets no processor, says nothing; its kernel acknowledges what comes for it all
the same. So a machine whose agent is quiet is sent something, and is out of reach only if its kernel
acknowledges nothing for a while: it has no power, or the network between is cut.
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
from psfleet.core.net.connections.channel import raise_descriptor_limit, server_options
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
"""Seconds without a message after which a machine is asked."""

_SILENT = 1.0  # seconds without an acknowledgement after which it cannot be reached
_STEP = 0.25  # seconds between looks
_MOST_SECONDS = (
    2 * _STEP
)  # seconds that count between two looks: this machine may have been stopped itself
_COARSE = 0.05  # seconds by which the kernel's clock may be off
_UNACKED, _LAST_ACK, _SIZE = 24, 56, 60  # offsets in struct tcp_info of linux/tcp.h


SILENCE_LIMIT = 10.0
"""Seconds without an answer to a ping after which an agent ends what it has started, and itself."""
_MARGIN = 3.0
"""Seconds more after which the launcher takes it for ended: by then it has had the time to end."""
MOST_AGENTS = 1000
"""Agents of one job; each has threads of the launcher."""
_GRACE = 1.0  # seconds for streams to end


class Reachability:
    """Reachability of one machine. Pure.

    Attributes:
        can_be_reached: The machine can be reached, as far as is known.
    """

    def __init__(self) -> None:
        self.can_be_reached = True
        self._looked = 0.0
        self._asked_at: float | None = None
        self._waited = 0.0

    def look(self, at: float, last_message: float, unanswered: Callable[[], float]) -> bool:
        """It is `at`, in seconds of any clock; return whether to send the machine something now.

        Args:
            unanswered: Seconds for which its kernel has acknowledged nothing though there is something to
                acknowledge; 0: there is nothing, or it is not known.
        """
        if at - last_message < QUIET:
            self.can_be_reached, self._asked_at = True, None
            return False
        if at - self._looked < _STEP:
            return False
        step, self._looked = min(at - self._looked, _MOST_SECONDS), at
        if self._asked_at is None or unanswered() < at - self._asked_at - _COARSE:
            self.can_be_reached, self._asked_at, self._waited = True, at, 0.0
        else:
            self._waited += step
            self.can_be_reached = self._waited < _SILENT
        return True


class PeerSocket:
    """The other end of a TCP connection of this process, as the kernel knows it.

    gRPC does not show its sockets, so this looks for the one that has the address of its peer. It makes no
    duplicate: that would keep a connection open which gRPC has closed, and wake gRPC for it.

    Args:
        peer: Peer as gRPC names it: "ipv4:192.0.2.1:50000" or "ipv6:%5B2001:db8::1%5D:50000".
    """

    def __init__(self, peer: str) -> None:
        host, _, port = peer.partition(":")[2].rpartition(":")
        self._peer = (host.removeprefix("%5B").removesuffix("%5D"), port)
        self._descriptor = -1

    def unanswered(self) -> float:
        """Return the seconds without an acknowledgement, as for Reachability.look; 0 if there is no such
        socket.
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
        """Return what the kernel says of this socket, or None if it is not that of the peer."""
        with contextlib.suppress(OSError, ValueError):  # it is closed, or no socket
            end = socket.socket(fileno=descriptor)
            try:
                if _address(end) == self._peer:
                    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            finally:
                end.detach()
        return None


def _address(connected: socket.socket) -> tuple[str, str]:
    """Host and port of the other end; empty: it is none of TCP."""
    with contextlib.suppress(OSError):  # it listens
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            host, port = connected.getpeername()[:2]
            return str(host).removeprefix("::ffff:"), str(port)
    return "", ""


class AgentConnection:
    """One agent as the launcher hears it.

    Attributes:
        ended: It is gone, or is not to be heard any more.
        is_cut_off: Its machine cannot be reached, as far as `look` has seen.
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
            self.send(Probe())
        self.is_cut_off = not self._reachability.can_be_reached
        return self.is_cut_off and not before

    def send(self, message: LauncherMessage) -> None:
        """Send a message, after all earlier ones."""
        self._outbox.put(message)

    def receive(self, message: AgentMessage) -> None:
        """Note that it is alive; answer a ping."""
        self._received = time.monotonic()
        if isinstance(message, Ping):
            self.send(message)

    def end(self) -> None:
        """Let the call end in order once all messages are sent."""
        self._outbox.put(None)

    def messages(self) -> Iterator[LauncherMessage]:
        """Yield the messages to send."""
        while (message := self._outbox.get()) is not None:
            yield message


Received = tuple[AgentConnection, AgentMessage | None]
"""A message of an agent; None: its connection has ended."""


class AgentHub:
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
        raise_descriptor_limit()
        server = grpc.server(
            self._pool,
            options=server_options(ServerLimits()),
            maximum_concurrent_rpcs=MOST_AGENTS,  # else one more would wait without a word
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
            # The server and this object hold each other, and gRPC keeps descriptors until it is collected.
            self._server = None
        self._pool.shutdown()

    def attend(
        self, requests: Iterator[AgentMessage], context: grpc.ServicerContext
    ) -> Iterator[LauncherMessage]:
        """Exchange messages with an agent, in a thread of its own."""
        token = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(str(token).encode(), self._expected.encode()):
            self._put(AgentConnection(""), _wrong_token(context.peer()))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "its token is not this job's")
        connection = AgentConnection(context.peer())
        self._connections.append(connection)
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
    """Return the notice about an agent with a certificate of this job but another token."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0])
    return Said(
        None,
        f"the agent on host {host} has the certificate of this job with another token; "
        "copy the whole file of credentials there again",
    )
