"""Programs: a graph of operations that is built once and run for each batch.

`program/` has variables, operations with their gradients, recompute and pipelines. `parameters/` binds
trainable arrays to tables. `execution/` runs a program and writes inference models. Programs compute with
NumPy, so that they train where PyTorch is not installed.

Start with `program/operation.py`, then `program/run.py`, then `execution/executor.py`.

Uses checkpoint, core.base, core.engine, core.net, core.runtime, data, initializer, metrics, regularizer.
"""
