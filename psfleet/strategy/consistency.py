"""When pushes take effect: the modes, each with its settings."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from psfleet.errors import ConfigError
from psfleet.settings.declaration import check, setting, settings_of
from psfleet.settings.mode import Mode

__all__ = ["SETTINGS_OF", "ConsistencySettings"]

_number = partial(setting, most=2**31 - 1)
_count: Any = partial(_number, least=1, wanted="at least 1 and below 2^31")
_share: Any = partial(_number, least=0, wanted="at least 0 and below 2^31")


@dataclass(frozen=True)
class ConsistencySettings:
    """When pushes take effect, and how far workers may be apart.

    Modes: sync: in rounds averaged over the workers. async: at once. ssp: at once, no worker more than
    `staleness` pushes ahead of another. geo: each worker trains `k_steps` steps on copies of its own,
    then what it has learned is added. half-async: at once, several gradients merged.
    """

    mode: Mode = setting("sync", "When pushes take effect", names="--mode")
    staleness: int = _share(2, "ssp: pushes a worker may be ahead of another", names="--staleness")
    k_steps: int = _count(10, "geo: steps between two exchanges", names="--k-steps")
    copied_rows: int = _count(
        1 << 20, "geo: rows of a sparse table that a worker keeps copies of, at most"
    )
    max_merge: int = _count(8, "half-async: gradients that are summed to one push, at most")
    queue_size: int = _count(16, "half-async: gradients that may wait before the worker does")
    staleness_damping: float = _share(
        0.0,
        "async, ssp and half-async: p of the learning rate / (1 + staleness)^p at which a server applies "
        "a push; staleness counts the others' pushes since the worker's last pull",
    )
    delay_compensation: float = _share(
        0.0,
        "async, ssp and half-async: c of g + c * g * g * (w - w0), by which a server corrects a gradient "
        "g that was taken at the weights w0 and meets the weights w",
    )

    def __post_init__(self) -> None:
        check(self, lambda one: f"consistency {one.name}")
        for one in settings_of(type(self))[1:]:
            value = getattr(self, one.name)
            if value != one.default and one.name not in SETTINGS_OF.get(self.mode, ()):
                raise ConfigError(
                    f"consistency {one.name} = {value} and mode = {self.mode!r} contradict "
                    f"each other: it is a setting of {_modes_of(one.name)}; leave one out"
                )


_OF_LATE_PUSHES = ("staleness_damping", "delay_compensation")
SETTINGS_OF = {
    "async": _OF_LATE_PUSHES,
    "ssp": ("staleness", *_OF_LATE_PUSHES),
    "geo": ("k_steps", "copied_rows"),
    "half-async": ("max_merge", "queue_size", *_OF_LATE_PUSHES),
}


def _modes_of(setting: str) -> str:
    """The modes that a setting belongs to."""
    return ", ".join(mode for mode, settings in SETTINGS_OF.items() if setting in settings)
