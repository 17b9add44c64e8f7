"""What an earlier call or reply with the same segments tells of a later one, tensors in the message."""

import os

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard_tables import ShardTables
from psfleet.core.net import frame, segments
from psfleet.core.net.segments import TensorRequest
from psfleet.core.net.shared_memory import FIRST, SharedMemory
from psfleet.core.net.v1.frame_pb2 import OUTCOME_APPLIED, Frame, Header
from psfleet_server.rpc.call_layout import MessageLayouts, lay_out, lay_out_call
from psfleet_worker.connection.request import ServerRequest

DENSE = TableSpec("dense", "dense", (5,), Adam())
SPARSE = TableSpec("sparse", "sparse", (3,), Adam())
SPECS = {spec.key: spec for spec in (DENSE, SPARSE)}
spec_of = SPECS.__getitem__


def request(ids: NDArray[np.int64], seed: int) -> ServerRequest:
    """An exchange: gradients for these ids and for the dense table, and reads of both."""
    values = np.random.default_rng(seed).standard_normal((len(ids) + 2, 5)).astype(np.float32)
    made = ServerRequest(Header(worker=3, sequence=seed + 1), None)
    made.rows(SPARSE, ids, 0.5)[:] = values[: len(ids), :3]
    made.values(DENSE, values[-1], 0.25)
    made.read_rows(SPARSE, ids[::-1])
    made.read_values(DENSE, 0, 5)
    return made


def test_a_payload_that_is_not_aligned_is_copied() -> None:
    """The arrays of a call are aligned, wherever its message lies."""
    layouts = MessageLayouts()
    layout, head, payload = frame.split(request(np.arange(4), 0).encode())
    layouts.keep(
        layout, payload, segments.read_request(frame.read_header(layout + head), payload, spec_of)
    )
    moved = memoryview(bytearray(b"x" + payload))[1:]
    known = layouts.known(frame.read_header(head), layout, moved)
    assert known is not None
    for gradient in known.tensors.gradients:
        assert gradient.values.flags.aligned
    assert known.tensors.reads[0].ids is not None
    np.testing.assert_array_equal(known.tensors.reads[0].ids, np.arange(4)[::-1])


def reply(view: int, ids: NDArray[np.int64], value: float) -> bytes:
    """The answer of a server to the reads of `request`."""
    tables = ShardTables(0, 1)
    for spec, first in (SPARSE, np.zeros(0, np.float32)), (DENSE, np.zeros(5, np.float32)):
        tables[spec.key] = tables.make(spec, first)
    reads = [Read(SPARSE.key, ids), Read(DENSE.key)]
    response = lay_out(Header(outcome=OUTCOME_APPLIED, view=view), reads, tables.shape_of)
    for number, array in enumerate(response.values):
        array[:] = value + number
    return response.finish(OUTCOME_APPLIED, view)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_replies_like_the_one_before_are_read(count: int) -> None:
    """A worker reads every reply to the same reads: of the same form, of another view, and in between."""
    ids = np.arange(count)
    for view, value in (1, 0.5), (1, 1.5), (2, 2.5), (1, 3.5), (300, 4.5):
        made = request(ids, 0)
        message = reply(view, ids, value)
        Frame.FromString(message)
        rows, dense = made.values_of(message, spec_of)
        assert made.view == view
        np.testing.assert_array_equal(rows, np.full((count, 3), value))
        np.testing.assert_array_equal(dense, np.full(5, value + 1))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_pull_of_too_much_is_refused(is_shared: bool) -> None:
    """Every read counts before a value is read: of dense tables too, and of one place in shared memory."""
    tables = ShardTables(0, 1)
    dense = TableSpec("large", "dense", (1 << 20,), Adam())
    for spec, count in (SPARSE, 0), (dense, 1 << 20):
        tables[spec.key] = tables.make(spec, np.zeros(count, np.float32))
    memory = None
    if is_shared:
        made = SharedMemory.make(8 << 20)
        assert made is not None
        memory = made[0]
        os.close(made[1].descriptor)
    rows = Read(SPARSE.key, np.zeros(1 << 10, np.int64), "int8")
    for repeats in ([Read(dense.key)] * 512, [rows] * (171 << 10), [Read(dense.key), rows] * 511):
        request = TensorRequest(reads=repeats, places=[FIRST] * len(repeats))
        with pytest.raises(FrameError, match="the limit is 2147483647; pull fewer ids or tables"):
            lay_out_call(request, memory, tables.shape_of)


def test_a_reply_to_other_reads_is_refused() -> None:
    """What was learned of good replies lets no other one pass."""
    ids = np.arange(8)
    request(ids, 0).values_of(reply(1, ids, 0.5), spec_of)
    alone = ServerRequest(Header(), None)
    alone.read_rows(SPARSE, ids)
    with pytest.raises(FrameError, match="answers 2 of 1 reads"):
        alone.values_of(reply(1, ids, 0.5), spec_of)
    with pytest.raises(FrameError):
        request(ids, 0).values_of(reply(1, ids, 0.5)[:-8], spec_of)
