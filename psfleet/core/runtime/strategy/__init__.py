"""Strategy of a training job: the settings, and which source of a setting takes precedence.

A setting can come from four sources. For each setting, the first source that has it is used:

1. flags of psfleet-launch,
2. its strategy file,
3. its job file (a worker gets these three as PSFLEET_STRATEGY),
4. the script's DistributedStrategy.

Otherwise the setting has its default. A strategy file is TOML with a table for each part that is to be on:

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
