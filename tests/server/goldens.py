"""Writes the golden files of a server's formats: its log, its saved state and the stream to a standby.

    python -m tests.server.goldens FOLDER       (default: the folder of the present version)

The folder must not exist: golden files of a version are written once, and every later psfleet reads them
or names the version that can. tests/server/test_goldens.py builds the same content and compares.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.consistency import SspMode, SyncMode
from psfleet.core.engine.round_plan import PlanEntry, RoundPlan
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import CapacityEntry, CountFilterEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard import events
from psfleet.core.engine.shard.membership_view import Incarnation, InstallView, SeatView
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.engine.shard.shard_state import ConsistencyState, PullGate, ShardState
from psfleet.core.engine.shard.workers import Workers
from psfleet.core.engine.tables.row_data import TableClock
from psfleet.core.net.body import write_record
from psfleet.core.net.membership_messages import agreed_numbers
from psfleet.core.net.server_state import write_state
from psfleet.core.net.v1.replica_pb2 import FollowReply, FollowRequest
from psfleet_server.coordinator import barriers, coordinator_messages, data_dispatch
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.membership import Membership, Seat
from psfleet_server.durability.log import VERSION, LogHeader, ServerLog
from psfleet_server.durability.log_shipping import joined
from psfleet_server.durability.records import (
    RecordKind,
    encode,
    encode_change,
    encode_state,
    server_state,
)

FOLDER = Path(__file__).parents[1] / "goldens" / "formats" / f"v{VERSION}" / "server"
DENSE = TableSpec("dense", "dense", (5,), make_rule("adam", {}))
SPARSE = TableSpec(
    "sparse",
    "sparse",
    (2,),
    make_rule("sgd", {}),
    seed=7,
    entry=CountFilterEntry(2, candidates=64) & CapacityEntry(rows=256),
)
SPECS = {spec.key: spec for spec in (DENSE, SPARSE)}
_IDS = np.array([-9, 3, 2**63 - 1], np.int64)
SSP = SspMode(staleness=4)
_ROWS: NDArray[np.float32] = np.arange(6, dtype=np.float32).reshape(3, 2)


def _push(worker: int, number: int) -> events.Push:
    elements = Gradient(DENSE.key, np.array([0.5, -0.25], np.float32), np.array([1, 4]), 0.1)
    rows = Gradient(SPARSE.key, _ROWS, _IDS, 0.01)
    return events.Push(
        worker, 11 + worker, number, (elements, rows), 32, 0.75, 3, None, (2, 5), "p"
    )


def records() -> list[events.Record]:
    """A record of each kind of a shard; most fields differ from what they are by default."""
    values = np.arange(5, dtype=np.float32)
    whole = Gradient(DENSE.key, values, None, 0.1)
    touched, none = np.array([1, 2, 3]), np.empty((3, 0), np.float32)
    dense = events.PartState(DENSE.key, 3, np.ones((3, 3), np.float32), start=2)
    sparse = events.PartState(SPARSE.key, 4, _ROWS, _IDS, touched, none)
    seats = {
        0: SeatView((Incarnation(11, 1, 4), Incarnation(13, 5)), 2, False),
        1: SeatView((Incarnation(12),), 0, True),
    }
    clock = TableClock(9, (3, 5), ((0.5, 4), (1.5, 8)))
    columns: dict[str, NDArray[Any]] = {"ids": _IDS, "rows": _ROWS, "touched": touched}
    return [
        events.CreateTable(DENSE, values, 1),
        events.CreateTable(SPARSE, np.empty(0, np.float32)),
        events.Join(1, 12, SSP, 2, 9),
        events.Leave(1, 12, 8, 3),
        _push(1, 6),
        events.Push(0, 11, 1, (whole,)),
        events.WriteState((dense,), 1, 12, 5),
        events.WriteState((sparse,)),
        events.CloseRound(6, (0, 1), {0: "a", 1: "b"}),
        InstallView(2**32 + 1, seats),
        events.RestorePart(SPARSE.key, clock, columns),
        events.RestorePart(DENSE.key, TableClock(), {}),
        events.MakeCut(7),
        events.Shrink(SPARSE.key, 0.5, 3, 1, 12, 6),
        events.Shrink(),
        events.Tick(2.5),
        events.Evict(SPARSE.key, _IDS[:1]),
    ]


def _order(number: int, sync: bool) -> data_dispatch.DatasetRequest:
    return data_dispatch.DatasetRequest(number, 60, 4, 3, -5, 2 * sync, 3, 2, 1, 1)


def _plan() -> RoundPlan:
    entries = (PlanEntry(1, (0, 1), ((0, 60), (60, 180))), PlanEntry(4, (1,), ((24, 180),)))
    return RoundPlan(60, 4, entries, frozenset({(2, 0), (3, 1)}))


def _dispatch() -> data_dispatch.DataDispatch:
    return data_dispatch.DataDispatch(
        [
            data_dispatch.DispatchedDataset(_order(1, True), _plan()),
            data_dispatch.DispatchedDataset(
                _order(2, False), None, [(16, 60), (60, 2**62)], False, True
            ),
            data_dispatch.DispatchedDataset(_order(3, False), None, [], True),
        ],
        {
            13: data_dispatch.Leases(2, [(2, ((0, 16),)), (2, ((16, 20), (40, 52)))], 1),
            12: data_dispatch.Leases(),
        },
        [data_dispatch.TornStep(1, 12, {0: 8, 1: 9})],
    )


def _members() -> Membership:
    seats = {
        0: Seat(2**63, {71, 70}, [Incarnation(11, 1, 4), Incarnation(13, 5)], False, 2, "half"),
        1: Seat(72, set(), [Incarnation(12)], True, 1),
        2: Seat(),
    }
    return Membership(seats, 13, 2**32 + 1, 4, True)


def _switch() -> barriers.ModeSwitch:
    return barriers.ModeSwitch(2, agreed_numbers(SSP), {0: 8, 1: 9}, {0: (2, 5), 1: (0, 0)})


def _mode_request() -> barriers.ModeRequest:
    return barriers.ModeRequest(3, "geo", (("k_steps", 20), ("staleness", 0)))


def decisions() -> list[coordinator_messages.Decision]:
    """A decision of each kind."""
    return [
        coordinator_messages.TermStarted(2),
        coordinator_messages.ViewDecided(_members(), _dispatch()),
        barriers.CollectiveCompleted(4, np.array([[1.5, -2.0]]), None, None),
        barriers.CollectiveCompleted(5, None, _mode_request()),
        barriers.CollectiveCompleted(6, np.array([3, 4, -3, -4, 9]), None, _switch()),
        coordinator_messages.WorkerLeft(1, 12),
        data_dispatch.DatasetBegun(_order(1, True), _plan()),
        data_dispatch.DatasetBegun(_order(2, False), None),
        data_dispatch.LeaseGranted(13, 2, ((16, 20), (40, 52)), 2),
        data_dispatch.DatasetEnded(3),
    ]


def shard_states() -> dict[str, ShardState]:
    """Shards in sync and in ssp mode; the first one holds two pushes, the last one has just begun."""
    workers = Workers(
        0, 0, {0: 13, 1: 12}, {0: 8, 1: 9}, {0: 0, 1: 5}, {1: (2, 5)}, {1: "p"}, {0: 13, 1: 12}
    )
    workers.base, workers.view = 8, 2**32 + 1
    rounds = Rounds({0, 1}, 5, {0: 5}, {}, {0: 5, 1: 6}, {1: 5}, {2}, {1: 3}, {1})
    rounds.held = {1: _push(1, 6), 0: events.Push(0, 13, 6, ())}
    sync = ConsistencyState(0, rounds, SyncMode(), 1)
    ssp = ConsistencyState(0, Rounds({0, 1}), SSP, gate=PullGate(at={0: 3, 1: 7}, leading_steps=4))
    return {
        "sync": ShardState(workers, sync, 7, {DENSE.key: 1, SPARSE.key: 0}),
        "ssp": ShardState(workers, ssp),
        "new": ShardState(),
    }


def coordinator() -> Coordinator:
    """One that has decided all that there is to decide."""
    found = Coordinator(2)
    found.term, found.members, found.dispatch = 2, _members(), _dispatch()
    results = {4: np.array([[1.5, -2.0]]), 6: np.array([3, 4, -3, -4, 9])}
    found.collectives = barriers.CollectiveState(6, results, {5: _mode_request()}, _switch())
    return found


def build(folder: Path) -> None:
    """Write all files into a new folder."""
    folder.mkdir(parents=True)
    header = LogHeader(job="golden", server=0, servers=2, workers=2, block=4096)
    log = ServerLog(folder / "server.0.log", header)
    log.forget()
    *earlier, last = records()
    for record in earlier:
        log.append(*encode(record))
    log.turn(7, *encode(last))
    for decision in decisions():
        log.append(*encode_change(decision))
    log.append(RecordKind.READY, [])
    states = shard_states()
    log.append(*encode_state(RecordKind.CORE, server_state(states["ssp"], None)))
    log.append(*encode_state(RecordKind.COPIED, server_state(states["sync"], coordinator())))
    log.close()
    for name, state in states.items():
        decided = coordinator() if name == "sync" else None
        content = joined(write_state(server_state(state, decided)))
        (folder / f"state.{name}").write_bytes(content)
    request = FollowRequest(server=1, attach=3, taken=8, term=2, version=VERSION)
    (folder / "stream.request").write_bytes(request.SerializeToString())
    kind, parts = encode(events.Tick(2.5))
    [record_message] = write_record(9, kind, joined(parts))
    (folder / "stream.record").write_bytes(record_message)
    said = FollowReply(required=True, over=True, complete=7)
    (folder / "stream.said").write_bytes(said.SerializeToString())


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
