"""Trouble on one machine of a job: the report names its host, the role, the rank and the first cause.

Memory that runs out: tests/launch/test_failures.py.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from psfleet.checkpoint import verify
from tests.agents.conftest import JOINED, TRAINER, TWO, Site
from tests.agents.machines import Lab, has, run
from tests.agents.test_errors import AGENTS
from tests.agents.test_lost_machines import ALONE
from tests.launch.conftest import digest

pytestmark = JOINED
WAITS = "import os, time\nif os.environ['PSFLEET_RANK'] == '0': time.sleep(600)\n"
"""How a script begins that does something on worker 1 alone, on beta. The end of that ends the job."""


@pytest.fixture
def little_room() -> Iterator[list[str]]:
    """What a command begins with whose temporary files share 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("a full disk needs root, for a file system of its own")
    # An agent takes another folder than TMPDIR where that is too long for the path of a socket.
    with tempfile.TemporaryDirectory() as folder:
        mount = f"mount -t tmpfs -o size=1m none {folder} && export TMPDIR={folder}"
        yield ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def failed(site: Site, script: str, *beta: str, **variables: str) -> str:
    """What the launcher says of a job whose agent on beta is started with these words and variables."""
    path = site.folder / "train.py"
    path.write_text(WAITS + script)
    launcher = site.start(*AGENTS, *TWO, str(path))
    site.join(launcher, "alpha", "127.0.0.2")
    site.join(launcher, "beta", "127.0.0.3", *beta, **variables)
    code, _, err = site.ends(launcher)
    assert code != 0, err
    assert "host beta · rank 1" in err
    site.agents[1].wait()
    return err


def test_a_disk_without_room(site: Site, little_room: list[str]) -> None:
    """A worker cannot write what it says, not even why it ends."""
    said = failed(site, "while True: print('x' * 64, flush=True)\n", *little_room)
    assert "worker 1 failed first: no room is left in '" in said


def _fill(path: Path) -> None:
    """Leave no room beside this file."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def little_room_for_logs(tmp_path: Path) -> list[str]:
    """What a command begins with whose folder of logs is a file system of 1 MiB; job `full`."""
    if os.geteuid() != 0:
        pytest.skip("a full disk needs root, for a file system of its own")
    logs = tmp_path / "psfleet-logs"
    invitation = logs / "full" / "agent.json"
    words = f"exec 3<{invitation} && mount -t tmpfs -o size=1m none {logs} && mkdir {logs}/full && "
    words += f"umask 077 && cat <&3 >{invitation}"
    return ["unshare", "--mount", "sh", "-c", f'{words} && exec "$@"', "sh"]


@pytest.mark.long
def test_a_disk_without_room_for_a_servers_log(site: Site, little_room_for_logs: list[str]) -> None:
    """Pushes wait, and the launcher names server and host; with room again no bit of the result differs."""
    gate = site.folder / "gate"
    job = (*AGENTS, "--servers", "2", "--workers", "1", "--no-progress", "--durability", "log")
    launcher = site.start(*job, "--job", "full", TRAINER, "30", "0", str(gate))
    site.join(launcher, "alpha", "127.0.0.2")
    beta = site.join(launcher, "beta", "127.0.0.3", *little_room_for_logs)
    launcher.until_logged("workerlog.0", "step 9")
    filler = Path(f"/proc/{beta.pid}/root/{site.folder}/psfleet-logs/full/filler")
    _fill(filler)
    gate.touch()
    said = "server 1 on host beta: log '"
    launcher.until(lambda: said in site.said(), "word of the full disk")
    filler.unlink()
    out, err = site.ends_with(0, launcher)
    assert "cannot be written: No space left on device; make room for it. Pushes wait" in err
    assert digest(out) == ALONE


COUNTS = """\
import time
from pathlib import Path
import numpy as np, psfleet
from psfleet import fleet
fleet.init()
ids, steps = np.arange(20_000), 0
with psfleet.connect(mode="sync") as ps:
    made = dict(dim=8, optimizer=psfleet.optimizer.SGD(1.0), servers=1)
    made |= dict(initializer=psfleet.initializer.Constant(0.0))
    sizes = [(ps.sparse_table("little", **made), 9), (ps.sparse_table("much", **made), len(ids))]
    while not Path("gate").exists():
        ps.push({one: (ids[:n], np.full((n, 8), -1, np.float32)) for one, n in sizes})
        steps += 1
        print("step", steps)
        time.sleep(0.1)
    ps.flush()
    assert {float(one) for table, n in sizes for one in np.unique(table.pull(ids[:n]))} == {steps}
"""
"""Server 0 holds a few rows and server 1 many; each value counts the pushes to it."""


@dataclass(frozen=True)
class _SharedDisk(Lab):
    """Every machine sees a small file system of its own making where the others see it too."""

    namespace: int = 0

    def within(self, number: int) -> list[str]:
        enter = ["nsenter", f"--mount=/proc/{self.namespace}/ns/mnt"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder)]


@pytest.fixture
def shared_disk(tmp_path: Path) -> Iterator[_SharedDisk]:
    """The snapshots of job `full` lie in 1 MiB that all machines share."""
    has("join", (), "iproute2")
    folder = tmp_path / "psfleet-logs" / "full" / "snapshots"
    words = f"mkdir -p {folder} && mount -t tmpfs -o size=1m none {folder} && echo made && exec cat"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"made\n"
        yield _SharedDisk(tmp_path, "", namespace=holder.pid)


@pytest.mark.long
def test_a_shared_disk_without_room_for_snapshots(site: Site, shared_disk: _SharedDisk) -> None:
    """The launcher names the server and its host, the job goes on, and no push is lost.

    The disk has room for one snapshot, which stays whole. With more room the next one is complete.
    """
    site.lab = shared_disk
    (site.folder / "train.py").write_text(COUNTS)
    job = (*AGENTS, "--servers", "2", "--workers", "1", "--no-progress", "--job", "full")
    launcher = site.start(*job, "--snapshot-every", "5 rounds", "train.py")
    for number, name in enumerate(("alpha", "beta"), 1):
        site.join(launcher, name, f"127.0.0.{number + 1}", *shared_disk.within(number))
    said = "server 1 on host beta: a snapshot cannot be written to '"
    launcher.until(lambda: said in site.said(), "word of the full disk")
    snapshots = Path(
        f"/proc/{shared_disk.namespace}/root/{site.folder}/psfleet-logs/full/snapshots"
    )
    [before] = snapshots.glob("snapshot-*")
    verify(before)
    mounted = str(snapshots).partition("root")[2]
    run(*shared_disk.within(0), "mount", "-o", "remount,size=64m", mounted)
    launcher.until(lambda: "snapshots are taken again, after " in site.said(), "next snapshot")
    (site.folder / "gate").touch()
    _, err = site.ends_with(0, launcher)
    verify(max(snapshots.glob("snapshot-*")))
    [line] = [line for line in err.splitlines() if said in line]
    assert line.endswith(": No space left on device")
