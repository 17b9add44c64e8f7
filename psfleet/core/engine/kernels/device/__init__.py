"""Kernels of a CUDA device, and the queue of its work."""
