"""Compiled arithmetic: dedup and merge, first values, and each rule's dense and sparse kernels."""
