"""Replies to calls: deferred without holding a thread, expired at their deadline, refused and logged.

A sync pull waits for the slowest worker. If each waiting call held a thread of gRPC's pool, then as soon as
all threads wait, the pool could not receive the call that they wait for. So a call becomes a `DeferredReply`,
its thread returns to the pool, and any thread may complete the reply later. If no thread does in time, the
thread of `Deadlines` expires it.

Two functions make a gRPC handler of a method:

- `parkable`: the reply may come later, from any thread (registrations, collectives, snapshots);
- `immediate`: the method returns its reply as bytes.

Pushes and pulls do not come over gRPC; endpoints.py makes their replies.

gRPC's threaded server defers replies through `experimental_non_blocking` handlers, which exist for streaming
replies only. A client that calls such a handler as an ordinary unary method sees an ordinary unary call. A
test checks both.
"""

import contextlib
import functools
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import grpc

from psfleet.core.base.errors import (
    Fenced,
    FrameError,
    LaneLost,
    Later,
    NotReady,
    ProtocolError,
    PsfleetError,
    internal_error,
)
from psfleet.core.base.logs import RateLimitedLog, log_of
from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.recent_events import RecentEvents
from psfleet.core.net.connections import error_statuses
from psfleet.core.net.connections.connection_limits import GRACE
from psfleet.core.net.protobuf_fields import next_field
from psfleet.core.net.v1.frame_pb2 import OUTCOME_UNSPECIFIED, Outcome
from psfleet_server.rpc.call_layout import PullResponse

_log = log_of(__name__)

# Errors that dead processes, restarts and snapshots cause. The worker registers or sends the call again. Any
# other ProtocolError is usually a defect.
_EXPECTED = (Fenced, LaneLost, Later, NotReady)
# Two logs, because each drops lines that come too fast: a replaced process that keeps calling must not hide
# an error.
_fences, _errors = RateLimitedLog(_log), RateLimitedLog(_log)


_MOST_FIELDS = 100_000
"""Maximum number of fields in a request.

A field takes 2 bytes or more on the wire, and many times that once parsed. A push or pull has a few fields
for each table, and a server has 10,000 tables at most by default.
"""
# Duration in ns above which a call is logged as slow, unless it was deferred to wait for another worker. An
# estimate of what an operator wants to know, and not measured.
SLOW = 1_000_000_000
# Seconds after which a call without a deadline is expired: a day. gRPC gives such a call an infinite time,
# for which `Condition.wait` raises OverflowError.
LONGEST = 86_400.0


def explain(error: Exception, recent: RecentEvents) -> None:
    """Add the last events of a state machine, as a note, to an unexpected error that it has raised."""
    # Only once: an error may refuse several calls, or pass a second state machine on its way out.
    if _is_unexpected(error) and not getattr(error, "__notes__", ()):
        error.add_note("\n  ".join(["last events, the newest last:", *recent.lines()]))


def explain_refusals(outcomes: Iterable[object], recent: RecentEvents) -> None:
    """Add the last events of the coordinator to the unexpected errors among the outcomes of its step."""
    for outcome in outcomes:
        if isinstance(outcome, SendError):
            explain(outcome.error, recent)


@contextlib.contextmanager
def explained(recent: RecentEvents) -> Iterator[None]:
    """Add the last events of a state machine to an unexpected error raised inside the `with` block."""
    try:
        yield
    except Exception as error:
        explain(error, recent)
        raise


def log_refusal(error: PsfleetError) -> None:
    """Log the error of a refused call, if the call came from a replaced process or the error is unexpected.

    Other errors are part of ordinary operation, and only the caller sees them.
    """
    if isinstance(error, Fenced):
        _fences.say(f"fenced: {error}")
    elif _is_unexpected(error):
        line = f"refused a call: {type(error).__name__}: {error}"
        _errors.say("\n".join([line, *getattr(error, "__notes__", ())]))


def _is_unexpected(error: Exception) -> bool:
    is_protocol = isinstance(error, ProtocolError) and not isinstance(error, _EXPECTED)
    return is_protocol or not isinstance(error, PsfleetError)


def parsed(kind: Any, request: bytes) -> Any:
    """Parse a request as a message of class `kind`.

    Raises:
        FrameError: The request is not a message of that class, or has too many fields.
    """
    # A field takes at least 2 bytes, so only a longer request can have too many.
    if len(request) > 2 * _MOST_FIELDS:
        _check_fields(kind, request)
    try:
        return kind.FromString(request)
    except Exception:
        raise FrameError(f"a request of {len(request)} bytes is no {kind.__name__}") from None


