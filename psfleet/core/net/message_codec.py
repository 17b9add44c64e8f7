"""Encodes the messages that only psfleet reads, such as those between a launcher and its agents.

A message is declared once, as a dataclass or a msgspec.Struct. It is sent as MessagePack with the names of
its fields. Decoding is safe for bytes from strangers: it checks the type of every value, executes nothing,
and takes no more memory than a small multiple of the bytes received. Messages that other software may send
or read are declared in protos/ instead.
"""

from functools import cache
from typing import Any

import msgspec

from psfleet.core.base.errors import FrameError, one_line


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of message types that share one channel. Each message carries the name of its class.

    Example:
        class Ping(Message, frozen=True):
            sent_at: float

        class Leaving(Message, frozen=True):
            why: str

        decode(Ping | Leaving, encode(Ping(2.5)))  # Ping(sent_at=2.5)
    """


encode = msgspec.msgpack.Encoder().encode
"""Encode a message as bytes. The argument is a dataclass or Struct."""


def decode(kind: Any, data: bytes, name: str = "") -> Any:
    """Decode the bytes of a message and check its fields.

    Args:
        kind: Type of the message: a dataclass, a Struct, or a union of subclasses of `Message`.
        data: Bytes as `encode` returns them.
        name: Name of the message for errors. If it is empty, they use the name of the type.

    Raises:
        FrameError: The bytes do not hold a message of this type.
    """
    try:
        return _decoder(kind).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(
            f"these bytes are no {name or kind.__name__}: {reason_of(error)}"
        ) from None


def reason_of(error: Exception) -> str:
    """Return the text of a msgspec error as one line of at most 200 characters.

    The limit matters because the text may quote names that a stranger has chosen.
    """
    return one_line(error)[:200]


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
