"""A script's way to its tables: which runtime a process has, and what stands in front of it.

A runtime pulls, pushes and saves. `embedded_runtime.py` has its shard in this process; `psfleet_worker` has
the one of a cluster. `process_runtime.py` holds the runtime that a process uses. `modes/` is what a
consistency mode does in the worker, `strategy/` reads the settings of a job, `dataset_pass.py` is one loop
over a dataset, `stages.py` is the place of a process in a pipeline, and `chaos/` injects faults under
`--chaos`.

Start with `process_runtime.py`, then `embedded_runtime.py`.

Uses checkpoint, core.base, core.engine, core.net, data.
"""
