"""A feature set by the name that a command is given: a TOML file, or an object of a module."""

import os

from psfleet.errors import ConfigError
from psfleet.feature_sets.feature_set import FeatureSet
from psfleet.features.toml_file import load_features
from psfleet.optimizer.standalone import check_outside
from psfleet.platform.named_object import find_object

__all__ = ["find_features"]


def find_features(said: str) -> FeatureSet:
    """The feature set that `said` names.

    Args:
        said: The path of a TOML file, or MODULE:NAME of a FeatureSet in a module, which may lie in the
            present folder. The module is imported.

    Raises:
        ConfigError: There is none; the error quotes `said`.
    """
    in_module = ":" in said and not os.path.exists(said)
    found = _imported(said) if in_module else load_features(said)
    for table in found.tables.values():
        if table.optimizer is not None:
            check_outside(f"table {table.name!r}", table.optimizer)
    return found


def _imported(said: str) -> FeatureSet:
    found = find_object(said, "features", "name a TOML file, or MODULE:NAME of a FeatureSet")
    if not isinstance(found, FeatureSet):
        raise ConfigError(f"the features {said!r} are {found!r:.80}; they must be a FeatureSet")
    return found
