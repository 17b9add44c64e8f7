"""Runtimes of a training process: how a script reaches its tables, in this process or in a cluster.

A runtime pulls, pushes and saves. `embedded_runtime.py` keeps the tables in this process; the runtime of a
cluster is in the package `psfleet_worker`. `process_runtime.py` has the runtime that the process uses.
`modes/` is the worker's part of the consistency modes, `strategy/` reads the settings of a job,
`dataset_pass.py` is a loop over a dataset, and `stages.py` runs a pipeline.

Start with `process_runtime.py`, then `embedded_runtime.py`.

Uses checkpoint, core.base, core.engine, core.net, data.
"""
