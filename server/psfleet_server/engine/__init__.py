"""The shard at work: its lock, clock and memory, and the threads around it."""
