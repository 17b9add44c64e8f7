"""What a server keeps in its log, and how it becomes what it was from that.

Records of the shard and decisions of the coordinator go to one log, in the order in which they took
effect. A server that starts again takes them once more, through the code that took them first.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint import Snapshot, load_shard, own_name
from psfleet.environment import Environment
from psfleet.errors import CheckpointError, LogError, UsageError
from psfleet.shard.core import Core
from psfleet.shard.events import (
    Close,
    Create,
    Cut,
    Evict,
    Fill,
    Join,
    Leave,
    Push,
    Record,
    Shrink,
    Tick,
    Write,
)
from psfleet.shard.shard import Shard
from psfleet.shard.views import Install
from psfleet.tables.content import Clock
from psfleet.tables.spec import BLOCK, TableSpec
from psfleet.testing.faults import Crashes
from psfleet.wire import segments
from psfleet.wire.frame import ALIGNMENT
from psfleet.wire.membership import read_install, read_position, write_install
from psfleet.wire.segments import Piece
from psfleet.wire.specs import read_mode, read_spec, write_mode, write_spec
from psfleet.wire.v1 import membership_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet_server.coordinator import Coordinator, Decision
from psfleet_server.decisions import decode_decision, encode_decision
from psfleet_server.log import Log, Part, chained, files_of, records
from psfleet_server.meetings import Meetings
from psfleet_server.parts import coordinator_becomes

__all__ = [
    "KINDS",
    "Keeper",
    "copied",
    "encode",
    "encode_change",
    "go_on_from",
    "open_log",
    "restored",
    "take",
]

_CREATE, _JOIN, _LEAVE, _PUSH, _WRITE, _CLOSE, _DECISION, _VIEW, _, _READY, _FILL, _CUT = range(
    1, 13
)
_SHRINK, _TICK, _EVICT, _CORE, _COPIED = range(13, 18)
KINDS = {
    _CREATE: "create",
    _JOIN: "join",
    _LEAVE: "leave",
    _PUSH: "push",
    _WRITE: "write",
    _CLOSE: "close",
    _DECISION: "decision",
    _VIEW: "view",
    _READY: "ready",
    _FILL: "fill",
    _CUT: "cut",
    _SHRINK: "shrink",
    _TICK: "tick",
    _EVICT: "evict",
    _CORE: "core",
    _COPIED: "copied",
}
"""Of records: what `psfleet log` calls them."""
_PLAIN: dict[int, Callable[..., Record]] = {_SHRINK: Shrink, _TICK: Tick}
_SEEN = "replica.view"  # the field of a copied core that says in which view the shard was
_LENGTH = struct.Struct("<Q")
SpecOf = Callable[[int], TableSpec]


def open_log(environment: Environment) -> Log | None:
    """The log that the environment asks for; None: nothing is kept."""
    if not environment.keeps_log:
        return None
    header = {
        "job": environment.job,
        "server": environment.rank,
        "servers": len(environment.servers),
        "workers": environment.workers,
        "block": BLOCK,
    }
    path = Path(environment.log_folder) / f"server.{environment.rank}.log"
    return Log(path, header, fsync=environment.durability == "log+fsync", crashes=Crashes.wanted())


class Keeper:
    """Keeps a shard and a coordinator in a log.

    Args:
        log: Is written and read.
        shard, coordinator: Are kept.
        snapshots: Where the job's snapshots lie, with which files of the log begin.
    """

    def __init__(
        self, log: Log, shard: Shard, coordinator: Coordinator | None, snapshots: Path | None = None
    ) -> None:
        self.log = log
        self._follows = False
        self._snapshots = snapshots
        self._shard = shard
        self._coordinator = coordinator

    def start(self, load_path: str | None = None, resume: str = "") -> int:
        """Become what the log says, then keep on writing it.

        Args:
            load_path: A checkpoint to begin with, if the server was never ready before.
            resume: A snapshot to go on from, likewise.

        Returns:
            How many records there were.

        Raises:
            LogError: The log is damaged, or says what cannot have been.
        """
        fresh = set(self.log.files) == {0} and not any(
            kind == _READY for kind, *_ in records(self.log.path)
        )
        count = self.log.forget() if fresh else self._replay()
        self._shard.journal = self._keep
        if self._coordinator is not None:
            self._coordinator.journal = self._keep_decision
        if fresh:
            if resume:
                core = go_on_from(resume, self._shard, self._coordinator)
                if core is not None:
                    self.log.append(_CORE, _encode_core(core))
            elif load_path is not None:
                load_shard(load_path, self._shard)
            self.log.append(_READY, [])
        self.log.settle(self.log.end)
        return count

    def follow(self, kind: int, body: bytes) -> None:
        """Keep a record of the primary, whose standby this process is; the first one begins the log.

        Raises:
            LogError: It could not be written.
        """
        if not self._follows:
            self._follows = True
            self.log.forget()
        self.log.append(kind, [body])
        if kind == _CUT:
            self.log.turn(json.loads(body)["number"])
        self.log.settle(self.log.end)

    def has_copy(self) -> None:
        """All that the primary has is in the log: a server may start from it."""
        self.log.append(_READY, [])
        self.log.settle(self.log.end)

    def lead(self) -> None:
        """Keep what this process does itself from now on, for it is the primary."""
        self._shard.journal = self._keep
        if self._coordinator is not None:
            self._coordinator.journal = self._keep_decision

    def shorten(self, number: int) -> None:
        """A snapshot is complete: what the log says before it is not needed any more."""
        self.log.shorten(number)

    def _replay(self) -> int:
        base = _begin(self.log.first, self._snapshots, self._shard, self._coordinator)

        def records_reached() -> Iterator[tuple[int, memoryview]]:
            for record in self.log.recover(base):
                self.log.reach("replay")
                yield record

        return _take_all(records_reached(), self.log.path, self._shard, self._coordinator)

    def _keep(self, record: Record) -> None:
        self.log.append(*encode(record))
        if isinstance(record, Cut):
            self.log.turn(record.number)

    def _keep_decision(self, decision: Decision) -> None:
        self.log.append(*encode_change(decision))


def restored(first: Path, snapshots: Path, shard: Shard, coordinator: Coordinator | None) -> int:
    """Become what a log says, without writing to it; how many records were taken.

    Args:
        first: The log's first file, even if that is gone.
        snapshots: Where the snapshots lie with which later files begin.

    Raises:
        LogError: The log is damaged, or says what cannot have been.
    """
    base = _begin(first, snapshots, shard, coordinator)
    found = ((kind, body) for kind, body, *_ in chained(first, base) if kind)
    return _take_all(found, first, shard, coordinator)


def _begin(
    first: Path, snapshots: Path | None, shard: Shard, coordinator: Coordinator | None
) -> int:
    """Become what the last complete snapshot holds; its number, 0: there is none.

    Raises:
        LogError: The log begins with a snapshot that is not there.
    """
    files, why = files_of(first), ""
    for number in sorted(files, reverse=True):
        if number == 0:
            return 0
        if snapshots is None:
            continue
        try:
            snapshot = Snapshot(snapshots / own_name(number))
        except (CheckpointError, OSError) as error:
            why = why or f": {error}"
            continue
        for event in snapshot.events(shard.index, shard.servers, own=True):
            shard.replay(event)
        _become(snapshot.core(shard.index), shard, coordinator)
        return number
    raise LogError(
        f"log {str(first)!r} goes on from snapshot {min(files, default=0)}, which cannot be had{why}; "
        "restore it, or start the job anew from a checkpoint"
    )


def _take_all(
    found: Iterable[tuple[int, memoryview]],
    path: Path,
    shard: Shard,
    coordinator: Coordinator | None,
) -> int:
    """Let the records take effect; how many there were."""
    count = 0
    for kind, body in found:
        count += 1
        try:
            take(kind, body, shard, coordinator)
        except Exception as error:  # there is no end to what a record can hold
            raise LogError(
                f"record {count} of log {str(path)!r} cannot be taken: "
                f"{error}; start the job anew from a checkpoint"
            ) from None
    return count


def go_on_from(path: str, shard: Shard, coordinator: Coordinator | None) -> Core | None:
    """Be one of a fleet that goes on from a snapshot, with any number of servers.

    Returns:
        What it is beside the tables; None: the snapshot is of another number of workers, whose rounds and
        lives mean nothing here, and only its tables count.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged; nothing was changed.
    """
    snapshot = Snapshot(path)
    core = snapshot.core(0)
    for event in snapshot.events(shard.index, shard.servers):
        if isinstance(event, Create):
            shard.create(event.spec, event.value)
        else:
            shard.fill(event)
    if len(core.fields["rounds"]["fields"]["seats"]["set"]) != shard.workers.count:
        return None
    _resume(core, shard, coordinator)
    return core


def _resume(core: Core, shard: Shard, coordinator: Coordinator | None) -> None:
    """Be what an earlier job was. All workers begin anew, and meet anew from their first meeting on."""
    _become(core, shard, coordinator)
    shard.rounds.go_back()
    if coordinator is not None:
        coordinator.meetings = Meetings()


def _become(core: Core, shard: Shard, coordinator: Coordinator | None) -> None:
    shard.become(core)
    if coordinator is not None:
        coordinator_becomes(coordinator, core)


def copied(shard: Shard, core: Core) -> tuple[int, list[Part]]:
    """The record that ends the copy of a shard: what it is beside its tables, in its view."""
    return _COPIED, _encode_core(Core({**core.fields, _SEEN: shard.workers.view}, core.arrays))


def _be_copy(core: Core, shard: Shard, coordinator: Coordinator | None) -> None:
    _become(core, shard, coordinator)
    shard.rounds.committed.clear()  # no record says these; workers commit again
    shard.cuts.give_up()
    shard.workers.view = shard.workers.promised = core.fields[_SEEN]


def encode(record: Record) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a shard."""
    match record:
        case Create(spec, value, maker):
            return _CREATE, [
                _bytes(
                    shard_pb2.CreateTableRequest(
                        spec=write_spec(spec),
                        value=value.tobytes(),
                        worker=maker or 0,
                        incarnation=int(maker is not None),
                    )
                )
            ]
        case Join():
            return _JOIN, [
                _bytes(
                    shard_pb2.JoinRequest(
                        worker=record.worker,
                        incarnation=record.incarnation,
                        mode=write_mode(record.mode),
                        staleness=record.staleness,
                        switch=record.switch,
                    )
                )
            ]
        case Leave(worker, incarnation, last, rest):
            return _LEAVE, [
                _bytes(
                    shard_pb2.LeaveRequest(
                        worker=worker, incarnation=incarnation, last=last, rest=rest
                    )
                )
            ]
        case Push():
            header = Header(
                worker=record.worker,
                incarnation=record.incarnation,
                sequence=record.sequence,
                samples=record.samples,
                loss=record.loss,
                clock=record.clock,
                leases=record.position[0] if record.position else 0,
                lease_samples=record.position[1] if record.position else 0,
            )
            return _PUSH, _framed(header, map(segments.write_gradient, record.gradients))
        case Write(states, worker, incarnation, number):
            header = Header(worker=worker, incarnation=incarnation, sequence=number)
            return _WRITE, _framed(header, map(segments.write_state, states))
        case Fill(table, clock, columns):
            said = {"table": table, "clock": [clock.step, clock.shrinks, clock.ticks]}
            return _FILL, _encode_arrays(said, columns)
        case Shrink():
            return _SHRINK, [_json(**dataclasses.asdict(record))]
        case Tick(seconds):
            return _TICK, [_json(seconds=seconds)]
        case Evict(table, ids):
            return _EVICT, [_LENGTH.pack(table), ids]
        case Cut(number):
            return _CUT, [_json(number=number)]
        case Install():
            return _VIEW, [_bytes(write_install(record))]
        case Close(number, members):
            return _CLOSE, [_json(round=number, members=members)]


