"""Trains the model of conftest.py and saves all weights and the losses.

Arguments: where to save, what wraps the optimizer (cut, plain; loss: cut so that a stage has no
parameter; sgd: nothing wraps SGD without clipping), and the number of steps.
"""

import sys
from typing import Any

import numpy as np

from psfleet import clip, fleet, optimizer
from psfleet.core.graph.execution.executor import Executor
from tests.pipeline.conftest import build_model, make_feed

seen: list[Any] = []


def check_fresh(weights: list[Any]) -> None:
    """What a process sees of weights, its own stage's or another's, must change with each step."""
    assert all((now != before).any() for now, before in zip(weights, seen, strict=False))
    seen[:] = weights


def main(out: str, wrapper: str, steps: int) -> None:
    """Train."""
    fleet.init()
    model = build_model()
    adam = optimizer.Adam(0.01, grad_clip=clip.ClipGradByGlobalNorm(0.02))
    wrapped = {
        "cut": optimizer.PipelineOptimizer(adam, model.cuts),
        "loss": optimizer.PipelineOptimizer(adam, [[model.guess], [model.loss]]),
        "plain": adam,
        "sgd": optimizer.SGD(0.1),
    }
    chosen = wrapped[wrapper]
    _, pairs = fleet.distributed_optimizer(chosen).minimize(model.loss)
    executor = Executor()
    losses = []
    for step in range(steps):
        feed = make_feed(seed=1000 * fleet.worker_index() + step)
        (loss,) = executor.run(feed=feed, fetch_list=[model.loss])
        losses.append(loss)
        if wrapper == "cut":
            check_fresh([p.numpy().copy() for p, _ in pairs if not p.sparse])
        print(f"step {step}", flush=True)
    fleet.barrier_worker()
    weights = {p.name: p.lookup(np.arange(50)) if p.sparse else p.numpy() for p, _ in pairs}
    total = fleet.util.all_reduce(np.ones(1, np.float32))
    if fleet.is_first_worker():
        np.savez(out, losses=np.array(losses), workers=total, **weights)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
