"""Golden files of a server's formats are read bit for bit; what a reader does not know, it refuses."""

import copy
import dataclasses
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from psfleet.checkpoint import loading, save_fleet, writing
from psfleet.core.base.errors import CheckpointError, FrameError, LogError, ProtocolError
from psfleet.core.engine.shard.events import Tick
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net import body
from psfleet.core.net.body import read_record
from psfleet.core.net.connections.access import Access
from psfleet.core.net.server_state import ServerState, read_state, write_state
from psfleet.core.net.v1 import log_pb2, membership_pb2, shard_pb2, state_pb2
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet.core.net.v1.replica_pb2 import FollowRequest
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.inspect_log import verify
from psfleet_server.durability.log import ServerLog, chained, read_header
from psfleet_server.durability.log_shipping import joined
from psfleet_server.durability.records import (
    RecordKind,
    become,
    decode,
    encode,
    encode_change,
    read_decision,
    write_coordinator,
)
from psfleet_server.durability.recovery import Journal
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import Deadlines
from psfleet_server.services.row_services import _ReplicaService
from tests.fuzz.files import of_folder
from tests.fuzz.frames import Context
from tests.server import goldens
from tests.server.goldens import FOLDER, SPECS, coordinator, decisions, records, shard_states

ROOT = Path(__file__).parents[2]
MESSAGES: dict[int, type[Message]] = {
    RecordKind.CREATE: log_pb2.CreateRecord,
    RecordKind.JOIN: shard_pb2.JoinRequest,
    RecordKind.LEAVE: shard_pb2.LeaveRequest,
    RecordKind.PUSH: Header,
    RecordKind.WRITE: Header,
    RecordKind.CLOSE: log_pb2.CloseRecord,
    RecordKind.DECISION: log_pb2.DecisionRecord,
    RecordKind.VIEW: membership_pb2.InstallRequest,
    RecordKind.FILL: log_pb2.FillRecord,
    RecordKind.CUT: log_pb2.CutRecord,
    RecordKind.SHRINK: shard_pb2.ShrinkRequest,
    RecordKind.TICK: log_pb2.TickRecord,
    RecordKind.EVICT: log_pb2.EvictRecord,
    RecordKind.CORE: state_pb2.ServerState,
    RecordKind.COPIED: state_pb2.ServerState,
}
UNKNOWN = b"\xfa\x7f\x01x"
"""A field of number 2047."""


def spec_of(key: int) -> Any:
    """The tables of the golden files."""
    return SPECS[key]


def golden_records() -> list[tuple[int, memoryview]]:
    """Kind and body of each record of the golden log."""
    return [(kind, record) for kind, record, *_ in chained(FOLDER / "server.0.log") if kind]


def plain(value: Any) -> Any:
    """The value in built-in types, to be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return type(value).__name__, fields
    if isinstance(value, Mapping):
        return [(key, plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [plain(each) for each in value]
    return value


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every golden file is what this psfleet writes of the same content, bit for bit."""
    goldens.build(tmp_path / "new")
    assert of_folder(tmp_path / "new") == of_folder(FOLDER)


def test_records_of_a_log_are_read_as_they_were() -> None:
    """Every kind of record and of decision comes back equal in every bit, and is written back so."""
    actual, built = golden_records(), [*records(), *decisions()]
    assert {kind for kind, _ in actual} == {*RecordKind}
    for (kind, stored), said in zip(actual, built, strict=False):
        if kind == RecordKind.DECISION:
            decision = read_decision(body.read_alone(log_pb2.DecisionRecord, stored))
            assert plain(decision) == plain(said)
            assert joined(encode_change(decision)[1]) == stored
        else:
            record = decode(kind, stored, spec_of)
            assert plain(record) == plain(said)
            assert encode(record)[0] == kind
            assert joined(encode(record)[1]) == stored
    assert [kind for kind, _ in actual[len(built) :]] == [
        RecordKind.READY,
        RecordKind.CORE,
        RecordKind.COPIED,
    ]


def test_the_header_of_a_log_is_read_as_it_was() -> None:
    """A log says whose it is, and a later file also where it goes on."""
    first, second = (read_header(path) for path in sorted(FOLDER.glob("*.log"), reverse=True))
    assert (first.job, first.servers, first.workers, first.block) == ("golden", 2, 2, 4096)
    assert second.after.snapshot == 7
    second.ClearField("after")
    assert second == first
    assert "2 file(s)" in verify(str(FOLDER / "server.0.log"))


@pytest.mark.parametrize("name", ["sync", "ssp", "new"])
def test_states_are_read_as_they_were(name: str) -> None:
    """A shard and a coordinator become what they were, held pushes included, and are written back so."""
    stored = (FOLDER / f"state.{name}").read_bytes()
    state = read_state(memoryview(stored))
    assert plain(state.shard) == plain(shard_states()[name])
    assert joined(write_state(state)) == stored
    shard = Shard()
    shard.become(state.shard)
    shard.workers.view = state.shard.workers.view  # which only a standby takes over
    assert joined(write_state(ServerState(shard.state(), state.coordinator))) == stored
    if state.coordinator is not None:
        again, known = Coordinator(1), coordinator()
        become(again, state.coordinator)
        assert again.term == known.term
        assert plain(again.members) == plain(known.members)
        assert plain(again.collectives) == plain(known.collectives)
        assert plain(again.dispatch) == plain(known.dispatch)
        assert write_coordinator(again) == state.coordinator


def test_the_stream_to_a_standby_is_read_as_it_was() -> None:
    """What both ends of the stream say comes back."""
    reply, stored = read_record((FOLDER / "stream.record").read_bytes())
    assert (reply.number, reply.kind, decode(reply.kind, stored, spec_of)) == (9, 14, Tick(2.5))
    said, _ = read_record((FOLDER / "stream.said").read_bytes())
    assert (said.required, said.over, said.complete) == (True, True, 7)
    request = body.parse(FollowRequest, (FOLDER / "stream.request").read_bytes())
    assert request == FollowRequest(server=1, attach=3, taken=8, term=2, version=1)


# -- what a reader does not know -----------------------------------------------------------------


def with_unknown_fields(message: Message) -> Iterator[Message]:
    """Copies of a message, each with an unknown field in another place."""
    for path in places(message, ()):
        changed = copy.deepcopy(message)
        inner: Any = changed
        for name, key in path:
            inner = getattr(inner, name) if key is None else getattr(inner, name)[key]
        inner.MergeFromString(UNKNOWN)
        yield changed


def places(message: Message, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Where there are messages in a message, itself included."""
    yield path
    for field, value in message.ListFields():
        inner: dict[Any, Any] = {}
        if isinstance(value, Message):
            inner = {None: value}
        elif isinstance(value, Mapping):
            inner = dict(value)
        elif field.message_type is not None:
            inner = dict(enumerate(value))
        for key, each in inner.items():
            if isinstance(each, Message):
                yield from places(each, (*path, (field.name, key)))


def rebuilt(message: Message, stored: memoryview) -> memoryview:
    """A body with another message before the same arrays."""
    (length,) = struct.unpack_from("<Q", stored)
    arrays = stored[8 + length + -length % 8 :]
    return memoryview(joined([*body.pack(message), arrays]))


def test_unknown_fields_are_refused_at_any_depth() -> None:
    """A record or a state with one field that this version does not know is not read."""
    count = 0
    for kind, stored in golden_records():
        if kind == RecordKind.READY:
            continue
        message, _ = body.unpack(MESSAGES[kind], stored)
        for changed in with_unknown_fields(message):
            with pytest.raises(
                FrameError, match="has a field that this version of psfleet does not"
            ):
                taken(kind, rebuilt(changed, stored))
            count += 1
    assert count > 100
    with pytest.raises(FrameError, match="FollowReply has a field"):
        read_record((FOLDER / "stream.said").read_bytes() + UNKNOWN)


def taken(kind: int, stored: memoryview) -> None:
    """Read a record as recovery does."""
    if kind in (RecordKind.CORE, RecordKind.COPIED):
        read_state(stored)
    elif kind == RecordKind.DECISION:
        read_decision(body.read_alone(log_pb2.DecisionRecord, stored))
    else:
        decode(kind, stored, spec_of)


def test_a_map_with_an_unknown_field_is_refused() -> None:
    """Also where protobuf keeps an entry of a map and drops what it does not know of it."""
    entry = b"\x08\x01\x12\x01p"  # seat 1: "p"
    assert body.parse(log_pb2.CloseRecord, b"\x1a\x05" + entry).progress == {1: "p"}
    with pytest.raises(FrameError, match="CloseRecord has a field"):
        body.parse(log_pb2.CloseRecord, b"\x1a\x07" + entry + b"\x18\x09")


def a_log(path: Path, append: Callable[[ServerLog], None]) -> bytes:
    """A log with a table and what is appended; its bytes."""
    log, shard = ServerLog(path, log_pb2.LogHeader(servers=1, workers=1)), Shard()
    Journal(log, shard, None).start()
    shard.create(goldens.DENSE, np.zeros(5, np.float32))
    append(log)
    log.close()
    return path.read_bytes()


@pytest.mark.parametrize("case", ["field", "kind", "ready"])
def test_a_log_with_something_unknown_is_refused(tmp_path: Path, case: str) -> None:
    """A server says which file it is and what to do, and leaves the log as it was."""
    path = tmp_path / "server.0.log"
    tick = log_pb2.TickRecord(seconds=1.0)
    tick.MergeFromString(UNKNOWN)
    kind = {"field": RecordKind.TICK, "kind": 99, "ready": RecordKind.READY}[case]
    before = a_log(path, lambda log: log.append(kind, body.pack(tick)))
    log = ServerLog(path, log_pb2.LogHeader(servers=1, workers=1))
    words = "read it with the psfleet version that wrote it, or start the job anew"
    with pytest.raises(LogError, match=rf"record 3 of log '{path}' cannot be taken: .*; {words}"):
        Journal(log, Shard(), None).start()
    log.close()
    assert path.read_bytes() == before


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    """The same for the version in the file's header, and for a field of the header."""
    header = log_pb2.LogHeader(servers=1, workers=1)
    unknown = copy.deepcopy(header)
    unknown.MergeFromString(UNKNOWN)
    path = tmp_path / "server.0.log"
    for version, said, why in (2, header, "version 2"), (1, unknown, "LogHeader has a field"):
        text = said.SerializeToString()
        crc = zlib.crc32(struct.pack("<I", version) + text)
        path.write_bytes(b"PSFLOG\r\n" + struct.pack("<III", version, len(text), crc) + text)
        with pytest.raises(LogError, match=f"'{path}' cannot be read: .*{why}.*psfleet version"):
            ServerLog(path, header)


@pytest.mark.parametrize("case", ["field", "version", "arrays"])
def test_a_snapshot_with_something_unknown_is_refused(tmp_path: Path, case: str) -> None:
    """Nothing of it is loaded, neither by a server nor by a user; the sentence names the file."""

    def changed(state: ServerState) -> Any:
        stored = memoryview(joined(write_state(state)))
        message, _ = body.unpack(state_pb2.ServerState, stored)
        if case == "version":
            message.version = 2
        elif case == "field":
            message.shard.MergeFromString(UNKNOWN)
        return [rebuilt(message, stored), *([bytes(8)] if case == "arrays" else [])]

    shard = Shard()
    shard.create(goldens.DENSE, np.arange(5, dtype=np.float32))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "write_state", changed)
        # A snapshot is opened before it takes its place, so this psfleet never leaves one like it.
        with pytest.raises(CheckpointError, match="cannot be read"):
            save_fleet(str(tmp_path / "never"), [shard])
        assert not (tmp_path / "never").exists()
        patched.setattr(loading._ServerFile, "server", lambda _: ServerState(shard.state()))
        save_fleet(str(tmp_path / "later"), [shard])
    runtime = EmbeddedRuntime()
    with pytest.raises(CheckpointError, match=r"later/shard-0.*cannot be read.*psfleet version"):
        runtime.load(str(tmp_path / "later"))


def test_a_standby_of_another_version_is_refused() -> None:
    """A primary sends no records to a process that reads them in another way."""
    host = ShardHost(Shard(), None, Deadlines())
    replica = _ReplicaService(host, RowMoves(host, Access()))
    requests = iter([FollowRequest(attach=1, version=2).SerializeToString()])
    context: Any = Context()
    with pytest.raises(ProtocolError, match="version 2, this server writes version 1; start both"):
        list(replica._follow(requests, context))
