"""Transforms of features, which convert raw values to numbers and ids. docs/transforms.md describes them.

To understand the code, begin with transform.py, which has the base classes. Numbers are transformed with
NumPy, and texts in Python. A kernel hashes texts. docs/decisions/0034-transforms-without-arrow.md says why
pyarrow.compute is not used.
"""
