"""Arrays through segments and back. (Segments that lie: tests/server/test_bad_input.py.)"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError, PsfleetError, UnknownTable
from psfleet.core.engine.kernels.initial_values import STREAM_FROM
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net import frame, segments
from psfleet.core.net.segments import OutgoingSegment, PartState
from psfleet.core.net.v1.frame_pb2 import Frame, Header, Segment

pytestmark = pytest.mark.quick

DENSE = TableSpec("dense", "dense", (3, 5), Adam())
SPARSE = TableSpec("sparse", "sparse", (3,), Adam())
SPECS = {spec.key: spec for spec in (DENSE, SPARSE)}
IDS = np.array([0, -1, 2**63 - 1, -(2**63), 7], np.int64)
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3)


def spec_of(key: int) -> TableSpec:
    """The tables of these tests."""
    if key not in SPECS:
        raise UnknownTable(f"table {key:#x} is unknown")
    return SPECS[key]


def write_read(read: Read) -> OutgoingSegment:
    """A pull from one table, as a worker lays it out."""
    if read.ids is None:
        return OutgoingSegment(Segment(table=read.table, content=segments.WHOLE))
    part = Segment(table=read.table, content=segments.IDS, count=len(read.ids))
    return OutgoingSegment(part, (read.ids,))


def write_values(table: int, values: NDArray[np.float32]) -> OutgoingSegment:
    """The answer to a pull, as a server lays it out: rows [n, dim] or this server's dense part [n]."""
    content = segments.ROWS if values.ndim == 2 else segments.VALUES
    return OutgoingSegment(Segment(table=table, content=content, count=len(values)), (values,))


def write_gradient(gradient: Gradient) -> OutgoingSegment:
    """A push to one table, as a worker without shared memory lays it out."""
    values, ids = gradient.values, gradient.ids
    content = segments.VALUES if ids is None else segments.ID_ROWS
    rate = gradient.learning_rate
    segment = Segment(table=gradient.table, content=content, count=len(values), learning_rate=rate)
    return OutgoingSegment(segment, (values,) if ids is None else (ids, values))


def read_gradients(header: Header, payload: Any, specs: Any) -> list[Gradient]:
    """The gradients of a push, as a server reads them."""
    return segments.read_request(header, payload, specs).gradients


def through(parts: list[OutgoingSegment], read: Callable[..., Any]) -> Any:
    """What a reader gets of what was written."""
    header, payload = frame.decode(segments.message(Header(), parts))
    return read(header, payload, spec_of)


def test_gradients_come_back() -> None:
    """Sparse and dense gradients of one push come back equal, in order, and without a copy."""
    sent = [
        Gradient(DENSE.key, np.arange(7, dtype=np.float32), None, 0.5),
        Gradient(SPARSE.key, ROWS, IDS, 0.1),
    ]
    actual = through([write_gradient(g) for g in sent], read_gradients)
    for before, after in zip(sent, actual, strict=True):
        assert (before.table, before.learning_rate) == (after.table, after.learning_rate)
        np.testing.assert_array_equal(before.values, after.values)
        assert not after.values.flags.owndata
        assert after.values.flags.aligned
    assert actual[0].ids is None
    np.testing.assert_array_equal(actual[1].ids, IDS)


def test_reads_and_values_come_back() -> None:
    """A pull's reads and its answer come back equal."""
    sparse, dense = through(
        [write_read(Read(SPARSE.key, IDS)), write_read(Read(DENSE.key))], segments.read_request
    ).reads
    assert dense == Read(DENSE.key)
    np.testing.assert_array_equal(sparse.ids, IDS)
    values = [ROWS, np.arange(4, dtype=np.float32)]
    actual = through(
        [write_values(SPARSE.key, values[0]), write_values(DENSE.key, values[1])],
        segments.read_values,
    )
    for before, after in zip(values, actual, strict=True):
        np.testing.assert_array_equal(before, after)


def test_state_comes_back() -> None:
    """Weights and optimizer state of both kinds of table come back equal."""
    planes = 1 + len(DENSE.rule.slots)
    dense = PartState(DENSE.key, 4, np.arange(planes * 5, dtype=np.float32).reshape(planes, 5))
    sparse = PartState(SPARSE.key, 9, np.ones((5, planes * 3), np.float32), IDS)
    actual = through(
        [segments.write_state(dense), segments.write_state(sparse)], segments.read_states
    )
    assert [state.step for state in actual] == [4, 9]
    np.testing.assert_array_equal(actual[0].values, dense.values)
    np.testing.assert_array_equal(actual[1].values, sparse.values)
    np.testing.assert_array_equal(actual[1].ids, IDS)


