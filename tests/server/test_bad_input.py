"""What must not be accepted from the wire: one sentence each, and no parameter changes."""

import math
import struct
from typing import Any

import grpc
import numpy as np
import pytest

from psfleet.core.net import frame
from psfleet.core.net.connections.error_statuses import error_of
from psfleet.core.net.v1 import coordinator_pb2, frame_pb2, shard_pb2
from psfleet.core.net.v1.frame_pb2 import Frame, Header, Segment
from psfleet_server.process import Server
from tests.refusals import check_refusals

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
        self.send("Shard/Push", self.push(self.rows, "ID_ROWS", 2, IDS + ROWS))

    def push(
        self, table: int, content: str, count: int, payload: bytes = b"", **fields: Any
    ) -> bytes:
        """A push of one segment; fields: of its header and of the segment."""
        good = {"worker": 0, "incarnation": self.present, "sequence": 1}
        header = Header(**{name: fields.pop(name, value) for name, value in good.items()})
        number = getattr(frame_pb2, f"CONTENT_{content}")
        segment = {"learning_rate": 1.0} | fields
        header.segments.add(table=table, content=number, count=count, **segment)
        return bytes(Frame(header=header, payload=payload).SerializeToString())

    def elements(self, count: int, form: str, *values: float, **fields: Any) -> bytes:
        """A push of elements of the dense table; the values are packed in that form."""
        payload = struct.pack(f"<{form}", *values)
        return self.push(self.whole, "ELEMENTS", count, payload, sequence=2, **fields)

    def send(self, method: str, message: bytes) -> bytes:
        """Bytes as they are."""
        call = self.peer.channel.unary_unary(f"/psfleet.v1.{method}", None, None)
        try:
            return bytes(call(message, timeout=60))
        except grpc.RpcError as error:
            refusal = error_of(error, "server")
            assert "see its log" not in str(refusal), refusal  # a bug would say so
            raise refusal from None

    def page(self, table: int) -> Any:
        """All there is of a table."""
        return self.peer.shard.ReadState(shard_pb2.StateRequest(table=table, limit=100))

    def values(self) -> Any:
        """Those of the dense table."""
        return np.frombuffer(self.page(self.whole).payload, "<f4")

    def state(self) -> list[Any]:
        """Tables, their steps, and the server's counts."""
        status = self.peer.shard.Status(shard_pb2.StatusRequest())
        return [self.page(self.rows), self.page(self.whole), status.pushes, len(status.tables)]

    def refuses(self, method: str, refusals: str, **names: Any) -> None:
        """Each message gets its sentence, and all of them change nothing.

        Args:
            method: Called with the messages; "" where each line says its own: `call("Shard/Join", …)`.
            refusals: As for check_refusals: `message  # sentence`.
            names: More that the messages may use.
        """

        def call(method: str, message: Any) -> None:
            sent = message if isinstance(message, bytes) else message.SerializeToString()
            self.send(method, sent)

        if method:
            lines = [line.rpartition("  # ") for line in refusals.strip().splitlines()]
            refusals = "\n".join(f"call({method!r}, {line[0]})  # {line[2]}" for line in lines)
        ours = {name: getattr(self, name) for name in ("rows", "whole", "push", "elements")}
        ours |= {"IDS": IDS, "ROWS": ROWS, "table": table, "shown": shown, "call": call}
        before = self.state()
        check_refusals(refusals, ours | names)
        assert self.state() == before


@pytest.fixture
def victim(peer: Any, server: Server) -> Victim:
    return Victim(peer, server)


def test_pushes_that_lie(victim: Victim) -> None:
    """Unknown tables, wrong kinds, shapes and counts, repeated ids, cut and swollen frames.

    No bytes at all are a valid Frame: a push without an incarnation.
    """
    good = victim.push(victim.whole, "VALUES", 4, bytes(16), sequence=2)
    victim.refuses(
        "Shard/Push",
        r"""
push(77, "VALUES", 4, bytes(16))  # table 0x4d is unknown to server 0
push(whole, "VALUES", 2, bytes(8))  # holds 4 values, the gradient ... (2,)
push(whole, "ID_ROWS", 2, IDS + ROWS)  # 'whole' is dense; its segment
push(whole, "UNSPECIFIED", 0)  # 'whole' is dense; its segment
push(rows, "VALUES", 6, ROWS)  # 'rows' is sparse; its segment
push(rows, "ELEMENTS", 2, IDS)  # 'rows' is sparse; its segment
push(rows, "ID_ROWS", 3, IDS + ROWS)  # announces ... bytes, but the payload
push(rows, "ID_ROWS", 2**63, IDS + ROWS)  # announces 73786976294838206464
push(rows, "ID_ROWS", 1, IDS + ROWS)  # segments take 24 bytes
push(rows, "ID_ROWS", 2, IDS[:8] * 2 + ROWS)  # names id ... twice
good[:-3]  # announces a field of 16 bytes, but only 13 follow
b"\x12" + b"\xff\xff\xff\xff\xff\x1f" + b"abc"  # announces a field of 1099511627775 bytes
b"\xff" * 40  # more than 10 bytes
push(rows, "ID_ROWS", 2, IDS + ROWS, sequence=9)  # push 2 has not arrived
push(rows, "ID_ROWS", 2, IDS + ROWS, incarnation=9)  # incarnation 9 ... has not joined
push(rows, "ID_ROWS", 2, IDS + ROWS, worker=5)  # worker 5 has not joined
push(rows, "ID_ROWS", 2, IDS + ROWS, incarnation=0)  # incarnation 0 of worker 0 has ended
b""  # incarnation 0 of worker 0 has ended""",
        good=good,
    )
    victim.send("Shard/Push", good)


