"""Requests and replies of calls: parsed, deferred without a thread, refused and logged.

Deferred, since a sync pull waits for the slowest worker. If each waiting call held a thread of gRPC's pool,
as many waiting workers as threads would lock out the very call that they wait for. So a call becomes a
`DeferredReply`, its thread returns to the pool, and any thread may complete the Reply later.

gRPC's threaded server does this through `experimental_non_blocking` handlers, which exist for streaming
replies only; a client that calls one as an ordinary unary method sees an ordinary unary call. A test pins
both.
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
)
from psfleet.core.base.logs import RateLimitedLog, log_of
from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.recent_events import RecentEvents
from psfleet.core.net.connections import channel
from psfleet.core.net.connections.channel import GRACE
from psfleet.core.net.frame import next_field
from psfleet.core.net.v1.frame_pb2 import OUTCOME_UNSPECIFIED, Outcome
from psfleet_server.rpc.call_layout import PullResponse

_log = log_of(__name__)

_EXPECTED = (Fenced, LaneLost, Later, NotReady)
_fences, _errors = RateLimitedLog(_log), RateLimitedLog(_log)


_MOST_FIELDS = 100_000
"""Most fields of a request. Each takes two bytes on the wire, and many times as many once it is parsed."""
SLOW = 1_000_000_000  # ns from which on a call that waits for nobody is logged
LONGEST = 86_400.0  # seconds; a call without a deadline is expired after a day


def explain(error: Exception, recent: RecentEvents) -> None:
    """Let an unexpected error carry the last events of the state machine that raised it, as a note."""
    if _is_unexpected(error) and not getattr(error, "__notes__", ()):
        error.add_note("\n  ".join(["last events, the newest last:", *recent.lines()]))


def explain_refusals(outcomes: Iterable[object], recent: RecentEvents) -> None:
    """Explain the errors among the outcomes of a step of the coordinator."""
    for outcome in outcomes:
        if isinstance(outcome, SendError):
            explain(outcome.error, recent)


@contextlib.contextmanager
def explained(recent: RecentEvents) -> Iterator[None]:
    """Explain what is raised within."""
    try:
        yield
    except Exception as error:
        explain(error, recent)
        raise


def log_refusal(error: PsfleetError) -> None:
    """Log the error with which a call is refused, if it is a fence or nobody expects it."""
    if isinstance(error, Fenced):
        _fences.say(f"fenced: {error}")
    elif _is_unexpected(error):
        line = f"refused a call: {type(error).__name__}: {error}"
        _errors.say("\n".join([line, *getattr(error, "__notes__", ())]))


def _is_unexpected(error: Exception) -> bool:
    is_protocol = isinstance(error, ProtocolError) and not isinstance(error, _EXPECTED)
    return is_protocol or not isinstance(error, PsfleetError)


def parsed(kind: Any, request: bytes) -> Any:
    """The request as a message of this kind.

    Raises:
        FrameError: It is none, or has too many fields.
    """
    if len(request) > 2 * _MOST_FIELDS:
        _check_fields(kind, request)
    try:
        return kind.FromString(request)
    except Exception:
        raise FrameError(f"a request of {len(request)} bytes is no {kind.__name__}") from None


def _check_fields(kind: Any, request: bytes) -> None:
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
    """The bytes of an answer."""
    whole: bytes = message.SerializeToString()
    return whole


class CallContext(Protocol):
    """Methods of a call that its reply uses: a grpc.ServicerContext, or an IncomingCall of
    psfleet.core.net.http2."""

    def time_remaining(self) -> float: ...
    def add_callback(self, callback: Callable[[], None], /) -> bool: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None: ...


class DeferredReply:
    """The open reply of one call. Any thread may complete it; the first answer counts.

    Attributes:
        done: It has been answered.
        response: Laid out in shared memory, to be filled; None: its values go into the message.
        outcome: Outcome of the push that came with the pull, for the response.
        waited: Gets the time from the call to its answer too; None: only the latency does.
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
        self.done = False
        self.response: PullResponse | None = None
        self.outcome: Outcome = OUTCOME_UNSPECIFIED
        self.waited: LatencyHistogram | None = None

    def complete(self, message: bytes) -> None:
        """End the call with a message."""
        if self._finish():
            self._end(message)

    def fail(self, error: PsfleetError) -> None:
        """End the call with an error."""
        if self._finish():
            log_refusal(error)
            channel.failure(self._context, error)
            self._end(None)

    def measure(self, latency: LatencyHistogram) -> None:
        """Count the time since the call came."""
        duration = time.perf_counter_ns() - self._began
        latency.counts[duration.bit_length()] += 1
        latency.total += duration

    def park(
        self, deadlines: "Deadlines", expire: Callable[[], None], most: float = LONGEST
    ) -> None:
        """Defer the reply; call `expire` after `most` seconds, at its deadline or when its client is gone.

        `expire` may wait for a standby. So it never runs in a thread of gRPC or HTTP/2, which may be the one
        that the standby's messages come by.
        """
        self._deadlines = deadlines
        remaining = min(self._context.time_remaining(), LONGEST) - GRACE / 2
        deadlines.watch(self, time.monotonic() + max(min(remaining, most), 0), expire)
        if not self._context.add_callback(lambda: deadlines.hasten(self)):
            deadlines.hasten(self)
        if self.done:  # answered by another thread meanwhile
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
            elif duration > SLOW:  # it has waited for no other worker
                _log_slow(self._latency.name, duration)
        return first


