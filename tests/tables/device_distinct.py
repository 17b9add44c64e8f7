"""Run in a process of its own, under the simulator or on a GPU: ids are distinct as `dedup` has them.

python -m tests.tables.device_distinct
"""

import sys

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.kernels.device.cuda_launch import to_device
from psfleet.core.engine.kernels.device.cuda_queue import DeviceQueue
from psfleet.core.engine.kernels.hashing import ids_of
from psfleet.core.engine.tables.device.device_distinct import DistinctIds

LENGTHS = (0, 1, 2, 3, 4, 5, 16, 17, 300) + (() if SIMULATED else (4096, 65_536))


def batches(length: int, seed: int) -> list[NDArray[np.int64]]:
    """Batches of this length: one id, all distinct, few, many, and ids that collide in a hash table."""
    dice = np.random.default_rng(seed)
    edges = np.array([0, -1, 1, 2**63 - 1, -(2**63)])
    colliding = ids_of(np.arange(1, length + 2, dtype=np.uint64) << np.uint64(40))
    return [
        np.zeros(length, np.int64),
        dice.permutation(length).astype(np.int64) - length // 2,
        dice.choice(np.append(edges, np.arange(9)), length),
        dice.zipf(1.2, length).astype(np.int64),
        dice.choice(colliding[: max(length // 2, 1)], length),
    ]


def is_distinct(finder: DistinctIds, queue: DeviceQueue, ids: NDArray[np.int64]) -> bool:
    """Whether distinct ids, their order and their codes are the host's."""
    unique, codes = finder.find(to_device(ids.view(np.uint64)))
    expected = dedup(ids, 1)
    same_ids = (queue.read(unique).view(np.int64) == expected.unique[0]).all()
    return len(unique) == len(expected.unique[0]) and bool(
        same_ids and (queue.read(codes) == expected.inverse).all()
    )


def is_right() -> bool:
    """Whether that holds for batches of many lengths, with scratch memory that is used again."""
    queue = DeviceQueue()
    finder, wrong, count = DistinctIds(queue), [], 0
    for seed, length in enumerate((*LENGTHS, *LENGTHS[::-1])):
        for number, ids in enumerate(batches(length, seed)):
            count += 1
            if not is_distinct(finder, queue, ids):
                wrong.append(f"batch {number} of {length}")
    print(f"{count} batches of ids, wrong: {wrong}")
    return not wrong


if __name__ == "__main__":
    sys.exit(not is_right())
