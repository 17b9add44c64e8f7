"""A whole strategy, and what in it contradicts each other."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psfleet.errors import ConfigError
from psfleet.settings.declaration import settings_of
from psfleet.strategy.strategy_parts import (
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


@dataclass(frozen=True)
class Settings:
    """A whole strategy; a part that is None is off."""

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
        if self.recompute and self.pipeline and self.pipeline.schedule == "zero-bubble":
            raise ConfigError(
                "recompute and the pipeline schedule zero-bubble contradict each other: "
                "one drops what the other keeps; use 1f1b"
            )
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
        """The strategy with these parts on, each given as its settings by name.

        Raises:
            ConfigError: A part or setting is unknown, of the wrong type or contradicts another.
        """
        check_parts(parts)
        return cls(**{name: build(name, settings) for name, settings in parts.items()})


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


def check_parts(parts: Any) -> None:
    """Refuse what has not the form of a strategy: known parts, each a table of settings.

    Raises:
        ConfigError: It is not.
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
    """One part of a strategy, of its settings by name.

    Raises:
        ConfigError: A setting is unknown, of the wrong type or contradicts another.
    """
    settings = {one.name: one for one in settings_of(PARTS[part])}
    for name in values:
        if name not in settings:
            raise ConfigError(
                f"strategy part {part!r} has no setting {name!r}; it has {', '.join(settings)}"
            )
    return PARTS[part](
        **{name: settings[name].take(value, f"{part} {name}") for name, value in values.items()}
    )
