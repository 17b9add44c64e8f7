"""Events of the processes of a job, its phases and first failure, and actions on them.

Events that are a `Message` also travel from an agent to its launcher, as they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from psfleet.core.base.observability.panels import number_text
from psfleet.core.net.message_codec import Message
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.standbys import PromoteStandby, ReleaseStandbys


@dataclass(frozen=True)
class Timeouts:
    """Time limits of the stages of a job, in seconds.

    Attributes:
        start: Until all servers are ready.
        leave: Limit for servers to end by themselves after the last worker.
        grace: Between asking processes to stop and killing them; workers first, then servers.
    """

    start: float = 120.0
    leave: float = 5.0
    grace: float = 4.0


@dataclass(frozen=True)
class Failure:
    """First failure of a job. `code` None: the member did not end, it was not ready in time or out of reach.

    Attributes:
        cause: Why it ended, where the engine knows that for certain.
        usage: Resources that it had used.
    """

    member: Member
    code: int | None
    why: str = ""
    cause: str = ""
    usage: str = ""

    @property
    def exit_code(self) -> int:
        """The job's exit code; for a signal 128 and its number, as shells say it."""
        if self.code is None:
            return 1
        return 128 - self.code if self.code < 0 else self.code or 1


class Phase(Enum):
    """Phases of a job."""

    STARTING = "starting"
    TRAINING = "training"
    GOING_BACK = "going back"
    LEAVING = "leaving"
    STOPPING_WORKERS = "stopping workers"
    STOPPING_SERVERS = "stopping servers"
    DONE = "done"


class ServerReady(Message, frozen=True):
    """A server answers, at this endpoint."""

    member: Member
    endpoint: str = ""


@dataclass(frozen=True)
class ServerUnreachable:
    """A server that starts listens, and another machine cannot connect to it; `why` names that machine."""

    member: Member
    why: str


class ProcessExited(Message, frozen=True):
    """A process has ended. `code` as in subprocess: the exit code, or minus the signal's number.

    Attributes:
        left: It is a worker that had left the fleet before.
        cause: Why, where the engine knows more than the code says: memory ran out, its machine is lost.
        usage: Resources that it has used, for people.
        is_final: Nothing can start it again.
    """

    member: Member
    code: int
    left: bool = False
    cause: str = ""
    usage: str = ""
    is_final: bool = False


def usage_text(cpu_seconds: float, peak_memory: int) -> str:
    """Return what a process has used, for people."""
    return f"{cpu_seconds:.1f} s of CPU, {number_text(peak_memory, 'bytes')} at most"


@dataclass(frozen=True)
class StopRequested:
    """The user or the system wants the job to end: SIGINT, SIGTERM or SIGHUP."""

    signal: int


class LivenessSignal(Message, frozen=True):
    """A server or a standby has given a liveness signal."""

    member: Member


class ProcessEnding(Message, frozen=True):
    """A server or a standby has given its last liveness signal: it is about to end."""

    member: Member


@dataclass(frozen=True)
class MachineCutOff:
    """A machine cannot be reached. Its processes may live on; their exits come later.

    Comes again and again until the machine is heard or lost, since others may begin to answer meanwhile.

    Attributes:
        members: Members on the machine.
        answering: Members on machines that have sent a message just now.
    """

    members: frozenset[Member]
    answering: frozenset[Member]


@dataclass(frozen=True)
class ClockTick:
    """Nothing but time has passed."""


@dataclass(frozen=True)
class Output:
    """The member that is shown has written these bytes."""

    data: bytes
    is_error: bool


class Said(Message, frozen=True):
    """A line for people, from a server beside its liveness signals, or from the engine itself."""

    member: Member | None
    text: str


Event = (
    ServerReady
    | ServerUnreachable
    | ProcessExited
    | StopRequested
    | LivenessSignal
    | ProcessEnding
    | MachineCutOff
    | ClockTick
)
Shown = Output | Said
"""Output for people, not for the supervisor."""


@dataclass(frozen=True)
class StartProcesses:
    """Start these processes."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to these processes and their groups."""

    members: tuple[Member, ...]
    signal: int


@dataclass(frozen=True)
class KillHung:
    """Kill this server or standby: it has been silent for so many seconds."""

    member: Member
    seconds: float


@dataclass(frozen=True)
class ReportHung:
    """This server has been silent for so many seconds, and is left alone."""

    member: Member
    seconds: float


@dataclass(frozen=True)
class ReportLostWorker:
    """This worker has died for good; the job goes on without it. `left`: the fleet was done with it."""

    member: Member
    code: int
    left: bool = False


@dataclass(frozen=True)
class ReportMissingLeave:
    """This worker has ended well, but has not left the fleet: others may wait for it."""

    member: Member


@dataclass(frozen=True)
class ServersMoved:
    """The job has another number of servers from now on, and their rows have moved."""

    servers: int


@dataclass(frozen=True)
class FinishJob:
    """All processes have ended."""

    exit_code: int


Action = (
    StartProcesses
    | SendSignal
    | KillHung
    | ReportHung
    | ReportLostWorker
    | ReportMissingLeave
    | PromoteStandby
    | ReleaseStandbys
    | ServersMoved
    | FinishJob
)


def causes_first(exits: Iterable[ProcessExited]) -> list[ProcessExited]:
    """Exits that were noticed at the same moment, the likeliest cause first.

    A process killed by a signal does not owe that to another; a worker may well fail because of
    its server, hardly the other way round.
    """
    return sorted(exits, key=lambda e: (e.code >= 0, e.code == 0, e.member))
