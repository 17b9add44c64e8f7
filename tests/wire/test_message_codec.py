"""Messages and bodies that only psfleet reads: what comes back, what is refused, and for how much memory."""

import struct
import tracemalloc
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
from msgspec import msgpack
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.shard.events import Evict, Record
from psfleet.core.net.body import pack, unpack
from psfleet.core.net.message_codec import Message, decode, encode
from psfleet_server.coordinator.coordinator_messages import Decision
from psfleet_server.durability import records
from psfleet_server.durability.log_shipping import joined

pytestmark = pytest.mark.quick


class Ping(Message, frozen=True):
    """A message of two kinds that travel the same way."""

    sent_at: float


class Leaving(Message, frozen=True):
    """The other one."""

    why: str = ""


@dataclass(frozen=True)
class Nested:
    """A value with arrays at several depths."""

    whole: NDArray[np.float32]
    parts: dict[str, NDArray[Any]] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ()


def body_of(head: Any, arrays: bytes = b"") -> memoryview:
    """A body with any head."""
    content = msgpack.encode(head)
    return memoryview(struct.pack("<Q", len(content)) + content + bytes(-len(content) % 8) + arrays)


def test_a_message_of_several_kinds_comes_back() -> None:
    """Each kind is told from the others by the name of its class."""
    for message in (Ping(2.5), Leaving("the user"), Leaving()):
        assert decode(Ping | Leaving, encode(message), "message") == message


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"\xc1", "no message"),
        (msgpack.encode({"type": "Other"}), "Invalid value 'Other'"),
        (msgpack.encode({"type": "Ping"}), "missing required field `sent_at`"),
        (msgpack.encode({"type": "Ping", "sent_at": "x"}), "Expected `float`, got `str`"),
        (msgpack.encode({"type": "Ping", "sent_at": 1.0, "more": 1}), "unknown field `more`"),
        (encode(Ping(1.0)) + b"x", "trailing characters"),
        (encode(Leaving("x")).replace(b"x", b"\xff"), "utf-8"),
        (msgpack.encode({"type": "Leaving", "a\n" * 999: 1}), "unknown field `a a a a.{,180}$"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes, why: str) -> None:
    """The sentence names what was expected and what is there."""
    with pytest.raises(FrameError, match=f"these bytes are no message: .*{why}|{why}"):
        decode(Ping | Leaving, data, "message")


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
@pytest.mark.parametrize("kind", [list[int], dict[int, int], str, bytes, Nested])
def test_a_length_beyond_the_bytes_takes_no_memory(head: bytes, kind: Any) -> None:
    """A list, a map or a text that announces 2^32 - 1 elements is refused before it is made."""
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode(kind, head + b"\xff\xff\xff\xff", "message")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_arrays_at_any_depth_come_back_without_a_copy() -> None:
    """In their dtype and shape, aligned, as views into the body."""
    sent = Nested(
        np.arange(3, dtype=np.float32),
        {"none": np.zeros((0, 2), np.int64), "odd": np.arange(5, dtype=np.uint8).reshape(1, 5)},
        ((1, 2), (3, 4)),
    )
    content = memoryview(joined(pack(sent)))
    actual: Nested = unpack(Nested, content)
    assert actual.pairs == sent.pairs
    for before, after in (
        (sent.whole, actual.whole),
        *zip(sent.parts.values(), actual.parts.values(), strict=True),
    ):
        np.testing.assert_array_equal(before, after, strict=True)
        assert not after.flags.owndata
        assert after.flags.aligned


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (["<i8", [2**40]], "an array of 1099511627776 int64 is announced, but 16 bytes follow"),
        (["<i8", [-2]], "an array of -2 int64 is announced"),
        (["<i8", [-1, -2]], "an array of 2 int64 is announced"),
        (["<i8", [1]], "the arrays take 8 bytes of 16"),
        (["<f4", [4]], "an array is of float32, expected int64"),
        (["O", [2]], "dtype 'O' is not one of numbers"),
        (["<i8", ["2"]], "is damaged"),
        (["<i8", [0] * 99], "is damaged"),
        (["<i8"], "is damaged"),
        (None, "is damaged"),
    ],
)
def test_arrays_that_are_not_as_described_are_refused(ids: Any, why: str) -> None:
    """Nothing is made of a length before it is compared with the bytes that follow."""
    with pytest.raises(FrameError, match=why):
        unpack(Evict, body_of({"table": 1, "ids": ids}, bytes(16)))


def test_a_body_that_ends_early_is_refused() -> None:
    """Also before its length, or within its head."""
    whole = joined(pack(Evict(1, np.arange(2))))
    for size in range(len(whole)):
        with pytest.raises(FrameError):
            unpack(Evict, memoryview(whole[:size]))


def test_every_record_has_a_kind() -> None:
    """All records of a shard can be kept in a log, and so can all decisions of a coordinator."""
    assert {*get_args(Record)} < {*records._KINDS}
    assert all(issubclass(each, Message) for each in get_args(Decision))
