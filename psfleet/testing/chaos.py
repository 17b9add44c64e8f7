"""What processes of a job under `psfleet-launch --chaos` do: faults of network and disk, and an audit.

The launcher says in PSFLEET_CHAOS what is wanted, and gives a folder. Each worker notes there what it
has pushed and what was acknowledged; with every push it adds 1 at a row of its own in a hidden table,
one row on every server; and each server that ends in order says what it holds. So whatever was
acknowledged can be counted by somebody who trusts no sequence number.
"""

import errno
import hashlib
import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.kernels.dedup import owned_by
from psfleet.rules import make_rule
from psfleet.runtime import Gradient
from psfleet.tables.spec import Initializer, TableSpec
from psfleet.testing.faults import Faults
from psfleet.wire import frame
from psfleet.wire.v1.frame_pb2 import OUTCOME_HELD

if TYPE_CHECKING:  # workers need not load it
    from psfleet.shard.shard import Shard

__all__ = [
    "Audit",
    "ChaosSettings",
    "FullDisk",
    "Meddler",
    "Pushed",
    "read_pushed",
    "say_what_is_held",
]

Send = Callable[[str, bytes, float], bytes]

_TABLE = "psfleet/audit/"
_LONGEST_DELAY = 0.05  # seconds
_SLOT = struct.Struct("<6Q")  # server, worker, life, first, last and acknowledged push
_ROWS_OF_LIFE = 1 << 16


@dataclass(frozen=True)
class ChaosSettings:
    """What PSFLEET_CHAOS says, as JSON.

    Attributes:
        folder: For notes; a file `full.<server>` in it means that the disk of that server is full.
        seed: Of the faults of the network.
        drop, duplicate, delay: Shares of a worker's calls whose answer is lost, that come with a repeat,
            that wait up to 50 ms.
    """

    folder: str
    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0

    @classmethod
    def wanted(cls, variables: Mapping[str, str] = os.environ) -> "ChaosSettings | None":
        """Those of the environment; None: this is no such job."""
        said = variables.get("PSFLEET_CHAOS", "")
        return cls(**json.loads(said)) if said else None

    def text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))


# -- workers ------------------------------------------------------------------------------------


@dataclass
class Pushed:
    """Pushes of one life to one server: numbers of the first, the last and the last acknowledged."""

    first: int = 0
    last: int = 0
    acknowledged: int = 0


