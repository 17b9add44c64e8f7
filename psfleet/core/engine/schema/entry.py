"""Admission and eviction of a sparse table's rows: the `entry` of a table, see docs/tables.md.

    CountFilterEntry(3)                                    a row from the third push on
    TTLEntry(steps=10_000) & CapacityEntry(rows=1_000_000) forgotten rows go, and the table stays small

Everything here is a definition. psfleet.core.engine.tables.sparse does what it says, as a function of the
pushes alone.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from typing_extensions import override

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import (
    Must,
    NonNegative,
    NonNegativeInt,
    Range,
    checked,
)
from psfleet.core.engine.rules.eviction_policy import (
    LFU,
    LRU,
    POLICIES,
    DecayedFrequency,
    EvictionPolicy,
    check_policy,
)
from psfleet.core.engine.rules.finding_rules import find, make, reference_of

__all__ = [
    "LFU",
    "LRU",
    "CapacityEntry",
    "CountFilterEntry",
    "DecayedFrequency",
    "Entries",
    "Entry",
    "EvictionPolicy",
    "EvictionStreamEntry",
    "ProbabilityEntry",
    "ShowClickEntry",
    "TTLEntry",
]


T = TypeVar("T")
_POLICY = "policy."  # begins the names of a policy's numbers


def _counts(number: int) -> bool:
    return 1 <= number < 2**31


E = TypeVar("E", bound="Entry")


@checked
class Entry:
    """Rule of admission or eviction of a sparse table's rows: one such rule, or several joined by `&`.

    A new one is a class below under `stored_as`; what it does is in psfleet.core.engine.tables.

    Attributes:
        admits: It decides which unknown ids get a row, see psfleet.core.engine.tables.admission; of these
            there is one.
        candidate: Values remembered of an id without a row, beside the time of its last push: by
            name an `int`, 0 to 2**32 - 1, or a `float`, float32. Tables and snapshots have a place
            for it. None: no id is remembered.
    """

    __slots__ = ()
    admits: ClassVar[bool] = False
    candidate: ClassVar[Mapping[str, type] | None] = None
    stored: ClassVar["StoredForm"]

    @property
    def parts(self) -> tuple["Entry", ...]:
        """Rules of which the entry consists."""
        return (self,)

    def __and__(self, other: "Entry") -> "Entries":
        """Both."""
        return Entries((*self.parts, *other.parts))

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return self.stored.name

    def values(self) -> dict[str, float]:
        """Return the numbers that `make_entry` needs beside the kind: by the names of its stored form."""
        fields: Any = astuple(self)  # type: ignore[call-overload]  # every part is a dataclass
        numbers = [float(value) for value in fields if not isinstance(value, str)]
        return dict(zip(self.stored.numbers, numbers, strict=True))

    @classmethod
    def read(cls, words: list[str], numbers: dict[str, Any], rest: dict[str, float]) -> "Entry":
        """The entry of a stored form; takes what else belongs to it from what is left of the values."""
        return cls(*words, *numbers.values())


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Form in which an entry is stored and travels: its kind, the words after it, and numbers.

    Attributes:
        entry: The class.
        name: Name of the kind.
        numbers: By the names that files have the type of each number, in the order of the class. In the
            class, words and numbers are told apart by their type.
        words: Largest number of words.
    """

    entry: type[Entry]
    name: str
    numbers: Mapping[str, type]
    words: tuple[int, ...]


FORMS: dict[str, StoredForm] = {}
"""Every entry that this process knows, by the name of its kind."""


def stored_as(
    name: str, *, words: tuple[int, ...] = (0,), **numbers: type
) -> Callable[[type[E]], type[E]]:
    """Make an entry known; a decorator above `@dataclass`. See StoredForm."""

    def make_known(entry: type[E]) -> type[E]:
        entry.stored = FORMS[name] = StoredForm(entry, name, numbers, words)
        return checked(entry)

    return make_known


@stored_as("probability", probability=float)
@dataclass(frozen=True, slots=True)
class ProbabilityEntry(Entry):
    """Each push that names an id without a row gives it one with this probability.

    The draw is a hash of id, table, seed and the table's step: the same on any number of servers,
    and once more after a restart.

    Attributes:
        probability: In (0, 1].
    """

    probability: Annotated[float, Range(0, 1, low_open=True)]
    admits = True


