"""Program of a follower under `psfleet-launch --chaos`: checks its copy of the tables after each update.

A follower is a process that copies the tables of a running job, as a serving process does. Each update
brings it to a *cut*, a common point in the pushes of all workers. The launcher starts this program beside
the job. It writes the result of each check as a line to a file, and report.py reads the files.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from psfleet.core.base.errors import PsfleetError, ServerUnavailable
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.schema.table import OWN, TableSpec
from psfleet.serving.follower import Follower
from psfleet.serving.follower_state_machine import AskChanges, TakeCut
from psfleet_launch.chaos.audit import AuditedPushes, AuditedRow, read_pushed
from psfleet_launch.chaos.injection import count_table

_RETRY = 0.1  # seconds until the next attempt if the job does not answer


class AuditedFollower(Follower):
    """Follower that checks that each cut contains all pushes that were acknowledged before.

    The follower reads the workers' audit files, then requests an update, then compares the files with the
    counts in the updated audit tables. (Pushes that are acknowledged in between may be in the cut or not.)
    While the folder has a file `cut.<number>`, all calls of the follower fail, as if its network were cut.

    Args:
        folder: Folder of the audit files. Results are written there too, a line for each cut, to the file
            `cuts.<number>.<pid>`.
    """

    def __init__(self, job: str, folder: Path, number: int) -> None:
        self._folder, self._is_cut_off = folder, folder / f"cut.{number}"
        self._lines = folder / f"cuts.{number}.{os.getpid()}"
        self._pushed: Mapping[AuditedRow, AuditedPushes] = {}
        self._returns = self._number = 0
        super().__init__(job)

    @override
    def perform(self, wanted: Any) -> Any:
        if isinstance(wanted, TakeCut):
            super().perform(wanted)
            self._note()
            return None
        self._check_network()
        if isinstance(wanted, AskChanges):
            self._pushed, self._returns = read_pushed(self._folder), self._count_returns()
        outcome = super().perform(wanted)
        self._check_network()
        return outcome

    def _check_network(self) -> None:
        if self._is_cut_off.exists():
            raise ServerUnavailable("the network of this follower is cut")

    def _count_returns(self) -> int:
        """Return how often the job has gone back to a snapshot. Going back undoes acknowledged pushes."""
        return len(list(self._folder.glob("generation-*")))

    def _note(self) -> None:
        cut, goes_on = self.position, self._returns == self._count_returns()
        wrong = [text for key in self._pushed if (text := self._missing(key))] if goes_on else []
        if goes_on and cut.number < self._number:
            wrong.append(f"cut {cut.number} comes after cut {self._number}")
        self._number = cut.number
        tables = self._digests() if cut.round is not None else {}
        line = {"round": cut.round, "number": cut.number, "tables": tables, "wrong": wrong}
        with self._lines.open("a") as lines:
            lines.write(f"{json.dumps(line)}\n")

    def _missing(self, key: AuditedRow) -> str:
        """Describe the acknowledged pushes of an incarnation that the cut lacks, or return "" if it has
        all."""
        pushes, table = self._pushed[key], count_table(key.worker)
        needed = pushes.acknowledged - pushes.first + 1 if pushes.acknowledged else 0
        count = 0
        if table in self.specs():
            count = round(float(self.look_up(table, np.array([key.row]))[0, 0]))
        if count >= needed:
            return ""
        return (
            f"cut {self.cut} has {count} of {needed} acknowledged pushes of incarnation {key.incarnation} of "
            f"worker {key.worker} to server {key.server}"
        )

    def _digests(self) -> dict[str, str]:
        """Return the SHA-256 of each table's weights. Rows that still have their initial values are left
        out."""
        specs = self.specs().values()
        return {spec.name: self._digest(spec) for spec in specs if not spec.name.startswith(OWN)}

    def _digest(self, spec: TableSpec) -> str:
        rows = self._following.copy.rows
        if spec.kind == "dense":
            return hashlib.sha256(rows.dense(spec.name).tobytes()).hexdigest()
        ids, values, _ = rows.sparse[spec.name].content()
        first = initial_rows(ids, spec.dim, spec.initializer, spec.seed, spec.name)
        is_trained = (values.view(np.uint32) != first.view(np.uint32)).any(axis=1)
        return hashlib.sha256(ids[is_trained].tobytes() + values[is_trained].tobytes()).hexdigest()


def main(job: str, folder: str, number: str) -> None:
    """Follow the job until this process is killed."""
    while True:
        try:
            with AuditedFollower(job, Path(folder), int(number)):
                while True:
                    time.sleep(_RETRY)
        except PsfleetError:  # the job has not started yet, or does not answer
            time.sleep(_RETRY)


if __name__ == "__main__":
    main(*sys.argv[1:])
