"""Stages as processes, started by the real launcher, with real servers."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.conftest import Launch, launch
from tests.pipeline.conftest import alone, finished, saved_bits

__all__ = ["launch"]

SCRIPT = str(Path(__file__).parent / "scripts" / "trainer.py")
ROOT = Path(__file__).resolve().parents[2]
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the script trains by itself."""
    return alone(tmp_path_factory.mktemp("alone") / "out.npz", SCRIPT, "plain", "4")


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        ("cut", "--pipeline zero-bubble --stages 3 --servers 2"),
        ("plain", "--pipeline interleaved --stages 2 --recompute"),
        ("loss", "--pipeline 1f1b --stages 2"),  # the second stage reads no parameter
    ],
)
def test_stage_processes_give_the_bits_of_one(
    expected: dict[str, bytes], launch: Launch, tmp_path: Path, wrapper: str, options: str
) -> None:
    """Losses and weights of 4 steps equal those of the script run by itself, in every bit."""
    out = tmp_path / "out.npz"
    finished(launch, f"--micro-batches 4 {options}", SCRIPT, str(out), wrapper, "4")
    assert saved_bits(out) == expected


def test_two_workers_of_two_stages(launch: Launch, tmp_path: Path) -> None:
    """Workers average as without stages, also with recompute and gradient merge from a file. Two processes
    of the second stage take micro-batches in turn: the same but for rounding."""
    results = []
    for name, stages in (("one", 1), ("two", 2), ("copies", "2\ncopies = [1, 2]")):
        strategy, out = tmp_path / f"{name}.toml", tmp_path / f"{name}.npz"
        strategy.write_text(
            '[consistency]\nmode = "sync"\n[gradient_merge]\nk_steps = 2\n[recompute]\n'
            f"[pipeline]\nmicro_batches = 4\nstages = {stages}\n"
        )
        job = finished(launch, f"--workers 2 --strategy {strategy}", SCRIPT, str(out), "sgd", "4")
        assert bool(job.log("workerlog.1.stage.1.copy.1")) == (name == "copies")
        with np.load(out) as arrays:
            results.append(dict(arrays))
    for key, value in results[0].items():
        np.testing.assert_array_equal(results[1][key], value)
        np.testing.assert_allclose(results[2][key], value, rtol=1e-4, atol=1e-6, err_msg=key)


def test_a_killed_stage_is_named_and_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    """The launcher says which stage it was; nothing is left running. Only servers come back from logs."""
    options = ["--durability", "log", "--stages", "2", "--micro-batches", "4"]
    words = [SCRIPT, str(tmp_path / "out.npz"), "plain", "100000"]
    job = launch("--no-progress", *options, *words)
    job.until_logged("workerlog.0.stage.1", "step 3")
    [pid] = [pid for pid in job.family() if "PSFLEET_STAGE=1" in _variables(pid)]
    os.kill(pid, signal.SIGKILL)
    code, _, err = job.ends()
    assert code == 128 + signal.SIGKILL
    assert "worker 0 stage 1 failed first: killed by SIGKILL" in err


def _variables(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")
