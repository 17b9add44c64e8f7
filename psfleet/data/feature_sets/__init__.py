"""Features of a model: what they are, the ids of a batch, and their look-up in one call."""
