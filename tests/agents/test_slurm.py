"""Engine slurm on a real Slurm: its batch job is requeued, ends in time, or never starts."""

import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from psfleet.checkpoint import compare
from psfleet_launch.engines.remote.batch_job import BatchJob, BatchQueue, BatchSettings, BatchState
from psfleet_launch.engines.slurm import SlurmQueue, fields_of
from psfleet_launch.job.job_request import Launch
from psfleet_launch.job.resources import Resources
from tests.agents.conftest import TRAINER, TWO, Site
from tests.agents.machines import Lab
from tests.agents.slurm_cluster import ask
from tests.agents.test_engines import LONG
from tests.launch.conftest import ROOT, Launcher, _environment
from tests.programs import ended

RESUMING = str(ROOT / "tests" / "launch" / "resuming.py")
SLOW_AT_FIRST = f"""\
import os, runpy, sys
rest = "0" if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else "1"
sys.argv = ["", "40", rest, "model"]
runpy.run_path({RESUMING!r}, run_name="__main__")
"""
BROKEN_ON_BETA = """\
import os
if os.environ.get("SLURMD_NODENAME") == "beta":
    os.write(2, b"no psfleet is installed here\\n")
    os._exit(3)
"""
SNAPSHOTS = ("--snapshot-every", "3 rounds", "--job", "j")


@pytest.fixture(params=["slurm"], scope="session")
def engine(request: pytest.FixtureRequest, cluster: Lab) -> tuple[str, Lab]:
    """Only this engine."""
    return request.param, cluster


def number(site: Site) -> str:
    """Slurm's number of the only job."""
    assert site.lab is not None
    return ask(site.lab, "squeue", "-h", "-o", "%A")


def until_snapshot(launcher: Launcher) -> None:
    """Wait until job j has a complete snapshot."""
    folders = launcher.folder.glob
    complete = "psfleet-logs/j/snapshots/snapshot-*/manifest.json"
    launcher.until(lambda: any(folders(complete)), "first snapshot")


def test_a_requeued_job_goes_on_from_its_snapshot(site: Site, tmp_path: Path) -> None:
    """Slurm requeues a job that trains: it resumes by itself and gives the bits of a plain run."""
    assert site.lab is not None
    (tmp_path / "train.py").write_text(SLOW_AT_FIRST)
    launcher = site.launch(*TWO, *SNAPSHOTS, "train.py")
    until_snapshot(launcher)
    ask(site.lab, "scontrol", "requeue", number(site))
    _, err = site.ends_with(0, launcher)
    assert "the job runs again, from" in err
    assert "snapshots/snapshot-00000" in err
    plain = site.start(*TWO, "--engine", "local", RESUMING, "40", "0", "plain")
    assert site.ends(plain)[0] == 0
    assert all(one.is_equal for one in compare(str(tmp_path / "plain"), str(tmp_path / "model")))


def test_a_job_ends_in_order_before_its_time_limit(site: Site) -> None:
    """The signal that Slurm sends then has the job take a snapshot and end."""
    assert site.lab is not None
    launcher = site.launch(*TWO, *SNAPSHOTS, RESUMING, "60", "0.5", "model")
    until_snapshot(launcher)
    ask(site.lab, "scancel", "--batch", "--signal=USR1", number(site))
    _, err = site.ends_with(128 + signal.SIGUSR1, launcher)
    assert "the snapshot is complete; continue with --resume " in err
    assert "stopped by SIGUSR1" in err


def test_a_node_without_psfleet(site: Site, tmp_path: Path) -> None:
    """An agent that cannot start: nothing starts, and its last line is quoted with its node."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN_ON_BETA)
    path = f"{tmp_path / 'broken'}:{_environment()['PYTHONPATH']}"
    launcher = site.launch(*TWO, TRAINER, "30", PYTHONPATH=path)
    _, err = site.ends_with(2, launcher)
    assert "psfleet-launch: host beta: no psfleet is installed here" in err


def test_a_lost_node_is_the_first_cause(site: Site) -> None:
    """A node is cut off: its processes end, and so does the job, which names the node.

    Slurm calls the job over once it has heard of the node again.
    """
    assert site.lab is not None
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    site.lab.cut("beta")
    try:
        lost = "failed first: the agent on host beta is lost: "
        launcher.until(lambda: lost in site.said(), "loss of beta")
    finally:
        site.lab.cut("beta", is_up=True)
    site.ends_with(128 + signal.SIGKILL, launcher)


def test_a_waiting_job_is_cancelled(site: Site) -> None:
    """Ctrl-C takes a job out of the queue that has not started; its exit code is not 0."""
    assert site.lab is not None
    launcher = site.launch("--sbatch-options", "--begin=now+1hour", *TWO, TRAINER, "30")
    launcher.until(lambda: "Slurm job " in site.said(), "job in the queue")
    launcher.process.send_signal(signal.SIGINT)
    code, _, err = site.ends(launcher)
    assert code != 0
    assert "has ended: CANCELLED" in err


def test_what_slurm_refuses_is_quoted(site: Site) -> None:
    """A partition that does not exist: nothing starts, and the sentence is Slurm's own."""
    launcher = site.launch("--sbatch-options", "--partition=none", *TWO, TRAINER, "30")
    _, err = site.ends_with(2, launcher)
    assert "psfleet-launch: sbatch: " in err
    assert "Invalid partition" in err


