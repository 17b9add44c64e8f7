"""Declarations of a model's features and their tables: Feature, Number, Input, Table and FeatureSet.

Declarations are immutable and do not process data. feature_values.py and applying_transforms.py apply them
to a batch, and psfleet/features.py reads the files that describe a feature set.
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
from psfleet.data.feature_sets.applying_transforms import fit
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
    """Sparse table with a row for each id, used by one feature or shared by several.

        users = Table("users", dim=16, optimizer=psfleet.optimizer.Adagrad(0.05))

    Attributes:
        name: Name of the table, unique in the fleet.
        dim: Width of a row, 1 to 1024.
        optimizer: Optimizer of psfleet.optimizer that updates this table with its own learning rate. None
            means the optimizer that trains the program or, in torch, the one that gets the table's
            `weight`. A client without an optimizer can only read the table, which must exist.
        initializer: Initial values of the rows, of psfleet.initializer. None means uniform in [-0.01, 0.01).
        entry: Rules by which ids get rows and lose them (admission, expiry and capacity), of
            psfleet.core.engine.schema.entry. None means that every updated id gets a row, which is kept.
        precision: Number format in which the servers store rows: "float32", "bfloat16" for the weights, or
            "bfloat16/bfloat16" or "bfloat16/int8" for weights and optimizer state. docs/tables.md compares
            them.
        servers: Number of servers that hold the table, or None for all. With few servers a step makes fewer
            calls. A table that exists already does not move.
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
    """Feature whose values become ids. Each id has a row in a table, and the rows of a sample are pooled.

        Feature("friends", users, pooling="mean", last=50)

    A sample may have any number of values.

    Attributes:
        name: Name of the feature, unique in the set.
        table: Table with the rows of the ids.
        pooling: Result for the rows of a sample. "sum" and "mean" give one row, which is zero if the sample
            has no id. "none" gives all rows, [n, dim], or [samples, last, dim] with `last`, filled up with
            zeros. If ids have weights, each row is multiplied by its weight, and the mean is divided by the
            sum of the weights.
        last: Maximum number of ids of a sample. The last ones are used. 0 means all ids.
        weighted: True if each id has a weight. An id without a weight gets 1.
        hashed: True if ids are hashes of the values, which may then be texts.
        buckets: Range of hashed ids: 0 to buckets - 1. 0 means any int64.
        salt: Salt of hashed ids. If two features share a table but the same value must not be the same id,
            give them different salts.
        padding: Value, an id or a text, that is ignored, as in padded arrays. None means that no value is.
        column: Name of the feature's values in files, batches and requests. Batches and requests may use
            `name` too. Empty means `name`.
        weights_column: Name of a weighted feature's weights. Empty means the column's name with ".weights".
        transform: Transforms of the values before they become ids, in order: objects such as
            `Quantiles(10)`, or functions as in psfleet.data.feature_sets.transforms.transform.Function.
        dtype: Type of the values in files and requests: "int", "float" or "text". Values of another type
            are converted or refused. None means the type that the first transform needs. Without transforms
            it means integers or, if `hashed`, any values that can be hashed.
        inputs: Names of other features or inputs of the set. Their transformed values are the values of
            this feature, and batches and files have no values under its own name.
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
    """True because a sample may have any number of values."""

    @property
    def columns(self) -> list[str]:
        """Columns of the feature in files: its values and, if it is weighted, its weights."""
        ids = self.column or self.name
        return [ids, self.weights_column or f"{ids}.weights"] if self.weighted else [ids]

    @property
    def value_type(self) -> Dtype | None:
        """Type of the values in files and requests, or None for integers and, if hashed, texts."""
        return _value_type(self, "text" if self.hashed else "int")


@dataclass(frozen=True)
class Input:
    """Values of each sample that other features take as `inputs`. By itself an Input gives the model no
    value.

        Input("tags", "text")

    A sample may have any number of values.

    Attributes:
        name: Name of the input, unique in the set.
        dtype: Type of the values in files and requests: "int", "float" or "text".
        column: Column in files. Empty means `name`.
        transform: Transforms of the values, as in Feature.
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
        """Column of the input in files, as a list."""
        return [self.column or self.name]

    @property
    def value_type(self) -> Dtype:
        """Type of the values in files and requests."""
        return self.dtype


