"""When pushes take effect: the modes, each with its settings."""

import dataclasses
from dataclasses import dataclass
from typing import get_args

from psfleet.errors import ConfigError
from psfleet.shard.events import Mode

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
            if value != field.default and field.name not in SETTINGS_OF.get(self.mode, ()):
                raise ConfigError(
                    f"consistency {field.name} = {value} and mode = {self.mode!r} contradict "
                    f"each other: it is a setting of {_mode_of(field.name)}; leave one out"
                )


SETTINGS_OF = {
    "ssp": ("staleness",),
    "geo": ("k_steps", "copied_rows"),
    "half-async": ("max_merge", "queue_size"),
}


def _mode_of(setting: str) -> str:
    """The mode that a setting belongs to."""
    return next(mode for mode, settings in SETTINGS_OF.items() if setting in settings)
