"""A parameter server for a plain NumPy script: logistic regression on a stream of sparse samples.

python examples/numpy_client.py                                   # embedded, one process
psfleet-launch --servers 2 --workers 2 examples/numpy_client.py   # two scripts, one model
"""

import numpy as np

import psfleet
from psfleet.optimizer import Adagrad, Adam

STEPS, BATCH, FIELDS = 200, 256, 5


def main() -> None:
    with psfleet.connect() as ps:  # embedded, or the cluster that the environment names
        weights = ps.sparse_table("weights", dim=1, optimizer=Adagrad(0.3))
        bias = ps.dense_table("bias", np.zeros(1), optimizer=Adam(0.05))
        rng = np.random.default_rng(ps.worker_index)  # each worker has samples of its own
        loss = 0.0
        for step in range(1, STEPS + 1):
            ids = (
                rng.integers(-(2**63), 2**63, (BATCH, FIELDS)) >> 53
            )  # 1,024 ids, any int64 will do
            label = (ids.sum(axis=1) > 0).astype(np.float32)
            now = ps.pull({weights: ids, bias: None})  # both in one call
            p = 1 / (1 + np.exp(-now[weights].sum(axis=(1, 2)) - now[bias]))
            error = ((p - label) / BATCH).astype(np.float32)
            slopes = np.repeat(error, FIELDS)[:, None]  # gradients of repeated ids are summed
            ps.push({weights: (ids.ravel(), slopes), bias: [error.sum()]})
            loss += 0.1 * (-np.log(np.where(label == 1, p, 1 - p)).mean() - loss)
            if step % 50 == 0 and ps.worker_index == 0:
                print(f"step {step}   loss {loss:.3f}", flush=True)
        ps.flush()  # every push so far is applied
        ps.barrier()  # and those of the other workers


if __name__ == "__main__":
    main()
