"""Messages between the servers of a fleet: requests of server 0 to every server, and their replies.

A new view of the members takes two calls per server: Freeze makes it stop closing rounds and report, and
Install makes it continue with the new members. Each call names the server process that it is meant for by
its boot number. A later process of that server does nothing, and replies with its own number.

A move of rows to another number of servers takes Open, Send, Prepare and Adopt, in this order, or Abandon at
any time before the decision. During Send, servers pass rows to each other with Fill. Numbers of moves only
rise, and a repeated call changes nothing. Calls without a reply here are answered with no bytes.
"""

from msgspec import Struct, field

from psfleet.core.engine.shard.membership_view import InstallView, PrepareView, ViewReport


class ServerMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the messages between servers. A message with unknown fields is refused."""


class FreezeRequest(ServerMessage, frozen=True):
    """Request to close no more rounds and to report which pushes the server has.

    Attributes:
        boot: Number of the process that is meant.
        view: The view to prepare for.
        coordinator: Endpoint of server 0, for heartbeats.
    """

    boot: int
    view: PrepareView
    coordinator: str


class FreezeReply(ServerMessage, frozen=True):
    """Reply to FreezeRequest.

    Attributes:
        boot: Number of the process that replies.
        report: Pushes and rounds of the server, or None if another process was meant.
    """

    boot: int
    report: ViewReport | None = None


class InstallRequest(ServerMessage, frozen=True):
    """Request to continue with the members of a view. `boot` is the number of the process that is meant."""

    boot: int
    view: InstallView


class InstallReply(ServerMessage, frozen=True):
    """Reply to InstallRequest.

    Attributes:
        boot: Number of the process that replies.
        installed: True if the view is installed, False if another process was meant.
    """

    boot: int
    installed: bool


class OpenMoveRequest(ServerMessage, frozen=True):
    """Request to prepare for received rows, and to refuse changes until the move has ended.

    Attributes:
        number: Number of the move.
        servers: Number of servers after the move.
        ahead: True to prepare only. Training goes on, and a second request with the same number begins the
            phase without changes.
    """

    number: int
    servers: int
    ahead: bool = False


class OpenMoveReply(ServerMessage, frozen=True):
    """Reply to OpenMoveRequest: the server is ready.

    Attributes:
        boot: Boot number of the server's process.
        alone: True if received rows are in the memory of this process only, without a log or a standby.
    """

    boot: int
    alone: bool


class SendRowsRequest(ServerMessage, frozen=True):
    """Request to send the server's rows to their new owners.

    Attributes:
        number: Number of the move.
        servers: Endpoints of the servers after the move, by their number.
        ahead: True to send while training goes on. Rows that change meanwhile are sent with the next request.
        hurry: True to send at full speed, since few rows are left.
    """

    number: int
    servers: tuple[str, ...]
    ahead: bool = False
    hurry: bool = False


class SendRowsReply(ServerMessage, frozen=True):
    """Reply to SendRowsRequest, with the number of rows sent."""

    rows: int


class MovedRecord(ServerMessage, frozen=True):
    """Record of a moved table (`durability/records.py`): a table to create, a part of one, or its state."""

    kind: int
    body: bytes


class FillRowsRequest(ServerMessage, frozen=True):
    """Request of another server to receive rows, beside the rows that the server serves now."""

    number: int
    records: list[MovedRecord] = field(default_factory=list)


class PrepareMoveRequest(ServerMessage, frozen=True):
    """Request to promise that the server can serve the received rows, even if its process starts again.

    Attributes:
        number: Number of the move.
        state: State of server 0 beside its tables, as in a snapshot. All servers take it over.
    """

    number: int
    state: bytes


class AdoptRowsRequest(ServerMessage, frozen=True):
    """Request to serve the received rows from now on: the move is committed."""

    number: int


class AbandonMoveRequest(ServerMessage, frozen=True):
    """Request to drop the received rows: the move is given up."""

    number: int
