"""A launch engine is one file: what it asks of the user stands there too, and the launcher knows of it."""

import json
import re
import sys
from pathlib import Path

from psfleet.core.base.settings.declaration import settings_of
from psfleet_launch.engines.launch_engine import EngineSettings, load_engine
from psfleet_launch.job.job_request import Launch
from tests.programs import ended

ENGINE = '''
"""Machines of the test."""

from dataclasses import dataclass

from psfleet.core.base.settings.declaration import setting
from psfleet_launch.engines.local import LocalEngine


@dataclass(frozen=True)
class OrbitSettings:
    planet: str = setting(
        "earth", "Engine orbit: where", names="--planet engine.orbit.planet", metavar="NAME"
    )


class OrbitEngine(LocalEngine):
    name = "orbit"
    settings = OrbitSettings

    def placement(self):
        [members] = super().placement().values()
        return {self.launch.of(OrbitSettings).planet: members}


ENGINE = OrbitEngine
'''
RUN = """
import json, sys
from psfleet_launch import engines
from psfleet_launch.commands.launch_command import main
engines.__path__.append(sys.argv[1])
for line in json.loads(sys.argv[2]):
    print("exit", main(line), flush=True)
"""


def test_an_engine_is_one_file(tmp_path: Path) -> None:
    """Its flag is in the help, its key in job files, and its placement follows what they say. Where a flag
    that no engine has is close to it, the sentence suggests it."""
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "orbit.py").write_text(ENGINE)
    (tmp_path / "train.py").touch()
    (tmp_path / "mars.toml").write_text('[engine.orbit]\nplanet = "mars"\n')
    (tmp_path / "moon.toml").write_text("[engine.orbit]\nmoon = 1\n")
    job = ["--engine", "orbit", "--dry-run", "train.py"]
    lines = [
        *(["--help-all"], job, ["--config", "mars.toml", *job]),
        ["--planet", "venus", "--config", "mars.toml", *job],
        ["--config", "moon.toml", *job],
        ["--engine", "orbit", "--plane", "venus", "train.py"],
    ]
    command = [sys.executable, "-c", RUN, str(tmp_path / "engines"), json.dumps(lines)]
    process = ended(command, check=True, cwd=tmp_path)
    help_text, *placed = re.split(r"exit \d\n", process.stdout)
    assert "--planet NAME" in help_text
    assert "Engine orbit: where. [default: earth]" in " ".join(help_text.split())
    seats = "server 0, worker 0\n"
    assert placed == [f"earth: {seats}", f"mars: {seats}", f"venus: {seats}", "", "", ""]
    unknown, unclear = process.stderr.splitlines()
    assert "table 'engine.orbit' of job file 'moon.toml' has no setting 'moon'" in unknown
    assert "--plane'" in unclear
    assert "--planet" in unclear
    assert re.findall(r"exit (\d)", process.stdout) == ["0", "0", "0", "0", "2", "2"]


def test_flags_of_engines_cost_no_libraries() -> None:
    """What reads the flags of all engines loads neither gRPC nor cryptography nor NumPy."""
    program = (
        "import sys; from psfleet_launch.commands.launch_command import launch; launch.complete(); "
        "print(*({'cryptography', 'grpc', 'numpy', 'ray'} & set(sys.modules)))"
    )
    assert not ended([sys.executable, "-c", program], check=True).stdout.strip()


def test_a_launch_looks_at_no_engine_that_nobody_means(tmp_path: Path) -> None:
    """Words of the launcher that are known without them load no other engine; the script's do not count."""
    (tmp_path / "train.py").touch()
    program = (
        "import sys; from psfleet_launch.commands.launch_command import main; main(sys.argv[1:]); "
        "print(*(name for name in sys.modules if name.startswith('psfleet_launch.engines.')))"
    )
    command = [sys.executable, "-c", program, "--servers", "1", "--dry-run", "train.py"]
    process = ended([*command, "--planet", "mars"], check=True, cwd=tmp_path)
    actual = {*process.stdout.splitlines()[-1].split()}
    assert actual == {f"psfleet_launch.engines.{name}" for name in ("launch_engine", "local")}


def test_what_is_said_of_another_engine_is_not_taken() -> None:
    """An engine gets its own settings, with their defaults where nothing is said of them."""
    ssh, ray = load_engine("ssh").settings, load_engine("ray").settings
    assert Launch(of_engine=ssh(hosts=("a",))).of(ssh) == ssh(hosts=("a",))
    assert Launch(of_engine=ssh(hosts=("a",))).of(ray) == ray()
    flags = [one.flag for one in settings_of(EngineSettings)]
    assert {"--hosts", "--bundles", "--nodes", "--image", "--agents"} < set(flags)
