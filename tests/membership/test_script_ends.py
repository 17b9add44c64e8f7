"""A worker gives its seat back when its script ends well, and keeps it when the script fails."""

import os
import sys
from pathlib import Path

import pytest

from psfleet.core.base.settings.declaration import to_variables
from psfleet.core.base.settings.declared_settings import FleetSettings, JobSettings, ProcessSettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.programs import ended

SCRIPT = """
import sys
import numpy as np
import psfleet
from psfleet.optimizer import SGD

ids, ends = np.arange(3), sys.argv[1]
try:
    with psfleet.connect(mode="async") as ps:
        table = ps.sparse_table("t", dim=2, optimizer=SGD(1.0))
        before = table.pull(ids)
        table.push(ids, np.ones((3, 2), np.float32))
        if ends == "exits with 3":
            sys.exit(3)
        if ends == "exits":
            sys.exit()
        if ends == "goes on":
            raise KeyError("somebody catches this")
        table.push(ids, np.ones((3, 2), np.float32)).wait()
        print(ps.stats()[0]["pushes"])
except KeyError:
    pass
"""


def run(fleet: LocalFleet, folder: Path, ends: str) -> tuple[int, str]:
    """Exit code and output of worker 0 whose script ends in this way."""
    (folder / "train.py").write_text(SCRIPT)
    groups = (FleetSettings, JobSettings, ProcessSettings)
    variables = {**os.environ, **to_variables(fleet.environment(0), *groups)}
    process = ended([sys.executable, folder / "train.py", ends], env=variables)
    return process.returncode, process.stdout


def test_a_script_that_fails_keeps_its_seat(tmp_path: Path) -> None:
    """What failed in the block has been pushed; the next process takes the seat, and its end is the job's."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        assert run(fleet, tmp_path, "exits with 3") == (3, "")
        assert fleet.processes[0].poll() is None
        assert run(fleet, tmp_path, "well") == (0, "3\n")
        assert fleet.wait(60) == [0]


@pytest.mark.parametrize("ends", ["exits", "goes on"])
def test_a_script_that_ends_well_leaves(ends: str, tmp_path: Path) -> None:
    """So does one that catches what has failed in the block; the servers end with the last worker."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        assert run(fleet, tmp_path, ends)[0] == 0
        assert fleet.wait(60) == [0]
