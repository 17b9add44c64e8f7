"""How often something happens: `60s`, `5min`, `1000 rounds`."""

import re
from dataclasses import dataclass

from psfleet.errors import ConfigError

__all__ = ["SnapshotInterval"]

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SnapshotInterval:
    """A time or a number of rounds; exactly one of them is not 0.

    Attributes:
        seconds: Of time.
        rounds: Of training: rounds in sync mode, else pushes of a worker.
    """

    seconds: float = 0.0
    rounds: int = 0

    @classmethod
    def parse(cls, text: str, name: str) -> "SnapshotInterval":
        """What a text says; `name`: of the setting, for messages.

        Raises:
            ConfigError: It says nothing, or none of these.
        """
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|rounds?)", text.strip())
        number = float(found[1]) if found else 0.0
        if found is None or not number or (found[2][0] == "r" and not number.is_integer()):
            raise ConfigError(f"{name} is {text!r}; it must be like 60s, 5min, 2h or 1000 rounds")
        unit = _SECONDS.get(found[2])
        return cls(rounds=int(number)) if unit is None else cls(number * unit)
