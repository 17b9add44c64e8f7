"""A script in the reference's form: the servers run it too."""

import numpy as np

import psfleet
from psfleet import fleet

fleet.init()
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    print(f"server {fleet.server_index()} has served")
else:
    with psfleet.connect() as ps:
        table = ps.sparse_table("t", dim=2, optimizer=psfleet.optimizer.SGD(1.0))
        table.push(np.arange(3), np.ones((3, 2), np.float32)).wait()
    print(f"worker {fleet.worker_index()} of {fleet.worker_num()} has trained")
