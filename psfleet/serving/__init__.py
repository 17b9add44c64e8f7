"""Prediction without a fleet: models in this process, see docs/serving.md.

model = psfleet.serving.load("model", "features.toml")
chances = model({"user": [17, 42], "item": [[3, 5], [8]]})
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
"""Names whose modules load gRPC, and are loaded when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'psfleet.serving' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