def test_the_batch_script_is_one_that_a_shell_reads(tmp_path: Path) -> None:
    """Names with blanks stay one word; options of the user come last, so they win."""
    words, needs = ["--config", "my job.toml", "train.py", "it's"], Resources(3, 1 << 30)
    output = BatchJob(SlurmQueue(), tmp_path / "my logs" / "j").output
    queue = SlurmQueue(["--nodes=4", "--mem=1G"])
    text = queue.script("j", BatchSettings(nodes=3), words, needs, output)
    assert f"#SBATCH '--output={tmp_path}/my logs/j/slurm.out'\n" in text
    assert text.index("--nodes=3") < text.index("--nodes=4") < text.index("exec ")
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert text.index("--cpus-per-task=3\n") < text.index("--mem=1792M") < text.index("--mem=1G")
    printed = text.replace("exec ", "printf '%s\\n' ")
    process = ended(["sh", "-c", printed], check=True)
    assert process.stdout.splitlines()[-4:] == ["--config", "my job.toml", "train.py", "it's"]


def test_fields_of_a_state() -> None:
    """The line of `scontrol --oneliner` by field; a value may be empty."""
    line = "JobId=5 JobName=a JobState=RUNNING Reason=None Dependency=(null) ExitCode=0:9 Comment= "
    actual = fields_of(line)
    assert (actual["JobState"], actual["ExitCode"], actual["Comment"]) == ("RUNNING", "0:9", "")


class ShellQueue(BatchQueue):
    """A queue of the test: a job is a shell that starts at once, and says when it is over."""

    label, prefix, suffix = "Shell job", "shell", "sh"

    def __init__(self, ready: Path) -> None:
        self.running: subprocess.Popen[bytes] | None = None
        self.ready = ready
        self.cancelled: list[signal.Signals | None] = []

    def script(
        self,
        name: str,
        settings: BatchSettings,
        words: Sequence[str],
        needs: Resources,
        output: tuple[Path, Path],
    ) -> str:
        out, err = map(str, output)
        return f"exec >{shlex.quote(out)} 2>{shlex.quote(err)}\n{words[0]}\n"

    def submit(self, script: Path) -> str:
        self.running = subprocess.Popen(["sh", str(script)])
        return "7"

    def state(self, job: str) -> BatchState:
        assert self.running is not None
        assert job == "7"
        if self.ready.exists():
            self.ready.unlink()
            # As a user's `kill`. A shell that was started in the background cannot trap SIGINT.
            signal.raise_signal(signal.SIGTERM)
        code = self.running.poll()
        return BatchState(code, "" if code in (None, 3) else "LOST")

    def cancel(self, job: str, by: signal.Signals | None) -> None:
        assert self.running is not None
        self.cancelled.append(by)
        self.running.send_signal(by or signal.SIGKILL)


def test_another_queue_needs_no_more_than_its_own_file(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """What a job of any queue writes is shown, its exit code is returned, and signals are passed on."""
    queue, launch = ShellQueue(tmp_path / "ready"), Launch("shell", tmp_path)
    job = BatchJob.submit(queue, "j", launch, ["echo out; echo err >&2; exit 3"], Resources())
    assert job.follow() == 3
    out, err = capfdbinary.readouterr()
    assert out == b"out\n"
    assert err == f"Shell job 7, from {tmp_path}/j/job.sh\nerr\n".encode()
    stops = f"trap 'exit 5' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    assert BatchJob.submit(queue, "j", launch, [stops], Resources()).follow() == 5
    assert queue.cancelled == [signal.SIGTERM]
    assert b"Shell job 7 has ended: LOST\n" in capfdbinary.readouterr().err
