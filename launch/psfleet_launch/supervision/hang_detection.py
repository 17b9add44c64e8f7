"""Which servers and standbys have hung: they live, but do not run.

Every one of them gives a sign of life on a pipe of its own a few times per second (psfleet_server.liveness).
Silence is counted in time that the launcher has itself been awake: if all was stopped and goes on, as
when a machine sleeps, nobody has been silent. Of a server and its standby only one is given up, and only
once the other has been heard after that: two that are silent may wake in any order, and whichever wakes
first has all that anybody was told. A server without a standby has nobody to compare it with; it is
silent if it was not heard while the launcher was awake for so long.

Pure, like the supervisor.
"""

from dataclasses import dataclass, field

from psfleet_launch.job.job_plan import Member

__all__ = ["HangDetector"]

_STEP = 0.5
"""Seconds, the most that count between two looks; the launcher looks twice as often."""


@dataclass
class HangDetector:
    """When each process was heard last.

    Attributes:
        patience: Seconds of silence after which a process counts as hung.
    """

    patience: float
    _awake: float = 0.0
    _looked: float | None = None
    _heard: dict[Member, float] = field(default_factory=dict)

    def look(self, at: float) -> None:
        """It is `at`, in seconds of the launcher's clock."""
        if self._looked is not None:
            self._awake += min(at - self._looked, _STEP)
        self._looked = at

    def heard(self, member: Member) -> None:
        """The member lives now. It is watched from its first sign of life on."""
        self._heard[member] = self._awake

    def forget(self, member: Member) -> None:
        """The member has ended, or is about to: its silence means nothing."""
        self._heard.pop(member, None)

    def is_silent(self, member: Member) -> bool:
        """Whether this member, alone in its place, has not been heard for so long."""
        return self._heard.get(member, self._awake) + self.patience < self._awake

    def has_hung(self, member: Member, other: Member) -> bool:
        """Whether to give up this member of a pair: it is silent, and the other one is not."""
        silent_from = self._heard.get(member, self._awake) + self.patience
        return silent_from < self._heard.get(other, 0.0)
