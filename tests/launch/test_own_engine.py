"""A launch engine is one file: what it asks of the user stands there too, and the launcher knows of it."""

import sys
from pathlib import Path

import pytest

from psfleet.settings.declaration import settings_of
from psfleet_launch.engines.launch_engine import EngineSettings, load_engine
from psfleet_launch.job.job_request import Launch
from tests.programs import ended

ENGINE = '''
"""Machines of the test."""

from dataclasses import dataclass

from psfleet.settings.declaration import setting
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
RUN = (
    "import sys; from psfleet_launch import engines; engines.__path__.append(sys.argv[1]); "
    "from psfleet_launch.commands.launch_command import main; sys.exit(main(sys.argv[2:]))"
)


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """What runs psfleet-launch with the engine; a script and a job file are in its folder."""
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "orbit.py").write_text(ENGINE)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text('[engine.orbit]\nplanet = "mars"\n')
    return [sys.executable, "-c", RUN, str(tmp_path / "engines")]


def test_an_engine_is_one_file(run: list[str], tmp_path: Path) -> None:
    """Its flag is in the help, its key in job files, and its placement follows what they say."""
    help_text = ended([*run, "--help"], check=True).stdout
    assert "--planet NAME" in help_text
    assert "Engine orbit: where. [default: earth]" in " ".join(help_text.split())
    job = ["--engine", "orbit", "--dry-run", "train.py"]
    filed = ["--config", "job.toml"]
    for words, planet in (
        (job, "earth"),
        ([*filed, *job], "mars"),
        (["--planet", "venus", *filed, *job], "venus"),
    ):
        said = ended([*run, *words], check=True, cwd=tmp_path).stdout
        assert said == f"{planet}: server 0, worker 0\n"
    (tmp_path / "job.toml").write_text("[engine.orbit]\nmoon = 1\n")
    done = ended([*run, *filed, *job], cwd=tmp_path)
    assert "table 'engine.orbit' of job file 'job.toml' has no setting 'moon'" in done.stderr


def test_flags_of_engines_cost_no_libraries() -> None:
    """What reads the flags of all engines loads neither gRPC nor cryptography nor NumPy."""
    program = (
        "import sys; from psfleet_launch.commands.launch_command import launch; launch.complete(); "
        "print(*({'cryptography', 'grpc', 'numpy', 'ray'} & set(sys.modules)))"
    )
    assert not ended([sys.executable, "-c", program], check=True).stdout.strip()


@pytest.mark.parametrize("script", ["train.py --planet mars", "train.py"])
def test_a_launch_looks_at_no_engine_that_nobody_means(script: str, tmp_path: Path) -> None:
    """Words of the launcher that are known without them load no other engine; the script's do not count."""
    (tmp_path / "train.py").touch()
    program = (
        "import sys; from psfleet_launch.commands.launch_command import main; main(sys.argv[1:]); "
        "print(*(name for name in sys.modules if name.startswith('psfleet_launch.engines.')))"
    )
    command = [sys.executable, "-c", program, "--servers", "1", "--dry-run", *script.split()]
    found = {*ended(command, check=True, cwd=tmp_path).stdout.splitlines()[-1].split()}
    assert found == {f"psfleet_launch.engines.{name}" for name in ("launch_engine", "local")}


def test_an_option_that_no_engine_has_is_refused(run: list[str], tmp_path: Path) -> None:
    """The sentence suggests an engine's flag where that is close."""
    done = ended([*run, "--engine", "orbit", "--plane", "venus", "train.py"], cwd=tmp_path)
    assert done.returncode == 2
    assert "--plane" in done.stderr
    assert "--planet" in done.stderr


def test_what_is_said_of_another_engine_is_not_heard() -> None:
    """An engine gets its own settings, with their defaults where nothing is said of them."""
    ssh, ray = load_engine("ssh").settings, load_engine("ray").settings
    assert Launch(of_engine=ssh(hosts=("a",))).of(ssh) == ssh(hosts=("a",))
    assert Launch(of_engine=ssh(hosts=("a",))).of(ray) == ray()
    flags = [one.flag for one in settings_of(EngineSettings)]
    assert {"--hosts", "--bundles", "--nodes", "--image", "--agents"} < set(flags)
