"""Samples: readers of files and topics, the batches made of them, and features with their transforms.

A reader gives rows with positions, so that a job resumes where it stopped and each worker has its own
share. `feature_sets/` turns a batch into ids and numbers; `feature_sets/value_types.py` judges each value,
whichever way it came.

Start with `batches.py` (the interface of a source), then `parquet.py`, then `feature_sets/feature_set.py`.

Uses core.base, core.engine, initializer.
"""
