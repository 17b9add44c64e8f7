"""Runs the state machines of a server: the shard's lock and clock, and the threads that call other servers.

Start with `shard_host`, which every call passes through. On server 0 `view_changes` makes the coordinator's
calls to the servers. `server_scaling` (server 0) and `row_moves` (every server) change the number of servers.
"""
