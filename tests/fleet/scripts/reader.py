"""Reads tables of a running job again and again. Arguments: its endpoints, the tables' names, how often."""

import sys
import time

import numpy as np

import psfleet

ps = psfleet.connect(job=sys.argv[1])
tables = {ps.sparse_table(name): np.arange(-50, 150) for name in sys.argv[2].split()}
for _ in range(int(sys.argv[3])):
    ps.pull(tables)
    assert ps.version is not None
    print("read", ps.version.steps, flush=True)
    time.sleep(0.002)  # the job is to have the cores