def _check_fields(kind: Any, request: bytes) -> None:
    # Count before protobuf parses: a message of millions of tiny fields would take gigabytes.
    at = fields = 0
    while at < len(request):
        at = next_field(request, at)[3]
        fields += 1
        if fields > _MOST_FIELDS:
            raise FrameError(
                f"a request of {len(request)} bytes has more fields than a {kind.__name__} may have, "
                f"which is {_MOST_FIELDS}; send fewer names or numbers"
            )


def encoded(message: Any) -> bytes:
    """Serialize a reply to bytes."""
    whole: bytes = message.SerializeToString()
    return whole


class CallContext(Protocol):
    """Interface of a call: the methods that a reply needs.

    A grpc.ServicerContext has these methods, and so does an IncomingCall of psfleet.core.net.http2.
    """

    def time_remaining(self) -> float: ...
    def add_callback(self, callback: Callable[[], None], /) -> bool: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None: ...


class DeferredReply:
    """Open reply of one call. Any thread may complete it or let it fail. Only the first thread has an effect.

    Args:
        context: The call, which gives its deadline and its end, and takes its error code.
        end: Sends the message and ends the call. Called with None, it ends the call without a message, after
            an error.
        latency: Histogram that gets the time from the call to its reply.

    Attributes:
        done: True once the call has its reply.
        is_deferred: True once the method has returned without a reply, because it waits for something else.
        response: Response laid out in shared memory, or None if its values go into the message.
        outcome: Outcome of the push that came with the pull, for the response.
        waited: Second histogram that gets the time to the reply, or None. It is set when the call has to wait
            for other workers.
    """

    def __init__(
        self, context: CallContext, end: Callable[[bytes | None], None], latency: LatencyHistogram
    ) -> None:
        self._context = context
        self._end = end
        self._latency = latency
        self._began = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._deadlines: Deadlines | None = None
        self.done = self.is_deferred = False
        self.response: PullResponse | None = None
        self.outcome: Outcome = OUTCOME_UNSPECIFIED
        self.waited: LatencyHistogram | None = None

    def complete(self, message: bytes) -> None:
        """End the call with this message, unless it has ended."""
        if self._finish():
            self._end(message)

    def fail(self, error: PsfleetError) -> None:
        """End the call with an error, unless it has ended."""
        if self._finish():
            log_refusal(error)
            error_statuses.failure(self._context, error)
            self._end(None)

    def measure(self, latency: LatencyHistogram) -> None:
        """Add the time since the call arrived to a histogram of ns by powers of two."""
        duration = time.perf_counter_ns() - self._began
        latency.counts[duration.bit_length()] += 1
        latency.total += duration

    def park(
        self, deadlines: "Deadlines", expire: Callable[[], None], most: float = LONGEST
    ) -> None:
        """Defer the reply, and call `expire` if it is not complete in time.

        `expire` is called after `most` seconds, at the call's deadline or when the client is gone, whichever
        comes first. It runs in the thread of `deadlines`. It may wait for a standby, so it must not run in a
        thread of gRPC or HTTP/2, which may be the thread that receives the standby's messages.
        """
        # The order matters, because another thread may complete the reply at any time. Its `_finish` sets
        # `done`, and then calls `forget` if it sees `_deadlines`. So `_deadlines` is set first, and `done` is
        # read last: the thread that comes second forgets the reply.
        self._deadlines = deadlines
        # The client gives up at its deadline, GRACE after the time that it wants to wait. Expire in the
        # middle of GRACE, so that the wait is long enough and the server's error still reaches the client.
        remaining = min(self._context.time_remaining(), LONGEST) - GRACE / 2
        deadlines.watch(self, time.monotonic() + max(min(remaining, most), 0), expire)
        # False means that the call has ended and the callback will not run.
        if not self._context.add_callback(lambda: deadlines.hasten(self)):
            deadlines.hasten(self)
        if self.done:
            deadlines.forget(self)

    def _finish(self) -> bool:
        with self._lock:
            first, self.done = not self.done, True
        if first:
            duration = time.perf_counter_ns() - self._began
            for latency in (self._latency, self.waited):
                if latency is not None:
                    latency.counts[duration.bit_length()] += 1
                    latency.total += duration
            if self._deadlines is not None:
                self._deadlines.forget(self)
            elif not self.is_deferred:  # so the time is the server's own
                log_if_slow(self._latency.name, duration)
        return first


