"""The hand-written frame and the reply to a standby against stock protobuf, and against bytes that lie."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.core.base.errors import FrameError
from psfleet.core.net import frame
from psfleet.core.net.body import read_record, write_record
from psfleet.core.net.protobuf_fields import ALIGNMENT
from psfleet.core.net.v1.frame_pb2 import CONTENT_VALUES, Frame, Header, Segment
from psfleet.core.net.v1.replica_pb2 import FollowReply

pytestmark = pytest.mark.quick

HEADER = Header(
    worker=3,
    incarnation=7,
    sequence=9,
    samples=128,
    loss=0.25,
    segments=[Segment(table=2**63 + 5, content=CONTENT_VALUES, count=6, step=2)],
)

headers = st.builds(
    Header,
    worker=st.integers(0, 2**32 - 1),
    incarnation=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    samples=st.integers(0, 2**64 - 1),
    segments=st.lists(
        st.builds(Segment, table=st.integers(0, 2**64 - 1), count=st.integers(0, 2**64 - 1)),
        max_size=5,
    ),
)
payloads = st.binary(max_size=300)


@given(headers, st.lists(payloads, max_size=4))
def test_stock_protobuf_reads_what_encode_writes(header: Header, parts: list[bytes]) -> None:
    """Every encoded frame is the protobuf Frame of this header and the joined parts, but for its padding."""
    read = Frame.FromString(frame.encode(header, parts))
    read.ClearField("padding")
    assert read == Frame(header=header, payload=b"".join(parts))


@given(headers, payloads)
def test_decode_reads_what_stock_protobuf_writes(header: Header, payload: bytes) -> None:
    """Every serialized protobuf Frame is decoded to the same header and payload."""
    read, view = frame.decode(Frame(header=header, payload=payload).SerializeToString())
    assert (read, bytes(view)) == (header, payload)


@given(headers)
def test_the_payload_lies_aligned(header: Header) -> None:
    """The payload starts at a multiple of 8 in the message, so that arrays can be views."""
    message = frame.encode(header, [b"x" * 16])
    assert message.index(b"x" * 16, len(message) - 16) % ALIGNMENT == 0


def test_the_payload_is_a_view() -> None:
    """decode copies no payload: the view lies inside the message."""
    message = frame.encode(HEADER, [np.arange(1000, dtype=np.float32)])
    view = frame.decode(message)[1]
    whole = np.frombuffer(message, np.uint8).__array_interface__["data"][0]
    part = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    assert part - whole == len(message) - 4000


def test_unknown_fields_and_any_order_are_read() -> None:
    """Payload before header and unknown fields of every wire type are read, as by protobuf."""
    head = HEADER.SerializeToString()
    unknown = b"\x78\x05" + b"\x79" + b"8" * 8 + b"\x7d" + b"4" * 4 + b"\x7a\x02ab"
    message = b"\x12\x03abc" + unknown + b"\x0a" + bytes([len(head)]) + head
    read, payload = frame.decode(message)
    assert (read, bytes(payload)) == (HEADER, b"abc")
    assert Frame.FromString(message).header == HEADER


def test_a_header_in_two_parts_is_merged() -> None:
    """Protobuf merges a message field that is given twice; so does decode."""
    message = b"".join(
        Frame(header=part).SerializeToString() for part in (Header(worker=1), Header(sequence=2))
    )
    assert frame.decode(message)[0] == Header(worker=1, sequence=2)


@given(headers, headers, payloads)
def test_a_layout_is_the_first_part_of_the_header(
    layout: Header, header: Header, payload: bytes
) -> None:
    """To protobuf and to decode both are one header; split gives each by itself."""
    first = layout.SerializeToString()
    message = frame.encode(header, [payload] if payload else [], first)
    whole = Header()
    whole.CopyFrom(layout)
    whole.MergeFrom(header)
    assert Frame.FromString(message).header == frame.decode(message)[0] == whole
    again = frame.split(message)
    assert (again[0], again[1], bytes(again[2])) == (first, header.SerializeToString(), payload)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (frame.decode, frame.encode(HEADER, [b"payload-"])),
        (read_record, next(iter(write_record(300, 4, b"body----")))),
    ],
)
def test_every_truncation_is_refused_or_shorter(
    read: Callable[[bytes], tuple[Any, Any]], message: bytes
) -> None:
    """A frame or a reply cut anywhere is a FrameError, or one without its payload where that was cut."""
    for end in range(len(message)):
        with contextlib.suppress(FrameError):
            _, payload = read(message[:end])
            assert len(payload) == 0


def test_a_damaged_header_is_refused() -> None:
    """What protobuf cannot read. (Lengths and numbers that lie: tests/server/test_bad_input.py.)"""
    with pytest.raises(FrameError, match="header of 2 bytes is damaged"):
        frame.decode(b"\x0a\x02\x2a\x7f")


def test_a_message_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gRPC could not carry is refused before it is joined, or memory is reserved for it."""
    with pytest.raises(FrameError, match="longer than the limit"):
        frame.reserve(Header(), frame.MAX_MESSAGE + 1)
    monkeypatch.setattr(frame, "MAX_MESSAGE", 100)
    with pytest.raises(FrameError, match="200 bytes is longer than the limit of 100"):
        frame.encode(HEADER, [b"x" * 200])


