"""Instructions that a worker's state machines yield: calls to the fleet, and waits.

A program is a generator that yields one instruction after the other and is sent the result of each:

    result = None
    while True:
        instruction = program.send(result)     # StopIteration carries the program's return value
        result = perform(instruction)

In a job `psfleet_worker.connection`, `psfleet_worker.tensors.transfers` and `psfleet_worker.data_client` make
the calls. In `tests/protocol` a scheduler makes them, which loses messages and kills processes. The docstring
of an instruction defines its result.
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


@value_class
class RegisterWorker:
    """Register this process with the coordinator as the worker. The result is SeatGranted."""


@value_class
class SeatGranted:
    """Reply to RegisterWorker: the process is a member of the fleet.

    Attributes:
        incarnation: Number that identifies this process as the worker's present one (*incarnation*).
        first: In sync mode, the first round in which this process takes part.
        view: Number of the last decided view (membership).
        completed: Number of completed collectives.
        switches: Number of mode switches among these collectives. If it is 0, `mode` and `last` have no
            meaning.
        mode: Mode since the last mode switch, with those settings that servers need.
        last: Highest push number of any worker at the last mode switch.
        progress: Loop position that an earlier process of this worker has reached, or empty to start from the
            beginning.
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
    """Reply of one server to Join.

    Attributes:
        sequence: Number of the last push of this process that the server has. In a mode with rounds, number
            of the last closed round.
        clock: Number of pushes of this process since the last collective.
        switches: Number of mode switches that the server has applied.
    """

    sequence: int
    clock: int
    mode: ConsistencyMode
    switches: int


@value_class
class JoinCollective:
    """Arrive at a collective and wait for all workers. The result is CollectiveResult.

    Attributes:
        number: Number of the collective in the whole fleet.
        mode: Name of the reduction. "switch" means that all workers continue in another mode.
        value: Value of the worker, or None at a barrier.
        change: Number that the next mode switch of this process has.
        reached: Position in the data: number of leases (ranges of samples) that are used up, and number of
            samples used of the next lease.
    """

    number: int
    mode: str = ""
    value: Any = None
    change: int = 0
    reached: tuple[int, int] = (0, 0)


@value_class
class CollectiveResult:
    """Result of a complete collective.

    Attributes:
        value: Reduced value, or None at a barrier.
        mode_request: Mode and settings that `psfleet mode` requests, or None.
    """

    value: Any = None
    mode_request: tuple[str, dict[str, int]] | None = None


@value_class
class Pause:
    """Wait for this number of seconds."""

    seconds: float


@value_class
class AwaitPushes:
    """Wait until at most `under_way` sent pushes are unacknowledged.

    Attributes:
        leaves: True to send, before the wait, a push that is held back to share its calls with a pull.
    """

    under_way: int = 0
    leaves: bool = False


@value_class
class AwaitReads:
    """Wait for the replies to a prefetched pull. The result is the newest view (membership) number in them.

    Attributes:
        joined: True to also copy the values into arrays, which frees their shared memory.
    """

    joined: bool = False


@value_class
class SendPull:
    """Make a pull, in the same calls as a push that is held back for it, if there is one.

    The result is an object whose `view` is the newest number of a view (membership) that a server has
    reported.

    Attributes:
        commit: In sync mode, the round that the pull commits (allows servers to close) and waits for, or 0 if
            there is none. Every server has the push of that round, or the only server gets it with this pull.
        ahead: True to return before the replies arrive.
        own: True to read the values that the caller wants. False reads nothing and only waits for the round.
    """

    commit: int = 0
    ahead: bool = False
    own: bool = True


@value_class
class LayOutPush:
    """Lay out the caller's gradients as the push with this number and clock (pushes since a collective).

    The result is a bool for each server: True if the push must be sent there.
    """

    sequence: int
    clock: int


@value_class
class SendPush:
    """Send the push that is laid out, now or with the next pull. The result is the handle of the push.

    Attributes:
        cut: A pair: the number of the last snapshot that the worker has marked, and the worker's last push in
            that snapshot.
        lingers: True if the push may wait a few milliseconds for a pull.
        is_held: True if servers keep the push unapplied until its round closes.
        behind: True if the wait for a pull begins only after the replies to the prefetched pull.
        before: For each server, the last earlier push that was sent there.
        addressed: For each server, the last push that was sent there, including this push.
    """

    sequence: int
    cut: tuple[int, int]
    lingers: bool
    is_held: bool
    behind: bool
    before: tuple[int, ...]
    addressed: tuple[int, ...]

    def skipped(self, server: int) -> int:
        """Return the number of pushes directly before this one that were not sent to the server."""
        return self.sequence - 1 - self.before[server]


@value_class
class AwaitMarking:
    """Confirm to server 0 that this worker knows of a snapshot, and wait until all workers have confirmed.

    The result is a pair. Its first element is True if this worker has to mark its stream of pushes (name its
    last push in the snapshot). Otherwise the fleet trains in rounds, and the second element is the last round
    in the snapshot.
    """

    number: int


@value_class
class CutStream:
    """Send the mark of a snapshot to all servers.

    Attributes:
        cut: The mark: the number of the snapshot, and the worker's last push in the snapshot.
        addressed: For each server, the last push up to the mark that was sent there. Empty if every push was
            sent to every server.
    """

    cut: MarkCut
    addressed: tuple[int, ...] = ()

    def to(self, server: int) -> MarkCut:
        """Return the mark (the worker's last push in the snapshot) for one server."""
        addressed = self.addressed[server] if self.addressed else None
        return dataclasses.replace(self.cut, addressed=addressed)


@value_class
class ReportState:
    """Send the worker's state for a snapshot to server 0, as of its push `last`."""

    number: int
    last: int


@value_class
class RequestData:
    """Request samples of a dataset from server 0. The result is DataReply.

    Attributes:
        dataset: Number of the dataset, from 1.
        batch: Number of samples of a step.
        round: In sync mode, the worker's next round, to request the plan of rounds. 0 requests a lease (a
            range of samples).
        lease: Number of leases that this process has received.
        used: Number of these leases that are used up, with all pushes acknowledged.
    """

    dataset: int
    batch: int
    round: int = 0
    lease: int = 0
    used: int = 0


@value_class
class DataReply:
    """Reply of the coordinator to RequestData.

    Attributes:
        what: The plan of rounds, or the samples of a lease (position ranges). `()` means that the dataset has
            ended. None means that the worker has to wait, because other workers may return samples.
        view: Number of the view (membership) that the reply is based on.
    """

    what: RoundPlan | Ranges | None
    view: int


@value_class
class TrainStep:
    """Let the script train on these samples."""

    ranges: Ranges


@value_class
class SkipStep:
    """Push without gradients, so that rounds and pulls of other workers do not wait for this one."""


@value_class
class FlushPushes:
    """Wait until every push of the script is applied."""


@value_class
class TellStages:
    """Send the samples of the next step to the other pipeline stages of this worker."""

    ranges: Ranges


@value_class
class HearStages:
    """Wait until this worker's first stage sends the samples of the next step. The result is their ranges."""


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
