"""Records for a standby are FollowReplies, as protobuf writes and reads them."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.errors import FrameError
from psfleet.wire import frame
from psfleet.wire.body import read_record, write_record
from psfleet.wire.v1.replica_pb2 import FollowReply

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
    assert not body or np.frombuffer(actual, np.uint8).ctypes.data % frame.ALIGNMENT == 0
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


def test_every_truncation_is_refused_or_shorter() -> None:
    """A message cut anywhere is a FrameError, or one without its body where that was cut."""
    (message,) = write_record(300, 4, b"body----")
    for end in range(len(message)):
        try:
            _, body = read_record(message[:end])
        except FrameError:
            continue
        assert len(body) == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_reply_or_a_frame_error(message: bytes) -> None:
    """Random bytes never raise anything but FrameError."""
    with contextlib.suppress(FrameError):
        read_record(message)
