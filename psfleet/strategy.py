"""How a fleet trains: what DistributedStrategy may say and who has the last word."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from psfleet.errors import ConfigError
from psfleet.shard.events import Mode

__all__ = ["DistributedStrategy", "resolve"]


@dataclass
class DistributedStrategy:
    """Settings of a distributed optimizer, with the reference's names.

    Attributes:
        a_sync: False: sync mode, rounds in which the gradients of all workers are averaged.
            True: async mode, each push is applied when it arrives.
        a_sync_configs: Details of async mode. `k_steps` must be 0 (-1 means sync, as in the reference).
    """

    a_sync: bool = False
    a_sync_configs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        if name not in known:
            raise ConfigError(f"DistributedStrategy has no setting {name!r}; it has {', '.join(known)}")
        super().__setattr__(name, value)

    @property
    def mode(self) -> Mode:
        """The consistency mode that the settings mean.

        Raises:
            ConfigError: They contradict each other or ask for what psfleet does not have.
        """
        steps = self.a_sync_configs.get("k_steps", 0)
        unknown = sorted(set(self.a_sync_configs) - {"k_steps"})
        if unknown:
            raise ConfigError(f"a_sync_configs has no setting {unknown[0]!r}; it has k_steps")
        if steps not in (0, -1):
            raise ConfigError(f"a_sync_configs k_steps is {steps!r}; only 0 (async) is available")
        return "async" if self.a_sync and steps == 0 else "sync"


def resolve(strategy: DistributedStrategy | None, overrides: str) -> Mode:
    """The mode that counts: 1. the launcher's flags (`overrides`, JSON), 2. the script, 3. sync.

    Raises:
        ConfigError: The overrides are not JSON, or name something unknown.
    """
    mode = (strategy or DistributedStrategy()).mode
    if not overrides:
        return mode
    try:
        said = json.loads(overrides)
    except ValueError as error:
        raise ConfigError(f"PSFLEET_STRATEGY is {overrides!r}, which is not JSON: {error}") from None
    unknown = sorted(set(said) - {"mode"})
    if unknown:
        raise ConfigError(f"PSFLEET_STRATEGY has no setting {unknown[0]!r}; it has mode")
    match said.get("mode", mode):
        case "sync":
            return "sync"
        case "async":
            return "async"
        case other:
            raise ConfigError(f"PSFLEET_STRATEGY mode is {other!r}; it must be sync or async")
