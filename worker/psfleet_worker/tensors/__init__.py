"""Pushes and pulls of a worker's tensors: split by server, sent in the order of its stream, and joined again.

Start with `transfers`, then `push_queue`, which explains the life of a push. `whole_tables` reads and writes
whole tables.
"""
