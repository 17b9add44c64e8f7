"""A feature set by the name that a command is given: a TOML file, or an object of a module."""

import importlib
import os
import sys

from psfleet.errors import ConfigError
from psfleet.feature_sets.feature_set import FeatureSet
from psfleet.features.toml_file import load_features
from psfleet.optimizer.standalone import check_outside

__all__ = ["find_features"]


def find_features(said: str) -> FeatureSet:
    """The feature set that `said` names.

    Args:
        said: The path of a TOML file, or MODULE:NAME of a FeatureSet in a module, which may lie in the
            present folder. The module is imported.

    Raises:
        ConfigError: There is none; the error quotes `said`.
    """
    module, colon, name = said.partition(":")
    in_module = colon and not os.path.exists(said)
    found = _imported(said, module, name) if in_module else load_features(said)
    for table in found.tables.values():
        if table.optimizer is not None:
            check_outside(f"table {table.name!r}", table.optimizer)
    return found


def _imported(said: str, module: str, name: str) -> FeatureSet:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the end: a file of the user must not stand for a library
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"the features {said!r} cannot be imported ({type(error).__name__}: {error}); name a TOML file, "
            "or MODULE:NAME of a FeatureSet"
        ) from error
    if not isinstance(found, FeatureSet):
        raise ConfigError(f"the features {said!r} are {found!r:.80}; they must be a FeatureSet")
    return found
