"""Calls from a worker to one server: in order, with deadlines, and repeated when a reply is lost.

Each client has a thread that makes blocking calls, which costs less CPU than gRPC's futures (measured). Calls
are sent in the order in which they were requested, so pushes keep their order. A failed call is repeated
until it succeeds or is given up (`psfleet_worker.session.retry_policy`). That is safe, because the message
contains a sequence number, so the server recognizes a push that it has already applied.

A small call to an idle server bypasses the thread, because the handover would cost more than the call: the
caller sends it, and the thread that waits for the reply reads it (connection/call.py has a picture). If that
fails or takes long, or if no thread waits, the client's thread continues the call.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from psfleet.core.base.crash_points import Send
from psfleet.core.base.errors import (
    AccessDenied,
    NoRoom,
    PsfleetError,
    ServerUnavailable,
    UsageError,
)
from psfleet.core.base.forks import check_process
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.connections.access import Access, is_tcp
from psfleet.core.net.connections.channel import await_connection, open_channel
from psfleet.core.net.connections.connection_limits import GRACE
from psfleet.core.net.connections.error_statuses import error_of
from psfleet.core.net.connections.relocations import RelocatingChannel
from psfleet.core.net.connections.tls_sockets import closes_at_once, is_silent
from psfleet.core.net.membership_messages import read_mode
from psfleet.core.net.worker_requests import write_withdrawal
from psfleet_worker.connection.call import Call
from psfleet_worker.connection.tensor_calls import PATHS, TensorCalls
from psfleet_worker.session.retry_policy import NextAttempt, Patience, Retries

_FIGURES = (
    *("server", "pid", "leading_steps", "pushes", "repeats", "round", "workers"),
    *("bytes_in", "bytes_out", "cpu_seconds", "resident_bytes"),
)
_TABLE_FIGURES = ("name", "kind", "count", "bytes", "device_bytes", "step")


_PUSHES = ("Shard/Push", "Shard/Exchange")


def figures_of(status: Any) -> dict[str, Any]:
    """Convert a StatusReply to the dict that Runtime.stats returns for a server."""
    return {name: getattr(status, name) for name in _FIGURES} | {
        "mode": read_mode(status.mode) if status.mode else None,
        "staleness": dict(status.staleness),
        "samples": sum(status.samples.values()),
        "losses": dict(status.losses),
        "torn": [
            {"worker": step.worker, "incarnation": step.incarnation, "last": dict(step.sequences)}
            for step in status.torn
        ],
        "tables": [
            {name: getattr(table, name) for name in _TABLE_FIGURES} for table in status.tables
        ],
    }


class ServerClient:
    """Calls to one server.

    Args:
        index: Number of the server.
        endpoint: Endpoint of the server.
        patience: Time limits of calls.
        changed: Condition that is notified when a call ends. Clients whose calls are awaited together share
            it. It also guards `unread`, `open_calls` and the state of calls.
        inject_faults: Wraps the function that makes one attempt, for tests and under `--chaos`. Every call
            then goes through the thread.
        access: Credentials of this process.

    Attributes:
        retries: Number of repeated attempts of all calls, for displays.
        open_calls: Number of calls that have not ended.
        unread: Call that its caller has sent and that the client's thread does not know of, or None.
    """

    def __init__(
        self,
        index: int,
        endpoint: str,
        patience: Patience,
        changed: threading.Condition,
        inject_faults: Callable[[int, Send], Send] | None = None,
        access: Access | None = None,
    ) -> None:
        self.name = f"server {index} at {endpoint}"
        self.patience = patience
        self.changed = changed
        self.endpoint = endpoint
        self._access = access or Access()
        self._channel = open_channel(endpoint, self._access)
        self._methods: dict[str, Any] = {}
        channel: object = self._channel
        self._moving = channel if isinstance(channel, RelocatingChannel) else None
        self._tensors = TensorCalls(self.name, self._location, self._access)
        if self._moving:
            self._moving.on_move = self._tensors.follow
            self._tensors.follow()  # the server may have moved before `on_move` was set
        self._send: Send = inject_faults(index, self.attempt) if inject_faults else self.attempt
        self._threadless = inject_faults is None
        self.unread: Call | None = None
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self.retries = 0
        self.open_calls = 0
        self._closing = threading.Event()
        self._thread = ServiceThread(self._run, f"server {index}")
        self._thread.start()

    def start(
        self,
        method: str,
        message: bytes,
        *,
        seconds: float | None = None,
        outage: float | None = None,
        small: bool = False,
    ) -> Call:
        """Request a call, which is made after all earlier calls. Returns without waiting for the reply.

        Args:
            method: Service and name of the method, such as "Shard/Status".
            message: Bytes of the request.
            seconds: Seconds for the server to reply, or None for `patience.reply`.
            outage: Seconds for which the server may be unreachable, or None for `patience.outage`.
            small: True if message and reply are a few kilobytes and a thread is about to wait for the reply.

        Raises:
            UsageError: This process is a fork of the process that has connected.
        """
        self.check_process()
        call = Call()
        call.message, call.is_small = message, small
        return self.send(call, method, seconds, outage)

    def send(
        self,
        call: Call,
        method: str,
        seconds: float | None = None,
        outage: float | None = None,
        *,
        ahead: bool = False,
    ) -> Call:
        """Request a call that exists already, as `start` does. The caller has called `check_process` before.

        Args:
            call: The call.
            method: Service and name of the method, such as "Shard/Push".
            seconds: Seconds for the server to reply, or None for `patience.reply`.
            outage: Seconds for which the server may be unreachable, or None for `patience.outage`.
            ahead: True if no thread is about to wait for the reply. The client's thread then reads it.
        """
        call.client, call.method = self, method
        call.seconds = self.patience.reply if seconds is None else seconds
        call.outage = self.patience.outage if outage is None else outage
        call.message = call.encode()
        with self.changed:
            self.open_calls += 1
            if self._closing.is_set():
                call.end(error=ServerUnavailable(f"the connection to {self.name} is closed"))
                return call
            client = self._tensors.client
            # Only if no other call is open. Otherwise the thread could be about to send an earlier call, and
            # this call would overtake it.
            is_alone = self._threadless and not ahead and self.open_calls == 1
            # And only over a connection that exists, because making one could block the caller.
            leaves_here = is_alone and call.is_small and client.idle != []
            if leaves_here:
                self.unread, call.is_busy = call, True
            else:
                # The unread call comes first in the queue, so that the order of calls is kept.
                self.take_unread()
                self._queue.put(call)
        if leaves_here:
            try:
                connection = client.begin(PATHS[method], call.message, max(call.seconds, 0) + GRACE)
            except Exception as error:
                call.release(failure=self._tensors.failed(client, error, call.seconds))
            else:
                call.release(connection)
        return call

    def take_unread(self) -> None:
        """Queue the call that its caller has sent, so that the client's thread continues it."""
        with self.changed:
            if self.unread is not None:
                self._queue.put(self.unread)
                self.unread = None

    def resume(self, call: Call) -> None:
        """Let the client's thread continue a call that another thread has given up.

        Only `unread` needs that. Any other call is in the queue already, or the thread waits for it.
        """
        if self.unread is call:
            self.take_unread()

    def check_process(self) -> None:
        """Raise UsageError in a fork of the connected process, because a fork has none of its threads."""
        check_process(self._process)

    def close(self) -> None:
        """Give up running calls, close the connection and stop the thread. Safe to call twice.

        Does nothing in a fork of the process, because connection and thread belong to the parent.
        """
        if os.getpid() != self._process:
            return
        # Under the lock, so that no call is queued after the None that ends the thread.
        with self.changed:
            self._closing.set()
            self.take_unread()
            self._queue.put(None)
        self._channel.close()
        self._tensors.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            if not self._hold(call):
                continue
            try:
                call.end(self._outcome(call))
            except PsfleetError as error:
                call.end(error=error)
            except Exception as error:
                call.end(error=PsfleetError(f"{call.method} to {self.name} failed: {error!r}"))

    def _hold(self, call: Call) -> bool:
        """Set `is_busy` for this thread, after any other thread has stopped working on the call.

        Returns:
            False if the call has ended meanwhile.
        """
        with self.changed:
            if call.is_busy:
                # `release` and `end` notify only if a thread is known to wait.
                call.awaited += (lambda: True,)
                self.changed.wait_for(lambda: call.ended or not call.is_busy)
            call.is_busy = True
            return not call.ended

    def _outcome(self, call: Call) -> bytes:
        """Make the call and return its reply.

        A refused push is withdrawn before the error is raised. Otherwise the server would wait for its
        sequence number and refuse the pushes after it.
        """
        try:
            return self._persist(call)
        except UsageError:
            if call.method in _PUSHES:
                withdrawal = Call()
                withdrawal.client, withdrawal.method = self, "Shard/Push"
                withdrawal.message = write_withdrawal(call.message)
                withdrawal.seconds, withdrawal.outage = call.seconds, call.outage
                self._persist(withdrawal)
            raise

    def _persist(self, call: Call) -> bytes:
        """Repeat the call until it succeeds, its time is over or the server is given up."""
        began = time.monotonic()
        try:
            return self._first_attempt(call)
        except PsfleetError as error:
            retries = Retries(call.seconds, call.outage, self.patience, began)
            again = self._after(call, retries, error)
        while True:
            self.retries += 1
            self._prepare(call, again)
            try:
                return self._send(call.method, call.message, retries.deadline - time.monotonic())
            except PsfleetError as error:
                again = self._after(call, retries, error)

    def _first_attempt(self, call: Call) -> bytes:
        """Make the first attempt, or continue an attempt that another thread has begun and given up."""
        if call.failure is not None:
            raise call.failure
        if call.sent is not None:
            return call.sent.finish()
        return self._send(call.method, call.message, call.seconds)

    def _after(self, call: Call, retries: Retries, error: PsfleetError) -> NextAttempt:
        """Decide on the next attempt after a failed one, or raise the error if the call is given up."""
        closing, silent = self._closing.is_set(), False
        if isinstance(error, ServerUnavailable):
            self._check_access()
            silent = not closing and is_silent(self._address, tls=self._has_tls)
        now = time.monotonic()
        try:
            return retries.after(error, now, inline=call.is_inline, closing=closing, silent=silent)
        except (NoRoom, ServerUnavailable):
            raise type(error)(self._given_up(error, retries.away)) from None

    def _prepare(self, call: Call, again: NextAttempt) -> None:
        """Encode the message of the next attempt, and pause before it."""
        if not again.answered:
            call.fall_back()
        call.message = call.encode()
        if again.lost:  # the pause is shorter if the connection comes back meanwhile
            await_connection(self._channel, self._access, again.pause)
        elif again.pause:
            self._closing.wait(again.pause)

    def _given_up(self, error: PsfleetError, seconds: float) -> str:
        if isinstance(error, NoRoom):
            return f"{self.name}, for {seconds:.1f} seconds: {error}"
        sentence = f"{self.name} has not answered for {seconds:.1f} seconds: {error}"
        addresses = addresses_of(self._location())
        if any(closes_at_once(address, tls=self._has_tls) for address in addresses):
            return (
                f"{sentence}; it closes connections at once, perhaps because it has as many as it "
                "takes: raise connections in PSFLEET_LIMITS of the servers"
            )
        return sentence

    @property
    def _has_tls(self) -> bool:
        return is_tcp(self.endpoint) and self._access.credentials is not None

    def _check_access(self) -> None:
        """Raise AccessDenied if the TLS handshake between the server and this process fails.

        Retries are then useless.
        """
        if not is_tcp(self.endpoint):
            return
        from psfleet.core.net.connections.tls_sockets import why_refused

        if why := why_refused(self._address, self._access):
            raise AccessDenied(f"{self.name} and this process do not know each other: {why}")

    def attempt(self, method: str, request: bytes, seconds: float) -> bytes:
        """Make one attempt at a call in this thread, without waiting for the calls in the queue.

        Raises:
            PsfleetError: The attempt failed.
        """
        if self._closing.is_set():
            raise ServerUnavailable(f"the connection to {self.name} is closed")
        if method in PATHS:
            return self._tensors.call(method, request, seconds)
        stub = self._methods.get(method)
        if stub is None:
            path = f"/psfleet.v1.{method}"
            stub = self._methods[method] = self._channel.unary_unary(path, None, None)
        timeout = max(seconds, 0) + GRACE
        try:
            reply: bytes = stub(request, timeout=timeout, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise error_of(error, self.name, f"{method} within {timeout:.1f} s") from None
        except ValueError as error:  # the channel was closed meanwhile
            raise ServerUnavailable(f"the connection to {self.name} is closed: {error}") from None
        return reply

    def _location(self) -> str:
        """Return the server's present endpoint. A takeover may have moved the server to another machine."""
        return self._moving.endpoint if self._moving else self.endpoint

    @property
    def _address(self) -> str:
        """Address of the server's gRPC, which also reports why it refuses a connection."""
        return addresses_of(self._location()).control
