"""Injection in a job's processes under `psfleet-launch --chaos`: network faults, and an audit.

With every push a worker adds 1 at a row of its own in a hidden table, one row on every server, and
each server that ends in order says what it holds. So whatever was acknowledged (psfleet.chaos.audit)
can be counted by somebody who trusts no sequence number.
"""

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.chaos.audit import HELD, AuditFile, ChaosSettings
from psfleet.faults import MessageFaults
from psfleet.kernels.hashing import owned_by
from psfleet.rules import make_rule
from psfleet.runtime.interface import Gradient
from psfleet.schema.table import OWN, InitializerSpec, TableSpec
from psfleet.wire import frame
from psfleet.wire.v1.frame_pb2 import OUTCOME_HELD
from psfleet.wire.v1.shard_pb2 import LeaveRequest

if TYPE_CHECKING:  # workers need not load it
    from psfleet.shard.shard import Shard

Send = Callable[[str, bytes, float], bytes]

_TABLE = f"{OWN}audit/"
_LONGEST_DELAY = 0.05  # seconds
_ROWS_OF_INCARNATION = 1 << 16


# -- workers ------------------------------------------------------------------------------------


class FaultInjector:
    """Faults on the way to the servers, and notes of what went there; a ClusterRuntime's `meddle`."""

    def __init__(self, settings: ChaosSettings, worker: int) -> None:
        self._settings = settings
        seed = settings.seed * 1009 + worker
        self._faults = MessageFaults(seed, settings.drop, settings.duplicate)
        self._dice = random.Random(seed)
        self._audit = AuditFile(Path(settings.folder))
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
            pushes = method != "Shard/Pull"
            if pushes:
                self._audit.sent(server, header.worker, header.incarnation, header.sequence)
            reply = faulty_send(method, request, seconds)
            sequence = header.sequence if pushes else header.commit
            is_held = method == "Shard/Push" and frame.decode(reply)[0].outcome == OUTCOME_HELD
            if sequence and not is_held:  # the pull that commits a held push acknowledges it
                self._audit.acknowledged(server, header.worker, header.incarnation, sequence)
            return reply

        return noted


class PushAudit:
    """The hidden table of one worker, into which each of its pushes adds 1 on every server."""

    def __init__(self, worker: int, incarnation: int, servers: int) -> None:
        zero = InitializerSpec("constant", 0.0)
        self.spec = TableSpec(
            count_table(worker), "sparse", (1,), make_rule("sgd", {}), initializer=zero
        )
        self._ids = np.array(
            [count_row(incarnation, server, servers) for server in range(servers)], np.int64
        )

    @classmethod
    def wanted(cls, worker: int, incarnation: int, servers: int) -> "PushAudit | None":
        """One if the environment asks for it."""
        return None if ChaosSettings.wanted() is None else cls(worker, incarnation, servers)

    def gradient(self, adds_deltas: bool) -> Gradient:
        """Return the gradient of a push in a mode that adds deltas, or in one that subtracts gradients."""
        value = 1 if adds_deltas else -1
        values = np.full((len(self._ids), 1), value, np.float32)
        return Gradient(self.spec.key, values, self._ids, 1.0)


def count_table(worker: int) -> str:
    """The name of a worker's hidden table."""
    return f"{_TABLE}{worker}"


def count_row(incarnation: int, server: int, servers: int) -> int:
    """The row of an incarnation that lies on the server."""
    ids = incarnation * _ROWS_OF_INCARNATION + np.arange(_ROWS_OF_INCARNATION, dtype=np.int64)
    return int(ids[np.argmax(owned_by(ids, server, servers))])


# -- servers ------------------------------------------------------------------------------------


def say_what_is_held(shard: "Shard") -> None:
    """Write what a server holds at its end, if this is a job under chaos.

    `held.<server>.json`: the mode; of each incarnation (`audit`: worker, then incarnation) how many pushes
    were counted; of each other table the SHA-256 of its updates, ids, weights and optimizer state.
    """
    settings = ChaosSettings.wanted()
    if settings is None:
        return
    audit = {
        str(worker): {str(incarnation): counts[0] for incarnation, counts in incarnations.items()}
        for worker, incarnations in audited(shard).items()
    }
    digests = {
        table.spec.name: _digest(table)
        for table in shard.tables.values()
        if not table.spec.name.startswith(_TABLE)
    }
    where = Path(settings.folder) / f"held.{shard.index}.json"
    HELD.write(where, mode=shard.mode, audit=audit, tables=digests)


def audited(shard: "Shard") -> dict[int, dict[int, list[int]]]:
    """By worker and incarnation: how many pushes each of the servers has counted whose rows are here."""
    counts: dict[int, dict[int, list[int]]] = {}
    tables: Any = shard.tables
    for table in tables.values():
        if table.spec.name.startswith(_TABLE):
            ids = table.ids()
            incarnations = counts.setdefault(int(table.spec.name.removeprefix(_TABLE)), {})
            for row, count in zip(ids.tolist(), table.rows(ids).values[:, 0].tolist(), strict=True):
                incarnations.setdefault(row // _ROWS_OF_INCARNATION, []).append(round(count))
    return counts


def _digest(table: Any) -> str:
    checksum = hashlib.sha256(str(table.step).encode())
    if table.spec.kind == "dense":
        parts = table.state()
    else:
        ids = table.ids()
        parts = [ids, table.rows(ids).values]
    for part in parts:
        checksum.update(np.ascontiguousarray(part).tobytes())
    return checksum.hexdigest()
