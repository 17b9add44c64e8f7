"""Agent's side of the connection to the launcher: one gRPC call, and pings that test it.

Short interruptions of the network do no harm, because TCP repeats lost data. After SILENCE_LIMIT seconds
without a reply to a ping the agent gives the connection up, kills its processes and ends. It must kill
them, because the launcher then assumes that they are dead and starts them elsewhere. The agent never
connects again.

One thread receives messages, another one sends pings. The agent's loop reads messages from a queue.
`fileno` becomes readable when the queue has a message, so that the loop's selector wakes up.
"""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from psfleet.core.base.errors import AccessDenied, ServerUnavailable
from psfleet.core.base.threads import ServiceThread, Waker
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.connections.tls_sockets import why_refused
from psfleet.core.net.message_codec import encode
from psfleet_launch.engines.remote.agent_hub import MOST_AGENTS, SILENCE_LIMIT
from psfleet_launch.engines.remote.agent_messages import (
    ATTEND,
    AgentMessage,
    Hello,
    LauncherMessage,
    Ping,
    Probe,
    read_launcher_message,
)

_EVERY = 1.0  # seconds between pings
_FIRST = (2.0, 5.0)  # seconds of two attempts to connect; after each the link looks for a reason
_FULL = 64  # while more messages than this are queued, output stays in its files


class LauncherLink:
    """Connection of an agent to its launcher. `fileno` becomes readable when a message has come."""

    def __init__(self, endpoint: str, access: Access) -> None:
        self.endpoint = endpoint
        self._access = access
        self._channel = open_channel(endpoint, access)
        self._outbox: queue.SimpleQueue[AgentMessage | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[LauncherMessage] = queue.SimpleQueue()
        self._waker = Waker()
        self._over = threading.Event()
        self._why = ""
        self._call: Any = None
        self._threads: list[ServiceThread] = []
        self._answered = time.monotonic()

    def connect(self, hello: Hello) -> None:
        """Connect, and send the description of this machine. Waits up to 7 s.

        Raises:
            AccessDenied: The credentials belong to another job than the launcher's.
            ServerUnavailable: The launcher does not answer.
        """
        for seconds in _FIRST:
            if self._is_ready(seconds):
                break
            if why := why_refused(self.endpoint, self._access):
                self._channel.close()
                raise AccessDenied(
                    f"the launcher at {self.endpoint} and this agent do not know each other: {why}"
                )
        else:
            self._channel.close()
            raise ServerUnavailable(
                f"the launcher at {self.endpoint} cannot be reached; check the address, the network "
                "between the machines and whether the job still runs"
            )
        self._answered = time.monotonic()
        self.send(hello)
        attend = self._channel.stream_stream(ATTEND, encode, read_launcher_message)
        self._call = attend(iter(self._outbox.get, None), metadata=self._access.metadata)
        self._threads = [ServiceThread(self._hear, "launcher"), ServiceThread(self._ping, "ping")]
        for thread in self._threads:
            thread.start()

    def _is_ready(self, seconds: float) -> bool:
        """Wait up to `seconds` until the connection is established, and return whether it is."""
        try:
            grpc.channel_ready_future(self._channel).result(seconds)
        except grpc.FutureTimeoutError:
            return False
        return True

    def fileno(self) -> int:
        """Return a file descriptor for a selector. It becomes readable when `take` has messages."""
        return self._waker.fileno()

    @property
    def is_full(self) -> bool:
        """True while many messages wait to be sent. The agent should then not read more output from files."""
        return self._outbox.qsize() >= _FULL

    @property
    def lost(self) -> str:
        """Reason why the connection has ended or was given up, or "" while it works."""
        if self._over.is_set():
            return self._why
        silent = time.monotonic() - self._answered > SILENCE_LIMIT
        return f"it has not answered for {SILENCE_LIMIT:g} s" if silent else ""

    def send(self, message: AgentMessage) -> None:
        """Queue a message, to be sent after all earlier messages. Does not wait. Any thread may call it."""
        self._outbox.put(message)

    def take(self) -> Iterator[LauncherMessage]:
        """Yield the launcher's messages that have come since the last call."""
        # Reset the wake-up before the queue is read. A message that comes in between then wakes the
        # selector again; in the other order it could stay unread.
        self._waker.drain()
        for _ in range(self._inbox.qsize()):
            yield self._inbox.get()

    def close(self) -> None:
        """Wait up to a second until queued messages are sent and the call has ended, then disconnect."""
        self._outbox.put(None)
        if self._threads:
            self._threads[0].join(_EVERY)
        self._over.set()
        self._channel.close()
        for thread in self._threads:
            thread.join()
        self._waker.close()

    def _hear(self) -> None:
        why = ""
        try:
            for message in self._call:
                if isinstance(message, Ping):
                    self._answered = message.sent_at  # when it was sent, see Ping
                elif not isinstance(message, Probe):
                    self._inbox.put(message)
                    self._waker.wake()
        except grpc.RpcError as error:
            why = "its connection has ended"
            code = error.code() if isinstance(error, grpc.Call) else None
            if code is grpc.StatusCode.UNAUTHENTICATED:
                why = str(error.details())
            elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                why = (
                    f"the launcher has {MOST_AGENTS:,} agents already, the most that a job can have"
                )
        self._why = why or "the job is over"
        self._over.set()
        self._waker.wake()

    def _ping(self) -> None:
        while not self._over.wait(_EVERY):
            self.send(Ping(time.monotonic()))
