"""Trains the model with Momentum in a PipelineOptimizer, under whatever the strategy puts around it.

Arguments: where to save the weights, the losses and what state_dict() has in the last stage.
"""

import sys
from typing import Any

import numpy as np

from psfleet import fleet, optimizer
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.graph.execution.executor import Executor
from tests.pipeline.conftest import build_model, make_feed


def main(out: str) -> None:
    """Train 4 steps; the state is saved by the last stage."""
    fleet.init()
    model = build_model()
    chosen = optimizer.PipelineOptimizer(optimizer.Momentum(0.05, 0.9), model.cuts)
    trained = fleet.distributed_optimizer(chosen)
    _, pairs = trained.minimize(model.loss)
    executor, losses = Executor(), []
    for step in range(4):
        (loss,) = executor.run(feed=make_feed(seed=step), fetch_list=[model.loss])
        losses.append(loss)
    fleet.barrier_worker()
    state: dict[str, Any] = {
        f"state {name}": value
        for name, value in trained.state_dict().items()
        if ".dgc_" not in name and not isinstance(value, dict)
    }
    weights = {p.name: p.lookup(np.arange(50)) if p.sparse else p.numpy() for p, _ in pairs}
    here = read_environment()
    fleet.barrier_worker()
    if here.rank == 0 and here.stage == here.stages - 1:
        np.savez(out, losses=np.array(losses), **weights, **state)


if __name__ == "__main__":
    main(sys.argv[1])
