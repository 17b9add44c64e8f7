"""Records exchanged under chaos: settings from the launcher, and notes of the processes for it.

PSFLEET_CHAOS says what is wanted and names a folder. There each worker notes what it has pushed and what
was acknowledged. Loads nothing: the launcher imports it.
"""

import errno
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
    """Settings of PSFLEET_CHAOS, as JSON.

    Attributes:
        folder: For notes; a file `full.<server>` in it means that the disk of that server is full.
        seed: Seed of the faults of the network.
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
        settings = from_variable(FaultSettings, "chaos", variables)
        if not settings:
            return None
        number = float | int
        kinds = {"drop": number, "duplicate": number, "delay": number}
        with reading("PSFLEET_CHAOS", FrameError):
            return cls(*exact(json.loads(settings), "chaos", folder=str, seed=int, **kinds))

    def text(self) -> str:
        """For the environment."""
        return json.dumps(
            {
                "folder": self.folder,
                "seed": self.seed,
                "drop": self.drop,
                "duplicate": self.duplicate,
                "delay": self.delay,
            }
        )


class DiskFullFault:
    """Says that the disk of one server is full while the launcher wants that."""

    def __init__(self, settings: ChaosSettings, server: int) -> None:
        self._mark = Path(settings.folder) / f"full.{server}"

    @classmethod
    def wanted(cls, server: int) -> "DiskFullFault | None":
        """One if the environment asks for it."""
        settings = ChaosSettings.wanted()
        return None if settings is None else cls(settings, server)

    def check(self) -> None:
        """Raise the OSError of a write to a disk that is full, if it is."""
        if self._mark.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class AuditedRow(NamedTuple):
    """A row of the audit, in which the pushes of one incarnation to one server are counted.

    Attributes:
        row: Its id. With another number of servers pushes are counted in other rows; this one goes where it
            belongs, with what it has counted.
    """

    server: int
    worker: int
    incarnation: int
    row: int


@dataclass
class AuditedPushes:
    """Pushes that one row counts: numbers of the first, the last and the last acknowledged."""

    first: int = 0
    last: int = 0
    acknowledged: int = 0


class AuditFile:
    """A file that says at every moment what was pushed, also when the process is killed."""

    def __init__(self, folder: Path) -> None:
        name = f"pushed.{os.getpid()}.{os.urandom(4).hex()}"
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._file, _HEADER, 0)
        self._slots: dict[AuditedRow, tuple[int, AuditedPushes]] = {}
        self._lock = threading.Lock()

    def sent(self, row: AuditedRow, number: int) -> None:
        """A push is about to leave."""
        with self._lock:
            slot, pushes = self._slot(row)
            pushes.first = pushes.first or number
            pushes.last = max(pushes.last, number)
            self._write(slot, row, pushes)

    def acknowledged(self, row: AuditedRow, number: int) -> None:
        """A push is acknowledged."""
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
    """Read the notes of all workers."""
    pushes: dict[AuditedRow, AuditedPushes] = {}
    for path in folder.glob("pushed.*"):
        whole = path.read_bytes()
        if not whole.startswith(_HEADER):
            raise FrameError(f"{str(path)!r} holds no pushes of version 2 of psfleet's notes")
        slots = memoryview(whole)[_SLOT.size : len(whole) // _SLOT.size * _SLOT.size]
        for server, worker, incarnation, row, *numbers in _SLOT.iter_unpack(slots):
            pushes[AuditedRow(server, worker, incarnation, row)] = AuditedPushes(*numbers)
    return pushes
