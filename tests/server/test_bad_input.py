"""What must not be accepted from the wire: one sentence each, and no parameter changes."""

import math
import re
import struct
from typing import Any, cast

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psfleet.errors import PsfleetError
from psfleet.wire import frame
from psfleet.wire.connections.error_status import error_of
from psfleet.wire.v1 import coordinator_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import (
    CONTENT_ELEMENTS,
    CONTENT_ID_ROWS,
    CONTENT_IDS,
    CONTENT_STATE,
    CONTENT_UNSPECIFIED,
    CONTENT_VALUES,
    Frame,
    Header,
    Segment,
)
from psfleet_server.process import Server

IDS = np.arange(2, dtype="<i8").tobytes()
ROWS = bytes(24)


class Victim:
    """A server with a dense and a sparse table, and bytes sent to it."""

    def __init__(self, peer: Any, server: Server) -> None:
        self.peer = peer
        self.server = server
        self.present = peer.join(0)
        self.rows = peer.create("rows", "sparse", (3,))
        self.whole = peer.create("whole", "dense", (4,), struct.pack("<4f", 1, 2, 3, 4))
        self.send("Shard/Push", self.push(self.rows, CONTENT_ID_ROWS, 2, IDS + ROWS))

    def push(
        self,
        table: int,
        content: int,
        count: int,
        payload: bytes,
        sequence: int = 1,
        incarnation: int | None = None,
        worker: int = 0,
    ) -> bytes:
        """A push of one segment."""
        header = Header(
            worker=worker,
            incarnation=self.present if incarnation is None else incarnation,
            sequence=sequence,
        )
        header.segments.add(table=table, content=content, count=count, learning_rate=1)
        return Frame(header=header, payload=payload).SerializeToString()

    def send(self, method: str, message: bytes) -> bytes:
        """Bytes as they are."""
        reply: bytes = self.peer.channel.unary_unary(f"/psfleet.v1.{method}", None, None)(
            message, timeout=60
        )
        return reply

    def state(self) -> list[bytes]:
        """All there is: tables with their steps, and the server's counts of pushes."""
        pages = [
            self.peer.shard.ReadState(shard_pb2.StateRequest(table=table, limit=100))
            for table in (self.rows, self.whole)
        ]
        status = self.peer.shard.Status(shard_pb2.StatusRequest())
        return [
            *(page.SerializeToString() for page in pages),
            repr((status.pushes, len(status.tables))).encode(),
        ]

    def refuses(self, method: str, message: bytes, text: str) -> None:
        """The message gets an error with that text, one sentence, and changes nothing."""
        before = self.state()
        with pytest.raises(grpc.RpcError) as caught:
            self.send(method, message)
        error = str(error_of(caught.value, "server"))
        assert re.search(text, error), error
        assert "\n" not in error
        assert "see its log" not in error
        assert self.state() == before


@pytest.fixture
def victim(peer: Any, server: Server) -> Victim:
    """See Victim."""
    return Victim(peer, server)


def test_pushes_that_lie(victim: Victim) -> None:
    """Unknown tables, wrong kinds, shapes and counts, repeated ids, cut and swollen frames."""
    rows, whole = victim.rows, victim.whole
    good = victim.push(whole, CONTENT_VALUES, 4, bytes(16), sequence=2)
    for message, text in [
        (victim.push(77, CONTENT_VALUES, 4, bytes(16)), "table 0x4d is unknown to server 0"),
        (
            victim.push(whole, CONTENT_VALUES, 2, bytes(8)),
            r"holds 4 values, the gradient .* \(2,\)",
        ),
        (victim.push(whole, CONTENT_ID_ROWS, 2, IDS + ROWS), "'whole' is dense; its segment"),
        (victim.push(whole, CONTENT_UNSPECIFIED, 0, b""), "'whole' is dense; its segment"),
        (victim.push(rows, CONTENT_VALUES, 6, ROWS), "'rows' is sparse; its segment"),
        (victim.push(rows, CONTENT_ID_ROWS, 3, IDS + ROWS), "announces .* bytes, but the payload"),
        (victim.push(rows, CONTENT_ID_ROWS, 2**63, IDS + ROWS), "announces 73786976294838206464"),
        (victim.push(rows, CONTENT_ID_ROWS, 1, IDS + ROWS), "segments take 24 bytes"),
        (victim.push(rows, CONTENT_ID_ROWS, 2, IDS[:8] * 2 + ROWS), "names id .* twice"),
        (good[:-3], "announces a field of 16 bytes, but only 13 follow"),
        (
            b"\x12" + b"\xff\xff\xff\xff\xff\x1f" + b"abc",
            "announces a field of 1099511627775 bytes",
        ),
        (b"\xff" * 40, "more than 10 bytes"),
        (victim.push(rows, CONTENT_ID_ROWS, 2, IDS + ROWS, sequence=9), "push 2 has not arrived"),
        (
            victim.push(rows, CONTENT_ID_ROWS, 2, IDS + ROWS, incarnation=9),
            "incarnation 9 .* has not joined",
        ),
        (victim.push(rows, CONTENT_ID_ROWS, 2, IDS + ROWS, worker=5), "worker 5 has not joined"),
        (
            victim.push(rows, CONTENT_ID_ROWS, 2, IDS + ROWS, incarnation=0),
            "incarnation 0 of worker 0 has ended",
        ),
    ]:
        victim.refuses("Shard/Push", message, text)
    victim.send("Shard/Push", good)


