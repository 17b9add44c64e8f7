"""The gRPC methods of a server, by name."""

from collections.abc import Sequence
from typing import Any

import grpc

from psfleet.consistency import NO_MODE
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.deferred_reply import immediate, parkable, prompt
from psfleet_server.rpc.http2_listener import MeasuredMethod
from psfleet_server.services.coordinator_service import CoordinatorService
from psfleet_server.services.membership_service import MembershipService
from psfleet_server.services.shard_service import ShardService

__all__ = ["handlers", "tensor_methods"]


def handlers(host: ShardHost) -> Sequence["grpc.GenericRpcHandler[Any, Any]"]:
    """What a server with this host answers."""
    shard, coordinator = _shard_service(host), CoordinatorService(host)
    found: list[grpc.GenericRpcHandler[Any, Any]] = [
        _ImmediateHandlers(host, shard),
        grpc.method_handlers_generic_handler(
            "psfleet.v1.Shard",
            {
                "Push": immediate(shard.push, host.latencies.push),
                "Pull": parkable(shard.pull, host.latencies.pull),
                "Exchange": parkable(shard.exchange, host.latencies.exchange),
                "Attach": immediate(shard.attach),
                "Join": immediate(shard.join),
                "Leave": immediate(shard.leave),
                "CreateTable": immediate(shard.create_table),
                "ReadState": immediate(shard.read_state),
                "WriteState": immediate(shard.write_state),
                "Load": immediate(shard.load),
                "Shrink": immediate(shard.shrink),
                "Evictions": immediate(shard.evictions),
                "Status": immediate(shard.status),
                "Transport": immediate(shard.transport),
            },
        ),
    ]
    members = MembershipService(host)
    found.append(
        grpc.method_handlers_generic_handler(
            "psfleet.v1.Membership",
            {"Freeze": immediate(members.freeze), "Install": immediate(members.install)},
        )
    )
    if host.coordinator is not None:
        found.append(
            grpc.method_handlers_generic_handler(
                "psfleet.v1.Coordinator",
                {
                    "Register": parkable(coordinator.register),
                    "Barrier": parkable(coordinator.barrier),
                    "AllReduce": parkable(coordinator.all_reduce),
                    "Beat": immediate(coordinator.beat),
                    "Deal": immediate(coordinator.deal),
                },
            )
        )
    return found


def tensor_methods(host: ShardHost) -> dict[str, MeasuredMethod]:
    """The methods that carry tensors, by path: Push, Pull and Exchange."""
    shard = _shard_service(host)
    return {
        "/psfleet.v1.Shard/Push": (
            lambda request, reply: reply.answer(shard.push(request)),
            host.latencies.push,
        ),
        "/psfleet.v1.Shard/Pull": (shard.pull, host.latencies.pull),
        "/psfleet.v1.Shard/Exchange": (shard.exchange, host.latencies.exchange),
    }


def _shard_service(host: ShardHost) -> ShardService:
    if host.tracing is None:
        return ShardService(host)
    from psfleet_server.services.traced_shard_service import TracedShardService

    return TracedShardService(host, host.tracing)


class _ImmediateHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Pulls and exchanges in the modes in which they never wait; in others it knows no method.

    The mode of a call is that of its lookup: it changes only while no call is under way.
    """

    def __init__(self, host: ShardHost, shard: ShardService) -> None:
        self._host = host
        self._methods = {
            "/psfleet.v1.Shard/Pull": prompt(shard.pull, host.latencies.pull),
            "/psfleet.v1.Shard/Exchange": prompt(shard.exchange, host.latencies.exchange),
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a call, if it is one of these."""
        mode = self._host.shard.consistency.declared
        if mode.pulls_wait or mode.name == NO_MODE.name:
            return None
        return self._methods.get(handler_call_details.method)
