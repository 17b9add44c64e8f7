"""State machine of one shard, one server's part of all tables: events in, instructions out, no I/O.

Read shard.py first, then events.py, then rounds.py (sync mode) and shard_state.py (the other modes).
"""