def elements(victim: Victim, count: int, payload: bytes, **fields: Any) -> bytes:
    """A push of elements of the dense table."""
    header = Header(incarnation=victim.present, sequence=2)
    header.segments.add(
        table=victim.whole, content=CONTENT_ELEMENTS, count=count, learning_rate=1, **fields
    )
    return Frame(header=header, payload=payload).SerializeToString()


def test_elements_that_lie(victim: Victim) -> None:
    """Positions that do not ascend or lie outside, wrong lengths, scales and precisions."""
    floats = struct.pack("<2f", 1, 1)
    for message, text in [
        (elements(victim, 2, struct.pack("<2I", 3, 3) + floats), "position 3 comes after 3"),
        (elements(victim, 2, struct.pack("<2I", 3, 1) + floats), "position 1 comes after 3"),
        (
            elements(victim, 2, struct.pack("<2I", 3, 4) + floats),
            "positions 0 to 3 here; 4 is not one",
        ),
        (elements(victim, 2, struct.pack("<2I", 0, 2**32 - 1) + floats), "4294967295 is not one"),
        (elements(victim, 3, struct.pack("<2I", 0, 1) + floats), "announces 12 bytes"),
        (elements(victim, 2**61, struct.pack("<2I", 0, 1) + floats), "announces"),
        (elements(victim, 1, struct.pack("<2I", 0, 1) + floats), "segments take 8 bytes"),
        (
            elements(victim, 2, struct.pack("<2I", 0, 1) + floats + bytes(8), precision=1),
            "segments take",
        ),
        (
            elements(victim, 2, struct.pack("<2I2H", 0, 1, 0, 0) + bytes(4), precision=9),
            "precision 9",
        ),
        (
            elements(victim, 2, struct.pack("<2I2H", 0, 1, 0, 0) + bytes(4), precision=2, scale=-1),
            "-1.0",
        ),
        (
            elements(
                victim,
                2,
                struct.pack("<2I2H", 0, 1, 0, 0) + bytes(4),
                precision=2,
                scale=float("nan"),
            ),
            "nan",
        ),
        (
            elements(
                victim, 2, struct.pack("<2I2H", 0, 1, 0, 0) + bytes(4), precision=2, scale=1e-300
            ),
            "1e-300",
        ),
        (victim.push(victim.rows, CONTENT_ELEMENTS, 2, IDS), "'rows' is sparse; its segment"),
    ]:
        victim.refuses("Shard/Push", message, text)
    victim.send(
        "Shard/Push",
        elements(victim, 2, struct.pack("<2I2e", 1, 3, 4, 8) + bytes(4), precision=2, scale=4),
    )
    page = victim.peer.shard.ReadState(shard_pb2.StateRequest(table=victim.whole, limit=9))
    assert np.frombuffer(page.payload, "<f4").tolist() == [1, 1, 3, 2]


def test_an_empty_frame_is_a_push_of_nothing(victim: Victim) -> None:
    """No bytes at all are a valid Frame: a push without an incarnation, which is refused."""
    victim.refuses("Shard/Push", b"", "incarnation 0 of worker 0 has ended")


