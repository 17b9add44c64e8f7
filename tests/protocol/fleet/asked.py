"""What a worker of a run waits for: calls to servers, and what their answers mean to its machines."""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from psfleet_server.coordinator.coordinator_messages import Registration
from psfleet_worker.session.instructions import SeatGranted
from psfleet_worker.session.retry_policy import Patience, Retries
from tests.protocol.fleet.calls import Request
from tests.protocol.fleet.job import Rows

_EVER = float("inf")


@dataclass
class Asked:
    """A call that a worker has asked for."""

    request: Request
    reply: Any = None
    servers: tuple[str, ...] = ()
    is_answered: bool = False
    retries: Retries = field(
        default_factory=lambda: Retries(
            _EVER, _EVER, Patience(reply=_EVER, room=_EVER, outage=_EVER), 0.0
        )
    )


Script = Generator[list[Asked], None, Any]
"""What a thread of the worker does; yields the calls whose answers it waits for."""


@dataclass
class Pulled:
    """The answers to a pull: the newest view, and the rows if they were asked for."""

    asked: list[Asked]
    view: int = 0
    rows: Rows | None = None


def seated(seating: Registration) -> SeatGranted:
    """The coordinator's answer to a worker that registers."""
    seated = SeatGranted(
        seating.incarnation,
        seating.first,
        seating.view,
        seating.completed,
        progress=seating.progress,
    )
    switch = seating.switch
    if switch is None:
        return seated
    return replace(seated, switches=switch.number, mode=switch.mode, last=switch.last)
