"""Metrics of a job, and the panels that are made of them."""
