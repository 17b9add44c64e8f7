"""What gets a row of a sparse table, and what loses it: the `entry` of a table.

    CountFilterEntry(3)                                    a row from the third push on
    TTLEntry(steps=10_000) & CapacityEntry(rows=1_000_000) forgotten rows go, and the table stays small

Everything here is a definition. psfleet.tables.sparse does what it says, as a function of the pushes alone.
"""

import functools
import math
from dataclasses import astuple, dataclass
from typing import Any, Literal, TypeVar

from psfleet.errors import ConfigError
from psfleet.rules.eviction_policy import LRU, EvictionPolicy, check_policy
from psfleet.rules.finding_rules import POLICIES, find, make, reference_of

__all__ = [
    "CapacityEntry",
    "CountFilterEntry",
    "Entries",
    "Entry",
    "EvictionStreamEntry",
    "ProbabilityEntry",
    "ShowClickEntry",
    "TTLEntry",
]
"""What scripts name: psfleet.entry has all of these."""


T = TypeVar("T")


class _SingleEntry:
    """One of several things that an entry says."""

    __slots__ = ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What the entry consists of."""
        return (self,)

    def __and__(self, other: "Entry") -> "Entries":
        """Both."""
        return Entries((*self.parts, *other.parts))

    def values(self) -> dict[str, float]:
        """What `make_entry` needs beside the kind: by the names of `_NUMBERS`, which files have."""
        given: Any = astuple(self)  # type: ignore[call-overload]  # every part is a dataclass
        names = _NUMBERS[type(self)]
        numbers = [float(value) for value in given if not isinstance(value, str)]
        return dict(zip(names, numbers, strict=True))


@dataclass(frozen=True, slots=True)
class ProbabilityEntry(_SingleEntry):
    """Each push that names an id without a row gives it one with this probability.

    The draw is a hash of id, table, seed and the table's step: the same on any number of servers,
    and once more after a restart.

    Attributes:
        probability: In (0, 1].
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigError(
                f"the probability of an entry is {self.probability}; "
                "it must be above 0 and at most 1"
            )

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return "probability"


@dataclass(frozen=True, slots=True)
class CountFilterEntry(_SingleEntry):
    """An id gets its row with its `count_filter`-th push, which is the first to update it.

    Earlier pushes are counted and otherwise dropped; a pull gives the id's first values. In sync mode
    a round counts once. What is known of ids without a row takes about 40 bytes each.

    Attributes:
        count_filter: At least 1; 1 lets every id in.
        candidates: Ids without a row that the whole table remembers at most, in equal parts on its
            servers; beyond that those that were pushed the longest time ago are forgotten.
    """

    count_filter: int
    candidates: int = 1 << 24

    def __post_init__(self) -> None:
        if not 1 <= self.count_filter < 2**31:
            raise ConfigError(
                f"the count_filter of an entry is {self.count_filter}; it must be at least 1"
            )
        if not 1 <= self.candidates < 2**31:
            raise ConfigError(
                f"the candidates of an entry are {self.candidates}; it must be at least 1"
            )

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return "count_filter"


@dataclass(frozen=True, slots=True)
class ShowClickEntry(_SingleEntry):
    """Rows know how often they were shown and clicked; `shrink` removes those that are worth little.

    A row's score is nonclk_coeff * (shows - clicks) + click_coeff * clicks. Each `shrink` multiplies
    shows and clicks by decay_rate and removes rows whose score is then below delete_threshold, and those
    that no push has named since the delete_after_unseen-th `shrink` before it.

    Attributes:
        show_name: Input of the program that says for each sample how often it was shown. Pushes of a
            table bring the sums for each id as two more columns beside the gradient.
        click_name: Input that says how often it was clicked.
        nonclk_coeff: Worth of a show without a click.
        click_coeff: Worth of a click.
        decay_rate: In (0, 1].
        delete_threshold: A score.
        delete_after_unseen: A number of shrinks, at least 1.
    """

    show_name: str
    click_name: str
    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay_rate: float = 0.98
    delete_threshold: float = 0.8
    delete_after_unseen: int = 30

    def __post_init__(self) -> None:
        for name in (self.show_name, self.click_name):
            if not name or ":" in name or "+" in name:
                raise ConfigError(
                    f"an input of ShowClickEntry is {name!r}; it must have a name without : and +"
                )
        for name in ("nonclk_coeff", "click_coeff", "delete_threshold"):
            if not math.isfinite(value := getattr(self, name)):
                raise ConfigError(f"the {name} of an entry is {value!r}; it must be finite")
        if not 0 < self.decay_rate <= 1:
            raise ConfigError(
                f"the decay_rate of an entry is {self.decay_rate}; it must be above 0 and at most 1"
            )
        if not 1 <= self.delete_after_unseen < 2**31:
            raise ConfigError(
                f"delete_after_unseen of an entry is {self.delete_after_unseen}; use 1 to 2**31 - 1"
            )

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return f"show_click:{self.show_name}:{self.click_name}"


