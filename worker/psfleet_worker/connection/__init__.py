"""Calls from a worker to the servers of its fleet, with or without shared memory.

Start with `connection`, which owns the rest. `server_client` makes the calls to one server and `call`
explains which thread does; `request` lays tensors out, and `tensor_memory` shares memory with servers on
the same host.
"""
