"""Kernels of a CUDA device, and the queue of its work. Start with cuda_queue.py."""
