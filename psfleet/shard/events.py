"""What happens to a shard, and what it asks its shell to do about it.

A `call` is whatever the shell uses to name an open request; the shard only hands it back.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from psfleet.errors import PsfleetError
from psfleet.runtime import Gradient, Read

__all__ = ["Answer", "Call", "Event", "Expire", "Instruction", "Join", "Leave", "Mode", "Outcome",
           "Pull", "Push", "Refuse", "Serve"]

Call = Hashable
Mode = Literal["sync", "async"]
Outcome = Literal["applied", "held"]


@dataclass(frozen=True, slots=True)
class Join:
    """A worker's life begins, or goes on after a rest. Answered with the last round or sequence."""

    worker: int
    incarnation: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker pushes no more after push `last`.

    With `rest` = n, the n-th rest of this life, it comes back once every other worker rests or has
    left too: that is how workers with unequal amounts of data meet at a barrier without holding back
    anyone's round.
    """

    worker: int
    incarnation: int
    last: int
    rest: int = 0


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradients for this shard: of its `sequence`-th push, or of round `sequence`.

    Sparse gradients carry unique ids; dense ones this server's slice. Every table of the push is
    named on every server, with no rows where none fall, so that all servers count the same steps.
    """

    worker: int
    incarnation: int
    sequence: int
    gradients: tuple[Gradient, ...]
    samples: int = 0
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker wants values.

    `commit` (sync mode): "every server holds my push of this round"; the pull waits for that round.
    """

    worker: int
    incarnation: int
    reads: tuple[Read, ...]
    commit: int = 0


@dataclass(frozen=True, slots=True)
class Expire:
    """The deadline of a waiting call has passed."""


Event = Join | Leave | Push | Pull | Expire


@dataclass(frozen=True, slots=True)
class Answer:
    """Reply to `call`: for a push its outcome, for join and leave a number."""

    call: Call
    outcome: Outcome | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Serve:
    """Read the tables for `call` (see Shard.read) and reply with the values."""

    call: Call
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reply to `call` with this error; nothing was changed."""

    call: Call
    error: PsfleetError


Instruction = Answer | Serve | Refuse
