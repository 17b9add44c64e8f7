"""What the features of a model are, and the tables that hold their rows."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from psfleet.errors import ConfigError, ShapeError
from psfleet.feature_sets.jagged import as_plain
from psfleet.parameters.initializer import Initializer
from psfleet.schema.entry import Entry
from psfleet.schema.table import MAX_DIM, InitializerSpec, RowPrecision, ServerCount
from psfleet.validation.annotations import Must, NonNegativeInt, PositiveInt, Range, check_fields

__all__ = ["Feature", "FeatureSet", "Number", "Pooling", "Table"]

Pooling = Literal["sum", "mean", "none"]
_Name = Annotated[str, Must(bool, "a text")]


@dataclass(frozen=True)
class Table:
    """Rows by id, for one feature or several that share them.

    Attributes:
        name: Unique in the fleet.
        dim: Width of a row, 1 to 1024.
        optimizer: One of psfleet.optimizer, with the rate of this table's updates; None: in a program the
            optimizer that minimizes, in torch the one that is given the table's `weight`. A client then
            only reads the table, which must be there.
        initializer: First values of the rows, of psfleet.initializer; None: uniform in [-0.01, 0.01).
        entry: Admission, expiry and capacity, of psfleet.entry; None: every row is made, and stays.
        precision: How rows are stored on the servers: "float32", "bfloat16" (the weights),
            "bfloat16/bfloat16" or "bfloat16/int8" (the weights, then the state), see docs/tables.md.
        servers: How many servers hold it, so that a step calls fewer; None: all. A table that is there stays
            where it is.
    """

    name: _Name
    dim: Annotated[int, Range(1, MAX_DIM)]
    optimizer: Any = None
    initializer: InitializerSpec | Initializer | None = None
    entry: Entry | None = None
    precision: RowPrecision = "float32"
    servers: ServerCount | None = None

    def __post_init__(self) -> None:
        check_fields(f"table {self.name!r}", self)


@dataclass(frozen=True)
class Feature:
    """Ids of each sample, none or several, and what becomes of their rows.

    Attributes:
        name: Unique in the set.
        table: Where the rows are.
        pooling: "sum" or "mean": a sample has one row, zeros if it has no id. "none": the rows as they are,
            [n, dim]; with `last` padded, [samples, last, dim]. With weights each row is multiplied by its
            weight, and the mean is divided by the sum of the weights.
        last: Only the last so many ids of each sample count; 0: all.
        weighted: Each id comes with a weight; ids that come without count as 1.
        hashed: Ids are hashes of the values, which may be texts.
        buckets: Of hashed ids: ids are 0 to buckets - 1; 0: any int64.
        salt: Of hashed ids: features that share a table and not their ids have different ones.
        padding: An id, or a text, that stands for no id, as in padded arrays; None: there is none.
        column: In files; "": the name.
        weights_column: In files, of a weighted feature; "": the column with ".weights".
    """

    name: _Name
    table: Table
    pooling: Pooling = "sum"
    last: NonNegativeInt = 0
    weighted: bool = False
    hashed: bool = False
    buckets: NonNegativeInt = 0
    salt: str = ""
    padding: int | str | None = None
    column: str = ""
    weights_column: str = ""

    def __post_init__(self) -> None:
        check_fields(f"feature {self.name!r}", self)
        if not self.hashed and (self.buckets or self.salt):
            raise ConfigError(
                f"feature {self.name!r} has buckets {self.buckets} and salt {self.salt!r}, which are for "
                "hashed ids; set hashed=True"
            )

    @property
    def columns(self) -> list[str]:
        """Its columns in files: of the ids, and of the weights if it has some."""
        ids = self.column or self.name
        return [ids, self.weights_column or f"{ids}.weights"] if self.weighted else [ids]


@dataclass(frozen=True)
class Number:
    """Values of each sample that are used as they are.

    Attributes:
        name: Unique in the set.
        dim: How many values.
        default: For samples that lack it, and for NaN.
        column: In files; "": the name.
    """

    name: _Name
    dim: PositiveInt = 1
    default: float = 0.0
    column: str = ""

    def __post_init__(self) -> None:
        check_fields(f"feature {self.name!r}", self)

    @property
    def columns(self) -> list[str]:
        """Its column in files."""
        return [self.column or self.name]

    def of(self, given: Any, samples: int) -> Any:
        """The values of a batch, float32 [samples, dim]; None: all are missing.

        Raises:
            ShapeError: They are of another shape.
        """
        if given is None:
            return np.full((samples, self.dim), self.default, np.float32)
        array = as_plain(given, np.float32)
        if array.shape not in ((samples,) if self.dim == 1 else (), (samples, self.dim)):
            raise ShapeError(
                f"feature {self.name!r} has the shape {array.shape}; it must be {(samples, self.dim)}"
            )
        array = array.reshape(samples, self.dim)
        return np.where(np.isnan(array), np.float32(self.default), array)


class FeatureSet:
    """The features of a model, in order.

    Args:
        features: Each a Feature or a Number.

    Attributes:
        features: By name, in order.
        tables: By name, in the order in which the features name them.

    Raises:
        ConfigError: Two features have one name, or two tables have one name and differ.
    """

    def __init__(self, features: Iterable[Feature | Number]) -> None:
        self.features: Mapping[str, Feature | Number] = dict(_named(list(features)))
        self.tables: dict[str, Table] = {}
        for feature in self.looked_up:
            known = self.tables.setdefault(feature.table.name, feature.table)
            if known != feature.table:
                raise ConfigError(
                    f"feature {feature.name!r} names another table {known.name!r} than the features before "
                    "it; features that share a table are given the same Table"
                )

    def __iter__(self) -> Iterator[Feature | Number]:
        return iter(self.features.values())

    def __len__(self) -> int:
        return len(self.features)

    @property
    def looked_up(self) -> list[Feature]:
        """Those with ids."""
        return [feature for feature in self if isinstance(feature, Feature)]

    @property
    def columns(self) -> list[str]:
        """The columns of all features in files, each once."""
        return list(dict.fromkeys(column for feature in self for column in feature.columns))


def _named(features: list[Any]) -> Iterator[tuple[str, Feature | Number]]:
    seen: set[str] = set()
    for feature in features:
        if not isinstance(feature, Feature | Number):
            raise ConfigError(f"a feature is {feature!r}; it must be a Feature or a Number")
        if feature.name in seen:
            raise ConfigError(
                f"two features are named {feature.name!r}; give each a name of its own"
            )
        seen.add(feature.name)
        yield feature.name, feature
