"""TableSpec: the definition of a table, equal on every server and worker that knows the table.

A definition is stored in snapshots, logs and messages. So an attribute that was added after version 1 of
snapshots is declared together with the field that stores it:

    precision: RowPrecision = later("float32", "precision", str, since=2)

The code that writes snapshots and messages follows this declaration. It leaves the field out while the
attribute has its default, so a table that does not use the attribute is stored as before, and older versions
of psfleet can read it.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, get_args

from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.base.settings.kinds import Device
from psfleet.core.base.validation.annotations import Range, check
from psfleet.core.engine.rules.eviction_policy import LRU, EvictionPolicy
from psfleet.core.engine.rules.rule import Rule, check_functions
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    Entry,
    EvictionStreamEntry,
    ShowClickEntry,
    part_of,
)

_Kind = Literal["dense", "sparse"]
RowPrecision = Literal["float32", "bfloat16", "bfloat16/bfloat16", "bfloat16/int8"]
"""Format of the weights of stored rows and, behind "/", of their state unless that is float32.

A slot may be stored in a larger format than this (psfleet.core.engine.rules.rule.Slot).
"""
ServerCount = Annotated[int, Range(1, 1024)]
"""Number of servers that hold a table."""
MAX_DIM = 1024  # largest width of a sparse row
MAX_NAME = 512  # bytes of a table's name
OWN = "psfleet/"  # begins the names of tables that psfleet makes for itself
MAX_AXES = 32  # most axes of a dense table: NumPy's limit before version 2
LARGEST = (2 - 2.0**-23) * 2.0**127  # largest finite float32
BLOCK = 4096  # dense values are dealt to servers in blocks of this many float32


@dataclass(frozen=True)
class LaterField:
    """Field that stores an attribute which was added to a definition after version 1 of snapshots.

    Attributes:
        name: Name of the field in snapshots and messages. The attribute may be renamed; the field may not.
        since: First version of snapshots that may have the field, or None if only messages have it.
        inside: Key of the object in a snapshot's JSON that contains the field, or empty for the top level. An
            object is stored with all of its fields or not at all.
    """

    name: str
    kind: type
    since: int | None
    inside: str = ""

    @property
    def key(self) -> str:
        """Key at the top level of a snapshot's JSON under which the field is stored."""
        return self.inside or self.name


def later(
    default: Any,
    name: str,
    kind: type,
    *,
    since: int | None,
    inside: str = "",
    compare: bool = True,
) -> Any:
    """Declare an attribute with a default, and the LaterField that stores it.

    In the protobuf message the field must be `optional` if 0, False or "" is a possible value and not the
    default.

    Args:
        default: Default of the attribute. An attribute that has it is not stored.
        name, kind, since, inside: As for LaterField.
        compare: False if definitions that differ only in this attribute are equal.
    """
    field = LaterField(name, kind, since, inside)
    return dataclasses.field(default=default, compare=compare, metadata={"later": field})


def later_fields(definition: Any) -> list[LaterField]:
    """Return the fields that were added to a definition's class after version 1 of snapshots, in order."""
    return [field for field, _ in _attributes(definition)]


def later_values(definition: Any) -> dict[LaterField, Any]:
    """Return the values to store for fields that were added after version 1 of snapshots (LaterField).

    A field is stored if it differs from its default, or if another field of the same object in the snapshot
    does (LaterField.inside).
    """
    values = {field: getattr(definition, of.name) for field, of in _attributes(definition)}
    keys = {field.key for field, of in _attributes(definition) if values[field] != of.default}
    return {field: value for field, value in values.items() if field.key in keys}


