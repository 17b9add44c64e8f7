"""A small trainer script under Momentum, for strategies; weights of every table go to OUT.npz.

Usage: strategies.py OUT. Worker 0 also writes the bytes that the servers have received as gradients
and pulls, and how the loss went.
"""

import sys

import numpy as np

import psfleet as ps
from psfleet import fleet, layers, optimizer
from psfleet.core.runtime.process_runtime import active

STEPS, BATCH = 13, 32


def main() -> None:
    fleet.init()
    ids = layers.data("ids", [None, 2], dtype="int64")
    numbers = layers.data("numbers", [None, 96])
    label = layers.data("label", [None, 1])
    rows = layers.reshape(
        layers.embedding(ids, size=[None, 4], is_distributed=True, name="rows"), [-1, 8]
    )
    hidden = layers.fc(layers.concat([rows, numbers], axis=1), 600, act="relu", name="hidden")
    logit = layers.fc(hidden, 1, name="logit")
    loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
    fleet.distributed_optimizer(optimizer.Momentum(0.05, 0.9)).minimize(loss)
    executor, losses = ps.Executor(), []
    rng = np.random.default_rng(fleet.worker_index())
    truth = np.random.default_rng(9).normal(size=(96, 1))
    for _ in range(STEPS + fleet.worker_index()):  # workers with unequal numbers of steps
        x = rng.normal(size=(BATCH, 96)).astype(np.float32)
        feed = {
            "ids": rng.integers(0, 50, (BATCH, 2)),
            "numbers": x,
            "label": (x @ truth > 0).astype(np.float32),
        }
        losses.append(float(executor.run(feed=feed, fetch_list=[loss])[0]))
    fleet.barrier_worker()
    if fleet.is_first_worker():
        states = {
            "losses": np.array(losses),
            "bytes": np.array(sum(server.get("bytes_in", 0) for server in active().stats())),
        }
        for key, spec in active().specs().items():
            state = active().read_table(key)
            states |= {f"{spec.name}.{slot}": values for slot, values in enumerate(state.values)}
            states[f"{spec.name}.step"] = np.array(state.step)
        np.savez(sys.argv[1], allow_pickle=False, **states)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
