"""`psfleet doctor` says how a machine is, and what to change."""

import subprocess
from pathlib import Path

import pytest

from psfleet_launch.agent.machine_checks import Finding, check_machine
from psfleet_launch.commands.psfleet_cli import main
from tests.agents.conftest import PSFLEET
from tests.launch.conftest import _environment

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
    return {one.name: one for one in check_machine(engine, root)}


def test_what_the_kernel_says(root: Path) -> None:
    """The container's limit counts where it is lower; advice names the number or the file."""
    found = looked_at("local", root)
    assert found["memory"].value == "0.5 GiB free of this container"
    assert "0.5 GiB beside its tables" in found["memory"].advice
    assert "echo madvise" in found["huge pages"].advice
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never\n")
    found = looked_at("local", root)
    assert (found["memory"].value, found["memory"].advice) == ("16.0 GiB free", "")
    assert (found["huge pages"].value, found["huge pages"].advice) == ("madvise", "")


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
    found = looked_at("local", root)["kernel cache"]
    assert found.value == "none: each process compiles its kernels anew"
    assert f"let {folder} be a folder that only its owner can write" in found.advice


def test_a_missing_program(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the engine calls must be on the path, or the exit code is 1."""
    monkeypatch.setenv("PATH", str(root))
    assert looked_at("slurm", root)["sbatch"].is_fatal
    assert main(["doctor", "--engine", "kubernetes"]) == 1
    assert "! engine kubernetes calls it: put it on the path" in capsys.readouterr().out


def test_an_unknown_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused with the names of those that there are."""
    assert main(["doctor", "--engine", "cloud"]) == 2
    assert (
        "--engine is 'cloud'; it must be one of join, kubernetes, local" in capsys.readouterr().err
    )


def test_this_machine() -> None:
    """The command looks at everything, and a machine that runs these tests is fit."""
    done = subprocess.run(
        [*PSFLEET, "doctor"], capture_output=True, text=True, check=False, env=_environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line[:14].strip() for line in done.stdout.splitlines() if line[0] != " "]
    assert names == [
        *("versions", "clock", "open files", "memory", "huge pages", "kernel cache"),
        *("BLAS threads", "GPUs"),
    ]