def arguments(definition: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments from stored values, by name. Unknown fields are ignored."""
    return {
        of.name: values[field.name] for field, of in _attributes(definition) if field.name in values
    }


def _attributes(definition: Any) -> Iterable[tuple[LaterField, dataclasses.Field[Any]]]:
    for of in dataclasses.fields(definition):
        if (field := of.metadata.get("later")) is not None:
            yield field, of


__all__ = [
    "BLOCK",
    "LARGEST",
    "MAX_AXES",
    "MAX_DIM",
    "MAX_NAME",
    "OWN",
    "DecaySpec",
    "Device",
    "InitializerSpec",
    "RowPrecision",
    "ServerCount",
    "TableSpec",
    "key_of",
]


@lru_cache(maxsize=4096)
def key_of(name: str) -> int:
    """Return the 64-bit number that identifies a table on the wire and seeds its initial rows.

    The number is a hash of the table's name, so every process can compute it.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class InitializerSpec:
    """Distribution of a table's initial values.

    A value is a function of seed, table, id and column alone, so every server gives a row the same values.

    Attributes:
        kind: Distribution of the values. `uniform` draws from [low, high). `normal` has mean `low` and
            standard deviation `high`. `truncated` is `normal` within two standard deviations of the mean.
            `constant` is always `low`.
        low, high: Numbers of the distribution.
    """

    kind: Literal["uniform", "normal", "truncated", "constant"] = "uniform"
    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in ("uniform", "normal", "truncated", "constant"):
            raise ConfigError(
                f"initializer {self.kind!r} is unknown; use uniform, normal, truncated or constant"
            )
        if not (abs(self.low) <= LARGEST and abs(self.high) <= LARGEST):
            raise ConfigError(
                f"initializer {self.kind!r} has the values {self.low!r} and {self.high!r}; "
                "they must be finite float32"
            )
        if self.kind in ("normal", "truncated") and self.high < 0:
            raise ConfigError(
                f"initializer {self.kind!r} has the deviation {self.high!r}; it must be at least 0"
            )


@dataclass(frozen=True, slots=True)
class DecaySpec:
    """Regularization that the server adds to the gradient: g + l2 * w + l1 * sign(w)."""

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("l1", self.l1), ("l2", self.l2)):
            if not abs(value) <= LARGEST:
                raise ConfigError(
                    f"the decay {name} of a table is {value!r}; it must be a finite float32"
                )


