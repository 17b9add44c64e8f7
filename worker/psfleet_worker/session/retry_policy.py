"""Retry policy of a worker's calls: whether, when and how to repeat a failed attempt.

    error of the attempt            next attempt                            given up
    LaneLost                        at once, tensors in the message         if they were there already
    Later (a push came too early)   after 2 ms, the same bytes              after `seconds` of the call
    NoRoom (the log's disk is full) after 10 ms, doubled up to 1 s          after `Patience.room`
    ServerUnavailable               the same pause, or the reconnect        after `outage` of the call*
      while its host accepts        the same pause                          after `seconds` of the call
    NotReady (it restarts)          the same pause                          after `Patience.outage` if longer*
    anything else                   none                                    at once

    *and at the latest after `seconds` of the call, which include its outages

A retry is safe because a push contains its sequence number: a server applies it only once. The policy is
pure: errors and times come in, decisions come out. `ServerClient` makes the attempts.
"""

from dataclasses import dataclass

from psfleet.core.base.errors import (
    ConfigError,
    LaneLost,
    Later,
    NoRoom,
    NotReady,
    PsfleetError,
    ServerUnavailable,
)
from psfleet.core.base.settings.environment import Environment

# Seconds. The first pauses are short, so that a call goes on soon after a standby has taken over, which takes
# less than a second; later ones spare a server that restarts. Other values have not been measured.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
# Seconds before a push that came too early is sent again. The server keeps no thread for it, and the marks of
# a snapshot, for which it waits, mostly come within milliseconds (decision 18).
_MOMENT = 0.002


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits of a worker's waits, in seconds.

    Attributes:
        wait: Limit of a wait for other workers: in rounds, barriers and reductions.
        reply: Limit for the reply of a server that has received the call, or that accepts connections but
            sends nothing (its process may be stopped). Outages during the call count too, so it must not be
            shorter than `outage` and `start`.
        outage: Limit for a server that cannot be reached.
        start: Limit for reply and outage at the first contact, when the fleet is still starting.
        leave: Limit for an unreachable server when a worker reports that it has finished. A server that
            replies NotReady has restarted, and gets `outage` seconds.
        room: Limit for a server whose disk is full.

    Raises:
        ConfigError: `reply` is shorter than `outage` or `start`, and would cut it off.
    """

    # Apart from `reply` (see __post_init__ and `of`), no number here or in `of` is derived or measured.
    wait: float = 600.0
    reply: float = 120.0
    outage: float = 10.0
    start: float = 120.0
    leave: float = 1.0
    room: float = 600.0

    def __post_init__(self) -> None:
        outage = max(self.outage, self.start)
        if self.reply < outage:
            raise ConfigError(
                f"a worker may wait {self.reply:g} seconds for a reply and {outage:g} for a server that "
                "cannot be reached; the former includes the latter, so make it as long"
            )

    @classmethod
    def of(cls, environment: Environment) -> "Patience":
        """Return the limits for a job. They are longer if a server that dies is replaced.

        A server with a log restarts and replays it. A standby takes over within a second, unless its host is
        busy. A server with neither is not replaced, so a worker gives up soon.
        """
        if not environment.keeps_log:
            return cls(outage=30.0, leave=5.0) if environment.replicas else cls()
        # A restart may take `outage` twice, until the server accepts connections and until it is ready, and a
        # minute is left for the reply.
        return cls(reply=300.0, outage=120.0, leave=15.0)


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Decision to make another attempt, and how.

    Attributes:
        pause: Seconds to wait before the attempt.
        answered: True if the server replied and wants the same message again. Otherwise the server may never
            have received the call, or may have restarted without the shared memory, so the tensors go into
            the message.
        lost: True if the server cannot be reached. The pause then ends early when the connection is back.
    """

    pause: float = 0.0
    answered: bool = False
    lost: bool = False


class Retries:
    """The failed attempts of one call so far, which determine whether there is another attempt.

    Args:
        seconds: Seconds until the call is given up while the server is reachable but does not reply.
        outage: Seconds until the call is given up while the server is unreachable.
        patience: Limits for a server that replies that it cannot handle the call yet: its attribute `room` if
            the server's disk is full, and `outage`, if that is longer than the argument, if the server is
            restarting.
        now: Time of the first attempt, in seconds.

    Attributes:
        deadline: Time at which the call is given up.
        away: Seconds for which the server has been unreachable, or its disk has been full.
    """

    def __init__(self, seconds: float, outage: float, patience: Patience, now: float) -> None:
        self.deadline = now + seconds
        self.away = 0.0
        self._began = now
        self._seconds = seconds
        self._outage = outage
        self._patience = patience
        self._pause = _FIRST_PAUSE
        self._lost: float | None = None  # time since which it cannot be reached, or is not ready
        self._unready = False  # True if `_lost` counts NotReady, False if unreachable
        self._answered = False  # True once it has replied NotReady
        self._full: float | None = None  # time since which its disk is full

    def after(
        self, error: PsfleetError, now: float, *, inline: bool, closing: bool, silent: bool = False
    ) -> NextAttempt:
        """Return the next attempt after a failed one, or raise `error` if the call is given up.

        Args:
            now: Time at which it failed, in seconds.
            inline: True if the message contained all tensors.
            closing: True if this process is closing its connection. No attempt that needs a pause is made
                then.
            silent: True if the server accepts connections but sends nothing. Its process may be stopped, and
                gRPC has closed the connection meanwhile. Such a server gets the time of a reply, not of an
                outage.
        """
        match error:
            case LaneLost() if not inline:
                return NextAttempt()
            case Later() if not closing and now < self.deadline:
                self._lost = (
                    None  # the server is reachable: a later outage is timed from its own beginning
                )
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
        # The server is reachable, and has not begun the work: an outage or a reply is timed from here on.
        # So only `Patience.room` limits the wait for a full disk.
        self._lost = None
        self.deadline = now + self._seconds
        return NextAttempt(self._next_pause(), answered=True)

    def _without_server(
        self, error: PsfleetError, now: float, closing: bool, silent: bool
    ) -> NextAttempt:
        # A stopped server is not unreachable. The time of an outage begins when its port is closed too.
        if silent and now < self.deadline and not closing:
            self._lost = None
            return NextAttempt(self._next_pause(), lost=True)
        # A restart has two phases, each with its own limit: first no connection, then a server that replays
        # its log and replies NotReady.
        unready = isinstance(error, NotReady)
        if self._lost is None or unready != self._unready:
            self._lost, self._unready = now, unready
        # A silent server is timed from the first attempt: its attempts so far have reset `_lost` (see above).
        self.away = now - (self._began if silent else self._lost)
        outage = max(self._outage, self._patience.outage) if unready else self._outage
        if closing or now >= min(self.deadline, self._lost + outage):
            raise error
        if unready and not self._answered:
            # The server is back, and will be ready soon: begin with short pauses again. Only once in a call,
            # so that a server that dies again and again in its replay is not called every 10 ms.
            self._answered, self._pause = True, _FIRST_PAUSE
        return NextAttempt(self._next_pause(), lost=not unready)

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause
