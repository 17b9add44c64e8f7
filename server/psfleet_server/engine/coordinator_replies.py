"""Encodes the coordinator's outcomes and completes the replies of the calls that waited for them.

An unexpected error of one reply becomes the error of its call, and the other replies are sent.
"""

from collections.abc import Sequence
from typing import Any

from psfleet.core.engine.shard.events import SendError
from psfleet.core.net.membership_messages import mode_fields
from psfleet.core.net.v1 import coordinator_pb2
from psfleet_server.coordinator.barriers import CollectiveReply
from psfleet_server.coordinator.coordinator_messages import Outcome, Registration
from psfleet_server.rpc.replies import DeferredReply, as_psfleet_error


def release(outcomes: Sequence[Outcome], servers: Sequence[str]) -> None:
    """Send the replies of these outcomes. All calls of a collective share one message, which is encoded once.

    Args:
        outcomes: Outcomes of the coordinator, each with the call to reply to.
        servers: Endpoints of all servers if their number has changed since the start, else empty.
    """
    last: CollectiveReply | None = None
    message = b""
    for outcome in outcomes:
        reply = outcome.call
        assert isinstance(reply, DeferredReply)
        # An error must not leave this reply, or those after it, without an end.
        try:
            match outcome:
                case SendError():
                    reply.fail(outcome.error)
                case CollectiveReply(value=value, mode_request=request):
                    if last is None or last.value is not value or last.mode_request is not request:
                        message, last = _collective_reply(outcome, servers), outcome
                    reply.complete(message)
                case Registration():
                    reply.complete(_seated(outcome, servers))
        except Exception as error:
            reply.fail(as_psfleet_error(error))


def _seated(seating: Registration, servers: Sequence[str]) -> bytes:
    switch, fields = seating.switch, {}
    if switch is not None:
        fields = {"switches": switch.number, "last": switch.last, **mode_fields(switch.mode)}
    reply = coordinator_pb2.RegisterReply(
        incarnation=seating.incarnation,
        first=seating.first,
        view=seating.view,
        completed=seating.completed,
        progress=seating.progress,
        servers=servers,
        **fields,
    )
    return bytes(reply.SerializeToString())


def _collective_reply(release: CollectiveReply, servers: Sequence[str]) -> bytes:
    reply: Any = coordinator_pb2.BarrierReply(servers=servers)
    if release.value is not None:
        reply = coordinator_pb2.AllReduceReply(value=release.value.tobytes(), servers=servers)
    elif release.mode_request is not None:
        reply.mode_request.mode = release.mode_request.mode
        reply.mode_request.settings.update(release.mode_request.settings)
    return bytes(reply.SerializeToString())
