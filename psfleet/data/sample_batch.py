"""Samples of a step, their order, and samples that come one by one as mappings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.data.feature_sets.feature_batches import kind_of, no_samples
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number
from psfleet.data.feature_sets.jagged import Jagged, array_of, as_plain, joined
from psfleet.data.feature_sets.value_types import Kind, as_typed, is_missing, is_of, typed

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SampleBatch:
    """Samples of a step.

    Attributes:
        features: By name, what `FeatureLookup`, `psfleet.features.feed` and `FeatureEmbedding` take.
        labels: By column: float32 [n].
        times: int64 [n]: when each sample happened; None: the source does not say.
    """

    features: dict[str, Any]
    labels: dict[str, NDArray[np.float32]]
    times: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        if self.times is not None:
            return len(self.times)
        return len(next(iter((self.labels or self.features).values())))

    def chosen(self, rows: Any) -> "SampleBatch":
        """Some of the samples, by their places or a slice."""
        times = None if self.times is None else self.times[rows]
        return SampleBatch(
            chosen_columns(self.features, rows), chosen_columns(self.labels, rows), times
        )


def chosen_columns(columns: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """Some of the samples of each column, by their places or a slice."""
    return {name: values[rows] for name, values in columns.items()}


def joined_columns(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The samples of all parts, of which there is at least one. A single part is not copied."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return joined(parts) if isinstance(parts[0], Jagged) else np.concatenate(parts)


def joined_batches(parts: Sequence[SampleBatch]) -> SampleBatch:
    """The samples of all parts, of which there is at least one; all have times, or none has."""
    times = [part.times for part in parts if part.times is not None]
    return SampleBatch(
        joined_columns([part.features for part in parts]),
        joined_columns([part.labels for part in parts]),
        np.concatenate(times) if times else None,
    )


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `low` to `high` - 1 of a row group, counted in the order in which the epoch reads the group."""

    group: int
    low: int
    high: int


