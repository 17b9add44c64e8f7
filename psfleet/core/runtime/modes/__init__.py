"""A worker's own part in the consistency modes, around the runtime of a cluster."""
