"""When pushes take effect: the modes, each with its settings."""

import dataclasses
from dataclasses import dataclass
from typing import get_args

from psfleet.errors import ConfigError
from psfleet.settings.mode import Mode

__all__ = ["SETTINGS_OF", "Consistency"]


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
        staleness_damping: async, ssp and half-async: p of the learning rate / (1 + staleness)^p at which a
            server applies a push; staleness counts the others' pushes since the worker's last pull.
        delay_compensation: async, ssp and half-async: c of g + c * g * g * (w - w0), by which a server
            corrects a gradient g that was taken at the weights w0 and meets the weights w.
    """

    mode: Mode = "sync"
    staleness: int = 2
    k_steps: int = 10
    copied_rows: int = 1 << 20
    max_merge: int = 8
    queue_size: int = 16
    staleness_damping: float = 0.0
    delay_compensation: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"consistency mode is {self.mode!r}; it must be one of {', '.join(get_args(Mode))}"
            )
        for field in dataclasses.fields(self)[1:]:
            value, least = getattr(self, field.name), 0 if field.name in _FROM_ZERO else 1
            if not least <= value < 2**31:
                raise ConfigError(
                    f"consistency {field.name} is {value}; it must be at least {least} "
                    "and below 2^31"
                )
            if value != field.default and field.name not in SETTINGS_OF.get(self.mode, ()):
                raise ConfigError(
                    f"consistency {field.name} = {value} and mode = {self.mode!r} contradict "
                    f"each other: it is a setting of {_modes_of(field.name)}; leave one out"
                )


_OF_LATE_PUSHES = ("staleness_damping", "delay_compensation")
_FROM_ZERO = ("staleness", *_OF_LATE_PUSHES)
SETTINGS_OF = {
    "async": _OF_LATE_PUSHES,
    "ssp": ("staleness", *_OF_LATE_PUSHES),
    "geo": ("k_steps", "copied_rows"),
    "half-async": ("max_merge", "queue_size", *_OF_LATE_PUSHES),
}


def _modes_of(setting: str) -> str:
    """The modes that a setting belongs to."""
    return ", ".join(mode for mode, settings in SETTINGS_OF.items() if setting in settings)
