"""A feature of each kind, for sources whose samples map columns to values."""

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
