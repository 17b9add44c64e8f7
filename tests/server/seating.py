"""Servers that answer the coordinator at once, for tests of it alone."""

from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.membership_view import PrepareView, ViewReport
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Outcome, Registration


def settled(coordinator: Coordinator, report: ViewReport | None = None) -> list[Outcome]:
    """Let every server answer what is due to it, at once and with this report."""
    outcomes: list[Outcome] = []
    while due := coordinator.due():
        for each in due:
            coordinator.rebooted(each.server, 1)
            view = each.message.view
            if isinstance(each.message, PrepareView):
                outcomes += coordinator.reported(each.server, 1, view, report or ViewReport())
            else:
                outcomes += coordinator.installed(each.server, 1, view)
    return outcomes


def register(coordinator: Coordinator, worker: int, boot: int, workers: int) -> int:
    """The incarnation that a process gets once all servers know of it."""
    outcomes = coordinator.register(worker, boot, workers, "register")
    every = [*outcomes, *settled(coordinator)]
    [outcome] = [one for one in every if one.call == "register"]
    if isinstance(outcome, SendError):
        raise outcome.error
    assert isinstance(outcome, Registration)
    return outcome.incarnation
