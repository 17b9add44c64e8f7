"""Messages between the servers of a fleet: requests of server 0 to every server, and their replies.

A change of members takes two calls per server. Freeze makes the server stop closing rounds and report, and
Install makes it continue with the new view (numbered membership). Each call contains the boot number, a
random number that identifies the intended server process. If that process was restarted, the new one does
nothing and replies with its own boot number.

A move of rows to another number of servers takes Open, Send, Prepare and Adopt, in this order, or Abandon at
any time before the decision. During Send, servers pass rows to each other with Fill. Numbers of moves only
rise, and a repeated call changes nothing. Requests without a reply class here get an empty reply.
"""

from msgspec import Struct, field

from psfleet.core.engine.shard.membership_view import InstallView, PrepareView, ViewReport


class ServerMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the messages between servers. A message with unknown fields is refused."""


class FreezeRequest(ServerMessage, frozen=True):
    """Request to close no more rounds, and to report which pushes the server has.

    Attributes:
        boot: Boot number of the intended process.
        view: The view (numbered membership) to prepare for.
        coordinator: Endpoint of server 0, to which the server sends heartbeats.
    """

    boot: int
    view: PrepareView
    coordinator: str


class FreezeReply(ServerMessage, frozen=True):
    """Reply to FreezeRequest.

    Attributes:
        boot: Boot number of the process that replies.
        report: Pushes and rounds of the server, or None if the request was for another process.
    """

    boot: int
    report: ViewReport | None = None


class InstallRequest(ServerMessage, frozen=True):
    """Request to continue with the members of a view (numbered membership).

    Attributes:
        boot: Boot number of the intended process.
        view: Members of the fleet from now on.
    """

    boot: int
    view: InstallView


class InstallReply(ServerMessage, frozen=True):
    """Reply to InstallRequest.

    Attributes:
        boot: Boot number of the process that replies.
        installed: True if the view is installed, False if the request was for another process.
    """

    boot: int
    installed: bool


class OpenMoveRequest(ServerMessage, frozen=True):
    """Request to prepare for rows from other servers, and to refuse changes until the move has ended.

    Attributes:
        servers: Number of servers after the move.
        ahead: True to prepare only. Training continues, and a second request with the same number begins the
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
        servers: Endpoints of the servers after the move, by server index.
        ahead: True to send while training continues. Rows that change meanwhile are sent with the next
            request.
        hurry: True to send at full speed, because few rows are left.
    """

    number: int
    servers: tuple[str, ...]
    ahead: bool = False
    hurry: bool = False


class SendRowsReply(ServerMessage, frozen=True):
    """Reply to SendRowsRequest, with the number of rows sent."""

    rows: int


class MovedRecord(ServerMessage, frozen=True):
    """Record of a moved table (`durability/records.py`): a new table, some of its rows, or its state."""

    kind: int
    body: bytes


class FillRowsRequest(ServerMessage, frozen=True):
    """Request of another server to receive rows, apart from the rows that the server serves now."""

    number: int
    records: list[MovedRecord] = field(default_factory=list)


class PrepareMoveRequest(ServerMessage, frozen=True):
    """Request to make the received rows durable, so that the server can serve them even after a crash.

    Attributes:
        state: State of server 0 without its tables, as in a snapshot. All servers adopt it.
    """

    number: int
    state: bytes


class AdoptRowsRequest(ServerMessage, frozen=True):
    """Request to serve the received rows from now on, because the launcher has committed the move."""

    number: int


class AbandonMoveRequest(ServerMessage, frozen=True):
    """Request to drop the received rows, because the move to another number of servers is given up."""

    number: int
