"""Public data sets in the files that they are published in.

for batch in fleet.dataset(criteo_files("train.txt.gz", Table("ids", 16)), batch_size=4096):
    loss = loss_fn(embed(batch.features), batch.labels["label"])
"""

from typing import Any

from psfleet.core.base.validation.annotations import checked
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Number, Table
from psfleet.data.text_files import TextFiles

_NUMBERS = [f"I{number}" for number in range(1, 14)]
_IDS = [f"C{number}" for number in range(1, 27)]


@checked
def criteo_features(table: Table) -> FeatureSet:
    """The 13 numbers I1 to I13 and the 26 hashed features C1 to C26, which share a table."""
    ids = (Feature(name, table, hashed=True, salt=name) for name in _IDS)
    return FeatureSet([*map(Number, _NUMBERS), *ids])


@checked
def criteo_files(paths: Any, features: Table | FeatureSet, **options: Any) -> TextFiles:
    """The Criteo click logs as they are published: no header, tabs, `.gz` or not; the label is "label".

    Args:
        paths: Files such as `train.txt` and `day_0.gz`, or a folder of them.
        features: A set over the columns I1 to I13 and C1 to C26; a table: `criteo_features` of it.
        **options: Further arguments of `TextFiles`, such as bad_rows="skip".
    """
    return TextFiles(
        paths,
        criteo_features(features) if isinstance(features, Table) else features,
        ["label"],
        format="tsv",
        columns=["label", *_NUMBERS, *_IDS],
        **options,
    )


@checked
def libsvm_files(paths: Any, features: Table | FeatureSet, **options: Any) -> TextFiles:
    """Files of lines `label index:value ...`, whatever their names; the label is "label".

    Args:
        paths: Files, or a folder of them.
        features: A set over the columns "index" and "value"; a table: one weighted feature "index" of it.
        **options: Further arguments of `TextFiles`.
    """
    if isinstance(features, Table):
        features = FeatureSet([Feature("index", features, weighted=True, weights_column="value")])
    return TextFiles(paths, features, ["label"], format="libsvm", **options)