class _ImmediateReply(DeferredReply):
    """A call that must be answered before its handler returns."""

    def park(
        self, deadlines: "Deadlines", expire: Callable[[], None], most: float = LONGEST
    ) -> None:
        """Expire the call at once: its deadline is now."""
        expire()


class Deadlines:
    """One thread that expires waiting calls.

    Attributes:
        live: The calls that wait, by number.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int]] = []
        self.live: dict[int, tuple[DeferredReply, Callable[[], None]]] = {}
        self._of: dict[DeferredReply, int] = {}
        self._closed = False
        self._thread = ServiceThread(self._run, "deadlines")

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; calls that still wait are not expired."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def watch(self, reply: DeferredReply, at: float, expire: Callable[[], None]) -> None:
        """Call `expire` at `at` (of time.monotonic) unless the reply is forgotten before."""
        with self._condition:
            number = next(self._numbers)
            self.live[number] = (reply, expire)
            self._of[reply] = number
            heapq.heappush(self._heap, (at, number))
            if self._heap[0][1] == number:
                self._condition.notify()

    def hasten(self, reply: DeferredReply) -> None:
        """Expire the reply now if it still waits: its client is gone."""
        with self._condition:
            number = self._of.get(reply)
            if number is not None:
                heapq.heappush(self._heap, (-math.inf, number))
                self._condition.notify()

    def forget(self, reply: DeferredReply) -> None:
        """The reply is answered."""
        with self._condition:
            self.live.pop(self._of.pop(reply, -1), None)

    def _run(self) -> None:
        while (expire := self._next()) is not None:
            expire()

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next call that expires; None when stopped."""
        with self._condition:
            while not self._closed:
                while self._heap and self._heap[0][1] not in self.live:
                    heapq.heappop(self._heap)  # answered long ago
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
    """Let the behavior take the request; what it raises is the answer."""
    try:
        behavior(request, reply)
    except Exception as error:
        reply.fail(as_psfleet_error(error))


def parkable(
    behavior: Callable[[bytes, DeferredReply], None], latency: LatencyHistogram | None = None
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler whose behavior answers its Reply now or later, from any thread.

    `latency`: Gets the time from each call to its answer.
    """
    histogram = latency or LatencyHistogram()

    def handle(
        request: bytes,
        context: grpc.ServicerContext,
        send_response_callback: Callable[[bytes | None], None],
    ) -> None:
        end = functools.partial(_end, send_response_callback)
        perform(behavior, request, DeferredReply(context, end, histogram))

    handle.experimental_non_blocking = True  # type: ignore[attr-defined]
    return grpc.unary_stream_rpc_method_handler(handle)


def _end(send: Callable[[bytes | None], None], message: bytes | None) -> None:
    """End a call of gRPC with its message, if it has one."""
    if message is not None:
        send(message)
    send(None)


def prompt(
    behavior: Callable[[bytes, DeferredReply], None], latency: LatencyHistogram | None = None
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Like `parkable`, for calls that never wait: one that would wait is refused at once.

    A streaming reply leaves in two batches, the message and the end of the call, and the thread
    waits for the first to be sent; this one is sent whole. It saves a tenth of a millisecond of CPU.
    """
    histogram = latency or LatencyHistogram()

    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        messages: list[bytes | None] = []
        perform(behavior, request, _ImmediateReply(context, messages.append, histogram))
        return messages[0] or b""

    return grpc.unary_unary_rpc_method_handler(handle)


def immediate(
    behavior: Callable[[bytes], bytes], latency: LatencyHistogram | None = None
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler whose behavior returns its answer."""
    histogram = latency or LatencyHistogram()

    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        began = time.perf_counter_ns()
        try:
            return behavior(request)
        except Exception as error:
            refusal = as_psfleet_error(error)
            log_refusal(refusal)
            channel.failure(context, refusal)
            return b""
        finally:
            duration = time.perf_counter_ns() - began
            histogram.counts[duration.bit_length()] += 1
            histogram.total += duration
            if duration > SLOW:
                _log_slow(behavior.__name__, duration)

    return grpc.unary_unary_rpc_method_handler(handle)


def as_psfleet_error(error: Exception) -> PsfleetError:
    """The error to answer with. What is not psfleet's own is a bug: it goes to the log, whole."""
    if isinstance(error, PsfleetError):
        return error
    _log.error("a call has failed", exc_info=error)
    words: Any = " ".join(str(error).split())
    return PsfleetError(f"the server failed: {type(error).__name__}: {words}; see its log")


def _log_slow(name: str, duration: int) -> None:
    seconds = duration / 1e9
    _log.info(f"the call {name!r} took {seconds:.2f} s", extra={"seconds": round(seconds, 3)})
