"""Calls from a worker to the servers of its fleet, with or without shared memory.

Start with `connection`, which owns the other parts. `server_client` makes the calls to one server, and `call`
explains in which thread. `request` lays out tensors, and `tensor_memory` shares memory with servers on the
same host.
"""
