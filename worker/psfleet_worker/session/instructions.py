"""What a worker's state machines ask for: calls to the fleet, and waits.

A machine's operation is a program: a generator that yields one instruction after the other and is sent
back what came of each. Whoever runs it makes the calls (`connection`, `stream`); the tests of the
protocol run it under a scheduler that loses messages and kills processes.
"""

import dataclasses
from collections.abc import Generator
from typing import Any, TypeVar

from psfleet.consistency import NO_MODE, ConsistencyMode
from psfleet.data.assignment import Range, RoundPlan
from psfleet.platform.value_class import value_class
from psfleet.shard.events import Join, Leave, MarkCut

__all__ = [
    "AwaitMarking",
    "AwaitPushes",
    "AwaitReads",
    "CollectiveResult",
    "CutStream",
    "DataReply",
    "FlushPushes",
    "HearStages",
    "Instruction",
    "JoinCollective",
    "LayOutPush",
    "Pause",
    "Program",
    "RegisterWorker",
    "ReportState",
    "RequestData",
    "SeatGranted",
    "SendPull",
    "SendPush",
    "ServerJoined",
    "SkipStep",
    "TellStages",
    "TrainStep",
]

T = TypeVar("T")
Ranges = tuple[Range, ...]


# -- the life of a worker -------------------------------------------------------------------------------


@value_class
class RegisterWorker:
    """Ask the coordinator for the worker's seat. Answered with Seated."""


@value_class
class SeatGranted:
    """The worker has its seat.

    Attributes:
        incarnation: Number of this life.
        first: Sync mode: the round from which on it counts.
        view: The last one that is decided.
        met: Meetings that are over.
        switches: Changes of the mode among them; 0: none, and the next two say nothing.
        mode: The mode since the last change, with the settings that servers know.
        last: The highest push of any worker before that change.
        progress: How far the script was in the seat's earlier lives.
    """

    incarnation: int
    first: int
    view: int
    met: int
    switches: int = 0
    mode: ConsistencyMode = NO_MODE
    last: int = 0
    progress: str = ""


@value_class
class ServerJoined:
    """Answer of one server to Join: where the life stands there, and the mode of the fleet."""

    sequence: int
    clock: int
    mode: ConsistencyMode
    switches: int


@value_class
class JoinCollective:
    """Come to a meeting of all workers, and wait for them. Answered with Released.

    Attributes:
        number: Of the meeting.
        mode: How to combine the values; "switch": all go on in another mode.
        value: What the worker brings; None: it is a barrier.
        change: Which change of the mode it would be for this life.
        reached: Leases of data used up, and samples of the next one.
    """

    number: int
    mode: str = ""
    value: Any = None
    change: int = 0
    reached: tuple[int, int] = (0, 0)


@value_class
class CollectiveResult:
    """The meeting is complete: what it gives, and the mode and settings that somebody outside wants."""

    value: Any = None
    wish: tuple[str, dict[str, int]] | None = None


@value_class
class Pause:
    """Wait so many seconds."""

    seconds: float


# -- pushes and pulls -----------------------------------------------------------------------------------


@value_class
class AwaitPushes:
    """Wait until at most `under_way` of the pushes that have left are not acknowledged.

    `leaves`: The push that waits for company leaves first.
    """

    under_way: int = 0
    leaves: bool = False


@value_class
class AwaitReads:
    """Wait for the answers of what is read ahead; with `joined` also until they are arrays.

    Answered with the newest view that a server has told of.
    """

    joined: bool = False


@value_class
class SendPull:
    """Make a pull, together with the push that waits for company.

    Answered with an object whose `view` is the newest view that a server has told of.

    Attributes:
        commit: Sync mode: every server holds the push of this round, which is waited for; 0: none.
        ahead: Do not wait for the answers.
        own: Read what the caller wants; else nothing, and only wait for the round.
    """

    commit: int = 0
    ahead: bool = False
    own: bool = True


@value_class
class LayOutPush:
    """Lay out the caller's gradients as the push of this number and clock.

    Answered with whether it is sent to each server.
    """

    sequence: int
    clock: int


@value_class
class SendPush:
    """Let the push that is laid out leave, or wait a moment for the next pull.

    Attributes:
        cut: The last snapshot that the worker has marked, and its last push in it.
        lingers: It may wait.
        behind: It waits for the answers of what is read ahead, too.
        before: By server the last push before it that was sent there.
        addressed: By server the last push up to it that is.
    """

    sequence: int
    cut: tuple[int, int]
    lingers: bool
    behind: bool
    before: tuple[int, ...]
    addressed: tuple[int, ...]

    def goes_to(self, server: int) -> bool:
        """Whether it is sent to the server."""
        return self.addressed[server] == self.sequence

    def skipped(self, server: int) -> int:
        """How many pushes just before it were not sent there."""
        return self.sequence - 1 - self.before[server]

    @property
    def skips(self) -> bool:
        """Whether it is not sent to all servers."""
        return min(self.addressed) < self.sequence


# -- snapshots ------------------------------------------------------------------------------------------


@value_class
class AwaitMarking:
    """Tell server 0 that this worker has heard of a snapshot. Answered, when all workers have: (whether
    to mark the stream of pushes, else the last round in the snapshot)."""

    number: int


@value_class
class CutStream:
    """Tell all servers of the mark.

    Attributes:
        cut: The mark.
        addressed: By server the last push up to it that was sent there; empty: all were sent to all.
    """

    cut: MarkCut
    addressed: tuple[int, ...] = ()

    def to(self, server: int) -> MarkCut:
        """What one server is told."""
        addressed = self.addressed[server] if self.addressed else None
        return dataclasses.replace(self.cut, addressed=addressed)


@value_class
class ReportState:
    """Tell server 0 what the worker keeps in a snapshot, as of its push `last`."""

    number: int
    last: int


# -- data -----------------------------------------------------------------------------------------------


@value_class
class RequestData:
    """Ask for data of a dataset. Answered with Dealt.

    Attributes:
        round: Sync mode: the worker's next round; 0: a lease is wanted.
        lease: How many leases this life has taken.
        used: How many of them are used up, with all pushes acknowledged.
        batch: Samples of a step.
    """

    dataset: int
    batch: int
    round: int = 0
    lease: int = 0
    used: int = 0


@value_class
class DataReply:
    """What the coordinator has dealt at a view: a plan or a lease; (): nothing more; None: not yet."""

    what: RoundPlan | Ranges | None
    view: int


@value_class
class TrainStep:
    """Let the script train with these samples."""

    ranges: Ranges


@value_class
class SkipStep:
    """Make a step without gradients."""


@value_class
class FlushPushes:
    """Wait until every push of the script is applied."""


@value_class
class TellStages:
    """Tell the other stages of this worker which samples the next step has."""

    ranges: Ranges


@value_class
class HearStages:
    """Hear from this worker's first stage which samples the next step has. Answered with them."""


Instruction = (
    RegisterWorker
    | Join
    | Leave
    | JoinCollective
    | Pause
    | AwaitPushes
    | AwaitReads
    | SendPull
    | LayOutPush
    | SendPush
    | AwaitMarking
    | CutStream
    | ReportState
    | RequestData
    | TrainStep
    | SkipStep
    | FlushPushes
    | TellStages
    | HearStages
)

Program = Generator[Instruction, Any, T]
"""An operation: yields instructions, is sent their outcomes, and returns its result."""
