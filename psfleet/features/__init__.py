"""The features of a model, each described once, see docs/features.md.

users = Table("users", dim=16, optimizer=psfleet.optimizer.Adagrad(0.05))
features = FeatureSet([
    Feature("user", users),
    Feature("friends", users, pooling="mean", last=50),
    Number("age", default=-1.0),
])
"""

from psfleet.feature_sets.feature_lookup import FeatureLookup, feed
from psfleet.feature_sets.feature_set import Feature, FeatureSet, Number, Table
from psfleet.feature_sets.hashed_ids import hashed
from psfleet.feature_sets.jagged import Jagged
from psfleet.features.named_set import find_features
from psfleet.features.toml_file import load_features

__all__ = [
    "Feature",
    "FeatureLookup",
    "FeatureSet",
    "Jagged",
    "Number",
    "Table",
    "feed",
    "find_features",
    "hashed",
    "load_features",
]
