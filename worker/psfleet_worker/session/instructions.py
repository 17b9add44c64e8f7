"""Instructions of a worker's state machines: calls to the fleet, and waits.

A machine's operation is a program: a generator that yields one instruction after the other and is sent
back what came of each. Whoever runs it makes the calls (`connection`, `stream`); the tests of the
protocol run it under a scheduler that loses messages and kills processes.
"""

import dataclasses
from collections.abc import Generator
from typing import Any, TypeVar

from psfleet.core.base.memory import value_class
from psfleet.core.engine.consistency import NO_MODE, ConsistencyMode
from psfleet.core.engine.round_plan import Range, RoundPlan
from psfleet.core.engine.shard.events import Join, Leave, MarkCut

T = TypeVar("T")
Ranges = tuple[Range, ...]


# -- the incarnation of a worker -------------------------------------------------------------------


@value_class
class RegisterWorker:
    """Ask the coordinator for the worker's seat. Answered with SeatGranted."""


@value_class
class SeatGranted:
    """The worker has its seat.

    Attributes:
        first: Sync mode: the round from which on it counts.
        view: The last one that is decided.
        completed: Collectives that are over.
        switches: Changes of the mode among them; 0: none, and the next two say nothing.
        mode: The mode since the last change, with the settings that servers know.
        last: The highest push of any worker before that change.
        progress: Script position of the seat's earlier incarnations.
    """

    incarnation: int
    first: int
    view: int
    completed: int
    switches: int = 0
    mode: ConsistencyMode = NO_MODE
    last: int = 0
    progress: str = ""


@value_class
class ServerJoined:
    """Answer of one server to Join: where the incarnation stands there, and the mode of the fleet."""

    sequence: int
    clock: int
    mode: ConsistencyMode
    switches: int


@value_class
class JoinCollective:
    """Come to a collective of all workers, and wait for them. Answered with CollectiveResult.

    Attributes:
        mode: Reduction of the values; "switch": all go on in another mode.
        value: Value of the worker; None: it is a barrier.
        change: Number of the mode switch that it would be for this incarnation.
        reached: Leases of data used up, and samples of the next one.
    """

    number: int
    mode: str = ""
    value: Any = None
    change: int = 0
    reached: tuple[int, int] = (0, 0)


@value_class
class CollectiveResult:
    """Result of a complete collective, and the mode and settings of a request from outside the script."""

    value: Any = None
    mode_request: tuple[str, dict[str, int]] | None = None


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

    Answered with the newest view that a server has reported.
    """

    joined: bool = False


@value_class
class SendPull:
    """Make a pull, together with the push that waits for company.

    Answered with an object whose `view` is the newest view that a server has reported.

    Attributes:
        commit: Sync mode: every server holds the push of this round, which is waited for, or the only
            server gets it with the pull; 0: none.
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
        is_held: Servers hold it for a round.
        behind: It waits for the answers of what is read ahead, too.
        before: By server the last push before it that was sent there.
        addressed: By server the last push up to it that is.
    """

    sequence: int
    cut: tuple[int, int]
    lingers: bool
    is_held: bool
    behind: bool
    before: tuple[int, ...]
    addressed: tuple[int, ...]

    def skipped(self, server: int) -> int:
        """Return the number of pushes just before it that were not sent to the server."""
        return self.sequence - 1 - self.before[server]


# -- snapshots ------------------------------------------------------------------------------------------


@value_class
class AwaitMarking:
    """Confirm to server 0 that this worker knows of a snapshot. Answered, when all workers have: (whether
    to mark the stream of pushes, else the last round in the snapshot)."""

    number: int


@value_class
class CutStream:
    """Send the mark to all servers.

    Attributes:
        addressed: By server the last push up to it that was sent there; empty: all were sent to all.
    """

    cut: MarkCut
    addressed: tuple[int, ...] = ()

    def to(self, server: int) -> MarkCut:
        """Return the mark for one server."""
        addressed = self.addressed[server] if self.addressed else None
        return dataclasses.replace(self.cut, addressed=addressed)


@value_class
class ReportState:
    """Send the worker's state for a snapshot to server 0, as of its push `last`."""

    number: int
    last: int


# -- data -----------------------------------------------------------------------------------------------


@value_class
class RequestData:
    """Ask for data of a dataset. Answered with DataReply.

    Attributes:
        round: Sync mode: the worker's next round; 0: a lease is wanted.
        lease: Number of leases that this incarnation has taken.
        used: Number of them that are used up, with all pushes acknowledged.
        batch: Samples of a step.
    """

    dataset: int
    batch: int
    round: int = 0
    lease: int = 0
    used: int = 0


@value_class
class DataReply:
    """Reply of the coordinator at a view: a plan or a lease; (): nothing more; None: not yet."""

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
    """Announce the samples of the next step to the other stages of this worker."""

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
