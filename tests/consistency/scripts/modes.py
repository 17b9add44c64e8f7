"""A trainer script that changes the mode on its way. Usage: modes.py OUT: test losses go to OUT."""

import sys

import numpy as np

import psfleet as ps
from psfleet import fleet, layers, optimizer
from psfleet.runtime.process_runtime import active
from tests.click_model import ClicksWorkload

MODES = [("async", {}), ("geo", {"k_steps": 2}), ("sync", {}), ("half-async", {}), ("ssp", {})]
STEPS, JOB = 16, ClicksWorkload()


def main() -> None:
    strategy = fleet.DistributedStrategy(gradient_merge=True)
    strategy.gradient_merge_configs = {"k_steps": 2, "avg": True}
    fleet.init(strategy=strategy)
    ids = layers.data("ids", [None, JOB.fields], dtype="int64")
    numbers = layers.data("numbers", [None, JOB.numbers])
    label = layers.data("label", [None, 1])
    rows = layers.embedding(ids, size=[None, 1], is_distributed=True, name="items")
    logit = layers.fc(numbers, 1) + layers.reduce_sum(rows, dim=1)
    loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
    test = ps.default_main_program().clone(for_test=True)
    fleet.distributed_optimizer(optimizer.Adagrad(0.3)).minimize(loss)
    executor = ps.Executor()

    def feed(dice: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        samples = JOB.samples(dice, count)
        return {"ids": samples[0], "numbers": samples[1], "label": samples[2][:, None]}

    dice, losses = np.random.default_rng(fleet.worker_index()), []
    unseen = feed(np.random.default_rng(99), 4000)
    for mode, settings in [("", {}), *MODES]:
        if mode:
            fleet.set_mode(mode, **settings)
        expected = mode or "ssp"
        assert {server["mode"] for server in active().stats()} == {expected}, expected
        for _ in range(STEPS):
            executor.run(feed=feed(dice, 64), fetch_list=[loss])
        fleet.barrier_worker()
        losses.append(float(executor.run(test, feed=unseen, fetch_list=[loss])[0]))
        fleet.barrier_worker()
    if fleet.is_first_worker():
        assert sum(fleet.staleness().values()) > 0
        np.save(sys.argv[1], losses)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
