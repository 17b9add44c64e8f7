"""The features of a set, looked up in plain tables."""

from collections.abc import Mapping
from typing import Any

from psfleet.client.client_tables import SparseTable
from psfleet.feature_sets.feature_lookup import FeatureLookup
from psfleet.feature_sets.feature_set import FeatureSet

__all__ = ["ClientFeatures"]


class ClientFeatures:
    """The tables of a feature set. Made by `Client.features`.

        features = ps.features(feature_set)
        batch = features.batch({"user": users, "friends": Jagged(ids, lengths)})
        pooled = ps.pull({**batch.pooled, bias: None})  # one call to each server
        values = batch.values(pooled)                   # float32 arrays by feature
        ...
        ps.push({**batch.pooled_gradients(gradients), bias: slope})

    Whoever wants the rows themselves pulls `batch.ids`; `batch.pool` and `batch.gradients` go with that.

    Attributes:
        features: The set.
        tables: By name.
    """

    def __init__(self, features: FeatureSet, tables: Mapping[str, SparseTable]) -> None:
        self.features = features
        self.tables = dict(tables)

    def batch(self, batch: Any) -> FeatureLookup[SparseTable]:
        """The ids of a batch by table, which pool the rows and spread the gradients.

        Args:
            batch: By feature its ids: a `Jagged`, an array [n] or [n, k], a list of lists, a mapping with
                `values` and `lengths`; for a Number its values. Or a KeyedJaggedTensor of TorchRec. A
                feature that is missing has no ids.

        Raises:
            UsageError: The batch does not fit the set; the error names the feature.
        """
        return FeatureLookup(self.features, batch, self.tables)