class Deadlines:
    """Thread that expires waiting calls, each at its own time.

    Attributes:
        live: Waiting calls by number, each with the function that expires it.
    """

    # A heap of (time, number) gives the next call to expire. A completed call leaves `live` at once, but its
    # heap entry stays until it comes to the top, because a heap cannot remove from its middle. Numbers break
    # ties of time and never repeat, so an entry that stayed behind cannot name a later call.

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int]] = []
        self.live: dict[int, tuple[DeferredReply, Callable[[], None]]] = {}
        self._of: dict[DeferredReply, int] = {}
        self._closed = False
        self._thread = ServiceThread(self._run, "deadlines")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Calls that still wait are not expired.

        The server stops it after its connections, so that no reply could be sent.
        """
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def watch(self, reply: DeferredReply, at: float, expire: Callable[[], None]) -> None:
        """Call `expire` at time `at` (of time.monotonic), unless the reply is forgotten before."""
        with self._condition:
            number = next(self._numbers)
            self.live[number] = (reply, expire)
            self._of[reply] = number
            heapq.heappush(self._heap, (at, number))
            if self._heap[0][1] == number:  # the thread sleeps until a later time
                self._condition.notify()

    def hasten(self, reply: DeferredReply) -> None:
        """Expire the reply now if it still waits, because its client is gone."""
        with self._condition:
            number = self._of.get(reply)
            if number is not None:
                heapq.heappush(self._heap, (-math.inf, number))
                self._condition.notify()

    def forget(self, reply: DeferredReply) -> None:
        """Stop watching a reply that is complete. Does nothing if the reply is not watched."""
        with self._condition:
            self.live.pop(self._of.pop(reply, -1), None)

    def _run(self) -> None:
        # Outside the condition: `expire` may wait for a lock or for a standby, and meanwhile other threads
        # must be able to watch and forget calls.
        while (expire := self._next()) is not None:
            expire()

    def _next(self) -> Callable[[], None] | None:
        """Wait until a call expires and return its `expire`, or None once the thread must stop."""
        with self._condition:
            while not self._closed:
                while self._heap and self._heap[0][1] not in self.live:
                    heapq.heappop(self._heap)  # answered before its time
                if not self._heap:
                    self._condition.wait()
                elif (seconds := self._heap[0][0] - time.monotonic()) > 0:
                    self._condition.wait(seconds)
                else:
                    reply, expire = self.live.pop(heapq.heappop(self._heap)[1])
                    self._of.pop(reply, None)
                    return expire
            return None


def perform(
    behavior: Callable[[bytes, DeferredReply], None], request: bytes, reply: DeferredReply
) -> None:
    """Call a method. If it raises an exception, the reply fails with it."""
    try:
        behavior(request, reply)
    except Exception as error:
        reply.fail(as_psfleet_error(error))


def parkable(
    behavior: Callable[[bytes, DeferredReply], None], latency: LatencyHistogram | None = None
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Make a gRPC handler for a method that completes its reply now or later, from any thread.

    Args:
        behavior: Takes the request and the reply.
        latency: Histogram that gets the time from each call to its reply.
    """
    histogram = latency or LatencyHistogram(name=behavior.__name__)

    def handle(
        request: bytes,
        context: grpc.ServicerContext,
        send_response_callback: Callable[[bytes | None], None],
    ) -> None:
        end = functools.partial(_end, send_response_callback)
        reply = DeferredReply(context, end, histogram)
        perform(behavior, request, reply)
        reply.is_deferred = True

    handle.experimental_non_blocking = True  # type: ignore[attr-defined]
    return grpc.unary_stream_rpc_method_handler(handle)


def _end(send: Callable[[bytes | None], None], message: bytes | None) -> None:
    """End a gRPC call: send the message, if there is one, then the end of the stream."""
    if message is not None:
        send(message)
    send(None)


def immediate(
    behavior: Callable[[bytes], bytes], latency: LatencyHistogram | None = None
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Make a gRPC handler for a method that returns the reply's bytes."""
    histogram = latency or LatencyHistogram(name=behavior.__name__)

    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        began = time.perf_counter_ns()
        try:
            return behavior(request)
        except Exception as error:
            refusal = as_psfleet_error(error)
            log_refusal(refusal)
            error_statuses.failure(context, refusal)
            return b""  # gRPC wants bytes, which the client ignores with an error
        finally:
            duration = time.perf_counter_ns() - began
            histogram.counts[duration.bit_length()] += 1
            histogram.total += duration
            log_if_slow(behavior.__name__, duration)

    return grpc.unary_unary_rpc_method_handler(handle)


def as_psfleet_error(error: Exception) -> PsfleetError:
    """Return the error to send to the client for an exception.

    An exception that is not a PsfleetError is a bug. The log then gets its traceback, and the client only a
    summary.
    """
    if isinstance(error, PsfleetError):
        return error
    _log.error("a call has failed", exc_info=error)
    return internal_error(error)


def log_if_slow(name: str, duration: int) -> None:
    """Log a call that took longer than `SLOW`.

    Args:
        name: Name of the method.
        duration: Duration of the call in ns.
    """
    if duration > SLOW:
        seconds = duration / 1e9
        _log.info(f"the call {name!r} took {seconds:.2f} s", extra={"seconds": round(seconds, 3)})
