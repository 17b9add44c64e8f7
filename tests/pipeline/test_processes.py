"""Stages as processes, started by the real launcher, with real servers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.conftest import Launch, launch
from tests.pipeline.conftest import finished, saved_bits

__all__ = ["launch"]

SCRIPT = str(Path(__file__).parent / "scripts" / "trainer.py")
ROOT = Path(__file__).resolve().parents[2]
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the script trains by itself: one process, no cluster, 4 micro-batches."""
    out = tmp_path_factory.mktemp("alone") / "out.npz"
    strategy = json.dumps({"pipeline": {"micro_batches": 4}})
    subprocess.run(
        [sys.executable, SCRIPT, str(out), "plain", "4"],
        check=True,
        timeout=120,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PSFLEET_STRATEGY": strategy, "PYTHONPATH": str(ROOT)},
    )
    return saved_bits(out)


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        ("cut", "--pipeline zero-bubble --stages 3 --servers 2"),
        ("plain", "--pipeline interleaved --stages 2 --recompute"),
        ("loss", "--pipeline 1f1b --stages 2"),  # the second stage reads no parameter
    ],
)
def test_stage_processes_give_the_bits_of_one(
    alone: dict[str, bytes], launch: Launch, tmp_path: Path, wrapper: str, options: str
) -> None:
    """Losses and weights of 4 steps equal those of the script run by itself, in every bit."""
    out = tmp_path / "out.npz"
    finished(launch, f"--micro-batches 4 {options}", SCRIPT, str(out), wrapper, "4")
    assert saved_bits(out) == alone


def test_two_workers_of_two_stages(launch: Launch, tmp_path: Path) -> None:
    """Workers average as without stages, also with recompute and gradient merge from a file."""
    strategy = tmp_path / "strategy.toml"
    strategy.write_text(
        '[consistency]\nmode = "sync"\n[gradient_merge]\nk_steps = 2\n[recompute]\n'
        "[pipeline]\nmicro_batches = 4\n"
    )
    digests = []
    for stages in ("1", "2"):
        out = tmp_path / f"{stages}.npz"
        options = f"--workers 2 --strategy {strategy} --stages {stages}"
        finished(launch, options, SCRIPT, str(out), "plain", "4")
        digests.append(saved_bits(out))
    assert digests[0] == digests[1]


def test_copies_of_a_stage_take_micro_batches_in_turn(launch: Launch, tmp_path: Path) -> None:
    """Two workers of two stages, the second with two processes: the same but for rounding."""
    digests = []
    for name, copies in (("one", ""), ("two", "copies = [1, 2]\n")):
        strategy = tmp_path / f"{name}.toml"
        strategy.write_text(f"[pipeline]\nstages = 2\nmicro_batches = 4\n{copies}")
        out = tmp_path / f"{name}.npz"
        options = f"--workers 2 --strategy {strategy}"
        job = finished(launch, options, SCRIPT, str(out), "sgd", "4")
        assert bool(job.log("workerlog.1.stage.1.copy.1")) == (name == "two")
        with np.load(out) as arrays:
            digests.append(dict(arrays))
    for key, value in digests[0].items():
        np.testing.assert_allclose(value, digests[1][key], rtol=1e-4, atol=1e-6, err_msg=key)


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
