"""Encoding of the messages that only psfleet reads, such as those between a launcher and its agents.

Such a message is declared once, as a dataclass or a msgspec.Struct, and travels as MessagePack with the names
of its fields. Decoding checks the type of every value, executes nothing, and takes no more memory than a
small multiple of the bytes that have come. Messages that other software may send or read are in protos/
instead.
"""

from typing import Any, Generic, TypeVar

import msgspec

from psfleet.core.base.errors import FrameError

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of messages of which several kinds travel the same way: each has the name of its class with it.

    Example:
        class Ping(Message, frozen=True):
            sent_at: float

        class Leaving(Message, frozen=True):
            why: str

        CODEC = MessageCodec[Ping | Leaving](Ping | Leaving, "message of an agent")
        CODEC.decode(CODEC.encode(Ping(2.5)))  # Ping(sent_at=2.5)
    """


class MessageCodec(Generic[M]):
    """Writes and reads messages of one type.

    Args:
        kind: The type: a dataclass, a Struct, or a union of subclasses of `Message`.
        name: What errors call such a message.
    """

    def __init__(self, kind: Any, name: str) -> None:
        self.encode = msgspec.msgpack.Encoder(order="deterministic").encode
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._name = name

    def decode(self, data: bytes) -> M:
        """Return the message in these bytes.

        Raises:
            FrameError: They hold no such message, or one with a field that this version does not know.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise FrameError(f"these bytes are no {self._name}: {error}") from None
