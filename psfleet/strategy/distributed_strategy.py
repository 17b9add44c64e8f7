"""A strategy as a trainer script says it."""

from typing import Any

from psfleet.errors import ConfigError
from psfleet.strategy.a_sync import consistency_of
from psfleet.strategy.strategy_settings import PARTS, check_parts

__all__ = ["DistributedStrategy"]


_SWITCHES = [name for name in PARTS if name != "consistency"]


class DistributedStrategy:
    """A strategy as scripts for the reference write it: a switch and a dict for each part.

        strategy = DistributedStrategy(a_sync=True)
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}

    `a_sync` is the mode: False sync, True one of the others, as `a_sync_configs` says:

        {}                                              async (k_steps 0 too, as in the reference)
        {"k_steps": 100}                                geo
        {"max_merge_var_num": 8, "send_queue_size": 16} half-async
        {"staleness": 4}                                ssp, which the reference does not have
        {"staleness_damping": 0.5}                      with any of these but geo: late gradients count less
        {"delay_compensation": 1.0}                     likewise: they are corrected (DC-ASGD)

    `wire` is not a switch but a form, "bf16" or "int8", for pushes and pulls; `wire_configs` may name
    another one for either: {"pull": "bf16"}.

    Any other name is refused, and so is a configuration that contradicts itself.
    """

    def __init__(self, **settings: Any) -> None:
        self._said: dict[str, Any] = {}
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_said":
            super().__setattr__(name, value)
            return
        switch = name.removesuffix("_configs")
        known = ["a_sync", *_SWITCHES]
        if switch not in known:
            raise ConfigError(
                f"DistributedStrategy has no setting {name!r}; it has "
                f"{', '.join(known)}, each with _configs"
            )
        wanted = dict if name.endswith("_configs") else str if name == "wire" else bool
        if not isinstance(value, wanted):
            raise ConfigError(
                f"DistributedStrategy {name} is {value!r}; it must be a {wanted.__name__}"
            )
        self._said[name] = value
        self.parts()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name.removesuffix("_configs") not in ("a_sync", *_SWITCHES):
            raise AttributeError(name)
        return self._said.get(name, {} if name.endswith("_configs") else False)

    def parts(self) -> dict[str, dict[str, Any]]:
        """What the script says, as `Settings.from_parts` takes it."""
        said: dict[str, dict[str, Any]] = {
            name: dict(self._said.get(f"{name}_configs", {}))
            for name in _SWITCHES
            if self._said.get(name)
        }
        if self.wire:
            said["wire"] = {"push": self.wire, "pull": self.wire, **said["wire"]}
        if "a_sync" in self._said:
            said["consistency"] = consistency_of(self.a_sync, self.a_sync_configs)
        check_parts(said)
        return said
