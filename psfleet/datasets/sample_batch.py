"""The samples of a step."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SampleBatch"]


@dataclass(frozen=True)
class SampleBatch:
    """Samples of a step.

    Attributes:
        features: By name, what `FeatureLookup`, `psfleet.features.feed` and `FeatureEmbedding` take.
        labels: By column: float32 [n].
    """

    features: dict[str, Any]
    labels: dict[str, NDArray[np.float32]]

    def __len__(self) -> int:
        return len(next(iter((self.labels or self.features).values())))
