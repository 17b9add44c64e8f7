"""Settings and files of `psfleet-launch --chaos`: what the launcher asks for, and what workers have pushed.

The launcher sets PSFLEET_CHAOS, which holds the faults to make and a folder. Each worker keeps a file in it
with the first, last and last acknowledged push to each server. The launcher compares these files with what
the servers have counted (`injection.py`). The launcher imports this module, so it loads neither NumPy nor the
engine.
"""

import json
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from psfleet.core.base.errors import FrameError
from psfleet.core.base.json_documents import Format, exact, reading
from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import FaultSettings

_SLOT = struct.Struct("<7Q")  # AuditedRow; first, last and acknowledged push
HELD = Format("held tables", (2,))
_HEADER = b"psfleet pushes 2".ljust(_SLOT.size, b"\0")


@dataclass(frozen=True)
class ChaosSettings:
    """Settings of a job under chaos, as PSFLEET_CHAOS holds them in JSON.

    Attributes:
        folder: Folder of the audit's files. While it has a file `full.<server>`, that server's disk counts as
            full.
        seed: Seed of the network faults.
        drop: Share of a worker's calls whose reply is lost (0 to 1).
        duplicate: Share of the calls that are sent twice.
        delay: Share of the calls that wait up to 50 ms before they are sent.
    """

    folder: str
    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> "ChaosSettings | None":
        """Return the chaos settings from the environment, or None if the job runs without chaos."""
        settings = from_variable(FaultSettings, "chaos", variables)
        if not settings:
            return None
        number = float | int
        kinds = {"drop": number, "duplicate": number, "delay": number}
        with reading("PSFLEET_CHAOS", FrameError):
            return cls(*exact(json.loads(settings), "chaos", folder=str, seed=int, **kinds))

    def text(self) -> str:
        """Return the settings as JSON, for PSFLEET_CHAOS."""
        return json.dumps(
            {
                "folder": self.folder,
                "seed": self.seed,
                "drop": self.drop,
                "duplicate": self.duplicate,
                "delay": self.delay,
            }
        )


class AuditedRow(NamedTuple):
    """Row of the audit's hidden table that counts the pushes of one incarnation to one server.

    Attributes:
        row: Id of the row. When the number of servers changes, later pushes are counted in other rows; this
            row moves to its new server with its count.
    """

    server: int
    worker: int
    incarnation: int
    row: int


@dataclass
class AuditedPushes:
    """Sequences of the first, the last and the last acknowledged push that one row counts."""

    first: int = 0
    last: int = 0
    acknowledged: int = 0


class AuditFile:
    """A worker's record of its pushes, which stays correct when the process is killed at any moment.

    The file is an array of fixed records, a header and one per row. Each change overwrites one record with a
    single `pwrite`, which the kernel keeps even if the process dies right after it.
    """

    def __init__(self, folder: Path) -> None:
        name = f"pushed.{os.getpid()}.{os.urandom(4).hex()}"
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._file, _HEADER, 0)
        self._slots: dict[AuditedRow, tuple[int, AuditedPushes]] = {}
        self._lock = threading.Lock()

    def sent(self, row: AuditedRow, number: int) -> None:
        """Record a push before it is sent. Afterwards would be too late: the process may die between."""
        with self._lock:
            slot, pushes = self._slot(row)
            pushes.first = pushes.first or number
            pushes.last = max(pushes.last, number)
            self._write(slot, row, pushes)

    def acknowledged(self, row: AuditedRow, number: int) -> None:
        """Record that a push is acknowledged."""
        with self._lock:
            slot, pushes = self._slot(row)
            if pushes.first:
                pushes.acknowledged = max(pushes.acknowledged, number)
                self._write(slot, row, pushes)

    def _slot(self, row: AuditedRow) -> tuple[int, AuditedPushes]:
        return self._slots.setdefault(row, (len(self._slots), AuditedPushes()))

    def _write(self, slot: int, key: AuditedRow, pushes: AuditedPushes) -> None:
        record = _SLOT.pack(*key, pushes.first, pushes.last, pushes.acknowledged)
        os.pwrite(self._file, record, (1 + slot) * _SLOT.size)

    def __del__(self) -> None:
        os.close(self._file)


def read_pushed(folder: Path) -> dict[AuditedRow, AuditedPushes]:
    """Read the files of all workers in the folder."""
    pushes: dict[AuditedRow, AuditedPushes] = {}
    for path in folder.glob("pushed.*"):
        whole = path.read_bytes()
        if not whole.startswith(_HEADER):
            raise FrameError(f"{str(path)!r} holds no pushes of version 2 of psfleet's notes")
        slots = memoryview(whole)[_SLOT.size : len(whole) // _SLOT.size * _SLOT.size]
        for server, worker, incarnation, row, *numbers in _SLOT.iter_unpack(slots):
            pushes[AuditedRow(server, worker, incarnation, row)] = AuditedPushes(*numbers)
    return pushes
