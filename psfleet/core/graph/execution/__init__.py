"""Running programs: the executor, models for inference, and checkpoints of a fleet's tables."""