@stored_as("count_filter", count_filter=int, candidates=int)
@dataclass(frozen=True, slots=True)
class CountFilterEntry(Entry):
    """An id gets its row with its `count_filter`-th push, which is the first to update it.

    Earlier pushes are counted and otherwise dropped; a pull gives the id's first values. In sync mode
    a round counts once. What is known of ids without a row takes about 40 bytes each.

    Attributes:
        count_filter: At least 1; 1 lets every id in.
        candidates: Ids without a row that the whole table remembers at most, in equal parts on its
            servers; beyond that those that were pushed the longest time ago are forgotten.
    """

    count_filter: Annotated[int, Must(_counts, "a number of pushes; 1 gives every id its row")]
    candidates: Annotated[int, Range(1, 2**31 - 1)] = 1 << 24
    admits = True
    candidate: ClassVar[Mapping[str, type]] = {"counts": int}


@stored_as(
    "show_click",
    words=(2,),
    nonclk_coeff=float,
    click_coeff=float,
    decay_rate=float,
    delete_threshold=float,
    delete_after_unseen=int,
)
@dataclass(frozen=True, slots=True)
class ShowClickEntry(Entry):
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
    decay_rate: Annotated[float, Range(0, 1, low_open=True)] = 0.98
    delete_threshold: float = 0.8
    delete_after_unseen: Annotated[int, Range(1, 2**31 - 1)] = 30

    def __post_init__(self) -> None:
        for name in (self.show_name, self.click_name):
            if not name or ":" in name or "+" in name:
                raise ConfigError(
                    f"an input of ShowClickEntry is {name!r}; it must have a name without : and +"
                )

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return f"show_click:{self.show_name}:{self.click_name}"


@stored_as("ttl", steps=int, seconds=float)
@dataclass(frozen=True, slots=True)
class TTLEntry(Entry):
    """Rows that no push names for some time go, and so do ids that wait for a row.

    Attributes:
        steps: Updates of the table, at most 2**30; 0: no limit. A row goes between `steps` and 9/8 of
            `steps` after its last push, at a step that its id decides: the same on any number of servers.
        seconds: Time in which the servers run; 0: no limit. Looked at 16 times in as many seconds.
    """

    steps: Annotated[int, Range(0, 2**30)] = 0
    seconds: NonNegative = 0.0

    def __post_init__(self) -> None:
        if not self.steps and not self.seconds:
            raise ConfigError("a TTLEntry needs steps or seconds; both are 0")


@stored_as("capacity", words=(1, 2), rows=int, bytes=int)
@dataclass(frozen=True, slots=True)
class CapacityEntry(Entry):
    """The table holds so many rows at most, or as many as fit into so much memory.

    Attributes:
        rows: Rows of the whole table, in equal parts on its servers, rounded up; 0: no limit.
        bytes: Memory of the whole table with state and index, likewise; 0: no limit.
        full: Handling of a push that brings more. "evict": rows go as `policy` says, at least a
            sixteenth of the capacity at a time. "refuse": the push is refused whole.
            With neither rows nor bytes, "evict" means: when the server's memory is used up.
        policy: Policy of eviction, of psfleet.core.engine.schema.entry or a module of yours, or the name of
            one. LRU: those that were pushed the longest time ago, of equally old ones those whose ids have
            the smallest hash.
    """

    rows: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    full: Literal["evict", "refuse"] = "evict"
    policy: EvictionPolicy | str = "lru"

    def __post_init__(self) -> None:
        if self.full == "refuse" and not self.rows and not self.bytes:
            raise ConfigError("a CapacityEntry that refuses needs rows or bytes; both are 0")
        if isinstance(self.policy, str):
            policy = find(POLICIES, EvictionPolicy.word, self.policy)()
            object.__setattr__(self, "policy", policy)
        self._check_policy()

    def _check_policy(self) -> None:
        assert isinstance(self.policy, EvictionPolicy)
        check_policy(self.policy)
        if self.full == "refuse" and self.policy != LRU():
            raise ConfigError(
                f"a CapacityEntry that refuses has the policy {self.policy}; it evicts no rows, leave it out"
            )

    @property
    def evicts(self) -> bool:
        """True if rows are evicted when the table is full."""
        return self.full == "evict"

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        assert isinstance(self.policy, EvictionPolicy)
        return f"capacity:{self.full}" + (
            "" if self.policy == LRU() else f":{reference_of(self.policy)}"
        )

    def values(self) -> dict[str, float]:
        """Return the values as any entry does, and the numbers of the policy under their own names."""
        assert isinstance(self.policy, EvictionPolicy)
        numbers = self.policy.hyperparameters()
        return {"rows": float(self.rows), "bytes": float(self.bytes)} | {
            _POLICY + name: number for name, number in numbers.items()
        }

    @classmethod
    @override
    def read(cls, words: list[str], numbers: dict[str, Any], rest: dict[str, float]) -> Entry:
        full, reference, *_ = (*words, "lru")
        policy_values = {key: rest.pop(key) for key in [*rest] if key.startswith(_POLICY)}
        hyperparameters = {key.removeprefix(_POLICY): value for key, value in policy_values.items()}
        policy = make(POLICIES, EvictionPolicy.word, reference, hyperparameters)
        return cls(**numbers, full=cast(Any, full), policy=policy)


