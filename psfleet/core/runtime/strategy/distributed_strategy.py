"""Strategies: Settings (checked and complete), DistributedStrategy (Paddle's API), and how they are merged.

Open it to add a part, to change which parts contradict each other, or to see how Paddle's `a_sync_configs`
become a consistency mode. `strategy_parts.py` has the settings of each part.
"""

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.files import read_toml
from psfleet.core.base.settings.declaration import settings_of
from psfleet.core.engine.consistency import MODES, ConsistencyMode
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
    settings_of_mode,
)

_AVERAGES = "workers that average wait for each other; use sync"
_ONE_OPTIMIZER = "each replaces the optimizer; switch one off"
_CONTRADICTIONS = (
    ("dgc", "lars", _ONE_OPTIMIZER),
    ("dgc", "lamb", _ONE_OPTIMIZER),
    ("lars", "lamb", _ONE_OPTIMIZER),
    ("dgc", "amp", "what dgc sends are few values, and it keeps what they leave to the last bit"),
    ("dgc", "wire", "what dgc sends are few values, and it keeps what they leave to the last bit"),
    (
        "amp",
        "wire",
        'both say how gradients travel; wire = "bf16" does what amp does, and pulls too',
    ),
    ("dgc", "localsgd", "one sends the largest gradients of each step, the other sends none"),
    ("localsgd", "pipeline", "stages have different parameters, so there is nothing to average"),
)
PARTS: dict[str, Any] = {
    "consistency": ConsistencySettings,
    "gradient_merge": GradientMergeSettings,
    "dgc": DGCSettings,
    "lars": LarsSettings,
    "lamb": LambSettings,
    "recompute": RecomputeSettings,
    "pipeline": PipelineSettings,
    "amp": AMPSettings,
    "localsgd": LocalSGDSettings,
    "wire": WireSettings,
}
_OF_THREADS = "psfleet sends without the reference's thread pools; leave it out"
_ELSEWHERE = {
    "independent_recv_thread": "a pull is answered when it is asked for; leave it out",
    "launch_barrier": "workers wait for servers and for each other by themselves; leave it out",
    "lr_decay_steps": "the learning rate is the worker's and travels with each push; leave it out",
    "min_send_grad_num_before_recv": _OF_THREADS,
    "runtime_split_send_recv": _OF_THREADS,
    "send_wait_times": _OF_THREADS,
    "thread_pool_size": _OF_THREADS,
}
_WORDS: dict[type, str] = {Mapping: "dict", str: "str", bool: "bool"}


@dataclass(frozen=True)
class Settings:
    """Complete strategy, whose parts have been checked against each other.

        Settings.from_parts({"consistency": {"mode": "ssp", "staleness": 4}})

    A part that is None is off.
    """

    consistency: ConsistencySettings = dataclasses.field(default_factory=ConsistencySettings)
    gradient_merge: GradientMergeSettings | None = None
    dgc: DGCSettings | None = None
    lars: LarsSettings | None = None
    lamb: LambSettings | None = None
    recompute: RecomputeSettings | None = None
    pipeline: PipelineSettings | None = None
    amp: AMPSettings | None = None
    localsgd: LocalSGDSettings | None = None
    wire: WireSettings | None = None

    def __post_init__(self) -> None:
        for first, second, reason in _CONTRADICTIONS:
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ConfigError(f"{first} and {second} contradict each other: {reason}")
        self._check_mode()
        if self.amp and self.amp.dtype == "float16" and self.pipeline and self.pipeline.stages > 1:
            raise ConfigError(
                "amp with float16 and a pipeline of several stages contradict each other: a "
                "stage would skip a step by its own gradients alone; use bfloat16"
            )

    def _check_mode(self) -> None:
        mode = self.consistency.declared
        conflicts = {} if mode.has_rounds else {"localsgd": _AVERAGES}
        for part, reason in {**conflicts, **mode.conflicts}.items():
            if getattr(self, part) is not None:
                raise ConfigError(
                    f"{part} and the consistency mode {mode.name!r} contradict each other: {reason}"
                )

    @classmethod
    def from_parts(cls, parts: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """Return the strategy with these parts switched on.

        Args:
            parts: For each part its settings by name; {} for a part with default settings.

        Raises:
            ConfigError: A part or setting is unknown, of the wrong type or contradicts another.
        """
        check_parts(parts)
        return cls(**{name: build(name, settings) for name, settings in parts.items()})


def check_parts(parts: Any) -> None:
    """Raise an error unless the value is a mapping of known parts, each a mapping of settings.

    Raises:
        ConfigError: The value is something else. The message says what is wrong.
    """
    if not isinstance(parts, Mapping):
        raise ConfigError(f"a strategy is {parts!r}; it must be a table of parts")
    for name, settings in parts.items():
        if name not in PARTS:
            raise ConfigError(f"a strategy has no part {name!r}; it has {', '.join(PARTS)}")
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"strategy part {name!r} is {settings!r}; it must be a table of settings"
            )


