"""Compiled arithmetic: dedup and merge, first values, and each rule's dense and sparse kernels.

Start with generate.py, which loads kernels; then hash_index.py, the index of a table, and sources/push.txt.
"""