@dataclass(frozen=True)
class Number:
    """Numbers of each sample that the model gets as they are, without a table.

        Number("age", default=-1.0)

    Attributes:
        name: Name of the feature, unique in the set.
        dim: Number of values of a sample.
        default: Value in place of NaN, and for samples that lack the feature.
        column: Column in files. Empty means `name`.
        transform, dtype, inputs: As in Feature. The last transform must give each sample `dim` values or
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
        """True if a sample may have any number of values. The transforms then make `dim` values of them."""
        return bool(self.transform or self.dtype or self.inputs)

    @property
    def value_type(self) -> Dtype | None:
        """Type of the values in files and requests, or None if each sample has `dim` numbers."""
        return _value_type(self, "float")

    @property
    def columns(self) -> list[str]:
        """Column of the feature in files, as a list."""
        return [self.column or self.name]

    def of(self, values: Any, samples: int) -> Any:
        """Convert the values of a batch to float32 [samples, dim].

        `values` is an array of numbers, or a Jagged (any number of values for each sample). NaN is a missing
        value. None means that the batch lacks the feature.

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
        return self._finite(array.reshape(samples, self.dim), np.arange(samples))

    def _finite(self, values: Any, rows: Any) -> Any:
        """Return values as float32 with the default in place of NaN, and refuse infinite ones.

        Args:
            values: Numbers [n, dim] of any dtype.
            rows: Row in the batch of each of them, int64 [n], for the message.
        """
        with np.errstate(over="ignore"):
            array = values.astype(np.float32)
        if (infinite := np.isinf(array)).any():
            first = int(np.argmax(infinite.any(axis=1)))
            value = values[first][infinite[first]][0]
            raise refusal(f"feature {self.name!r}", value, "float", int(rows[first]))
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
        out[fits] = self._finite(bags.values.reshape(-1, self.dim), np.flatnonzero(fits))
        return out


def _take_transforms(feature: Any) -> None:
    try:
        object.__setattr__(feature, "transform", transforms_of(feature.transform))
    except ConfigError as error:
        raise ConfigError(f"feature {feature.name!r}: {error}") from None


def _check_inputs(feature: Any) -> None:
    """Raise an error if a feature has another number of inputs than its transforms take."""
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
    """Features of a model, in a fixed order.

        features = FeatureSet([Feature("user", users), Number("age", default=-1.0)])

    Args:
        features: The features: each a Feature, a Number or an Input. A feature comes after its `inputs`.

    Attributes:
        features: Features and Numbers of the set, which give the model values, by name.
        given: Members for which batches and files have values, by name: all that have no `inputs`.
        transformed: Members with transforms or `inputs`, by name. Each comes after its `inputs`.
        tables: Tables by name, in the order in which features name them.

    Raises:
        ConfigError: Two features have the same name, two different tables have the same name, or the set
            has no input that a feature names.
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
        """Compute the statistics and vocabularies of the transforms, in a first pass over the data.

            features.fit(Batches(files, 1024))

        Transforms that have statistics keep them. If a transform follows another that must be fitted,
        fitting takes one more pass.

        Args:
            batches: Batches in a form that `FeatureLookup` takes, or objects with such a batch as
                `features`. They are read one at a time.

        Returns:
            This set.

        Raises:
            UsageError: The data is not sufficient. The message names the feature.
        """
        fit(self, batches)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the set as JSON, including what its transforms have computed, for prediction.

        `psfleet.features.load_features` reads the file. The file lacks each table's `optimizer`,
        `initializer` and `entry`, which only training needs. So a training script declares its set as before
        and calls `load_statistics` instead.

        Raises:
            UsageError: A transform is not fitted, or the file cannot be written.
        """
        write_features(self, Path(path))

    def load_statistics(self, path: str | os.PathLike[str]) -> "FeatureSet":
        """Read the missing statistics of transforms from a file that `save` has written. Its transforms
        must be the same.

        Returns:
            This set.

        Raises:
            ConfigError: The file cannot be read, or its transforms differ.
        """
        read_statistics(self, Path(path))
        return self

    @property
    def fitted(self) -> bool:
        """True if all transforms have their statistics, so that neither `fit` nor `load_statistics` is
        needed.
        """
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
        """Everything that the set was made of, in order: Features, Numbers and Inputs."""
        return list({**self.given, **self.features}.values())

    @property
    def looked_up(self) -> list[Feature]:
        """Members of the set that look rows up, which are those of class Feature."""
        return [feature for feature in self if isinstance(feature, Feature)]

    @property
    def columns(self) -> list[str]:
        """Columns of all features in files, without repetition."""
        return list(
            dict.fromkeys(column for feature in self.given.values() for column in feature.columns)
        )


def _transformed(members: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that are transformed. Each comes after its inputs."""
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
