"""Admission and eviction of a sparse table's rows: the `entry` of a table (docs/tables.md).

    CountFilterEntry(3)                                       a row from the third push on
    TTLEntry(steps=10_000) & CapacityEntry(rows=1_000_000)    remove old rows, and limit the number of rows

The classes here only define entries. psfleet.core.engine.tables.sparse carries them out, depending on nothing
but the pushes.
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
    """Rule for the admission or eviction of a sparse table's rows, or several rules joined by `&`.

    Example::

        layers.embedding(ids, [None, 16], is_distributed=True,
                         entry=CountFilterEntry(3) & TTLEntry(steps=100_000))

    To add a rule, write a class below under `stored_as`, and implement the rule in
    psfleet.core.engine.tables.

    Attributes:
        admits: True if the rule decides which unknown ids get a row (psfleet.core.engine.tables.admission).
            An entry has at most one such rule.
        candidate: Name and type of each value that tables and snapshots store for a candidate (an id without
            a row yet), besides the step of its last push: `int` (0 to 2**32 - 1) or `float` (float32). None
            if the rule has no candidates.
    """

    __slots__ = ()
    admits: ClassVar[bool] = False
    candidate: ClassVar[Mapping[str, type] | None] = None
    stored: ClassVar["StoredForm"]

    @property
    def parts(self) -> tuple["Entry", ...]:
        """The rules that were joined by `&`, or this rule alone."""
        return (self,)

    def __and__(self, other: "Entry") -> "Entries":
        """Join two entries into one that applies the rules of both."""
        return Entries((*self.parts, *other.parts))

    @property
    def kind(self) -> str:
        """Name of the entry (this rule) in messages and checkpoints, such as "count_filter"."""
        return self.stored.name

    def values(self) -> dict[str, float]:
        """Return the numbers of the entry, by their names in the stored form. `make_entry` takes them."""
        fields: Any = astuple(self)  # type: ignore[call-overload]  # every part is a dataclass
        numbers = [float(value) for value in fields if not isinstance(value, str)]
        return dict(zip(self.stored.numbers, numbers, strict=True))

    @classmethod
    def read(cls, words: list[str], numbers: dict[str, Any], rest: dict[str, float]) -> "Entry":
        """Make the entry from its stored form, such as "capacity:evict:lfu" and {"rows": 5, "bytes": 0}.

        Args:
            words: Words behind the kind, such as ["evict", "lfu"].
            numbers: Numbers of the form by name, in the order of the class's fields.
            rest: Stored numbers that no entry has used yet. A class that uses some of them removes them.
        """
        return cls(*words, *numbers.values())


@dataclass(frozen=True, slots=True)
class StoredForm:
    """Form in which an entry is stored and sent: "kind:word:word" and named numbers.

    For example, `CapacityEntry(rows=5, policy="lfu")` is "capacity:evict:lfu" with {"rows": 5, "bytes": 0}.

    Attributes:
        numbers: Type of each number by its name in files, in the order of the class's fields. The fields that
            are not texts are numbers.
        words: Allowed numbers of words behind the kind.
    """

    entry: type[Entry]
    name: str
    numbers: Mapping[str, type]
    words: tuple[int, ...]


FORMS: dict[str, StoredForm] = {}
"""Stored forms of all entries that this process knows, by the name of the kind."""


def stored_as(
    name: str, *, words: tuple[int, ...] = (0,), **numbers: type
) -> Callable[[type[E]], type[E]]:
    """Register an entry class with its StoredForm: a class decorator, above `@dataclass`."""

    def make_known(entry: type[E]) -> type[E]:
        entry.stored = FORMS[name] = StoredForm(entry, name, numbers, words)
        return checked(entry)

    return make_known


@stored_as("probability", probability=float)
@dataclass(frozen=True, slots=True)
class ProbabilityEntry(Entry):
    """Each push of an id that has no row gives the id a row with a fixed probability.

    The draw is a hash of id, table, seed and the table's step. So it does not depend on the number of
    servers, and a restarted server draws the same. `ProbabilityEntry(0.1)` gives an id a row after 10 pushes
    on average.

    Attributes:
        probability: Probability in (0, 1].
    """

    probability: Annotated[float, Range(0, 1, low_open=True)]
    admits = True


@stored_as("count_filter", count_filter=int, candidates=int)
@dataclass(frozen=True, slots=True)
class CountFilterEntry(Entry):
    """An id gets its row with its `count_filter`-th push, which is the first push to update the row.

    Earlier pushes are counted and otherwise dropped; a pull returns the id's initial values. In sync mode a
    round counts as one push. With `CountFilterEntry(3)`, ids that occur once or twice need no row.

    Attributes:
        count_filter: Number of pushes, at least 1. With 1 every id gets a row.
        candidates: Largest number of candidates (ids without a row) of the whole table, in equal parts on its
            servers. A candidate takes about 40 bytes. Above this number, the candidates with the oldest last
            push are dropped.
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
    """Rows count how often they were shown and clicked, and `shrink` removes rows with a low score.

        score = nonclk_coeff * (shows - clicks) + click_coeff * clicks

    Each `shrink` multiplies shows and clicks by decay_rate. It then removes the rows whose score is below
    delete_threshold, and the rows that no push has named since the delete_after_unseen-th `shrink` before it.

    Example::

        rows = layers.embedding(ids, [None, 16], is_distributed=True, entry=ShowClickEntry("show", "click"))

    Attributes:
        show_name: Input of the program with the number of shows of each sample. A push to the table has the
            sums for each id as two more columns behind the gradient.
        click_name: Input with the number of clicks of each sample.
        nonclk_coeff: Score of a show without a click.
        click_coeff: Score of a click.
        decay_rate: Factor on shows and clicks at each `shrink`, in (0, 1].
        delete_threshold: Lowest score that a row needs in order to stay.
        delete_after_unseen: Number of shrinks after which a row without a push is removed, at least 1.
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
        """Name of the entry in messages and checkpoints, followed by `show_name` and `click_name`."""
        return f"show_click:{self.show_name}:{self.click_name}"


@stored_as("ttl", steps=int, seconds=float)
@dataclass(frozen=True, slots=True)
class TTLEntry(Entry):
    """Rows and candidates (ids without a row) that no push has named for some time are removed.

    `TTLEntry(steps=100_000)` counts updates of the table, `TTLEntry(seconds=7 * 86400)` time.

    Attributes:
        steps: Number of updates of the table, at most 2**30, or 0 for no limit. A row is removed between
            `steps` and 9/8 of `steps` after its last push. The exact step depends on the row's id, and not on
            the number of servers.
        seconds: Seconds during which the servers run, or 0 for no limit. Checked every `seconds` / 16.
    """

    steps: Annotated[int, Range(0, 2**30)] = 0
    seconds: NonNegative = 0.0

    def __post_init__(self) -> None:
        if not self.steps and not self.seconds:
            raise ConfigError("a TTLEntry needs steps or seconds; both are 0")


@stored_as("capacity", words=(1, 2), rows=int, bytes=int)
@dataclass(frozen=True, slots=True)
class CapacityEntry(Entry):
    """Limit on the rows or bytes of a table, and the handling of pushes that exceed it.

    Example::

        CapacityEntry(rows=1_000_000, policy="lfu")     # evict the rows with the fewest updates
        CapacityEntry(bytes=64 << 30, full="refuse")    # refuse pushes that need more memory

    Attributes:
        rows: Largest number of rows of the whole table, or 0 for no limit. Each server gets an equal part,
            rounded up.
        bytes: Largest memory of the whole table, including optimizer state and index, or 0 for no limit. Each
            server gets an equal part, rounded up.
        full: Handling of a push that does not fit. With "evict", rows are evicted in the order of `policy`,
            at least 1/16 of the capacity at a time. With "refuse", the whole push is refused. With "evict"
            and neither rows nor bytes, rows are evicted when the server's memory is used up.
        policy: Eviction policy, or its name: "lru", "lfu", "decayed", or one from a module of yours. The
            default, "lru", evicts the rows with the oldest last push; of equally old rows, the rows whose ids
            have the smallest hash.
    """

    rows: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    full: Literal["evict", "refuse"] = "evict"
    policy: EvictionPolicy | str = "lru"

    def __post_init__(self) -> None:
        if self.full == "refuse" and not self.rows and not self.bytes:
            raise ConfigError("a CapacityEntry that refuses needs rows or bytes; both are 0")
        if isinstance(self.policy, str):
            # A frozen dataclass can only be changed by object.__setattr__.
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
        """Name of the entry in messages and checkpoints, such as "capacity:evict:lfu"."""
        assert isinstance(self.policy, EvictionPolicy)
        return f"capacity:{self.full}" + (
            "" if self.policy == LRU() else f":{reference_of(self.policy)}"
        )

    def values(self) -> dict[str, float]:
        """Return `rows`, `bytes`, and the numbers of the policy as `policy.NAME`."""
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
    """Servers remember the last ids that expiry, capacity and `shrink` have removed, for `fleet.evictions`.

    Attributes:
        keep: Number of ids that the whole table remembers, in equal parts on its servers, rounded up. An id
            takes 17 bytes.
    """

    keep: Annotated[int, Range(1, 2**28)] = 1 << 20


@checked
@dataclass(frozen=True, slots=True)
class Entries(Entry):
    """Several entries joined by `&`.

    Attributes:
        several: The entries, at most one of each class, and at most one that admits ids.
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
        """Single rules that the entry consists of."""
        return self.several

    @property
    def kind(self) -> str:
        """Name of the entry in messages and checkpoints: the kinds of its parts joined by "+"."""
        return "+".join(part.kind for part in self.several)

    def values(self) -> dict[str, float]:
        """Return the numbers of all parts, by their names in the stored form."""
        return {name: value for part in self.several for name, value in part.values().items()}


def part_of(entry: Entry | None, kind: type[T]) -> T | None:
    """Return the rule of this class in an entry, which may join several rules. None if there is none."""
    parts = () if entry is None else entry.parts
    return next((part for part in parts if isinstance(part, kind)), None)


def make_entry(kind: str, values: dict[str, float]) -> Entry | None:
    """Make an entry from its kind and its numbers, or return None for the kind "".

    Args:
        kind: Result of Entry.kind, such as "count_filter" or "ttl+capacity:evict".

    Raises:
        ConfigError: The kind is unknown, or it has other numbers.
    """
    if not kind:
        return None
    remaining = dict(values)
    # Each part removes its numbers from `remaining`, so that numbers of no part are noticed.
    parts = [_make_part(part, remaining) for part in kind.split("+")]
    if remaining:
        raise ConfigError(f"entry {kind!r} has no {sorted(remaining)}")
    return functools.reduce(lambda a, b: a & b, parts)


def _make_part(kind: str, values: dict[str, float]) -> Entry:
    """Make one part of an entry, and remove its numbers from `values`."""
    # "capacity:evict:lfu" -> name "capacity", words ["evict", "lfu"]
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
