"""Vocabulary of the supervisor: events of a job's processes, phases, the first failure, and actions.

Open this file for what may happen to a job and what the launcher may do about it; the decisions are in
supervisor.py. Events that are a `Message` also travel unchanged from an agent to its launcher.
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
        start: Limit for all servers to become ready.
        leave: Limit for servers to end by themselves after the last worker.
        grace: Time between asking processes to stop and killing them, first for workers, then for servers.
    """

    start: float = 120.0
    leave: float = 5.0
    grace: float = 4.0


@dataclass(frozen=True)
class Failure:
    """First failure of a job.

    Attributes:
        member: Member that failed.
        code: Exit code of the member as in subprocess, or None if it did not end but was not ready in time or
            cannot be reached.
        why: Reason as the supervisor knows it, or "".
        cause: Reason why the process ended, where the engine knows it for certain, or "".
        usage: Resources that the process had used, for people.
    """

    member: Member
    code: int | None
    why: str = ""
    cause: str = ""
    usage: str = ""

    @property
    def exit_code(self) -> int:
        """The job's exit code; for a signal 128 plus its number, as in shells."""
        if self.code is None:
            return 1
        return 128 - self.code if self.code < 0 else self.code or 1


class Phase(Enum):
    """Phases of a job; supervisor.py draws the transitions."""

    STARTING = "starting"
    TRAINING = "training"
    GOING_BACK = "going back"
    LEAVING = "leaving"
    STOPPING_WORKERS = "stopping workers"
    STOPPING_SERVERS = "stopping servers"
    DONE = "done"


class ServerReady(Message, frozen=True):
    """A server or standby is ready, at this endpoint."""

    member: Member
    endpoint: str = ""


@dataclass(frozen=True)
class ServerUnreachable:
    """A starting server listens, but another machine cannot connect to it; `why` names that machine."""

    member: Member
    why: str


class ProcessExited(Message, frozen=True):
    """A process has ended.

    Attributes:
        member: Member that the process served.
        code: Exit code as in subprocess: minus the signal's number if a signal killed the process.
        left: True for a worker that had left the fleet before.
        cause: Cause of the end, where the engine knows more than the code says: memory ran out, or the
            machine is lost.
        usage: Resources that the process has used, for people.
        is_final: True if the member cannot be started again.
    """

    member: Member
    code: int
    left: bool = False
    cause: str = ""
    usage: str = ""
    is_final: bool = False


def usage_text(cpu_seconds: float, peak_memory: int) -> str:
    """Return the resources that a process has used, for people: "12.3 s of CPU, 1.2 GB at most"."""
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
    """A machine cannot be reached. Its processes may still run; their exits come later.

    The event is repeated until the machine answers or is given up, because a partner on another machine may
    begin to answer meanwhile.

    Attributes:
        members: Members on the machine.
        answering: Members on machines that have sent a message within the last half second.
    """

    members: frozenset[Member]
    answering: frozenset[Member]


@dataclass(frozen=True)
class ClockTick:
    """Time has passed and nothing else has happened."""


@dataclass(frozen=True)
class Output:
    """The member whose output is shown (worker 0) has written these bytes."""

    data: bytes
    is_error: bool


class Said(Message, frozen=True):
    """A line for people, which a server wrote to its liveness pipe, or which the engine itself reports."""

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
    """Kill this server or standby, which has given no liveness signal for this number of seconds."""

    member: Member
    seconds: float


@dataclass(frozen=True)
class ReportHung:
    """Report that a server has given no liveness signal for this number of seconds, and is left alone."""

    member: Member
    seconds: float


@dataclass(frozen=True)
class ReportLostWorker:
    """Report a worker that died for good while the job goes on. `left` says that it was done before."""

    member: Member
    code: int
    left: bool = False


@dataclass(frozen=True)
class ReportMissingLeave:
    """Report a worker that ended well without leaving the fleet, so that other workers may wait for it."""

    member: Member


@dataclass(frozen=True)
class ServersMoved:
    """Report that the job has this number of servers from now on, and that their rows have moved."""

    servers: int


@dataclass(frozen=True)
class FinishJob:
    """End the launcher with this exit code, since all processes have ended."""

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
    """Sort exits that were noticed at the same moment so that the likeliest cause comes first.

    The first exit is reported as the failure of the job. A process that a signal killed did not die of
    another process's error. A worker may well fail because of its server, but hardly a server because of a
    worker; "server" sorts before "worker".
    """
    return sorted(exits, key=lambda e: (e.code >= 0, e.code == 0, e.member))
