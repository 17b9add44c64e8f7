"""Declares a model's features and their tables: Feature, Number, Input, Table and FeatureSet.

The declarations are frozen and do no work on data. What they mean for a batch is in feature_batches.py, and
psfleet/features.py reads the files that describe a set.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.base.validation.annotations import (
    Must,
    NonNegativeInt,
    PositiveInt,
    Range,
    check_fields,
    checked,
)
from psfleet.core.engine.schema.entry import Entry
from psfleet.core.engine.schema.table import MAX_DIM, InitializerSpec, RowPrecision, ServerCount
from psfleet.data.feature_sets.feature_batches import fit
from psfleet.data.feature_sets.feature_document import read_statistics, write_features
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.transforms.transform import FittedTransform, Transform, transforms_of
from psfleet.data.feature_sets.value_types import Dtype, refusal
from psfleet.initializer import Initializer

Pooling = Literal["sum", "mean", "none"]
_Optimizer = Annotated[
    Any,
    Must(
        lambda value: value is None or hasattr(value, "rule"), "one of psfleet.optimizer, or None"
    ),
]  # which this package does not import
_Name = Annotated[str, Must(bool, "a text")]


@dataclass(frozen=True)
class Table:
    """Rows by id, for one feature or several that share them.

    Attributes:
        name: Unique in the fleet.
        dim: Width of a row, 1 to 1024.
        optimizer: One of psfleet.optimizer, with the rate of this table's updates. None means the optimizer
            that minimizes in a program, and in torch the one that is given the table's `weight`. A client
            without an optimizer only reads the table, which must exist.
        initializer: First values of the rows, of psfleet.initializer, or None for uniform in [-0.01, 0.01).
        entry: Admission, expiry and capacity, of psfleet.core.engine.schema.entry, or None to make every row
            and keep it.
        precision: Storage of rows on the servers: "float32", "bfloat16" (the weights),
            "bfloat16/bfloat16" or "bfloat16/int8" (the weights, then the state), see docs/tables.md.
        servers: Number of servers that hold the table, so that a step calls fewer of them, or None for all.
            A table that exists already does not move.
    """

    name: _Name
    dim: Annotated[int, Range(1, MAX_DIM)]
    optimizer: _Optimizer = None
    initializer: InitializerSpec | Initializer | None = None
    entry: Entry | None = None
    precision: RowPrecision = "float32"
    servers: ServerCount | None = None

    def __post_init__(self) -> None:
        check_fields(f"table {self.name!r}", self)


@dataclass(frozen=True)
class Feature:
    """A feature whose values become ids, any number in a sample, and how their rows are combined.

    Attributes:
        name: Unique in the set.
        table: Table of the rows.
        pooling: "sum" or "mean": a sample has one row, zeros if it has no id. "none": the rows as they are,
            [n, dim]; with `last` padded, [samples, last, dim]. With weights each row is multiplied by its
            weight, and the mean is divided by the sum of the weights.
        last: Number of ids of each sample that count, from its end. 0 means all.
        weighted: Each id comes with a weight; ids that come without count as 1.
        hashed: Ids are hashes of the values, which may be texts.
        buckets: Hashed ids are 0 to buckets - 1, or any int64 if this is 0.
        salt: Salt of hashed ids. Features that share a table, but not their ids, need different salts.
        padding: An id or a text that stands for no id, as in padded arrays, or None if no value does.
        column: Name in files, batches and requests, which may also use `name`. Empty means `name`.
        weights_column: Name of a weighted feature's weights there. Empty means the column with ".weights".
        transform: Transforms of its values before they become ids, in order: objects such as
            `Quantiles(10)`, or functions, see `psfleet.data.feature_sets.transforms.transform.Function`.
        dtype: Type of its values in files and requests: "int", "float" or "text". Values of another type are
            converted or refused. None means the type that the first transform takes, and without transforms
            whole numbers, or any values that can be hashed.
        inputs: Names of other features or inputs of the set, whose transformed values this feature gets.
            Batches and files then have no values under its own name.
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
    transform: Any = ()
    dtype: Dtype | None = None
    inputs: Sequence[str] = ()

    def __post_init__(self) -> None:
        _take_transforms(self)
        check_fields(f"feature {self.name!r}", self)
        _check_inputs(self)
        if not self.hashed and (self.buckets or self.salt):
            raise ConfigError(
                f"feature {self.name!r} has buckets {self.buckets} and salt {self.salt!r}, which are for "
                "hashed ids; set hashed=True"
            )

    jagged = True
    """A sample may have any number of values."""

    @property
    def columns(self) -> list[str]:
        """Columns in files: that of the ids, and for a weighted feature that of the weights."""
        ids = self.column or self.name
        return [ids, self.weights_column or f"{ids}.weights"] if self.weighted else [ids]

    @property
    def value_type(self) -> Dtype | None:
        """Type of the values in files and requests, or None for whole numbers (and texts, if hashed)."""
        return _value_type(self, "text" if self.hashed else "int")


