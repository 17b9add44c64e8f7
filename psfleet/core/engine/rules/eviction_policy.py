"""Eviction policies: a policy is one score function; when a table is full, low scores go first."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from psfleet.core.base.errors import RuleError
from psfleet.core.base.validation.annotations import Range
from psfleet.core.engine.rules.finding_rules import POLICIES, NamedDefinition
from psfleet.core.engine.rules.rule import fault_of

_COUNTERS = ("age", "clicks", "frequency", "shows")


@dataclass(frozen=True)
class EvictionPolicy(NamedDefinition):
    """The rows with the lowest score go first; of equal scores those that were pushed the longest time ago.

    A subclass is a frozen dataclass whose fields are the hyperparameters, see NamedDefinition. Of equally old
    rows with equal scores those whose ids have the smallest hash go. A score that is not a number counts
    as minus infinity. Scores are compared as float32.
    """

    word: ClassVar[str] = "eviction policy"
    known: ClassVar[dict[str, Any]] = POLICIES

    def score(self) -> Callable[..., float] | None:
        """The score function; None: the age alone decides, the oldest row first.

        A module-level function that names the arguments that it needs and returns a number. They are float64:

            age: Updates of the table since the row was last pushed.
            frequency: Updates that have named the row, see `frequency_half_life`; it takes 4 bytes a row.
            shows, clicks: Scores of the row, in a table with a ShowClickEntry.
            h: The tuple made by `scalars`.

        Its source text goes into a kernel: it may use its arguments, numbers, `abs`, `max`, `min`,
        `math.sqrt`, `math.pow` and `math.copysign`.
        """
        raise NotImplementedError

    def scalars(self) -> tuple[float, ...]:
        """Numbers for the score function, made of the hyperparameters."""
        return ()

    @property
    def frequency_half_life(self) -> float:
        """Updates of the table in which a row's frequency falls to its half; 0: it never falls."""
        return 0.0

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the score function's arguments, in its order."""
        function = self.score()
        return () if function is None else tuple(inspect.signature(function).parameters)


def check_policy(policy: EvictionPolicy) -> None:
    """Refuse a policy whose score function kernels cannot take as it stands.

    Raises:
        RuleError: It uses a name or a form that kernels do not know, or an unknown argument.
    """
    function = policy.score()
    if function is None:
        return
    why = fault_of(function, numbers=True) or _wrong_argument(policy)
    if why:
        raise RuleError(f"eviction policy {policy.name!r}: the function {function.__name__} {why}")
    if not all(map(math.isfinite, policy.scalars())):
        raise RuleError(
            f"eviction policy {policy.name!r}: its scalars are {policy.scalars()}; they must be finite"
        )


def _wrong_argument(policy: EvictionPolicy) -> str:
    unknown = [name for name in policy.arguments if name not in (*_COUNTERS, "h")]
    if not unknown:
        return ""
    return f"asks for {unknown[0]!r}; it may ask for {', '.join(_COUNTERS)} and h"


def frequency(frequency: float) -> float:
    """The score of LFU and DecayedFrequency."""
    return frequency


@dataclass(frozen=True)
class LRU(EvictionPolicy):
    """Least recently used: the rows that were pushed the longest time ago go first."""

    name = "lru"

    def score(self) -> None:
        """Return None: the order is that of the last pushes (`tables.lifetime.AgeRanking`)."""


@dataclass(frozen=True)
class LFU(EvictionPolicy):
    """Least frequently used: the rows that the fewest updates have named go first."""

    name = "lfu"

    @override
    def score(self) -> Callable[..., float]:
        return frequency


@dataclass(frozen=True)
class DecayedFrequency(LFU):
    """Least frequently used, where an update counts the less the longer it is ago.

    Attributes:
        half_life: Updates of the table after which one counts half.
    """

    half_life: Annotated[float, Range(0, low_open=True)] = 100_000.0
    name = "decayed"

    @property
    @override
    def frequency_half_life(self) -> float:
        return self.half_life
