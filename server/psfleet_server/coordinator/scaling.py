"""Another number of servers that is wanted from outside, and the moment to get it."""

from dataclasses import dataclass

from psfleet.errors import rows_move
from psfleet_server.coordinator.coordinator_messages import Decision, TermStarted


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """The fleet is to have these servers. Its `number` grows."""

    number: int
    endpoints: tuple[str, ...]


@dataclass
class Scaling:
    """The servers that there are, and are to be.

    Rows move while all workers have come to a collective, with nothing under way. It ends once the number of
    servers has changed, or has not. Nobody comes into the fleet or leaves it meanwhile.

    Attributes:
        endpoints: Where all servers are, if their number has changed since the fleet started.
        request: The last request; callers set it.
        moving: The request that is being carried out.
        done: Number of the last request that was carried out, or given up.
    """

    endpoints: tuple[str, ...] = ()
    request: ScaleRequest | None = None
    moving: ScaleRequest | None = None
    done: int = 0

    @property
    def is_due(self) -> bool:
        """A request waits to be carried out."""
        return self.moving is None and self.request is not None and self.request.number > self.done

    def admit(self, decision: Decision) -> None:
        """Refuse a decision while rows move: what server 0 is then goes into its next log."""
        if self.moving is not None and not isinstance(decision, TermStarted):
            raise rows_move(0)

    def begin(self) -> None:
        """All workers are there; none of them is answered yet."""
        self.moving = self.request

    def end(self, endpoints: tuple[str, ...] = ()) -> None:
        """The fleet has these servers now; empty: the same as before."""
        assert self.moving is not None
        self.done, self.moving = self.moving.number, None
        self.endpoints = endpoints or self.endpoints