def test_elements_that_lie(victim: Victim) -> None:
    """Positions that do not ascend or lie outside, wrong lengths, scales and precisions."""
    victim.refuses(
        "Shard/Push",
        """
elements(2, "2I2f", 3, 3, 1, 1)  # position 3 comes after 3
elements(2, "2I2f", 3, 1, 1, 1)  # position 1 comes after 3
elements(2, "2I2f", 3, 4, 1, 1)  # positions 0 to 3 here; 4 is not one
elements(2, "2I2f", 0, 2**32 - 1, 1, 1)  # 4294967295 is not one
elements(3, "2I2f", 0, 1, 1, 1)  # announces 12 bytes
elements(2**61, "2I2f", 0, 1, 1, 1)  # announces
elements(1, "2I2f", 0, 1, 1, 1)  # segments take 8 bytes
elements(2, "2I2f8x", 0, 1, 1, 1, precision=1)  # segments take
elements(2, "2I2H4x", 0, 1, 0, 0, precision=9)  # precision 9
elements(2, "2I2H4x", 0, 1, 0, 0, precision=2, scale=-1)  # -1.0
elements(2, "2I2H4x", 0, 1, 0, 0, precision=2, scale=float("nan"))  # nan
elements(2, "2I2H4x", 0, 1, 0, 0, precision=2, scale=1e-300)  # 1e-300""",
    )
    victim.send("Shard/Push", victim.elements(2, "2I2e4x", 1, 3, 4, 8, precision=2, scale=4))
    assert victim.values().tolist() == [1, 1, 3, 2]


def test_nan_gradients_are_the_users_own(victim: Victim) -> None:
    """A NaN in a gradient is applied: the server does not judge values."""
    payload = struct.pack("<4f", np.nan, 0, 0, 0)
    victim.send("Shard/Push", victim.push(victim.whole, "VALUES", 4, payload, sequence=2))
    assert np.isnan(victim.values()).tolist() == [True, False, False, False]


def test_pulls_that_lie(victim: Victim) -> None:
    """Unknown tables, wrong kinds, missing ids, lives that do not exist."""
    victim.refuses(
        "Shard/Pull",
        """
push(77, "IDS", 0)  # table 0x4d is unknown
push(rows, "VALUES", 0)  # 'rows' is sparse; its segment
push(rows, "IDS", 5, IDS)  # announces 40 bytes
push(rows, "IDS", 2**40, IDS)  # announces 8796093022208 bytes
push(rows, "IDS", 2, IDS, incarnation=3)  # incarnation 3 ... has not joined""",
    )


def table(**fields: Any) -> Any:
    """A request for a table that differs from a good one in these fields."""
    value = fields.pop("value", b"")
    good: dict[str, Any] = {"name": "new", "kind": "sparse", "shape": (3,), "rule": "sgd"}
    spec = shard_pb2.TableSpec(**(good | {"initializer": "constant"} | fields))
    return shard_pb2.CreateTableRequest(spec=spec, value=value)


def test_tables_that_cannot_be(victim: Victim) -> None:
    """Names, kinds, shapes, rules and values that no table can have."""
    victim.refuses(
        "Shard/CreateTable",
        r"""
table(name="")  # needs a name
sh.CreateTableRequest(spec=sh.TableSpec(name="none"))  # there is no table 'none', and without an optimizer
table(kind="round")  # kind is 'round'
table(shape=(0,))  # dim
table(shape=(3, 4))  # dim
table(shape=(2**40,))  # dim
table(rule="magic")  # magic
table(rule="adam", hyperparameters={"beta1": 7})  # beta1
table(hyperparameters={"speed": 7})  # speed
table(initializer="luck")  # luck
table(seed=2**63)  # seed
table(kind="dense", shape=(2**32, 2**31))  # limit is
table(kind="dense", shape=(4,))  # not yet on server 0
table(kind="dense", shape=(4,), value=bytes(8))  # holds 4 values
table(kind="dense", shape=(4,), value=bytes(7))  # no whole number of float32
table(name="rows", shape=(4,))  # exists
b"\xff\xff"  # a request of 2 bytes is no CreateTableRequest""",
        sh=shard_pb2,
    )


