"""One server as a worker calls it: in order, with deadlines, and again when an answer is lost.

Each server has a thread of its own that makes blocking calls, which costs less CPU than gRPC's
futures (measured). Calls to one server leave in the order in which they were asked for, so pushes
keep their order, and a call is made again with the same bytes until it is answered: sequence
numbers in the bytes let the server see that it is the same.

A small call to an idle server needs no thread: its caller sends it, and whoever waits for it reads the
answer. If that fails or takes long, or nobody waits, the thread goes on with it.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from psfleet.errors import AccessDenied, NoRoom, PsfleetError, ServerUnavailable, UsageError
from psfleet.platform.service_thread import ServiceThread
from psfleet.wire.access import Access, is_tcp
from psfleet.wire.channel import GRACE, await_connection, open_channel
from psfleet.wire.error_status import error_of
from psfleet.wire.relocating_channel import RelocatingChannel
from psfleet.wire.socket_probe import closes_at_once
from psfleet_worker.connection.call import Call, CallTensors
from psfleet_worker.connection.tensor_calls import TensorCalls
from psfleet_worker.session.retries import NextAttempt, Patience, Retries

__all__ = ["Send", "ServerClient"]

Send = Callable[[str, bytes, float], bytes]
"""Makes one attempt at a call: method, request, seconds; raises the error that it ended with."""


class ServerClient:
    """Calls to one server.

    Args:
        index: Of the server, for messages.
        endpoint: Where it listens.
        patience: How long to wait.
        changed: Notified when a call ends; the same for all servers that are waited for together.
        meddle: For tests: wraps the function that makes one attempt (psfleet.faults.crash_points).
        access: With what this process proves itself over TCP.
        transport: "grpcio" or "http2", see PSFLEET_TRANSPORT.

    Attributes:
        endpoint: Where it listens.
        retries: Attempts beyond the first of each call, for displays.
        make_call: Makes what a caller waits for.
    """

    make_call: type[Call] = Call

    def __init__(
        self,
        index: int,
        endpoint: str,
        patience: Patience,
        changed: threading.Condition,
        meddle: Callable[[int, Send], Send] | None = None,
        access: Access | None = None,
        transport: str = "grpcio",
    ) -> None:
        self.name = f"server {index} at {endpoint}"
        self.patience = patience
        self._changed = changed
        self.endpoint = endpoint
        self._access = access or Access()
        self._carries_tensors = transport == "http2"
        self._channel = open_channel(endpoint, self._access)
        self._methods: dict[str, Any] = {}
        channel: object = self._channel
        self._moving = channel if isinstance(channel, RelocatingChannel) else None
        self._tensors = TensorCalls(self.name, self._location, self._access, self._ask)
        if self._moving:
            self._moving.on_move = self._tensors.interrupt
        self._send: Send = meddle(index, self.attempt) if meddle else self.attempt
        self._threadless = self._carries_tensors and meddle is None
        self._unread: Call | None = None  # left without the thread, which has not heard of it
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self.retries = 0
        self._open = 0  # calls that have not ended
        self._closing = threading.Event()
        self._thread = ServiceThread(self._run, f"server {index}")
        self._thread.start()

    def start(
        self,
        method: str,
        request: bytes,
        *,
        seconds: float | None = None,
        outage: float | None = None,
        cargo: CallTensors | None = None,
        small: bool = False,
    ) -> Call:
        """Ask for a call; it is made after all those asked for before.

        Args:
            method: "Service/Method".
            request: The message.
            seconds: How long the server may take; None: `patience.answer`.
            outage: How long it may be out of reach; None: `patience.outage`.
            cargo: What the request names rather than holds.
            small: Request and answer are a few kilobytes, and somebody is about to wait for the answer.

        Raises:
            UsageError: This process is a fork of the one that has connected.
        """
        self.check_process()
        call = self.make_call(
            self,
            method,
            request,
            self.patience.answer if seconds is None else seconds,
            self.patience.outage if outage is None else outage,
            self._changed,
            cargo,
        )
        with self._changed:
            if self._closing.is_set():
                call.end(error=ServerUnavailable(f"the connection to {self.name} is closed"))
                return call
            threadless = small and self._threadless and not self._open and self._tensors.is_ready
            self._open += 1
            if threadless:
                self._unread, call.held = call, True
            else:
                self.take_unread()
                self._queue.put(call)
        if threadless:
            self._begin(call)
        return call

    def _begin(self, call: Call) -> None:
        """Send a call in the thread of its caller."""
        try:
            sent = self._tensors.begin(call.method, call.request, call.seconds)
        except Exception as error:
            call.release(failure=error)
        else:
            call.release(sent)

    def take_unread(self) -> None:
        """Let the thread go on with a call that left without it, once nobody holds that."""
        with self._changed:
            if self._unread is not None:
                self._queue.put(self._unread)
                self._unread = None

    def resume(self, call: Call) -> None:
        """See CallOwner. What is not the unread call is in the queue, or the thread waits for it."""
        if self._unread is call:
            self.take_unread()

    def check_process(self) -> None:
        """Refuse to work in a fork of the process that has connected: no thread of it is there."""
        if os.getpid() != self._process:
            raise UsageError(
                f"process {os.getpid()} was forked from worker process {self._process}, whose "
                "connections it cannot use; pull and push in the worker's own process"
            )

    @property
    def transport(self) -> str:
        """What carries tensors now: "http2" or "grpcio"."""
        return "http2" if self._tensors.is_connected else "grpcio"

    def is_idle(self) -> bool:
        """Whether every call that was asked for has ended."""
        return self._open == 0

    def close(self) -> None:
        """Give up what is under way and let go of thread and connection. Safe to call twice.

        In a fork of the process it does nothing: both are its parent's.
        """
        if os.getpid() != self._process:
            return
        with self._changed:  # no call comes behind the end
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
                self.end(call, self._persist(call))
            except PsfleetError as error:
                self.end(call, error=error)
            except Exception as error:
                failed = PsfleetError(f"{call.method} to {self.name} failed: {error!r}")
                self.end(call, error=failed)

    def _hold(self, call: Call) -> bool:
        """Have the call, once nobody else holds it; False: it has ended meanwhile."""
        with self._changed:
            if call.held:
                call.awaited.append(lambda: True)
                self._changed.wait_for(lambda: call.ended or not call.held)
            call.held = True
            return not call.ended

    def end(
        self, call: Call, answer: bytes | None = None, error: PsfleetError | None = None
    ) -> None:
        """See CallOwner."""
        with self._changed:  # whoever hears of the end finds this client idle
            self._open -= 1
            if self._unread is call:
                self._unread = None
            call.end(answer, error)

    def _persist(self, call: Call) -> bytes:
        """Make the call until it is answered, its time is over or the server is given up."""
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
                return self._send(call.method, call.request, retries.deadline - time.monotonic())
            except PsfleetError as error:
                again = self._after(call, retries, error)

    def _first_attempt(self, call: Call) -> bytes:
        """Make it, or go on with it where another thread has let go of it."""
        if call.failure is not None:
            raise call.failure
        if call.sent is not None:
            return call.sent.finish()
        return self._send(call.method, call.request, call.seconds)

    def _after(self, call: Call, retries: Retries, error: PsfleetError) -> NextAttempt:
        if isinstance(error, ServerUnavailable):
            self._check_access()
        try:
            return retries.after(
                error, time.monotonic(), inline=call.cargo is None, closing=self._closing.is_set()
            )
        except (NoRoom, ServerUnavailable):
            raise type(error)(self._given_up(error, retries.away)) from None

    def _prepare(self, call: Call, again: NextAttempt) -> None:
        """The next attempt's request, and the pause before it."""
        if again.answered:
            call.renew()
        else:
            call.fall_back()
        if again.lost:  # the pause is shorter if the connection comes back meanwhile
            await_connection(self._channel, self._access, again.pause)
        elif again.pause:
            self._closing.wait(again.pause)

    def _given_up(self, error: PsfleetError, seconds: float) -> str:
        if isinstance(error, NoRoom):
            return f"{self.name}, for {seconds:.1f} seconds: {error}"
        said = f"{self.name} has not answered for {seconds:.1f} seconds: {error}"
        if closes_at_once(self._location(), tls=self._speaks_tls):
            return (
                f"{said}; it closes connections at once, perhaps because it has as many as it "
                "takes: raise connections in PSFLEET_LIMITS of the servers"
            )
        return said

    @property
    def _speaks_tls(self) -> bool:
        return is_tcp(self.endpoint) and self._access.credentials is not None

    def _check_access(self) -> None:
        """A server that does not know this process is not asked again."""
        if not is_tcp(self.endpoint):
            return
        from psfleet.wire.tls_diagnosis import why_refused  # loads the cryptography, rarely needed

        why = why_refused(self._location(), self._access)
        if why:
            raise AccessDenied(f"{self.name} and this process do not know each other: {why}")

    def attempt(self, method: str, request: bytes, seconds: float) -> bytes:
        """Make one attempt at a call now, beside those that were asked for before.

        Raises:
            PsfleetError: What it ended with.
        """
        if self._closing.is_set():
            raise ServerUnavailable(f"the connection to {self.name} is closed")
        if self._carries_tensors and self._tensors.carries(method):
            return self._tensors.call(method, request, seconds)
        return self._attempt(method, request, seconds)

    def _location(self) -> str:
        """Where the server listens now, if it may move to another machine."""
        return self._moving.endpoint if self._moving else self.endpoint

    def _ask(self, seconds: float) -> bytes:
        return self._attempt("Shard/Transport", b"", seconds)

    def _attempt(self, method: str, request: bytes, seconds: float) -> bytes:
        stub = self._methods.get(method)
        if stub is None:
            path = f"/psfleet.v1.{method}"
            stub = self._methods[method] = self._channel.unary_unary(path, None, None)
        try:
            answer: bytes = stub(
                request, timeout=max(seconds, 0) + GRACE, metadata=self._access.metadata
            )
        except grpc.RpcError as error:
            raise error_of(error, self.name) from None
        except ValueError as error:  # the channel was closed meanwhile
            raise ServerUnavailable(f"the connection to {self.name} is closed: {error}") from None
        return answer
