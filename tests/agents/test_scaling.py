"""psfleet scale on several machines, of which that of server 0 has a folder of logs of its own."""

import os
from pathlib import Path

import pytest

from psfleet.formats import SCALE_TAKEN, SCALED, Scaled, write_scale, write_scaled
from psfleet.wire.v1.agent_pb2 import JobFile
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.engines.remote.job_files import JobFiles
from tests.agents.conftest import JOIN, JOINED, TWO, Site
from tests.launch.conftest import ROOT, digest

SCRIPT = str(ROOT / "tests" / "launch" / "scaling.py")


@JOINED
@pytest.mark.timeout(500)
def test_servers_on_other_machines(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of agents gets more and fewer servers, though its launcher and server 0 share no folder, and ends
    with the bits of one that keeps its two; a script's request reaches the launcher too."""
    if os.geteuid() != 0:
        pytest.skip("a folder of one machine needs root, for a file system of its own")
    logs = tmp_path / "psfleet-logs"
    invitation = logs / "j" / "agent.json"
    words = f"exec 3<{invitation} && mount -t tmpfs none {logs} && mkdir {logs}/j && umask 077 && "
    words += f'cat <&3 >{invitation} && exec "$@"'
    alone = ("unshare", "--mount", "sh", "-c", words, "sh")
    job = site.start(*JOIN, "--agents", "2", *TWO, "--job", "j", SCRIPT, "12", str(tmp_path), "3")
    site.join(job, "alpha", "127.0.0.2", *alone)
    site.join(job, "beta", "127.0.0.3")
    job.until(lambda: "servers   3 from now on" in site.said(), "what the script asks for")
    for servers in (1, 4):
        assert (
            main(["scale", "j", "--servers", str(servers), "--wait", "120", "--log-dir", str(logs)])
            == 0
        )
        assert capsys.readouterr().out == f"job j has {servers} servers\n"
        assert job.pid_of("server", servers - 1)
    (tmp_path / "go").touch()
    code, out, err = site.ends(job)
    assert code == 0, err
    assert (tmp_path / "servers.1").read_text() == "4"
    plain = site.start(*TWO, SCRIPT, "12", str(tmp_path), "")
    code, same, err = site.ends(plain)
    assert code == 0, err
    assert digest(same) == digest(out)


def test_files_of_a_job_go_both_ways(tmp_path: Path) -> None:
    """What one side writes the other one gets once, and never back; other names and shared folders are left
    alone, what an earlier job has left is removed, and a file that cannot be written ends nothing."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    write_scaled(theirs, Scaled(9, ("unix:/gone",), 9))
    sides = JobFiles(ours), JobFiles(theirs)
    (theirs / SCALE_TAKEN).touch()
    sides[1].clear()
    assert not [*theirs.iterdir(), *sides[1].changed()]
    write_scale(ours, 4)
    for file in sides[0].changed():
        sides[1].take(file)
    assert not [*sides[0].changed(), *sides[1].changed()]
    write_scaled(theirs, Scaled(1, ("unix:/a",), 1))
    [outcome] = sides[1].changed()
    sides[0].take(outcome)
    assert (ours / SCALED).read_text() == (theirs / SCALED).read_text()
    JobFiles(tmp_path / "none").take(outcome)
    sides[0].take(JobFile(name="../escape", content=b"x"))
    assert not (tmp_path / "escape").exists()
    assert not [*JobFiles(ours, is_shared=True).changed()]
