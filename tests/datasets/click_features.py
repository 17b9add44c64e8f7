"""A feature of each kind, for sources whose samples map columns to values."""

from typing import Any

from psfleet.features import Feature, FeatureSet, Number, Table

TABLE = Table("t", 4)
FEATURES = FeatureSet(
    [
        Feature("user", TABLE),
        Feature("tags", TABLE, weighted=True),
        Feature("city", TABLE, hashed=True),
        Number("age", 2, default=-1.0),
    ]
)


def clicks(batches: Any) -> list[int]:
    """The labels: the numbers of the rows."""
    return [int(label) for batch in batches for label in batch.labels["click"]]
