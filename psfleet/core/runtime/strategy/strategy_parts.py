"""Parts of a strategy, one frozen dataclass each: consistency, execution, updates, compression of transfers.

A field made by `setting(...)` declares default, help, flag and limits at once. psfleet-launch derives its
flags from these declarations, and a new field needs no other change. A dataclass checks its values when it is
made.
"""

import re
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import Setting, check, setting, settings_of
from psfleet.core.base.settings.kinds import Format, Mode, Schedule, one_of
from psfleet.core.engine.consistency import MODES, ConsistencyMode, find_mode

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
_size: Any = partial(
    setting, least=0, most=sys.float_info.max, wanted="a finite number of at least 0"
)
_least_1: Any = partial(setting, least=1, most=2**100, wanted="at least 1 and at most 2^100")
_FORMATS: dict[str, Format] = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
_FORM = one_of(*_FORMATS)


@dataclass(frozen=True, init=False)
class ConsistencySettings:
    """Consistency mode and its settings.

        ConsistencySettings("ssp", staleness=4).staleness == 4

    docs/strategies.md describes the modes. Every setting of every mode is an attribute; settings of other
    modes have their defaults.

    Args:
        mode: Name of the mode.
        values: Settings of the mode by position, in the order of its declaration.
        settings: Settings of the mode by name. A setting of another mode may only have its default.

    Attributes:
        declared: The mode, with these settings.

    Raises:
        ConfigError: The mode or a setting is unknown, a value is wrong, or a setting belongs to another mode.
    """

    declared: ConsistencyMode

    def __init__(self, mode: Mode = "sync", *values: float, **settings: float) -> None:
        settings_by_name = {declared.name: declared for declared in self.settings()}
        settings_by_name.pop("mode").check(mode, "consistency mode")
        mode_settings = settings_of_mode(mode)
        for name, value in settings.items():
            if name not in settings_by_name:
                raise ConfigError(
                    f"consistency has no setting {name!r}; it has {', '.join(settings_by_name)}"
                )
            if name not in mode_settings and value != settings_by_name[name].default:
                raise _contradiction(name, value, mode)
        own_values = {name: value for name, value in settings.items() if name in mode_settings}
        declaration = type(find_mode(mode))(*values, **own_values)
        for name, declared in settings_by_name.items():
            object.__setattr__(self, name, getattr(declaration, name, declared.default))
        object.__setattr__(self, "declared", declaration)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def mode(self) -> Mode:
        """Name of the mode."""
        return cast(Mode, self.declared.name)

    @staticmethod
    def settings() -> tuple[Setting, ...]:
        """Return the declarations of the mode and of all modes' settings; shared settings are last."""
        by_name: dict[str, Setting] = {}
        modes: dict[str, list[str]] = {}
        for name, declaration in MODES.items():
            for declared in settings_of(type(declaration)):
                by_name.setdefault(declared.name, declared)
                modes.setdefault(declared.name, []).append(name)
        in_order = sorted(by_name.values(), key=lambda declared: len(modes[declared.name]) > 1)
        mode = Setting("mode", one_of(*MODES), "sync", "When pushes take effect", flag="--mode")
        return (
            mode,
            *(
                replace(declared, help=f"{_and(modes[declared.name])}: {declared.help}")
                for declared in in_order
            ),
        )


def settings_of_mode(mode: str | None) -> tuple[str, ...]:
    """Return the names of a mode's settings, or () if the mode is unknown or None."""
    declaration = MODES.get(mode or "")
    return () if declaration is None else tuple(field.name for field in fields(declaration))


def modes_with(setting: str) -> list[str]:
    """Return the names of the modes that have this setting."""
    return [mode for mode in MODES if setting in settings_of_mode(mode)]


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _contradiction(name: str, value: Any, mode: str) -> ConfigError:
    return ConfigError(
        f"consistency {name} = {value} and mode = {mode!r} contradict each other: it is a setting of "
        f"{', '.join(modes_with(name))}; leave one out"
    )