@given(st.integers(0, 20), st.integers(0, 20))
def test_any_mix_of_lengths_stays_aligned(rows: int, values: int) -> None:
    """Segments of odd lengths do not push the next one off its alignment."""
    sent = [
        Gradient(DENSE.key, np.zeros(values, np.float32)),
        Gradient(SPARSE.key, np.ones((rows, 3), np.float32), np.arange(rows, dtype=np.int64)),
    ]
    actual = through([write_gradient(g) for g in sent], read_gradients)
    assert all(g.values.flags.aligned for g in actual)
    np.testing.assert_array_equal(actual[1].ids, sent[1].ids)


def test_an_unaligned_payload_is_read_all_the_same() -> None:
    """A stock client that writes no padding is understood; the reader copies once."""
    part = write_gradient(Gradient(SPARSE.key, ROWS, IDS))
    whole = Frame.FromString(segments.message(Header(), [part]))
    for length in range(8):
        message = Frame(header=whole.header, payload=whole.payload, padding=b"")
        message.header.samples = 2 ** (7 * length)
        header, payload = frame.decode(message.SerializeToString())
        actual = segments.read_request(header, payload, spec_of).gradients[0]
        assert actual.values.flags.aligned
        np.testing.assert_array_equal(actual.values, ROWS)


def test_a_table_twice_in_one_push_is_refused() -> None:
    """A push names a table at most once."""
    part = write_gradient(Gradient(SPARSE.key, ROWS, IDS))
    again = OutgoingSegment(Segment.FromString(part.segment.SerializeToString()), part.arrays)
    with pytest.raises(FrameError, match="twice"):
        through([part, again], read_gradients)


_any_segment = st.builds(
    Segment,
    table=st.sampled_from([DENSE.key, SPARSE.key, 5]),
    content=st.integers(0, 6),
    count=st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1)),
)


@given(st.binary(max_size=300), st.lists(_any_segment, max_size=4))
def test_any_header_over_any_payload_is_read_or_refused(
    payload: bytes, lies: list[Segment]
) -> None:
    """No header and payload make a reader raise anything but a psfleet error."""
    header = Header(segments=lies)
    for read in (read_gradients, segments.read_request, segments.read_states, segments.read_values):
        with contextlib.suppress(PsfleetError):
            read(header, memoryview(payload), spec_of)


def test_an_exchange_comes_apart() -> None:
    """Gradients and reads of one message, of the same table too, come back as what they were."""
    parts = [
        write_gradient(Gradient(SPARSE.key, ROWS, IDS, 0.1)),
        write_read(Read(SPARSE.key, IDS[:2])),
        write_read(Read(DENSE.key)),
    ]
    actual = through(parts, segments.read_request)
    np.testing.assert_array_equal(actual.gradients[0].values, ROWS)
    assert actual.gradient_bytes == IDS.nbytes + ROWS.nbytes
    np.testing.assert_array_equal(actual.reads[0].ids, IDS[:2])
    assert actual.reads[1] == Read(DENSE.key)
    with pytest.raises(FrameError, match="gradients come first"):
        through([parts[2], parts[0]], segments.read_request)


def test_segments_of_a_lane_lie_where_they_say() -> None:
    """With a lane each segment is read at its offset, and never beyond the memory's end."""
    memory = np.zeros(256, np.uint8)
    memory[128:168] = IDS.view(np.uint8)
    memory[168:228] = ROWS.reshape(-1).view(np.uint8)
    place = Segment(table=SPARSE.key, content=segments.ID_ROWS, count=5, offset=128)
    header = Header(segments=[place])
    header.lane.generation = 1
    [gradient] = segments.read_request(header, memory, spec_of).gradients
    np.testing.assert_array_equal(gradient.ids, IDS)
    np.testing.assert_array_equal(gradient.values, ROWS)
    for wrong in ({"offset": 160}, {"offset": 2**64 - 8}, {"count": 2**60}):
        bad = Header(lane=header.lane, segments=[place])
        for name, value in wrong.items():
            setattr(bad.segments[0], name, value)
        with pytest.raises(FrameError, match="announces"):
            segments.read_request(bad, memory, spec_of)


def test_large_arrays_give_the_same_message() -> None:
    """A large array, which is written past the caches, among small, odd, empty and two-dimensional ones: the
    bytes that joining gives."""
    values = np.random.default_rng(0).standard_normal(STREAM_FROM // 4 + 1).astype(np.float32)
    ids, rows = np.arange(7), values[:10].reshape(5, 2)
    slices = [
        OutgoingSegment(Segment(table=1, count=3), (ids, values)),
        OutgoingSegment(Segment(table=2)),
        OutgoingSegment(Segment(table=3), (rows[:, :1],)),
        OutgoingSegment(Segment(table=4), (values[:0],)),
    ]
    header = Header(worker=1, segments=[part.segment for part in slices])
    parts = [ids.tobytes(), values.tobytes(), bytes(4), rows[:, :1].tobytes(), bytes(4)]
    assert segments.message(Header(worker=1), slices) == frame.encode(header, parts)
