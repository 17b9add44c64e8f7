"""Phases of a job with their time limits, its first failure, and servers that hang.

Each of them writes a liveness signal to a pipe of its own a few times per second
(psfleet_server.signals). Silence is counted in time that the launcher has itself been awake: after all
processes were stopped, as when a machine sleeps, no member counts as silent. Of a server and its standby
only one is given up, and only after a later signal of the other: two that are silent may wake in any order,
and whichever wakes first has all that was acknowledged. A server without a standby is given up if it gave
no signal while the launcher was awake for so long.

Pure, like the supervisor.
"""

from dataclasses import dataclass, field
from enum import Enum

from psfleet_launch.job.job_plan import Member


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


_STEP = 0.5
"""Seconds, the most that count between two looks; the launcher looks twice as often."""


@dataclass
class HangDetector:
    """Times of the last liveness signal of each process.

    Attributes:
        patience: Seconds of silence after which a process counts as hung.
    """

    patience: float
    _awake: float = 0.0
    _looked: float | None = None
    _last_signals: dict[Member, float] = field(default_factory=dict)

    def look(self, at: float) -> None:
        """It is `at`, in seconds of the launcher's clock."""
        if self._looked is not None:
            self._awake += min(at - self._looked, _STEP)
        self._looked = at

    def take_signal(self, member: Member) -> None:
        """Note that the member runs now. It is watched from its first liveness signal on."""
        self._last_signals[member] = self._awake

    def forget(self, member: Member) -> None:
        """The member has ended, or is about to: its silence means nothing."""
        self._last_signals.pop(member, None)

    def is_silent(self, member: Member) -> bool:
        """Return whether this member, alone in its place, has been silent for longer than `patience`."""
        return self._last_signals.get(member, self._awake) + self.patience < self._awake

    def has_hung(self, member: Member, other: Member) -> bool:
        """Return whether to give up this member of a pair: it is silent, and the other one is not."""
        silent_from = self._last_signals.get(member, self._awake) + self.patience
        return silent_from < self._last_signals.get(other, 0.0)