@dataclass(frozen=True)
class Input:
    """Values of each sample, any number of them, that only features with `inputs` use.

    Attributes:
        name: Unique in the set.
        dtype: Type of the values in files and requests: "int", "float" or "text".
        column: Column in files. Empty means the name.
        transform: Transforms of its values, as for a Feature.
    """

    name: _Name
    dtype: Dtype = "text"
    column: str = ""
    transform: Any = ()

    jagged = True
    hashed = weighted = False
    inputs = ()

    def __post_init__(self) -> None:
        _take_transforms(self)
        check_fields(f"feature {self.name!r}", self)
        _check_inputs(self)

    @property
    def columns(self) -> list[str]:
        """Column in files, as a list of one."""
        return [self.column or self.name]

    @property
    def value_type(self) -> Dtype:
        """Type of the values in files and requests."""
        return self.dtype


@dataclass(frozen=True)
class Number:
    """Values of each sample that are used as they are.

    Attributes:
        name: Unique in the set.
        dim: Number of values.
        default: Value for samples that lack the feature, and in place of NaN.
        column: Column in files. Empty means the name.
        transform, dtype, inputs: As for a Feature. The last transform makes `dim` values of each sample, or
            none.
    """

    name: _Name
    dim: PositiveInt = 1
    default: float = 0.0
    column: str = ""
    transform: Any = ()
    dtype: Dtype | None = None
    inputs: Sequence[str] = ()

    hashed = weighted = False

    def __post_init__(self) -> None:
        _take_transforms(self)
        check_fields(f"feature {self.name!r}", self)
        _check_inputs(self)

    @property
    def jagged(self) -> bool:
        """True if a sample may have any number of values, of which transforms make `dim`."""
        return bool(self.transform or self.dtype or self.inputs)

    @property
    def value_type(self) -> Dtype | None:
        """Type of the values in files and requests, or None for `dim` numbers in each sample."""
        return _value_type(self, "float")

    @property
    def columns(self) -> list[str]:
        """Column in files, as a list of one."""
        return [self.column or self.name]

    def of(self, values: Any, samples: int) -> Any:
        """Return the values of a batch, an array of numbers or a Jagged, as float32 [samples, dim].

        None stands for a feature that the batch lacks, and NaN for a missing value.

        Raises:
            ShapeError: The values have another shape.
            IdError: A value is infinite.
        """
        if values is None:
            return np.full((samples, self.dim), self.default, np.float32)
        if isinstance(values, Jagged):
            return self._of_bags(values)
        array = values
        if array.shape not in ((samples,) if self.dim == 1 else (), (samples, self.dim)):
            raise ShapeError(
                f"feature {self.name!r} has the shape {array.shape}; it must be {(samples, self.dim)}"
            )
        with np.errstate(over="ignore"):
            array = array.astype(np.float32).reshape(samples, self.dim)
        if (infinite := np.isinf(array)).any():
            row = int(np.argmax(infinite.any(axis=1)))
            value = values.reshape(samples, self.dim)[row][infinite[row]][0]
            raise refusal(f"feature {self.name!r}", value, "float", row)
        array[np.isnan(array)] = self.default
        return array

    def _of_bags(self, bags: Jagged) -> Any:
        fits = bags.lengths == self.dim
        if not (fits | (bags.lengths == 0)).all():
            count = bags.lengths[~fits & (bags.lengths > 0)][0]
            raise ShapeError(
                f"feature {self.name!r} has {count} values in a sample; it must have {self.dim} or none, end "
                f"its transforms with Pad({self.dim}), or set dim={count}"
            )
        if bags.values.dtype.kind not in "iufb":
            raise ShapeError(
                f"feature {self.name!r} has {bags.values[:1].tolist()} after its transforms; they must make "
                "numbers"
            )
        out = np.full((len(bags), self.dim), self.default, np.float32)
        out[fits] = bags.values.reshape(-1, self.dim)
        return np.where(np.isnan(out), np.float32(self.default), out)


def _take_transforms(feature: Any) -> None:
    """Make a tuple of the transforms of a feature."""
    try:
        object.__setattr__(feature, "transform", transforms_of(feature.transform))
    except ConfigError as error:
        raise ConfigError(f"feature {feature.name!r}: {error}") from None


def _check_inputs(feature: Any) -> None:
    """Refuse inputs that the transforms of a feature do not take."""
    owner = f"feature {feature.name!r}"
    object.__setattr__(feature, "inputs", tuple(feature.inputs))
    if feature.inputs and (feature.dtype or feature.column):
        raise ConfigError(
            f"{owner} has inputs, so it has no dtype and no column of its own; declare those of its inputs"
        )
    count = len(feature.inputs) or 1
    takers: Sequence[Transform] = feature.transform
    for index, transform in enumerate(takers):
        inputs = 1 if index else count
        low, high = transform.arity
        if not low <= inputs <= high:
            raise ConfigError(
                f"{owner}: {type(transform).__name__} takes {low}{f' to {high}' if high > low else ''} "
                f"inputs, and has {inputs}; name {low} features as inputs and let it be the first transform"
            )
    if count > 1 and not takers:
        raise ConfigError(
            f"{owner} has {count} inputs and no transform; give it one that takes several, such as Cross()"
        )