def build(part: str, values: Mapping[str, Any]) -> Any:
    """Return one part of a strategy from its settings by name.

    Raises:
        ConfigError: A setting is unknown, of the wrong type or contradicts another.
    """
    settings = {declared.name: declared for declared in settings_of(PARTS[part])}
    for name in values:
        if name not in settings:
            raise ConfigError(
                f"strategy part {part!r} has no setting {name!r}; it has {', '.join(settings)}"
            )
    return PARTS[part](
        **{name: settings[name].take(value, f"{part} {name}") for name, value in values.items()}
    )


def consistency_of(a_sync: bool, configs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Paddle's `a_sync` and `a_sync_configs` to settings of the part `consistency`.

    Raises:
        ConfigError: A setting is unknown, of the wrong type or contradicts another.
    """
    check_configs(configs)
    mode = _asked(configs)
    if not a_sync or configs.get("k_steps") == -1:
        if mode is not None:
            name = next(iter(mode.a_sync))
            raise ConfigError(
                f"a_sync_configs {name} = {configs[name]} asks for a mode that is not sync, "
                "but a_sync is False or k_steps -1; set a_sync or leave it out"
            )
        return {"mode": "sync"}
    if mode is None:
        return {"mode": "async"}
    mode_values = {
        mode.a_sync[name]: value for name, value in configs.items() if name in mode.a_sync
    }
    return {"mode": mode.name, **mode_values}


def check_configs(configs: Mapping[str, Any]) -> None:
    """Raise an error for names or types in `a_sync_configs` that no mode has.

    Raises:
        ConfigError: A setting is unknown or of the wrong type.
    """
    names = sorted(name for mode in MODES.values() for name in mode.a_sync)
    for name, value in configs.items():
        if name in _ELSEWHERE:
            raise ConfigError(f"a_sync_configs {name} has no meaning here: {_ELSEWHERE[name]}")
        if name not in names:
            raise ConfigError(f"a_sync_configs has no setting {name!r}; it has {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"a_sync_configs {name} is {value!r}; it must be a whole number")
    if configs.get("k_steps", 0) < -1:
        raise ConfigError(
            f"a_sync_configs k_steps is {configs['k_steps']}; it must be 0 (async), above 0 (geo) or -1 "
            "(sync)"
        )


def _asked(configs: Mapping[str, Any]) -> ConsistencyMode | None:
    """Return the mode that `a_sync_configs` selects, or None if it selects none.

    The first of a mode's names is the key that selects the mode; its other names are settings that need this
    key.
    """
    modes: dict[str, ConsistencyMode] = {}
    for mode in MODES.values():
        first, *other_keys = mode.a_sync or [""]
        if first in configs and configs[first] not in mode.a_sync_off:
            modes[first] = mode
            continue
        usual = next(iter(mode.a_sync_off), "not given")
        for name in filter(configs.__contains__, other_keys):
            raise ConfigError(
                f"a_sync_configs {name} is {configs[name]} and {first} is {usual}: it is a "
                f"setting of {mode.name}, which {first} asks for; leave it out or set {first} too"
            )
    if len(modes) > 1:
        names = [name for name in configs if name in modes]
        raise ConfigError(
            f"a_sync_configs {names[0]} and {names[1]} contradict each other: each asks for a "
            "mode of its own; leave one out"
        )
    return next(iter(modes.values()), None)


_SWITCHES = [name for name in PARTS if name != "consistency"]


class DistributedStrategy:
    """Strategy with the names of Paddle's fleet: a switch and a dict of settings for each part.

        strategy = DistributedStrategy(a_sync=True)
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}

    `a_sync` selects the consistency mode: False is sync, and with True `a_sync_configs` selects the mode:

        {}                                              async (k_steps 0 too, as in Paddle)
        {"k_steps": 100}                                geo
        {"max_merge_var_num": 8, "send_queue_size": 16} half-async
        {"staleness": 4}                                ssp, which Paddle does not have

    `wire` is not a switch but a compression, "bf16" or "int8", for pushes and pulls. `wire_configs` can set
    another compression for one of the two: {"pull": "bf16"}.

    Reading a part's configuration returns all of its settings; assigning one replaces it. Each assignment is
    checked at once, also if the part is off: unknown names and contradictions raise ConfigError.
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
        switches = ["a_sync", *_SWITCHES]
        if switch not in switches:
            raise ConfigError(
                f"DistributedStrategy has no setting {name!r}; it has "
                f"{', '.join(switches)}, each with _configs"
            )
        kind = Mapping if name.endswith("_configs") else str if name == "wire" else bool
        if not isinstance(value, kind):
            raise ConfigError(
                f"DistributedStrategy {name} is {value!r}; it must be a {_WORDS[kind]}"
            )
        if isinstance(value, Mapping):
            _check_configs(switch, value)
            value = dict(value)
        self._said[name] = value
        self.parts()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name.removesuffix("_configs") not in ("a_sync", *_SWITCHES):
            raise AttributeError(name)
        switch = name.removesuffix("_configs")
        if switch == name:
            return self._said.get(name, False)
        # Read-only: settings must be assigned, so that __setattr__ checks them.
        return MappingProxyType(self._defaults(switch) | self._said.get(name, {}))

    def _defaults(self, switch: str) -> dict[str, Any]:
        if switch == "a_sync":
            return {"k_steps": 0 if self.a_sync else -1}
        if switch == "wire" and self.wire:
            return {"push": self.wire, "pull": self.wire}
        return {declared.name: declared.default for declared in settings_of(PARTS[switch])}

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return the parts of the script's strategy that are on, with the settings that the script names.

        An example is {"consistency": {"mode": "ssp", "staleness": 4}, "gradient_merge": {"k_steps": 2}}.
        """
        parts: dict[str, dict[str, Any]] = {
            name: dict(self._said.get(f"{name}_configs", {}))
            for name in _SWITCHES
            if self._said.get(name)
        }
        if self.wire:
            parts["wire"] = {"push": self.wire, "pull": self.wire, **parts["wire"]}
        if "a_sync" in self._said:
            parts["consistency"] = consistency_of(self.a_sync, self._said.get("a_sync_configs", {}))
        check_parts(parts)
        return parts


def _check_configs(switch: str, value: Mapping[str, Any]) -> None:
    """Raise an error for settings that the part does not have, whether the part is on or off."""
    if switch == "a_sync":
        check_configs(value)
    else:
        build(switch, value)


def resolve(
    strategy: DistributedStrategy | Mapping[str, Mapping[str, Any]] | None, overrides: str
) -> Settings:
    """Merge the script's strategy with the launcher's settings, which take precedence.

    Args:
        strategy: Strategy of the script, or a mapping with the contents of a strategy file, or None.
        overrides: Settings of the launcher: JSON with the contents of a strategy file, or empty.

    Raises:
        ConfigError: The overrides are not JSON, or something is unknown or contradictory.
    """
    source: Any = strategy.parts() if isinstance(strategy, DistributedStrategy) else strategy
    check_parts({} if source is None else source)
    parts: dict[str, Any] = dict(source or {})
    if overrides:
        try:
            source = json.loads(overrides)
        except (RecursionError, ValueError) as error:
            raise ConfigError(
                f"PSFLEET_STRATEGY is {overrides!r:.200}, which is not JSON: {error}"
            ) from None
        check_parts(source)
        parts = overridden(parts, source)
    return Settings.from_parts(parts)


def overridden(
    parts: Mapping[str, Mapping[str, Any]], by: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Merge the settings of two sources. Settings in `by` replace those in `parts`.

    If `by` has another consistency mode, settings of the replaced mode are dropped, because they would be
    errors in the new mode.
    """
    result = {name: {**parts.get(name, {}), **by.get(name, {})} for name in {**parts, **by}}
    before = parts.get("consistency", {}).get("mode")
    now = result.get("consistency", {}).get("mode")
    if now != before:
        for setting in settings_of_mode(before):
            if setting not in by.get("consistency", {}):
                result["consistency"].pop(setting, None)
    return result


def load_strategy_file(path: str) -> dict[str, dict[str, Any]]:
    """Read the parts of a strategy file (TOML).

    Raises:
        ConfigError: The file is missing, not TOML, or has an unknown part or setting.
    """
    parts = read_toml(path, f"strategy file {path!r}")
    Settings.from_parts(parts)
    return parts


Decide = Callable[[DistributedStrategy | Mapping[str, Any] | None], Settings]

_decide: Decide | None = None


def decide_by(decide: Decide) -> None:
    """Set the function that `adopt` calls. The fleet of this process registers itself here."""
    global _decide
    _decide = decide


def adopt(strategy: DistributedStrategy | Mapping[str, Any] | None) -> Settings:
    """Use this strategy from now on, and return it merged with the launcher's settings.

    Args:
        strategy: Strategy of the script, or None to keep the present one.

    Raises:
        ConfigError: The argument is not a strategy, or the fleet is connected and the strategy needs another
            connection.
    """
    if _decide is None:
        # A script may use an optimizer without importing the fleet. The fleet imports the optimizers, so this
        # package cannot import the fleet at its top. Importing the fleet calls `decide_by`.
        importlib.import_module("psfleet.fleet")
    assert _decide is not None
    return _decide(strategy)
