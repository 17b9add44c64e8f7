"""Transforms of features: what turns raw values into numbers and ids, as docs/features.md describes.

Start with transform.py, which has the base classes. NumPy transforms numbers, Python transforms texts, and a
kernel hashes texts. docs/decisions/0034-transforms-without-arrow.md says why pyarrow.compute does none of it.
"""
