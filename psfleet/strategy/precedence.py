"""Who has the last word: the launcher, its strategy file, the script."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psfleet.errors import ConfigError
from psfleet.strategy.consistency_settings import settings_of_mode
from psfleet.strategy.distributed_strategy import DistributedStrategy
from psfleet.strategy.strategy_settings import Settings, check_parts

__all__ = ["load_strategy_file", "overridden", "resolve"]


def resolve(
    strategy: DistributedStrategy | Mapping[str, Mapping[str, Any]] | None, overrides: str
) -> Settings:
    """The settings that count.

    Args:
        strategy: What the script says, perhaps in the form of a strategy file.
        overrides: What the launcher says: JSON in the form of a strategy file, or empty.

    Raises:
        ConfigError: The overrides are not JSON, or something is unknown or contradictory.
    """
    said: Any = strategy.parts() if isinstance(strategy, DistributedStrategy) else strategy
    check_parts({} if said is None else said)
    parts: dict[str, Any] = dict(said or {})
    if overrides:
        try:
            said = json.loads(overrides)
        except ValueError as error:
            raise ConfigError(
                f"PSFLEET_STRATEGY is {overrides!r}, which is not JSON: {error}"
            ) from None
        check_parts(said)
        parts = overridden(parts, said)
    return Settings.from_parts(parts)


def overridden(
    parts: Mapping[str, Mapping[str, Any]], by: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The settings of two sources; `by` has the last word on each.

    Where it names another consistency mode, the settings of the mode that it replaces go too.
    """
    merged = {name: {**parts.get(name, {}), **by.get(name, {})} for name in {**parts, **by}}
    before = parts.get("consistency", {}).get("mode")
    now = merged.get("consistency", {}).get("mode")
    if now != before:
        for setting in settings_of_mode(before):
            if setting not in by.get("consistency", {}):
                merged["consistency"].pop(setting, None)
    return merged


def load_strategy_file(path: str) -> dict[str, dict[str, Any]]:
    """The parts of a strategy file.

    Raises:
        ConfigError: It is missing, not TOML, or says something unknown.
    """
    try:
        parts = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"strategy file {path!r} cannot be read: {error}") from None
    Settings.from_parts(parts)
    return parts
