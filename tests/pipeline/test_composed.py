"""Wrappers and strategies in one job: the same bits on stages as in one process."""

from pathlib import Path

import pytest

from tests.launch.conftest import Launch, launch
from tests.pipeline.conftest import finished, saved_bits

__all__ = ["launch"]

SCRIPTS = Path(__file__).parent / "scripts"
_ALL = (
    '[consistency]\nmode = "sync"\n[pipeline]\nmicro_batches = 4\nstages = {stages}\n'
    "[gradient_merge]\nk_steps = 2\n[recompute]\n"
)


@pytest.mark.parametrize(
    "more", ["[dgc]\nsparsity = [0.75]\n", "[lars]\n[amp]\n"], ids=["dgc", "lars, amp"]
)
def test_everything_around_one_optimizer(launch: Launch, tmp_path: Path, more: str) -> None:
    """Recompute, pipeline, merge and a switch of the rule, around Momentum that is in a
    PipelineOptimizer: weights, losses and the last stage's whole state_dict are those of no stages."""
    digests = []
    for stages in (1, 3):
        strategy, out = tmp_path / f"{stages}.toml", tmp_path / f"{stages}.npz"
        strategy.write_text(_ALL.format(stages=stages) + more)
        finished(launch, f"--strategy {strategy}", str(SCRIPTS / "composed.py"), str(out))
        digests.append(saved_bits(out))
    assert digests[0] == digests[1]
    assert any(name.startswith("state deep") for name in digests[0])


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
