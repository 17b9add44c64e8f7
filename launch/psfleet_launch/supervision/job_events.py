"""Events and actions of the supervisor, the phases of a job, and its first failure.

Events say what has happened to a job's processes. Actions say what the launcher must do. supervisor.py
decides which actions follow an event. Events that derive from `Message` are also sent unchanged from an
agent to its launcher.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from psfleet.core.base.panels.panel import number_text
from psfleet.core.net.message_codec import Message
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.standbys import PromoteStandby, ReleaseStandbys


@dataclass(frozen=True)
class Timeouts:
    """Time limits of the phases of a job, in seconds.

    Attributes:
        start: Time within which all servers must be ready.
        leave: Time within which servers must end by themselves after the last worker has ended.
        grace: Time between the signal to stop and SIGKILL, first for workers, then for servers.
    """

    start: float = 120.0
    leave: float = 5.0
    grace: float = 4.0


@dataclass(frozen=True)
class Failure:
    """First failure of a job.

    Attributes:
        code: Exit code of the member as in subprocess. None if the member has not ended, but was not ready
            in time or cannot be reached.
        why: Reason that the supervisor knows, or "".
        cause: Reason that the engine knows for certain, such as full memory, or "".
        usage: Resources that the process had used, in words.
    """

    member: Member
    code: int | None
    why: str = ""
    cause: str = ""
    usage: str = ""

    @property
    def exit_code(self) -> int:
        """Exit code of the job. For a signal it is 128 plus the signal's number, as in shells."""
        if self.code is None:
            return 1
        return 128 - self.code if self.code < 0 else self.code or 1


class Phase(Enum):
    """Phases of a job. The docstring of supervisor.py has a diagram of the transitions."""

    STARTING = "starting"
    TRAINING = "training"
    GOING_BACK = "going back"
    LEAVING = "leaving"
    STOPPING_WORKERS = "stopping workers"
    STOPPING_SERVERS = "stopping servers"
    DONE = "done"


class ServerReady(Message, frozen=True):
    """A server or standby is ready at an endpoint."""

    member: Member
    endpoint: str = ""


@dataclass(frozen=True)
class ServerUnreachable:
    """A starting server listens, but another machine cannot connect to it. `why` names that machine."""

    member: Member
    why: str


class ProcessExited(Message, frozen=True):
    """A process has ended.

    Attributes:
        code: Exit code as in subprocess. Minus the signal's number if a signal has killed the process.
        left: True for a worker that had left the fleet before.
        cause: Cause of the end, if the engine knows it: memory was full, or the machine is lost. Otherwise
            "".
        usage: Resources that the process has used, in words.
        is_final: True if the member cannot be restarted.
    """

    member: Member
    code: int
    left: bool = False
    cause: str = ""
    usage: str = ""
    is_final: bool = False


def usage_text(cpu_seconds: float, peak_memory: int) -> str:
    """Return used resources in words, such as "12.3 s of CPU, 1.2 GB at most"."""
    return f"{cpu_seconds:.1f} s of CPU, {number_text(peak_memory, 'bytes')} at most"


@dataclass(frozen=True)
class StopRequested:
    """The user or the system has requested the job to end, with SIGINT, SIGTERM or SIGHUP."""

    signal: int


class LivenessSignal(Message, frozen=True):
    """A server or a standby has written a liveness signal to its pipe, which shows that it is not hung."""

    member: Member


class ProcessEnding(Message, frozen=True):
    """A server or a standby has closed its liveness pipe, because it is about to end."""

    member: Member


@dataclass(frozen=True)
class MachineCutOff:
    """A machine cannot be reached. Its processes may still be running. Their exits are reported later.

    The event is repeated until the machine answers or is given up, because a server's partner on another
    machine may become reachable meanwhile.

    Attributes:
        answering: Members on machines that have sent a message within the last half second.
    """

    members: frozenset[Member]
    answering: frozenset[Member]


@dataclass(frozen=True)
class ClockTick:
    """Time has passed and nothing else has happened."""


@dataclass(frozen=True)
class Output:
    """The member whose output is shown (worker 0) has written bytes to a standard stream."""

    data: bytes
    is_error: bool


class Said(Message, frozen=True):
    """A line for the user, from a server (through its liveness pipe) or from the engine."""

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
"""Output for the user. The supervisor does not get it."""


@dataclass(frozen=True)
class StartProcesses:
    """Start processes for these members."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class SendSignal:
    """Send a signal to the processes of these members and to their process groups."""

    members: tuple[Member, ...]
    signal: int


@dataclass(frozen=True)
class KillHung:
    """Kill a server or standby that has given no liveness signal for a number of seconds."""

    member: Member
    seconds: float


@dataclass(frozen=True)
class ReportHung:
    """Report that a server has given no liveness signal for a number of seconds, and is not killed."""

    member: Member
    seconds: float


@dataclass(frozen=True)
class ReportLostWorker:
    """Report a worker that has died and is not restarted. The job continues. `left`: the worker was done
    before."""

    member: Member
    code: int
    left: bool = False


@dataclass(frozen=True)
class ReportMissingLeave:
    """Report a worker that has ended with code 0 without leaving the fleet. Other workers may wait for it."""

    member: Member


@dataclass(frozen=True)
class ServersMoved:
    """Report that the number of servers has changed, and that the rows have moved to these servers."""

    servers: int


@dataclass(frozen=True)
class FinishJob:
    """End the launcher with an exit code, because all processes have ended."""

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
    """Sort exits that were noticed at the same time. The likeliest cause of the other exits comes first.

    The first exit is reported as the failure of the job. A process that was killed by a signal comes first,
    because it did not fail as a result of another process's error. Servers come before workers, because
    workers fail when a server dies, and not the other way round.
    """
    return sorted(exits, key=lambda e: (e.code >= 0, e.code == 0, e.member))
