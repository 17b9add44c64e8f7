"""The report of a job under chaos counts pushes and compares tables wherever rows have moved to."""

from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.scaling_files import Scaled, write_scale, write_scaled
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.audit import HELD, AuditedRow, AuditFile, ChaosSettings
from psfleet_launch.chaos.injection import count_rows, counted_in, owners
from psfleet_launch.chaos.report import FinishedJob, Leftovers, findings

DENSE = TableSpec("dense", "dense", (90_001,), make_rule("adam", {}))
ROWS = TableSpec(
    "rows", "sparse", (3,), make_rule("adam", {}), initializer=InitializerSpec("uniform", -1, 1)
)
BEFORE = Leftovers(frozenset(map(str, range(4096))), frozenset())  # what is open is not its


def job(folder: Path, servers: int, moves: int = 0) -> FinishedJob:
    """A job whose notes are in a folder, and that ended with so many servers."""
    folder.mkdir(exist_ok=True)
    write_scale(folder, servers)
    write_scaled(folder, Scaled(1, tuple(f"unix:/{server}" for server in range(servers)), 1))
    return FinishedJob(
        0, [], folder, folder, str(folder / "snapshots"), folder / "gone", BEFORE, 2, moves
    )


def verdicts(run: FinishedJob, plain: FinishedJob | None = None) -> dict[str, bool | None]:
    """By the number of the promise."""
    return {result.promise[0]: result.kept for result in findings(run, plain)}


def test_rows_of_the_audit_lie_on_all_servers() -> None:
    """There is one on each, and none is of two incarnations or of two numbers of servers."""
    seen: set[int] = set()
    for incarnation, period, servers in ((1, 0, 3), (1, 1, 5), (2, 0, 3), (2, 1, 1)):
        rows = count_rows(incarnation, period, servers)
        assert owners(rows, servers).tolist() == list(range(servers))
        assert {counted_in(row) for row in rows.tolist()} == {(incarnation, period)}
        assert seen.isdisjoint(rows.tolist())
        seen |= {*rows.tolist()}


def pushed(folder: Path) -> tuple[list[int], FinishedJob]:
    """The rows of three pushes to two servers, the last of which was not acknowledged to one of them, and
    of one after a move to three; and the job, in which each lies where it belongs."""
    run = job(folder, 3, moves=1)
    audit = AuditFile(folder)
    before, after = (count_rows(7, period, 2 + period).tolist() for period in (0, 1))
    for server, row in enumerate(before):
        for number in (1, 2, 3):
            audit.sent(AuditedRow(server, 0, 7, row), number)
        audit.acknowledged(AuditedRow(server, 0, 7, row), 3 - server)
    for server, row in enumerate(after):
        audit.sent(AuditedRow(server, 0, 7, row), 4)
        audit.acknowledged(AuditedRow(server, 0, 7, row), 4)
    counts = dict.fromkeys(before, 3) | dict.fromkeys(after, 1)
    hold(folder, counts, owners(np.array([*counts]), 3).tolist())
    return [*before, *after], run


def hold(folder: Path, counts: dict[int, int], where: list[int]) -> None:
    """Three servers say that they hold these counts of worker 0, each on the server that is named."""
    for server in range(3):
        mine = {
            str(row): n for (row, n), at in zip(counts.items(), where, strict=True) if at == server
        }
        HELD.write(folder / f"held.{server}.json", mode="async", audit={"0": mine}, tables={})


def test_pushes_are_counted_through_moves(tmp_path: Path) -> None:
    """A push that is not acknowledged may count; one that is missing or counts twice breaks promise 2, a
    row on a server that does not own it promise 6."""
    rows, run = pushed(tmp_path / "job")
    assert (verdicts(run)["2"], verdicts(run)["6"]) == (True, True)
    right = [3, 3, 1, 1, 1]
    where = owners(np.array(rows), 3).tolist()
    wrong = (1, 1), (0, 2), (0, 4), (4, 0)  # by row the count
    for index, count, kept in ((1, 2, True), *((*one, False) for one in wrong)):
        counts = [count if i == index else n for i, n in enumerate(right)]
        hold(run.audit, dict(zip(rows, counts, strict=True)), where)
        assert verdicts(run)["2"] is kept, (index, count)
    elsewhere = [(where[0] + 1) % 3, *where[1:]]
    hold(run.audit, dict(zip(rows, right, strict=True)), elsewhere)
    assert (verdicts(run)["2"], verdicts(run)["6"]) == (True, False)


def test_promises_are_numbered_in_order(tmp_path: Path) -> None:
    """The numbers are those of docs/chaos.md, without a gap."""
    assert [*verdicts(job(tmp_path / "job", 3))] == [*"12345678"]


def test_moves_that_were_not_tried(tmp_path: Path) -> None:
    """Without a move promise 6 was not tried; a server of which there is nothing left leaves it open."""
    _, run = pushed(tmp_path / "job")
    assert verdicts(job(tmp_path / "job", 3))["6"] is None
    (run.audit / "held.2.json").unlink()
    assert (verdicts(run)["2"], verdicts(run)["6"]) == (None, None)


def test_tables_are_compared_whatever_the_number_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same training on one and on three servers has the same tables; one push more has not."""

    def trained(name: str, servers: int, pushes: int = 4) -> FinishedJob:
        run = job(tmp_path / name, servers)
        monkeypatch.setenv("PSFLEET_CHAOS", ChaosSettings(str(run.audit)).text())
        with LocalFleet(servers, 1, in_process=True) as fleet:
            runtime = fleet.connect(0, "sync")
            runtime.create(DENSE, np.linspace(-1, 1, 90_001, dtype=np.float32))
            runtime.create(ROWS)
            for step in range(pushes):
                dice = np.random.default_rng(step)
                ids = np.unique(dice.integers(0, 400, 60))
                values = dice.standard_normal((len(ids), 3), np.float32)
                dense = dice.standard_normal(90_001, np.float32)
                runtime.push(
                    [Gradient(DENSE.key, dense, None, 0.1), Gradient(ROWS.key, values, ids, 0.1)]
                )
            runtime.close()
        return run

    one, three, more = trained("one", 1), trained("three", 3), trained("more", 3, 5)
    assert verdicts(three, one)["1"]
    assert verdicts(three)["2"]
    assert verdicts(more, one)["1"] is False