def encode_change(decision: Decision) -> tuple[int, list[Part]]:
    """The kind and the body of a record of a coordinator."""
    return _DECISION, [*encode_decision(decision)]


def take(kind: int, body: memoryview, shard: Shard, coordinator: Coordinator | None) -> None:
    """Let a record take effect: of the log, or of the primary that a standby follows."""
    try:
        _take(kind, body, shard, coordinator)
    except UsageError:
        if kind not in (_PUSH, _CLOSE):
            raise
        # A table was full; the worker was told.


def _take(kind: int, body: memoryview, shard: Shard, coordinator: Coordinator | None) -> None:
    if kind == _CORE:
        _resume(_decode_core(body), shard, coordinator)
    elif kind == _COPIED:
        _be_copy(_decode_core(body), shard, coordinator)
    elif kind == _DECISION:
        if coordinator is None:
            raise LogError("it is of a coordinator, which this server is not")
        coordinator.replay(decode_decision(body))
    elif kind != _READY:
        shard.replay(_decode(kind, body, lambda key: shard.tables.find(key).spec))


def _decode(kind: int, body: memoryview, spec_of: SpecOf) -> Record:
    asked: Any
    if kind == _CREATE:
        asked = shard_pb2.CreateTableRequest.FromString(bytes(body))
        return Create(
            read_spec(asked.spec),
            np.frombuffer(asked.value, "<f4"),
            asked.worker if asked.incarnation else None,
        )
    if kind == _JOIN:
        asked = shard_pb2.JoinRequest.FromString(bytes(body))
        return Join(
            asked.worker, asked.incarnation, read_mode(asked.mode), asked.staleness, asked.switch
        )
    if kind == _LEAVE:
        asked = shard_pb2.LeaveRequest.FromString(bytes(body))
        return Leave(asked.worker, asked.incarnation, asked.last, asked.rest)
    if kind == _VIEW:
        return read_install(membership_pb2.InstallRequest.FromString(bytes(body)))
    if kind == _CLOSE:
        said = json.loads(bytes(body))
        return Close(said["round"], tuple(said["members"]))
    if kind == _CUT:
        return Cut(json.loads(bytes(body))["number"])
    if kind in _PLAIN:
        return _PLAIN[kind](**json.loads(bytes(body)))
    if kind == _EVICT:
        (key,) = _LENGTH.unpack_from(body)
        return Evict(key, np.frombuffer(body, "<i8", offset=_LENGTH.size))
    if kind == _FILL:
        return _decode_fill(body)
    if kind not in (_PUSH, _WRITE):
        raise LogError(f"its kind {kind} is unknown")
    head, payload = _split(body)
    header = Header.FromString(head)
    if kind == _WRITE:
        states = segments.read_states(header, payload, spec_of)
        return Write(tuple(states), header.worker, header.incarnation, header.sequence)
    gradients = segments.read_gradients(header, payload, spec_of)
    loss = header.loss if header.HasField("loss") else None
    return Push(
        header.worker,
        header.incarnation,
        header.sequence,
        gradients,
        header.samples,
        loss,
        header.clock,
        position=read_position(header),
    )


