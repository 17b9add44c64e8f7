"""What a job's processes are told, without starting any."""

import selectors
import sys
from pathlib import Path

import pytest

from psfleet.core.base.settings.declaration import settings_of
from psfleet.core.base.settings.declared_settings import UserSettings
from psfleet.core.base.settings.environment import Environment
from psfleet_launch.engines.local import LocalEngine
from psfleet_launch.job.job_plan import (
    Job,
    Member,
    Told,
    child_environment,
    command,
    job_name,
    listed,
    unread_variables,
)
from psfleet_launch.job.job_request import JobRequest


@pytest.fixture
def script(tmp_path: Path) -> str:
    """An empty trainer script."""
    path = tmp_path / "my train.py"
    path.touch()
    return str(path)


def job_of(request: JobRequest, tmp_path: Path) -> Job:
    """The request in a folder."""
    return Job(request, "name", "token", tmp_path, tmp_path)


def test_commands(script: str, tmp_path: Path) -> None:
    """Servers are psfleet_server, safe from modules in the user's folder; workers the script."""
    job = job_of(JobRequest(script, ("--epochs", "3")), tmp_path)
    assert command(job, Member("server", 0)) == [sys.executable, "-P", "-m", "psfleet_server"]
    assert command(job, Member("worker", 0)) == [sys.executable, script, "--epochs", "3"]


def test_servers_may_run_the_script(script: str, tmp_path: Path) -> None:
    """With --server-script servers run what workers run."""
    job = job_of(JobRequest(script, server_script=True), tmp_path)
    assert command(job, Member("server", 0)) == command(job, Member("worker", 0))


@pytest.mark.parametrize(
    ("port", "endpoints"),
    [
        (None, ["unix:{}/server.0", "unix:{}/server.1"]),
        (0, ["127.0.0.1:0", "127.0.0.1:0"]),
        (9000, ["127.0.0.1:9000", "127.0.0.1:9001"]),
    ],
)
def test_endpoints(script: str, tmp_path: Path, port: int | None, endpoints: list[str]) -> None:
    """Unix sockets in the job's folder, any free ports, or ports from a given one on."""
    job = job_of(JobRequest(script, servers=2, port=port), tmp_path)
    with selectors.DefaultSelector() as selector:
        actual = LocalEngine(job, selector).endpoints()
    assert actual == [text.format(tmp_path) for text in endpoints]


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, "4"), (2, 3, "1"), (4, 1, "4")])
def test_workers_share_the_cores(
    script: str, tmp_path: Path, cores: int, workers: int, threads: str
) -> None:
    """Each worker gets its share of the cores, at least one; a server gets one."""
    job = job_of(JobRequest(script, workers=workers), tmp_path)
    environment = {
        role: child_environment(job, Member(role, 0), Told(["e"]), {}, cores)["OMP_NUM_THREADS"]
        for role in ("worker", "server")
    }
    assert environment == {"worker": threads, "server": "1"}


def test_threads_are_as_many_as_the_named_cores(script: str, tmp_path: Path) -> None:
    """What the job says goes before the launcher's environment; stages of a worker share its cores."""
    strategy = {"pipeline": {"copies": [2, 1]}}
    request = JobRequest(script, server_cores=3, worker_cores=8, strategy=strategy)
    job, base = job_of(request, tmp_path), {"OMP_NUM_THREADS": "5"}
    for member, threads in ((Member("server", 0), "3"), (Member("worker", 0, 1), "2")):
        environment = child_environment(job, member, Told(["e"]), base)
        assert (environment["OMP_NUM_THREADS"], environment["NUMBA_NUM_THREADS"]) == (
            threads,
            threads,
        )
    plain = child_environment(
        job_of(JobRequest(script), tmp_path), Member("worker", 0), Told(["e"]), base
    )
    assert plain["OMP_NUM_THREADS"] == "5"
    assert "NUMBA_NUM_THREADS" not in plain


def test_the_users_environment_stays(script: str, tmp_path: Path) -> None:
    """Settings of the user go through, those of the job win, and no ready file is inherited."""
    base = {
        "PATH": "/bin",
        "PSFLEET_RANK": "9",
        "PSFLEET_READY_FILE": "/x",
        "PSFLEET_STRATEGY": '{"mode": "async"}',
    }
    job = job_of(JobRequest(script), tmp_path)
    worker = child_environment(job, Member("worker", 0), Told(["a", "b"]), base)
    assert (worker["PATH"], worker["PSFLEET_RANK"]) == ("/bin", "0")
    assert worker["PSFLEET_STRATEGY"] == base["PSFLEET_STRATEGY"]
    assert worker["PSFLEET_SERVERS"] == "a,b"
    assert "PSFLEET_READY_FILE" not in worker


def test_a_launch_inherits_nothing_that_it_owns(script: str, tmp_path: Path) -> None:
    """What a member is told follows from the request alone, except for the variables of users."""
    names = [one.env for one in settings_of(Environment)]
    users = {one.env for one in settings_of(UserSettings)}
    assert len(names) > 25
    job = job_of(JobRequest(script), tmp_path)
    for member in (Member("worker", 0), Member("server", 0)):
        plain = child_environment(job, member, Told(["a"]), {})
        environment = child_environment(job, member, Told(["a"]), dict.fromkeys(names, "inherited"))
        assert {name for name in names if environment.get(name) == "inherited"} == users
        assert {name: environment[name] for name in environment if name not in users} == plain


def test_a_job_is_named_after_its_script(script: str) -> None:
    """The name is fit for a folder and differs from run to run."""
    names = {job_name(JobRequest(script)) for _ in range(20)}
    assert all(name.startswith("my-train-") for name in names)
    assert len(names) > 1


def test_members_are_listed_workers_first() -> None:
    """As the failure report names them."""
    members = [Member("server", 0), Member("worker", 10), Member("worker", 9)]
    assert listed(members) == "worker 9, worker 10, server 0"


def test_variables_that_the_launcher_does_not_read(script: str) -> None:
    """A variable in place of which the launcher has a flag is warned of, unless the flag is given or the
    launcher itself runs in a job, whose variables these are."""
    variables = {"PSFLEET_DURABILITY": "log", "PSFLEET_RANK": "0", "PSFLEET_LANE": "inline"}
    assert unread_variables(JobRequest(script), variables) == [
        "PSFLEET_DURABILITY is 'log', which psfleet-launch does not pass on; use --durability"
    ]
    assert not unread_variables(JobRequest(script, durability="log"), variables)
    assert not unread_variables(JobRequest(script), variables | {"PSFLEET_JOB_ID": "token"})
