"""Protobuf messages of requests and answers."""

from typing import Any

from psfleet.errors import FrameError

__all__ = ["encoded", "parsed"]


def parsed(kind: Any, request: bytes) -> Any:
    """The request as a message of this kind.

    Raises:
        FrameError: It is none.
    """
    try:
        return kind.FromString(request)
    except Exception:
        raise FrameError(f"a request of {len(request)} bytes is no {kind.__name__}") from None


def encoded(message: Any) -> bytes:
    """The bytes of an answer."""
    whole: bytes = message.SerializeToString()
    return whole