def _decode_fill(body: memoryview) -> Fill:
    said, columns = _decode_arrays(body)
    step, shrinks, ticks = said["clock"]
    clock = Clock(step, tuple(shrinks), tuple((t, s) for t, s in ticks))
    return Fill(said["table"], clock, columns)


def _encode_core(core: Core) -> list[Part]:
    arrays = {str(i): array for i, array in enumerate(core.arrays)}
    return _encode_arrays({"fields": core.fields}, arrays)


def _decode_core(body: memoryview) -> Core:
    said, arrays = _decode_arrays(body)
    return Core(said["fields"], list(arrays.values()))


def _encode_arrays(said: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Part]:
    """JSON with its length, then arrays, each filled up to a multiple of 8 bytes."""
    shapes = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    head = _json(**said, arrays=shapes)
    head += b" " * (-(_LENGTH.size + len(head)) % ALIGNMENT)
    return [_LENGTH.pack(len(head)), head, *map(_filled_up, arrays.values())]


def _decode_arrays(body: memoryview) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The opposite."""
    (length,) = _LENGTH.unpack_from(body)
    at = _LENGTH.size + length
    said = json.loads(bytes(body[_LENGTH.size : at]))
    arrays = {}
    for name, dtype, shape in said["arrays"]:
        arrays[name] = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
        at += arrays[name].nbytes
        at += -at % ALIGNMENT
    return said, arrays


def _filled_up(column: NDArray[Any]) -> bytes:
    """The column's bytes up to a multiple of 8."""
    content = column.tobytes()
    return content + bytes(-len(content) % ALIGNMENT)


def _framed(header: Header, pieces: Iterable[Piece]) -> list[Part]:
    """A header with its length, then the pieces, each filled up to a multiple of 8 bytes."""
    arrays: list[Part] = []
    for piece in pieces:
        header.segments.append(piece.segment)
        arrays += [*piece.arrays, bytes(-sum(a.nbytes for a in piece.arrays) % ALIGNMENT)]
    head = _bytes(header)
    return [_LENGTH.pack(len(head)), head, bytes(-len(head) % ALIGNMENT), *arrays]


def _split(body: memoryview) -> tuple[bytes, memoryview]:
    """The header and the payload of what `_framed` made."""
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    return bytes(body[_LENGTH.size : end]), body[end + -length % ALIGNMENT :]


def _json(**said: Any) -> bytes:
    return json.dumps(said).encode()


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