@stored_as("eviction_stream", evicted_ids=int)
@dataclass(frozen=True, slots=True)
class EvictionStreamEntry(Entry):
    """Servers remember the ids that expiry, capacity and `shrink` removed last, for `fleet.evictions`.

    Attributes:
        keep: Ids of the whole table that are remembered, in equal parts on its servers, rounded up; 17
            bytes each.
    """

    keep: Annotated[int, Range(1, 2**28)] = 1 << 20


@checked
@dataclass(frozen=True, slots=True)
class Entries(Entry):
    """Several at once, made by `&`.

    Attributes:
        several: One of a kind each; those that admit ids exclude each other.
    """

    several: tuple[Entry, ...]

    def __post_init__(self) -> None:
        kinds = [type(part) for part in self.several]
        if len(set(kinds)) < len(kinds) or sum(kind.admits for kind in kinds) > 1:
            admitting = [form.entry.__name__ for form in FORMS.values() if form.entry.admits]
            raise ConfigError(
                f"an entry joins {', '.join(kind.__name__ for kind in kinds)}; use each at most "
                f"once, and only one of {', '.join(admitting[:-1])} and {admitting[-1]}"
            )

    @property
    def parts(self) -> tuple[Entry, ...]:
        """Rules of which the entry consists."""
        return self.several

    @property
    def kind(self) -> str:
        """Its name in messages and checkpoints."""
        return "+".join(part.kind for part in self.several)

    def values(self) -> dict[str, float]:
        """Return the numbers that `make_entry` needs beside the kind."""
        return {name: value for part in self.several for name, value in part.values().items()}


def part_of(entry: Entry | None, kind: type[T]) -> T | None:
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
    remaining = dict(values)
    parts = [_make_part(part, remaining) for part in kind.split("+")]
    if remaining:
        raise ConfigError(f"entry {kind!r} has no {sorted(remaining)}")
    return functools.reduce(lambda a, b: a & b, parts)


def _make_part(kind: str, values: dict[str, float]) -> Entry:
    """One part, whose own values are taken away."""
    name, *words = kind.split(":")
    form = FORMS.get(name)
    if form is None or len(words) not in form.words:
        raise ConfigError(f"entry {kind!r} is unknown; use one of {', '.join(sorted(FORMS))}")
    numbers: dict[str, Any] = {key: values.pop(key) for key in form.numbers if key in values}
    if len(numbers) != len(form.numbers):
        raise ConfigError(
            f"entry {kind!r} with {sorted(numbers)} is unknown; it needs {sorted(form.numbers)}"
        )
    for key, of in form.numbers.items():
        if of is int:
            if not float(numbers[key]).is_integer():
                raise ConfigError(
                    f"{key} of entry {kind!r} is {numbers[key]}; it must be a whole number"
                )
            numbers[key] = int(numbers[key])
    return form.entry.read(words, numbers, values)
