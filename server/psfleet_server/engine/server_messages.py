"""Messages between the servers of a fleet, each with its reply. Server 0 asks, and every server answers.

A new view of the members takes two calls: Freeze stops a server at a round, and Install lets it go on. Each
names the process that is meant by the number of its start (`boot`); another process of that server only
answers who it is.

Another number of servers takes a move: Open, Send, Prepare and Adopt, in this order, or Abandon. In between
servers send each other their rows with Fill. A move has a number, and numbers only rise; a call that comes
again changes nothing more. Calls whose reply has nothing to say are answered with no bytes.
"""

from msgspec import Struct, field

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


class OpenMoveRequest(ServerMessage, frozen=True):
    """Apply nothing more until it is said how the move ends, and make room for what the server is to hold.

    Attributes:
        number: Number of the move.
        servers: How many servers the fleet is to have.
        ahead: Only make room. Training goes on, and the move begins later with the same number.
    """

    number: int
    servers: int
    ahead: bool = False


class OpenMoveReply(ServerMessage, frozen=True):
    """The server is ready for the move.

    Attributes:
        boot: Number of the start of this process.
        alone: What the server takes is nowhere but in its memory.
    """

    boot: int
    alone: bool


class SendRowsRequest(ServerMessage, frozen=True):
    """Send what the server holds to the servers that are to hold it.

    Attributes:
        number: Number of the move.
        servers: Where the servers of the fleet are to be, in order.
        ahead: Send rows while training goes on. The server remembers which change, and sends those again.
        hurry: Send them as fast as possible, since few are left.
    """

    number: int
    servers: tuple[str, ...]
    ahead: bool = False
    hurry: bool = False


class SendRowsReply(ServerMessage, frozen=True):
    """The number of rows that the server has sent."""

    rows: int


class MovedRecord(ServerMessage, frozen=True):
    """A record of `durability/records.py`: a table to create, a part of one, or its state."""

    kind: int
    body: bytes


class FillRowsRequest(ServerMessage, frozen=True):
    """Take rows from another server, beside those that the server holds."""

    number: int
    records: list[MovedRecord] = field(default_factory=list)


class PrepareMoveRequest(ServerMessage, frozen=True):
    """Promise to hold what was taken, also after another start of the process.

    Attributes:
        number: Number of the move.
        state: State of server 0 beside its tables, as a snapshot keeps it. All servers take it over.
    """

    number: int
    state: bytes


class AdoptRowsRequest(ServerMessage, frozen=True):
    """The move is decided: what the server has taken is what it holds."""

    number: int


class AbandonMoveRequest(ServerMessage, frozen=True):
    """The move is given up: the server goes on with what it holds."""

    number: int
