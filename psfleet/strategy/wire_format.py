"""In how many bits values travel between workers and servers."""

import dataclasses
from dataclasses import dataclass

from psfleet.errors import ConfigError
from psfleet.runtime.interface import Format

__all__ = ["AMP", "Wire"]


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
