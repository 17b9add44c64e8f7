"""Training data: readers of files and topics, the batches that they yield, and features with their
transforms.

A reader gives each sample a position. With positions a job continues where it stopped, and each worker gets
a share of its own. `feature_sets/` turns the values of a batch into ids and numbers.
`feature_sets/value_types.py` decides what a value means, in files, messages and requests alike.

`parquet.py`, `text_files.py` and `record_batches.py` hold one format each: which row groups the data has, and
how one of them is read. `row_groups.py` has what all formats share.

To understand the code, begin with `batches.py` (the interface of a data source), then read `parquet.py` and
`feature_sets/feature_set.py`.

Uses core.base, core.engine, initializer.
"""
