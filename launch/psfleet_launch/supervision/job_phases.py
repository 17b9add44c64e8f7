"""Where a job stands, how long each stage may take, and what went wrong first."""

from dataclasses import dataclass
from enum import Enum

from psfleet_launch.job.job_plan import Member

__all__ = ["Failure", "Phase", "Timeouts"]


@dataclass(frozen=True)
class Timeouts:
    """How long each stage may take, in seconds.

    Attributes:
        start: Until all servers are ready.
        leave: For servers to end by themselves after the last worker.
        grace: Between asking processes to stop and killing them; workers first, then servers.
    """

    start: float = 120.0
    leave: float = 5.0
    grace: float = 4.0


@dataclass(frozen=True)
class Failure:
    """What went wrong first. `code` None: it did not end, it was not ready in time or out of reach.

    Attributes:
        cause: Why it ended, where the engine knows that for certain.
        usage: What it had used.
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
    """Where the job stands."""

    STARTING = "starting"
    TRAINING = "training"
    GOING_BACK = "going back"
    LEAVING = "leaving"
    STOPPING_WORKERS = "stopping workers"
    STOPPING_SERVERS = "stopping servers"
    DONE = "done"
