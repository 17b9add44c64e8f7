"""One trainer script, run in every way there is, ends with the same bits."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.programs import ended

SCRIPT = Path(__file__).parent / "scripts" / "trainer.py"
LAUNCH = [sys.executable, "-m", "psfleet_launch"]

Weights = dict[str, NDArray[np.float32]]
Train = Callable[..., Weights]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs the script with these launcher options (none: embedded); remembers what came out."""
    known: dict[tuple[str, ...], Weights] = {}

    def run(*options: str) -> Weights:
        if options not in known:
            folder = tmp_path_factory.mktemp("run")
            command = (
                [sys.executable]
                if not options
                else [*LAUNCH, *options, "--log-dir", str(folder), "--no-progress"]
            )
            process = ended([*command, str(SCRIPT), str(folder / "out.npz")])
            assert process.returncode == 0, process.stdout + process.stderr
            with np.load(folder / "out.npz") as arrays:
                known[options] = dict(arrays)
        return known[options]

    return run


def cluster(servers: int, workers: int, *more: str) -> tuple[str, ...]:
    return ("--servers", str(servers), "--workers", str(workers), *more)


def assert_same_bits(first: Weights, second: Weights) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name


def test_embedded_equals_one_server_and_one_worker(train: Train) -> None:
    """`python script.py` and a cluster of one and one give the same bits. (Any number of servers:
    tests/cluster/test_bits.py.)"""
    assert_same_bits(train(), train(*cluster(1, 1, "--async")))


def test_two_workers_equal_one_with_the_doubled_batch(train: Train) -> None:
    """Sync mode averages: two workers with half of each batch take the steps of one with all of it."""
    one, two = train(), train(*cluster(3, 2, "--sync", "--tcp"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        difference = np.linalg.norm(value - two[name])
        assert difference <= 1e-6 * np.linalg.norm(value), name
