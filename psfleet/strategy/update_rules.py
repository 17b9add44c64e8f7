"""How updates are made: gradients merged or thinned out, local steps, rules that replace others."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from psfleet.errors import ConfigError
from psfleet.settings.declaration import check, setting

__all__ = [
    "DGCSettings",
    "GradientMergeSettings",
    "LambSettings",
    "LarsSettings",
    "LocalSGDSettings",
]

_size: Any = partial(
    setting, least=0, most=sys.float_info.max, wanted="a finite number of at least 0"
)


@dataclass(frozen=True)
class GradientMergeSettings:
    """Push the sum or the mean of the gradients of several steps in place of each."""

    k_steps: int = setting(1, "Steps whose gradients are merged", least=1)
    avg: bool = setting(True, "Push their mean; false: their sum")

    def __post_init__(self) -> None:
        check(self, lambda one: f"gradient_merge {one.name}")


@dataclass(frozen=True)
class DGCSettings:
    """Momentum becomes DGCMomentum: only the largest gradients are sent, the rest is kept."""

    rampup_begin_step: int = setting(0, "Steps before that begins", least=0)
    rampup_step: int = setting(1, "Steps over which the sparsity rises", least=1)
    sparsity: tuple[float, ...] = setting(
        (0.999,), "Shares of elements that are not sent, gone through while it rises"
    )

    def __post_init__(self) -> None:
        check(self, lambda one: f"dgc {one.name}")
        if not self.sparsity or not all(0 <= part < 1 for part in self.sparsity):
            raise ConfigError(
                f"dgc sparsity is {list(self.sparsity)}; it must be a list of numbers in [0, 1)"
            )


@dataclass(frozen=True)
class LocalSGDSettings:
    """Each worker trains dense parameters by itself; every `k_steps` steps they are averaged."""

    k_steps: int = setting(1, "Updates between two averages", least=1)
    begin_step: int = setting(
        1, "Updates before that begins, which are made on the servers", least=1
    )

    def __post_init__(self) -> None:
        check(self, lambda one: f"localsgd {one.name}")


@dataclass(frozen=True)
class LarsSettings:
    """Momentum becomes LarsMomentum."""

    lars_coeff: float = _size(0.001, "Trust coefficient")
    lars_weight_decay: float = _size(0.0005, "Weight decay")
    epsilon: float = _size(0.0, "Added to the denominator of the local learning rate")
    exclude_from_weight_decay: tuple[str, ...] = setting(
        (), "Parts of names of parameters that are not decayed"
    )

    def __post_init__(self) -> None:
        check(self, lambda one: f"lars {one.name}")


@dataclass(frozen=True)
class LambSettings:
    """Adam becomes Lamb."""

    lamb_weight_decay: float = _size(0.01, "Weight decay")
    exclude_from_weight_decay: tuple[str, ...] = setting(
        (), "Parts of names of parameters that are not decayed"
    )

    def __post_init__(self) -> None:
        check(self, lambda one: f"lamb {one.name}")
