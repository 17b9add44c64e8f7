"""What a server takes at most, so that one caller cannot take all of it.

PSFLEET_LIMITS says otherwise: `tables=20000,message=67108864`.
"""

import dataclasses
from dataclasses import dataclass

from psfleet.errors import ConfigError

__all__ = ["Limits"]

_LARGEST_MESSAGE = 2**31 - 1  # gRPC and protobuf count message bytes in an int32


@dataclass(frozen=True)
class Limits:
    """Of one server.

    Attributes:
        message: Bytes of one request. A longer one is refused before its bytes are taken in.
        tables: Tables that may exist at once.
        lane: Bytes of shared memory that one worker may offer; beyond it tensors go in messages.
        parked: Calls that wait at once: pulls of open rounds, barriers, reductions; and as many of
            workers that register.
        connections: Open connections. A further one is closed at once.
        handshakes: Connections of one address that have not proved themselves. When there are more, the
            oldest are closed.
        streams: Calls that are open at once on one connection. Further ones wait in the client.
        incoming: Calls of one connection whose message is on its way. A further one is refused.
    """

    message: int = _LARGEST_MESSAGE
    tables: int = 10_000
    lane: int = 16 << 30
    parked: int = 10_000
    connections: int = 4096
    handshakes: int = 128
    streams: int = 1024
    incoming: int = 32

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ConfigError(f"limit {name} is {value}; it must be at least 1")
        if self.message > _LARGEST_MESSAGE:
            raise ConfigError(
                f"limit message is {self.message}; gRPC carries up to {_LARGEST_MESSAGE} bytes"
            )

    @classmethod
    def read(cls, text: str) -> "Limits":
        """The limits that PSFLEET_LIMITS says; what it does not name is as usual.

        Raises:
            ConfigError: A name is unknown or a value is no whole number.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        said: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            if name not in known or not equals:
                raise ConfigError(
                    f"PSFLEET_LIMITS says {part!r}; it must be name=number with a name among "
                    f"{', '.join(known)}"
                )
            try:
                said[name] = int(value)
            except ValueError:
                raise ConfigError(
                    f"PSFLEET_LIMITS says {part!r}; {name} must be a whole number"
                ) from None
        return cls(**said)