@dataclass(frozen=True)
class PipelineSettings:
    """Pipeline: the program is divided into sections, which stages (processes) run on micro-batches.

    An embedded process runs all sections one after the other, divided in the same way.
    """

    schedule: Schedule = setting(
        "1f1b",
        "Order in which micro-batches (parts of a batch) are processed; this switches the part on",
        names="--pipeline",
    )
    stages: int = setting(
        1,
        "Processes of each worker; each computes a part of the network",
        names="--stages",
        least=1,
    )
    micro_batches: int = setting(
        1, "Parts that each batch is cut into", names="--micro-batches", least=1
    )
    queue_size: int = setting(
        30, "Unread messages that may wait for a stage; if there are more, senders wait", least=1
    )
    copies: tuple[int, ...] = setting(
        (),
        "Processes of each stage, which take micro-batches in turn; if empty, each stage has one",
    )

    def __post_init__(self) -> None:
        check(self, lambda declared: f"pipeline {declared.name}")
        if self.copies and (len(self.copies) != self.stages or min(self.copies) < 1):
            raise ConfigError(
                f"pipeline copies is {self.copies}; it must name at least 1 for each of "
                f"{self.stages} stages"
            )


@dataclass(frozen=True)
class RecomputeSettings:
    """Recomputation: the backward pass computes activations again, which the forward pass has dropped.

    Only the values of checkpoints, which are chosen variables or layers, are kept.
    """

    checkpoints: tuple[str, ...] = setting(
        (),
        "Names of the variables or layers whose values are kept; if empty, psfleet chooses them in the "
        "first run",
    )
    memory_budget: str = setting(
        "",
        'Memory that the kept values may take, such as "512MiB" or "2GB"; if empty, about as much as the '
        "values of every sqrt(n)-th of n operations take",
    )

    def __post_init__(self) -> None:
        if self.checkpoints and self.memory_budget:
            raise ConfigError(
                "recompute has checkpoints and a memory_budget; the budget is for "
                "choosing checkpoints: leave one out"
            )
        self.budget  # noqa: B018  # refuses what is no size

    @property
    def budget(self) -> int | None:
        """`memory_budget` in bytes, or None if it is empty."""
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


@dataclass(frozen=True)
class GradientMergeSettings:
    """Gradient merge: one push for several steps, with the sum or mean of their gradients."""

    k_steps: int = setting(1, "Steps whose gradients are merged", least=1)
    avg: bool = setting(True, "Push the mean of these gradients; false pushes their sum")

    def __post_init__(self) -> None:
        check(self, lambda declared: f"gradient_merge {declared.name}")


@dataclass(frozen=True)
class DGCSettings:
    """Deep gradient compression: only the largest gradients are sent, and the rest accumulates in the worker.

    Momentum optimizers become DGCMomentum.
    """

    rampup_begin_step: int = setting(
        0, "Updates at the beginning whose gradients are sent whole", least=0
    )
    rampup_step: int = setting(1, "Updates over which the sparsity rises", least=1)
    sparsity: tuple[float, ...] = setting(
        (0.999,),
        "Fraction of elements that are not sent. With several values, `rampup_step` is divided equally among "
        "them; the last one holds after it",
    )

    def __post_init__(self) -> None:
        check(self, lambda declared: f"dgc {declared.name}")
        if not self.sparsity or not all(0 <= part < 1 for part in self.sparsity):
            raise ConfigError(
                f"dgc sparsity is {list(self.sparsity)}; it must be a list of numbers in [0, 1)"
            )


@dataclass(frozen=True)
class LocalSGDSettings:
    """Local SGD: workers train dense parameters separately, and average them every `k_steps` steps."""

    k_steps: int = setting(1, "Updates between two averages", least=1)
    begin_step: int = setting(
        1, "Updates that the servers make before local training begins", least=1
    )

    def __post_init__(self) -> None:
        check(self, lambda declared: f"localsgd {declared.name}")


