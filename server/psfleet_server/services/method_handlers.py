"""The gRPC methods of workers' calls, by name. Each is declared once; its handlers are made of that.

A method whose times metrics are to show takes `times.of(NAME, HELP)`: psfleet_NAME_seconds. Snapshots,
metrics and standbys have their methods beside what these do, snapshots in snapshot_services.py; there
`parkable(led.take, host.latencies.of(NAME, HELP))` does the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc

from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.engine.consistency import NO_MODE
from psfleet.core.net import frame
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import MeasuredMethod
from psfleet_server.rpc.replies import DeferredReply, immediate, parkable, prompt
from psfleet_server.services.coordinator_service import CoordinatorService, MembershipService
from psfleet_server.services.row_services import FollowerService
from psfleet_server.services.shard_service import PlainCalls, ShardService

B = TypeVar("B", bound=Callable[..., Any])


@dataclass(frozen=True)
class PromptMethod:
    """A method that returns its answer.

    Attributes:
        name: Within its service.
        behavior: Takes a request and returns the answer.
        latency: Gets the time from each call to its answer.
        over_http2: It carries tensors of the training, and is answered over psfleet's own HTTP/2 too.
        plainly: There it is asked first; see PlainCalls.
    """

    name: str
    behavior: Callable[[bytes], bytes]
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    over_http2: bool = False
    plainly: Callable[[bytes], bytes | None] | None = None

    @property
    def handler(self) -> "grpc.RpcMethodHandler[Any, Any]":
        """Answers it over gRPC."""
        return immediate(self.behavior, self.latency)

    @property
    def measured_method(self) -> MeasuredMethod:
        """Answers it over HTTP/2."""
        return MeasuredMethod(self.behavior, self.latency, True, self.plainly)


@dataclass(frozen=True)
class WaitingMethod:
    """A method whose answer may have to wait for other workers. See PromptMethod."""

    name: str
    behavior: Callable[[bytes, DeferredReply], None]
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    over_http2: bool = False
    plainly: Callable[[bytes], bytes | None] | None = None

    @property
    def handler(self) -> "grpc.RpcMethodHandler[Any, Any]":
        """Handler of the method over gRPC."""
        return parkable(self.behavior, self.latency)

    @property
    def prompt_handler(self) -> "grpc.RpcMethodHandler[Any, Any]":
        """Answers it over gRPC where it never waits."""
        return prompt(self.behavior, self.latency)

    @property
    def measured_method(self) -> MeasuredMethod:
        """Handler of the method over HTTP/2, with its latency histogram."""
        return MeasuredMethod(self.behavior, self.latency, False, self.plainly)


Method = PromptMethod | WaitingMethod


def _shard_methods(host: ShardHost) -> tuple[Method, ...]:
    """Return the methods of the service Shard. Those that may wait do so in some modes only."""
    shard, times = ShardService(host), host.latencies
    pulls = times.of("pull", "Time to answer a pull, with waiting")
    exchanges = times.of("exchange", "Time to answer a push with the pull behind it")
    plain = PlainCalls(host, shard.layouts, pulls, exchanges)
    traces = host.tracing is not None  # of each push, which a plain call knows nothing of
    push, exchange = (None, None) if traces else (plain.push, plain.exchange)
    return (
        PromptMethod("Push", _traced(host, "Push", shard.push), times.push, True, push),
        WaitingMethod("Pull", shard.pull, pulls, True, plain.pull),
        WaitingMethod(
            "Exchange", _traced(host, "Exchange", shard.exchange), exchanges, True, exchange
        ),
        PromptMethod("Attach", shard.attach),
        PromptMethod("Join", shard.join),
        PromptMethod("Leave", shard.leave),
        PromptMethod("CreateTable", shard.create_table),
        PromptMethod("ReadState", shard.read_state),
        PromptMethod("WriteState", shard.write_state),
        PromptMethod("Load", shard.load),
        PromptMethod("Shrink", shard.shrink),
        PromptMethod("Evictions", shard.evictions),
        PromptMethod("Status", shard.status),
        PromptMethod("Transport", shard.transport),
    )


def _membership_methods(host: ShardHost) -> tuple[Method, ...]:
    members = MembershipService(host)
    return PromptMethod("Freeze", members.freeze), PromptMethod("Install", members.install)


def _follower_methods(host: ShardHost) -> tuple[Method, ...]:
    followers = FollowerService(host)
    return (
        WaitingMethod("ReadChanges", followers.read_changes),
        PromptMethod("ReadRows", followers.read_rows),
    )


def _coordinator_methods(host: ShardHost) -> tuple[Method, ...]:
    coordinator = CoordinatorService(host)
    return (
        WaitingMethod("Register", coordinator.register),
        WaitingMethod("Barrier", coordinator.barrier),
        WaitingMethod("AllReduce", coordinator.all_reduce),
        PromptMethod("Heartbeat", coordinator.take_heartbeat),
        PromptMethod("AssignData", coordinator.assign_data),
        PromptMethod("Scale", coordinator.scale),
    )


def handlers(host: ShardHost) -> Sequence["grpc.GenericRpcHandler[Any, Any]"]:
    """Return the handlers of a server with this host."""
    shard = _shard_methods(host)
    services = [
        _ImmediateHandlers(host, shard),
        _service("Shard", shard),
        _service("Membership", _membership_methods(host)),
        _service("Followers", _follower_methods(host)),
    ]
    if host.coordinator is not None:
        services.append(_service("Coordinator", _coordinator_methods(host)))
    return services


def tensor_methods(host: ShardHost) -> dict[str, MeasuredMethod]:
    """The methods that carry tensors of the training, by path: Push, Pull and Exchange."""
    return {
        _path("Shard", method.name): method.measured_method
        for method in _shard_methods(host)
        if method.over_http2
    }


def _service(name: str, methods: Sequence[Method]) -> "grpc.GenericRpcHandler[Any, Any]":
    by_name = {method.name: method.handler for method in methods}
    return grpc.method_handlers_generic_handler(f"psfleet.v1.{name}", by_name)


def _path(service: str, method: str) -> str:
    return f"/psfleet.v1.{service}/{method}"


def _traced(host: ShardHost, method: str, behavior: B) -> B:
    """Return the behavior, with a span for each push that its worker traces if this server traces.

    The span of an exchange ends when the pull is answered, or waits for other workers.
    """
    tracing = host.tracing
    if tracing is None:
        return behavior

    def traced(request: bytes, *reply: DeferredReply) -> Any:
        header, _ = frame.decode(request)
        if not header.traceparent:
            return behavior(request, *reply)
        attributes: dict[str, str | int] = {
            "psfleet.worker": header.worker,
            "psfleet.push": header.sequence,
            "psfleet.request.bytes": len(request),
        }
        with tracing.serving(f"psfleet.v1.Shard/{method}", header.traceparent, attributes):
            return behavior(request, *reply)

    return cast("B", traced)


class _ImmediateHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Pulls and exchanges in the modes in which they never wait; in others it knows no method.

    The mode of a call is that of its lookup: it changes only while no call is under way.
    """

    def __init__(self, host: ShardHost, methods: Sequence[Method]) -> None:
        self._host = host
        self._methods = {
            _path("Shard", method.name): method.prompt_handler
            for method in methods
            if isinstance(method, WaitingMethod)
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a call, if it is one of these."""
        mode = self._host.shard.consistency.declared
        if mode.pulls_wait or mode.name == NO_MODE.name:
            return None
        return self._methods.get(handler_call_details.method)
