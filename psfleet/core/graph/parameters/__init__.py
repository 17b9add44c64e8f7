"""Trainable arrays: their definition, initial values, gradients and tables."""
