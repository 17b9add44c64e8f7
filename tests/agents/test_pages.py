"""The job files of docs/run work as they are printed."""

import re

import pytest

from psfleet_launch.commands.launch_command import main
from tests.agents.conftest import TRAINER, Site
from tests.agents.ray_cluster import RAY_HEAD
from tests.agents.ssh_hosts import ssh_options
from tests.launch.conftest import ROOT, digest

SCRIPT = (
    f"import runpy, sys; sys.argv = ['', '5']; runpy.run_path({TRAINER!r}, run_name='__main__')\n"
)


def page(engine: str) -> str:
    """The page of an engine."""
    return (ROOT / "docs" / "run" / f"{engine}.md").read_text()


def job_file(engine: str) -> str:
    """The first job file that it prints."""
    matches, *_ = re.findall(r"^```toml\n(.*?)^```", page(engine), re.DOTALL | re.MULTILINE)
    return str(matches)


@pytest.mark.parametrize("engine", ["join", "ssh", "slurm", "ray"], indirect=True)
def test_the_job_file(site: Site) -> None:
    """A job that is started with the file alone ends well."""
    folder = site.folder
    (folder / "job.toml").write_text(job_file(site.engine))
    (folder / "train.py").write_text(SCRIPT)
    flags = ["--ssh-options", ssh_options(site.lab)] if site.lab and site.engine == "ssh" else []
    if site.engine == "ray":
        flags = ["--ray-address", RAY_HEAD]
    launcher = site.start(*flags, "--config", "job.toml")
    if site.engine == "join":
        site.join_all(launcher)
    out, _ = site.ends_with(0, launcher)
    digest(out)


@pytest.mark.parametrize(
    ("name", "machines"),
    [
        ("join", ("machine 1", "machine 2")),
        ("ssh", ("alpha", "beta")),
        ("slurm", ("node 1", "node 2")),
        ("ray", ("bundle 1", "bundle 2")),
    ],
)
def test_a_dry_run(
    name: str,
    machines: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--dry-run prints the placement, and leaves no file."""
    folder = tmp_path_factory.mktemp("dry")
    monkeypatch.chdir(folder)
    (folder / "job.toml").write_text(job_file(name))
    (folder / "train.py").write_text(SCRIPT)
    assert main(["--dry-run", "--config", "job.toml"]) == 0
    needs = " (1 core and 0.5 GiB)" if name == "join" else ""
    printed = [f"{one}: server {rank}, worker {rank}{needs}" for rank, one in enumerate(machines)]
    assert capsys.readouterr().out.splitlines() == printed
    assert sorted(path.name for path in folder.iterdir()) == ["job.toml", "train.py"]