@dataclass(frozen=True)
class LarsSettings:
    """LARS: momentum optimizers become LarsMomentum."""

    lars_coeff: float = _size(0.001, "Trust coefficient")
    lars_weight_decay: float = _size(0.0005, "Weight decay")
    epsilon: float = _size(0.0, "Added to the denominator of the local learning rate")
    exclude_from_weight_decay: tuple[str, ...] = setting(
        (), "Parameters whose name contains one of these texts are not decayed"
    )

    def __post_init__(self) -> None:
        check(self, lambda declared: f"lars {declared.name}")


@dataclass(frozen=True)
class LambSettings:
    """LAMB: Adam optimizers become Lamb."""

    lamb_weight_decay: float = _size(0.01, "Weight decay")
    exclude_from_weight_decay: tuple[str, ...] = setting(
        (), "Parameters whose name contains one of these texts are not decayed"
    )

    def __post_init__(self) -> None:
        check(self, lambda declared: f"lamb {declared.name}")


@dataclass(frozen=True)
class AMPSettings:
    """Mixed precision: gradients are sent, and programs multiply matrices, in 16 bits."""

    dtype: str = setting(
        "bfloat16",
        "Format of gradients on the network: bfloat16 has the range of float32, float16 more digits and "
        "loss scaling",
        one_of("bfloat16", "float16"),
    )
    compute: str = setting(
        "auto",
        "Precision of a program's matrix products; auto: bfloat16 if `dtype` is bfloat16, torch is installed "
        "and the processor has instructions for it, else float32",
        one_of("auto", "bfloat16", "float32"),
    )
    init_loss_scaling: float = _least_1(32768.0, "Scale of float16 gradients at the start")
    incr_every_n_steps: int = _least_1(
        1000, "Steps in a row without overflow after which the scale is multiplied by `incr_ratio`"
    )
    decr_every_n_nan_or_inf: int = _least_1(
        2,
        "Steps in a row that were skipped for overflow, after which the scale is multiplied by `decr_ratio`",
    )
    incr_ratio: float = _least_1(2.0, "See `incr_every_n_steps`")
    decr_ratio: float = setting(
        0.8, "See `decr_every_n_nan_or_inf`", least=2**-100, most=1, wanted="above 0 and at most 1"
    )
    use_dynamic_loss_scaling: bool = setting(True, "False keeps the scale constant")

    def __post_init__(self) -> None:
        check(self, lambda declared: f"amp {declared.name}")
        if self.dtype == "bfloat16":
            self._refuse_scaling()

    def _refuse_scaling(self) -> None:
        for declared in settings_of(type(self)):
            is_scaling = declared.name not in ("dtype", "compute")
            if is_scaling and getattr(self, declared.name) != declared.default:
                raise ConfigError(
                    f"amp {declared.name} is {getattr(self, declared.name)} and dtype is bfloat16, "
                    "which needs no loss scaling; leave it out or use float16"
                )


@dataclass(frozen=True)
class WireSettings:
    """Compression of transfers: values are sent with fewer bytes and less precision.

        WireSettings(push="int8", pull="bf16")

    "fp32", the default, sends values unchanged.
    """

    push: str = setting(
        "fp32",
        "Format of gradients on the network; `--wire` sets this format for gradients and weights",
        _FORM,
        names="--wire",
    )
    pull: str = setting("fp32", "Format of weights on the network", _FORM, names="--wire")

    def __post_init__(self) -> None:
        check(self, lambda declared: f"wire {declared.name}")

    @property
    def gradients(self) -> Format:
        """Number format in which gradients are sent."""
        return _FORMATS[self.push]

    @property
    def values(self) -> Format:
        """Number format in which weights are sent."""
        return _FORMATS[self.pull]
