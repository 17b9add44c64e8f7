"""How a fleet trains: what a strategy may say, and who has the last word.

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

from psfleet.strategy.consistency import Consistency
from psfleet.strategy.distributed_strategy import DistributedStrategy
from psfleet.strategy.execution import Pipeline, Recompute
from psfleet.strategy.precedence import load_strategy_file, overridden, resolve
from psfleet.strategy.strategy_settings import Settings
from psfleet.strategy.update_rules import DGC, GradientMerge, Lamb, Lars, LocalSGD
from psfleet.strategy.wire_format import AMP, Wire

__all__ = [
    "AMP",
    "DGC",
    "Consistency",
    "DistributedStrategy",
    "GradientMerge",
    "Lamb",
    "Lars",
    "LocalSGD",
    "Pipeline",
    "Recompute",
    "Settings",
    "Wire",
    "load_strategy_file",
    "overridden",
    "resolve",
]
