"""Retries of a call after a failed attempt: another attempt, or the end of the call.

Pure: errors and times come in, decisions come out.
"""

from dataclasses import dataclass

from psfleet.core.base.errors import (
    LaneLost,
    Later,
    NoRoom,
    NotReady,
    PsfleetError,
    ServerUnavailable,
)
from psfleet.core.base.settings.environment import Environment

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
_MOMENT = 0.002  # seconds before a push is sent again that came too early


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits of a worker's waits, in seconds.

    Attributes:
        wait: Limit for other workers: rounds, barriers, reductions.
        reply: Limit for a server that has the call and only has to work, or is there and says nothing, as
            when it is stopped.
        outage: Limit for a server that cannot be reached, before it is given up.
        start: Each of these at the first contact, when the fleet is still starting.
        leave: The same for the last message of a worker, that it leaves. A server that answers, but is
            not ready, has started again and is given `outage`.
        room: Limit for a server whose disk is full.
    """

    wait: float = 600.0
    reply: float = 120.0
    outage: float = 10.0
    start: float = 120.0
    leave: float = 1.0
    room: float = 600.0

    @classmethod
    def of(cls, environment: Environment) -> "Patience":
        """Return the usual limits; servers that keep a log come back when they have died."""
        if not environment.keeps_log:
            # A standby takes over within a second, unless the host is busy.
            return cls(outage=30.0, leave=5.0) if environment.replicas else cls()
        return cls(reply=300.0, outage=120.0, leave=15.0)


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Make another attempt.

    Attributes:
        pause: Seconds to wait before.
        answered: The server has answered and wants the same again; else it may never have got the call,
            and shared memory cannot be relied on: the tensors go into the request.
        lost: The server cannot be reached: the pause ends when the connection is back.
    """

    pause: float = 0.0
    answered: bool = False
    lost: bool = False


class Retries:
    """The attempts at one call. What ends it is raised.

    Args:
        outage: Time for which it may be out of reach.
        patience: Time limits for a server that is not ready, or has no room.
        now: Time of the first attempt, in seconds.

    Attributes:
        deadline: Time at which the call is given up.
        away: Seconds for which the server has been out of reach, or has had no room.
    """

    def __init__(self, seconds: float, outage: float, patience: Patience, now: float) -> None:
        self.deadline = now + seconds
        self.away = 0.0
        self._began = now
        self._seconds = seconds
        self._outage = outage
        self._patience = patience
        self._pause = _FIRST_PAUSE
        self._lost: float | None = None  # since when it cannot be reached, or has not been ready
        self._unready = False  # it answers, and cannot work yet
        self._answered = False  # it has been so
        self._full: float | None = None  # since when it has had no room

    def after(
        self, error: PsfleetError, now: float, *, inline: bool, closing: bool, silent: bool = False
    ) -> NextAttempt:
        """Decide on the next attempt after one that ended with this error at this time.

        `silent`: The server accepts connections and says nothing. Its process may be stopped, and gRPC has
        closed the connection meanwhile: it has the time of a reply, not of an outage.
        """
        match error:
            case LaneLost() if not inline:
                return NextAttempt()
            case Later() if not closing and now < self.deadline:
                return NextAttempt(_MOMENT, answered=True)
            case NoRoom():
                return self._without_room(error, now, closing)
            case ServerUnavailable() | NotReady():
                return self._without_server(error, now, closing, silent)
        raise error

    def _without_room(self, error: NoRoom, now: float, closing: bool) -> NextAttempt:
        self._full = now if self._full is None else self._full
        self.away = now - self._full
        if closing or self.away >= self._patience.room:
            raise error
        self._lost = None
        self.deadline = now + self._seconds  # it has answered, and did no work
        return NextAttempt(self._next_pause(), answered=True)

    def _without_server(
        self, error: PsfleetError, now: float, closing: bool, silent: bool
    ) -> NextAttempt:
        if silent and now < self.deadline and not closing:
            self._lost = None
            return NextAttempt(self._next_pause(), lost=True)
        unready = isinstance(error, NotReady)
        if self._lost is None or unready != self._unready:
            self._lost, self._unready = now, unready
        self.away = now - (self._began if silent else self._lost)
        outage = max(self._outage, self._patience.outage) if unready else self._outage
        if closing or now >= min(self.deadline, self._lost + outage):
            raise error
        if unready and not self._answered:
            self._answered, self._pause = True, _FIRST_PAUSE  # it is back, and ready in a moment
        return NextAttempt(self._next_pause(), lost=not unready)

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause
