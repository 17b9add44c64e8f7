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
from msgspec import Struct, msgpack
from msgspec.structs import astuple

from psfleet.checkpoint import loading, save_fleet, writing
from psfleet.core.base.errors import CheckpointError, FrameError, LogError, ProtocolError
from psfleet.core.engine.shard.events import Tick
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net import body, message_codec
from psfleet.core.net.body import read_record
from psfleet.core.net.connections.access import Access
from psfleet.core.net.server_state import ServerState, read_state, write_state
from psfleet.core.net.v1.replica_pb2 import FollowRequest
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.inspect_log import verify
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import VERSION, LogHeader, ServerLog, chained, read_header
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
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import Deadlines
from psfleet_server.services.standby_service import _ReplicaService
from tests.fuzz.files import of_folder
from tests.fuzz.frames import Context
from tests.server import goldens
from tests.server.goldens import FOLDER, coordinator, decisions, records, shard_states

ROOT = Path(__file__).parents[2]
UNKNOWN = b"\xfa\x7f\x01x"
"""A field of number 2047 of a protobuf message."""
OLD = FOLDER.parents[1] / "v1" / "server"
"""Files of version 1, in which records and states were protobuf messages."""
ADVICE = "read it with the psfleet version that wrote it"


def golden_records() -> list[tuple[int, memoryview]]:
    """Kind and body of each record of the golden log."""
    return [(kind, record) for kind, record, *_ in chained(FOLDER / "server.0.log") if kind]


def plain(value: Any) -> Any:
    """The value in built-in types, to be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Struct):
        return type(value).__name__, [plain(each) for each in astuple(value)]
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
            decision = read_decision(stored)
            assert plain(decision) == plain(said)
            assert joined(encode_change(decision)[1]) == stored
        else:
            record = decode(kind, stored)
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
    assert second.after is not None
    assert second.after.snapshot == 7
    assert dataclasses.replace(second, after=None) == first
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
    assert (reply.number, reply.kind, decode(reply.kind, stored)) == (9, 14, Tick(2.5))
    said, _ = read_record((FOLDER / "stream.said").read_bytes())
    assert (said.required, said.over, said.complete) == (True, True, 7)
    request = body.parse(FollowRequest, (FOLDER / "stream.request").read_bytes())
    assert request == FollowRequest(server=1, attach=3, taken=8, term=2, version=VERSION)


# -- what a reader does not know -----------------------------------------------------------------


def heads(stored: memoryview) -> tuple[Any, bytes]:
    """The head of a body in built-in types, and the arrays behind it."""
    (length,) = struct.unpack_from("<Q", stored)
    return msgpack.decode(stored[8 : 8 + length], strict=False), bytes(
        stored[8 + length + -length % 8 :]
    )


def rebuilt(head: Any, arrays: bytes) -> memoryview:
    """A body with another head before the same arrays."""
    content = msgpack.encode(head)
    size = struct.pack("<Q", len(content))
    return memoryview(size + content + bytes(-len(content) % 8) + arrays)


def changed_heads(head: Any, change: Callable[[dict[Any, Any]], None]) -> Iterator[Any]:
    """Copies of a head, each changed in another one of its maps, at any depth."""
    for number in range(len([*maps_in(head)])):
        copied = copy.deepcopy(head)
        change([*maps_in(copied)][number])
        yield copied


def maps_in(value: Any) -> Iterator[dict[Any, Any]]:
    """The maps in a value, itself included."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from maps_in(each)


def test_unknown_fields_are_refused_at_any_depth() -> None:
    """A record or a state with one field that this version does not know is not read."""
    count = 0
    for kind, stored in golden_records():
        if kind == RecordKind.READY:
            continue
        head, arrays = heads(stored)
        for changed in changed_heads(head, lambda one: one.update({"unknown": 1})):
            with pytest.raises(FrameError, match=r"has other fields than|is damaged"):
                taken(kind, rebuilt(changed, arrays))
            count += 1
    assert count > 60
    with pytest.raises(FrameError, match="FollowReply has a field"):
        read_record((FOLDER / "stream.said").read_bytes() + UNKNOWN)


def test_missing_fields_are_refused() -> None:
    """A record without a field is not read either, whether the field has a default or not."""
    for kind, stored in golden_records():
        if kind != RecordKind.READY:
            head, arrays = heads(stored)
            del head[next(name for name in reversed(head) if name != "type")]
            with pytest.raises(FrameError, match=r"has other fields than|is damaged|arrays take"):
                taken(kind, rebuilt(head, arrays))


def taken(kind: int, stored: memoryview) -> None:
    """Read a record as recovery does."""
    if kind in (RecordKind.CORE, RecordKind.COPIED):
        read_state(stored)
    elif kind == RecordKind.DECISION:
        read_decision(stored)
    else:
        decode(kind, stored)


def test_a_log_of_version_1_is_refused() -> None:
    """The sentence says of which version it is, and what can read it."""
    with pytest.raises(
        LogError, match=f"has version 1, and this psfleet reads version 2; {ADVICE}"
    ):
        read_header(OLD / "server.0.log")
    with pytest.raises(LogError, match="version 1"):
        verify(str(OLD / "server.0.log"))


@pytest.mark.parametrize("name", ["sync", "ssp", "new"])
def test_states_of_version_1_are_refused(name: str) -> None:
    """A job does not go on from them; snapshots that hold them give their rows, see tests/checkpoint."""
    with pytest.raises(FrameError, match="state of version 1; this psfleet reads version 2"):
        read_state(memoryview((OLD / f"state.{name}").read_bytes()))


def a_log(path: Path, append: Callable[[ServerLog], None]) -> bytes:
    """A log with a table and what is appended; its bytes."""
    log, shard = ServerLog(path, LogHeader(servers=1, workers=1)), Shard()
    Journal(log, shard, None).start()
    shard.create(goldens.DENSE, np.zeros(5, np.float32))
    append(log)
    log.close()
    return path.read_bytes()


@pytest.mark.parametrize("case", ["field", "kind", "ready"])
def test_a_log_with_something_unknown_is_refused(tmp_path: Path, case: str) -> None:
    """A server says which file it is and what to do, and leaves the log as it was."""
    path = tmp_path / "server.0.log"
    tick = rebuilt({"seconds": 1.0, "unknown": 1}, b"")
    kind = {"field": RecordKind.TICK, "kind": 99, "ready": RecordKind.READY}[case]
    before = a_log(path, lambda log: log.append(kind, [tick]))
    log = ServerLog(path, LogHeader(servers=1, workers=1))
    words = "read it with the psfleet version that wrote it, or start the job again"
    with pytest.raises(LogError, match=rf"record 3 of log '{path}' cannot be taken: .*; {words}"):
        Journal(log, Shard(), None).start()
    log.close()
    assert path.read_bytes() == before


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    """The same for the version in the file's header, and for a header that is none."""
    header = LogHeader(servers=1, workers=1)
    path = tmp_path / "server.0.log"
    good = message_codec.encode(header)
    for version, text, why in (3, good, "version 3"), (2, good[:-1], "no header of a log"):
        crc = zlib.crc32(struct.pack("<I", version) + text)
        path.write_bytes(b"PSFLOG\r\n" + struct.pack("<III", version, len(text), crc) + text)
        with pytest.raises(LogError, match=f"'{path}' cannot be read: .*{why}.*psfleet version"):
            ServerLog(path, header)


@pytest.mark.parametrize("case", ["field", "version", "arrays"])
def test_a_snapshot_with_something_unknown_is_refused(tmp_path: Path, case: str) -> None:
    """Nothing of it is loaded, neither by a server nor by a user; the sentence names the file."""

    def changed(state: ServerState) -> Any:
        head, arrays = heads(memoryview(joined(write_state(state))))
        if case == "version":
            head["version"] = 3
        elif case == "field":
            head["workers"]["unknown"] = 1
        return [rebuilt(head, arrays), *([bytes(8)] if case == "arrays" else [])]

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
    requests = iter([FollowRequest(attach=1, version=1).SerializeToString()])
    context: Any = Context()
    with pytest.raises(ProtocolError, match="version 1, this server writes version 2; start both"):
        list(replica._follow(requests, context))