class RowSequence:
    """The order of one epoch.

    Row groups are read in windows of `interleave`, from which blocks of `batch_size` rows come in turn.
    In sync mode, where workers take such blocks in turn, each of `interleave` workers (or of a number that
    divides it) therefore reads row groups of its own, and no group is decoded in vain. What is left
    of each group, less than a block, comes at the end of the epoch, so that a block lies in one group.

    Args:
        sizes: Rows of each row group.
        batch_size: Rows of a block.
        interleave: Row groups of a window.
        seed: Shuffles the groups, and the rows within each; None: as they are.
    """

    def __init__(
        self, sizes: Sequence[int], batch_size: int, interleave: int, seed: int | None, epoch: int
    ) -> None:
        self._block, self._seed, self._epoch = batch_size, seed, epoch
        self._sizes = np.asarray(sizes, np.int64)
        groups = np.arange(len(sizes)) if seed is None else self._dice(-1).permutation(len(sizes))
        self._groups, self._starts = self._blocks(groups, interleave)
        self._rests = groups[self._sizes[groups] % batch_size > 0]
        ends = np.cumsum(self._sizes[self._rests] % batch_size)
        self._full = len(self._groups) * batch_size
        self._ends = self._full + ends

    def _blocks(self, groups: Ids, interleave: int) -> tuple[Ids, Ids]:
        """The group of each whole block, and its first row."""
        counts = self._sizes[groups] // self._block
        window = np.repeat(np.arange(len(groups)) // interleave, counts)
        places = np.repeat(np.arange(len(groups)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.lexsort((places, within, window))
        return groups[places[order]], within[order] * self._block

    def _dice(self, group: int) -> np.random.Generator:
        assert self._seed is not None
        return np.random.default_rng((abs(self._seed), self._seed < 0, self._epoch, group + 1))

    def rows_of(self, group: int) -> Ids:
        """The rows of a group, in the order in which a shuffled epoch reads them."""
        return self._dice(group).permutation(self._sizes[group])

    def ranges(self, low: int, high: int) -> Iterator[RowRange]:
        """The rows at the positions `low` to `high` - 1 of the epoch, in order."""
        while low < high:
            rows, length = self._at(low)
            count = min(length, high - low)
            yield RowRange(rows.group, rows.low, rows.low + count)
            low += count

    def _at(self, position: int) -> tuple[RowRange, int]:
        """The rows from this position to the end of its block or rest, and their number."""
        if position < self._full:
            block, skip = divmod(position, self._block)
            group, first = int(self._groups[block]), int(self._starts[block])
            return RowRange(group, first + skip, first + self._block), self._block - skip
        place = int(np.searchsorted(self._ends, position, side="right"))
        group = int(self._rests[place])
        end, rest = int(self._sizes[group]), int(self._ends[place]) - position
        return RowRange(group, end - rest, end), rest


def sample_of(features: FeatureSet, labels: Sequence[str], values: Any) -> dict[str, list[Any]]:
    """The values of each column of a sample.

    Args:
        values: By column a value, a list or array of values, or None. A label has one number.

    Raises:
        ValueError: It is no mapping, or a value cannot be used; the text says which.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"it is a {type(values).__name__}, not an object with columns")
    sample: dict[str, list[Any]] = {}
    for feature in features.given.values():
        column = feature.columns[0]
        ids = sample[column] = _listed(column, values.get(column), kind_of(feature))
        if isinstance(feature, Number) and not feature.jagged and len(ids) not in (0, feature.dim):
            raise ValueError(f"{column} is {values[column]!r:.80}")
        for weights in feature.columns[1:]:
            sample[weights] = _listed(weights, values.get(weights), "float")
            if len(sample[weights]) != len(ids) or any(map(is_missing, sample[weights])):
                raise ValueError(f"{weights} is {values.get(weights)!r:.80} for {len(ids)} ids")
    for label in labels:
        sample[label] = _listed(label, values.get(label), "float")
        if len(sample[label]) != 1 or is_missing(sample[label][0]):
            raise ValueError(f"{label} is {values.get(label)!r:.80}")
    return sample


def time_of(column: str, values: Mapping[str, Any]) -> int:
    """The time in this column of a sample.

    Raises:
        ValueError: It is no whole number.
    """
    times = _listed(column, values.get(column), "id")
    if len(times) != 1 or is_missing(times[0]):
        raise ValueError(f"{column} is {values.get(column)!r:.80}")
    return int(times[0])


def _listed(column: str, value: Any, kind: Kind) -> list[Any]:
    """The values of a column, which are all missing or of this kind.

    Raises:
        ValueError: One is not.
    """
    if isinstance(value, list | tuple):
        members = list(value)
    elif isinstance(value, str | bytes | int | float | None):
        members = [] if is_missing(value) else [value]
    else:  # an array or tensor, which a parser may make
        members = list(np.atleast_1d(as_plain(value)))
    if not all(is_of(each, kind) for each in members):
        raise ValueError(f"{column} is {value!r:.80}")
    return members


def batch_of(
    features: FeatureSet,
    labels: Sequence[str],
    samples: Sequence[Mapping[str, list[Any]]],
    times: Sequence[int] | None = None,
) -> SampleBatch:
    """The samples, which `sample_of` has made, as a batch; `times`: when each happened."""
    columns = (
        {name: _joined_samples(each, samples) for name, each in features.given.items()}
        if samples
        else {}
    )
    return SampleBatch(
        columns or no_samples(features),
        {name: np.array([sample[name][0] for sample in samples], np.float32) for name in labels},
        None if times is None else np.array(times, np.int64),
    )


def _joined_samples(
    feature: Feature | Number | Input, samples: Sequence[Mapping[str, list[Any]]]
) -> Any:
    column, kind = feature.columns[0], kind_of(feature)
    flat = array_of([value for sample in samples for value in sample[column]])
    bags = Jagged(flat, [len(sample[column]) for sample in samples])
    if isinstance(feature, Number) and not feature.jagged:
        values, missing, _ = typed(flat, kind)
        return feature.of(bags.with_values(np.where(missing, np.float32("nan"), values)), len(bags))
    if feature.weighted:
        weights = [w for sample in samples for w in sample[feature.columns[1]]]
        bags = Jagged(flat, bags.lengths, weights=np.array(weights, np.float32))
    return as_typed(f"feature {feature.name!r}", bags, kind)
