"""What a worker does of its own in the consistency modes, around the runtime of a cluster."""
