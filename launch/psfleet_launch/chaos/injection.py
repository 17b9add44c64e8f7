"""Faults and audit inside the workers and servers of a job under `psfleet-launch --chaos`.

Workers and servers load this module with `psfleet.core.base.crash_points.chaos`, only in jobs with --chaos.

The audit checks that each acknowledged push was applied exactly once. It does not rely on the sequence
numbers with which psfleet itself detects repeated pushes. Each worker has a hidden table with one row on
each server. Every push also adds 1 to these rows. A server that ends regularly writes its counts to a file,
and the launcher compares the counts with the workers' records (`audit.py`). When the number of servers
changes, workers continue with new rows, and the old rows move to their new servers with their counts.
"""

import errno
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.crash_points import Send
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.id_routing import routes, virtual_shards
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import OWN, InitializerSpec, TableSpec
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.net import frame
from psfleet.core.net.v1.frame_pb2 import OUTCOME_HELD
from psfleet.core.net.v1.shard_pb2 import LeaveRequest
from psfleet_launch.chaos.audit import HELD, AuditedRow, AuditFile, ChaosSettings
from psfleet_launch.chaos.message_faults import MessageFaults

if TYPE_CHECKING:  # workers need not load it
    from psfleet.core.engine.shard.shard import Shard

_TABLE = f"{OWN}audit/"
_LONGEST_DELAY = 0.05  # seconds
_ROWS = 1 << 16
_PERIODS = 1 << 16


class FaultInjector:
    """Wraps a worker's calls to the servers: injects faults and records pushes.

    Args:
        worker: Rank of the worker. The faults depend on the rank and on the job's seed.

    Attributes:
        audit: Hidden table of this worker.
    """

    def __init__(self, worker: int) -> None:
        self._settings = settings = _settings()
        seed = settings.seed * 1009 + worker
        self._faults = MessageFaults(seed, settings.drop, settings.duplicate)
        self._dice = random.Random(seed)
        self.audit = PushAudit(worker)
        self._audited = AuditFile(Path(settings.folder))
        self._left = Path(settings.folder) / f"left.{worker}"

    def __call__(self, server: int, send: Send) -> Send:
        """Return a function that calls one server like `send`, but injects faults and records pushes."""
        faulty_send = self._faults(server, send)

        def noted(method: str, request: bytes, seconds: float) -> bytes:
            if self._dice.random() < self._settings.delay:
                time.sleep(self._dice.random() * _LONGEST_DELAY)
            if method == "Shard/Leave" and not LeaveRequest.FromString(request).rest:
                self._left.touch()  # a worker that has left is not restarted
            if not method.startswith("Shard/P") and method != "Shard/Exchange":
                return faulty_send(method, request, seconds)
            header = frame.decode(request)[0]
            row, pushes = self.audit.row(server), method != "Shard/Pull"
            if pushes:
                self._audited.sent(row, header.sequence)
            reply = faulty_send(method, request, seconds)
            sequence = header.sequence if pushes else header.commit
            is_held = method == "Shard/Push" and frame.decode(reply)[0].outcome == OUTCOME_HELD
            if sequence and not is_held:  # a later pull commits and acknowledges a held push
                self._audited.acknowledged(row, sequence)
            return reply

        return noted


class DiskFullFault:
    """Simulated full disk of a server. The disk is full while the file `full.<server>` exists."""

    def __init__(self, server: int) -> None:
        self._mark = Path(_settings().folder) / f"full.{server}"

    def check(self) -> None:
        """Raise the OSError of a write to a full disk, if the file exists."""
        if self._mark.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _settings() -> ChaosSettings:
    settings = ChaosSettings.from_environment()
    assert settings is not None, (
        "psfleet.core.base.crash_points.chaos loads this module only if they are set"
    )
    return settings


class PushAudit:
    """Hidden table of one worker. Each push adds 1 to one of its rows on every server."""

    def __init__(self, worker: int) -> None:
        zero = InitializerSpec("constant", 0.0)
        self.spec = TableSpec(
            count_table(worker), "sparse", (1,), make_rule("sgd", {}), initializer=zero
        )
        self._worker = worker
        self._incarnation = self._period = 0
        self._ids = count_rows(0, 0, 1)

    def begin_incarnation(self, incarnation: int, servers: int) -> None:
        """Start to count in new rows, for a new incarnation (process) of the worker."""
        self._incarnation, self._period = incarnation, 0
        self._ids = count_rows(incarnation, 0, servers)

    def move_to(self, servers: int) -> None:
        """Start to count in new rows, after a change of the number of servers. No push may be outstanding."""
        self._period += 1
        self._ids = count_rows(self._incarnation, self._period, servers)

    def row(self, server: int) -> AuditedRow:
        """Return the row in which pushes to a server are counted now."""
        return AuditedRow(server, self._worker, self._incarnation, int(self._ids[server]))

    def gradient(self, adds_deltas: bool) -> Gradient:
        """Return the gradient that adds 1 to each row.

        Args:
            adds_deltas: True in a mode whose servers add pushed values. Otherwise servers subtract them, as
                SGD with rate 1 does.
        """
        value = 1 if adds_deltas else -1
        values = np.full((len(self._ids), 1), value, np.float32)
        return Gradient(self.spec.key, values, self._ids, 1.0)


def count_table(worker: int) -> str:
    """Return the name of a worker's hidden table."""
    return f"{_TABLE}{worker}"


def count_rows(incarnation: int, period: int, servers: int) -> NDArray[np.int64]:
    """Return an id of a row on each server, int64 [servers], for the counts of an incarnation.

    Ids have the form (incarnation * 2^16 + period) * 2^16 + i. The hash of an id determines its server. For
    each server the result has the first of the ids with i = 0, 1, 2, ... that belongs to the server.

    Args:
        period: Number of times that the number of servers has changed during the incarnation.
    """
    ids = (incarnation * _PERIODS + period) * _ROWS + np.arange(_ROWS, dtype=np.int64)
    _, first = np.unique(owners(ids, servers), return_index=True)
    return np.ascontiguousarray(ids[first])


def owners(rows: NDArray[np.int64], servers: int) -> NDArray[np.uint32]:
    """Return the number of the server that has each row, given ids of rows."""
    owner: NDArray[np.uint32] = routes(servers)[virtual_shards(rows)]
    return owner


def counted_in(row: int) -> tuple[int, int]:
    """Return the incarnation and the period of a row's id, as in `count_rows`."""
    incarnation, period = divmod(row // _ROWS, _PERIODS)
    return incarnation, period


def write_held_tables(shard: "Shard") -> None:
    """Write the final state of a server to `held.<server>.json`, for the checks after the job.

    The file has the mode, for each worker the counts of the audit's rows, and for each other table

    - `step`: number of its updates,
    - `rows`: number of ids or weights on this server,
    - `sum`: sum over the rows of a hash of the id, the weights and the optimizer state, modulo 2^64.

    The total of `sum` over all servers does not depend on the distribution of the rows.
    """
    audit = {
        str(worker): {str(row): count for row, count in rows.items()}
        for worker, rows in audited(shard).items()
    }
    tables = {
        table.spec.name: _summed(table, shard)
        for table in shard.tables.values()
        if not table.spec.name.startswith(_TABLE)
    }
    path = Path(_settings().folder) / f"held.{shard.index}.json"
    HELD.write(path, mode=shard.mode, audit=audit, tables=tables)


def audited(shard: "Shard") -> dict[int, dict[int, int]]:
    """Return the audit's counts on this server: for each worker, the number of pushes by row."""
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
