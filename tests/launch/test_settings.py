"""A setting is declared once: what follows from the declarations agrees with them and with each other."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import settings_of, to_variables
from psfleet.core.base.settings.declared_settings import (
    FleetSettings,
    JobSettings,
    ProcessSettings,
    ServerLimits,
    StageSettings,
)
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.runtime.strategy import load_strategy_file
from psfleet.core.runtime.strategy.distributed_strategy import resolve
from psfleet.features import load_features
from psfleet_launch.commands.launch_command import main
from psfleet_launch.commands.options import load_job_file
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
    said: dict[str, Any] = {"role": "server", "rank": 1, "servers": ("unix:/a", "h:1")}
    said |= {"workers": 3} | {
        "worker_endpoints": ("h:2",),
        "standby": 2,
        "stage": 1,
        "stages": 2,
        "copy": 1,
    }
    said |= {"stage_copies": (1, 2), "stage_endpoints": ("ipc:///x", "ipc:///y"), "replicas": 1}
    said |= {"durability": "log+fsync", "snapshot_every": "1000 rounds", "resume": "/snapshot"}
    said |= {"snapshot_store": "s3://bucket/jobs", "worker_restarts": 3, "dead_after": 0.25}
    said |= {"memory": 1 << 33, "disk": "/rows", "device": "cuda", "device_memory": 1 << 35}
    said |= {"insecure": True, "rules": ("my_rules", "more.rules"), "rules_folder": "/scripts"}
    said |= {"job": "j", "log_folder": "/logs", "relocations": "/moved", "tensorboard": "/events"}
    said |= {"trace": "http://collector:4318", "snapshots": "/snapshots", "ready_file": "/ready"}
    said |= {"joined_file": "/joined", "liveness": 7, "left_file": "/left", "listen": "h:0"}
    told = Environment(**said)
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
[servers] / count = 1_000_000_000  # servers.count in job file 'job.toml' is 1000000000; it must be
[servers] / count = 1025  # servers.count in job file 'job.toml' is 1025; it must be a number from 1
[workers] / count = 65537  # workers.count in job file 'job.toml' is 65537; it must be at least 1
[servers] / hung_after = -1  # servers.hung_after in job file 'job.toml' is -1; it must be like 30s or 5min
[servers] / hung_after = nan  # servers.hung_after in job file 'job.toml' is nan; it must be like 30s
[job] / start_timeout = inf  # job.start_timeout in job file 'job.toml' is inf; it must be
[job] / start_timeout = 1e300  # job.start_timeout in job file 'job.toml' is 1e+300; it must be
[chaos] / pace = inf  # chaos.pace in job file 'job.toml' is inf; it must be a number
[workers] / dead_after = 'soon'  # is 'soon'; it must be like 30s or 5min
[strategy.consistency] / mode = 'often'  # consistency mode is 'often'; it must be sync,
[servers] / count = 2  # Missing argument 'SCRIPT'"""


NUMBERS = "0 -1 1 2.5 1025 65537 1000000000 1e18 1e300 inf -inf nan"


def test_a_number_is_taken_wherever_it_stands_or_nowhere() -> None:
    """In a job file each numeric setting takes the numbers that its flag and its variable take."""
    differing = []
    for one in {*settings_of(JobRequest), *settings_of(Launch), *settings_of(Environment)}:
        for text in NUMBERS.split():
            value = float(text) if set(text) & set(".enf") else int(text)
            if one.key and one.kind.fits(value):
                is_taken = [_takes(one.parse, text), _takes(one.take, value)]
                differing += [(one.key, text, is_taken)] if len({*is_taken}) > 1 else []
    # A text has no exponent.
    assert not [entry for entry in differing if entry[1] not in ("1e18", "1e300")]


def _takes(read: Callable[[Any, str], object], value: Any) -> bool:
    with contextlib.suppress(ConfigError):
        read(value, "")
        return True
    return False


DEEP, DIGITS = "[" * 20_000 + "]" * 20_000, "9" * 5_000
UNREADABLE = {
    f"x = {DEEP}": "nested too deeply",
    f"x{'.a' * 20_000} = 1": "nested too deeply",
    f"x = {DIGITS}": "with too many digits",
    f"x = 0x{DIGITS}": "with too many digits",
    "x = '\xff'": "no TOML",
}


@pytest.mark.long
@pytest.mark.parametrize(("text", "why"), UNREADABLE.items(), ids=[*map(str, range(5))])
def test_a_file_that_python_cannot_read(tmp_path: Path, text: str, why: str) -> None:
    """Job files, strategy files and feature files: one short sentence that names the file."""
    path = tmp_path / "file.toml"
    path.write_bytes(text.encode("latin-1"))
    for read in (
        partial(load_job_file, str(path)),
        partial(load_strategy_file, str(path)),
        partial(load_features, path),
    ):
        with pytest.raises(ConfigError, match=f"file.toml.* cannot be read: .*{why}") as error:
            read()
        assert len(str(error.value)) < 300


def test_a_variable_that_python_cannot_read() -> None:
    """The strategy of the launcher likewise."""
    for text in (DEEP, DIGITS):
        with pytest.raises(ConfigError, match=r"PSFLEET_STRATEGY is .* not JSON") as error:
            resolve(None, text)
        assert len(str(error.value)) < 500


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
