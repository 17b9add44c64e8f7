"""The samples of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.feature_sets.jagged import Jagged, joined

__all__ = ["SampleBatch", "chosen_columns", "joined_batches", "joined_columns"]


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
