"""The launcher's files of a change of the number of servers, in a folder that cannot always be written."""

import os
from pathlib import Path

import pytest

from psfleet.core.base.scaling_files import (
    SCALE_READY,
    SCALED,
    read_scale_ready,
    read_scaled,
    write_promise,
    write_scale,
)
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import ServerReady
from psfleet_launch.supervision.scaling_requests import ScalingRequests

PRESENT = ["unix:/0", "unix:/1", "unix:/2"]


def requests(folder: Path) -> ScalingRequests:
    """Those of a job that has one to four servers."""

    def refusal(servers: int) -> str:
        return "" if servers <= 4 else f"{servers} are too many"

    return ScalingRequests(folder, refusal, lambda rank: f"unix:/{rank}")


def is_kept(scaling: ScalingRequests, folder: Path, file: str) -> None:
    """A step that cannot write the file raises; the steps after it have room."""
    draft = folder / f".{file}.{os.getpid()}"
    draft.mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            scaling.step(PRESENT)
    draft.rmdir()


@pytest.mark.parametrize(("servers", "why"), [(9, "9 are too many"), (3, "")])
def test_a_decision_that_could_not_be_written(tmp_path: Path, servers: int, why: str) -> None:
    """A request that changes nothing is answered as soon as there is room, and `psfleet scale` ends."""
    scaling, number = requests(tmp_path), write_scale(tmp_path, servers)
    is_kept(scaling, tmp_path, SCALED)
    assert why in scaling.step(PRESENT).said
    done = read_scaled(tmp_path)
    assert (done.number, [*done.endpoints], done.why) == (number, PRESENT, why)
    assert not scaling.step(PRESENT).said


@pytest.mark.parametrize("servers", [2, 4])
def test_servers_that_could_not_be_told(tmp_path: Path, servers: int) -> None:
    """With room again it goes on with as many servers as were asked for, fewer too."""
    scaling, number = requests(tmp_path), write_scale(tmp_path, servers)
    if servers > len(PRESENT):
        assert scaling.step(PRESENT).start == (Member("server", 3),)
        scaling.take(ServerReady(Member("server", 3), "unix:/3"))
    is_kept(scaling, tmp_path, SCALE_READY)
    expected = [*PRESENT, "unix:/3"][:servers]
    assert [*scaling.step(PRESENT).endpoints] == expected
    told = read_scale_ready(tmp_path)
    assert (told[0], [*told[1]]) == (number, expected)
    write_promise(tmp_path, number)
    step = scaling.step(PRESENT)
    assert step.servers == tuple(Member("server", rank) for rank in range(servers))
    assert [*read_scaled(tmp_path).endpoints] == expected
    assert not scaling.under_way
