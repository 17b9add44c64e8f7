"""`psfleet doctor` says how a machine is, and what to change."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet_launch.agent.machine_checks import Finding, PeerCheck, check_machine
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.engines.launch_engine import load_engine
from tests.agents.conftest import PSFLEET
from tests.agents.machines import NETWORK, Lab, has, laboratory
from tests.launch.conftest import _environment
from tests.programs import ended

PEERS = (f"{NETWORK}.2", f"{NETWORK}.3")
KERNEL = {
    "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   16777216 kB\n",
    "sys/fs/cgroup/memory.max": "2147483648\n",
    "sys/fs/cgroup/memory.current": "1610612736\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files of a kernel whose container has little memory left and whose pages are small."""
    for name, text in KERNEL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def looked_at(engine: str, root: Path) -> dict[str, Finding]:
    """The findings by name."""
    return {one.name: one for one in check_machine(load_engine(engine), root)}


def test_what_the_kernel_says(root: Path) -> None:
    """The container's limit counts where it is lower; advice names the number or the file."""
    actual = looked_at("local", root)
    assert actual["memory"].value == "0.5 GiB free of this container"
    assert "0.5 GiB beside its tables" in actual["memory"].advice
    assert "echo madvise" in actual["huge pages"].advice
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never\n")
    actual = looked_at("local", root)
    assert (actual["memory"].value, actual["memory"].advice) == ("16.0 GiB free", "")
    assert (actual["huge pages"].value, actual["huge pages"].advice) == ("madvise", "")


def test_more_threads_than_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that makes BLAS take more threads than there are cores is named."""
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert "OMP_NUM_THREADS is more than the" in looked_at("local", root)["BLAS threads"].advice


def test_a_cache_that_others_can_write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not used, so the advice names it; one that does not exist yet is good."""
    folder = root / "cache"
    monkeypatch.setenv("PSFLEET_CACHE", str(folder))
    assert looked_at("local", root)["kernel cache"] == Finding("kernel cache", str(folder))
    folder.mkdir()
    folder.chmod(0o777)
    actual = looked_at("local", root)["kernel cache"]
    assert actual.value == "none: each process compiles its kernels again"
    assert f"let {folder} be a folder that only its owner can write" in actual.advice


def test_a_missing_program(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the engine calls must be on the path, or the exit code is 1."""
    monkeypatch.setenv("PATH", str(root))
    assert looked_at("slurm", root)["sbatch"].is_fatal
    assert main(["doctor", "--engine", "ssh"]) == 1
    assert "! engine ssh calls it: put it on the path" in capsys.readouterr().out


def test_versions_of_cuda(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is the one that nvidia-smi names, which also says what is free. Tables may take of that what
    servers would give them. A machine with a GPU but no numba-cuda gets advice."""
    installed = {"cuda-toolkit": "13.5.0", "numba-cuda": "0.30.4"}

    def version(package: str) -> str:
        if package not in installed and package in ("cuda-toolkit", "numba-cuda"):
            raise PackageNotFoundError
        return installed.get(package, "1.0")

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setenv("PATH", str(root))
    assert looked_at("local", root)["CUDA"].value == (
        "no driver, cuda-toolkit 13.5.0, numba-cuda 0.30.4"
    )
    program = root / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in\n*name) echo NVIDIA H100;;\n"
        "*total) echo 65536, 81920;;\n*) echo 580.65.06;;\nesac\n"
    )
    program.chmod(0o755)
    del installed["numba-cuda"]
    actual = looked_at("local", root)
    assert actual["GPUs"].value == "NVIDIA H100"
    assert actual["GPU memory"].value == "64.0 of 80.0 GiB free, 56.0 for the tables of a server"
    monkeypatch.setenv("PSFLEET_DEVICE_MEMORY", "40G")
    assert looked_at("local", root)["GPU memory"].value.endswith("40.0 for the tables of a server")
    assert actual["CUDA"].value == "driver 580.65.06, cuda-toolkit 13.5.0"
    assert "pip install '.[cuda]'" in actual["CUDA"].advice


def test_an_unknown_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused with the names of those that there are."""
    assert main(["doctor", "--engine", "cloud"]) == 2
    assert (
        "--engine is 'cloud'; it must be one of join, kubernetes, local" in capsys.readouterr().err
    )


def test_this_machine() -> None:
    """The command looks at everything, and a machine that runs these tests is fit."""
    process = ended([*PSFLEET, "doctor"], env=_environment())
    assert process.returncode == 0, process.stdout + process.stderr
    names = [line[:14].strip() for line in process.stdout.splitlines() if line[0] != " "]
    assert names == [
        *("versions", "clock", "open files", "memory", "huge pages", "kernel cache"),
        *("BLAS threads", "GPUs", "CUDA"),
    ]
    process = ended([*PSFLEET, "doctor", "--json"], env=_environment())
    document = [json.loads(line) for line in process.stdout.splitlines()]
    assert [one["name"] for one in document] == names
    assert {*document[0]} == {"name", "value", "advice", "is_fatal"}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Lab]:
    """Two machines with a cable each."""
    has("doctor", (), "iproute2")
    with laboratory(tmp_path) as laboratory_machines:
        yield laboratory_machines


def started(lab: Lab, number: int, seconds: float = 300) -> "subprocess.Popen[str]":
    """The check on one of the machines, from 1 on."""
    command = [*PSFLEET, "doctor", "--peers", ",".join(PEERS), "--wait", str(seconds)]
    return subprocess.Popen(
        [*lab.within(number), *command], env=_environment(), text=True, stdout=subprocess.PIPE
    )


def test_machines_that_reach_each_other(machines: Lab) -> None:
    """Each tells how long a message to the other one takes."""
    checks = [started(machines, number) for number in (1, 2)]
    for check, other in zip(checks, reversed(PEERS), strict=True):
        out, _ = check.communicate()
        assert re.search(rf"^{other} +\d+\.\d\d ms there and back$", out, re.MULTILINE), out
        assert check.returncode == 0


def test_a_machine_that_cannot_be_reached(machines: Lab) -> None:
    """It is named, with what to open."""
    machines.cut("beta")
    check = started(machines, 1, 0.1)
    out, _ = check.communicate()
    assert re.search(rf"^{PEERS[1]} +cannot be reached: ", out, re.MULTILINE), out
    assert f"open connections to {PEERS[1]}, port 7164 and others" in out
    assert check.returncode == 1


def test_a_port_that_is_blocked_in_one_direction() -> None:
    """A machine that is reached and has not come is told of."""
    own_net = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"  # where nobody else listens
    hosts = [f"{own_net}.{number}" for number in (1, 2)]
    with PeerCheck(hosts, 7164, 0.0) as own, PeerCheck(hosts, 7164, 0.0):
        actual = list(own.findings())
    assert [one.name for one in actual] == [hosts[1]] * 2
    assert [one.is_fatal for one in actual] == [False, True]
    assert actual[1].value == f"has not reached {hosts[0]}"


def test_peers_must_name_this_machine() -> None:
    """Nothing is checked where that is not known."""
    with pytest.raises(
        ConfigError, match=r"--peers is '192\.0\.2\.1'; none of them is this machine"
    ):
        PeerCheck(["192.0.2.1"], 7164, 0.0)
