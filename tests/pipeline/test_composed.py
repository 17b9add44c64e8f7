"""Wrappers and strategies in one job: the same bits on stages as in one process."""

import tomllib
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, launch
from tests.pipeline.conftest import alone, finished, saved_bits

__all__ = ["launch"]

SCRIPT = Path(__file__).parent / "scripts" / "composed.py"


@pytest.mark.parametrize(
    "more", ["[dgc]\nsparsity = [0.75]\n", "[lars]\n[amp]\n"], ids=["dgc", "lars, amp"]
)
def test_everything_around_one_optimizer(launch: Launch, tmp_path: Path, more: str) -> None:
    """Recompute, pipeline, merge and a switch of the rule, around Momentum that is in a
    PipelineOptimizer: weights, losses and the last stage's whole state_dict are those of one process."""
    asked = "[gradient_merge]\nk_steps = 2\n[recompute]\n" + more
    expected = alone(tmp_path / "alone.npz", SCRIPT, **tomllib.loads(asked))
    strategy, out = tmp_path / "strategy.toml", tmp_path / "out.npz"
    sync = '[consistency]\nmode = "sync"\n[pipeline]\nmicro_batches = 4\nstages = 3\n'
    strategy.write_text(sync + asked)
    finished(launch, f"--strategy {strategy}", str(SCRIPT), str(out))
    assert saved_bits(out) == expected
    assert any(name.startswith("state deep") for name in expected)


def test_a_script_that_updates_at_once_is_refused_on_stages(launch: Launch, tmp_path: Path) -> None:
    """Each stage would train the whole of it: a sentence says what to do instead."""
    script = tmp_path / "eager.py"
    script.write_text(
        "import numpy as np, psfleet as ps\n"
        "from psfleet import fleet, optimizer\n"
        "fleet.init()\n"
        "w = ps.Parameter('w', [4])\n"
        "sgd = fleet.distributed_optimizer(optimizer.SGD(0.1, parameters=[w]))\n"
        "w.grad = np.ones(4, np.float32)\n"
        "sgd.step()\n"
    )
    code, _, err = launch("--no-progress", "--stages", "2", str(script)).ends()
    assert code == 1
    assert "updates at once by computed gradients, and this is worker 0 stage" in err