def test_nan_gradients_are_the_users_own(victim: Victim) -> None:
    """A NaN in a gradient is applied: the server does not judge values."""
    victim.send(
        "Shard/Push",
        victim.push(
            victim.whole, CONTENT_VALUES, 4, struct.pack("<4f", np.nan, 0, 0, 0), sequence=2
        ),
    )
    page = victim.peer.shard.ReadState(shard_pb2.StateRequest(table=victim.whole, limit=9))
    assert np.isnan(np.frombuffer(page.payload, "<f4")).tolist() == [True, False, False, False]


def test_pulls_that_lie(victim: Victim) -> None:
    """Unknown tables, wrong kinds, missing ids, lives that do not exist."""
    for message, text in [
        (victim.push(77, CONTENT_IDS, 0, b""), "table 0x4d is unknown"),
        (victim.push(victim.rows, CONTENT_VALUES, 0, b""), "'rows' is sparse; its segment"),
        (victim.push(victim.rows, CONTENT_IDS, 5, IDS), "announces 40 bytes"),
        (victim.push(victim.rows, CONTENT_IDS, 2**40, IDS), "announces 8796093022208 bytes"),
        (
            victim.push(victim.rows, CONTENT_IDS, 2, IDS, incarnation=3),
            "incarnation 3 .* has not joined",
        ),
    ]:
        victim.refuses("Shard/Pull", message, text)


def table(**fields: Any) -> bytes:
    """A request for a table that differs from a good one in these fields."""
    value = fields.pop("value", b"")
    good: dict[str, Any] = {
        "name": "new",
        "kind": "sparse",
        "shape": (3,),
        "rule": "sgd",
        "initializer": "constant",
    }
    return bytes(
        shard_pb2.CreateTableRequest(
            spec=shard_pb2.TableSpec(**(good | fields)), value=value
        ).SerializeToString()
    )


def test_tables_that_cannot_be(victim: Victim) -> None:
    """Names, kinds, shapes, rules and values that no table can have."""
    for message, text in [
        (table(name=""), "needs a name"),
        (table(kind="round"), "kind is 'round'"),
        (table(shape=(0,)), "dim"),
        (table(shape=(3, 4)), "dim"),
        (table(shape=(2**40,)), "dim"),
        (table(rule="magic"), "magic"),
        (table(rule="adam", hyperparameters={"beta1": 7}), "beta1"),
        (table(hyperparameters={"speed": 7}), "speed"),
        (table(initializer="luck"), "luck"),
        (table(seed=2**63), "seed"),
        (table(kind="dense", shape=(2**32, 2**31)), "limit is"),
        (table(kind="dense", shape=(4,)), "not yet on server 0"),
        (table(kind="dense", shape=(4,), value=bytes(8)), "holds 4 values"),
        (table(kind="dense", shape=(4,), value=bytes(7)), "no whole number of float32"),
        (table(name="rows", shape=(4,)), "exists"),
        (b"\xff\xff", "a request of 2 bytes is no CreateTableRequest"),
    ]:
        victim.refuses("Shard/CreateTable", message, text)


SHOWN = {
    "nonclk_coeff": 0.1,
    "click_coeff": 1.0,
    "decay_rate": 0.9,
    "delete_threshold": 0.8,
    "delete_after_unseen": 30,
}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(victim: Victim, wrong: float) -> None:
    """Every number of a definition and of a push is finite; each is refused by its name."""
    rule: Any = {"rule": "momentum", "hyperparameters": {}}
    for fields, text in [
        ({"l1": wrong}, "the decay l1 of a table is"),
        ({"l2": wrong}, "the decay l2 of a table is"),
        ({"low": wrong}, "initializer 'constant' has the values"),
        ({"initializer": "uniform", "high": wrong}, "initializer 'uniform' has the values"),
        (rule | {"hyperparameters": {"momentum": wrong}}, "momentum"),
        (rule | {"hyperparameters": {"use_nesterov": wrong}}, "use_nesterov"),
        ({"entry": "probability", "entry_values": {"probability": wrong}}, "probability"),
        ({"entry": "ttl", "entry_values": {"steps": 0, "seconds": wrong}}, "seconds"),
        ({"entry": "ttl", "entry_values": {"steps": wrong, "seconds": 1}}, "steps"),
        *(
            ({"entry": "show_click:s:c", "entry_values": SHOWN | {name: wrong}}, name)
            for name in SHOWN
        ),
    ]:
        victim.refuses("Shard/CreateTable", table(**fields), text)
    victim.refuses("Shard/Push", rated(victim, wrong), "the learning rate of a push is")


