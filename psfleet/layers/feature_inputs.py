"""The features of a FeatureSet as inputs of a program."""

from psfleet.feature_sets.feature_set import Feature, FeatureSet, Table
from psfleet.layers.inputs import data
from psfleet.parameters.parameter import Parameter
from psfleet.program.attribute import ParamAttr, make_parameter
from psfleet.program.ops.embedding import PooledEmbedding
from psfleet.program.ops.manipulate import Reshape
from psfleet.program.variable import Variable, apply, leaf
from psfleet.validation.annotations import checked

__all__ = ["features"]


@checked
def features(features: FeatureSet) -> dict[str, Variable]:
    """The values of all features, by name in the order of the set.

        values = layers.features(feature_set)
        hidden = layers.fc(layers.concat(list(values.values()), axis=1), 64, act="relu")
        ...
        exe.run(feed={**psfleet.features.feed(feature_set, batch), "label": labels})

    The rows of all features are brought in one call to each server, and their gradients leave in one push.
    A table with an optimizer of its own is updated by that one, the others by the one that minimizes.

    Args:
        features: Each Feature becomes the inputs `NAME.ids`, `NAME.lengths` and, if weighted,
            `NAME.weights`, each Number the input `NAME`; `psfleet.features.feed` makes them of a batch.

    Returns:
        float32 [samples, dim]; for pooling "none" [n, dim] or, with `last`, [samples, last, dim].
    """
    inputs = {}
    # A backward pass goes from the last record to the first. So the gradients of features that share a
    # table come in the order of the set, as in the other interfaces, and are summed to the same bits.
    for feature in reversed(list(features)):
        if isinstance(feature, Feature):
            inputs[feature.name] = _looked_up(feature)
        else:
            inputs[feature.name] = data(feature.name, [None, feature.dim])
    return {name: inputs[name] for name in features.features}


def _looked_up(feature: Feature) -> Variable:
    name = feature.name
    ids = data(f"{name}.ids", [None], "int64")
    lengths = data(f"{name}.lengths", [None], "int64")
    weights = [data(f"{name}.weights", [None])] if feature.weighted else []
    pool = PooledEmbedding(mean=feature.pooling == "mean")
    values = apply(pool, ids, leaf(_parameter(feature.table)), lengths, *weights, name=name)
    if feature.pooling == "none" and feature.last:
        return apply(Reshape((-1, feature.last, feature.table.dim)), values, name=name)
    return values


def _parameter(table: Table) -> Parameter:
    parameter = make_parameter(
        (-1, table.dim),
        table.name,
        ParamAttr(initializer=table.initializer, precision=table.precision, servers=table.servers),
        None,
        sparse=True,
        distributed=True,
        entry=table.entry,
    )
    parameter.optimizer = table.optimizer
    return parameter
