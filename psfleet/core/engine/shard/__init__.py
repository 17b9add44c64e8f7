"""The pure state of one shard: events in, instructions out; no I/O, no thread, no clock."""
