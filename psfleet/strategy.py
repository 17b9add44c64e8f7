"""How a fleet trains: what a strategy may say, and who has the last word.

Settings come from three places; for each single key the first one that says something wins:
1. flags of psfleet-launch, 2. its strategy file (both reach a worker as PSFLEET_STRATEGY),
3. the script's DistributedStrategy. What nobody says has the default given here.

A strategy file is TOML with a table for each part that is to be on:

    [consistency]
    mode = "ssp"
    staleness = 4
    [gradient_merge]
    k_steps = 4
"""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from psfleet.a_sync import consistency_of
from psfleet.errors import ConfigError
from psfleet.pipeline.schedule import Kind, check_kind
from psfleet.runtime import Format
from psfleet.shard.events import Mode

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


@dataclass(frozen=True)
class Consistency:
    """When pushes take effect, and how far workers may be apart.

    Attributes:
        mode: sync: in rounds averaged over the workers. async: at once. ssp: at once, no worker more
            than `staleness` pushes ahead of another. geo: each worker trains `k_steps` steps on copies
            of its own, then what it has learned is added. half-async: at once, several gradients merged.
        staleness: ssp only.
        k_steps: geo only: steps between two exchanges.
        copied_rows: geo only: rows of a sparse table that a worker keeps copies of, at most.
        max_merge: half-async only: gradients that are summed to one push, at most.
        queue_size: half-async only: gradients that may wait before the worker does.
    """

    mode: Mode = "sync"
    staleness: int = 2
    k_steps: int = 10
    copied_rows: int = 1 << 20
    max_merge: int = 8
    queue_size: int = 16

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"consistency mode is {self.mode!r}; it must be one of {', '.join(get_args(Mode))}"
            )
        for field in dataclasses.fields(self)[1:]:
            value, least = getattr(self, field.name), 0 if field.name == "staleness" else 1
            if not least <= value < 2**31:
                raise ConfigError(
                    f"consistency {field.name} is {value}; it must be at least {least} "
                    "and below 2^31"
                )
            if value != field.default and field.name not in _SETTINGS_OF.get(self.mode, ()):
                raise ConfigError(
                    f"consistency {field.name} = {value} and mode = {self.mode!r} contradict "
                    f"each other: it is a setting of {_mode_of(field.name)}; leave one out"
                )


_SETTINGS_OF = {
    "ssp": ("staleness",),
    "geo": ("k_steps", "copied_rows"),
    "half-async": ("max_merge", "queue_size"),
}


def _mode_of(setting: str) -> str:
    """The mode that a setting belongs to."""
    return next(mode for mode, settings in _SETTINGS_OF.items() if setting in settings)


@dataclass(frozen=True)
class GradientMerge:
    """Push the sum (or the mean, `avg`) of the gradients of `k_steps` steps in place of each."""

    k_steps: int = 1
    avg: bool = True

    def __post_init__(self) -> None:
        if self.k_steps < 1:
            raise ConfigError(f"gradient_merge k_steps is {self.k_steps}; it must be at least 1")


