"""Injection in a job's processes under `psfleet-launch --chaos`: network faults, and an audit.

With every push a worker adds 1 at a row of its own in a hidden table, one row on every server, and
each server that ends in order says what it holds. So whatever was acknowledged
(psfleet.core.runtime.chaos.audit)
can be counted by somebody who trusts no sequence number. When the number of servers changes, a worker goes
on in new rows; those of before move as rows do, with what they have counted.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.faults import MessageFaults
from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.id_routing import routes, virtual_shards
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import OWN, InitializerSpec, TableSpec
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.net import frame
from psfleet.core.net.v1.frame_pb2 import OUTCOME_HELD
from psfleet.core.net.v1.shard_pb2 import LeaveRequest
from psfleet.core.runtime.chaos.audit import HELD, AuditedRow, AuditFile, ChaosSettings

if TYPE_CHECKING:  # workers need not load it
    from psfleet.core.engine.shard.shard import Shard

Send = Callable[[str, bytes, float], bytes]

_TABLE = f"{OWN}audit/"
_LONGEST_DELAY = 0.05  # seconds
_ROWS = 1 << 16
_PERIODS = 1 << 16


# -- workers ------------------------------------------------------------------------------------


class FaultInjector:
    """Faults on the way to the servers, and notes of what went there; a ClusterRuntime's `meddle`.

    Attributes:
        audit: Counts what went there.
    """

    def __init__(self, settings: ChaosSettings, worker: int) -> None:
        self._settings = settings
        seed = settings.seed * 1009 + worker
        self._faults = MessageFaults(seed, settings.drop, settings.duplicate)
        self._dice = random.Random(seed)
        self.audit = PushAudit(worker)
        self._audited = AuditFile(Path(settings.folder))
        self._left = Path(settings.folder) / f"left.{worker}"

    @classmethod
    def wanted(cls, worker: int) -> "FaultInjector | None":
        """One if the environment asks for it."""
        settings = ChaosSettings.wanted()
        return None if settings is None else cls(settings, worker)

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server, with faults and notes."""
        faulty_send = self._faults(server, send)

        def noted(method: str, request: bytes, seconds: float) -> bytes:
            if self._dice.random() < self._settings.delay:
                time.sleep(self._dice.random() * _LONGEST_DELAY)
            if method == "Shard/Leave" and not LeaveRequest.FromString(request).rest:
                self._left.touch()  # a process that dies from now on has no fleet to come back to
            if not method.startswith("Shard/P") and method != "Shard/Exchange":
                return faulty_send(method, request, seconds)
            header = frame.decode(request)[0]
            row, pushes = self.audit.row(server), method != "Shard/Pull"
            if pushes:
                self._audited.sent(row, header.sequence)
            reply = faulty_send(method, request, seconds)
            sequence = header.sequence if pushes else header.commit
            is_held = method == "Shard/Push" and frame.decode(reply)[0].outcome == OUTCOME_HELD
            if sequence and not is_held:  # the pull that commits a held push acknowledges it
                self._audited.acknowledged(row, sequence)
            return reply

        return noted


class PushAudit:
    """The hidden table of one worker, into which each of its pushes adds 1 on every server."""

    def __init__(self, worker: int) -> None:
        zero = InitializerSpec("constant", 0.0)
        self.spec = TableSpec(
            count_table(worker), "sparse", (1,), make_rule("sgd", {}), initializer=zero
        )
        self._worker = worker
        self._incarnation = self._period = 0
        self._ids = count_rows(0, 0, 1)

    def begin(self, incarnation: int, servers: int) -> None:
        """Count the pushes of an incarnation."""
        self._incarnation, self._period = incarnation, 0
        self._ids = count_rows(incarnation, 0, servers)

    def move_to(self, servers: int) -> None:
        """Count in new rows: there is another number of servers, and no push is under way."""
        self._period += 1
        self._ids = count_rows(self._incarnation, self._period, servers)

    def row(self, server: int) -> AuditedRow:
        """The row in which pushes to the server are counted now."""
        return AuditedRow(server, self._worker, self._incarnation, int(self._ids[server]))

    def gradient(self, adds_deltas: bool) -> Gradient:
        """Return the gradient of a push in a mode that adds deltas, or in one that subtracts gradients."""
        value = 1 if adds_deltas else -1
        values = np.full((len(self._ids), 1), value, np.float32)
        return Gradient(self.spec.key, values, self._ids, 1.0)


def count_table(worker: int) -> str:
    """The name of a worker's hidden table."""
    return f"{_TABLE}{worker}"


def count_rows(incarnation: int, period: int, servers: int) -> NDArray[np.int64]:
    """A row on each server for an incarnation, after so many changes of their number."""
    ids = (incarnation * _PERIODS + period) * _ROWS + np.arange(_ROWS, dtype=np.int64)
    _, first = np.unique(owners(ids, servers), return_index=True)
    return np.ascontiguousarray(ids[first])


def owners(rows: NDArray[np.int64], servers: int) -> NDArray[np.uint32]:
    """The server of each row of the hidden tables."""
    owner: NDArray[np.uint32] = routes(servers)[virtual_shards(rows)]
    return owner


def counted_in(row: int) -> tuple[int, int]:
    """The incarnation that counts in this row, and after how many changes of the number of servers."""
    incarnation, period = divmod(row // _ROWS, _PERIODS)
    return incarnation, period


# -- servers ------------------------------------------------------------------------------------


def say_what_is_held(shard: "Shard") -> None:
    """Write what a server holds at its end, if this is a job under chaos.

    `held.<server>.json`: the mode; by worker the pushes that each row of the audit has counted; of each other
    table `step`, `rows` and `sum`: its updates, how many ids or weights are here, and a sum over hashes of
    each with its weight and optimizer state. Sums of all servers add up to the same, whatever their number.
    """
    settings = ChaosSettings.wanted()
    if settings is None:
        return
    audit = {
        str(worker): {str(row): count for row, count in rows.items()}
        for worker, rows in audited(shard).items()
    }
    tables = {
        table.spec.name: _summed(table, shard)
        for table in shard.tables.values()
        if not table.spec.name.startswith(_TABLE)
    }
    where = Path(settings.folder) / f"held.{shard.index}.json"
    HELD.write(where, mode=shard.mode, audit=audit, tables=tables)


def audited(shard: "Shard") -> dict[int, dict[int, int]]:
    """By worker: how many pushes each row of the audit has counted that is here."""
    counts: dict[int, dict[int, int]] = {}
    tables: Any = shard.tables
    for table in tables.values():
        if table.spec.name.startswith(_TABLE):
            ids = table.ids()
            values = table.rows(ids).values[:, 0].tolist()
            worker = int(table.spec.name.removeprefix(_TABLE))
            counts[worker] = {
                row: round(count) for row, count in zip(ids.tolist(), values, strict=True)
            }
    return counts


def _summed(table: Any, shard: "Shard") -> dict[str, int]:
    if table.spec.kind == "dense":
        low, high = dense_range(table.spec, shard.index, shard.servers)
        ids, columns = np.arange(low, high), table.state()
    else:
        ids = table.ids()
        columns = table.rows(ids).values.T
    hashes = hash_ids(ids)
    for column in columns:  # bits of float32
        words = np.ascontiguousarray(column).view(np.uint32)
        hashes = hash_ids((hashes + words + np.uint64(1)).view(np.int64))
    return {"step": table.step, "rows": len(ids), "sum": int(hashes.sum(dtype=np.uint64))}