@dataclass(frozen=True, slots=True)
class TTLEntry(_SingleEntry):
    """Rows that no push names for some time go, and so do ids that wait for a row.

    Attributes:
        steps: Updates of the table, at most 2**30; 0: no limit. A row goes between `steps` and 9/8 of
            `steps` after its last push, at a step that its id decides: the same on any number of servers.
        seconds: Time in which the servers run; 0: no limit. Looked at 16 times in as many seconds.
    """

    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.steps <= 2**30:
            raise ConfigError(f"the steps of a TTLEntry are {self.steps}; use 1 to 2**30")
        if not 0 <= self.seconds < float("inf"):
            raise ConfigError(f"the seconds of a TTLEntry are {self.seconds}; use a number above 0")
        if not self.steps and not self.seconds:
            raise ConfigError("a TTLEntry needs steps or seconds; both are 0")

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return "ttl"


@dataclass(frozen=True, slots=True)
class CapacityEntry(_SingleEntry):
    """The table holds so many rows at most, or as many as fit into so much memory.

    Attributes:
        rows: Of the whole table, in equal parts on its servers, rounded up; 0: no limit.
        bytes: Memory of the whole table with state and index, likewise; 0: no limit.
        full: What becomes of a push that brings more. "evict": rows go as `policy` says, at least a
            sixteenth of the capacity at a time. "refuse": the push is refused whole.
            With neither rows nor bytes, "evict" means: when the server's memory is used up.
        policy: Which rows go first, of psfleet.entry or a module of yours, or the name of one. LRU: those
            that were pushed the longest time ago, of equally old ones those whose ids have the smallest
            hash.
    """

    rows: int = 0
    bytes: int = 0
    full: Literal["evict", "refuse"] = "evict"
    policy: EvictionPolicy | str = "lru"

    def __post_init__(self) -> None:
        if self.full not in ("evict", "refuse"):
            raise ConfigError(f"full of a CapacityEntry is {self.full!r}; use evict or refuse")
        if not 0 <= self.rows < 2**63 or not 0 <= self.bytes < 2**63:
            raise ConfigError(
                f"a CapacityEntry has {self.rows} rows and {self.bytes} bytes; use positive numbers"
            )
        if self.full == "refuse" and not self.rows and not self.bytes:
            raise ConfigError("a CapacityEntry that refuses needs rows or bytes; both are 0")
        if isinstance(self.policy, str):
            named = find(POLICIES, EvictionPolicy.word, self.policy)()
            object.__setattr__(self, "policy", named)
        self._check_policy()

    def _check_policy(self) -> None:
        if not isinstance(self.policy, EvictionPolicy):
            raise ConfigError(
                f"the policy of a CapacityEntry is {self.policy!r}; use lru, lfu, decayed or an "
                "EvictionPolicy of psfleet.entry"
            )
        check_policy(self.policy)
        if self.full == "refuse" and self.policy != LRU():
            raise ConfigError(
                f"a CapacityEntry that refuses has the policy {self.policy}; it evicts no rows, leave it out"
            )

    @property
    def evicts(self) -> bool:
        """Whether rows go when the table is full."""
        return self.full == "evict"

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        assert isinstance(self.policy, EvictionPolicy)
        return f"capacity:{self.full}" + (
            "" if self.policy == LRU() else f":{reference_of(self.policy)}"
        )

    def values(self) -> dict[str, float]:
        """What `make_entry` needs beside the kind."""
        assert isinstance(self.policy, EvictionPolicy)
        numbers = self.policy.hyperparameters()
        return {"rows": float(self.rows), "bytes": float(self.bytes)} | {
            _POLICY + name: number for name, number in numbers.items()
        }


@dataclass(frozen=True, slots=True)
class EvictionStreamEntry(_SingleEntry):
    """Servers remember the ids that expiry, capacity and `shrink` removed last, for `fleet.evictions`.

    Attributes:
        keep: Ids of the whole table that are remembered, in equal parts on its servers, rounded up; 17
            bytes each.
    """

    keep: int = 1 << 20

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= 2**28:
            raise ConfigError(f"keep of an EvictionStreamEntry is {self.keep}; use 1 to 2**28")

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return "eviction_stream"