@dataclass(frozen=True)
class DGC:
    """Momentum becomes DGCMomentum: only the largest gradients are sent, the rest is kept."""

    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: tuple[float, ...] = (0.999,)

    def __post_init__(self) -> None:
        for name, least in (("rampup_begin_step", 0), ("rampup_step", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"dgc {name} is {getattr(self, name)}; it must be at least {least}"
                )
        if not self.sparsity or not all(0 <= part < 1 for part in self.sparsity):
            raise ConfigError(
                f"dgc sparsity is {list(self.sparsity)}; it must be a list of numbers in [0, 1)"
            )


@dataclass(frozen=True)
class AMP:
    """Gradients travel in 16 bits.

    Attributes:
        dtype: bfloat16, with the range of float32; or float16, with more digits and loss scaling.
        init_loss_scaling: What float16 gradients are multiplied by on their way, at the start.
        incr_every_n_steps, incr_ratio: After so many steps that fit, the scale is multiplied.
        decr_every_n_nan_or_inf, decr_ratio: After so many in a row that do not, likewise. Steps that
            do not fit are skipped.
        use_dynamic_loss_scaling: False: the scale stays as it is.
    """

    dtype: str = "bfloat16"
    init_loss_scaling: float = 32768.0
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8
    use_dynamic_loss_scaling: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ConfigError(f"amp dtype is {self.dtype!r}; it must be bfloat16 or float16")
        for name, least in (
            ("incr_every_n_steps", 1),
            ("decr_every_n_nan_or_inf", 1),
            ("init_loss_scaling", 1),
            ("incr_ratio", 1),
        ):
            if not least <= getattr(self, name) <= 2**100:
                raise ConfigError(
                    f"amp {name} is {getattr(self, name)}; it must be at least {least} "
                    "and at most 2^100"
                )
        if not 0 < self.decr_ratio <= 1:
            raise ConfigError(
                f"amp decr_ratio is {self.decr_ratio}; it must be above 0 and at most 1"
            )
        if self.dtype == "bfloat16":
            self._refuse_scaling()

    def _refuse_scaling(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            if getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"amp {field.name} is {getattr(self, field.name)} and dtype is bfloat16, "
                    "which needs no loss scaling; leave it out or use float16"
                )


@dataclass(frozen=True)
class LocalSGD:
    """Each worker trains dense parameters by itself; every `k_steps` steps they are averaged.

    Attributes:
        k_steps: Updates between two averages.
        begin_step: Updates before that begins, which are made on the servers.
    """

    k_steps: int = 1
    begin_step: int = 1

    def __post_init__(self) -> None:
        for name, least in (("k_steps", 1), ("begin_step", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"localsgd {name} is {getattr(self, name)}; it must be at least {least}"
                )


@dataclass(frozen=True)
class Lars:
    """Momentum becomes LarsMomentum."""

    lars_coeff: float = 0.001
    lars_weight_decay: float = 0.0005
    epsilon: float = 0.0
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lars_coeff", "lars_weight_decay", "epsilon"):
            _check_size(f"lars {name}", getattr(self, name))


@dataclass(frozen=True)
class Lamb:
    """Adam becomes Lamb."""

    lamb_weight_decay: float = 0.01
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_size("lamb lamb_weight_decay", self.lamb_weight_decay)


def _check_size(what: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{what} is {value}; it must be a finite number of at least 0")


@dataclass(frozen=True)
class Pipeline:
    """The program is cut into pieces that stages run on micro-batches.

    Attributes:
        schedule: gpipe, 1f1b, interleaved or zero-bubble.
        stages: Stage processes of each worker (`psfleet-launch --stages`). A script that runs by
            itself is cut in the same places and runs the pieces in turn.
        micro_batches: How many parts each batch is cut into.
        chunks: Pieces of each stage; 0: 2 where the schedule is interleaved, else 1.
        queue_size: Messages to a stage that may wait before the sender does.
        copies: Processes of each stage, which take micro-batches in turn; empty: one each.
    """

    schedule: Kind = "1f1b"
    stages: int = 1
    micro_batches: int = 1
    chunks: int = 0
    queue_size: int = 30
    copies: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_kind(self.schedule)
        for name, least in (("stages", 1), ("micro_batches", 1), ("chunks", 0), ("queue_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"pipeline {name} is {getattr(self, name)}; it must be at least {least}"
                )
        if self.copies and (len(self.copies) != self.stages or min(self.copies) < 1):
            raise ConfigError(
                f"pipeline copies is {self.copies}; it must name at least 1 for each of "
                f"{self.stages} stages"
            )
        if self.chunks > 1 and self.schedule == "zero-bubble":
            raise ConfigError(
                f"pipeline schedule zero-bubble and chunks = {self.chunks} contradict "
                "each other: it works with 1; use interleaved"
            )

    @property
    def per_stage(self) -> int:
        """Pieces of each stage."""
        return self.chunks or (2 if self.schedule == "interleaved" else 1)


@dataclass(frozen=True)
class Recompute:
    """Activations between checkpoints are dropped and computed again in the backward pass.

    Attributes:
        checkpoints: Names of variables or layers. None: the first run chooses.
        memory_budget: What the choice keeps within, such as "512MiB" or "2GB". Empty: what cutting at
            every sqrt(n)-th operation takes.
    """

    checkpoints: tuple[str, ...] = ()
    memory_budget: str = ""

    def __post_init__(self) -> None:
        if self.checkpoints and self.memory_budget:
            raise ConfigError(
                "recompute has checkpoints and a memory_budget; the budget is for "
                "choosing checkpoints: leave one out"
            )
        self.budget  # noqa: B018  # refuses what is no size

    @property
    def budget(self) -> int | None:
        """memory_budget in bytes."""
        if not self.memory_budget:
            return None
        number, unit = re.fullmatch(r"([0-9.]*)\s*(.*)", self.memory_budget.strip()).groups()  # type: ignore[union-attr]  # matches anything
        factor = _UNITS.get(unit)
        if factor is None or not re.fullmatch(r"\d+(\.\d+)?", number):
            raise ConfigError(
                f"recompute memory_budget is {self.memory_budget!r}; it must be a number "
                f"and one of {', '.join(filter(None, _UNITS))}"
            )
        return int(float(number) * factor)


_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}


_FORMATS: dict[str, Format] = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


@dataclass(frozen=True)
class Wire:
    """In which form values travel between workers and servers: fp32, bf16 or int8.

    Attributes:
        push: Of gradients.
        pull: Of weights.
    """

    push: str = "fp32"
    pull: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("push", "pull"):
            if getattr(self, name) not in _FORMATS:
                raise ConfigError(
                    f"wire {name} is {getattr(self, name)!r}; it must be one of {', '.join(_FORMATS)}"
                )

    @classmethod
    def both(cls, form: str) -> "Wire":
        """One form for both ways."""
        return cls(form, form)

    @property
    def gradients(self) -> Format:
        """The form of gradients."""
        return _FORMATS[self.push]

    @property
    def values(self) -> Format:
        """The form of weights."""
        return _FORMATS[self.pull]


@dataclass(frozen=True)
class Settings:
    """A whole strategy; a part that is None is off."""

    consistency: Consistency = dataclasses.field(default_factory=Consistency)
    gradient_merge: GradientMerge | None = None
    dgc: DGC | None = None
    lars: Lars | None = None
    lamb: Lamb | None = None
    recompute: Recompute | None = None
    pipeline: Pipeline | None = None
    amp: AMP | None = None
    localsgd: LocalSGD | None = None
    wire: Wire | None = None

    def __post_init__(self) -> None:
        for first, second, reason in _CONTRADICTIONS:
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ConfigError(f"{first} and {second} contradict each other: {reason}")
        if self.localsgd is not None and self.consistency.mode != "sync":
            raise ConfigError(
                f"localsgd and the consistency mode {self.consistency.mode!r} contradict each "
                "other: workers that average wait for each other; use sync"
            )
        for part, reason in _NOT_WITH_GEO.items():
            if self.consistency.mode == "geo" and getattr(self, part) is not None:
                raise ConfigError(
                    f"{part} and the consistency mode 'geo' contradict each other: {reason}"
                )
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

    @classmethod
    def from_parts(cls, parts: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """The strategy with these parts on, each given as its settings by name.

        Raises:
            ConfigError: A part or setting is unknown, of the wrong type or contradicts another.
        """
        _check_parts(parts)
        return cls(**{name: _build(name, said) for name, said in parts.items()})


_NOT_WITH_GEO = {
    "dgc": "one sends the largest gradients of each step, the other none",
    "amp": "in geo mode gradients do not travel; leave amp out",
    "wire": "what travels in geo mode is added to the weights as it is; leave wire out",
    "pipeline": "stages have different parameters, and geo counts them as workers of one model",
}
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

_PARTS: dict[str, Any] = {
    "consistency": Consistency,
    "gradient_merge": GradientMerge,
    "dgc": DGC,
    "lars": Lars,
    "lamb": Lamb,
    "recompute": Recompute,
    "pipeline": Pipeline,
    "amp": AMP,
    "localsgd": LocalSGD,
    "wire": Wire,
}
_SWITCHES = [name for name in _PARTS if name != "consistency"]


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
        _check_parts(said)
        return said


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
    _check_parts({} if said is None else said)
    parts: dict[str, Any] = dict(said or {})
    if overrides:
        try:
            said = json.loads(overrides)
        except ValueError as error:
            raise ConfigError(
                f"PSFLEET_STRATEGY is {overrides!r}, which is not JSON: {error}"
            ) from None
        _check_parts(said)
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
        for setting in _SETTINGS_OF.get(before or "", ()):
            if setting not in by.get("consistency", {}):
                merged["consistency"].pop(setting, None)
    return merged


def load_strategy_file(path: str) -> dict[str, dict[str, Any]]:
    """The parts of a strategy file.

    Raises:
        ConfigError: It is missing, not TOML, or says something unknown.
    """
    try:
        parts = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"strategy file {path!r} cannot be read: {error}") from None
    Settings.from_parts(parts)
    return parts


def _check_parts(parts: Any) -> None:
    if not isinstance(parts, Mapping):
        raise ConfigError(f"a strategy is {parts!r}; it must be a table of parts")
    for name, said in parts.items():
        if name not in _PARTS:
            raise ConfigError(f"a strategy has no part {name!r}; it has {', '.join(_PARTS)}")
        if not isinstance(said, Mapping):
            raise ConfigError(f"strategy part {name!r} is {said!r}; it must be a table of settings")


def _build(part: str, said: Mapping[str, Any]) -> Any:
    kind = _PARTS[part]
    types = get_type_hints(kind)
    for name, value in said.items():
        if name not in types:
            raise ConfigError(
                f"strategy part {part!r} has no setting {name!r}; it has {', '.join(types)}"
            )
        if not _fits(value, types[name]):
            raise ConfigError(f"{part} {name} is {value!r}; it must be {_spoken(types[name])}")
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    )


def _fits(value: Any, wanted: Any) -> bool:
    if wanted is bool:
        return isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if getattr(wanted, "__origin__", None) is tuple:
        item = wanted.__args__[0]
        return isinstance(value, list | tuple) and all(_fits(each, item) for each in value)
    return isinstance(value, str)


def _spoken(wanted: Any) -> str:
    plain = {bool: "true or false", int: "a whole number", float: "a number"}
    return plain.get(wanted, "a list" if getattr(wanted, "__origin__", None) is tuple else "a name")
