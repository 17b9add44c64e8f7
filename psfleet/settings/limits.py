"""Limits of a server's load, so that one caller cannot take all of it.

PSFLEET_LIMITS says otherwise: `tables=20000,message=67108864`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from psfleet.errors import ConfigError
from psfleet.settings.declaration import check, setting, settings_of

_LARGEST_MESSAGE = 2**31 - 1  # gRPC and protobuf count message bytes in an int32

_count: Any = partial(setting, least=1)


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server."""

    message: int = setting(
        _LARGEST_MESSAGE,
        "Bytes of one request; a longer one is refused before its bytes are taken in",
        least=1,
        most=_LARGEST_MESSAGE,
        wanted=f"at least 1, and gRPC carries up to {_LARGEST_MESSAGE} bytes",
    )
    tables: int = _count(10_000, "Tables that may exist at once")
    lane: int = _count(
        16 << 30,
        "Bytes of shared memory that one worker may offer; beyond it tensors go in messages",
    )
    waiting_calls: int = _count(
        10_000,
        "Calls that wait at once: pulls of open rounds, barriers, reductions; and as many of workers "
        "that register",
    )
    connections: int = _count(4096, "Open connections; a further one is closed at once")
    handshakes: int = _count(
        128,
        "Connections of one address that have not proved themselves; of more, silent ones are closed "
        "first, then the oldest",
    )
    streams: int = _count(
        1024, "Calls that are open at once on one connection; further ones wait in the client"
    )
    incoming: int = _count(
        32, "Calls of one connection whose message is on its way; a further one is refused"
    )

    def __post_init__(self) -> None:
        check(self, lambda one: f"limit {one.name}")

    @classmethod
    def read(cls, text: str) -> "ServerLimits":
        """Return the limits that PSFLEET_LIMITS says; what it does not name is as usual.

        Raises:
            ConfigError: A name is unknown or a value is no whole number.
        """
        settings = {one.name: one for one in settings_of(cls)}
        limits: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            if name not in settings or not equals:
                raise ConfigError(
                    f"PSFLEET_LIMITS says {part!r}; it must be name=number with a name among "
                    f"{', '.join(settings)}"
                )
            limits[name] = settings[name].parse(value, f"limit {name}")
        return cls(**limits)

    @property
    def text(self) -> str:
        """Text that `read` takes: the limits that are not as usual."""
        values = {
            one.name: (getattr(self, one.name), one.default) for one in settings_of(type(self))
        }
        return ",".join(f"{name}={now}" for name, (now, usual) in values.items() if now != usual)
