"""Settings of `psfleet-launch --chaos` for workers and servers, and the files in which workers record their
pushes.

The launcher sets the variable PSFLEET_CHAOS: the faults to inject, and a folder. Each worker writes a file
in this folder with its first, last and last acknowledged push to each server. After the job the launcher
compares the files with the counts of the servers (`injection.py`). This module imports neither NumPy nor
psfleet.core.engine, because the launcher imports it.
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
    """Settings of a job under chaos. The environment variable PSFLEET_CHAOS has them as JSON.

    Attributes:
        folder: Folder for the audit files. While it has a file `full.<server>`, that server behaves as if
            its disk were full.
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
    """Row of the hidden audit table. It counts the pushes of one worker process (incarnation) to one server.

    Attributes:
        row: Id of the row. When the number of servers changes, later pushes are counted in another row, and
            this row moves to its new server with its count.
    """

    server: int
    worker: int
    incarnation: int
    row: int


@dataclass
class AuditedPushes:
    """Sequence numbers of the first, the last and the last acknowledged push that a row counts."""

    first: int = 0
    last: int = 0
    acknowledged: int = 0


class AuditFile:
    """File in which a worker records its pushes. It stays correct if the process is killed at any moment.

    The file is a header and an array of records of fixed size, one for each row. Each change overwrites one
    record with a single `pwrite`. The kernel keeps written data even if the process dies right after the
    call.
    """

    def __init__(self, folder: Path) -> None:
        name = f"pushed.{os.getpid()}.{os.urandom(4).hex()}"
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._file, _HEADER, 0)
        self._slots: dict[AuditedRow, tuple[int, AuditedPushes]] = {}
        self._lock = threading.Lock()

    def sent(self, row: AuditedRow, number: int) -> None:
        """Record a push that is about to be sent. Call it before sending, because the process may die
        after."""
        with self._lock:
            slot, pushes = self._slot(row)
            pushes.first = pushes.first or number
            pushes.last = max(pushes.last, number)
            self._write(slot, row, pushes)

    def acknowledged(self, row: AuditedRow, number: int) -> None:
        """Record that a server has acknowledged a push. Takes the arguments of `sent`."""
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
    """Return the recorded pushes of all workers, from the files in the folder."""
    pushes: dict[AuditedRow, AuditedPushes] = {}
    for path in folder.glob("pushed.*"):
        whole = path.read_bytes()
        if not whole.startswith(_HEADER):
            raise FrameError(f"{str(path)!r} holds no pushes of version 2 of psfleet's notes")
        slots = memoryview(whole)[_SLOT.size : len(whole) // _SLOT.size * _SLOT.size]
        for server, worker, incarnation, row, *numbers in _SLOT.iter_unpack(slots):
            pushes[AuditedRow(server, worker, incarnation, row)] = AuditedPushes(*numbers)
    return pushes
