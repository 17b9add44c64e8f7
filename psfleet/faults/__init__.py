"""Faults by name and seed: crash points, and errors of the network."""
