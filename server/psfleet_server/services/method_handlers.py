"""Lists the methods that a server offers to workers, readers and other servers, by name.

Methods that carry values of tables are served by psfleet's own HTTP/2 (`tensor_methods`), all others by gRPC
(`handlers`). No method is in both. Snapshots, metrics, standbys and moves of rows
register their handlers in other modules; `psfleet_server.process` adds them.

`parkable` wraps a method whose call may wait without holding a thread. To show the durations of a method in
the metrics, give it a histogram: `parkable(service.take, host.latencies.of(NAME, HELP))` makes the metric
psfleet_NAME_seconds.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import grpc

from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.net import frame
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import MeasuredMethod
from psfleet_server.rpc.replies import DeferredReply, immediate, parkable
from psfleet_server.services.coordinator_service import CoordinatorService, MembershipService
from psfleet_server.services.follower_service import FollowerService
from psfleet_server.services.shard_service import PlainCalls, ShardService

B = TypeVar("B", bound=Callable[..., Any])


def handlers(host: ShardHost) -> Sequence["grpc.GenericRpcHandler[Any, Any]"]:
    """Return the gRPC handlers of Shard, Membership and Followers, and on server 0 of Coordinator."""
    shard, members, followers = ShardService(host), MembershipService(host), FollowerService(host)
    services = [
        _service(
            "Shard",
            {
                "Attach": immediate(shard.attach),
                "Join": immediate(shard.join),
                "Leave": immediate(shard.leave),
                "CreateTable": immediate(shard.create_table),
                "Load": immediate(shard.load),
                "Shrink": immediate(shard.shrink),
                "Evictions": immediate(shard.evictions),
                "Status": immediate(shard.status),
            },
        ),
        _service(
            "Membership",
            {"Freeze": immediate(members.freeze), "Install": immediate(members.install)},
        ),
        _service(
            "Followers",
            {
                "ReadChanges": parkable(followers.read_changes),
                "ReadRows": immediate(followers.read_rows),
            },
        ),
    ]
    if host.coordinator is not None:
        coordinator = CoordinatorService(host)
        services.append(
            _service(
                "Coordinator",
                {
                    "Register": parkable(coordinator.register),
                    "Barrier": parkable(coordinator.barrier),
                    "AllReduce": parkable(coordinator.all_reduce),
                    "Heartbeat": immediate(coordinator.take_heartbeat),
                    "AssignData": immediate(coordinator.assign_data),
                    "Scale": immediate(coordinator.scale),
                },
            )
        )
    return services


def tensor_methods(host: ShardHost) -> dict[str, MeasuredMethod]:
    """Return the methods that carry values of tables, by their path in psfleet's own HTTP/2."""
    shard, times = ShardService(host), host.latencies
    pulls = times.of("pull", "Time to answer a pull, with waiting")
    exchanges = times.of("exchange", "Time to answer a push with the pull behind it")
    plain = PlainCalls(host, pulls, exchanges)
    traces = (
        host.tracing is not None
    )  # plain calls make no spans, so with tracing pushes take the other way
    push, exchange = (None, None) if traces else (plain.push, plain.exchange)
    methods = {
        "Push": MeasuredMethod(_traced(host, "Push", shard.push), times.push, True, push),
        "Pull": MeasuredMethod(shard.pull, pulls, False, plain.pull),
        "Exchange": MeasuredMethod(
            _traced(host, "Exchange", shard.exchange), exchanges, False, exchange
        ),
        "ReadState": MeasuredMethod(shard.read_state, LatencyHistogram(name="read_state"), True),
        "WriteState": MeasuredMethod(shard.write_state, LatencyHistogram(name="write_state"), True),
    }
    return {f"/psfleet.v1.Shard/{name}": method for name, method in methods.items()}


def _service(
    name: str, methods: "dict[str, grpc.RpcMethodHandler[Any, Any]]"
) -> "grpc.GenericRpcHandler[Any, Any]":
    return grpc.method_handlers_generic_handler(f"psfleet.v1.{name}", methods)


def _traced(host: ShardHost, method: str, behavior: B) -> B:
    """Wrap a method so that it records a tracing span for each push that the worker traces.

    Returns the method itself if this server does not trace.

    The span of an exchange (a push with a pull) ends when the pull is answered or begins to wait for other
    workers.
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
