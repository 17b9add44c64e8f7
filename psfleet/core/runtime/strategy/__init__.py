"""Strategies of a fleet's training: their settings, and their precedence.

Settings come from four places; for each single key the first one that says something wins:
1. flags of psfleet-launch, 2. its strategy file, 3. its job file (these reach a worker as
PSFLEET_STRATEGY), 4. the script's DistributedStrategy. What nobody says has the default given here.

A strategy file is TOML with a table for each part that is to be on:

    [consistency]
    mode = "ssp"
    staleness = 4
    [gradient_merge]
    k_steps = 4
"""

from psfleet.core.runtime.strategy.distributed_strategy import (
    DistributedStrategy,
    Settings,
    load_strategy_file,
    overridden,
    resolve,
)
from psfleet.core.runtime.strategy.strategy_parts import (
    AMPSettings,
    ConsistencySettings,
    DGCSettings,
    GradientMergeSettings,
    LambSettings,
    LarsSettings,
    LocalSGDSettings,
    PipelineSettings,
    RecomputeSettings,
    WireSettings,
)

__all__ = [
    "AMPSettings",
    "ConsistencySettings",
    "DGCSettings",
    "DistributedStrategy",
    "GradientMergeSettings",
    "LambSettings",
    "LarsSettings",
    "LocalSGDSettings",
    "PipelineSettings",
    "RecomputeSettings",
    "Settings",
    "WireSettings",
    "load_strategy_file",
    "overridden",
    "resolve",
]