@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(0, 255), payloads)
def test_any_bytes_are_read_or_a_frame_error(
    noise: bytes, at: int, byte: int, payload: bytes
) -> None:
    """Random bytes, and a valid frame with one byte changed, never raise anything but FrameError."""
    changed = bytearray(frame.encode(HEADER, [payload]))
    changed[at % len(changed)] = byte
    for read, message in ((frame.decode, noise), (frame.decode, changed), (read_record, noise)):
        with contextlib.suppress(FrameError):
            read(bytes(message))


def test_a_reserved_message_is_an_encoded_one() -> None:
    """Filling the place that `reserve` gives makes the same bytes as `encode`, on its boundary."""
    content = np.arange(24, dtype=np.uint8)
    for worker in range(300):  # headers of several lengths
        message, payload = frame.reserve(Header(worker=worker), 24)
        payload[:] = content
        assert message == frame.encode(Header(worker=worker), [content])
        assert payload.ctypes.data % ALIGNMENT == 0


LONG = 4 << 20
numbers = st.integers(0, 2**64 - 1)
kinds = st.integers(0, 2**32 - 1)


@given(numbers, kinds, st.binary(max_size=300))
def test_protobuf_reads_what_is_written(number: int, kind: int, body: bytes) -> None:
    """Every record of one piece is the FollowReply that protobuf would make, but for its padding."""
    (message,) = write_record(number, kind, body)
    read = FollowReply.FromString(message)
    read.ClearField("padding")
    assert read == FollowReply(number=number, kind=kind, body=body)


@given(numbers, kinds, st.binary(max_size=300), st.booleans())
def test_what_protobuf_writes_is_read(number: int, kind: int, body: bytes, more: bool) -> None:
    """Without padding too; the body begins at a multiple of 8 in memory."""
    written = FollowReply(number=number, kind=kind, body=body, more=more)
    read, actual = read_record(written.SerializeToString())
    assert bytes(actual) == body
    assert not body or np.frombuffer(actual, np.uint8).ctypes.data % ALIGNMENT == 0
    written.ClearField("body")
    assert read == written


@pytest.mark.parametrize("length", [0, 1, LONG, LONG + 1, 2 * LONG + 5])
def test_a_long_body_comes_in_pieces(length: int) -> None:
    """All but the last say that there is more; together they are the body, none of them copied."""
    body = bytes(range(256)) * (length // 256) + bytes(length % 256)
    messages = [*write_record(7, 4, body)]
    actual = [read_record(message) for message in messages]
    assert [reply.more for reply, _ in actual] == [True] * (len(actual) - 1) + [False]
    assert {(reply.number, reply.kind) for reply, _ in actual} == {(7, 4)}
    assert b"".join(part for _, part in actual) == body
    assert all(part.obj is message for message, (_, part) in zip(messages, actual, strict=True))
