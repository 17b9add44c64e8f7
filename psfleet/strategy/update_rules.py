"""How updates are made: gradients merged or thinned out, local steps, rules that replace others."""

import math
from dataclasses import dataclass

from psfleet.errors import ConfigError

__all__ = ["DGC", "GradientMerge", "Lamb", "Lars", "LocalSGD"]


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
