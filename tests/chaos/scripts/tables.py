"""A plain client with three tables, each step one pull and one push, in the mode that it is told."""

import sys
import time

import numpy as np

import psfleet
from psfleet.optimizer import SGD, Adam

STEPS = 80

with psfleet.connect(mode=sys.argv[1]) as ps:
    users = ps.sparse_table("users", dim=4, optimizer=Adam(0.01))
    items = ps.sparse_table("items", dim=3, optimizer=SGD(0.1))
    bias = ps.dense_table("bias", np.zeros(50), optimizer=Adam(0.01))
    dice = np.random.default_rng(ps.worker_index)
    for _ in range(STEPS):
        ids, others = dice.integers(0, 500, 40), dice.integers(0, 90, 40)
        values = ps.pull({users: ids, items: others, bias: None})
        slope = dice.standard_normal(50)
        ps.push(
            {
                users: (ids, 0.1 * values[users] + slope[:4]),
                items: (others, 0.1 * values[items] + slope[:3]),
                bias: 0.1 * values[bias] + slope,
            }
        )
        time.sleep(0.03)  # long enough to meet some faults
    ps.barrier()
