"""Models that predict with the values of a cut through the training."""