@dataclass(frozen=True)
class TableSpec:
    """Definition of a table: its weights, and the rule that updates them.

    Attributes:
        name: Name of the table, unique in the fleet.
        kind: `dense` (one array, divided into blocks over the servers) or `sparse` (rows by id).
        shape: Shape of a dense table's array, or (dim,) for a sparse table.
        rule: Update rule.
        decay: Regularization, applied on the server after the worker's clipping.
        initializer: Initial values of a sparse table's rows. A dense table's values are sent when it is
            created.
        seed: Seed of the initial rows.
        every_row: False to update only the pushed rows ("lazy"). True to update every other row too, with a
            zero gradient, as in a dense table. Sparse tables only.
        entry: Rules that decide which unknown ids of a push get a row, and which rows are removed. With None
            every id gets a row and no row is removed. Sparse tables only.
        device: Memory of the servers in which the table is stored, or None for each server's own setting.
        servers: Largest number of servers that hold the table, or None for all
            (psfleet.core.engine.shard.table_placement).
        first: First of these servers.
        precision: Format in which rows are stored; all arithmetic is float32. Sparse tables only.

    Definitions that differ only in `device`, `servers` or `first` are equal: a table stays where it was
    created.

    To add an attribute, declare it with `later` and the next version of snapshots, and add a field to
    TableSpec in protos/psfleet/v1/shard.proto. Code that stores or sends definitions needs no change.
    """

    name: str
    kind: _Kind
    shape: tuple[int, ...]
    rule: Rule
    decay: DecaySpec = field(default_factory=DecaySpec)
    initializer: InitializerSpec = field(default_factory=InitializerSpec)
    seed: int = 0
    every_row: bool = False
    entry: Entry | None = None
    device: Device | None = later(None, "device", str, since=None, compare=False)
    servers: int | None = later(None, "servers", int, since=2, inside="group", compare=False)
    first: int = later(0, "first", int, since=2, inside="group", compare=False)
    precision: RowPrecision = later("float32", "precision", str, since=2)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a table needs a name; it is ''")
        try:
            length = len(self.name.encode())
        except UnicodeEncodeError:
            raise ConfigError(
                f"table {self.name[:40]!r} has a name that is no text: half of a surrogate pair"
            ) from None
        if length > MAX_NAME:
            raise ConfigError(
                f"table {self.name[:40]!r}... has a name of {length} bytes; the limit is {MAX_NAME}"
            )
        if self.kind not in get_args(_Kind):
            raise ConfigError(
                f"table {self.name!r}: kind is {self.kind!r}; it must be dense or sparse"
            )
        if self.device is not None and self.device not in get_args(Device):
            raise ConfigError(
                f"table {self.name!r}: device is {self.device!r}; it must be "
                f"{' or '.join(get_args(Device))}"
            )
        # `check` converts the number, so store the result; a frozen dataclass needs object.__setattr__ for
        # that.
        servers = check(f"table {self.name!r}", "servers", self.servers, ServerCount | None)
        object.__setattr__(self, "servers", servers)
        if not 0 <= self.first < 2**31:
            raise ConfigError(
                f"table {self.name!r}: its first server is {self.first!r}; it must be in [0, 2**31)"
            )
        if servers is None:
            object.__setattr__(self, "first", 0)  # if all servers hold the table, none is the first
        if len(self.shape) > MAX_AXES:
            raise ShapeError(
                f"table {self.name!r} has {len(self.shape)} axes; the limit is {MAX_AXES}"
            )
        if any(n < 0 for n in self.shape):
            raise ShapeError(f"table {self.name!r}: shape {self.shape} has a negative extent")
        if self.kind == "sparse" and (len(self.shape) != 1 or not 1 <= self.shape[0] <= MAX_DIM):
            dim = self.shape[0] if len(self.shape) == 1 else self.shape
            raise ShapeError(f"table {self.name!r}: dim is {dim}, it must be 1 to {MAX_DIM}")
        if self.entry is not None and self.kind != "sparse":
            raise ConfigError(f"table {self.name!r} is dense; it has no rows for {self.entry}")
        check_functions(self.rule)
        self._check_precision()
        # A policy can rank rows only by numbers that the table counts.
        scores = {"shows", "clicks"}.intersection(self.policy.arguments)
        if scores and not self.pushed_scores:
            raise ConfigError(
                f"table {self.name!r}: the eviction policy {self.policy.name!r} asks for {min(scores)}, "
                "which the table does not count; join its entry with a ShowClickEntry"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"table {self.name!r}: seed is {self.seed}, it must be in [0, 2**63)")

    def _check_precision(self) -> None:
        """Refuse a precision that the table's rows cannot have, or that would change nothing."""
        if self.precision not in get_args(RowPrecision):
            raise ConfigError(
                f"table {self.name!r}: precision is {self.precision!r}; it must be one of "
                f"{', '.join(get_args(RowPrecision))}"
            )
        if self.precision == "float32":
            return
        if self.kind != "sparse":
            raise ConfigError(
                f"table {self.name!r} is dense, and dense tables are float32; precision="
                f"{self.precision!r} is for sparse tables"
            )
        if self.rule.counts:
            raise ConfigError(
                f"table {self.name!r}: the rule {self.rule.name!r} counts exactly, in float32; leave "
                f"precision={self.precision!r} out"
            )
        slots = self.rule.slots
        if "/" in self.precision and slots and all(s.smallest == "float32" for s in slots):
            raise ConfigError(
                f"table {self.name!r}: the state of {self.rule.name!r} cannot be rounded; use "
                f"precision='bfloat16' in place of {self.precision!r}"
            )

    @cached_property
    def key(self) -> int:
        """Number that identifies the table on the wire."""
        return key_of(self.name)

    @cached_property
    def size(self) -> int:
        """Number of values of a dense table, or of one row of a sparse table."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @cached_property
    def dim(self) -> int:
        """Width of a sparse row."""
        return self.shape[0]

    @property
    def slot_names(self) -> list[str]:
        """Names of the values that are stored for each weight: "value", then the rule's state slots."""
        return ["value", *(slot.name for slot in self.rule.slots)]

    @cached_property
    def policy(self) -> EvictionPolicy:
        """Policy that decides which rows of a full sparse table are evicted."""
        capacity = part_of(self.entry, CapacityEntry)
        policy = LRU() if capacity is None else capacity.policy
        assert isinstance(policy, EvictionPolicy)
        return policy

    @cached_property
    def pushed_scores(self) -> int:
        """Number of values behind each gradient of a push: shows and clicks with a ShowClickEntry, else 0."""
        return 0 if part_of(self.entry, ShowClickEntry) is None else 2

    @cached_property
    def counts_frequency(self) -> bool:
        """True if the eviction policy needs the frequency of rows, which is then a row's last score."""
        return "frequency" in self.policy.arguments

    @cached_property
    def scores(self) -> int:
        """Number of values behind a row's state: shows and clicks, then the frequency, each if counted."""
        return self.pushed_scores + self.counts_frequency

    @cached_property
    def label(self) -> str:
        """Name of the table in messages. It is cached because formatting it takes longer than most checks."""
        return f"table {self.name!r}"

    @property
    def candidate(self) -> Mapping[str, type] | None:
        """Name and type of each value that is stored for an id without a row, or None (Entry.candidate)."""
        parts = () if self.entry is None else self.entry.parts
        return next((part.candidate for part in parts if part.candidate is not None), None)

    @property
    def streams_evictions(self) -> bool:
        """True if servers remember the ids of the last evicted rows."""
        return part_of(self.entry, EvictionStreamEntry) is not None

    @cached_property
    def push_width(self) -> int:
        """Number of values of one row of a push to a sparse table: the gradient, then shows and clicks."""
        return self.dim + self.pushed_scores
