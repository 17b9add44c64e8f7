"""Which strategy counts in this process: its fleet decides, and tells optimizers that ask."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from psfleet.strategy.distributed_strategy import DistributedStrategy
from psfleet.strategy.strategy_settings import Settings

__all__ = ["adopt", "decide_by"]

Decide = Callable[[DistributedStrategy | Mapping[str, Any] | None], Settings]

_decide: Decide | None = None


def decide_by(decide: Decide) -> None:
    """Let the fleet of this process decide which settings count."""
    global _decide
    _decide = decide


def adopt(strategy: DistributedStrategy | Mapping[str, Any] | None) -> Settings:
    """Train by this strategy from now on; None: by the one before. Return the settings that count.

    Raises:
        ConfigError: It is no strategy, or the fleet is connected and needs another connection for it.
    """
    if _decide is None:
        # A script may use an optimizer without naming the fleet. The fleet is built on the
        # optimizers, so this package cannot import it; importing it calls `decide_by`.
        importlib.import_module("psfleet.fleet")
    assert _decide is not None
    return _decide(strategy)
