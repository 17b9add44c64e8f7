"""Messages between the servers of a fleet, each with its reply. Server 0 asks, and every server answers.

Server 0 asks for a new view of the members in two calls: Freeze stops a server at a round, and Install lets
it go on. Each names the process that is meant by the number of its start (`boot`); another process of that
server only answers who it is.
"""

from msgspec import Struct

from psfleet.core.engine.shard.membership_view import InstallView, PrepareView, ViewReport


class ServerMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of these messages."""


class FreezeRequest(ServerMessage, frozen=True):
    """Close no round from now on, and tell where you stand. The coordinator listens at that endpoint."""

    boot: int
    view: PrepareView
    coordinator: str


class FreezeReply(ServerMessage, frozen=True):
    """State of the server, or None if another process was meant and nothing was done."""

    boot: int
    report: ViewReport | None = None


class InstallRequest(ServerMessage, frozen=True):
    """Go on with the new members."""

    boot: int
    view: InstallView


class InstallReply(ServerMessage, frozen=True):
    """Whether the view is installed. It is not if another process was meant."""

    boot: int
    installed: bool
