"""Optimizers on a cluster do what they do embedded, to the bit."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.optimizer.test_state import MAKERS, three, train, weights
from tests.optimizer.workers import run_two_workers

# They do some work in the worker, have state of their own, or need whole parameters or rows.
NAMES = ["Adam of a schedule", "Adam, catch-up", "DGCMomentum", "LookAhead"]
NAMES += ["Lamb", "ASGD", "RowWiseAdagrad"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterRuntime]:
    """The only worker of a fleet with 2 servers, sync."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "sync")
        yield runtime
        runtime.close()


def outcome(runtime: Any, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Weights and state after training in a runtime, state set in the middle of it."""
    current().use(runtime)
    first, second = MAKERS[name](), MAKERS[name]()
    them = three(name)
    train(first, them, range(3))
    second.set_state_dict(first.state_dict())
    train(second, them, range(3, 6))
    return weights(them), second.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_same_bits(name: str, cluster: ClusterRuntime) -> None:
    """Weights and state are those of the embedded run: dense, by rows, and with rows for any id."""
    actual, state = outcome(cluster, name)
    expected, expected_state = outcome(EmbeddedRuntime(), name)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(state) == set(expected_state)
    for key, value in state.items():
        np.testing.assert_array_equal(value, expected_state[key])


SCRIPT = """
import hashlib, sys
import numpy as np
from psfleet import fleet, optimizer
from psfleet.core.graph.parameters.parameter import Parameter, SparseGrad

fleet.init()
w = Parameter("w", np.ones((3, 5)))
e = Parameter("e", np.arange(25).reshape(5, 5), sparse=True)
opt = fleet.distributed_optimizer(optimizer.LookAhead(optimizer.Adam(0.1), k=2))
rng = np.random.default_rng(0)
for step in range(5):
    both = [(rng.normal(size=(3, 5)), rng.integers(0, 5, 3)) for _ in range(2)]
    grad, ids = both[fleet.worker_index()]
    opt.apply_gradients([(w, grad), (e, SparseGrad(ids, grad.astype(np.float32)))])
    if step == 2:
        opt.set_state_dict(opt.state_dict())
values = np.concatenate([w.numpy(), e.numpy()])
print(hashlib.sha256(values.tobytes()).hexdigest())
fleet.stop_worker()
"""


def test_two_workers(tmp_path: Path) -> None:
    """Two workers that preload a table, look ahead and set state together end with one set of weights,
    and the same for any number of servers.
    """
    digests = {digest for servers in (1, 2) for digest in digests_of(tmp_path, servers)}
    assert len(digests) == 1
    assert len(digests.pop()) == len(hashlib.sha256().hexdigest())


def digests_of(folder: Path, servers: int) -> list[str]:
    """What each worker's process prints."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return run_two_workers(script, servers)
