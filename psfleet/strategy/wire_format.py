"""In how many bits values travel between workers and servers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from psfleet.errors import ConfigError
from psfleet.settings.choices import Format
from psfleet.settings.declaration import check, setting, settings_of
from psfleet.settings.kinds import one_of

__all__ = ["AMPSettings", "WireSettings"]

_least_1: Any = partial(setting, least=1, most=2**100, wanted="at least 1 and at most 2^100")


@dataclass(frozen=True)
class AMPSettings:
    """Gradients travel, and programs multiply matrices, in 16 bits."""

    dtype: str = setting(
        "bfloat16",
        "How gradients travel: bfloat16 has the range of float32, float16 more digits and loss scaling",
        one_of("bfloat16", "float16"),
    )
    compute: str = setting(
        "auto",
        "Precision of a program's matrix products; auto: bfloat16 where `dtype` is bfloat16 and "
        "torch and the processor multiply in it, else float32",
        one_of("auto", "bfloat16", "float32"),
    )
    init_loss_scaling: float = _least_1(
        32768.0, "What float16 gradients are multiplied by on their way, at the start"
    )
    incr_every_n_steps: int = _least_1(
        1000, "After so many steps that fit, the scale is multiplied by `incr_ratio`"
    )
    decr_every_n_nan_or_inf: int = _least_1(
        2, "After so many in a row that do not fit, and are skipped, by `decr_ratio`"
    )
    incr_ratio: float = _least_1(2.0, "See `incr_every_n_steps`")
    decr_ratio: float = setting(
        0.8, "See `decr_every_n_nan_or_inf`", least=2**-100, most=1, wanted="above 0 and at most 1"
    )
    use_dynamic_loss_scaling: bool = setting(True, "False: the scale stays as it is")

    def __post_init__(self) -> None:
        check(self, lambda one: f"amp {one.name}")
        if self.dtype == "bfloat16":
            self._refuse_scaling()

    def _refuse_scaling(self) -> None:
        for one in settings_of(type(self)):
            is_scaling = one.name not in ("dtype", "compute")
            if is_scaling and getattr(self, one.name) != one.default:
                raise ConfigError(
                    f"amp {one.name} is {getattr(self, one.name)} and dtype is bfloat16, "
                    "which needs no loss scaling; leave it out or use float16"
                )


_FORMATS: dict[str, Format] = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
_FORM = one_of(*_FORMATS)


@dataclass(frozen=True)
class WireSettings:
    """In which form values travel between workers and servers: fewer bytes for less precision."""

    push: str = setting(
        "fp32",
        "Form of gradients on the wire: fewer bytes for less precision; `--wire` sets both ways",
        _FORM,
        names="--wire",
    )
    pull: str = setting("fp32", "Form of weights on the wire, likewise", _FORM, names="--wire")

    def __post_init__(self) -> None:
        check(self, lambda one: f"wire {one.name}")

    @classmethod
    def both(cls, form: str) -> "WireSettings":
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