@dataclass(frozen=True, slots=True)
class Entries(_SingleEntry):
    """Several at once, made by `&`.

    Attributes:
        several: One of a kind each; ProbabilityEntry and CountFilterEntry exclude each other.
    """

    several: tuple[Any, ...]

    def __post_init__(self) -> None:
        kinds = [type(part) for part in self.several]
        doubled = len(set(kinds)) < len(kinds)
        if doubled or {ProbabilityEntry, CountFilterEntry} <= set(kinds):
            raise ConfigError(
                f"an entry joins {', '.join(kind.__name__ for kind in kinds)}; use each at most "
                "once, and only one of ProbabilityEntry and CountFilterEntry"
            )

    @property
    def parts(self) -> tuple[Any, ...]:
        """What the entry consists of."""
        return self.several

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return "+".join(part.kind for part in self.several)

    def values(self) -> dict[str, float]:
        """What `make_entry` needs beside the kind."""
        return {name: value for part in self.several for name, value in part.values().items()}


Entry = (
    ProbabilityEntry
    | CountFilterEntry
    | ShowClickEntry
    | TTLEntry
    | CapacityEntry
    | EvictionStreamEntry
    | Entries
)

# In files and on the wire an entry is its kind, the words after it, and numbers under these names. Words
# and numbers are told apart by their type and come in the order of the class; those of a capacity are the
# last ones, and the numbers of its policy follow under their own names.
_KINDS: dict[str, type[Any]] = {
    "probability": ProbabilityEntry,
    "count_filter": CountFilterEntry,
    "show_click": ShowClickEntry,
    "ttl": TTLEntry,
    "capacity": CapacityEntry,
    "eviction_stream": EvictionStreamEntry,
}
_NUMBERS: dict[type[Any], tuple[str, ...]] = {
    ProbabilityEntry: ("probability",),
    CountFilterEntry: ("count_filter", "candidates"),
    ShowClickEntry: (
        "nonclk_coeff",
        "click_coeff",
        "decay_rate",
        "delete_threshold",
        "delete_after_unseen",
    ),
    TTLEntry: ("steps", "seconds"),
    CapacityEntry: ("rows", "bytes"),
    EvictionStreamEntry: ("evicted_ids",),
}
_WORDS = {"show_click": (2,), "capacity": (1, 2)}
_WHOLE = (
    "count_filter",
    "candidates",
    "delete_after_unseen",
    "steps",
    "rows",
    "bytes",
    "evicted_ids",
)
_POLICY = "policy."  # begins the names of a policy's numbers


def part_of(entry: "Entry | None", kind: type[T]) -> T | None:
    """The part of that kind, if the entry has one."""
    parts = () if entry is None else entry.parts
    return next((part for part in parts if isinstance(part, kind)), None)


def make_entry(kind: str, values: dict[str, float]) -> Entry | None:
    """The entry of that kind; None for the kind ''.

    Raises:
        ConfigError: The kind is unknown or the values are not its own.
    """
    if not kind:
        return None
    left = dict(values)
    parts = [_make_part(part, left) for part in kind.split("+")]
    if left:
        raise ConfigError(f"entry {kind!r} has no {sorted(left)}")
    entry: Entry = functools.reduce(lambda a, b: a & b, parts)
    return entry


def _make_part(kind: str, values: dict[str, float]) -> Any:
    """One part, whose own values are taken away."""
    name, *words = kind.split(":")
    if name not in _KINDS or len(words) not in _WORDS.get(name, (0,)):
        raise ConfigError(f"entry {kind!r} is unknown; use one of {', '.join(sorted(_KINDS))}")
    own = _NUMBERS[_KINDS[name]]
    found: dict[str, Any] = {key: values.pop(key) for key in own if key in values}
    if len(found) != len(own):
        raise ConfigError(f"entry {kind!r} with {sorted(found)} is unknown; it needs {sorted(own)}")
    for key in set(own).intersection(_WHOLE):
        if not float(found[key]).is_integer():
            raise ConfigError(f"{key} of entry {kind!r} is {found[key]}; it must be a whole number")
        found[key] = int(found[key])
    numbers = list(found.values())
    if name != "capacity":
        return _KINDS[name](*words, *numbers)
    given = {key: values.pop(key) for key in [*values] if key.startswith(_POLICY)}
    hyperparameters = {key.removeprefix(_POLICY): value for key, value in given.items()}
    found["full"], reference, *_ = (*words, "lru")
    found["policy"] = make(POLICIES, EvictionPolicy.word, reference, hyperparameters)
    return CapacityEntry(**found)
