"""Eviction policies: the choice of the rows that a table with a CapacityEntry removes when it is full.

A policy is one score function; the rows with the lowest scores are removed first. LRU, LFU and
DecayedFrequency are built in. A user's policy is a subclass of `EvictionPolicy`.

The function is compiled into the kernels of kernels/sources/eviction.txt, which rank all rows of a full table
in one pass (decision 5).
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from psfleet.core.base.errors import RuleError
from psfleet.core.base.validation.annotations import Range
from psfleet.core.engine.rules.named_definition import NamedDefinition
from psfleet.core.engine.rules.rule import fault_of

POLICIES: dict[str, type["EvictionPolicy"]] = {}
"""All eviction policies that this process knows, by name."""
# Arguments that a score function may have, beside h.
_COUNTERS = ("age", "clicks", "frequency", "shows")


@dataclass(frozen=True)
class EvictionPolicy(NamedDefinition):
    """Base class of eviction policies: rows with the lowest scores are removed first.

    A subclass is a frozen dataclass whose fields are the hyperparameters::

        def clicked(clicks, shows):
            return (clicks + 1) / (shows + 10)

        @dataclass(frozen=True)
        class ClickRate(EvictionPolicy):
            name = "click_rate"

            def score(self):
                return clicked

    Scores are compared as float32, and NaN is below every number. Of rows with equal scores, the row with the
    oldest last push is removed first; of equally old rows, the row whose id has the smallest hash.
    """

    word: ClassVar[str] = "eviction policy"
    known: ClassVar[dict[str, Any]] = POLICIES

    def score(self) -> Callable[..., float] | None:
        """Return the score function, or None to remove the rows with the oldest push first.

        The function is defined at the top level of its module and returns a number. It takes any of these
        arguments, by name, in float64:

            age: Number of updates of the table since the row's last push.
            frequency: Number of updates that have named the row, decayed by `frequency_half_life`. A policy
            that takes it adds 4 bytes to each row.
            shows, clicks: Scores of the row, in a table with a ShowClickEntry.
            h: Tuple made by `scalars`.

        Its source is compiled into a kernel, so it may use only its arguments, numbers, `abs`, `max`, `min`,
        `math.sqrt`, `math.pow` and `math.copysign`.
        """
        raise NotImplementedError

    def scalars(self) -> tuple[float, ...]:
        """Compute h, the numbers for the score function, from the hyperparameters."""
        return ()

    @property
    def frequency_half_life(self) -> float:
        """Number of the table's updates after which a frequency has halved, or 0 if it never falls."""
        return 0.0

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the score function's arguments, in their order."""
        function = self.score()
        return () if function is None else tuple(inspect.signature(function).parameters)


def check_policy(policy: EvictionPolicy) -> None:
    """Refuse a policy whose score function cannot be compiled into kernels.

    Raises:
        RuleError: The function uses a name, statement or argument that kernels do not support.
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
    """Return the frequency as the score: the score function of LFU and DecayedFrequency."""
    return frequency


@dataclass(frozen=True)
class LRU(EvictionPolicy):
    """Least recently used: the rows with the oldest last push are removed first."""

    name = "lru"

    def score(self) -> None:
        """Return None, because age alone ranks the rows (eviction_choice.AgeRanking)."""


@dataclass(frozen=True)
class LFU(EvictionPolicy):
    """Least frequently used: the rows that the fewest updates have named are removed first."""

    name = "lfu"

    @override
    def score(self) -> Callable[..., float]:
        return frequency


@dataclass(frozen=True)
class DecayedFrequency(LFU):
    """Least frequently used, where older updates count less.

    Attributes:
        half_life: Number of the table's updates after which an update counts half.
    """

    half_life: Annotated[float, Range(0, low_open=True)] = 100_000.0
    name = "decayed"

    @property
    @override
    def frequency_half_life(self) -> float:
        return self.half_life
