"""The parameter server without I/O: no socket, no thread, no clock.

`rules/` has each optimizer as a scalar function, `kernels/` compiles them for the CPU and for CUDA,
`tables/` holds rows and their optimizer state, `schema/` defines a table, and `shard/` orders pushes and
pulls. A server, an embedded run and the random schedules of the tests drive the same shard.
`runtime_interface.py` says what a script can ask of its tables.

Start with `rules/adam.py`, then `tables/sparse.py`, then `shard/shard.py`.

Uses core.base.
"""