def _value_type(feature: Any, usual: Dtype) -> Dtype | None:
    if feature.dtype is not None or not feature.transform:
        return feature.dtype  # type: ignore[no-any-return]
    return next(
        (transform.takes for transform in feature.transform if transform.takes is not None), usual
    )


@checked
class FeatureSet:
    """The features of a model, in order.

    Args:
        features: Each a Feature, a Number or an Input.

    Attributes:
        features: Those with a value, Features and Numbers: by name, in order.
        given: Those that batches and files have, which are all without `inputs`: by name, in order.
        transformed: Those whose values are not used as they are given, by name: first those without `inputs`.
        tables: By name, in the order in which the features name them.

    Raises:
        ConfigError: Two features have one name, or two tables have one name and differ, or a feature names an
            input that the set lacks.
    """

    def __init__(self, features: Iterable[Feature | Number | Input]) -> None:
        members = dict(_named(list(features)))
        self.features: Mapping[str, Feature | Number] = {
            name: member for name, member in members.items() if not isinstance(member, Input)
        }
        self.given: Mapping[str, Feature | Number | Input] = {
            name: member for name, member in members.items() if not member.inputs
        }
        self.transformed: Mapping[str, Feature | Number | Input] = _transformed(members, self.given)
        self.tables: dict[str, Table] = {}
        for feature in self.looked_up:
            table = self.tables.setdefault(feature.table.name, feature.table)
            if table != feature.table:
                raise ConfigError(
                    f"feature {feature.name!r} names another table {table.name!r} than the features before "
                    "it; features that share a table are given the same Table"
                )

    def fit(self, batches: Iterable[Any]) -> "FeatureSet":
        """Compute the statistics and vocabularies that transforms lack, in a first pass over the data.

        What is fitted, or was given, stays. A transform behind another one that is fitted takes a pass more.

        Args:
            batches: Batches as `FeatureLookup` takes them, or objects with such ones as `features`, which are
                read one by one.

        Returns:
            This set.

        Raises:
            UsageError: The data is not enough; the error names the feature.
        """
        fit(self, batches)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set with what its transforms have computed, as JSON.

        `psfleet.features.load_features` reads it. Tables are without optimizer, initializer and entry, which
        only training needs, so that it is for prediction; a training script keeps its set and calls
        `load_statistics`.

        Raises:
            UsageError: A transform is not fitted, or the file cannot be written.
        """
        write_features(self, Path(path))

    def load_statistics(self, path: str | os.PathLike[str]) -> "FeatureSet":
        """Take what transforms lack from a file that `save` has written of a set with the same transforms.

        Returns:
            This set.

        Raises:
            ConfigError: The file cannot be read, or has other transforms.
        """
        read_statistics(self, Path(path))
        return self

    @property
    def fitted(self) -> bool:
        """True unless a transform waits for `fit` or `load_statistics`."""
        return all(
            not isinstance(transform, FittedTransform) or transform.fitted
            for feature in self.transformed.values()
            for transform in feature.transform
        )

    def __iter__(self) -> Iterator[Feature | Number]:
        return iter(self.features.values())

    def __len__(self) -> int:
        return len(self.features)

    @property
    def members(self) -> list[Feature | Number | Input]:
        """Every Feature, Number and Input of the set, in order."""
        return list({**self.given, **self.features}.values())

    @property
    def looked_up(self) -> list[Feature]:
        """Features that look rows up, that is, all without the Numbers."""
        return [feature for feature in self if isinstance(feature, Feature)]

    @property
    def columns(self) -> list[str]:
        """The columns of all features in files, each once."""
        return list(
            dict.fromkeys(column for feature in self.given.values() for column in feature.columns)
        )


def _transformed(members: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The features to transform, each behind its inputs."""
    features = {name: feature for name, feature in plain.items() if feature.transform}
    before = list(plain)
    for name, feature in members.items():
        for input_name in feature.inputs:
            if input_name not in before:
                problem = "comes after it" if input_name in members else "is not in the set"
                raise ConfigError(
                    f"feature {name!r} has the input {input_name!r}, which {problem}; the set has "
                    f"{', '.join(before) or 'none'} before it"
                )
        if feature.inputs:
            features[name] = feature
            before.append(name)
    return features


def _named(features: list[Any]) -> Iterator[tuple[str, Feature | Number | Input]]:
    names: set[str] = set()
    for feature in features:
        if not isinstance(feature, Feature | Number | Input):
            raise ConfigError(
                f"a feature is {feature!r}; it must be a Feature, a Number or an Input"
            )
        if feature.name in names:
            raise ConfigError(
                f"two features are named {feature.name!r}; give each a name of its own"
            )
        names.add(feature.name)
        yield feature.name, feature
