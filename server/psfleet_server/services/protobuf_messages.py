"""Protobuf messages of requests and answers."""

from typing import Any

from psfleet.errors import FrameError
from psfleet.wire.frame import next_field

_MOST_FIELDS = 100_000
"""Most fields of a request. Each takes two bytes on the wire, and many times as many once it is parsed."""


def parsed(kind: Any, request: bytes) -> Any:
    """The request as a message of this kind.

    Raises:
        FrameError: It is none, or has too many fields.
    """
    if len(request) > 2 * _MOST_FIELDS:
        _check_fields(kind, request)
    try:
        return kind.FromString(request)
    except Exception:
        raise FrameError(f"a request of {len(request)} bytes is no {kind.__name__}") from None


def _check_fields(kind: Any, request: bytes) -> None:
    at = fields = 0
    while at < len(request):
        at = next_field(request, at)[3]
        fields += 1
        if fields > _MOST_FIELDS:
            raise FrameError(
                f"a request of {len(request)} bytes has more fields than a {kind.__name__} may have, "
                f"which is {_MOST_FIELDS}; send fewer names or numbers"
            )


def encoded(message: Any) -> bytes:
    """The bytes of an answer."""
    whole: bytes = message.SerializeToString()
    return whole