def test_numbers_that_are_too_large(victim: Victim) -> None:
    """What is infinite as a float32, in which servers compute, or does not fit into a count."""
    many = SHOWN | {"delete_after_unseen": 1e300}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"l1": 1e39}, "l1 of a table is 1e.39; it must be a finite float32"),
        ({"l2": -1e39}, "l2 of a table is -1e.39; it must be a finite float32"),
        ({"low": 1e39}, "they must be finite float32"),
        ({"entry": "show_click:s:c", "entry_values": many}, "delete_after_unseen"),
    ]
    for fields, text in wrong:
        victim.refuses("Shard/CreateTable", table(**fields), text)
    victim.refuses("Shard/Push", rated(victim, 1e39), "it must be a finite float32")


def rated(victim: Victim, rate: float) -> bytes:
    """A push with this learning rate."""
    header = Header(incarnation=victim.present, sequence=2)
    header.segments.add(table=victim.whole, content=CONTENT_VALUES, count=4, learning_rate=rate)
    return bytes(Frame(header=header, payload=bytes(16)).SerializeToString())


def test_states_that_lie(victim: Victim) -> None:
    """A state that does not fit is refused, and the good one beside it is not written either."""
    header = Header(
        segments=[
            Segment(table=victim.rows, content=CONTENT_STATE, count=1, step=5),
            Segment(table=victim.whole, content=CONTENT_STATE, count=2, start=3, step=5),
        ]
    )
    payload = struct.pack("<q3fi", 5, 1, 1, 1, 0) + struct.pack("<2f", 1, 1)
    message = frame.encode(header, [payload])
    victim.refuses("Shard/WriteState", message, r"arrays of 4 values, not of \[2\] from 3 on")


def test_other_requests_that_lie(victim: Victim, tmp_path: Any) -> None:
    """Join, Leave, Register, AllReduce, Load and ReadState with things that are not."""
    reduce, join = coordinator_pb2.AllReduceRequest, cast("Any", shard_pb2.JoinRequest)
    for method, request, text in [
        ("Shard/Join", join(incarnation=2), "mode 0 is unknown"),
        ("Shard/Join", join(incarnation=2, mode=9), "mode 9 is unknown"),
        ("Shard/Join", join(incarnation=2, mode=1), "runs in mode 'async'"),
        ("Shard/Join", join(worker=7, incarnation=2, mode=2), "worker 7"),
        ("Shard/Leave", shard_pb2.LeaveRequest(worker=7), "worker 7 has not joined"),
        ("Coordinator/Register", coordinator_pb2.RegisterRequest(worker=9, workers=1), "worker 9"),
        ("Coordinator/Barrier", coordinator_pb2.BarrierRequest(worker=9), "worker 9"),
        (
            "Coordinator/Barrier",
            coordinator_pb2.BarrierRequest(incarnation=1, number=5),
            "collective 5",
        ),
        ("Coordinator/AllReduce", reduce(incarnation=1, number=1, dtype="object"), "'object'"),
        (
            "Coordinator/AllReduce",
            reduce(incarnation=1, number=1, dtype="int32", shape=[2**40, 2**20]),
            "announces 4611686018427387904 bytes and brings 0",
        ),
        ("Shard/ReadState", shard_pb2.StateRequest(table=3), "table 0x3 is unknown"),
        ("Shard/Load", shard_pb2.LoadRequest(path=f"{tmp_path}/none"), "holds no manifest"),
    ]:
        victim.refuses(method, request.SerializeToString(), text)


METHODS = [
    "Shard/Push",
    "Shard/Pull",
    "Shard/Join",
    "Shard/CreateTable",
    "Shard/ReadState",
    "Shard/WriteState",
    "Coordinator/Register",
    "Coordinator/AllReduce",
]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(METHODS), st.binary(max_size=80), st.integers(0, 200), st.integers(0, 255))
def test_no_bytes_bring_a_server_down(
    victim: Victim, method: str, noise: bytes, at: int, byte: int
) -> None:
    """Random bytes, and a good push with a byte changed, get an answer or an error of one line."""
    changed = bytearray(victim.push(victim.whole, CONTENT_VALUES, 4, bytes(16), sequence=1))
    changed[at % len(changed)] = byte
    for message in (noise, bytes(changed)):
        try:
            victim.send(method, message)
        except grpc.RpcError as error:
            told: PsfleetError = error_of(error, "server")
            assert "see its log" not in str(told), told  # a bug would say so
