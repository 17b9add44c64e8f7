"""The rule of --servers 2..8: what it wants for which figures, and the forms that are refused."""

from pathlib import Path

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import from_tables, settings_of
from psfleet.core.base.settings.kinds import ServerCount
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.scaling_requests import EVERY, ServerUsage, wanted
from tests.launch.conftest import Launch

COUNT = ServerCount(2, 8)
[SERVERS] = [one for one in settings_of(JobRequest) if one.name == "servers"]


def usages(
    servers: int, memory: float, busy: float, looks: int = 14, cores: int = 1
) -> list[ServerUsage]:
    """Figures of so many looks, in which servers use these parts of what they have."""
    return [
        ServerUsage(EVERY * n, servers, memory, EVERY * n * servers * cores * busy)
        for n in range(looks)
    ]


@pytest.mark.parametrize(
    ("servers", "memory", "busy", "expected"),
    [
        (2, 0.5, 0.5, None),
        (2, 0.9, 0.1, 3),  # 2 x 0.9 are 1.8, of which three servers use 60 %
        (4, 0.9, 0.1, 6),
        (7, 0.95, 0.1, 8),
        (8, 0.95, 0.99, None),
        (2, 0.3, 0.95, 4),
        (4, 0.2, 0.2, 2),
        (8, 0.1, 0.24, 4),
        (8, 0.3, 0.01, None),
        (2, 0.01, 0.01, None),
    ],
)
def test_what_is_wanted(servers: int, memory: float, busy: float, expected: int | None) -> None:
    """More servers where memory is nearly full or processors are, fewer where a quarter is enough, so that
    three fifths are used; never beyond the bounds, and nothing between."""
    actual = wanted(usages(servers, memory, busy), COUNT, 1)
    assert (actual and actual.servers) == expected
    assert actual is None or "%" in actual.why


def test_how_long_it_takes() -> None:
    """Memory counts at the third look, processors and idleness after a minute with as many servers; one quiet
    look in that minute is enough to stay."""
    assert wanted(usages(2, 0.9, 0.1, looks=2), COUNT, 1) is None
    assert wanted(usages(2, 0.9, 0.1, looks=3), COUNT, 1) is not None
    assert wanted(usages(2, 0.3, 0.95, looks=12), COUNT, 1) is None
    assert wanted(usages(2, 0.3, 0.95, looks=13), COUNT, 1) is not None
    before = usages(4, 0.3, 0.95)
    after = [ServerUsage(100 + one.at, 2, 0.3, one.cpu) for one in usages(2, 0.3, 0.95, looks=5)]
    assert wanted([*before, *after], COUNT, 1) is None
    quiet = usages(2, 0.3, 0.95)
    quiet[7:] = [ServerUsage(one.at, 2, 0.3, one.cpu - 5) for one in quiet[7:]]
    assert wanted(quiet, COUNT, 1) is None
    assert wanted([], COUNT, 1) is None


def test_what_counts() -> None:
    """Without --server-memory only processors count; with --server-cores all cores of a server do."""
    assert wanted(usages(2, 0.0, 0.5), COUNT, 1) is None
    assert wanted(usages(2, 0.0, 0.95), COUNT, 1) is not None
    assert wanted(usages(2, 0.3, 0.95, cores=2), COUNT, 2) is not None
    assert wanted(usages(2, 0.3, 0.95), COUNT, 2) is None


@pytest.mark.parametrize(
    "text", ["8..2", "2..", "..3", "0..3", "0", "2...4", "two", "2..1025", "-1"]
)
def test_forms_that_are_refused(text: str) -> None:
    """One sentence quotes the form and says what to write, for a flag and in a job file."""
    with pytest.raises(ConfigError, match=r"as in 2\.\.8") as raised:
        SERVERS.parse(text, "--servers")
    assert text in str(raised.value)
    with pytest.raises(ConfigError, match=r"as in 2\.\.8"):
        from_tables(JobRequest, {"servers": {"count": text}}, "job.toml")


def test_forms_that_are_taken() -> None:
    """A number, and the fewest with the most, as a flag and in a job file."""
    for text, fewest, most in (("3", 3, 3), ("2..8", 2, 8), ("4..4", 4, 4)):
        count = SERVERS.parse(text, "--servers")
        assert (count, count.most) == (fewest, most)
        assert SERVERS.parse(SERVERS.kind.text(count), "").most == most
    [count] = from_tables(JobRequest, {"servers": {"count": "2..8"}}, "job.toml").values()
    assert count.most == 8
    assert from_tables(JobRequest, {"servers": {"count": 3}}, "job.toml") == {"servers": 3}


TRAINER = """
import sys, time
from pathlib import Path
import numpy as np, psfleet
from psfleet import fleet
fleet.init()
with psfleet.connect(mode="async") as ps:
    table = ps.sparse_table("rows", 64, optimizer=psfleet.optimizer.Adam(0.01))
    rows = 0
    try:
        while True:
            table.push(np.arange(rows, rows + 2000), np.ones((2000, 64), np.float32))
            ps.flush()
            rows += 2000
    except psfleet.UsageError:
        before = table.pull(np.arange(rows))  # the server is full
    while fleet.server_num() == 1:
        fleet.barrier_worker()
        time.sleep(0.3)
    assert np.array_equal(table.pull(np.arange(rows)), before)
    print("servers", fleet.server_num())
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_that_chooses(launch: Launch, tmp_path: Path) -> None:
    """A job whose server has little memory left for its tables gets another one, and says why."""
    (tmp_path / "train.py").write_text(TRAINER)
    memory = ("--server-memory", "330M", "--workers", "1", "--no-progress")
    job = launch("--servers", "1..2", *memory, str(tmp_path / "train.py"))
    out, err = job.ends_with(0, 250)
    assert "servers   2 are wanted: tables take " in err
    assert "servers   2 from now on" in err
    assert "servers 2" in out
