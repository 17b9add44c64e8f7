"""Jobs under chaos keep what they promise, and one that does not is told so.

The seeds of these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.programs import MORE, ended

SCRIPT = Path(__file__).with_name("scripts") / "trainer.py"
pytestmark = pytest.mark.timeout(300)  # two jobs, whose servers come back again and again


def chaos(
    folder: Path, seed: int, script: Sequence[str], *options: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the report and the messages of a job of two servers and two workers."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--chaos", str(seed), "--no-progress", "--job", "job", "--log-dir", str(folder)]
    process = ended([*command, *options, str(SCRIPT), *script], timeout=280)
    report = json.loads((folder / "job" / "chaos.json").read_text())
    return process.returncode, report, process.stderr


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    """By the number of the promise."""
    return {promise["promise"][0]: promise["verdict"] for promise in report["promises"]}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 2 + MORE))
def test_sync(tmp_path: Path, seed: int) -> None:
    """Servers and workers are killed and paused, answers lost, and rows move to other servers: the bits are
    those without faults, also those of a follower at each round that it has both with and without faults."""
    options = ("--durability", "log", "--restart-workers", "1", "--chaos-pace", "3")
    script = ["sync", "30", "followed", "meets"]
    code, report, errors = chaos(tmp_path, seed, script, *options)
    actual = verdicts(report)
    assert actual.pop("6") != "BROKEN", errors
    assert actual == dict.fromkeys("12378", "kept") | dict.fromkeys("45", "not tried"), errors
    assert code == 0
    assert report["faults"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 4 + MORE))
def test_standbys(tmp_path: Path, seed: int) -> None:
    """Servers and standbys are killed, paused and hang, and there is no log: no bit changes."""
    options = ("--replicas", "1", "--hung-after", "2s", "--chaos-pace", "2")
    code, report, errors = chaos(tmp_path, seed, ["sync", "4"], *options)
    actual = verdicts(report)
    assert (actual["1"], actual["2"], actual["7"]) == ("kept", "kept", "kept"), errors
    assert "BROKEN" not in actual.values()
    assert code == 0
    check_report(tmp_path / "job", report["faults"])


def check_report(folder: Path, faults: list[dict[str, Any]]) -> None:
    """The job's report lists every death of the fault log, and who took over.

    A follower is no process of the job. The report may list more: one that hangs is killed, and on a busy
    machine a pause may be taken for that.
    """
    page = (folder / "report.html").read_text()
    report_text = re.search(r'<script id="report" type="application/json">(.+)</script>', page)
    assert report_text
    rows = [
        row
        for table in json.loads(report_text[1])["overview"]["tables"]
        for row in table["rows"]
        if table["title"] == "Faults"
    ]

    def told_of(words: str) -> Counter[str]:
        return Counter(who.partition(" copy ")[0] for _, who, text in rows if words in text)

    killed = [fault["member"] for fault in faults if fault["kind"] == "kill"]
    killed = [member for member in killed if not member.startswith("follower")]
    places = Counter(member.removeprefix("standby of ") for member in killed)
    primaries = Counter(member for member in killed if not member.startswith("standby"))
    assert not places - told_of("ended with signal 9"), rows
    assert not primaries - told_of("takes over from"), rows


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 2 + MORE))
def test_async(tmp_path: Path, seed: int) -> None:
    """While snapshots are taken and rows move: every acknowledged push is counted once on every server, and
    is in the next cut of each of two followers, which are killed, paused and cut off."""
    options = ("--durability", "log", "--snapshot-every", "1s", "--chaos-pace", "3")
    script = ["async", "35", "followed", "meets"]
    code, report, errors = chaos(tmp_path, seed, script, *options, "--chaos-followers", "2")
    actual = verdicts(report)
    assert {actual[promise] for promise in "2378"} == {"kept"}, errors
    assert "BROKEN" not in actual.values()
    assert code == 0