SHOWN = {"nonclk_coeff": 0.1, "click_coeff": 1.0, "decay_rate": 0.9, "delete_threshold": 0.8}
SHOWN["delete_after_unseen"] = 30


def shown(**wrong: float) -> Any:
    """A request for a table that counts shows, with a wrong number in its entry."""
    return table(entry="show_click:s:c", entry_values=SHOWN | wrong)


def rated(victim: Victim, rate: float) -> bytes:
    """A push with this learning rate."""
    return victim.push(victim.whole, "VALUES", 4, bytes(16), sequence=2, learning_rate=rate)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_numbers_that_are_none(victim: Victim, wrong: float) -> None:
    """Every number of a definition and of a push is finite; each is refused by its name."""
    victim.refuses(
        "Shard/CreateTable",
        """
table(l1=wrong)  # the decay l1 of a table is
table(l2=wrong)  # the decay l2 of a table is
table(low=wrong)  # initializer 'constant' has the values
table(initializer="uniform", high=wrong)  # initializer 'uniform' has the values
table(rule="momentum", hyperparameters={"momentum": wrong})  # momentum
table(rule="momentum", hyperparameters={"use_nesterov": wrong})  # use_nesterov
table(entry="probability", entry_values={"probability": wrong})  # probability
table(entry="ttl", entry_values={"steps": 0, "seconds": wrong})  # seconds
table(entry="ttl", entry_values={"steps": wrong, "seconds": 1})  # steps
"""
        + "\n".join(f"shown({name}=wrong)  # {name}" for name in SHOWN),
        wrong=wrong,
    )
    rate = "rated  # the learning rate of a push is"
    victim.refuses("Shard/Push", rate, rated=rated(victim, wrong))


def test_numbers_that_are_too_large(victim: Victim) -> None:
    """What is infinite as a float32, in which servers compute, or does not fit into a count."""
    victim.refuses(
        "",
        """
call("Shard/CreateTable", table(l1=1e39))  # l1 of a table is 1e+39; it must be a finite float32
call("Shard/CreateTable", table(l2=-1e39))  # l2 of a table is -1e+39; it must be a finite float32
call("Shard/CreateTable", table(low=1e39))  # they must be finite float32
call("Shard/CreateTable", shown(delete_after_unseen=1e300))  # delete_after_unseen
call("Shard/Push", rated(1e39))  # it must be a finite float32""",
        rated=lambda rate: rated(victim, rate),
    )


def test_states_that_lie(victim: Victim) -> None:
    """A state that does not fit is refused, and the good one beside it is not written either."""
    kind = frame_pb2.CONTENT_STATE
    segments = [
        Segment(table=victim.rows, content=kind, count=1, step=5),
        Segment(table=victim.whole, content=kind, count=2, start=3, step=5),
    ]
    payload = struct.pack("<q3fi", 5, 1, 1, 1, 0) + struct.pack("<2f", 1, 1)
    message = bytes(frame.encode(Header(segments=segments), [payload]))
    sentence = "message  # arrays of 4 values, not of [2] from 3 on"
    victim.refuses("Shard/WriteState", sentence, message=message)


def test_other_requests_that_lie(victim: Victim, tmp_path: Any) -> None:
    """Join, Leave, Register, AllReduce, Load and ReadState with things that are not."""
    victim.refuses(
        "",
        """
call("Shard/Join", sh.JoinRequest(incarnation=2))  # mode 0 is unknown
call("Shard/Join", sh.JoinRequest(incarnation=2, mode=9))  # mode 9 is unknown
call("Shard/Join", sh.JoinRequest(incarnation=2, mode=1))  # runs in mode 'async'
call("Shard/Join", sh.JoinRequest(worker=7, incarnation=2, mode=2))  # worker 7
call("Shard/Leave", sh.LeaveRequest(worker=7))  # worker 7 has not joined
call("Coordinator/Register", co.RegisterRequest(worker=9, workers=1))  # worker 9
call("Coordinator/Barrier", co.BarrierRequest(worker=9))  # worker 9
call("Coordinator/Barrier", co.BarrierRequest(incarnation=1, number=5))  # collective 5
call("Coordinator/AllReduce", reduce(dtype="object"))  # 'object'
call("Coordinator/AllReduce", reduce(dtype="int32", shape=[2**40, 2**20]))  # 4611686018427387904 bytes and
call("Shard/ReadState", sh.StateRequest(table=3))  # table 0x3 is unknown
call("Shard/Load", sh.LoadRequest(path=f"{tmp_path}/none"))  # does not exist, so it holds no manifest""",
        sh=shard_pb2,
        co=coordinator_pb2,
        reduce=lambda **fields: coordinator_pb2.AllReduceRequest(incarnation=1, number=1, **fields),
        tmp_path=tmp_path,
    )
