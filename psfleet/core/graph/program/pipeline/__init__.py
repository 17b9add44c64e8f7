"""Pipelines: a step's program cut into chunks that stage processes run on micro-batches."""
