"""Trainable arrays: their definition, first values, gradients and tables."""