class Meddler:
    """Faults on the way to the servers, and notes of what went there; a ClusterRuntime's `meddle`."""

    def __init__(self, settings: ChaosSettings, worker: int) -> None:
        self._settings = settings
        seed = settings.seed * 1009 + worker
        self._faults = Faults(seed, settings.drop, settings.duplicate)
        self._dice = random.Random(seed)
        self._notes = _Notes(Path(settings.folder))

    @classmethod
    def wanted(cls, worker: int) -> "Meddler | None":
        """One if the environment asks for it."""
        settings = ChaosSettings.wanted()
        return None if settings is None else cls(settings, worker)

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server, with faults and notes."""
        meddled = self._faults(server, send)

        def noted(method: str, request: bytes, seconds: float) -> bytes:
            if self._dice.random() < self._settings.delay:
                time.sleep(self._dice.random() * _LONGEST_DELAY)
            if not method.startswith("Shard/P") and method != "Shard/Exchange":
                return meddled(method, request, seconds)
            header = frame.decode(request)[0]
            pushes = method != "Shard/Pull"
            if pushes:
                self._notes.sent(server, header.worker, header.incarnation, header.sequence)
            answer = meddled(method, request, seconds)
            done = header.sequence if pushes else header.commit
            held = method == "Shard/Push" and frame.decode(answer)[0].outcome == OUTCOME_HELD
            if done and not held:  # a push that is held is acknowledged by the pull that commits it
                self._notes.acknowledged(server, header.worker, header.incarnation, done)
            return answer

        return noted


class _Notes:
    """A file that says at every moment what was pushed, also when the process is killed."""

    def __init__(self, folder: Path) -> None:
        name = f"pushed.{os.getpid()}.{os.urandom(4).hex()}"
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._slots: dict[tuple[int, int, int], tuple[int, Pushed]] = {}
        self._lock = threading.Lock()

    def sent(self, server: int, worker: int, life: int, number: int) -> None:
        """A push is about to leave."""
        with self._lock:
            slot, pushed = self._slot(server, worker, life)
            pushed.first = pushed.first or number
            pushed.last = max(pushed.last, number)
            self._write(slot, (server, worker, life), pushed)

    def acknowledged(self, server: int, worker: int, life: int, number: int) -> None:
        """A push is acknowledged."""
        with self._lock:
            slot, pushed = self._slot(server, worker, life)
            if pushed.first:
                pushed.acknowledged = max(pushed.acknowledged, number)
                self._write(slot, (server, worker, life), pushed)

    def _slot(self, *key: int) -> tuple[int, Pushed]:
        server, worker, life = key
        return self._slots.setdefault((server, worker, life), (len(self._slots), Pushed()))

    def _write(self, slot: int, key: tuple[int, int, int], pushed: Pushed) -> None:
        packed = _SLOT.pack(*key, pushed.first, pushed.last, pushed.acknowledged)
        os.pwrite(self._file, packed, slot * _SLOT.size)

    def __del__(self) -> None:
        os.close(self._file)


def read_pushed(folder: Path) -> dict[tuple[int, int, int], Pushed]:
    """What all workers have noted, by server, worker and life."""
    found: dict[tuple[int, int, int], Pushed] = {}
    for path in folder.glob("pushed.*"):
        whole = path.read_bytes()
        for server, worker, life, *pushed in _SLOT.iter_unpack(
            whole[: len(whole) // _SLOT.size * _SLOT.size]
        ):
            found[server, worker, life] = Pushed(*pushed)
    return found


class Audit:
    """The hidden table of one worker, into which each of its pushes adds 1 on every server."""

    def __init__(self, worker: int, life: int, servers: int) -> None:
        zero = Initializer("constant", 0.0)
        self.spec = TableSpec(
            f"{_TABLE}{worker}", "sparse", (1,), make_rule("sgd", {}), initializer=zero
        )
        self._ids = np.array([_row(life, server, servers) for server in range(servers)], np.int64)

    @classmethod
    def wanted(cls, worker: int, life: int, servers: int) -> "Audit | None":
        """One if the environment asks for it."""
        return None if ChaosSettings.wanted() is None else cls(worker, life, servers)

    def gradient(self, mode: str) -> Gradient:
        """What a push in this mode adds."""
        value = 1 if mode == "geo" else -1  # deltas are added, gradients subtracted
        values = np.full((len(self._ids), 1), value, np.float32)
        return Gradient(self.spec.key, values, self._ids, 1.0)


def _row(life: int, server: int, servers: int) -> int:
    """The row of a life that lies on the server."""
    ids = life * _ROWS_OF_LIFE + np.arange(_ROWS_OF_LIFE, dtype=np.int64)
    return int(ids[np.argmax(owned_by(ids, server, servers))])


# -- servers ------------------------------------------------------------------------------------


class FullDisk:
    """Says that the disk of one server is full while the launcher wants that."""

    def __init__(self, settings: ChaosSettings, server: int) -> None:
        self._mark = Path(settings.folder) / f"full.{server}"

    @classmethod
    def wanted(cls, server: int) -> "FullDisk | None":
        """One if the environment asks for it."""
        settings = ChaosSettings.wanted()
        return None if settings is None else cls(settings, server)

    def check(self) -> None:
        """Raise the OSError of a write to a disk that is full, if it is."""
        if self._mark.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def say_what_is_held(shard: "Shard") -> None:
    """Write what a server holds at its end, if this is a job under chaos.

    `held.<server>.json`: the mode; of each life (`audit`: worker, then life) how many pushes were
    counted; of each other table the SHA-256 of its updates, ids, weights and optimizer state.
    """
    settings = ChaosSettings.wanted()
    if settings is None:
        return
    audit: dict[str, dict[str, int]] = {}
    digests: dict[str, str] = {}
    tables: Any = shard.tables
    for table in tables.values():
        name = table.spec.name
        if name.startswith(_TABLE):
            ids = table.ids()
            counts = table.rows(ids).values[:, 0]
            audit[name.removeprefix(_TABLE)] = {
                str(row // _ROWS_OF_LIFE): round(float(count))
                for row, count in zip(ids.tolist(), counts.tolist(), strict=True)
            }
        else:
            digests[name] = _digest(table)
    said = {"mode": shard.mode, "audit": audit, "tables": digests}
    path = Path(settings.folder) / f"held.{shard.index}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(said))
    temporary.rename(path)


def _digest(table: Any) -> str:
    summed = hashlib.sha256(str(table.step).encode())
    if table.spec.kind == "dense":
        parts = table.state()
    else:
        ids = table.ids()
        parts = [ids, table.rows(ids).values]
    for part in parts:
        summed.update(np.ascontiguousarray(part).tobytes())
    return summed.hexdigest()
