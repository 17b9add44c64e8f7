"""The state machine of one shard: events in, instructions out; no I/O, no thread, no clock.

Read shard.py first, then events.py, then rounds.py (sync mode) and shard_state.py (the other modes).
"""
