"""What two workers of a job get from the reference's helpers, written to a file for each."""

import json
import sys
from pathlib import Path

import numpy as np

import psfleet.fleet as fleet
import psfleet.fluid as fluid

fleet.init()
index = fleet.worker_index()
own = Path(f"part-{index}.txt")
own.write_text("".join(f"1 {i} 2 {i}.5 -1e-3\n" for i in range(5 * index, 5 + 7 * index)))
dataset = fleet.InMemoryDataset()
x = fluid.layers.data("x", [1], dtype="int64")
y = fluid.layers.data("y", [2])
dataset.init(batch_size=4, thread_num=1, use_var=[x, y], pipe_command="cat", input_type=0)
dataset.set_filelist([str(own)])
dataset.preload_into_memory()
dataset.wait_preload_done()
before = dataset.get_memory_data_size(fleet)
dataset.global_shuffle(fleet)
batches = list(dataset)
first = [int(i) for batch in batches for i in batch["x"][:, 0]]
second = [float(v) for batch in batches for v in batch["y"][:, 0]]
dataset.global_shuffle(seed=3)
count = np.array([index + 1])
found = {
    "gathered": [value.tolist() for value in fleet.util.all_gather(np.array([index, 7]))],
    "numbers": [int(value) for value in fleet.util.all_gather(index + 1)],
    "before": before,
    "after": dataset.get_shuffle_data_size(),
    "ids": first,
    "values": second,
    "again": [int(i) for batch in dataset for i in batch["x"][:, 0]],
    "sum": fleet.metrics.sum(np.array([[1.5, index]])).tolist(),
    "max": fleet.metrics.max(np.array([index, -index])).tolist(),
    "min": fleet.metrics.min(np.array([index, -index])).tolist(),
    "auc": fleet.metrics.auc([0, index, 1, 2], [2, 1, 1 - index, 0]),
    "mae": fleet.metrics.mae([3.0 * index], count),
    "mse": fleet.metrics.mse([12.0], count),
    "rmse": fleet.metrics.rmse([6.0], count),
    "acc": fleet.metrics.acc(index, count),
}
Path(sys.argv[1], f"{index}.json").write_text(json.dumps(found))
fleet.stop_worker()
