"""A setting is declared once: what follows from the declarations agrees with them and with each other."""

import json
from collections import Counter
from pathlib import Path

import pytest

from psfleet.core.base.settings.declaration import settings_of, to_variables
from psfleet.core.base.settings.declared_settings import (
    FleetSettings,
    JobSettings,
    ProcessSettings,
    ServerLimits,
    StageSettings,
)
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet_launch.commands.launch_command import main
from psfleet_launch.engines.launch_engine import EngineSettings
from psfleet_launch.job.job_request import JobRequest, Launch
from tests.launch.conftest import Launch as Start
from tests.refusals import cases

JOB = """
[job]
script = "stand_in.py"
arguments = ["tells"]
name = "filed"
progress = false
durability = "log"
[servers]
count = 2
memory = "2G"
run_script = true
[workers]
dead_after = "1min"
restarts = 1
[strategy.consistency]
mode = "ssp"
staleness = 4
"""


def test_what_is_written_is_read_again() -> None:
    """Every setting that the launcher tells a process reaches it with its value."""
    told = Environment(
        role="server",
        rank=1,
        servers=("unix:/a", "h:1"),
        workers=3,
        worker_endpoints=("h:2",),
        standby=2,
        stage=1,
        stages=2,
        copy=1,
        stage_copies=(1, 2),
        stage_endpoints=("ipc:///x", "ipc:///y"),
        durability="log+fsync",
        snapshot_every="1000 rounds",
        snapshot_store="s3://bucket/jobs",
        resume="/snapshot",
        worker_restarts=3,
        dead_after=0.25,
        replicas=1,
        memory=1 << 33,
        disk="/rows",
        device="cuda",
        device_memory=1 << 35,
        insecure=True,
        rules=("my_rules", "more.rules"),
        rules_folder="/scripts",
        job="j",
        log_folder="/logs",
        tensorboard="/events",
        trace="http://collector:4318",
        snapshots="/snapshots",
        ready_file="/ready",
        joined_file="/joined",
        left_file="/left",
        listen="h:0",
        relocations="/moved",
        liveness=7,
    )
    groups = (FleetSettings, StageSettings, JobSettings, ProcessSettings)
    changed = {one.name for group in groups for one in settings_of(group)} - {"tls"}
    plain = Environment()
    assert {name for name in changed if getattr(told, name) != getattr(plain, name)} == changed
    assert read_environment(to_variables(told, *groups)) == told


@pytest.mark.parametrize("what", ["flag", "env", "key", "name"])
def test_names_are_taken_once(what: str) -> None:
    """No two settings of a launch or of a process share a flag, a variable or a key."""
    for groups in ((JobRequest, Launch, EngineSettings), (Environment,), (ServerLimits,)):
        names = [getattr(one, what) for group in groups for one in settings_of(group)]
        assert not [name for name, count in Counter(names).items() if count > 1 and name]


def test_a_job_file_says_what_flags_say(launch: Start, tmp_path: Path) -> None:
    """The processes of a job from a file are told what its keys say; flags go before them."""
    source = Path(__file__).with_name("stand_in.py")
    (tmp_path / "stand_in.py").write_text(source.read_text())
    (tmp_path / "job.toml").write_text(JOB)
    launcher = launch("--config", "job.toml", "--staleness", "7", "--workers", "2")
    _, err = launcher.ends_with(0)
    assert "job filed  local · 2 servers · 2 workers · ssp" in err
    seen = json.loads(launcher.log("workerlog.1").splitlines()[0])
    told = read_environment(seen)
    assert (told.job, told.durability, len(told.servers), told.workers) == ("filed", "log", 2, 2)
    assert (told.dead_after, told.worker_restarts, told.memory) == (60.0, 1, 0)
    assert json.loads(told.strategy) == {"consistency": {"mode": "ssp", "staleness": 7}}
    assert seen["arguments"] == ["tells"]


WRONG = """
[job  # job file 'job.toml' cannot be read:
[jobs]  # job file 'job.toml' has no table 'jobs'; it has job, servers,
job = 3  # job file 'job.toml' has no table 'job'; it has
[servers] / cuont = 2  # of job file 'job.toml' has no setting 'cuont'; it has count,
[engine.slurm] / nodes = 2  # has no setting 'nodes'; it has options; 'engine.batch' has one
[servers] / count = '2-8'  # servers.count in job file 'job.toml' is '2-8'; it must be a number from
[servers] / count = 0  # servers.count in job file 'job.toml' is 0; it must be a number from 1
[servers] / memory = '2 apples'  # is '2 apples'; it must be a number and K, M, G or T
[servers] / memory = 'G'  # is 'G'; it must be a number and K, M, G or T
[servers] / memory = '-8G'  # is '-8G'; it must be a number and K, M, G or T
[servers] / memory = -8  # is -8; it must be a number and K, M, G or T
[job] / durability = 'logs'  # is 'logs'; it must be none, snapshot, log or log+fsync
[job] / progress = 1  # job.progress in job file 'job.toml' is 1; it must be true or false
[workers] / dead_after = 'soon'  # is 'soon'; it must be like 30s or 5min
[strategy.consistency] / mode = 'often'  # consistency mode is 'often'; it must be sync,
[servers] / count = 2  # Missing argument 'SCRIPT'"""


@pytest.mark.parametrize(("text", "sentence"), cases(WRONG))
def test_a_wrong_job_file_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    sentence: str,
) -> None:
    """It names the key and the file, quotes the value, and nothing starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(text.replace(" / ", "\n"))
    assert main(["--config", "job.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert sentence in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_limits_are_written_as_they_are_read() -> None:
    """The text of limits names those that are not as usual, and reading it gives the same limits."""
    assert ServerLimits().text == ""
    limits = ServerLimits(tables=20_000, waiting_calls=5)
    assert limits.text == "tables=20000,waiting_calls=5"
    assert ServerLimits.read(limits.text) == limits
