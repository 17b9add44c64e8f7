"""Prediction with trained models, in this process or as a service. docs/serving.md has the guide.

    model = psfleet.serving.load("model", "features.toml")
    chances = model({"user": [17, 42], "item": [[3, 5], [8]]})

To understand the code, begin with model.py (a model and its versions). Then read row_source.py (origin of
the weights), follower.py (a copy of a running job's weights) and prediction_server.py (the service).
"""

import importlib
from typing import TYPE_CHECKING, Any

from psfleet.serving.model import Model, VersionedModel, load
from psfleet.serving.model_export import export
from psfleet.serving.row_source import RowSource, ServedRows

if TYPE_CHECKING:
    from psfleet.serving.follower import Follower
    from psfleet.serving.prediction_server import PredictionServer as Server
    from psfleet.serving.serving_client import ServingClient, SplitClient

__all__ = [
    "Follower",
    "Model",
    "RowSource",
    "ServedRows",
    "Server",
    "ServingClient",
    "SplitClient",
    "VersionedModel",
    "export",
    "load",
]

_HOMES = {
    "Follower": ("psfleet.serving.follower", "Follower"),
    "SplitClient": ("psfleet.serving.serving_client", "SplitClient"),
    "Server": ("psfleet.serving.prediction_server", "PredictionServer"),
    "ServingClient": ("psfleet.serving.serving_client", "ServingClient"),
}
"""Module and class of each name that needs gRPC. The module is imported when the name is first used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'psfleet.serving' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
